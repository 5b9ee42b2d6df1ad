package idempotence

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// This file tests that the state is a function of the calls. Two managers that are given
// the same calls stay equal, also if one is rebuilt from its snapshots now and then. A
// manager equals one that is rebuilt from its log. A replicated state machine rests on
// both.
//
// A failure prints the seed of its run:
//
//	go test -run 'TestTwins|TestRebuiltFromLog' -determinism.seed=17 -determinism.runs=1

var (
	determinismRuns = flag.Int("determinism.runs", 1000, "how many random runs each test of determinism makes")
	determinismSeed = flag.Uint64("determinism.seed", 0, "the seed of the first of these runs")
)

// scribe makes random calls that suit what one manager knows, and keeps the log.
type scribe struct {
	t       *testing.T
	rng     *rand.Rand
	seed    uint64
	cfg     Config
	m       *ProducerStateManager
	end     int64
	now     int64
	history []string
	met     map[string]int
}

// runScribes makes the random runs, and sees to it that what they should meet is met.
func runScribes(t *testing.T, run func(s *scribe)) {
	met := map[string]int{}
	for i := range *determinismRuns {
		s := &scribe{t: t, seed: *determinismSeed + uint64(i), met: met}
		s.rng = rand.New(rand.NewPCG(s.seed, 99))
		s.cfg = Config{
			Expiration: 100 * time.Millisecond, MaxProducers: []int{0, 3, 12}[s.rng.IntN(3)], UnknownProducer: policies[s.rng.IntN(3)],
		}
		if s.rng.IntN(3) == 0 {
			s.cfg.Expiration = -1
		}
		s.m = New(s.cfg)
		run(s)
		met["evicted"] += int(s.m.Stats().Evicted)
		met["expired"] += int(s.m.Stats().Expired)
		met["over the cap"] += max(0, s.m.Len()-max(1, s.cfg.MaxProducers)) * min(1, s.cfg.MaxProducers)
	}
	t.Log(met)
	for what, n := range met {
		if n < *determinismRuns/10 {
			t.Errorf("%s: happened %d times in %d runs", what, n, *determinismRuns)
		}
	}
}

func (s *scribe) note(format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	s.history = append(s.history, what)
	s.met[strings.Fields(what)[0]]++
}

func (s *scribe) fail(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf("seed %d, %+v\n%s\n%s", s.seed, s.cfg, strings.Join(s.history, "\n"), fmt.Sprintf(format, args...))
}

// pick returns one of 0..n-1.
func (s *scribe) pick(n int) int { return s.rng.IntN(n) }

// batch returns mostly the next batch of some producer.
func (s *scribe) batch() Batch {
	pid := int64(s.pick(20))
	b := Batch{ProducerID: pid, Count: int32(1 + s.pick(3)), Transactional: s.pick(3) == 0}
	if p, ok := s.m.Producer(pid); ok {
		b.Epoch = p.Epoch
		b.Transactional = b.Transactional || p.CurrentTxnFirstOffset >= 0 && s.pick(10) > 0
		if n := len(p.Window); n > 0 {
			b.BaseSequence = moved(p.Window[n-1].LastSequence, 1)
			if s.pick(8) == 0 { // a retry
				w := p.Window[s.pick(n)]
				b.BaseSequence, b.Count = w.FirstSequence, moved(w.LastSequence, 1-w.FirstSequence)
			}
		}
	}
	switch s.pick(20) {
	case 0:
		b.BaseSequence = moved(b.BaseSequence, int32(s.pick(3))-1)
	case 1:
		b.Epoch, b.BaseSequence = b.Epoch+1, 0
	case 2:
		b.Epoch = max(0, b.Epoch-1)
	case 3:
		b = Batch{ProducerID: NoProducerID, Epoch: -1, BaseSequence: -1, Count: b.Count}
	}
	return b
}

