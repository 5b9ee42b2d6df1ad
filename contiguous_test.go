package idempotence

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file tests Config.Contiguous: that it turns the mistakes of an embedder into an
// error at the first batch at which they can be known, and that it never refuses an
// embedder who makes none.

// TestMistakes has a transcript for each mistake of the package comment, in each loop.
// The line that is REFUSED is the first at which it can be known. Unless the row says
// that it is caught anyway, the same transcript without contiguous=1 is accepted.
func TestMistakes(t *testing.T) {
	for _, tt := range []struct {
		mistake      string
		caughtAnyway bool
		transcript   string
	}{
		{"two partitions on one manager", false, `
			commit pid=1 epoch=0 seq=0 n=1 base=0 -> OK
			commit pid=2 epoch=0 seq=0 n=1 base=0 -> REFUSED OFFSET_ORDER base=0 lowest=1
		`},
		{"two partitions on one manager, Apply", false, `
			apply pid=1 epoch=0 seq=0 n=1 base=0 -> OK
			apply pid=2 epoch=0 seq=0 n=1 base=0 -> REFUSED OFFSET_ORDER base=0 lowest=1
		`},
		{"two partitions on one manager, reserved", false, `
			reserve pid=1 epoch=0 seq=0 n=1 -> OK #A
			commit #A base=0 -> OK
			reserve pid=2 epoch=0 seq=0 n=1 -> OK #B
			commit #B base=0 -> REFUSED OFFSET_ORDER base=0 lowest=1
		`},
		{"two partitions on one manager, without producer ids", false, `
			commit pid=-1 epoch=-1 seq=-1 n=1 base=0 -> OK
			commit pid=-1 epoch=-1 seq=-1 n=1 base=0 -> REFUSED OFFSET_ORDER base=0
		`},
		{"an append that failed, but was committed before", false, `
			commit pid=1 epoch=0 seq=0 n=2 base=0 -> OK
			commit pid=2 epoch=0 seq=0 n=1 base=0 -> REFUSED OFFSET_ORDER base=0 lowest=2
		`},
		{"the same, of one producer", true, `
			commit pid=1 epoch=0 seq=0 n=2 base=0 -> OK
			commit pid=1 epoch=0 seq=2 n=1 base=0 -> REFUSED OFFSET_ORDER base=0 lowest=2
		`},
		{"the same, reserved", false, `
			reserve pid=1 epoch=0 seq=0 n=2 -> OK #A
			commit #A base=0 -> OK
			reserve pid=2 epoch=0 seq=0 n=1 -> OK #B
			commit #B base=0 -> REFUSED OFFSET_ORDER base=0 lowest=2
		`},
		{"the last offset given for the base offset", false, `
			commit pid=1 epoch=0 seq=0 n=3 base=2 -> REFUSED OFFSET_ORDER base=2 lowest=0
		`},
		{"the last offset given for the base offset, Apply", false, `
			apply pid=1 epoch=0 seq=0 n=3 base=2 -> REFUSED OFFSET_ORDER base=2 lowest=0
		`},
		{"the last offset given for the base offset, reserved", false, `
			reserve pid=1 epoch=0 seq=0 n=3 -> OK #A
			commit #A base=2 -> REFUSED OFFSET_ORDER base=2 lowest=0
		`},
		{"the last offset given for the base offset, on a follower", false, `
			replay pid=1 epoch=0 seq=0 n=3 base=2 -> REFUSED OFFSET_ORDER base=2 lowest=0
		`},
		{"an offset inside another batch of the producer", true, `
			commit pid=1 epoch=0 seq=0 n=3 base=0 -> OK
			commit pid=1 epoch=0 seq=3 n=1 base=2 -> REFUSED OFFSET_ORDER base=2 lowest=3
		`},
		{"an offset inside another producer's batch", false, `
			commit pid=1 epoch=0 seq=0 n=3 base=0 -> OK
			commit pid=2 epoch=0 seq=0 n=1 base=2 -> REFUSED OFFSET_ORDER base=2 lowest=3
		`},
		{"an offset inside another producer's batch, reserved", false, `
			commit pid=1 epoch=0 seq=0 n=3 base=0 -> OK
			reserve pid=2 epoch=0 seq=0 n=1 -> OK #A
			commit #A base=2 -> REFUSED OFFSET_ORDER base=2 lowest=3
			commit #A base=3 -> OK
		`},
		{"a log that was cut without Truncate", false, `
			commit pid=1 epoch=0 seq=0 n=1 base=0 -> OK
			commit pid=1 epoch=0 seq=1 n=1 base=1 -> OK
			commit pid=1 epoch=0 seq=2 n=1 base=2 -> OK
			commit pid=2 epoch=0 seq=0 n=1 base=1 -> REFUSED OFFSET_ORDER base=1 lowest=3
			truncate to=1 -> exact
			commit pid=2 epoch=0 seq=0 n=1 base=1 -> OK
		`},
		{"a restored state without a replay", false, `
			commit pid=1 epoch=0 seq=0 n=1 base=0 -> OK
			snapshot S -> 1
			commit pid=1 epoch=0 seq=1 n=1 base=1 -> OK
			restore S
			commit pid=2 epoch=0 seq=0 n=1 base=2 -> REFUSED OFFSET_ORDER base=2 lowest=1
			restart S
			commit pid=2 epoch=0 seq=0 n=1 base=2 -> OK
		`},
		{"a restored state without a replay, on a follower", false, `
			replay pid=1 epoch=0 seq=0 n=1 base=0
			snapshot S -> 1
			replay pid=1 epoch=0 seq=1 n=1 base=1
			restore S
			replay pid=1 epoch=0 seq=2 n=1 base=2 -> REFUSED OFFSET_ORDER base=2 lowest=1
		`},
		{"a restored state that was taken with a batch in flight, without a replay", false, `
			commit pid=1 epoch=0 seq=0 n=1 base=0 -> OK
			reserve pid=2 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=3 epoch=0 seq=0 n=1 -> OK #B
			commit #B base=2 -> OK
			snapshot S -> 1
			commit #A base=1 -> OK
			restore S
			commit pid=4 epoch=0 seq=0 n=1 base=3 -> REFUSED OFFSET_ORDER base=3
		`},
		{"a forgotten Commit", false, `
			check pid=1 epoch=0 seq=0 n=1 -> OK #A
			commit pid=2 epoch=0 seq=0 n=1 base=1 -> REFUSED OFFSET_ORDER base=1 lowest=0
		`},
		{"a forgotten Commit, on a follower: a batch that was not replayed", false, `
			replay pid=1 epoch=0 seq=0 n=1 base=0
			replay pid=1 epoch=0 seq=2 n=1 base=2 -> REFUSED OFFSET_ORDER base=2 lowest=1
		`},
		{"a forgotten Commit of a batch without a producer id", false, `
			commit pid=1 epoch=0 seq=0 n=1 base=4 -> REFUSED OFFSET_ORDER base=4 lowest=0
		`},
		{"a log that was created again without Reset", false, `
			commit pid=1 epoch=0 seq=0 n=1 base=0 -> OK
			commit pid=1 epoch=0 seq=1 n=1 base=1 -> OK
			commit pid=2 epoch=0 seq=0 n=1 base=0 -> REFUSED OFFSET_ORDER base=0 lowest=2
			reset
			commit pid=2 epoch=0 seq=0 n=1 base=0 -> OK
		`},
		{"a log that was created again without Reset, reserved", false, `
			commit pid=1 epoch=0 seq=0 n=1 base=0 -> OK
			reserve pid=2 epoch=0 seq=0 n=1 -> OK #A
			commit #A base=0 -> REFUSED OFFSET_ORDER base=0 lowest=1
		`},
	} {
		t.Run(tt.mistake, func(t *testing.T) {
			play(t, "contiguous=1\n"+tt.transcript)
			if tt.caughtAnyway {
				play(t, tt.transcript)
				return
			}
			i := strings.Index(tt.transcript, "-> REFUSED")
			play(t, tt.transcript[:i]+"-> OK") // not caught
		})
	}
}

