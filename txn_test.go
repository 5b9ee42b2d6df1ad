package idempotence

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

// This file has the rules for transactions, one transcript each
// (transcript_test.go and txn_transcript_test.go say how to read one).

// TestPlainBatchInTransaction is rule T1a: where a batch is otherwise in order, it must
// be transactional while a transaction is open, whatever its epoch.
func TestPlainBatchInTransaction(t *testing.T) {
	play(t, `
		batch pid=31 epoch=1 seq=0 n=2 txn -> OK base=0
		batch pid=31 epoch=1 seq=2 n=1     -> INVALID_TXN
		batch pid=31 epoch=2 seq=0 n=1     -> INVALID_TXN
		batch pid=31 epoch=1 seq=3 n=1     -> OUT_OF_ORDER expected=2
		batch pid=31 epoch=2 seq=3 n=1     -> OUT_OF_ORDER expected=0
		batch pid=31 epoch=0 seq=0 n=1     -> STALE_EPOCH current=1
		batch pid=31 epoch=1 seq=0 n=2     -> DUP base=0
		batch pid=32 epoch=0 seq=0 n=1     -> OK base=2
		batch pid=-1 epoch=-1 seq=-1 n=1   -> OK base=3
		commit pid=31 epoch=1 seq=2 n=1 base=4 -> REFUSED INVALID_TXN
		batch pid=31 epoch=1 seq=2 n=1 txn -> OK base=4
		marker pid=31 epoch=1 coord=0 commit -> OK base=5
		batch pid=31 epoch=1 seq=3 n=1     -> OK base=6
		batch pid=31 epoch=1 seq=2 n=1     -> DUP base=4
		txn-stats -> markers=1 invalid=3 concurrent=0 coordinator=0 open=0 aborted=0
	`)
}

// TestCheckPlainBatchInTransaction: CheckBatch refuses it by itself. Commit judges again,
// so a transcript of both cannot tell.
func TestCheckPlainBatchInTransaction(t *testing.T) {
	m := New(Config{})
	b := Batch{ProducerID: 31, Count: 1, Transactional: true}
	if err := m.CommitBatch(b, 0); err != nil {
		t.Fatal(err)
	}
	b.BaseSequence, b.Transactional = 1, false
	if res, err := m.CheckBatch(b); !errors.Is(err, ErrInvalidTxnState) {
		t.Errorf("in a transaction: %v, %v, want ErrInvalidTxnState", res, err)
	}
	if err := m.CommitMarker(Marker{ProducerID: 31, Commit: true}, 1); err != nil {
		t.Fatal(err)
	}
	if res, err := m.CheckBatch(b); err != nil || res.Verdict != Append {
		t.Errorf("after it: %v, %v, want Append", res, err)
	}
}

// TestPlainBatchBehindTransactionalInFlight: what is in flight counts as appended for
// T1a, where the epoch is the same. An exact copy waits, whatever its bit.
func TestPlainBatchBehindTransactionalInFlight(t *testing.T) {
	play(t, `
		reserve pid=31 epoch=0 seq=0 n=2 txn -> OK #A
		reserve pid=31 epoch=0 seq=2 n=1     -> INVALID_TXN
		reserve pid=31 epoch=0 seq=0 n=2     -> IN_FLIGHT waits=0:0..1
		reserve pid=31 epoch=1 seq=0 n=1     -> IN_FLIGHT waits=0:0..1
		reserve pid=31 epoch=0 seq=3 n=1     -> OUT_OF_ORDER expected=2
		append-failed #A
		reserve pid=31 epoch=0 seq=0 n=2     -> OK #B
		reserve pid=31 epoch=0 seq=2 n=1 txn -> OK #C
		reserve pid=31 epoch=0 seq=3 n=1     -> INVALID_TXN
		commit #C base=2 -> OK
		open -> none
		commit #B base=0 -> OK
		open -> 31@2
	`)
}