// marker returns mostly the marker of an open transaction.
func (s *scribe) marker() Marker {
	k := Marker{ProducerID: int64(s.pick(20)), CoordinatorEpoch: int32(s.pick(3)), Commit: s.pick(2) == 0, Version: int8(s.pick(3))}
	if p, ok := s.m.OldestTransaction(); ok && s.pick(2) == 0 {
		k.ProducerID = p.ProducerID
	}
	if p, ok := s.m.Producer(k.ProducerID); ok {
		k.Epoch = p.Epoch + int16(s.pick(2))
		k.CoordinatorEpoch = max(0, p.CoordinatorEpoch+int32(s.pick(3))-1)
	}
	return k
}

// time returns a time to expire at: mostly later than the one before.
func (s *scribe) time() time.Time {
	switch s.pick(12) {
	case 0:
		return time.UnixMilli(s.now - int64(s.pick(99)))
	case 1:
		s.now -= 100 + int64(s.pick(500))
	default:
		s.now += int64(s.pick(60))
	}
	return time.UnixMilli(s.now)
}

// said writes down an answer.
func said(res Result, err error) string {
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%v %d", res.Verdict, res.BaseOffset)
}

// twins is two managers that are given the same calls.
type twins struct {
	*scribe
	other *ProducerStateManager
	open  []twinAppend
}

// twinAppend is a reservation in both.
type twinAppend struct {
	r    [2]*Reservation
	base int64
}

// both makes a call to both, which must answer the same, and returns the answer.
func (w *twins) both(what string, call func(m *ProducerStateManager) string) string {
	w.t.Helper()
	w.note("%s", what)
	want, got := call(w.m), call(w.other)
	if want != got {
		w.fail("one answers %s, and the other %s", want, got)
	}
	w.history[len(w.history)-1] += " -> " + want
	return want
}

func (w *twins) commit() {
	b := w.batch()
	if w.both("check "+words(b), func(m *ProducerStateManager) string { return said(m.CheckBatch(b)) }) != "Append 0" && w.pick(4) > 0 {
		return
	}
	base := w.end + int64(w.pick(20)/18)
	if w.both(fmt.Sprintf("commit base=%d", base), func(m *ProducerStateManager) string { return said(Result{}, m.CommitBatch(b, base)) }) == "none 0" {
		w.end = base + int64(b.Count)
	}
}

func (w *twins) apply() {
	b := w.batch()
	if w.both("apply "+words(b), func(m *ProducerStateManager) string { return said(m.Apply(b, w.end)) }) == "Append 0" {
		w.end += int64(b.Count)
	}
}

func (w *twins) commitMarker() {
	k := w.marker()
	if w.both(fmt.Sprintf("marker %+v", k), func(m *ProducerStateManager) string {
		return fmt.Sprint(m.CheckMarker(k), m.CommitMarker(k, w.end))
	}) == "<nil> <nil>" {
		w.end++
	}
}

func (w *twins) reserve() {
	b, a, i := w.batch(), twinAppend{base: w.end}, 0
	count := int64(b.Count)
	reserve := func(m *ProducerStateManager) string {
		var res Result
		var err error
		a.r[i], res, err = m.Reserve(b)
		i++
		return said(res, err)
	}
	if w.pick(6) == 0 {
		k := w.marker()
		count, reserve = 1, func(m *ProducerStateManager) string {
			var err error
			a.r[i], err = m.ReserveMarker(k)
			i++
			return fmt.Sprint(err)
		}
	}
	w.both("reserve "+words(b), reserve)
	if a.r[0] != nil {
		w.open = append(w.open, a)
		w.end += count
	}
}

// settle ends one of the reservations: most are committed where the log has them.
func (w *twins) settle() {
	if len(w.open) == 0 {
		return
	}
	i := w.pick(len(w.open))
	a, j := w.open[i], 0
	w.open = slices.Delete(w.open, i, i+1)
	if w.pick(4) == 0 {
		w.both("abort", func(*ProducerStateManager) string { j++; return fmt.Sprint(a.r[j-1].Abort()) })
		return
	}
	w.both(fmt.Sprintf("settle base=%d", a.base), func(*ProducerStateManager) string { j++; return fmt.Sprint(a.r[j-1].Commit(a.base)) })
}