// TestContiguousOffsets: in a log that ends at 10, every call that records something
// accepts only 10, and a replay also what lies below it.
func TestContiguousOffsets(t *testing.T) {
	b := Batch{ProducerID: 31, Count: 2}
	txn := Batch{ProducerID: 32, Count: 2, Transactional: true}
	withoutID := Batch{ProducerID: NoProducerID, Count: 2}
	k := Marker{ProducerID: 33, CoordinatorEpoch: 1}
	for _, tt := range []struct {
		call    string
		overlap bool // what lies below the end is accepted
		record  func(m *ProducerStateManager, base int64) error
	}{
		{"CommitBatch", false, func(m *ProducerStateManager, base int64) error { return m.CommitBatch(b, base) }},
		{"CommitBatch, transactional", false, func(m *ProducerStateManager, base int64) error { return m.CommitBatch(txn, base) }},
		{"CommitBatch, no producer id", false, func(m *ProducerStateManager, base int64) error { return m.CommitBatch(withoutID, base) }},
		{"Apply", false, func(m *ProducerStateManager, base int64) error { return firstError(m.Apply(b, base)) }},
		{"Apply, no producer id", false, func(m *ProducerStateManager, base int64) error { return firstError(m.Apply(withoutID, base)) }},
		{"CommitMarker", false, func(m *ProducerStateManager, base int64) error { return m.CommitMarker(k, base) }},
		{"Reserve and Commit", false, func(m *ProducerStateManager, base int64) error { return reserveAndCommit(m, b, base) }},
		{"Reserve and Commit, no producer id", false, func(m *ProducerStateManager, base int64) error { return reserveAndCommit(m, withoutID, base) }},
		{"ReserveMarker and Commit", false, func(m *ProducerStateManager, base int64) error {
			r, err := m.ReserveMarker(k)
			if err == nil {
				if err = r.Commit(base); err != nil {
					err = errors.Join(err, r.Abort())
				}
			}
			return err
		}},
		{"Replay", true, func(m *ProducerStateManager, base int64) error { return m.Replay(b, base) }},
		{"Replay, no producer id", true, func(m *ProducerStateManager, base int64) error { return m.Replay(withoutID, base) }},
		{"ReplayMarker", true, func(m *ProducerStateManager, base int64) error { return m.ReplayMarker(k, base) }},
	} {
		for base := int64(0); base < 20; base++ {
			m := New(Config{Contiguous: true})
			settled(t, m.Commit(1, 0, 0, 7, 0), m.Commit(2, 0, 0, 3, 7))
			before := stateOf(m)
			err := tt.record(m, base)
			audit(t, m)
			if ok := base == 10 || base < 10 && tt.overlap; ok != (err == nil) || !ok && !errors.Is(err, ErrOffsetOrder) {
				t.Errorf("%s at %d: %v", tt.call, base, err)
			}
			if err != nil && !reflect.DeepEqual(before, stateOf(m)) {
				t.Errorf("%s at %d is refused and changed the state:\n%s", tt.call, base, cmp.Diff(before, stateOf(m)))
			}
		}
	}
}

