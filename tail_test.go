package idempotence

import (
	"bytes"
	"testing"
)

// This file tests what the log may hold unknown to the manager: where a snapshot must
// end, what a replay and ReplayedTo make known, and when Truncate is exact again.

// TestF1_NothingLanded: reservations are abandoned and nothing of them is in the
// log. Snapshots end at the log's end again once ReplayedTo has said that there is
// nothing to replay; otherwise a restart would replay from the old end for ever.
func TestF1_NothingLanded(t *testing.T) {
	m := New(Config{})
	settled(t, m.Commit(1, 0, 0, 1, 0))
	if _, _, err := m.Reserve(Batch{ProducerID: 1, BaseSequence: 1, Count: 1}); err != nil {
		t.Fatal(err)
	}
	m.AbandonReservations()
	for s := int32(1); s < 1000; s++ {
		settled(t, m.Commit(1, 0, s, 1, int64(s)))
	}
	requireTail(t, m, 1, false)
	m.ReplayedTo(1)
	requireTail(t, m, 1000, true)

	after := restored(t, Config{}, encoded(t, m))
	if res, err := after.Check(1, 0, 999, 1); err != nil || res != (Result{Duplicate, 999}) {
		t.Errorf("after a restart a retry of the newest batch gets %+v, %v", res, err)
	}
}

// requireTail checks where a snapshot would end, and whether a Truncate that cuts
// nothing is exact.
func requireTail(t *testing.T, m *ProducerStateManager, end int64, exact bool) {
	t.Helper()
	audit(t, m)
	if got := m.Snapshot().EndOffset(); got != end {
		t.Errorf("a snapshot ends at %d, want %d", got, end)
	}
	m.mu.Lock()
	unknown := m.inFlight.tail.unknown
	m.mu.Unlock()
	if unknown == exact {
		t.Errorf("something is unknown: %t, want %t", unknown, !exact)
	}
}

// TestF1_Siblings: what ends the unknown part after AbandonReservations, and what does
// not. Producer 32 has committed batches at 0 and 2 to 5, and a batch of producer 31
// that was in flight may lie at 1.
func TestF1_Siblings(t *testing.T) {
	noOp := func(base int64) []byte {
		return controlBatch(base, NoProducerID, -1, []byte{0, 0, 0, 2}, []byte{7}).encode()
	}
	batches := func(first, last int64) []byte {
		var log []byte
		for base := first; base <= last; base++ {
			log = append(log, dataBatch(base, 32, 0, int32(base), 1).encode()...)
		}
		return log
	}
	replayLog := func(m *ProducerStateManager, log ...[]byte) error {
		_, err := m.ReplayLog(bytes.NewReader(bytes.Join(log, nil)))
		return err
	}
	replay := func(m *ProducerStateManager, first, last int64) {
		for base := first; base <= last; base++ {
			settled(t, m.Replay(Batch{ProducerID: 32, BaseSequence: int32(base), Count: 1}, base))
		}
	}
	for _, tt := range []struct {
		name  string
		do    func(m *ProducerStateManager)
		end   int64
		exact bool
	}{
		{"nothing", func(m *ProducerStateManager) {}, 1, false},
		{"ReplayedTo below", func(m *ProducerStateManager) { m.ReplayedTo(0) }, 1, false},
		{"ReplayedTo a part of what was known then", func(m *ProducerStateManager) { m.ReplayedTo(4) }, 4, false},
		{"ReplayedTo all that was known then", func(m *ProducerStateManager) { m.ReplayedTo(6) }, 6, true},
		{"ReplayedTo beyond, which is an Advance", func(m *ProducerStateManager) { m.ReplayedTo(9) }, 9, true},
		{"ReplayedTo in two parts", func(m *ProducerStateManager) { m.ReplayedTo(3); m.ReplayedTo(6) }, 6, true},
		{"a new leader's record that is told by Advance, and a replay behind it", func(m *ProducerStateManager) {
			m.Advance(7)
			replay(m, 7, 8)
		}, 1, false},
		{"the same, and ReplayedTo", func(m *ProducerStateManager) {
			m.Advance(7)
			replay(m, 7, 8)
			m.ReplayedTo(9)
		}, 9, true},
		{"a replay from there", func(m *ProducerStateManager) { replay(m, 1, 5) }, 6, true},
		{"a replay from below", func(m *ProducerStateManager) { replay(m, 0, 5) }, 6, true},
		{"a replay from there that stops early", func(m *ProducerStateManager) { replay(m, 1, 3) }, 4, false},
		{"a replay from behind", func(m *ProducerStateManager) { replay(m, 2, 5) }, 1, false},
		{"a log from there", func(m *ProducerStateManager) { settled(t, replayLog(m, batches(1, 5))) }, 6, true},
		{"a log that begins with a leader's record", func(m *ProducerStateManager) {
			settled(t, replayLog(m, noOp(1), batches(2, 5)))
		}, 6, true},
		{"a log of leaders' records only", func(m *ProducerStateManager) {
			settled(t, replayLog(m, noOp(1), noOp(6)))
		}, 7, true},
		{"a log from behind", func(m *ProducerStateManager) { settled(t, replayLog(m, noOp(2), batches(3, 5))) }, 1, false},
		{"a log with a torn tail", func(m *ProducerStateManager) {
			if replayLog(m, batches(1, 5)[:250]) == nil {
				t.Error("the tail is not torn")
			}
		}, 4, false},
		{"a cut behind it", func(m *ProducerStateManager) { m.Truncate(4) }, 1, false},
		{"a cut behind it, and ReplayedTo the new end", func(m *ProducerStateManager) { m.Truncate(4); m.ReplayedTo(4) }, 4, true},
		{"a cut at it", func(m *ProducerStateManager) { m.Truncate(1) }, 1, true},
		{"another reservation that is abandoned", func(m *ProducerStateManager) {
			if _, _, err := m.Reserve(Batch{ProducerID: 33, Count: 1}); err != nil {
				t.Fatal(err)
			}
			m.AbandonReservations()
			m.ReplayedTo(4)
		}, 4, false},
		{"one that is abandoned after it is known", func(m *ProducerStateManager) {
			m.ReplayedTo(6)
			if _, _, err := m.Reserve(Batch{ProducerID: 33, Count: 1}); err != nil {
				t.Fatal(err)
			}
			m.AbandonReservations()
		}, 6, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := New(Config{})
			settled(t, m.Replay(Batch{ProducerID: 32, Count: 1}, 0))
			if _, _, err := m.Reserve(Batch{ProducerID: 31, Count: 1}); err != nil {
				t.Fatal(err)
			}
			for base := int64(2); base < 6; base++ {
				settled(t, m.Replay(Batch{ProducerID: 32, BaseSequence: int32(base), Count: 1}, base))
			}
			m.AbandonReservations()
			tt.do(m)
			requireTail(t, m, tt.end, tt.exact)
		})
	}
}