// TestNewerEpochInTransaction is rule T1b: a transactional batch of a newer epoch waits
// for the marker of the older transaction, and adopts nothing meanwhile.
func TestNewerEpochInTransaction(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=31 epoch=1 seq=0 n=1 txn -> CONCURRENT_TXN current=0
		batch pid=31 epoch=1 seq=1 n=1 txn -> OUT_OF_ORDER expected=0 current=0
		commit pid=31 epoch=1 seq=0 n=1 txn base=1 -> REFUSED CONCURRENT_TXN current=0
		batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=1
		reserve pid=31 epoch=0 seq=2 n=1 txn -> OK #A
		reserve pid=31 epoch=1 seq=0 n=1 txn -> CONCURRENT_TXN
		commit #A base=2 -> OK
		marker pid=31 epoch=0 coord=0 abort -> OK base=3
		batch pid=31 epoch=1 seq=0 n=1 txn -> OK base=4
		open -> 31@4
		aborted from=0 to=5 -> 31@0-3
		txn-stats -> markers=1 invalid=0 concurrent=4 coordinator=0 open=1 aborted=1
	`)
}

// TestNewerEpochBehindInFlight: with nothing open yet, a newer epoch waits for the
// older one in flight as it does without transactions.
func TestNewerEpochBehindInFlight(t *testing.T) {
	play(t, `
		reserve pid=31 epoch=0 seq=0 n=1 txn -> OK #A
		reserve pid=31 epoch=1 seq=0 n=1 txn -> IN_FLIGHT waits=0:0..0
		commit #A base=0 -> OK
		reserve pid=31 epoch=1 seq=0 n=1 txn -> CONCURRENT_TXN current=0
	`)
}

// TestCheckMarkerOrder: of several reasons to refuse a marker the first counts.
func TestCheckMarkerOrder(t *testing.T) {
	play(t, `
		check-marker pid=-1 epoch=0 coord=0 abort  -> INVALID current=-1 coord=-1 txn=-1 offset=-1
		check-marker pid=31 epoch=-1 coord=0 abort -> INVALID
		check-marker pid=31 epoch=0 coord=-1 abort -> INVALID
		check-marker pid=31 epoch=9 coord=0 abort  -> OK
		marker pid=31 epoch=5 coord=3 commit       -> OK base=0
		batch pid=31 epoch=5 seq=0 n=1 txn         -> OK base=1
		check-marker pid=31 epoch=4 coord=2 abort  -> STALE_EPOCH current=5 coord=3 txn=1
		check-marker pid=31 epoch=5 coord=2 abort  -> STALE_COORD current=5 coord=3 txn=1
		check-marker pid=31 epoch=6 coord=2 abort  -> STALE_COORD current=5 coord=3 txn=1
		check-marker pid=31 epoch=5 coord=3 abort  -> OK
		check-marker pid=31 epoch=6 coord=4 abort  -> OK
		reserve pid=31 epoch=5 seq=1 n=1 txn       -> OK #A
		check-marker pid=31 epoch=4 coord=2 abort  -> IN_FLIGHT waits=5:1..1
		check-marker pid=31 epoch=-1 coord=2 abort -> INVALID
		commit #A base=2
		check-marker pid=31 epoch=4 coord=2 abort  -> STALE_EPOCH
		window pid=31 -> epoch=5 0..0@1 1..1@2
		txn-stats -> markers=1 invalid=0 concurrent=0 coordinator=2 open=1 aborted=0
	`)
}

// TestMarkerVersions: up to version 1 a marker may have the epoch of its transaction.
// From version 2 on it must have a newer one, but for retries and for the last epoch
// there is (KIP-890, KAFKA-19999, KAFKA-20090).
func TestMarkerVersions(t *testing.T) {
	for _, v := range []string{"0", "1", "-1"} {
		play(t, strings.ReplaceAll(`
			batch pid=31 epoch=5 seq=0 n=1 txn -> OK base=0
			marker pid=31 epoch=4 coord=0 commit v=V -> STALE_EPOCH
			marker pid=31 epoch=5 coord=0 commit v=V -> OK base=1
			marker pid=31 epoch=5 coord=0 commit v=V -> OK base=2
			batch pid=31 epoch=5 seq=1 n=1 txn -> OK base=3
			marker pid=31 epoch=5 coord=0 abort v=V  -> OK base=4
			batch pid=31 epoch=5 seq=2 n=1 txn -> OK base=5
			marker pid=31 epoch=6 coord=0 abort v=V  -> OK base=6
			window pid=31 -> epoch=6
		`, "v=V", "v="+v))
	}
	for _, v := range []string{"2", "3", "127"} {
		play(t, strings.ReplaceAll(`
			batch pid=31 epoch=5 seq=0 n=1 txn -> OK base=0
			marker pid=31 epoch=4 coord=0 commit v=V -> STALE_EPOCH
			marker pid=31 epoch=5 coord=0 commit v=V -> STALE_EPOCH current=5 txn=0
			marker pid=31 epoch=6 coord=0 commit v=V -> OK base=1
			marker pid=31 epoch=6 coord=0 commit v=V -> OK base=2
			marker pid=31 epoch=5 coord=0 commit v=V -> STALE_EPOCH current=6 txn=-1
			batch pid=31 epoch=6 seq=0 n=1 txn -> OK base=3
			marker pid=31 epoch=6 coord=0 commit v=V -> STALE_EPOCH
			marker pid=31 epoch=8 coord=0 abort v=V -> OK base=4
			batch pid=31 epoch=32766 seq=0 n=1 txn -> OK base=5
			marker pid=31 epoch=32766 coord=0 abort v=V -> STALE_EPOCH
			marker pid=31 epoch=32767 coord=0 abort v=V -> OK base=6
			batch pid=31 epoch=32767 seq=0 n=1 txn -> OK base=7
			marker pid=31 epoch=32766 coord=0 abort v=V -> STALE_EPOCH
			marker pid=31 epoch=32767 coord=0 abort v=V -> OK base=8
			aborted from=0 to=9 -> 31@3-4 31@5-6 31@7-8
		`, "v=V", "v="+v))
	}
}

// TestCommitMarker: what a marker does.
func TestCommitMarker(t *testing.T) {
	play(t, `
		ttl=100
		batch pid=31 epoch=0 seq=0 n=2 txn t=0 -> OK base=0
		txn pid=31 -> open@0 coord=none
		marker pid=31 epoch=0 coord=5 commit t=90 -> OK base=2
		txn pid=31 -> none coord=5
		window pid=31 -> epoch=0 0..1@0
		activity pid=31 -> 90
		batch pid=31 epoch=0 seq=2 n=1 txn -> OK base=3
		marker pid=31 epoch=1 coord=7 abort -> OK base=4
		txn pid=31 -> none coord=7
		window pid=31 -> epoch=1
		batch pid=31 epoch=1 seq=2 n=1 txn -> OUT_OF_ORDER expected=0 current=1
		marker pid=32 epoch=3 coord=0 abort -> OK base=5
		window pid=32 -> epoch=3
		highest-pid -> 32
		batch pid=32 epoch=2 seq=0 n=1 txn -> STALE_EPOCH
		aborted from=0 to=99 -> 31@3-4
		end -> 6
		txn-stats -> markers=3 invalid=0 concurrent=0 coordinator=0 open=0 aborted=1
	`)
}

// TestEmptyTransaction: a marker without data leaves no range and does not move the last
// stable offset (KAFKA-10702).
func TestEmptyTransaction(t *testing.T) {
	play(t, `
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		marker pid=32 epoch=0 coord=0 abort -> OK base=1
		lso hw=2 -> 0
		marker pid=31 epoch=0 coord=0 abort -> OK base=2
		marker pid=31 epoch=0 coord=0 abort -> OK base=3
		lso hw=2 -> 0
		lso hw=3 -> 3
		aborted from=0 to=9 -> 31@0-2
	`)
}

// TestCommitMarkerOffset: the offsets that the log cannot have given to a marker.
func TestCommitMarkerOffset(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=3 txn -> OK base=0
		commit-marker pid=31 epoch=0 coord=0 abort base=-1 -> REFUSED OFFSET_ORDER current=0 coord=-1 txn=0 offset=-1
		commit-marker pid=31 epoch=0 coord=0 abort base=0 -> REFUSED OFFSET_ORDER txn=0 offset=0
		commit-marker pid=31 epoch=0 coord=0 abort base=2 -> REFUSED OFFSET_ORDER txn=0 offset=2
		commit-marker pid=31 epoch=0 coord=0 abort base=9223372036854775807 -> REFUSED OFFSET_ORDER offset=9223372036854775807
		commit-marker pid=32 epoch=0 coord=0 abort base=-1 -> REFUSED OFFSET_ORDER current=-1 coord=-1 txn=-1 offset=-1
		commit-marker pid=31 epoch=0 coord=-1 abort base=3 -> REFUSED INVALID offset=3
		open -> 31@0
		commit-marker pid=31 epoch=0 coord=0 abort base=3 -> OK
		commit-marker pid=31 epoch=0 coord=0 abort base=9223372036854775806 -> OK
		end -> 9223372036854775807
		aborted from=0 to=9 -> 31@0-3
	`)
	// A batch that a broker wrote itself opens a transaction and is not in the window.
	play(t, `
		replay pid=31 epoch=0 seq=-1 n=4 txn base=5
		commit-marker pid=31 epoch=0 coord=0 abort base=4 -> REFUSED OFFSET_ORDER txn=5
		commit-marker pid=31 epoch=0 coord=0 abort base=5 -> REFUSED OFFSET_ORDER txn=5
		commit-marker pid=31 epoch=0 coord=0 abort base=9 -> OK
		aborted from=0 to=99 -> 31@5-9
	`)
	playWith(t, Config{Contiguous: true}, `
		batch pid=31 epoch=0 seq=0 n=3 txn -> OK base=0
		commit-marker pid=31 epoch=0 coord=0 abort base=4 -> REFUSED OFFSET_ORDER offset=4
		commit-marker pid=32 epoch=0 coord=0 abort base=2 -> REFUSED OFFSET_ORDER offset=2
		reserve pid=33 epoch=0 seq=0 n=2 -> OK #A
		commit-marker pid=31 epoch=0 coord=0 abort base=6 -> REFUSED OFFSET_ORDER offset=6
		commit-marker pid=31 epoch=0 coord=0 abort base=5 -> OK
		commit #A base=3
		end -> 6
	`)
}