func reserveAndCommit(m *ProducerStateManager, b Batch, base int64) error {
	r, _, err := m.Reserve(b)
	if err != nil {
		return err
	}
	if err := r.Commit(base); err != nil {
		return errors.Join(err, r.Abort())
	}
	return nil
}

// TestContiguousInFlight: with something in flight, an append can lie behind as much as
// that will take, and no further.
func TestContiguousInFlight(t *testing.T) {
	play(t, `
		contiguous=1
		commit pid=1 epoch=0 seq=0 n=1 base=0 -> OK
		reserve pid=2 epoch=0 seq=0 n=3 -> OK #A
		reserve pid=3 epoch=0 seq=0 n=2 -> OK #B
		reserve pid=3 epoch=0 seq=2 n=1 -> OK #C
		commit #C base=7 -> REFUSED OFFSET_ORDER base=7 lowest=3
		commit #C base=6 -> OK
		commit pid=4 epoch=0 seq=0 n=1 base=13 -> REFUSED OFFSET_ORDER base=13 lowest=7
		commit pid=4 epoch=0 seq=0 n=1 base=7 -> OK
		commit #A base=0 -> REFUSED OFFSET_ORDER base=0 lowest=1
		commit #A base=1 -> OK
		commit #B base=4 -> OK
		end -> 8
		commit pid=4 epoch=0 seq=1 n=1 base=9 -> REFUSED OFFSET_ORDER base=9 lowest=8
		commit pid=4 epoch=0 seq=1 n=1 base=8 -> OK
	`)
}

