package idempotence

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

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
//	reserve pid=31 epoch=0 seq=3 n=1 -> OK #A         the same two lines settle it
//	reserve pid=31 epoch=0 seq=3 n=1 -> IN_FLIGHT waits=0:3..3
//	abandon                                           leadership is lost
//	in-flight pid=31 -> epoch=0 3..3 4..4@4           reserved; @ where committed
//	snapshot-end -> 3                                 where a snapshot would end
//	commit pid=31 epoch=0 seq=3 n=1 base=3 -> OK      Commit without a Check
//	apply pid=31 epoch=0 seq=3 n=1 base=3 -> DUP base=3  Apply
//	advance to=9                                      records without a producer id
//	replay pid=31 epoch=0 seq=4 n=1 base=9            read from the log or a leader
//	replay-marker pid=31 epoch=0 coord=1 abort base=9 the same for a marker
//	expire now=500 -> 1                               how many were forgotten
//	truncate to=3 -> exact                            or: inexact, then rebuilt
//	advance-start to=2                                retention deletes the log's head
//	reset                                             the log is created again
//	restart none                                      memory lost, rebuilt from the log
//	snapshot S -> 4                                   taken and written; where it ends
//	restart S                                         memory lost, S restored, the log replayed from its end
//	restore S                                         the same, and the replay is forgotten
//	window pid=31 -> epoch=0 0..2@0 3..3@3            what is remembered, oldest first
//	window pid=32 -> none
//	activity pid=31 -> 500                            LastActivity; or: since the last Expire
//	txn pid=31 -> open@3 coord=1                      or: none coord=none
//	end -> 9                                          EndOffset
//	producers -> 1                                    Len
//	highest-pid -> 31                                 MaxProducerID
//	stats -> accepted=2 duplicate=1 out-of-order=1 unknown=0 fenced=0 invalid=0
//
// The answers are OK, DUP, OUT_OF_ORDER, UNKNOWN_PRODUCER, STALE_EPOCH (fenced)
// and INVALID, and REFUSED with the reason after it for a Commit. The facts of a
// refusal (expected=, current=, first=, and the epoch and sequences that an
// IN_FLIGHT waits for) are compared where a line states them.
// Settings come first, one a line: mode=strict (the default), mode=accept and
// mode=new-log-strict are the policies for unknown producers, ttl= is the idle
// limit in milliseconds, cap= the most producers, and contiguous=1 says that the log
// has no holes.
//
// Time enters only by Expire. A batch with t= is one at that time on the
// broker's clock, and the broker of these transcripts calls Expire at every
// such moment, after the batch.
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
	// snapshots are the bytes of those taken.
	snapshots map[string][]byte
}

// inFlight is an append that has passed Check or Reserve. One that has a
// reservation can be ended more than once, to see what comes of it.
type inFlight struct {
	batch       Batch
	reservation *Reservation // nil after Check
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
		"reserve":       {play: (*transcript).reserve},
		"commit":        {play: (*transcript).commit},
		"apply":         {play: (*transcript).apply},
		"append-failed": {play: (*transcript).appendFailed},
		"abandon":       {play: (*transcript).abandon, changes: true},
		"advance":       {play: (*transcript).advance, changes: true},
		"replay":        {play: (*transcript).replay},
		"replay-marker": {play: (*transcript).replayMarker},
		"expire":        {play: (*transcript).expire, changes: true, whole: true},
		"truncate":      {play: (*transcript).truncate, changes: true, whole: true},
		"advance-start": {play: (*transcript).advanceStart},
		"reset":         {play: (*transcript).reset, changes: true},
		"restart":       {play: (*transcript).restart, changes: true},
		"restore":       {play: (*transcript).restore, changes: true},
		"snapshot":      {play: (*transcript).snapshot, whole: true},
		"window":        {play: (*transcript).window, whole: true},
		"activity":      {play: (*transcript).recency, whole: true},
		"txn":           {play: (*transcript).txn, whole: true},
		"in-flight":     {play: (*transcript).inFlight, whole: true},
		"snapshot-end":  {play: (*transcript).snapshotEnd, whole: true},
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
	return playWith(t, Config{}, text)
}