// TestTailOfTransactions: a transactional batch that was abandoned holds the last
// stable offset back until the log up to there is known. A plain one does not.
func TestTailOfTransactions(t *testing.T) {
	for _, txn := range []bool{false, true} {
		m := New(Config{})
		m.Advance(3)
		r, _, err := m.Reserve(Batch{ProducerID: 31, Count: 1, Transactional: txn})
		settled(t, err)
		m.Advance(9)
		lso := func(hw int64) int64 { t.Helper(); audit(t, m); return m.LastStableOffset(hw) }
		low := int64(9)
		if txn {
			low = 3
		}
		if got := lso(9); got != low {
			t.Errorf("transactional %t: in flight, the last stable offset is %d, want %d", txn, got, low)
		}
		m.AbandonReservations()
		if got := lso(9); got != low {
			t.Errorf("transactional %t: abandoned, the last stable offset is %d, want %d", txn, got, low)
		}
		m.ReplayedTo(5)
		if got := lso(9); got != max(5, low) {
			t.Errorf("transactional %t: known up to 5, the last stable offset is %d, want %d", txn, got, max(5, low))
		}
		m.ReplayedTo(9)
		if got := lso(9); got != 9 {
			t.Errorf("transactional %t: all is known, and the last stable offset is %d", txn, got)
		}
		if err := r.Commit(3); err != ErrAbandoned {
			t.Errorf("the reservation: %v", err)
		}
	}
}