// TestContiguousBegins: a log that has lost its head to retention begins where
// AdvanceStart, Advance or a restored snapshot says.
func TestContiguousBegins(t *testing.T) {
	cfg := Config{Contiguous: true}
	for name, begin := range map[string]func() *ProducerStateManager{
		"AdvanceStart": func() *ProducerStateManager { m := New(cfg); m.AdvanceStart(500); return m },
		"Advance":      func() *ProducerStateManager { m := New(cfg); m.Advance(500); return m },
		"ReplayedTo":   func() *ProducerStateManager { m := New(cfg); m.ReplayedTo(500); return m },
		"Restore": func() *ProducerStateManager {
			m := New(Config{})
			m.Advance(500)
			return restored(t, cfg, encoded(t, m))
		},
	} {
		for base, want := range map[int64]bool{499: false, 500: true, 501: false} {
			if err := begin().Commit(31, 0, 0, 1, base); (err == nil) != want {
				t.Errorf("after %s(500) a commit at %d: %v", name, base, err)
			}
		}
	}
}

// embedder makes no mistakes: it has one log without holes, and tells two managers of it
// alike, one of which knows that there are no holes. A follower replays the log into a
// third. Batches are handed to the log in the order of their reservations, settle in any
// order, and fail with everything behind them.
type embedder struct {
	t       rapid.TB
	pick    func(n int) int
	cfg     Config
	m, n    *ProducerStateManager // with Config.Contiguous and without
	f       *ProducerStateManager // the follower, with it
	told    int                   // how many entries the follower has
	log     []*embedderEntry
	now     int64
	saved   []embedderSnapshot
	history []string
	met     map[string]int
}

// embedderEntry is an entry of the log. It is pending until the managers know it.
type embedderEntry struct {
	logged
	r       [2]*Reservation
	pending bool
}

type embedderSnapshot struct {
	bytes  []byte
	logEnd int64
}

func newEmbedder(t rapid.TB, c chooser) *embedder {
	cfg := Config{UnknownProducer: AcceptAny, Expiration: 100 * time.Millisecond, MaxProducers: []int{0, 3}[c.pick(2)]}
	e := &embedder{t: t, pick: c.pick, cfg: cfg, met: map[string]int{}}
	e.m, e.n, e.f = New(e.contiguous()), New(cfg), New(e.contiguous())
	return e
}

func (e *embedder) contiguous() Config {
	cfg := e.cfg
	cfg.Contiguous = true
	return cfg
}

func (e *embedder) fail(format string, args ...any) {
	e.t.Helper()
	e.t.Fatalf("%s\n%s", strings.Join(e.history, "\n"), fmt.Sprintf(format, args...))
}

// both tells both managers, and requires that neither refuses. It returns false if both
// find the batch out of order alike: a producer that was forgotten came back by a replay
// that overlaps, with a part of what it had, or the log was cut before a first batch that
// failed.
func (e *embedder) both(what string, call func(m *ProducerStateManager) error) bool {
	e.t.Helper()
	e.history = append(e.history, what)
	e.met[strings.Fields(what)[0]]++
	errs := [2]error{call(e.m), call(e.n)}
	var facts [2]*BatchError
	if errors.As(errs[0], &facts[0]) && errors.As(errs[1], &facts[1]) && facts[0].Err == ErrOutOfOrderSequence &&
		reflect.DeepEqual(facts[0], facts[1]) {
		e.met["out of order"]++
		return false
	}
	for i, err := range errs {
		if err != nil {
			e.fail("refused, with Contiguous %t: %v", i == 0, err)
		}
	}
	return true
}