// TestReserveMarker: everything of the producer waits for a marker in flight, but for
// retries and for what can never be right.
func TestReserveMarker(t *testing.T) {
	play(t, `
		batch pid=31 epoch=1 seq=0 n=2 txn           -> OK base=0
		reserve-marker pid=31 epoch=1 coord=0 abort  -> OK #M
		in-flight pid=31                             -> epoch=1 0..0
		reserve pid=31 epoch=1 seq=0 n=2 txn         -> DUP base=0
		reserve pid=31 epoch=1 seq=2 n=1 txn         -> IN_FLIGHT waits=1:-1..-1
		reserve pid=31 epoch=1 seq=9 n=1             -> IN_FLIGHT waits=1:-1..-1
		reserve pid=31 epoch=2 seq=0 n=1 txn         -> IN_FLIGHT waits=1:-1..-1
		reserve pid=31 epoch=0 seq=0 n=1 txn         -> STALE_EPOCH
		reserve pid=31 epoch=1 seq=2 n=0 txn         -> INVALID
		commit pid=31 epoch=1 seq=2 n=1 txn base=2   -> REFUSED IN_FLIGHT waits=1:-1..-1
		check-marker pid=31 epoch=0 coord=0 abort    -> IN_FLIGHT waits=1:-1..-1
		reserve-marker pid=31 epoch=1 coord=0 abort  -> IN_FLIGHT waits=1:-1..-1
		commit-marker pid=31 epoch=1 coord=0 abort base=2 -> REFUSED IN_FLIGHT waits=1:-1..-1
		batch pid=32 epoch=0 seq=0 n=1 txn           -> OK base=2
		commit #M base=1                             -> REFUSED OFFSET_ORDER txn=0 offset=1
		open -> 31@0 32@2
		commit #M base=3 -> OK
		open -> 32@2
		aborted from=0 to=9 -> 31@0-3
		commit #M base=3 -> REFUSED SETTLED
		batch pid=31 epoch=1 seq=2 n=1 txn -> OK base=4
	`)
}

// TestAbortMarker leaves everything as it was, but for the time of activity.
func TestAbortMarker(t *testing.T) {
	play(t, `
		batch pid=31 epoch=1 seq=0 n=2 txn -> OK base=0
		reserve-marker pid=31 epoch=2 coord=9 abort v=2 -> OK #M
		append-failed #M -> OK
		append-failed #M -> SETTLED
		txn pid=31 -> open@0 coord=none
		window pid=31 -> epoch=1 0..1@0
		batch pid=31 epoch=1 seq=2 n=1 txn -> OK base=2
		reserve-marker pid=32 epoch=4 coord=0 commit -> OK #N
		append-failed #N -> OK
		window pid=32 -> none
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=3
		txn-stats -> markers=0 invalid=0 concurrent=0 coordinator=0 open=1 aborted=0
	`)
}

// TestMarkerOfUnknownProducerInFlight: a newcomer's marker is waited for too.
func TestMarkerOfUnknownProducerInFlight(t *testing.T) {
	play(t, `
		mode=accept
		reserve-marker pid=31 epoch=4 coord=0 commit -> OK #M
		reserve pid=31 epoch=0 seq=0 n=1 txn -> IN_FLIGHT waits=4:-1..-1
		commit #M base=0 -> OK
		reserve pid=31 epoch=3 seq=0 n=1 txn -> STALE_EPOCH current=4
		reserve pid=31 epoch=4 seq=7 n=1 txn -> OUT_OF_ORDER expected=0
		reserve pid=31 epoch=4 seq=0 n=1 txn -> OK #A
	`)
}

// TestAbandonedMarker: a marker that was in flight may be in the log. It is met by the
// replay.
func TestAbandonedMarker(t *testing.T) {
	play(t, `
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		reserve-marker pid=31 epoch=0 coord=0 abort -> OK #M
		abandon
		commit #M base=1 -> REFUSED ABANDONED
		append-failed #M -> ABANDONED
		snapshot-end -> 1
		lso hw=1 -> 0
		replay-marker pid=31 epoch=0 coord=0 abort base=1
		replayed-to to=2
		lso hw=2 -> 2
		aborted from=0 to=2 -> 31@0-1
		snapshot-end -> 2
	`)
}

// TestLastStableOffsetTerms: what holds the last stable offset back, one at a time.
func TestLastStableOffsetTerms(t *testing.T) {
	play(t, `
		lso hw=-5 -> 0
		lso hw=0 -> 0
		batch pid=-1 epoch=-1 seq=-1 n=3 -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=3
		lso hw=4 -> 4
		batch pid=31 epoch=0 seq=0 n=2 txn -> OK base=4
		batch pid=32 epoch=0 seq=1 n=1 txn -> OK base=6
		lso hw=7 -> 4
		lso hw=3 -> 3
		lso hw=7 -> 4
		marker pid=31 epoch=0 coord=0 commit -> OK base=7
		lso hw=7 -> 4
		lso hw=8 -> 6
		marker pid=32 epoch=0 coord=0 abort -> OK base=8
		lso hw=8 -> 6
		lso hw=9 -> 9
		lso hw=8 -> 8
		end -> 9
	`)
}

// TestLastStableOffsetAdvances: the call tells the manager how far the log reaches.
func TestLastStableOffsetAdvances(t *testing.T) {
	play(t, `
		lso hw=5 -> 5
		end -> 5
		commit pid=31 epoch=0 seq=0 n=1 txn base=4 -> REFUSED OFFSET_ORDER lowest=5
		commit pid=31 epoch=0 seq=0 n=1 base=4 -> OK
		commit pid=31 epoch=0 seq=1 n=1 txn base=5 -> OK
		commit pid=31 epoch=0 seq=2 n=1 txn base=6 -> OK
		lso hw=7 -> 5
	`)
}

