package idempotence

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// This file holds the rules to their word, one transcript a rule and a refusal
// (see transcript_test.go for how they read), and the API around them.

// TestCommit has what only a Commit refuses, and what it judges again.
func TestCommit(t *testing.T) {
	for _, tt := range []struct{ name, trace string }{
		{"a batch that is remembered already", `
			check pid=31 epoch=0 seq=0 n=2 -> OK #A
			commit #A base=0 -> OK
			commit pid=31 epoch=0 seq=0 n=2 base=2 -> REFUSED DUPLICATE_SEQUENCE base=2 first=0 expected=2 current=0
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			commit pid=31 epoch=0 seq=0 n=2 base=3 -> REFUSED DUPLICATE_SEQUENCE base=3 first=0 expected=3
			stats -> accepted=2 duplicate=0 out-of-order=2 unknown=0 fenced=0 invalid=0
		`},
		{"two appenders raced: the second is refused, whichever checked first", `
			check pid=31 epoch=0 seq=0 n=1 -> OK #A
			check pid=31 epoch=0 seq=0 n=2 -> OK #B
			commit #B base=0 -> OK
			commit #A base=2 -> REFUSED OUT_OF_ORDER expected=2
		`},
		{"the epoch moved after the Check", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			check pid=31 epoch=0 seq=1 n=1 -> OK #A
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=1
			commit #A base=2 -> REFUSED STALE_EPOCH current=1
		`},
		{"an offset at or below the producer's newest", `
			batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
			commit pid=31 epoch=0 seq=3 n=1 base=7 -> OK
			commit pid=31 epoch=0 seq=4 n=1 base=7 -> REFUSED OFFSET_ORDER base=7 lowest=8 expected=-1 current=0
			commit pid=31 epoch=0 seq=4 n=1 base=6 -> REFUSED OFFSET_ORDER base=6 lowest=8
			commit pid=31 epoch=0 seq=4 n=1 base=0 -> REFUSED OFFSET_ORDER base=0 lowest=8
			end -> 8
			commit pid=31 epoch=0 seq=4 n=1 base=8 -> OK
			end -> 9
		`},
		{"also for a newer epoch, whose window is about to be cleared", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			commit pid=31 epoch=1 seq=0 n=1 base=1 -> REFUSED OFFSET_ORDER base=1 lowest=2
			commit pid=31 epoch=1 seq=0 n=1 base=2 -> OK
		`},
		{"an offset below the end, above the producer's newest, is another's business", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			advance to=50
			commit pid=31 epoch=0 seq=1 n=2 base=5 -> OK
			commit pid=32 epoch=0 seq=0 n=1 base=1 -> OK
			end -> 50
			window pid=31 -> epoch=0 0..0@0 1..2@5
		`},
		{"a negative offset", `
			commit pid=31 epoch=0 seq=0 n=1 base=-1 -> REFUSED OFFSET_ORDER base=-1 lowest=0 expected=-1 current=-1
			commit pid=31 epoch=0 seq=0 n=1 base=-9223372036854775808 -> REFUSED OFFSET_ORDER
			commit pid=-1 epoch=-1 seq=-1 n=1 base=-1 -> REFUSED OFFSET_ORDER
			producers -> 0
			highest-pid -> -1
			end -> 0
		`},
		{"an offset that leaves no room for the batch", `
			commit pid=31 epoch=0 seq=0 n=2 base=9223372036854775806 -> REFUSED OFFSET_ORDER lowest=0
			commit pid=31 epoch=0 seq=0 n=1 base=9223372036854775807 -> REFUSED OFFSET_ORDER
			commit pid=-1 epoch=-1 seq=-1 n=1 base=9223372036854775807 -> REFUSED OFFSET_ORDER
			commit pid=31 epoch=0 seq=0 n=2147483647 base=9223372034707292160 -> OK
			end -> 9223372036854775807
			commit pid=31 epoch=0 seq=2147483647 n=1 base=9223372036854775807 -> REFUSED OFFSET_ORDER
			commit pid=32 epoch=0 seq=0 n=1 base=9223372036854775806 -> OK
		`},
		{"the same for the next batch of the producer that wrote last", `
			commit pid=31 epoch=0 seq=0 n=1 base=9223372036854775800 -> OK
			commit pid=31 epoch=0 seq=1 n=7 base=9223372036854775801 -> REFUSED OFFSET_ORDER
			commit pid=31 epoch=0 seq=1 n=6 base=9223372036854775801 -> OK
			end -> 9223372036854775807
		`},
		{"without a Check", `
			commit pid=31 epoch=0 seq=0 n=1 base=4 -> OK
			commit pid=31 epoch=0 seq=2 n=1 base=5 -> REFUSED OUT_OF_ORDER expected=1 current=0 base=5
			commit pid=31 epoch=0 seq=1 n=1 base=9 -> OK
			window pid=31 -> epoch=0 0..0@4 1..1@9
			end -> 10
		`},
		{"a failed append leaves no trace, and a failed first one no producer", `
			check pid=31 epoch=0 seq=0 n=2 -> OK #A
			append-failed #A
			producers -> 0
			window pid=31 -> none
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
		`},
	} {
		t.Run(tt.name, func(t *testing.T) { play(t, tt.trace) })
	}
}

// TestNewIsEmpty: nothing is known of a new log.
func TestNewIsEmpty(t *testing.T) {
	m := New(Config{})
	audit(t, m)
	if diff := cmp.Diff(observed{EndOffset: 0, MaxProducerID: NoProducerID}, stateOf(m)); diff != "" {
		t.Errorf("a new manager (-want +got):\n%s", diff)
	}
	if m.Len() != 0 || m.Stats() != (Stats{}) {
		t.Errorf("a new manager has %d producers and %+v", m.Len(), m.Stats())
	}
	for p := range m.Producers() {
		t.Errorf("a new manager knows %+v", p)
	}
}

// TestCheckIsShorthand: Check and Commit are CheckBatch and CommitBatch.
func TestCheckIsShorthand(t *testing.T) {
	short, long := New(Config{}), New(Config{})
	b := Batch{ProducerID: 31, Epoch: 2, BaseSequence: 0, Count: 3}
	for range 2 {
		res1, err1 := short.Check(31, 2, 0, 3)
		res2, err2 := long.CheckBatch(b)
		if res1 != res2 || err1 != nil || err2 != nil {
			t.Fatalf("Check: %+v, %v; CheckBatch: %+v, %v", res1, err1, res2, err2)
		}
		err1, err2 = short.Commit(31, 2, 0, 3, 7), long.CommitBatch(b, 7)
		if fmt.Sprint(err1) != fmt.Sprint(err2) {
			t.Fatalf("Commit: %v; CommitBatch: %v", err1, err2)
		}
		if diff := cmp.Diff(stateOf(long), stateOf(short)); diff != "" {
			t.Fatalf("(-long +short):\n%s", diff)
		}
	}
}

// TestAdvance: the end offset only rises.
func TestAdvance(t *testing.T) {
	m := New(Config{})
	for _, step := range []struct{ to, want int64 }{
		{5, 5}, {3, 5}, {0, 5}, {-1, 5}, {math.MinInt64, 5}, {6, 6}, {math.MaxInt64, math.MaxInt64},
	} {
		m.Advance(step.to)
		if got := m.EndOffset(); got != step.want {
			t.Errorf("after Advance(%d) the end offset is %d, want %d", step.to, got, step.want)
		}
		audit(t, m)
	}
}

// TestNoAllocation: neither an accepted batch nor a duplicate allocates, and a
// reservation does so once at most, on the average far less.
func TestNoAllocation(t *testing.T) {
	m := New(Config{})
	seq, offset := int32(0), int64(0)
	accepted := func() {
		if _, err := m.Check(31, 0, seq, 1); err != nil {
			t.Fatal(err)
		}
		if err := m.Commit(31, 0, seq, 1, offset); err != nil {
			t.Fatal(err)
		}
		seq++
		offset++
	}
	duplicate := func() {
		if res, err := m.Check(31, 0, seq-1, 1); err != nil || res.Verdict != Duplicate {
			t.Fatal(res, err)
		}
	}
	accepted()
	if n := testing.AllocsPerRun(100, accepted); n != 0 {
		t.Errorf("an accepted batch allocates %v times", n)
	}
	if n := testing.AllocsPerRun(100, duplicate); n != 0 {
		t.Errorf("a duplicate allocates %v times", n)
	}
	reserved := func() {
		r, _, err := m.Reserve(Batch{ProducerID: 31, BaseSequence: seq, Count: 1})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Commit(offset); err != nil {
			t.Fatal(err)
		}
		seq++
		offset++
	}
	reserved()
	if n := testing.AllocsPerRun(10*reservationBlock, reserved); n != 0 { // rounded down
		t.Errorf("a reservation allocates %v times", n)
	}
}

// TestF8_OffsetInsideNewestBatch: no log gives an offset inside a batch. The
// newest one remembered of the producer begins at 4 and ends at 7; anything below its
// end is ErrOffsetOrder, whatever records it.
func TestF8_OffsetInsideNewestBatch(t *testing.T) {
	next := Batch{ProducerID: 31, BaseSequence: 3, Count: 2}
	newer := Batch{ProducerID: 31, Epoch: 1, Count: 2}
	txn := Batch{ProducerID: 31, BaseSequence: 3, Count: 2, Transactional: true}
	for name, record := range map[string]func(m *ProducerStateManager, base int64) error{
		"CommitBatch":                func(m *ProducerStateManager, base int64) error { return m.CommitBatch(next, base) },
		"CommitBatch, a newer epoch": func(m *ProducerStateManager, base int64) error { return m.CommitBatch(newer, base) },
		"CommitBatch, transactional": func(m *ProducerStateManager, base int64) error { return m.CommitBatch(txn, base) },
		"Apply":                      func(m *ProducerStateManager, base int64) error { return firstError(m.Apply(next, base)) },
		"CommitMarker":               func(m *ProducerStateManager, base int64) error { return m.CommitMarker(Marker{ProducerID: 31}, base) },
		"CommitMarker, a newer epoch": func(m *ProducerStateManager, base int64) error {
			return m.CommitMarker(Marker{ProducerID: 31, Epoch: 1}, base)
		},
		"Reserve and Commit": func(m *ProducerStateManager, base int64) error {
			r, _, err := m.Reserve(next)
			return errors.Join(err, r.Commit(base))
		},
		"Reserve and Commit, a newer epoch": func(m *ProducerStateManager, base int64) error {
			r, _, err := m.Reserve(newer)
			return errors.Join(err, r.Commit(base))
		},
		"ReserveMarker and Commit": func(m *ProducerStateManager, base int64) error {
			r, err := m.ReserveMarker(Marker{ProducerID: 31})
			settled(t, err)
			if err := r.Commit(base); err != nil {
				return errors.Join(err, r.Abort())
			}
			return nil
		},
		"Reserve and Commit behind another": func(m *ProducerStateManager, base int64) error {
			first, _, err := m.Reserve(Batch{ProducerID: 31, BaseSequence: 3, Count: 1})
			second, _, err2 := m.Reserve(Batch{ProducerID: 31, BaseSequence: 4, Count: 1})
			if base > 6 {
				return errors.Join(err, err2, second.Commit(base+1), first.Commit(base))
			}
			return errors.Join(err, err2, second.Commit(base+1))
		},
	} {
		for base := int64(0); base <= 8; base++ {
			m := New(Config{})
			settled(t, m.Commit(31, 0, 0, 3, 4))
			err := record(m, base)
			audit(t, m)
			if base < 7 && !errors.Is(err, ErrOffsetOrder) || base >= 7 && err != nil {
				t.Errorf("%s at %d: %v", name, base, err)
			}
			var e *BatchError
			if errors.As(err, &e) && (e.BaseOffset < base || e.LowestOffset < 7) {
				t.Errorf("%s at %d: base offset %d, lowest possible %d", name, base, e.BaseOffset, e.LowestOffset)
			}
		}
	}
}

func firstError(_ Result, err error) error { return err }

// TestF18_ForgottenBetweenCheckAndCommit: Check changes nothing, so it cannot hold
// a producer. One that is forgotten while its batch is being appended is unknown to
// Commit, by Expire as by the cap. So in the first loop Expire is called under the append
// lock; a reservation holds its producer.
func TestF18_ForgottenBetweenCheckAndCommit(t *testing.T) {
	at := time.Unix(1000, 0)
	idle := func() *ProducerStateManager {
		m := New(Config{Expiration: time.Minute, MaxProducers: 1})
		settled(t, m.Commit(1, 0, 0, 1, 0))
		m.Expire(at)
		return m
	}
	for name, forget := range map[string]func(m *ProducerStateManager){
		"Expire":   func(m *ProducerStateManager) { m.Expire(at.Add(2 * time.Minute)) },
		"eviction": func(m *ProducerStateManager) { settled(t, m.Commit(2, 0, 0, 1, 2)) },
	} {
		m := idle()
		if res, err := m.Check(1, 0, 1, 1); err != nil || res.Verdict != Append {
			t.Fatalf("Check: %+v, %v", res, err)
		}
		forget(m)
		if err := m.Commit(1, 0, 1, 1, 1); !errors.Is(err, ErrUnknownProducer) {
			t.Errorf("%s: Commit returns %v, want ErrUnknownProducer", name, err)
		}
		audit(t, m)

		m = idle()
		r, _, err := m.Reserve(Batch{ProducerID: 1, BaseSequence: 1, Count: 1})
		settled(t, err)
		forget(m)
		settled(t, r.Commit(1))
		audit(t, m)
		if res, err := m.Check(1, 0, 0, 1); err != nil || res != (Result{Duplicate, 0}) {
			t.Errorf("%s: a reservation does not hold its producer: the first batch gets %+v, %v", name, res, err)
		}

		m = idle() // under the append lock
		if _, err := m.Check(1, 0, 1, 1); err != nil {
			t.Fatal(err)
		}
		settled(t, m.Commit(1, 0, 1, 1, 1))
		m.Expire(at.Add(2 * time.Minute))
		if res, err := m.Check(1, 0, 1, 1); err != nil || res != (Result{Duplicate, 1}) {
			t.Errorf("%s: a retry gets %+v, %v", name, res, err)
		}
	}
}

// The zero ProducerStateManager is not to be used, but it must not hang: without
// a seed every producer id has the same hash, and no bucket could be split.
func TestZeroManagerDoesNotHang(t *testing.T) {
	var m ProducerStateManager
	for pid := range int64(2000) {
		if err := m.Commit(pid, 0, 0, 1, pid); err != nil {
			t.Fatal(err)
		}
	}
	if m.Len() != 2000 {
		t.Errorf("%d producers", m.Len())
	}
}
