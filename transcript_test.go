package idempotence

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// This file plays transcripts: one operation a line, and after an arrow what
// must come of it. Most rules are proved by them, since a list of what was said
// and what was answered is how the protocol is discussed.
//
//	batch pid=31 epoch=0 seq=0 n=3 -> OK base=0       Check, append, Commit
//	batch pid=31 epoch=0 seq=0 n=3 -> DUP base=0
//	check pid=31 epoch=0 seq=7 n=1 -> OUT_OF_ORDER expected=3 current=0
//	check pid=31 epoch=0 seq=3 n=1 -> OK #A           Check, and an append begins
//	commit #A base=3 -> OK                            it landed at 3
//	append-failed #A                                  it did not land
//	commit pid=31 epoch=0 seq=3 n=1 base=3 -> OK      Commit without a Check
//	advance to=9                                      records of nobody in particular
//	window pid=31 -> epoch=0 0..2@0 3..3@3            what is remembered, oldest first
//	window pid=32 -> none
//	end -> 9                                          EndOffset
//	producers -> 1                                    Len
//	highest-pid -> 31                                 MaxProducerID
//	stats -> accepted=2 duplicate=1 out-of-order=1 unknown=0 fenced=0 invalid=0
//
// The answers are OK, DUP, OUT_OF_ORDER, UNKNOWN_PRODUCER, STALE_EPOCH (fenced)
// and INVALID, and REFUSED with the reason after it for a Commit. The facts of a
// refusal (expected=, current=, first=) are compared where a line states them.
// Settings come first, one a line: mode=strict (the default), mode=accept and
// mode=new-log-strict are the policies for unknown producers.
//
// Whatever the line, the player audits the state after it, and where the answer
// is not OK it holds everything that can be looked at against what it was
// before: a refusal changes nothing, and neither does a duplicate or a Check.

// transcript is a transcript at play.
type transcript struct {
	t    *testing.T
	cfg  Config
	part *partition
	held map[string]inFlight
}

// inFlight is an append that has passed Check and has not ended.
type inFlight struct {
	batch Batch
}

// step is one line.
type step struct {
	verb  string
	args  map[string]string
	words []string // arguments without a value: txn, #A
	want  []string // nil where the line states no outcome
}

// verb is what a line can begin with.
type verb struct {
	play func(*transcript, step) string
	// changes says that the operation may change the state although it
	// answers something else than OK.
	changes bool
	// whole says that the outcome must be stated in full.
	whole bool
}

var verbs map[string]verb

func init() {
	verbs = map[string]verb{
		"batch":         {play: (*transcript).batch},
		"check":         {play: (*transcript).check},
		"commit":        {play: (*transcript).commit},
		"append-failed": {play: (*transcript).appendFailed},
		"advance":       {play: (*transcript).advance, changes: true},
		"window":        {play: (*transcript).window, whole: true},
		"end":           {play: (*transcript).end, whole: true},
		"producers":     {play: (*transcript).producers, whole: true},
		"highest-pid":   {play: (*transcript).highestPID, whole: true},
		"stats":         {play: (*transcript).stats, whole: true},
	}
}

var modes = map[string]UnknownProducerPolicy{
	"strict":         StartAtZero,
	"accept":         AcceptAny,
	"new-log-strict": StartAtZeroOnNewLog,
}

// play plays a transcript against a new manager and returns the partition as
// it is at the end.
func play(t *testing.T, text string) *partition {
	t.Helper()
	tr := &transcript{t: t, held: map[string]inFlight{}}
	played := 0
	for n, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || tr.setting(line) {
			continue
		}
		if tr.part == nil {
			tr.part = newPartition(tr.cfg)
		}
		if err := tr.line(line); err != nil {
			t.Fatalf("line %d: %s\n%v", n+1, line, err)
		}
		audit(t, tr.part.m)
		played++
	}
	if played == 0 {
		t.Fatal("nothing was played")
	}
	return tr.part
}

// setting takes a line that sets something and reports whether it was one.
func (tr *transcript) setting(line string) bool {
	if tr.part != nil {
		return false
	}
	name, ok := strings.CutPrefix(line, "mode=")
	if !ok {
		return false
	}
	mode, ok := modes[name]
	if !ok {
		tr.t.Fatalf("no such mode: %s", name)
	}
	tr.cfg.UnknownProducer = mode
	return true
}

// line plays one line and holds its outcome against the one it states.
func (tr *transcript) line(line string) error {
	s := parseStep(line)
	v, ok := verbs[s.verb]
	if !ok {
		return fmt.Errorf("no such operation: %q", s.verb)
	}
	before := stateOf(tr.part.m)
	got := v.play(tr, s)
	if err := s.compare(got, v.whole); err != nil {
		return err
	}
	if v.changes || (strings.HasPrefix(got, "OK") && s.verb != "check") {
		return nil
	}
	if diff := cmp.Diff(before, stateOf(tr.part.m)); diff != "" {
		return fmt.Errorf("it answered %s and changed the state (-before +after):\n%s", got, diff)
	}
	return nil
}

func parseStep(line string) step {
	op, want, stated := strings.Cut(line, "->")
	fields := strings.Fields(op)
	s := step{verb: fields[0], args: map[string]string{}}
	if stated {
		s.want = strings.Fields(want)
	}
	for _, f := range fields[1:] {
		if name, value, ok := strings.Cut(f, "="); ok {
			s.args[name] = value
		} else {
			s.words = append(s.words, f)
		}
	}
	return s
}