// TestLastStableOffsetBelow: a high watermark below 0 is a call at 0, and one that falls
// does not lower the offset at which a transaction may open.
func TestLastStableOffsetBelow(t *testing.T) {
	m := New(Config{})
	if got := m.LastStableOffset(-5); got != 0 {
		t.Errorf("at -5 it is %d, want 0", got)
	}
	b := Batch{ProducerID: 31, Count: 1, Transactional: true}
	if err := errors.Join(m.CommitBatch(b, 0), m.CommitMarker(Marker{ProducerID: 31}, 1)); err != nil {
		t.Fatal(err)
	}
	if got := m.LastStableOffset(1); got != 0 {
		t.Errorf("before the marker has been replicated it is %d, want 0", got)
	}
	if got := m.LastStableOffset(5); got != 5 {
		t.Errorf("at 5 it is %d, want 5", got)
	}
	if got := m.LastStableOffset(1); got != 1 {
		t.Errorf("back at 1 it is %d, want 1", got)
	}
	b.BaseSequence = 1
	if err := m.CommitBatch(b, 4); !errors.Is(err, ErrOffsetOrder) {
		t.Errorf("a transaction that opens below 5: %v, want ErrOffsetOrder", err)
	}
}

// TestLastStableOffsetInFlight: a transactional batch in flight holds it back from where
// it can lie; others do not. So the batch cannot lie below that.
func TestLastStableOffsetInFlight(t *testing.T) {
	play(t, `
		reserve pid=32 epoch=0 seq=0 n=2 -> OK #P
		reserve-marker pid=33 epoch=0 coord=0 commit -> OK #M
		lso hw=4 -> 4
		reserve pid=31 epoch=0 seq=0 n=1 txn -> OK #A
		reserve pid=31 epoch=0 seq=1 n=1 txn -> OK #B
		lso hw=6 -> 4
		commit #P base=0 -> OK
		commit #B base=6 -> OK
		lso hw=7 -> 4
		commit #A base=5 -> OK
		open -> 31@5
		lso hw=7 -> 5
		marker pid=31 epoch=0 coord=0 commit -> OK base=7
		lso hw=8 -> 8
		reserve pid=31 epoch=0 seq=2 n=1 txn -> OK #C
		lso hw=9 -> 8
		append-failed #C
		lso hw=9 -> 9
		reserve pid=31 epoch=0 seq=2 n=1 txn -> OK #D
		commit #D base=8 -> REFUSED OFFSET_ORDER lowest=9
		commit #D base=9 -> OK
		lso hw=10 -> 9
	`)
}

// TestLastStableOffsetAbandoned: so does one that was abandoned, until the log has been
// read or cut.
func TestLastStableOffsetAbandoned(t *testing.T) {
	play(t, `
		lso hw=0 -> 0
		batch pid=32 epoch=0 seq=0 n=2 -> OK base=0
		reserve pid=31 epoch=0 seq=0 n=1 txn -> OK #A
		abandon
		lso hw=3 -> 2
		replay pid=31 epoch=0 seq=0 n=1 txn base=2
		lso hw=3 -> 2
		replayed-to to=3
		lso hw=3 -> 2
		replay-marker pid=31 epoch=0 coord=0 commit base=3
		lso hw=4 -> 4
	`)
	play(t, `
		lso hw=0 -> 0
		reserve pid=31 epoch=0 seq=0 n=1 txn -> OK #A
		abandon
		lso hw=3 -> 0
		replayed-to to=3
		lso hw=3 -> 3
	`)
	play(t, `
		lso hw=0 -> 0
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=0
		reserve pid=31 epoch=0 seq=0 n=1 txn -> OK #A
		abandon
		lso hw=1 -> 1
		truncate to=1 -> exact
		batch pid=32 epoch=0 seq=1 n=1 -> OK base=1
		lso hw=2 -> 2
	`)
	// A plain batch holds nothing back, and what is known stays known.
	play(t, `
		reserve pid=32 epoch=0 seq=0 n=1 -> OK #A
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		marker pid=31 epoch=0 coord=0 commit -> OK base=1
		lso hw=2 -> 2
		abandon
		lso hw=2 -> 2
		replay pid=31 epoch=0 seq=0 n=1 txn base=0
		open -> none
		lso hw=2 -> 2
		replay-marker pid=31 epoch=0 coord=0 commit base=1
		lso hw=2 -> 2
	`)
}

// TestEndedIsKeptFromTheFirstCall: before LastStableOffset was called, nothing is kept
// of transactions that have ended.
func TestEndedIsKeptFromTheFirstCall(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		marker pid=31 epoch=0 coord=0 commit -> OK base=1
		lso hw=0 -> 0
		lso hw=1 -> 1
		batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=2
		marker pid=31 epoch=0 coord=0 commit -> OK base=3
		lso hw=3 -> 2
		lso hw=4 -> 4
		lso hw=3 -> 3
	`)
}

// TestAbortedBounds: a reader of [from, to) must know a transaction with a marker at or
// past from and a first offset below to.
func TestAbortedBounds(t *testing.T) {
	play(t, `
		aborted from=0 to=9 -> none
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=0 seq=1 n=2 txn -> OK base=1
		batch pid=32 epoch=0 seq=0 n=2 txn -> OK base=3
		batch pid=33 epoch=0 seq=0 n=1 txn -> OK base=5
		marker pid=32 epoch=0 coord=0 abort -> OK base=6
		marker pid=33 epoch=0 coord=0 commit -> OK base=7
		marker pid=31 epoch=0 coord=0 abort -> OK base=8
		aborted from=0 to=1 -> none
		aborted from=0 to=2 -> 31@1-8
		aborted from=0 to=3 -> 31@1-8
		aborted from=0 to=4 -> 32@3-6 31@1-8
		aborted from=6 to=9 -> 32@3-6 31@1-8
		aborted from=7 to=9 -> 31@1-8
		aborted from=8 to=9 -> 31@1-8
		aborted from=9 to=9 -> none
		aborted from=4 to=4 -> 32@3-6 31@1-8
		aborted from=5 to=0 -> none
		aborted from=-1 to=9 -> UNKNOWN
		known-from -> 0
	`)
}

// TestAdvanceStart forgets the ranges of which nothing is left, and no producer.
func TestAdvanceStart(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=2 txn -> OK base=0
		marker pid=31 epoch=0 coord=0 abort -> OK base=2
		batch pid=31 epoch=0 seq=2 n=2 txn -> OK base=3
		marker pid=31 epoch=0 coord=0 abort -> OK base=5
		batch pid=32 epoch=0 seq=0 n=1 txn -> OK base=6
		delete to=2
		aborted from=1 to=9 -> UNKNOWN
		aborted from=2 to=9 -> 31@0-2 31@3-5
		delete to=3
		aborted from=3 to=9 -> 31@3-5
		txn-stats -> markers=2 invalid=0 concurrent=0 coordinator=0 open=1 aborted=1
		delete to=1
		known-from -> 3
		lso hw=7 -> 6
		delete to=7
		lso hw=7 -> 7
		open -> 32@6
		producers -> 2
		txn-stats -> markers=2 invalid=0 concurrent=0 coordinator=0 open=1 aborted=0
		delete to=9
		end -> 9
		lso hw=3 -> 9
		reset
		known-from -> 0
		lso hw=0 -> 0
	`)
}