func (e *embedder) end() int64 {
	if len(e.log) == 0 {
		return 0
	}
	return e.log[len(e.log)-1].end()
}

func (e *embedder) append(l logged) { e.log = append(e.log, &embedderEntry{logged: l}) }

// embedderOutlook is what a producer can send next.
type embedderOutlook struct {
	epoch   int16
	next    int32
	open    bool // a transaction
	pending int  // batches and markers in its queue
	marker  bool // one of them is a marker
}

func (e *embedder) look(pid int64) (o embedderOutlook) {
	for _, l := range e.log {
		if l.pid() != pid {
			continue
		}
		if l.epoch() != o.epoch {
			o.epoch, o.next = l.epoch(), 0
		}
		if l.marker != nil {
			o.open = false
		} else {
			o.next = nextAfter(l.batch)
			o.open = o.open || l.batch.Transactional
		}
		if l.pending || o.pending > 0 { // what is committed behind one that is not is not visible
			o.pending++
			o.marker = o.marker || l.marker != nil
		}
	}
	return o
}

func (e *embedder) pid() int64 { return 31 + int64(e.pick(5)) }

func (e *embedder) next(pid int64, o embedderOutlook) Batch {
	b := Batch{ProducerID: pid, Epoch: o.epoch, BaseSequence: o.next, Count: int32(1 + e.pick(3)), Transactional: o.open || e.pick(4) == 0}
	if !o.open && o.pending == 0 && e.pick(8) == 0 {
		b.Epoch, b.BaseSequence = o.epoch+1, 0
	}
	return b
}

// commit appends a batch that nothing of its producer is in front of.
func (e *embedder) commit() {
	pid := e.pid()
	o := e.look(pid)
	if o.pending > 0 {
		return
	}
	b, base := e.next(pid, o), e.end()
	what, record := "commit", func(m *ProducerStateManager) error { return m.CommitBatch(b, base) }
	if e.pick(2) == 0 {
		what, record = "apply", func(m *ProducerStateManager) error { return firstError(m.Apply(b, base)) }
	}
	if e.both(fmt.Sprintf("%s %s base=%d", what, words(b), base), record) {
		e.append(logged{batch: b, base: base})
	}
}

// withoutID appends records without a producer id.
func (e *embedder) withoutID() {
	b, base := Batch{ProducerID: NoProducerID, Epoch: -1, BaseSequence: -1, Count: int32(1 + e.pick(3))}, e.end()
	l := logged{batch: b, base: base}
	switch e.pick(3) {
	case 0:
		e.both(fmt.Sprintf("advance to=%d", l.end()), func(m *ProducerStateManager) error { m.Advance(l.end()); return nil })
	case 1:
		e.both(fmt.Sprintf("commit-without-id n=%d base=%d", b.Count, base), func(m *ProducerStateManager) error { return m.CommitBatch(b, base) })
	case 2:
		e.reserve(l, func(m *ProducerStateManager) (*Reservation, error) { r, _, err := m.Reserve(b); return r, err })
		return
	}
	e.append(l)
}

func (e *embedder) reserveNext() {
	pid := e.pid()
	o := e.look(pid)
	if o.pending == WindowSize || o.marker {
		return
	}
	b := e.next(pid, o)
	e.reserve(logged{batch: b, base: e.end()}, func(m *ProducerStateManager) (*Reservation, error) {
		r, _, err := m.Reserve(b)
		return r, err
	})
}

func (e *embedder) reserve(l logged, reserve func(m *ProducerStateManager) (*Reservation, error)) {
	entry := &embedderEntry{logged: l, pending: true}
	i := 0
	if e.both("reserve "+l.words(), func(m *ProducerStateManager) (err error) {
		entry.r[i], err = reserve(m)
		i++
		return err
	}) {
		e.log = append(e.log, entry)
	}
}