// playWith is play with a Config that has more than settings can say.
func playWith(t *testing.T, cfg Config, text string) *partition {
	t.Helper()
	tr := &transcript{t: t, cfg: cfg, held: map[string]inFlight{}, snapshots: map[string][]byte{}}
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
	name, value, ok := strings.Cut(line, "=")
	if tr.part != nil || !ok || strings.Contains(name, " ") {
		return false
	}
	if name == "mode" {
		mode, ok := modes[value]
		if !ok {
			tr.t.Fatalf("no such mode: %s", value)
		}
		tr.cfg.UnknownProducer = mode
		return true
	}
	n, err := strconv.Atoi(value)
	switch {
	case err == nil && name == "ttl":
		tr.cfg.Expiration = time.Duration(n) * time.Millisecond
	case err == nil && name == "cap":
		tr.cfg.MaxProducers = n
	case err == nil && name == "contiguous":
		tr.cfg.Contiguous = n == 1
	default:
		tr.t.Fatalf("no such setting: %s", line)
	}
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
	if s.args["t"] != "" {
		defer tr.part.expire(tr.number(s, "t"))
	}
	if v.changes || strings.HasPrefix(got, "GAP") || (strings.HasPrefix(got, "OK") && s.verb != "check") {
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
		if !whole && got != "" && words[0] != "OK" {
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
	if f.reservation == nil {
		delete(tr.held, name)
	}
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

// reserve also asks Check, which must give the same answer.
func (tr *transcript) reserve(s step) string {
	b := tr.batchOf(s)
	checked, checkErr := tr.part.check(b)
	r, res, err := tr.part.m.Reserve(b)
	if want, got := tr.answer(checked, checkErr), tr.answer(res, err); want != got {
		tr.t.Fatalf("Check answers %s, and Reserve %s", want, got)
	}
	if (r != nil) != (res.Verdict == Append) {
		tr.t.Fatalf("%+v comes with the reservation %v", res, r)
	}
	if name := handle(s.want); r != nil && name != "" {
		tr.held[name] = inFlight{batch: b, reservation: r}
	}
	return tr.answer(res, err)
}

func (tr *transcript) commit(s step) string {
	base := tr.number(s, "base")
	if handle(s.words) == "" {
		return outcome(tr.part.commit(tr.batchOf(s), base))
	}
	f := tr.take(s)
	if f.reservation == nil {
		return outcome(tr.part.commit(f.batch, base))
	}
	return outcome(tr.part.settle(f.reservation, f.batch, base))
}

// apply answers as commit does, and a duplicate as batch does.
func (tr *transcript) apply(s step) string {
	b, base := tr.batchOf(s), tr.number(s, "base")
	res, err := tr.part.m.Apply(b, base)
	if err == nil && res.Verdict == Duplicate {
		return tr.answer(res, nil)
	}
	if err == nil {
		tr.part.append(logged{batch: b, base: base})
	}
	return outcome(err)
}

func outcome(err error) string {
	if err != nil {
		return "REFUSED " + refusal(err)
	}
	return "OK"
}

// appendFailed ends an append that left nothing in the log. Between Check and
// Commit nothing was remembered of it, so there is nothing to undo.
func (tr *transcript) appendFailed(s step) string {
	f := tr.take(s)
	if f.reservation == nil {
		return ""
	}
	if err := f.reservation.Abort(); err != nil {
		return refusal(err)
	}
	return "OK"
}

func (tr *transcript) abandon(step) string {
	tr.part.m.AbandonReservations()
	return ""
}

// inFlight writes down what a producer has reserved, and holds what it says of
// that in public against it.
func (tr *transcript) inFlight(s step) string {
	pid := tr.number(s, "pid")
	words := []string{"none"}
	count := 0
	for _, l := range stateOf(tr.part.m).InFlight {
		if l.ProducerID == pid {
			words = append([]string{fmt.Sprintf("epoch=%d", l.Epoch)}, l.words()...)
			count = len(l.Batches)
		}
	}
	if p, ok := tr.part.m.Producer(pid); ok && p.InFlight != count {
		tr.t.Fatalf("producer %d has %d batches in flight, and says %d", pid, count, p.InFlight)
	}
	return strings.Join(words, " ")
}

func (tr *transcript) snapshotEnd(step) string {
	return fmt.Sprint(tr.part.m.Snapshot().EndOffset())
}

func (tr *transcript) advance(s step) string {
	tr.part.advance(tr.number(s, "to"))
	return ""
}

func (tr *transcript) replay(s step) string {
	return outcome(tr.part.replay(logged{batch: tr.batchOf(s), base: tr.number(s, "base")}))
}

func (tr *transcript) replayMarker(s step) string {
	return outcome(tr.part.replay(logged{marker: tr.markerOf(s), base: tr.number(s, "base")}))
}

func (tr *transcript) markerOf(s step) *Marker {
	return &Marker{
		ProducerID:       tr.number(s, "pid"),
		Epoch:            int16(tr.number(s, "epoch")),
		CoordinatorEpoch: int32(tr.number(s, "coord")),
		Commit:           slices.Contains(s.words, "commit"),
	}
}

func (tr *transcript) expire(s step) string {
	return fmt.Sprint(tr.part.expire(tr.number(s, "now")))
}

func (tr *transcript) truncate(s step) string {
	if tr.part.truncate(tr.t, tr.number(s, "to")) {
		return "exact"
	}
	return "inexact"
}

func (tr *transcript) advanceStart(s step) string {
	tr.part.advanceStart(tr.number(s, "to"))
	return ""
}

func (tr *transcript) reset(step) string {
	tr.part.reset()
	return ""
}

func (tr *transcript) snapshot(s step) string {
	snapshot := tr.part.m.Snapshot()
	tr.snapshots[s.words[0]] = written(tr.t, snapshot)
	return fmt.Sprint(snapshot.EndOffset())
}

func (tr *transcript) restart(s step) string {
	name := strings.Join(s.words, " ")
	if name == "none" {
		tr.part.restart(tr.t)
		return ""
	}
	snapshot, ok := tr.snapshots[name]
	if !ok {
		tr.t.Fatalf("restart from what? %q", name)
	}
	tr.part.restore(tr.t, snapshot)
	return ""
}

// restore loses the memory and restores a snapshot, and nothing else.
func (tr *transcript) restore(s step) string {
	snapshot, ok := tr.snapshots[strings.Join(s.words, " ")]
	if !ok {
		tr.t.Fatalf("restore what? %q", s.words)
	}
	tr.part.m = restored(tr.t, tr.cfg, snapshot)
	return ""
}

func (tr *transcript) recency(s step) string {
	p, ok := tr.part.m.Producer(tr.number(s, "pid"))
	switch {
	case !ok:
		return "none"
	case p.LastActivity.IsZero():
		return "since the last Expire"
	}
	return fmt.Sprint(p.LastActivity.UnixMilli())
}

func (tr *transcript) txn(s step) string {
	p, ok := tr.part.m.Producer(tr.number(s, "pid"))
	if !ok {
		return "none coord=none"
	}
	text := "none"
	if p.CurrentTxnFirstOffset >= 0 {
		text = fmt.Sprintf("open@%d", p.CurrentTxnFirstOffset)
	}
	if p.CoordinatorEpoch < 0 {
		return text + " coord=none"
	}
	return fmt.Sprintf("%s coord=%d", text, p.CoordinatorEpoch)
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
	text := fmt.Sprintf("accepted=%d duplicate=%d out-of-order=%d unknown=%d fenced=%d invalid=%d",
		s.Accepted, s.Duplicate, s.OutOfOrder, s.Unknown, s.Fenced, s.Invalid)
	if s.Expired+s.Evicted > 0 {
		text += fmt.Sprintf(" expired=%d evicted=%d", s.Expired, s.Evicted)
	}
	return text
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
	var waits *InFlightError
	if errors.As(err, &waits) {
		return fmt.Sprintf("%s waits=%d:%d..%d", refusalName(err), waits.Epoch, waits.FirstSequence, waits.LastSequence)
	}
	if err == ErrAbandoned || err == ErrSettled {
		return refusalName(err)
	}
	var e *BatchError
	if !errors.As(err, &e) {
		return fmt.Sprintf("an error without facts: %v", err)
	}
	return fmt.Sprintf("%s expected=%d current=%d base=%d first=%d lowest=%d next=%d",
		refusalName(err), e.Expected, e.CurrentEpoch, e.BaseOffset, e.FirstCopy, e.LowestOffset, e.NextOffset)
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
		{ErrInFlight, "IN_FLIGHT"},
		{ErrAbandoned, "ABANDONED"},
		{ErrSettled, "SETTLED"},
		{ErrGap, "GAP"},
		{ErrInvalidTxnState, "INVALID_TXN"},
		{ErrConcurrentTransactions, "CONCURRENT_TXN"},
		{ErrCoordinatorFenced, "STALE_COORD"},
	} {
		if errors.Is(err, r.reason) {
			return r.name
		}
	}
	return fmt.Sprintf("an unnamed reason: %v", err)
}