// TestMarkerBelowLogStart: a marker that is committed or replayed after its offset was
// deleted leaves no range. A snapshot with such a range could not be restored.
func TestMarkerBelowLogStart(t *testing.T) {
	part := play(t, `
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		reserve-marker pid=31 epoch=0 coord=0 abort -> OK #M
		delete to=5
		commit #M base=1 -> OK
		txn-stats -> markers=1 invalid=0 concurrent=0 coordinator=0 open=0 aborted=0
	`)
	settled(t, New(Config{}).Restore(bytes.NewReader(encoded(t, part.m))))

	m := New(Config{})
	m.AdvanceStart(5)
	settled(t, m.Replay(Batch{ProducerID: 31, Count: 1, Transactional: true}, 0))
	settled(t, m.ReplayMarker(Marker{ProducerID: 31}, 1))
	if s := m.Stats(); s.OpenTransactions != 0 || s.AbortedRanges != 0 {
		t.Errorf("replayed from before the log's start: %+v", s)
	}
	settled(t, New(Config{}).Restore(bytes.NewReader(encoded(t, m))))
}

// TestOldestTransaction: the one that holds the last stable offset back.
func TestOldestTransaction(t *testing.T) {
	part := play(t, `
		oldest -> none
		batch pid=33 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=1
		batch pid=32 epoch=2 seq=0 n=1 txn -> OK base=2
		oldest -> 33@0
		marker pid=31 epoch=0 coord=0 commit -> OK base=3
		oldest -> 33@0
		marker pid=33 epoch=0 coord=0 commit -> OK base=4
		oldest -> 32@2
		batch pid=33 epoch=0 seq=1 n=1 txn -> OK base=5
		oldest -> 32@2
		expire now=700
	`)
	got, ok := part.m.OldestTransaction()
	if !ok || got.Epoch != 2 || len(got.Window) != 1 || got.LastActivity.UnixMilli() != 700 || got.InFlight != 0 {
		t.Errorf("the oldest transaction is of %+v, %t", got, ok)
	}
	play(t, `
		batch pid=33 epoch=0 seq=0 n=1 txn -> OK base=0
		truncate to=0 -> exact
		oldest -> none
	`)
}

// What survives, one test a row of the table.

// TestSurvivesRestore: a restore keeps the open transactions, the aborted ranges, the log's
// start and the coordinator epoch. What has ended above the high watermark is over.
func TestSurvivesRestore(t *testing.T) {
	play(t, `
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=2 txn -> OK base=0
		marker pid=31 epoch=0 coord=4 abort -> OK base=2
		batch pid=31 epoch=0 seq=2 n=1 txn -> OK base=3
		batch pid=32 epoch=0 seq=0 n=1 txn -> OK base=4
		marker pid=31 epoch=0 coord=4 abort -> OK base=5
		delete to=1
		lso hw=1 -> 1
		snapshot S -> 6
		restart S
		txn pid=31 -> none coord=4
		open -> 32@4
		known-from -> 1
		aborted from=1 to=9 -> 31@0-2 31@3-5
		lso hw=5 -> 4
		marker pid=32 epoch=0 coord=0 abort -> OK base=6
		lso hw=6 -> 4
		lso hw=7 -> 7
		aborted from=1 to=9 -> 31@0-2 31@3-5 32@4-6
		check-marker pid=31 epoch=0 coord=3 abort -> STALE_COORD coord=4
	`)
}

// TestRestoreKeepsLogStart: a restore keeps the higher log start, and transactions may
// open again from the end of the snapshot on.
func TestRestoreKeepsLogStart(t *testing.T) {
	m := New(Config{})
	b := Batch{ProducerID: 31, Count: 1, Transactional: true}
	if err := errors.Join(m.CommitBatch(b, 0), m.CommitMarker(Marker{ProducerID: 31}, 1)); err != nil {
		t.Fatal(err)
	}
	var snapshot bytes.Buffer
	if _, err := m.Snapshot().WriteTo(&snapshot); err != nil {
		t.Fatal(err)
	}
	m.LastStableOffset(10)
	m.AdvanceStart(1)
	if err := m.Restore(&snapshot); err != nil {
		t.Fatal(err)
	}
	if got, err := m.AbortedTransactions(0, 2); !errors.Is(err, ErrAbortedUnknown) {
		t.Errorf("below the log start: %v, %v, want ErrAbortedUnknown", got, err)
	}
	b.BaseSequence = 1
	if err := m.CommitBatch(b, 2); err != nil {
		t.Errorf("a transaction that opens at the end of the snapshot: %v", err)
	}
}

// TestSurvivesReplayFromSnapshot: the log behind a snapshot goes on where it ends, and
// from below its end it changes nothing.
func TestSurvivesReplayFromSnapshot(t *testing.T) {
	part := play(t, `
		batch pid=31 epoch=0 seq=0 n=2 txn -> OK base=0
		marker pid=31 epoch=1 coord=4 abort v=2 -> OK base=2
		batch pid=31 epoch=1 seq=0 n=1 txn -> OK base=3
		snapshot S -> 4
		batch pid=32 epoch=0 seq=0 n=1 txn -> OK base=4
		marker pid=31 epoch=2 coord=4 abort v=2 -> OK base=5
		restart S
		open -> 32@4
		aborted from=0 to=9 -> 31@0-2 31@3-5
		window pid=31 -> epoch=2
	`)
	want := transactionsOf(part.m)
	for range 2 {
		for _, l := range part.log {
			if err := apply(part.m, l); err != nil {
				t.Fatal(err)
			}
			audit(t, part.m)
		}
		if got := transactionsOf(part.m); !slices.Equal(got.Open, want.Open) || !slices.Equal(got.Aborted, want.Aborted) {
			t.Errorf("replayed again: %+v, want %+v", got, want)
		}
	}
}

// TestSurvivesKafkaSnapshot: Kafka's format holds the open transactions, and nothing of
// those that were aborted.
func TestSurvivesKafkaSnapshot(t *testing.T) {
	play(t, `
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=2 txn -> OK base=0
		marker pid=31 epoch=0 coord=4 abort -> OK base=2
		batch pid=31 epoch=0 seq=2 n=1 txn -> OK base=3
		snapshot-kafka K -> 4
		restart-kafka K end=4
		txn pid=31 -> open@3 coord=4
		known-from -> 4
		aborted from=3 to=9 -> UNKNOWN
		aborted from=4 to=9 -> none
		lso hw=4 -> 3
		marker pid=31 epoch=0 coord=4 abort -> OK base=4
		aborted from=4 to=9 -> 31@3-4
		restart none
		known-from -> 0
		aborted from=0 to=9 -> 31@0-2 31@3-4
	`)
}