// marker ends a transaction.
func (e *embedder) marker() {
	pid := e.pid()
	o := e.look(pid)
	if !o.open || o.pending > 0 {
		return
	}
	k := Marker{ProducerID: pid, Epoch: o.epoch + int16(e.pick(2)), CoordinatorEpoch: 1, Commit: e.pick(2) == 0}
	l := logged{marker: &k, base: e.end()}
	if e.pick(2) == 0 {
		e.reserve(l, func(m *ProducerStateManager) (*Reservation, error) { return m.ReserveMarker(k) })
		return
	}
	e.both("marker "+l.words(), func(m *ProducerStateManager) error { return errors.Join(m.CheckMarker(k), m.CommitMarker(k, l.base)) })
	e.append(l)
}

func (e *embedder) settle() {
	var pending []*embedderEntry
	for _, l := range e.log {
		if l.pending {
			pending = append(pending, l)
		}
	}
	if len(pending) == 0 {
		return
	}
	l, i := pending[e.pick(len(pending))], 0
	e.both("settle "+l.words(), func(*ProducerStateManager) error {
		i++
		return l.r[i-1].Commit(l.base)
	})
	l.pending = false
}

// tail returns where the end of the log begins of which nothing is known.
func (e *embedder) tail() int {
	i := len(e.log)
	for i > 0 && e.log[i-1].pending {
		i--
	}
	return i
}

// failed ends an append that has failed, and all behind it.
func (e *embedder) failed() {
	i := e.tail()
	if i == len(e.log) {
		return
	}
	i += e.pick(len(e.log) - i)
	for _, l := range e.log[i:] {
		j := 0
		e.both("failed "+l.words(), func(*ProducerStateManager) error {
			j++
			if err := l.r[j-1].Abort(); err != nil && err != ErrAbandoned {
				return err
			}
			return nil
		})
	}
	e.log = e.log[:i]
}

// loseTail decides what became of the appends whose outcome is never reported.
func (e *embedder) loseTail() {
	i := e.tail()
	e.log = e.log[:i+e.pick(len(e.log)-i+1)]
	for _, l := range e.log {
		l.pending = false
	}
}

// stepDown loses leadership, and reads what is in the log, or cuts it off.
func (e *embedder) stepDown() {
	e.both("step-down", func(m *ProducerStateManager) error { m.AbandonReservations(); return nil })
	e.loseTail()
	from, other := e.m.Snapshot().EndOffset(), e.n.Snapshot().EndOffset()
	if from != other {
		e.fail("a snapshot ends at %d, and without Contiguous at %d", from, other)
	}
	e.replayFrom(from)
}

// replayFrom reads the log from an offset, or from some entries before.
func (e *embedder) replayFrom(from int64) {
	i := 0
	for i < len(e.log) && e.log[i].end() <= from {
		i++
	}
	for _, l := range e.log[max(0, i-e.pick(4)):] {
		e.both("replay "+l.words(), func(m *ProducerStateManager) error { return apply(m, l.logged) })
	}
	e.both(fmt.Sprintf("replayed-to %d", e.end()), func(m *ProducerStateManager) error { m.ReplayedTo(e.end()); return nil })
}

func (e *embedder) truncate() {
	if len(e.log) == 0 || e.pick(2) == 0 {
		return
	}
	e.loseTail()
	i := max(0, len(e.log)-e.pick(8))
	e.log = e.log[:i]
	to := e.end()
	exact := e.m.Truncate(to)
	if e.n.Truncate(to) != exact {
		e.fail("a cut to %d is exact: %t, and without Contiguous %t", to, exact, !exact)
	}
	e.history = append(e.history, fmt.Sprintf("truncate to=%d -> %t", to, exact))
	e.met[fmt.Sprintf("truncate, exact %t", exact)]++
	e.saved = slices.DeleteFunc(e.saved, func(s embedderSnapshot) bool { return s.logEnd > to })
	if !exact {
		e.both("reset", func(m *ProducerStateManager) error { m.Reset(); return nil })
		e.replayFrom(0)
	}
	if e.told > i {
		if e.told = i; !e.f.Truncate(to) {
			e.f, e.told = New(e.contiguous()), 0
		}
	}
}