// compare holds an outcome against the one the line states: word for word, or
// everything stated must be true of it.
func (s *step) compare(got string, whole bool) error {
	words := strings.Fields(got)
	if s.want == nil {
		if got != "" && words[0] != "OK" {
			return fmt.Errorf("got %s", got)
		}
		return nil
	}
	same := slices.Equal(words, s.want)
	if !whole {
		same = words[0] == s.want[0] && !slices.ContainsFunc(s.want, func(w string) bool {
			return !strings.HasPrefix(w, "#") && !slices.Contains(words, w)
		})
	}
	if !same {
		return fmt.Errorf("got %s", got)
	}
	return nil
}

// number returns an argument that must be there.
func (tr *transcript) number(s step, name string) int64 {
	v, err := strconv.ParseInt(s.args[name], 10, 64)
	if err != nil {
		tr.t.Fatalf("%s: argument %s: %v", s.verb, name, err)
	}
	return v
}

func (tr *transcript) batchOf(s step) Batch {
	return Batch{
		ProducerID:    tr.number(s, "pid"),
		Epoch:         int16(tr.number(s, "epoch")),
		BaseSequence:  int32(tr.number(s, "seq")),
		Count:         int32(tr.number(s, "n")),
		Transactional: slices.Contains(s.words, "txn"),
	}
}

// handle returns the name, such as #A, among some words.
func handle(words []string) string {
	if i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "#") }); i >= 0 {
		return words[i]
	}
	return ""
}

// take ends an append in flight.
func (tr *transcript) take(s step) inFlight {
	name := handle(s.words)
	f, ok := tr.held[name]
	if !ok {
		tr.t.Fatalf("%s: nothing in flight under %q", s.verb, name)
	}
	delete(tr.held, name)
	return f
}

func (tr *transcript) batch(s step) string {
	res, err := tr.part.produce(tr.batchOf(s))
	return tr.answer(res, err)
}

func (tr *transcript) check(s step) string {
	b := tr.batchOf(s)
	res, err := tr.part.check(b)
	if name := handle(s.want); err == nil && name != "" {
		tr.held[name] = inFlight{batch: b}
	}
	return tr.answer(res, err)
}

func (tr *transcript) commit(s step) string {
	var b Batch
	if handle(s.words) != "" {
		b = tr.take(s).batch
	} else {
		b = tr.batchOf(s)
	}
	if err := tr.part.commit(b, tr.number(s, "base")); err != nil {
		return "REFUSED " + refusal(err)
	}
	return "OK"
}

// appendFailed ends an append that left nothing in the log. Between Check and
// Commit nothing was remembered of it, so there is nothing to undo.
func (tr *transcript) appendFailed(s step) string {
	tr.take(s)
	return ""
}

func (tr *transcript) advance(s step) string {
	tr.part.advance(tr.number(s, "to"))
	return ""
}

func (tr *transcript) window(s step) string {
	p, ok := tr.part.m.Producer(tr.number(s, "pid"))
	if !ok {
		return "none"
	}
	return describe(p)
}

// describe writes down what is remembered of a producer.
func describe(p ProducerState) string {
	words := []string{fmt.Sprintf("epoch=%d", p.Epoch)}
	for _, b := range p.Window {
		words = append(words, fmt.Sprintf("%d..%d@%d", b.FirstSequence, b.LastSequence, b.BaseOffset))
	}
	return strings.Join(words, " ")
}

func (tr *transcript) end(step) string        { return fmt.Sprint(tr.part.m.EndOffset()) }
func (tr *transcript) producers(step) string  { return fmt.Sprint(tr.part.m.Len()) }
func (tr *transcript) highestPID(step) string { return fmt.Sprint(tr.part.m.MaxProducerID()) }

func (tr *transcript) stats(step) string {
	s := tr.part.m.Stats()
	return fmt.Sprintf("accepted=%d duplicate=%d out-of-order=%d unknown=%d fenced=%d invalid=%d",
		s.Accepted, s.Duplicate, s.OutOfOrder, s.Unknown, s.Fenced, s.Invalid)
}

// answer writes down the answer to a batch. OK comes with the offset that the
// log gave, where the batch was appended.
func (tr *transcript) answer(res Result, err error) string {
	switch {
	case err != nil && res != (Result{}):
		return fmt.Sprintf("%v together with %+v", err, res)
	case err != nil:
		return refusal(err)
	case res.Verdict == Duplicate:
		return fmt.Sprintf("DUP base=%d", res.BaseOffset)
	case res.Verdict == Append:
		return fmt.Sprintf("OK base=%d", res.BaseOffset)
	}
	return fmt.Sprintf("no verdict: %+v", res)
}

// refusal writes down a refusal and the facts that it states.
func refusal(err error) string {
	var e *BatchError
	if !errors.As(err, &e) {
		return fmt.Sprintf("an error without facts: %v", err)
	}
	return fmt.Sprintf("%s expected=%d current=%d base=%d first=%d",
		refusalName(err), e.Expected, e.CurrentEpoch, e.BaseOffset, e.FirstOffset)
}

// refusalName names the reason, narrower ones before the wider ones that they
// are cases of.
func refusalName(err error) string {
	for _, r := range []struct {
		reason error
		name   string
	}{
		{ErrUnknownProducer, "UNKNOWN_PRODUCER"},
		{ErrDuplicateSequence, "DUPLICATE_SEQUENCE"},
		{ErrOutOfOrderSequence, "OUT_OF_ORDER"},
		{ErrOffsetOrder, "OFFSET_ORDER"},
		{ErrFenced, "STALE_EPOCH"},
		{ErrInvalidBatch, "INVALID"},
	} {
		if errors.Is(err, r.reason) {
			return r.name
		}
	}
	return fmt.Sprintf("an unnamed reason: %v", err)
}