func (w *twins) abandon() {
	w.open = nil
	w.both("abandon", func(m *ProducerStateManager) string { m.AbandonReservations(); return "" })
	w.both("replayed-to", func(m *ProducerStateManager) string { m.ReplayedTo(w.end); return "" })
}

func (w *twins) expire() {
	now := w.time()
	w.both(fmt.Sprintf("expire now=%d", now.UnixMilli()), func(m *ProducerStateManager) string { return fmt.Sprint(m.Expire(now)) })
}

func (w *twins) ask() {
	from := int64(w.pick(int(w.end) + 1))
	w.both(fmt.Sprintf("aborted from=%d", from), func(m *ProducerStateManager) string { return fmt.Sprint(m.AbortedTransactions(from, w.end)) })
	w.both("oldest", func(m *ProducerStateManager) string { return fmt.Sprint(m.OldestTransaction()) })
	w.both("lso", func(m *ProducerStateManager) string { return fmt.Sprint(m.LastStableOffset(w.end)) })
}

func (w *twins) advance() {
	w.end += int64(w.pick(3))
	w.both("advance", func(m *ProducerStateManager) string { m.Advance(w.end); return "" })
	if w.pick(4) == 0 { // nothing in flight is deleted
		start := int64(w.pick(int(w.end) + 1))
		for _, a := range w.open {
			start = min(start, a.base)
		}
		w.both(fmt.Sprintf("advance-start to=%d", start), func(m *ProducerStateManager) string { m.AdvanceStart(start); return "" })
	}
}

func (w *twins) truncate() {
	if w.pick(5) > 0 {
		return
	}
	w.open = nil
	to := max(0, w.end-int64(w.pick(10)))
	w.end = to
	w.both(fmt.Sprintf("truncate to=%d", to), func(m *ProducerStateManager) string { return fmt.Sprint(m.Truncate(to)) })
	w.both("replayed-to", func(m *ProducerStateManager) string { m.ReplayedTo(to); return "" })
}

// rebuild rebuilds the other one from its own snapshot, where a snapshot holds all.
func (w *twins) rebuild() {
	if len(w.open) > 0 || w.m.Stats().FailedFirstAppends > 0 && w.cfg.UnknownProducer != StartAtZero {
		return
	}
	w.note("rebuild")
	snapshot := encoded(w.t, w.other)
	if w.pick(2) == 0 {
		w.other = New(w.cfg)
		w.other.LastStableOffset(0)
	}
	if err := w.other.Restore(bytes.NewReader(snapshot)); err != nil {
		w.fail("%v", err)
	}
	w.compare()
}

// compare compares all that a snapshot holds, and what is in flight.
func (w *twins) compare() {
	for _, check := range audits {
		if err := errors.Join(check(w.m), check(w.other)); err != nil {
			w.fail("the state is unsound: %v", err)
		}
	}
	if !bytes.Equal(encoded(w.t, w.m), encoded(w.t, w.other)) {
		w.fail("the snapshots differ; the state (-lived through +rebuilt):\n%s", cmp.Diff(stateOf(w.m), stateOf(w.other)))
	}
	if diff := cmp.Diff(queuesOf(w.m), queuesOf(w.other)); diff != "" {
		w.fail("what is in flight (-lived through +rebuilt):\n%s", diff)
	}
}

var twinCalls = []func(*twins){
	(*twins).commit, (*twins).commit, (*twins).commit, (*twins).apply, (*twins).apply, (*twins).apply, (*twins).commitMarker,
	(*twins).commitMarker, (*twins).reserve, (*twins).reserve, (*twins).settle, (*twins).settle, (*twins).settle, (*twins).abandon,
	(*twins).expire, (*twins).expire, (*twins).ask, (*twins).advance, (*twins).truncate, (*twins).rebuild, (*twins).rebuild,
}

// TestTwins: two managers that are given equal calls answer alike and stay equal, while
// one of them is rebuilt from its snapshots.
func TestTwins(t *testing.T) {
	runScribes(t, func(s *scribe) {
		w := &twins{scribe: s, other: New(s.cfg)}
		for i := range 80 {
			twinCalls[w.pick(len(twinCalls))](w)
			if i%8 == 0 {
				w.compare()
			}
		}
		w.compare()
	})
}