// TestSurvivesReplay: followers and recovery follow the log, whatever the epochs in it.
func TestSurvivesReplay(t *testing.T) {
	play(t, `
		lso hw=0 -> 0
		replay pid=31 epoch=3 seq=0 n=1 txn base=0
		replay pid=31 epoch=4 seq=0 n=1 txn base=1
		open -> 31@0
		replay-marker pid=31 epoch=4 coord=7 abort base=2
		aborted from=0 to=9 -> 31@0-2
		lso hw=2 -> 0
		lso hw=3 -> 3
		replay pid=31 epoch=4 seq=1 n=1 txn base=3
		replay-marker pid=31 epoch=3 coord=5 abort base=4
		txn pid=31 -> none coord=7
		window pid=31 -> epoch=4 0..0@1 1..1@3
		aborted from=0 to=9 -> 31@0-2 31@3-4
		replay pid=31 epoch=3 seq=9 n=1 txn base=5
		open -> 31@5
		window pid=31 -> epoch=4 0..0@1 1..1@3
		replay-marker pid=31 epoch=6 coord=5 commit base=6
		open -> none
		window pid=31 -> epoch=6
		lso hw=6 -> 5
		lso hw=7 -> 7
	`)
}

// TestReplayedMarker: a marker ends what began before it, and nothing that begins behind
// it; and it is told only once.
func TestReplayedMarker(t *testing.T) {
	play(t, `
		replay pid=31 epoch=0 seq=0 n=1 txn base=0
		replay-marker pid=31 epoch=0 coord=0 abort base=1
		replay pid=31 epoch=0 seq=1 n=1 txn base=2
		replay-marker pid=31 epoch=0 coord=0 abort base=1
		open -> 31@2
		aborted from=0 to=9 -> 31@0-1
		replay-marker pid=31 epoch=0 coord=-1 abort base=3
		open -> 31@2
		replay-marker pid=31 epoch=0 coord=0 abort base=4
		aborted from=0 to=9 -> 31@0-1 31@2-4
		replay-marker pid=31 epoch=0 coord=-1 commit base=5
		txn pid=31 -> none coord=0
		end -> 6
	`)
	m := New(Config{})
	for _, k := range []Marker{{ProducerID: -1}, {Epoch: -1}} {
		requireMarkerError(t, m.ReplayMarker(k, 5), ErrInvalidBatch, 5)
	}
	for _, offset := range []int64{-1, math.MaxInt64} {
		requireMarkerError(t, m.ReplayMarker(Marker{}, offset), ErrOffsetOrder, offset)
	}
	contiguous := New(Config{Contiguous: true})
	requireMarkerError(t, contiguous.ReplayMarker(Marker{}, 1), ErrOffsetOrder, 1)
	if m.Len() != 0 || m.EndOffset() != 0 || contiguous.Len() != 0 {
		t.Errorf("a refused replay has changed something: %d producers, end offset %d", m.Len(), m.EndOffset())
	}
}

func requireMarkerError(t *testing.T, err, why error, offset int64) {
	t.Helper()
	var e *MarkerError
	if !errors.As(err, &e) || !errors.Is(err, why) || e.Offset != offset {
		t.Errorf("got %v, want %v at %d", err, why, offset)
	}
}

// TestSurvivesExactTruncate: a cut that takes no marker takes back exactly what lies at or
// past it.
func TestSurvivesExactTruncate(t *testing.T) {
	play(t, `
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 txn -> OK base=1
		marker pid=31 epoch=0 coord=3 abort -> OK base=2
		batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=3
		batch pid=32 epoch=0 seq=1 n=1 txn -> OK base=4
		delete to=1
		truncate to=3 -> exact
		open -> 32@1
		aborted from=1 to=9 -> 31@0-2
		known-from -> 1
		lso hw=2 -> 1
		txn pid=31 -> none coord=3
		batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=3
		open -> 32@1 31@3
	`)
}

// TestSurvivesInexactTruncate: where a marker was cut off, only the log knows which
// transaction is open again. What is left until then has no range and no ended
// transaction at or past the cut.
func TestSurvivesInexactTruncate(t *testing.T) {
	play(t, `
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 txn -> OK base=1
		marker pid=31 epoch=1 coord=3 abort v=2 -> OK base=2
		marker pid=32 epoch=0 coord=3 abort -> OK base=3
		truncate to=3 -> inexact
		open -> 32@1
		aborted from=0 to=9 -> 31@0-2
		truncate to=2 -> inexact
		open -> 31@0 32@1
		aborted from=0 to=9 -> none
		window pid=31 -> epoch=0 0..0@0
		txn pid=31 -> open@0 coord=none
	`)
	part := play(t, `
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		marker pid=31 epoch=0 coord=0 abort -> OK base=1
		batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=2
		marker pid=31 epoch=0 coord=0 abort -> OK base=3
	`)
	if part.m.Truncate(3) {
		t.Error("the truncation is called exact")
	}
	if got := transactionsOf(part.m); !slices.Equal(got.Ended, []string{"0-1"}) || len(got.Aborted) != 1 {
		t.Errorf("left after the cut: %+v", got)
	}
}

// TestSurvivesReset: nothing. That LastStableOffset was called stays known, so that what
// a rebuild meets above the high watermark is held back.
func TestSurvivesReset(t *testing.T) {
	for _, cut := range []string{"reset", "truncate to=0 -> exact"} {
		play(t, strings.ReplaceAll(`
			lso hw=0 -> 0
			batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
			marker pid=31 epoch=0 coord=9 abort -> OK base=1
			batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=2
			lso hw=3 -> 2
			delete to=1
			CUT
			open -> none
			known-from -> 0
			aborted from=0 to=9 -> none
			txn pid=31 -> none coord=none
			lso hw=0 -> 0
			replay pid=31 epoch=0 seq=0 n=1 txn base=0
			replay-marker pid=31 epoch=0 coord=0 abort base=1
			lso hw=1 -> 0
			aborted from=0 to=9 -> 31@0-1
		`, "CUT", cut))
	}
}