// TestReserve_8_SnapshotEnd: a snapshot holds committed batches only, and it ends
// so low that a replay from there meets every batch that was in flight. No batch
// lies below the end offset of the moment in which it was reserved.
func TestReserve_8_SnapshotEnd(t *testing.T) {
	t.Run("the oldest in flight", func(t *testing.T) {
		play(t, `
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
			snapshot-end -> 2
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #A
			commit pid=32 epoch=0 seq=0 n=1 base=3 -> OK
			reserve pid=31 epoch=0 seq=3 n=1 -> OK #B
			reserve pid=33 epoch=0 seq=0 n=1 -> OK #C
			snapshot-end -> 2
			commit #A base=2 -> OK
			snapshot-end -> 4
			commit #C base=5 -> OK
			snapshot-end -> 4
			commit #B base=4 -> OK
			snapshot-end -> 6
		`)
	})
	t.Run("committed behind one that is not", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			commit #B base=1 -> OK
			end -> 2
			snapshot-end -> 0
			append-failed #A -> GAP
			snapshot-end -> 1
		`)
	})
	t.Run("an abort is known not to be in the log", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			commit pid=32 epoch=0 seq=0 n=1 base=1 -> OK
			append-failed #A -> OK
			snapshot-end -> 2
		`)
	})
	t.Run("abandoned, until the log has been read again", func(t *testing.T) {
		play(t, `
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			commit pid=32 epoch=0 seq=1 n=1 base=2 -> OK
			abandon
			snapshot-end -> 1
			batch pid=32 epoch=0 seq=2 n=1 -> OK base=3
			snapshot-end -> 1
			replay pid=32 epoch=0 seq=1 n=1 base=2
			snapshot-end -> 1
			replay pid=31 epoch=0 seq=0 n=1 base=1
			snapshot-end -> 2
			replay pid=32 epoch=0 seq=1 n=1 base=2
			snapshot-end -> 3
			replay pid=32 epoch=0 seq=2 n=1 base=3
			snapshot-end -> 4
		`)
	})
	t.Run("abandoned, and read again from a log with gaps", func(t *testing.T) {
		play(t, `
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			commit pid=32 epoch=0 seq=1 n=1 base=7 -> OK
			abandon
			replay pid=32 epoch=0 seq=1 n=1 base=7
			snapshot-end -> 1
			replay pid=32 epoch=0 seq=0 n=1 base=0
			snapshot-end -> 1
			replay pid=31 epoch=0 seq=0 n=1 base=4
			snapshot-end -> 5
			replay pid=32 epoch=0 seq=1 n=1 base=7
			snapshot-end -> 8
		`)
	})
	t.Run("abandoned, and cut off", func(t *testing.T) {
		play(t, `
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			commit pid=32 epoch=0 seq=1 n=1 base=2 -> OK
			abandon
			truncate to=1 -> exact
			snapshot-end -> 1
			batch pid=32 epoch=0 seq=1 n=1 -> OK base=1
			snapshot-end -> 2
		`)
	})
	t.Run("abandoned, and cut off too high", func(t *testing.T) {
		play(t, `
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			commit pid=32 epoch=0 seq=1 n=1 base=2 -> OK
			batch pid=32 epoch=0 seq=2 n=1 -> OK base=3
			truncate to=3 -> inexact
		`)
	})
	t.Run("a replay that ends a reservation has read what was unknown", func(t *testing.T) {
		play(t, `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
			replay pid=31 epoch=0 seq=1 n=1 base=1
			snapshot-end -> 2
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #B
			replay-marker pid=31 epoch=0 coord=1 abort base=2
			snapshot-end -> 3
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #C
			replay pid=31 epoch=0 seq=2 n=1 base=4
			snapshot-end -> 3
		`)
	})
	t.Run("without a producer id", func(t *testing.T) {
		play(t, `
			reserve pid=-1 epoch=-1 seq=-1 n=3 -> OK #A
			commit pid=31 epoch=0 seq=0 n=1 base=3 -> OK
			snapshot-end -> 0
			commit #A base=0 -> OK
			snapshot-end -> 4
		`)
	})
}

// A replay from the end offset of a snapshot on makes known what was unknown after
// AbandonReservations, whatever stands there first: here a control record without a
// producer id, as a new leader writes it. Otherwise every later snapshot
// would end at that offset.
func TestReplayFromControlRecordSettlesDoubt(t *testing.T) {
	m := New(Config{})
	m.Advance(55)
	if _, _, err := m.Reserve(Batch{ProducerID: 1, Count: 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.Commit(2, 0, 0, 1, 56); err != nil {
		t.Fatal(err)
	}
	m.AbandonReservations()
	if end := m.Snapshot().EndOffset(); end != 55 {
		t.Fatalf("a batch may lie at 55, but a snapshot ends at %d", end)
	}
	log := controlBatch(55, NoProducerID, -1, []byte{0, 0, 0, 2}, []byte{7}).encode()
	log = append(log, dataBatch(56, 2, 0, 0, 1).encode()...)
	if _, err := m.ReplayLog(bytes.NewReader(log)); err != nil {
		t.Fatal(err)
	}
	if end := m.Snapshot().EndOffset(); end != 57 {
		t.Errorf("the log is replayed to 57, but a snapshot ends at %d", end)
	}
}
