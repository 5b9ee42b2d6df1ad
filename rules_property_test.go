package idempotence

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file is the manager against the model of model_rules_test.go, over random
// operations. What happens is chosen by a chooser, so that the same rig runs
// under rapid, which shrinks what it finds, and under the fuzzer, which looks
// for code it has not seen.
//
// A failure prints the operations as a transcript. Rapid prints the seed that
// repeats it as well. A find becomes a transcript of its own.

// rig is a manager and its model, side by side.
type rig struct {
	*generator
	t       rapid.TB
	m       *ProducerStateManager
	model   *model
	checked []Batch // passed Check, neither committed nor failed yet
	history []string
}

func newRig(t rapid.TB, c chooser, cfg Config) *rig {
	r := &rig{t: t, m: New(cfg), model: newModel(cfg)}
	r.generator = &generator{
		c: c, policy: cfg.UnknownProducer, pids: []int64{31, 0, math.MaxInt64, 32}, known: r.model.outlook, sent: r.model.sent,
	}
	r.count = r.anyCount
	return r
}

// action is something that can happen.
type action struct {
	name string
	do   func(*rig)
}

// actions is everything that can happen. A new operation of the manager adds
// its own here.
var actions = []action{
	{"next batch", func(r *rig) { r.offer(r.next(r.pid())) }},
	{"next batch of the same producer", func(r *rig) {
		b := r.next(r.pid())
		for range r.upTo(7) {
			r.offer(b)
			b = r.next(b.ProducerID)
		}
	}},
	{"retry", func(r *rig) { r.offer(r.retry()) }},
	{"almost a retry", func(r *rig) { r.offer(r.bent()) }},
	{"gap", func(r *rig) { r.offer(r.gap()) }},
	{"newer epoch", func(r *rig) { r.offer(r.newerEpoch()) }},
	{"older epoch", func(r *rig) { r.offer(r.olderEpoch()) }},
	{"malformed", func(r *rig) { r.offer(r.malformed()) }},
	{"no producer id", func(r *rig) { r.offer(r.withoutID()) }},
	{"a stranger", func(r *rig) {
		r.pids = append(r.pids, int64(1000+r.c.pick(50)))
		r.offer(Batch{ProducerID: r.pids[len(r.pids)-1], Epoch: int16(r.c.pick(3)), BaseSequence: r.sequence(), Count: r.count(0)})
	}},
	{"commit of one checked long ago", (*rig).settle},
	{"advance", func(r *rig) { r.advance(r.model.endOffset + int64(r.c.pick(5)) - 2) }},
	{"look", (*rig).look},
}

// verify holds the manager against the model, and audits it.
func (r *rig) verify() {
	audit(r.t, r.m)
	if diff := cmp.Diff(r.model.state(), stateOf(r.m)); diff != "" {
		r.fail("the state (-model +manager):\n%s", diff)
	}
	if diff := cmp.Diff(r.model.stats, r.m.Stats()); diff != "" {
		r.fail("the counts (-model +manager):\n%s", diff)
	}
}

func (r *rig) note(format string, args ...any) {
	r.history = append(r.history, fmt.Sprintf(format, args...))
}

func (r *rig) fail(format string, args ...any) {
	r.t.Helper()
	r.t.Fatalf("%s\n%s", strings.Join(r.history, "\n"), fmt.Sprintf(format, args...))
}

func words(b Batch) string {
	return fmt.Sprintf("pid=%d epoch=%d seq=%d n=%d", b.ProducerID, b.Epoch, b.BaseSequence, b.Count)
}

// offer checks a batch, and does with it something that a broker does: append
// and commit it, fail, leave it in flight, or commit it against all advice.
func (r *rig) offer(b Batch) {
	r.note("check %s", words(b))
	want, wantErr := r.model.check(b)
	got, err := r.m.CheckBatch(b)
	r.agree(wantErr, err)
	if got != want {
		r.fail("the manager answers %+v, the model %+v", got, want)
	}
	switch how := r.c.pick(8); {
	case how == 0:
		r.note("append-failed")
	case how == 1 && got.Verdict == Append:
		r.checked = append(r.checked, b)
	case how == 2 || got.Verdict == Append:
		r.commit(b, r.base(b, how))
	}
}

