package idempotence

import (
	"slices"
	"testing"
)

// This file has the faults of other brokers that are about transactions, as
// cases_test.go has the others.

// TestCase_TXN_MIX: a batch outside the transaction that its producer has open would be
// hidden or shown by a transaction that it is no part of.
func TestCase_TXN_MIX(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=31 epoch=0 seq=1 n=1 -> INVALID_TXN
		batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=1
		marker pid=31 epoch=0 coord=1 commit -> OK base=2
		batch pid=31 epoch=0 seq=2 n=1 -> OK base=3
	`)
}

// TestCase_TXN_VERIFY_RACE: a marker that was written between a verification and the
// append made a transaction that nothing would end. The verification is the broker's;
// here the marker waits for an append in flight, and a batch of the epoch before a marker
// of version 2 is fenced. (KAFKA-14884)
func TestCase_TXN_VERIFY_RACE(t *testing.T) {
	play(t, `
		mode=accept
		reserve pid=31 epoch=0 seq=0 n=1 txn -> OK #A
		reserve-marker pid=31 epoch=1 coord=1 abort v=2 -> IN_FLIGHT waits=0:0..0
		commit #A base=0 -> OK
		reserve-marker pid=31 epoch=1 coord=1 abort v=2 -> OK #M
		reserve pid=31 epoch=0 seq=1 n=1 txn -> IN_FLIGHT
		commit #M base=1 -> OK
		reserve pid=31 epoch=0 seq=1 n=1 txn -> STALE_EPOCH
		open -> none
		aborted from=0 to=2 -> 31@0-1
	`)
}

// TestCase_TXN_MARKER_RETRY: a marker that was written, and whose answer was lost, comes
// again. It is accepted and written again; a refusal would make the coordinator retry for
// ever. (KAFKA-19999)
func TestCase_TXN_MARKER_RETRY(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=5 seq=0 n=1 txn -> OK base=0
		marker pid=31 epoch=6 coord=1 commit v=2 -> OK base=1
		marker pid=31 epoch=6 coord=1 commit v=2 -> OK base=2
		marker pid=31 epoch=5 coord=1 commit v=2 -> STALE_EPOCH
		batch pid=31 epoch=6 seq=0 n=1 txn -> OK base=3
		aborted from=0 to=4 -> none
	`)
}

// TestCase_TXN_LSO: a transaction holds the last stable offset back until its marker is
// below the high watermark, and an open one still does after a restart. One in flight
// holds it back from where it can lie. (KAFKA-9807)
func TestCase_TXN_LSO(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=2 txn -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=2
		lso hw=3 -> 0
		marker pid=31 epoch=0 coord=1 commit -> OK base=3
		lso hw=3 -> 0
		lso hw=4 -> 4
		batch pid=33 epoch=0 seq=0 n=1 txn -> OK base=4
		snapshot S -> 5
		restart S
		lso hw=5 -> 4
		reserve pid=34 epoch=0 seq=0 n=1 txn -> OK #A
		commit-marker pid=33 epoch=0 coord=1 commit base=6 -> OK
		lso hw=7 -> 5
		commit #A base=5 -> OK
		lso hw=7 -> 5
		marker pid=34 epoch=0 coord=1 abort -> OK base=7
		lso hw=8 -> 8
	`)
}

// TestCase_TXN_INDEX_FAIL: a marker that is in the log and was not committed ends
// nothing. The log goes on behind it, and a replay meets it. There is no index file whose
// write can fail. (KAFKA-7866)
func TestCase_TXN_INDEX_FAIL(t *testing.T) {
	play(t, `
		mode=accept
		lso hw=0 -> 0
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		reserve-marker pid=31 epoch=0 coord=1 abort -> OK #M
		lso hw=1 -> 0
		commit pid=32 epoch=0 seq=0 n=1 base=2 -> OK
		snapshot-end -> 1
		lso hw=1 -> 0
		abandon
		replay-marker pid=31 epoch=0 coord=1 abort base=1
		replay pid=32 epoch=0 seq=0 n=1 base=2
		replayed-to to=3
		lso hw=3 -> 3
		aborted from=0 to=3 -> 31@0-1
	`)
}

// TestCase_EPOCH_MAX_Marker: the transaction of the last epoch there is can be ended,
// also by a marker of version 2, which would need a newer one. (KAFKA-20090)
func TestCase_EPOCH_MAX_Marker(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=32766 seq=0 n=1 txn -> OK base=0
		marker pid=31 epoch=32767 coord=1 abort v=2 -> OK base=1
		batch pid=31 epoch=-32768 seq=0 n=1 -> INVALID
		batch pid=31 epoch=0 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=32767 seq=0 n=1 txn -> OK base=2
		marker pid=31 epoch=32767 coord=1 abort v=2 -> OK base=3
		lso hw=4 -> 4
		aborted from=0 to=4 -> 31@0-1 31@2-3
	`)
}