func (e *embedder) save() {
	var file, other bytes.Buffer
	s := e.m.Snapshot()
	_, err := s.WriteTo(&file)
	_, err2 := e.n.Snapshot().WriteTo(&other)
	if err != nil || err2 != nil || !bytes.Equal(file.Bytes(), other.Bytes()) {
		e.fail("%v, %v, or the snapshots differ", err, err2)
	}
	e.saved = append(e.saved, embedderSnapshot{file.Bytes(), s.LogEndOffset()})
}

// restart loses the memory, and what of the log was not written yet.
func (e *embedder) restart() {
	if e.pick(2) == 0 {
		return
	}
	e.loseTail()
	e.m, e.n = New(e.contiguous()), New(e.cfg)
	e.saved = slices.DeleteFunc(e.saved, func(s embedderSnapshot) bool { return s.logEnd > e.end() })
	if len(e.saved) > 0 {
		s := e.saved[e.pick(len(e.saved))]
		e.both("restore", func(m *ProducerStateManager) error { return m.Restore(bytes.NewReader(s.bytes)) })
	}
	e.replayFrom(e.m.EndOffset())
}

func (e *embedder) expire() {
	e.now += int64(e.pick(80))
	e.both(fmt.Sprintf("expire now=%d", e.now), func(m *ProducerStateManager) error { m.Expire(time.UnixMilli(e.now)); return nil })
	e.f.Expire(time.UnixMilli(e.now))
}

// follow lets the follower fetch what is settled, or restart from its own snapshot.
func (e *embedder) follow() {
	if e.pick(5) == 0 {
		e.f = restored(e.t, e.contiguous(), encoded(e.t, e.f))
		e.told = max(0, e.told-e.pick(3))
		e.met["follower restarts"]++
	}
	for e.told < len(e.log) && !e.log[e.told].pending {
		if err := apply(e.f, e.log[e.told].logged); err != nil {
			e.fail("the follower refuses %s: %v", e.log[e.told].words(), err)
		}
		e.told++
		e.met["followed"]++
	}
}

var embedderDeeds = []func(*embedder){
	(*embedder).commit, (*embedder).commit, (*embedder).withoutID, (*embedder).marker, (*embedder).marker,
	(*embedder).reserveNext, (*embedder).reserveNext, (*embedder).reserveNext, (*embedder).settle, (*embedder).settle,
	(*embedder).settle, (*embedder).failed, (*embedder).stepDown, (*embedder).truncate, (*embedder).save,
	(*embedder).restart, (*embedder).expire, (*embedder).follow, (*embedder).follow,
}

func (e *embedder) run(steps int) {
	for range steps {
		embedderDeeds[e.pick(len(embedderDeeds))](e)
		audit(e.t, e.m)
		if want, got := stateOf(e.n), stateOf(e.m); !reflect.DeepEqual(want, got) {
			e.fail("the state (-without Contiguous +with):\n%s", cmp.Diff(want, got))
		}
	}
}

// TestContiguousRefusesNoRightEmbedder: with followers, replays that overlap, appends
// without a producer id, markers, and reservations that are committed in any order,
// fail, or are abandoned.
func TestContiguousRefusesNoRightEmbedder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		newEmbedder(t, drawn{t}).run(rapid.IntRange(0, 80).Draw(t, "steps"))
	})
}

// TestContiguousLong is the same over long runs, and sees to it that each thing does
// happen.
func TestContiguousLong(t *testing.T) {
	met := map[string]int{}
	for seed := range uint64(60) {
		e := newEmbedder(t, seeded{rand.New(rand.NewPCG(seed, 5))})
		e.run(400)
		for what, n := range e.met {
			met[what] += n
		}
	}
	if rare := met["out of order"]; rare > met["commit"]/10 {
		t.Errorf("%d batches were out of order, of %d commits", rare, met["commit"])
	}
	for _, what := range []string{
		"commit", "apply", "advance", "commit-without-id", "reserve", "settle", "failed", "marker", "step-down", "replay", "replayed-to",
		"truncate, exact true", "truncate, exact false", "restore", "expire", "followed", "follower restarts",
	} {
		if met[what] < 100 {
			t.Errorf("%s: happened %d times", what, met[what])
		}
	}
}