// settle commits a batch that was checked long ago, whatever came in between.
func (r *rig) settle() {
	if len(r.checked) == 0 {
		return
	}
	i := r.c.pick(len(r.checked))
	b := r.checked[i]
	r.checked = slices.Delete(r.checked, i, i+1)
	r.commit(b, r.base(b, r.c.pick(8)))
}

func (r *rig) commit(b Batch, base int64) {
	r.note("commit %s base=%d", words(b), base)
	r.agree(r.model.commit(b, base), r.m.CommitBatch(b, base))
}

func (r *rig) advance(to int64) {
	r.note("advance to=%d", to)
	r.model.endOffset = max(r.model.endOffset, to)
	r.m.Advance(to)
}

// agree holds the manager's error against the model's, and the facts of it
// against the batch.
func (r *rig) agree(want, got error) {
	if want == nil && got == nil {
		return
	}
	var e *BatchError
	if !errors.As(got, &e) || e.Err != want {
		r.fail("the manager says %v, the model %v", got, want)
	}
	if want == ErrOutOfOrderSequence || want == ErrUnknownProducer {
		b := e.Batch
		b.BaseSequence, b.Count = e.Expected, 1
		if res, err := r.model.judge(b); err != nil {
			r.fail("%v: but at %d it gets %+v, %v", got, e.Expected, res, err)
		}
	}
}

// look goes through everything that can be looked at. It also freezes the
// table, so that the next Commit has a page of its own to make.
func (r *rig) look() {
	want := r.model.state()
	got := slices.Collect(r.m.Producers())
	if diff := cmp.Diff(want.Producers, got); diff != "" {
		r.fail("Producers (-model +manager):\n%s", diff)
	}
	if r.m.Len() != len(want.Producers) || r.m.EndOffset() != want.EndOffset || r.m.MaxProducerID() != want.MaxProducerID {
		r.fail("Len %d, EndOffset %d, MaxProducerID %d, and the model has %+v",
			r.m.Len(), r.m.EndOffset(), r.m.MaxProducerID(), want)
	}
	pid := r.pid()
	got1, ok := r.m.Producer(pid)
	i := slices.IndexFunc(want.Producers, func(p ProducerState) bool { return p.ProducerID == pid })
	if ok != (i >= 0) || ok && !cmp.Equal(want.Producers[i], got1) {
		r.fail("Producer(%d) is %+v, %t", pid, got1, ok)
	}
}

// base returns an offset to commit a batch at: nearly always the log's end, and
// otherwise one that a log gives seldom or never.
func (r *rig) base(b Batch, how int) int64 {
	if how > 3 {
		return r.model.endOffset
	}
	switch r.c.pick(8) {
	case 0:
		return -1
	case 1:
		return math.MaxInt64 - int64(b.Count) + 1
	case 2:
		return r.model.endOffset + int64(r.c.pick(4))
	case 3:
		return max(0, r.model.endOffset-int64(r.c.pick(4)))
	case 4, 5:
		if all := r.model.accepted[b.ProducerID]; len(all) > 0 {
			return all[len(all)-1].base - 1 + int64(r.c.pick(3))
		}
	}
	return r.model.endOffset
}

// TestManagerAgainstModel: whatever happens, and in whatever order, the manager
// answers as the model does and is left in the state that the model is in.
func TestManagerAgainstModel(t *testing.T) {
	for _, policy := range policies {
		t.Run(policy.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				r := newRig(t, drawn{t}, Config{UnknownProducer: policy})
				steps := map[string]func(*rapid.T){"": func(*rapid.T) { r.verify() }}
				for _, a := range actions {
					steps[a.name] = func(*rapid.T) { a.do(r) }
				}
				t.Repeat(steps)
			})
		})
	}
}

// TestSequenceWrap: a producer that starts within a few hundred of 2147483647,
// and one that gets there by batches of up to 2147483647 records, counts on
// through 0 for several turns, and its retries are found at their offsets.
//
// A full turn can make the next batch equal to a remembered one. Rule 5 comes
// before rule 6, so that batch is a duplicate; the model says which.
func TestSequenceWrap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRig(t, drawn{t}, Config{UnknownProducer: AcceptAny})
		r.pids = r.pids[:1]
		r.commit(Batch{ProducerID: 31, BaseSequence: math.MaxInt32 - int32(r.c.pick(300)), Count: r.count(0)}, 0)
		for r.written(31) < 4*modulus {
			b := r.next(r.pid())
			b.Count = math.MaxInt32 - int32(r.c.pick(400))
			r.commit(b, r.model.endOffset)
			r.verify()
			for range r.upTo(5) {
				r.offer(r.next(r.pid()))
				r.offer(r.retry())
				r.offer(r.bent())
				r.verify()
			}
		}
	})
}