// TestCase_MARKER_ONLY_Marker: a producer known by a marker alone has an epoch and no
// sequence, also after a restart, and a newer epoch ends the old one's sequences.
// (KAFKA-7298, KAFKA-9144)
func TestCase_MARKER_ONLY_Marker(t *testing.T) {
	play(t, `
		mode=accept
		marker pid=31 epoch=2 coord=1 abort -> OK base=0
		batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=2 seq=4 n=1 -> OUT_OF_ORDER
		snapshot S -> 1
		restart S
		batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=2 seq=0 n=1 -> OK base=1
		batch pid=31 epoch=2 seq=0 n=1 -> DUP base=1
		marker pid=31 epoch=3 coord=1 commit -> OK base=2
		batch pid=31 epoch=3 seq=1 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=3 seq=0 n=1 -> OK base=3
	`)
}

// TestCase_EXPIRE_MARKER_TIME_Marker: a marker is activity. Where it was none, a producer
// whose transaction was aborted late was forgotten at once, and an older coordinator got
// its marker in. (KAFKA-9144)
func TestCase_EXPIRE_MARKER_TIME_Marker(t *testing.T) {
	play(t, `
		mode=accept
		ttl=100
		batch pid=31 epoch=0 seq=0 n=1 txn t=0 -> OK base=0
		marker pid=31 epoch=0 coord=5 abort t=90 -> OK base=1
		expire now=150 -> 0
		producers -> 1
		marker pid=31 epoch=0 coord=4 abort t=160 -> STALE_COORD
		batch pid=31 epoch=0 seq=0 n=1 txn -> DUP base=0
		expire now=190 -> 1
		producers -> 0
	`)
}

// TestCase_MEM_CAP_Marker: the cap takes no producer with an open transaction, also none
// whose marker is in flight, and takes it once the transaction has ended.
func TestCase_MEM_CAP_Marker(t *testing.T) {
	play(t, `
		mode=accept
		cap=2
		batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=2 epoch=0 seq=0 n=1 txn -> OK base=1
		batch pid=3 epoch=0 seq=0 n=1 -> OK base=2
		producers -> 2
		batch pid=2 epoch=0 seq=0 n=1 txn -> DUP base=1
		batch pid=3 epoch=0 seq=0 n=1 -> DUP base=2
		reserve-marker pid=2 epoch=0 coord=0 commit -> OK #M
		batch pid=1 epoch=0 seq=1 n=1 -> OK base=3
		batch pid=2 epoch=0 seq=0 n=1 txn -> DUP base=1
		commit #M base=4 -> OK
		batch pid=3 epoch=0 seq=1 n=1 -> OK base=5
		batch pid=4 epoch=0 seq=0 n=1 -> OK base=6
		window pid=2 -> none
	`)
}

// TestCase_REPLAY_EPOCH_BACK_Marker: an older epoch of a producer or of a coordinator in
// the log stops no replay, ends its transaction, and takes nothing back. (KAFKA-9144)
func TestCase_REPLAY_EPOCH_BACK_Marker(t *testing.T) {
	play(t, `
		mode=accept
		replay pid=31 epoch=3 seq=0 n=1 txn base=0
		replay pid=31 epoch=2 seq=4 n=1 txn base=1
		replay-marker pid=31 epoch=3 coord=5 abort base=2
		replay-marker pid=31 epoch=3 coord=4 abort base=3
		batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=3 seq=1 n=1 -> OK base=4
		marker pid=31 epoch=3 coord=4 commit -> STALE_COORD coord=5
		aborted from=0 to=5 -> 31@0-2
	`)
}

// TestCase_RETAIN_ALL_GONE_Txn: every record of an open transaction is deleted. It stays
// open, holds the last stable offset at the log's start, and its marker ends it.
func TestCase_RETAIN_ALL_GONE_Txn(t *testing.T) {
	part := play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=2 txn -> OK base=0
		batch pid=32 epoch=0 seq=0 n=3 -> OK base=2
		lso hw=5 -> 0
		delete to=5
		lso hw=5 -> 5
		open -> 31@0
		snapshot S -> 5
		restart S
		open -> 31@0
		batch pid=32 epoch=0 seq=3 n=1 -> OK base=5
		lso hw=6 -> 5
		marker pid=31 epoch=0 coord=0 abort -> OK base=6
		lso hw=7 -> 7
		aborted from=5 to=7 -> 31@0-6
	`)
	if got := readCommitted(part.log, 5, 7, mustAborted(t, part.m, 5, 7)); !slices.Equal(got, []int64{5}) {
		t.Errorf("a reader sees the batches at %v", got)
	}
}