// journal is a manager and its log, with the calls of Expire and AdvanceStart in their
// places.
type journal struct {
	*scribe
	entries []journalEntry
	saved   []journalSnapshot
}

// journalEntry is an entry of the log, or another call.
type journalEntry struct {
	logged
	call func(m *ProducerStateManager)
}

// journalSnapshot is a snapshot that was taken after some entries.
type journalSnapshot struct {
	bytes   []byte
	entries int
}

func (j *journal) append(l logged) {
	j.entries = append(j.entries, journalEntry{logged: l})
	j.end = l.end()
}

// record makes a call that the log does not hold.
func (j *journal) record(call func(m *ProducerStateManager)) {
	call(j.m)
	j.entries = append(j.entries, journalEntry{call: call})
}

func (j *journal) commit() {
	b := j.batch()
	j.note("commit %s base=%d", words(b), j.end)
	res, err := j.m.CheckBatch(b)
	if err != nil || res.Verdict != Append {
		return
	}
	switch j.pick(3) {
	case 0:
		err = j.m.CommitBatch(b, j.end)
	case 1:
		_, err = j.m.Apply(b, j.end)
	case 2:
		r, _, reserveErr := j.m.Reserve(b)
		err = errors.Join(reserveErr, r.Commit(j.end))
	}
	if err != nil {
		j.fail("%v", err)
	}
	j.append(logged{batch: b, base: j.end})
}

func (j *journal) commitMarker() {
	k := j.marker()
	j.note("marker %+v base=%d", k, j.end)
	if j.m.CheckMarker(k) != nil {
		return
	}
	if err := j.m.CommitMarker(k, j.end); err != nil {
		j.fail("%v", err)
	}
	j.append(logged{marker: &k, base: j.end})
}

func (j *journal) expire() {
	now := j.time()
	j.note("expire now=%d", now.UnixMilli())
	j.record(func(m *ProducerStateManager) { m.Expire(now) })
}

func (j *journal) advance() {
	j.end += int64(j.pick(3))
	start, end := int64(j.pick(int(j.end)+1)), j.end
	j.note("advance to=%d, start=%d", end, start)
	j.record(func(m *ProducerStateManager) { m.Advance(end); m.AdvanceStart(start) })
}

func (j *journal) save() {
	j.note("save")
	j.saved = append(j.saved, journalSnapshot{encoded(j.t, j.m), len(j.entries)})
}

// compare compares the manager with one that is rebuilt from the log, or from a snapshot
// and the rest of the log.
func (j *journal) compare(from journalSnapshot) {
	m := New(j.cfg)
	if from.bytes != nil {
		m = restored(j.t, j.cfg, from.bytes)
	}
	for _, e := range j.entries[from.entries:] {
		if e.call != nil {
			e.call(m)
		} else if err := apply(m, e.logged); err != nil {
			j.fail("replay of %s: %v", e.words(), err)
		}
	}
	audit(j.t, m)
	if !bytes.Equal(encoded(j.t, j.m), encoded(j.t, m)) {
		j.fail("from entry %d of %d the snapshots differ; the state (-lived +rebuilt):\n%s",
			from.entries, len(j.entries), cmp.Diff(stateOf(j.m), stateOf(m)))
	}
}

var journalCalls = []func(*journal){
	(*journal).commit, (*journal).commit, (*journal).commit, (*journal).commit, (*journal).commit, (*journal).commit,
	(*journal).commitMarker, (*journal).commitMarker, (*journal).expire, (*journal).advance, (*journal).save,
}

// TestRebuiltFromLog: a manager equals one that is rebuilt from its log, and one that is
// rebuilt from each of its snapshots and the rest of the log.
func TestRebuiltFromLog(t *testing.T) {
	runScribes(t, func(s *scribe) {
		j := &journal{scribe: s}
		for range 100 {
			journalCalls[j.pick(len(journalCalls))](j)
		}
		j.compare(journalSnapshot{})
		for _, from := range j.saved {
			j.compare(from)
		}
	})
}