// written returns how many records of a producer are in the log.
func (r *rig) written(pid int64) int64 {
	n := int64(0)
	for _, b := range r.model.accepted[pid] {
		n += b.count
	}
	return n
}

// TestRigReachesEverything: the random operations do come to every answer, to
// windows of both kinds and to shared pages. Without this, a rig that always
// did the same would prove nothing and be green.
func TestRigReachesEverything(t *testing.T) {
	met := map[string]int{}
	for seed := range uint64(6) {
		r := newRig(t, seeded{rand.New(rand.NewPCG(1, seed))}, Config{})
		for range 500 {
			actions[r.c.pick(len(actions))].do(r)
			r.verify()
			if p := r.m.table.find(31); p != nil && p.window.mayRepeat {
				met["window in which a batch may repeat"]++
			} else if p != nil && p.window.count == WindowSize {
				met["full plain window"]++
			}
			if pages := r.m.table.pages; len(pages) > 0 && pages[0].era != r.m.table.era {
				met["shared page"]++
			}
		}
		s := r.m.Stats()
		met["accepted"] += int(s.Accepted)
		met["duplicate"] += int(s.Duplicate)
		met["out of order"] += int(s.OutOfOrder)
		met["unknown"] += int(s.Unknown)
		met["fenced"] += int(s.Fenced)
		met["invalid"] += int(s.Invalid)
		met["producers"] += r.m.Len()
	}
	for _, what := range []string{
		"accepted", "duplicate", "out of order", "unknown", "fenced", "invalid", "producers",
		"window in which a batch may repeat", "full plain window", "shared page",
	} {
		if met[what] < 20 {
			t.Errorf("%s: met %d times in 3000 steps", what, met[what])
		}
	}
}

// FuzzManager lets the fuzzer choose the operations on a manager (the first
// byte is the policy, and then each operation takes as many as it asks for).
// The invariants, after every operation:
//
//  1. Nothing panics, whatever the batch, the offset and the order of calls.
//  2. The manager gives the answer of the model, refusals included, and the
//     sequence that a refusal names as expected is accepted.
//  3. The manager is in the state of the model: producers, epochs, windows, end
//     offset, highest producer id, counts. So a refusal, a duplicate and a Check
//     have changed nothing.
//  4. Every invariant that is written beside the state holds (audit).
func FuzzManager(f *testing.F) {
	names := map[string]byte{}
	for i, a := range actions {
		names[a.name] = byte(i)
	}
	next, retry, bent := names["next batch"], names["retry"], names["almost a retry"]
	f.Add([]byte{0})
	// Batches of one producer, then retries of each, then what was bent.
	f.Add([]byte{0, next, 0, 0, 0, 7, next, 0, 0, 1, 7, next, 0, 0, 2, 7, retry, 0, 0, 3, retry, 0, 1, 3, bent, 0, 1, 0, 0, 3})
	// A start about the wrap, and counts that end there.
	f.Add([]byte{1, next, 0, 1, 0, 5, 8, 2, 7, next, 0, 9, 0, 7, retry, 0, 1, 7, next, 0, 9, 1, 7, retry, 0, 2, 7})
	// Epochs up and down, with failed appends between.
	f.Add([]byte{2, next, 0, 0, 0, 7, names["newer epoch"], 0, 0, 0, 0, 0, 1, 0, names["newer epoch"], 0, 0, 0, 0, 0, 1, 7, names["older epoch"], 0, 0, 0, 7})
	// Everything in turn, with bytes that differ.
	var all []byte
	for i := range 64 * byte(3) {
		all = append(all, i*37)
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, choices []byte) {
		c := &fromBytes{rest: choices}
		r := newRig(t, c, Config{UnknownProducer: policies[c.pick(len(policies))]})
		for len(c.rest) > 0 {
			actions[c.pick(len(actions))].do(r)
			r.verify()
		}
	})
}