// TestSurvivesExpire: transactions, and what has been of them, stay; the coordinator
// epoch goes with its producer.
func TestSurvivesExpire(t *testing.T) {
	play(t, `
		ttl=100
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		marker pid=31 epoch=0 coord=5 abort -> OK base=1
		batch pid=32 epoch=0 seq=0 n=1 txn -> OK base=2
		reserve-marker pid=33 epoch=0 coord=5 abort -> OK #M
		expire now=0 -> 0
		expire now=1000 -> 1
		window pid=31 -> none
		open -> 32@2
		aborted from=0 to=9 -> 31@0-1
		lso hw=1 -> 0
		lso hw=3 -> 2
		check-marker pid=31 epoch=0 coord=4 abort -> OK
		commit #M base=3 -> OK
		expire now=2000 -> 0
		expire now=3000 -> 1
		open -> 32@2
	`)
}

// TestSurvivesCap: the same for Config.MaxProducers.
func TestSurvivesCap(t *testing.T) {
	play(t, `
		cap=2
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		marker pid=31 epoch=0 coord=5 abort -> OK base=1
		batch pid=32 epoch=0 seq=0 n=1 txn -> OK base=2
		batch pid=33 epoch=0 seq=0 n=1 txn -> OK base=3
		window pid=31 -> none
		aborted from=0 to=9 -> 31@0-1
		batch pid=34 epoch=0 seq=0 n=1 txn -> OK base=4
		batch pid=35 epoch=0 seq=0 n=1 -> OK base=5
		open -> 32@2 33@3 34@4
		marker pid=36 epoch=0 coord=0 commit -> OK base=6
		window pid=35 -> none
		open -> 32@2 33@3 34@4
		producers -> 4
	`)
}

// TestAbortedAfterSnapshotInFlight: a snapshot taken while something is in flight ends
// below a marker that it has seen. Whatever is forgotten since, the aborted transaction
// is told after a restart.
func TestAbortedAfterSnapshotInFlight(t *testing.T) {
	play(t, `
		ttl=100
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		reserve pid=32 epoch=0 seq=0 n=1 -> OK #A
		marker pid=31 epoch=0 coord=0 abort -> OK base=1
		commit #A base=2 -> OK
		restart none
		aborted from=0 to=3 -> 31@0-1
	`)
	part := play(t, `
		ttl=100
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		reserve pid=32 epoch=0 seq=0 n=1 -> OK #A
		commit-marker pid=31 epoch=0 coord=0 abort base=2 -> OK
		expire now=0 -> 0
		expire now=1000 -> 1
		snapshot S -> 1
		commit #A base=1 -> OK
		restart S
		aborted from=0 to=3 -> 31@0-2
		open -> none
		snapshot T -> 3
		restart T
		aborted from=0 to=3 -> 31@0-2
		lso hw=3 -> 3
	`)
	if got := readCommitted(part.log, 0, 3, mustAborted(t, part.m, 0, 3)); !slices.Equal(got, []int64{1}) {
		t.Errorf("a reader sees the batches at %v", got)
	}
}

func mustAborted(t *testing.T, m *ProducerStateManager, from, to int64) []AbortedTransaction {
	t.Helper()
	all, err := m.AbortedTransactions(from, to)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestStableOffsetLeavesNoMark: but for the Advance, nothing shows of a call of
// LastStableOffset in a snapshot.
func TestStableOffsetLeavesNoMark(t *testing.T) {
	part := play(t, `
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 txn -> OK base=1
		marker pid=31 epoch=0 coord=0 abort -> OK base=2
	`)
	before := encoded(t, part.m)
	for _, hw := range []int64{0, 3, 1} {
		part.m.LastStableOffset(hw)
		if got := encoded(t, part.m); !slices.Equal(got, before) {
			t.Errorf("after LastStableOffset(%d) a snapshot is\n%x, and it was\n%x", hw, got, before)
		}
	}
	empty := New(Config{})
	before = encoded(t, empty)
	empty.LastStableOffset(0)
	if got := encoded(t, empty); !slices.Equal(got, before) {
		t.Errorf("an empty manager: %x, and it was %x", got, before)
	}
}

// TestMarkerError: the text, the code and the facts of each refusal.
func TestMarkerError(t *testing.T) {
	m := play(t, `
		marker pid=31 epoch=5 coord=3 commit -> OK base=0
		batch pid=31 epoch=5 seq=0 n=1 txn -> OK base=1
	`).m
	commit := Marker{ProducerID: 31, Epoch: 5, CoordinatorEpoch: 3, Commit: true}
	if _, _, err := m.Reserve(Batch{ProducerID: 32, Epoch: 1, Count: 3, Transactional: true}); err != nil {
		t.Fatal(err)
	}
	markerWaits := m.CheckMarker(Marker{ProducerID: 32, Epoch: 1})
	if _, err := m.ReserveMarker(Marker{ProducerID: 33, Epoch: 1}); err != nil {
		t.Fatal(err)
	}
	_, batchWaits := m.Check(33, 1, 0, 1)
	for _, c := range []struct {
		err  error
		code int16
		text string
	}{
		{m.CheckMarker(Marker{ProducerID: -4, Epoch: 1, CoordinatorEpoch: 2}), 87,
			"idempotence: malformed batch: abort marker of producer -4 epoch 1 coordinator epoch 2"},
		{m.CheckMarker(Marker{ProducerID: 31, Epoch: 4, CoordinatorEpoch: 3}), 47,
			"idempotence: fenced by a newer epoch: abort marker of producer 31 epoch 4 coordinator epoch 3: current epoch is 5"},
		{m.CheckMarker(Marker{ProducerID: 31, Epoch: 5, CoordinatorEpoch: 3, Version: 2}), 47,
			"idempotence: fenced by a newer epoch: abort marker of producer 31 epoch 5 coordinator epoch 3: version 2 requires an epoch above 5"},
		{markerWaits, 7, "idempotence: append in flight: producer 32 epoch 1 marker: waits for sequences 0 to 2 of epoch 1"},
		{batchWaits, 7, "idempotence: append in flight: producer 33 epoch 1 sequence 0 count 1: waits for a marker of epoch 1"},
		{m.CheckMarker(Marker{ProducerID: 31, Epoch: 5, CoordinatorEpoch: 2}), 52,
			"idempotence: fenced by a newer coordinator: abort marker of producer 31 epoch 5 coordinator epoch 2: current coordinator epoch is 3"},
		{m.CommitMarker(commit, 1), 56,
			"idempotence: offset out of order: commit marker of producer 31 epoch 5 coordinator epoch 3: offset 1, transaction begins at 1"},
	} {
		if got := c.err.Error(); got != c.text {
			t.Errorf("got  %s\nwant %s", got, c.text)
		}
		if got := KafkaErrorCode(c.err); got != c.code {
			t.Errorf("%v: code %d, want %d", c.err, got, c.code)
		}
	}
	var e *MarkerError
	err := m.CommitMarker(commit, 1)
	if !errors.As(err, &e) || *e != (MarkerError{
		Marker: commit, CurrentEpoch: 5, CurrentCoordinatorEpoch: 3, TransactionFirstOffset: 1, Offset: 1, Err: ErrOffsetOrder,
	}) {
		t.Errorf("the facts are %+v", e)
	}
	text, jsonErr := json.Marshal(e)
	want := `{"Marker":{"ProducerID":31,"Epoch":5,"CoordinatorEpoch":3,"Commit":true,"Version":0},"CurrentEpoch":5,` +
		`"CurrentCoordinatorEpoch":3,"TransactionFirstOffset":1,"Offset":1,"Err":"idempotence: offset out of order"}`
	if jsonErr != nil || string(text) != want {
		t.Errorf("in JSON it is %s, %v\nwant %s", text, jsonErr, want)
	}
}

// TestTransactionErrorCodes: what a broker answers.
func TestTransactionErrorCodes(t *testing.T) {
	for err, code := range map[error]int16{
		ErrInvalidTxnState: 48, ErrConcurrentTransactions: 51, ErrAbortedUnknown: 56, ErrCoordinatorFenced: 52, ErrFenced: 47, ErrInFlight: 7,
	} {
		if got := KafkaErrorCode(err); got != code {
			t.Errorf("%v: code %d, want %d", err, got, code)
		}
	}
	if _, err := New(Config{}).AbortedTransactions(-7, 0); KafkaErrorCode(err) != 56 || !strings.Contains(err.Error(), "-7") {
		t.Errorf("asked from -7: %v", err)
	}
}

// TestInFlightErrorOfMarker: what a refused marker, or what waits for one, is told.
func TestInFlightErrorOfMarker(t *testing.T) {
	m := New(Config{})
	batch := Batch{ProducerID: 31, Epoch: 2, Count: 3, Transactional: true}
	r, _, err := m.Reserve(batch)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := m.Reserve(Batch{ProducerID: 31, Epoch: 2, BaseSequence: 3, Count: 2, Transactional: true}); err != nil {
		t.Fatal(err)
	}
	k := Marker{ProducerID: 31, Epoch: 1, CoordinatorEpoch: 4, Commit: true}
	var e *InFlightError
	if err := m.CheckMarker(k); !errors.As(err, &e) || !errors.Is(err, ErrInFlight) {
		t.Fatalf("with two batches in flight: %v", err)
	}
	if e.Batch.ProducerID != 31 || e.Batch.Epoch != 1 || e.Batch.BaseSequence != -1 || e.Epoch != 2 || e.FirstSequence != 3 || e.LastSequence != 4 {
		t.Errorf("a marker waits: %+v", e)
	}
	if err := r.Abort(); err != nil {
		t.Fatal(err)
	}
	<-e.Done()
	marker, err := m.ReserveMarker(k)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := m.Reserve(batch); !errors.As(err, &e) {
		t.Fatalf("with a marker in flight: %v", err)
	}
	if e.Batch != batch || e.Epoch != 1 || e.FirstSequence != -1 || e.LastSequence != -1 {
		t.Errorf("a batch waits: %+v", e)
	}
	select {
	case <-e.Done():
		t.Error("done, and the marker is in flight")
	default:
	}
	if err := marker.Commit(0); err != nil {
		t.Fatal(err)
	}
	<-e.Done()
}

// TestTransactionStats: each answer counts once.
func TestTransactionStats(t *testing.T) {
	part := play(t, `
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=31 epoch=0 seq=1 n=1 -> INVALID_TXN
		batch pid=31 epoch=1 seq=0 n=1 txn -> CONCURRENT_TXN
		commit pid=31 epoch=1 seq=0 n=1 txn base=1 -> REFUSED CONCURRENT_TXN
		marker pid=31 epoch=0 coord=7 abort -> OK base=1
		marker pid=31 epoch=0 coord=6 abort -> STALE_COORD
		commit-marker pid=31 epoch=0 coord=6 abort base=2 -> REFUSED STALE_COORD
		commit-marker pid=31 epoch=0 coord=7 abort base=-1 -> REFUSED OFFSET_ORDER
		batch pid=32 epoch=3 seq=0 n=1 txn -> OK base=2
		marker pid=32 epoch=2 coord=0 abort -> STALE_EPOCH
		check-marker pid=-1 epoch=2 coord=0 abort -> INVALID
		reserve-marker pid=33 epoch=2 coord=0 abort -> OK #M
		check-marker pid=33 epoch=2 coord=0 abort -> IN_FLIGHT
		commit #M base=3
		replay-marker pid=32 epoch=3 coord=0 abort base=4
	`)
	want := Stats{
		Accepted: 2, InvalidTxn: 1, ConcurrentTxn: 2, CoordinatorFenced: 2, OutOfOrder: 1, Fenced: 1, Invalid: 1, InFlight: 1,
		Markers: 2, OpenTransactions: 0, AbortedRanges: 2,
	}
	if got := part.m.Stats(); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// TestMarkerIsActivity: a producer with a marker counts as active, and one whose marker
// failed does too.
func TestMarkerIsActivity(t *testing.T) {
	play(t, `
		ttl=100
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
		batch pid=33 epoch=0 seq=0 n=1 -> OK base=2
		expire now=0 -> 0
		marker pid=31 epoch=0 coord=0 commit -> OK base=3
		reserve-marker pid=32 epoch=0 coord=0 commit -> OK #M
		append-failed #M
		expire now=50 -> 0
		activity pid=31 -> 50
		activity pid=32 -> 50
		expire now=100 -> 1
		window pid=33 -> none
		expire now=150 -> 2
	`)
}

// TestManyOpenTransactions: which is the oldest, whatever the order in which they end.
func TestManyOpenTransactions(t *testing.T) {
	const n = 1000
	m := New(Config{})
	ended := make([]bool, n)
	for i := range int64(n) {
		if err := m.CommitBatch(Batch{ProducerID: i, Count: 1, Transactional: true}, i); err != nil {
			t.Fatal(err)
		}
	}
	m.LastStableOffset(0)
	for i := range int64(n) {
		pid := i * 389 % n // every one once
		if err := m.CommitMarker(Marker{ProducerID: pid}, n+i); err != nil {
			t.Fatal(err)
		}
		ended[pid] = true
		first := slices.Index(ended, false)
		want := int64(first)
		if first < 0 {
			want = 2 * n
		}
		if got := m.LastStableOffset(n + i + 1); got != want {
			t.Fatalf("after %d markers the last stable offset is %d, want %d", i+1, got, want)
		}
		if i%50 == 0 {
			audit(t, m)
		}
	}
	if s := m.Stats(); s.OpenTransactions != 0 || s.AbortedRanges != n {
		t.Errorf("%+v", s)
	}
	m.Expire(time.Unix(0, 0))
	audit(t, m)
}
