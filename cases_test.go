package idempotence

import (
	"bytes"
	"errors"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"
)

// This file has what went wrong elsewhere: faults that users reported of other
// brokers and clients, each as the transcript that shows it, with the answers
// that are right (transcript_test.go says how to read one). The tests are named
// after the cases. Where the rules here depart from Apache Kafka on purpose, the
// test says where and why.
//
// Where nothing else is said the policy is mode=accept, as in most brokers.

// TestCase_WIN_5: a retry of any of five pipelined batches is a duplicate.
// Remembering only the last one turned a lost acknowledgement into an
// out-of-order refusal, and clients answered that with a new epoch and the same
// records again. (KAFKA-5494)
func TestCase_WIN_5(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=0 seq=1 n=2 -> OK base=1
		batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
		batch pid=31 epoch=0 seq=4 n=3 -> OK base=4
		batch pid=31 epoch=0 seq=7 n=1 -> OK base=7
		batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
		batch pid=31 epoch=0 seq=4 n=3 -> DUP base=4
		batch pid=31 epoch=0 seq=8 n=1 -> OK base=8
		batch pid=31 epoch=0 seq=1 n=2 -> DUP base=1
	`)
}

// TestCase_WIN_DUP_OFFSET: a duplicate is answered with the offset of its own
// first copy, not with the end of the log or another batch's offset.
func TestCase_WIN_DUP_OFFSET(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
		batch pid=32 epoch=0 seq=0 n=5 -> OK base=3
		batch pid=31 epoch=0 seq=3 n=2 -> OK base=8
		batch pid=31 epoch=0 seq=0 n=3 -> DUP base=0
		batch pid=32 epoch=0 seq=0 n=5 -> DUP base=3
		batch pid=31 epoch=0 seq=3 n=2 -> DUP base=8
	`)
}

// TestCase_WIN_BELOW: a retry older than the window is refused, as in Kafka. To
// accept it would store it twice, and to call it a duplicate would need an
// offset that is no longer known. The producer's next batch is not harmed.
func TestCase_WIN_BELOW(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
		batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
		batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
		batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
		batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
		batch pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=6 n=1 -> OK base=6
	`)
}

// TestCase_WRAP_MAX: 2147483647 is a legal sequence, and 0 comes after it. The
// modulus is 2^31; one short of it skips a value.
func TestCase_WRAP_MAX(t *testing.T) {
	play(t, `
		mode=accept
		replay pid=31 epoch=0 seq=2147483640 n=7 base=0
		batch pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=2147483647 n=1 -> OK base=7
		batch pid=31 epoch=0 seq=1 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=8
		batch pid=31 epoch=0 seq=2147483647 n=1 -> DUP base=7
	`)
}

// TestCase_WRAP_NEG: counters that went negative are malformed, which is not
// the same as out of order, and leave the producer's state alone. (KAFKA-7693)
func TestCase_WRAP_NEG(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=0 seq=-2147483648 n=1 -> INVALID
		batch pid=31 epoch=0 seq=-1 n=1 -> INVALID
		batch pid=31 epoch=0 seq=1 n=0 -> INVALID
		batch pid=31 epoch=-1 seq=0 n=1 -> INVALID
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
	`)
}

// TestCase_EPOCH_START: a new epoch starts at 0, and one that does not must not
// stick: it would fence the producer's own good batches. (KAFKA-12152)
func TestCase_EPOCH_START(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=5 -> OK base=0
		batch pid=31 epoch=1 seq=5 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
		batch pid=31 epoch=1 seq=0 n=1 -> OK base=6
		batch pid=31 epoch=0 seq=6 n=1 -> STALE_EPOCH
		batch pid=31 epoch=1 seq=1 n=1 -> OK base=7
	`)
}

// TestCase_EPOCH_MAX: epochs end at 32767 and do not wrap. A batch may carry
// 32767, as in Kafka's partition check, although its coordinator never hands it
// out. (KAFKA-20090, KAFKA-19367)
func TestCase_EPOCH_MAX(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=32766 seq=0 n=1 txn -> OK base=0
		replay-marker pid=31 epoch=32767 coord=1 abort base=1
		batch pid=31 epoch=-32768 seq=0 n=1 -> INVALID
		batch pid=31 epoch=0 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=32767 seq=0 n=1 txn -> OK base=2
		replay-marker pid=31 epoch=32767 coord=1 abort base=3
		txn pid=31 -> none coord=1
		batch pid=31 epoch=32767 seq=0 n=1 -> DUP base=2
	`)
}

// TestCase_UNKNOWN_SEQ: "I know you and you skipped" and "I do not know you"
// are different answers, and only the second is ever UNKNOWN_PRODUCER.
// (KAFKA-5793)
func TestCase_UNKNOWN_SEQ(t *testing.T) {
	t.Run("accept", func(t *testing.T) {
		play(t, `
			mode=accept
			batch pid=31 epoch=0 seq=7 n=2 -> OK base=0
			batch pid=31 epoch=0 seq=7 n=2 -> DUP base=0
			batch pid=31 epoch=0 seq=12 n=1 -> OUT_OF_ORDER
			batch pid=31 epoch=0 seq=9 n=1 -> OK base=2
		`)
	})
	t.Run("strict", func(t *testing.T) {
		play(t, `
			mode=strict
			batch pid=31 epoch=0 seq=7 n=2 -> UNKNOWN_PRODUCER
			producers -> 0
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=7 n=2 -> OUT_OF_ORDER
		`)
	})
}

// TestCase_FIRST_TENTATIVE: the second batch of a new producer comes in before
// its first. Apache Kafka since 4.5 refuses it while the log is new, with an
// error that makes the client wait for the first. (KAFKA-14920. Kafka also
// remembers the lowest sequence seen by a verification; there is no such hook
// here, so on a log that has held records the policy alone decides.)
func TestCase_FIRST_TENTATIVE(t *testing.T) {
	play(t, `
		mode=new-log-strict
		batch pid=31 epoch=0 seq=2 n=1 txn -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=0 n=2 txn -> OK base=0
		batch pid=31 epoch=0 seq=2 n=1 txn -> OK base=2
	`)
}

// TestCase_RETAIN_ALL_GONE: retention deletes every record of a live producer.
// Its batches are still remembered, and a duplicate may name an offset below
// the log's start. (KAFKA-7190) From the restart on this departs from Kafka, which
// throws away snapshots at or below the log's start, and would store the retry
// again.
func TestCase_RETAIN_ALL_GONE(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
		batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
		advance-start to=4
		batch pid=31 epoch=0 seq=3 n=1 -> DUP base=3
		batch pid=31 epoch=0 seq=0 n=3 -> DUP base=0
		snapshot S
		restart S
		batch pid=31 epoch=0 seq=3 n=1 -> DUP base=3
		batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
	`)
}

// TestCase_MARKER_ONLY: a producer known only by a marker's epoch starts at 0,
// and a marker that raises the epoch ends the old one's sequences. The refusal
// is OUT_OF_ORDER, as in Kafka from 2.5 on. (KAFKA-7298, KAFKA-9144)
func TestCase_MARKER_ONLY(t *testing.T) {
	play(t, `
		mode=accept
		replay-marker pid=31 epoch=2 coord=1 abort base=0
		window pid=31 -> epoch=2
		batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=2 seq=4 n=1 -> OUT_OF_ORDER expected=0 current=2
		snapshot S
		restart S
		batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=2 seq=0 n=1 -> OK base=1
		batch pid=31 epoch=2 seq=0 n=1 -> DUP base=1
		replay-marker pid=31 epoch=3 coord=1 commit base=2
		batch pid=31 epoch=3 seq=1 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=3 seq=0 n=1 -> OK base=3
	`)
}

// TestCase_EXPIRE_MARKER_TIME: a marker is activity. Where only data was, a
// producer whose transaction was aborted late was forgotten at once, and its
// coordinator epoch with it. (KAFKA-9144)
func TestCase_EXPIRE_MARKER_TIME(t *testing.T) {
	play(t, `
		mode=accept
		ttl=100
		batch pid=31 epoch=0 seq=0 n=1 txn t=0 -> OK base=0
		replay-marker pid=31 epoch=0 coord=5 abort base=1 t=90
		expire now=150 -> 0
		producers -> 1
		txn pid=31 -> none coord=5
		batch pid=31 epoch=0 seq=0 n=1 txn -> DUP base=0
		expire now=189 -> 0
		expire now=190 -> 1
		producers -> 0
	`)
}

// TestCase_EXPIRE_CLIENT_CLOCK: idle time is counted by the broker's clock. What
// time a client writes on its records is never looked at, so neither old nor
// future data is forgotten early or kept for ever. This departs from Kafka,
// which counts from the batch's largest timestamp.
func TestCase_EXPIRE_CLIENT_CLOCK(t *testing.T) {
	play(t, `
		mode=accept
		ttl=100
		batch pid=31 epoch=0 seq=0 n=1 t=1000 rt=5 -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 t=1000 rt=9000000000000 -> OK base=1
		expire now=1001 -> 0
		producers -> 2
		batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
		expire now=1100 -> 2
		producers -> 0
	`)
}

// TestCase_MEM_CAP: clients that make a producer for every message do not grow
// the memory without bound. The least recently committed goes, never one with
// an open transaction, and it is unknown afterwards. (KAFKA-13999)
func TestCase_MEM_CAP(t *testing.T) {
	play(t, `
		mode=accept
		cap=2
		batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=2 epoch=0 seq=0 n=1 txn -> OK base=1
		batch pid=3 epoch=0 seq=0 n=1 -> OK base=2
		producers -> 2
		window pid=1 -> none
		batch pid=2 epoch=0 seq=0 n=1 txn -> DUP base=1
		batch pid=3 epoch=0 seq=0 n=1 -> DUP base=2
		batch pid=1 epoch=0 seq=1 n=1 -> OK base=3
		producers -> 2
		window pid=3 -> none
		stats -> accepted=4 duplicate=2 out-of-order=0 unknown=0 fenced=0 invalid=0 expired=0 evicted=2
	`)
}

// TestCase_FAIL_AFTER_CHECK: an append that fails after a good Check leaves
// nothing behind: no batch, no producer, no epoch. State that moved at Check
// turned the retry into a duplicate of something never stored. (KAFKA-6683)
func TestCase_FAIL_AFTER_CHECK(t *testing.T) {
	play(t, `
		mode=accept
		check pid=31 epoch=0 seq=0 n=2 -> OK #A
		append-failed #A
		producers -> 0
		batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
		batch pid=31 epoch=0 seq=0 n=2 -> DUP base=0
		check pid=31 epoch=1 seq=0 n=1 -> OK #B
		append-failed #B
		batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
	`)
}

// TestCase_FAIL_AFTER_CHECK_Reserved is the same where the append was reserved.
func TestCase_FAIL_AFTER_CHECK_Reserved(t *testing.T) {
	play(t, `
		mode=accept
		reserve pid=31 epoch=0 seq=0 n=2 -> OK #A
		append-failed #A -> OK
		producers -> 0
		batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
		batch pid=31 epoch=0 seq=0 n=2 -> DUP base=0
		reserve pid=31 epoch=1 seq=0 n=1 -> OK #B
		append-failed #B -> OK
		batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
	`)
}

// TestCase_WIN_SAME_SEQ: a client gives one sequence to several sends. The
// broker cannot see that their records differ, but it stores only one of them.
func TestCase_WIN_SAME_SEQ(t *testing.T) {
	play(t, `
		mode=accept
		reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
		reserve pid=31 epoch=0 seq=0 n=1 -> IN_FLIGHT
		commit #A base=0 -> OK
		batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
	`)
}

// TestCase_EPOCH_INFLIGHT: a newer epoch arrives while appends of the older one
// are in flight. It waits for them, so that no late commit of an old append can
// roll the epoch back or end up in the new window.
func TestCase_EPOCH_INFLIGHT(t *testing.T) {
	play(t, `
		mode=accept
		reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
		reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
		reserve pid=31 epoch=1 seq=0 n=1 -> IN_FLIGHT
		commit #A base=0 -> OK
		reserve pid=31 epoch=1 seq=0 n=1 -> IN_FLIGHT
		commit #B base=1 -> OK
		reserve pid=31 epoch=1 seq=0 n=1 -> OK #C
		batch pid=31 epoch=0 seq=2 n=1 -> STALE_EPOCH
		commit #C base=2 -> OK
		batch pid=31 epoch=0 seq=2 n=1 -> STALE_EPOCH
		batch pid=31 epoch=1 seq=0 n=1 -> DUP base=2
		batch pid=31 epoch=1 seq=1 n=1 -> OK base=3
	`)
}

// TestCase_FAIL_CASCADE: an append in the middle of a pipeline fails. What was
// reserved behind it must not be appended, or the log has a gap that no retry
// can fill; if it is in the log already, its Commit is refused.
func TestCase_FAIL_CASCADE(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=5 -> OK base=0
		reserve pid=31 epoch=0 seq=5 n=1 -> OK #A
		reserve pid=31 epoch=0 seq=6 n=1 -> OK #B
		append-failed #A -> OK
		commit #B base=5 -> REFUSED ABANDONED
		batch pid=31 epoch=0 seq=6 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
		batch pid=31 epoch=0 seq=6 n=1 -> OK base=6
	`)
}

// TestCase_FAIL_CASCADE_Committed: the same, but the later one was committed
// before the earlier one failed. The caller is told that the log has a gap.
func TestCase_FAIL_CASCADE_Committed(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=5 -> OK base=0
		reserve pid=31 epoch=0 seq=5 n=1 -> OK #A
		reserve pid=31 epoch=0 seq=6 n=1 -> OK #B
		commit #B base=6 -> OK
		append-failed #A -> GAP next=6
		truncate to=6 -> exact
		batch pid=31 epoch=0 seq=6 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=5 n=2 -> OK base=6
	`)
}

// TestCase_FAIL_CASCADE_NEW: the failed append was the first of its producer. Its
// successor must not slip in as a first batch where any first one is accepted.
func TestCase_FAIL_CASCADE_NEW(t *testing.T) {
	play(t, `
		mode=accept
		reserve pid=31 epoch=0 seq=0 n=5 -> OK #A
		reserve pid=31 epoch=0 seq=5 n=1 -> OK #B
		append-failed #A -> OK
		commit #B base=0 -> REFUSED ABANDONED
		producers -> 0
		batch pid=31 epoch=0 seq=5 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=0 n=5 -> OK base=0
		batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
	`)
}

// TestCase_INFLIGHT_DUP: a retry meets its own first copy in flight. It is
// neither stored a second time nor acknowledged before the first has settled.
func TestCase_INFLIGHT_DUP(t *testing.T) {
	play(t, `
		mode=accept
		reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
		reserve pid=31 epoch=0 seq=0 n=1 -> IN_FLIGHT
		reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
		reserve pid=31 epoch=0 seq=0 n=2 -> OUT_OF_ORDER
		commit #A base=0 -> OK
		batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
		reserve pid=31 epoch=0 seq=1 n=1 -> IN_FLIGHT
		commit #B base=1 -> OK
		batch pid=31 epoch=0 seq=1 n=1 -> DUP base=1
	`)
}

// TestCase_PIPELINE_ORDER: an asynchronous stage finishes in another order than
// it began. Commits may be reported so; batches must not be in the log so.
func TestCase_PIPELINE_ORDER(t *testing.T) {
	t.Run("the later one lies where the earlier one belongs", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			commit #B base=0 -> REFUSED OFFSET_ORDER
			commit #A base=0 -> OK
			commit #B base=1 -> OK
		`)
	})
	t.Run("the later one is reported first", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			commit #B base=1 -> OK
			batch pid=31 epoch=0 seq=1 n=1 -> IN_FLIGHT
			commit #A base=0 -> OK
			batch pid=31 epoch=0 seq=1 n=1 -> DUP base=1
		`)
	})
	t.Run("the earlier one turns out to lie behind", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			commit #B base=1 -> OK
			commit #A base=2 -> REFUSED OFFSET_ORDER
			commit #A base=1 -> REFUSED OFFSET_ORDER
			commit #A base=0 -> OK
		`)
	})
}

// TestCase_MEM_CAP_InFlight: the cap never takes a producer with an append in
// flight.
func TestCase_MEM_CAP_InFlight(t *testing.T) {
	play(t, `
		mode=accept
		cap=2
		batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
		reserve pid=1 epoch=0 seq=1 n=1 -> OK #A
		batch pid=2 epoch=0 seq=0 n=1 -> OK base=1
		batch pid=3 epoch=0 seq=0 n=1 -> OK base=2
		window pid=2 -> none
		commit #A base=3 -> OK
		batch pid=1 epoch=0 seq=1 n=1 -> DUP base=3
	`)
}

// TestCase_STEP_DOWN: leadership is lost with appends in flight. Their handlers
// are told so, and those that follow in the log are not harmed.
func TestCase_STEP_DOWN(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
		reserve pid=31 epoch=0 seq=2 n=1 -> OK #B
		commit #B base=2 -> OK
		abandon
		commit #A base=1 -> REFUSED ABANDONED
		truncate to=1 -> exact
		replay pid=31 epoch=0 seq=1 n=1 base=1
		batch pid=31 epoch=0 seq=1 n=1 -> DUP base=1
		batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
	`)
}

// TestCase_REPLAY_NO_JUDGE: a rebuild judges nothing. Compaction leaves gaps in
// the sequence, and ranges that were there before; what was applied last is the
// newest, whatever its sequence.
// Where the log holds a range twice within the window, a retry is answered with
// the first copy, as in Kafka. (KAFKA-6003)
func TestCase_REPLAY_NO_JUDGE(t *testing.T) {
	play(t, `
		mode=accept
		replay pid=31 epoch=0 seq=0 n=3 base=0
		replay pid=31 epoch=0 seq=3 n=2 base=3
		replay pid=31 epoch=0 seq=0 n=3 base=5
		batch pid=31 epoch=0 seq=0 n=3 -> DUP base=0
		batch pid=31 epoch=0 seq=3 n=2 -> DUP base=3
	`)
	play(t, `
		mode=accept
		replay pid=31 epoch=0 seq=0 n=1 base=0
		replay pid=31 epoch=0 seq=7 n=2 base=9
		replay pid=31 epoch=0 seq=3 n=1 base=12
		batch pid=31 epoch=0 seq=3 n=1 -> DUP base=12
		batch pid=31 epoch=0 seq=4 n=1 -> OK base=13
		batch pid=31 epoch=0 seq=7 n=2 -> DUP base=9
	`)
}

// TestCase_REPLAY_EPOCH_BACK: a log that holds an older epoch after a newer one
// does not stop a recovery. The newer epoch and its window are kept; this
// departs from Kafka, which adopts whatever epoch it meets last and so clears
// the window, and would refuse the last line.
func TestCase_REPLAY_EPOCH_BACK(t *testing.T) {
	play(t, `
		mode=accept
		replay pid=31 epoch=3 seq=0 n=1 base=0
		replay pid=31 epoch=2 seq=4 n=1 base=1
		replay-marker pid=31 epoch=3 coord=5 abort base=2
		replay-marker pid=31 epoch=3 coord=4 abort base=3
		txn pid=31 -> none coord=5
		batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=3 seq=1 n=1 -> OK base=4
	`)
}

// TestCase_TRUNC_RETRY: a log that was cut takes the memory of what was cut with
// it. Memory that stays answers duplicate for records that are gone, which is
// loss, or refuses their retry. (KAFKA-5435)
func TestCase_TRUNC_RETRY(t *testing.T) {
	t.Run("cut within the window", func(t *testing.T) {
		play(t, `
			mode=accept
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			batch pid=40 epoch=0 seq=0 n=1 -> OK base=4
			truncate to=2 -> exact
			window pid=40 -> none
			batch pid=31 epoch=0 seq=3 n=1 -> OUT_OF_ORDER
			batch pid=40 epoch=0 seq=0 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=3
			batch pid=31 epoch=0 seq=2 n=1 -> DUP base=3
			batch pid=31 epoch=0 seq=1 n=1 -> DUP base=1
		`)
	})
	t.Run("cut below an epoch bump, so that the older epoch is current again", func(t *testing.T) {
		play(t, `
			mode=accept
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=1
			truncate to=1 -> inexact
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
		`)
	})
}

// TestCase_PID_COLLISION: two sessions under one producer id cannot be told
// apart, so the highest id ever seen can be asked for, and an allocator be moved
// past it. It outlives the producer, an expiry and the log.
func TestCase_PID_COLLISION(t *testing.T) {
	play(t, `
		mode=accept
		ttl=100
		replay pid=1 epoch=0 seq=0 n=2 base=0
		replay pid=1 epoch=0 seq=2 n=1 base=2
		batch pid=1 epoch=0 seq=0 n=2 -> DUP base=0
		batch pid=1 epoch=0 seq=2 n=5 -> OUT_OF_ORDER
		highest-pid -> 1
		expire now=0 -> 0
		expire now=100 -> 1
		highest-pid -> 1
		snapshot S
		restart S
		highest-pid -> 1
		reset
		highest-pid -> 1
	`)
}

// TestCase_NO_PID: batches without a producer id are appended and not
// remembered, and move the end offset.
func TestCase_NO_PID(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=-1 epoch=-1 seq=-1 n=3 -> OK base=0
		batch pid=-1 epoch=-1 seq=-1 n=3 -> OK base=3
		producers -> 0
		snapshot S -> 6
		restart S
		end -> 6
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=6
	`)
}

// TestCase_SNAP_WINDOW: all five batches are recognised after a restart. (Kafka's own
// format loses four of them, whose retries are then out of order.)
func TestCase_SNAP_WINDOW(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
		batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
		batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
		batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
		snapshot S -> 5
		restart S
		batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
		batch pid=31 epoch=0 seq=3 n=1 -> DUP base=3
		batch pid=31 epoch=0 seq=4 n=1 -> DUP base=4
		batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
	`)
}

// TestCase_SHUTDOWN_RACE: batches are committed after the last snapshot of a clean
// shutdown. The next start must replay them.
func TestCase_SHUTDOWN_RACE(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		snapshot S -> 1
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
		restart S
		batch pid=31 epoch=0 seq=1 n=1 -> DUP base=1
		batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
	`)
}

// TestCase_RETAIN_ALL_GONE_Snapshot: every record of a producer has been deleted, and
// the snapshot still remembers the producer. (Kafka deletes snapshots below the log's
// start.)
func TestCase_RETAIN_ALL_GONE_Snapshot(t *testing.T) {
	play(t, `
		mode=accept
		batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
		batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
		advance-start to=4
		snapshot S -> 4
		restart S
		batch pid=31 epoch=0 seq=3 n=1 -> DUP base=3
		batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
	`)
}

// TestCase_MARKER_ONLY_Snapshot: a producer without a batch is restored without one,
// and with its epoch. (KAFKA-7298)
func TestCase_MARKER_ONLY_Snapshot(t *testing.T) {
	play(t, `
		mode=accept
		replay-marker pid=31 epoch=2 coord=1 abort base=0
		snapshot S -> 1
		restart S
		window pid=31 -> epoch=2
		txn pid=31 -> none coord=1
		batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
		batch pid=31 epoch=2 seq=4 n=1 -> OUT_OF_ORDER expected=0 current=2
		batch pid=31 epoch=2 seq=0 n=1 -> OK base=1
	`)
}

// TestCase_PID_COLLISION_Snapshot: a snapshot holds the highest producer id, also
// after its producer was forgotten.
func TestCase_PID_COLLISION_Snapshot(t *testing.T) {
	play(t, `
		ttl=100
		batch pid=900 epoch=0 seq=0 n=2 t=0 -> OK base=0
		batch pid=1 epoch=0 seq=0 n=2 t=99 -> OK base=2
		expire now=100 -> 1
		snapshot S -> 4
		restart S
		producers -> 1
		highest-pid -> 900
		expire now=199 -> 1
		snapshot T -> 4
		restart T
		producers -> 0
		highest-pid -> 900
	`)
}

// TestCase_NO_PID_Snapshot: batches without a producer id move the end offset of a
// snapshot. Otherwise a restart would replay them all.
func TestCase_NO_PID_Snapshot(t *testing.T) {
	play(t, `
		batch pid=-1 epoch=-1 seq=-1 n=3 -> OK base=0
		batch pid=-1 epoch=-1 seq=-1 n=3 -> OK base=3
		snapshot S -> 6
		restart S
		producers -> 0
		end -> 6
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=6
	`)
}

// TestCase_SNAP_CORRUPT: the newest snapshot is damaged or cut off: the older one is
// loaded and the log replayed from there. If that is damaged too, the log is replayed
// from its start. Nothing of a damaged one remains.
func TestCase_SNAP_CORRUPT(t *testing.T) {
	path := t.TempDir()
	dir, err := OpenSnapshotDir(path, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	p := newPartition(Config{UnknownProducer: AcceptAny})
	produce := func(seq, n int32, want Result) {
		t.Helper()
		got, err := p.produce(Batch{ProducerID: 31, BaseSequence: seq, Count: n})
		if err != nil || got != want {
			t.Fatalf("seq=%d n=%d: %v, %v, want %v", seq, n, got, err, want)
		}
	}
	save := func() {
		t.Helper()
		if err := dir.Save(p.m.Snapshot()); err != nil {
			t.Fatal(err)
		}
	}
	restart := func(from int64) {
		t.Helper()
		p.m = New(p.cfg)
		res, err := dir.Load(p.m, 0, p.end)
		if err != nil || res.EndOffset != from {
			t.Fatalf("loaded %+v, %v, want %d", res, err, from)
		}
		audit(t, p.m)
		for _, l := range p.log {
			if l.end() > from {
				if err := apply(p.m, l); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got, want := stateOf(p.m), 1; len(got.Producers) != want || got.EndOffset != p.end {
			t.Fatalf("%+v", got)
		}
	}
	produce(0, 3, Result{Append, 0})
	save()
	produce(3, 3, Result{Append, 3})
	save()
	restart(6)
	s, u := dir.file(snapshotName(3)), dir.file(snapshotName(6))
	good, err := os.ReadFile(u)
	if err != nil {
		t.Fatal(err)
	}
	damage := func(name string, b []byte, from int64) {
		t.Helper()
		if err := os.WriteFile(name, b, 0o644); err != nil {
			t.Fatal(err)
		}
		restart(from)
	}
	for n := range good {
		damage(u, good[:n], 3)
		bad := bytes.Clone(good)
		bad[n] ^= 0xff
		damage(u, bad, 3)
	}
	damage(u, append(bytes.Clone(good), 0), 3)
	bad := bytes.Clone(good)
	copy(bad[76:], "\x00\x00\x00\x80")
	damage(u, withChecksum(bad), 3)
	damage(s, good[:9], 0)
	produce(3, 3, Result{Duplicate, 3})
	produce(6, 1, Result{Append, 6})
}

// TestCase_SNAP_DELETE_RACE: a snapshot past a truncation is removed, and another one
// gets its name. The new one stays, since removal is never deferred. (KAFKA-12964)
func TestCase_SNAP_DELETE_RACE(t *testing.T) {
	dir := openDisk(t, newDisk(), 3)
	p := newPartition(Config{})
	produce := func(seq int32, want Result) {
		t.Helper()
		got, err := p.produce(Batch{ProducerID: 31, BaseSequence: seq, Count: 1})
		if err != nil || got != want {
			t.Fatalf("seq=%d: %v, %v, want %v", seq, got, err, want)
		}
	}
	produce(0, Result{Append, 0})
	produce(1, Result{Append, 1})
	early := p.m.Snapshot()
	if err := dir.Save(early); err != nil {
		t.Fatal(err)
	}
	p.truncate(t, 1)
	if err := dir.DropAfter(1); err != nil {
		t.Fatal(err)
	}
	produce(1, Result{Append, 1})
	if err := dir.Save(p.m.Snapshot()); err != nil {
		t.Fatal(err)
	}
	if err := dir.Save(early); !errors.Is(err, ErrStaleSnapshot) {
		t.Errorf("the one from before the cut: %v", err)
	}
	if end := loaded(t, dir, p.end); end != 2 {
		t.Errorf("loaded %d", end)
	}
	p.m = New(p.cfg)
	if _, err := dir.Load(p.m, 0, p.end); err != nil {
		t.Fatal(err)
	}
	produce(1, Result{Duplicate, 1})
}

// TestCase_LOCK_IO: while a disk is slow to save a snapshot, batches are checked and
// committed, producers expire and the log is truncated. What is saved is the state
// when the snapshot was taken. (KAFKA-9393, KAFKA-15046)
func TestCase_LOCK_IO(t *testing.T) {
	slow := &slowDisk{newDisk(), make(chan struct{}), make(chan struct{})}
	dir, err := openSnapshotDir(slow, "snapshots", 2)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	m := logOf(t, 5)
	s, saved := m.Snapshot(), make(chan error)
	go func() { saved <- dir.Save(s) }()
	<-slow.syncing
	for seq := range int32(1000) {
		if res, err := m.Check(78, 0, seq, 1); err != nil || res.Verdict != Append {
			t.Fatal(res, err)
		}
		if err := m.Commit(78, 0, seq, 1, m.EndOffset()); err != nil {
			t.Fatal(err)
		}
	}
	m.Expire(time.Unix(1000, 0))
	m.Snapshot()
	m.Truncate(900)
	close(slow.goOn)
	if err := <-saved; err != nil {
		t.Fatal(err)
	}
	if end := loaded(t, dir, m.EndOffset()); end != 5 {
		t.Errorf("loaded %d, want 5", end)
	}
}

// TestCase_EXPIRE_COST: a sweep of a hundred thousand producers starts no
// goroutine and makes no list of them, and a producer that writes meanwhile is
// served between its steps and stays. (KAFKA-16229: a sweep of quadratic cost
// under the partition's lock. BenchmarkStallExpire has the figures.)
func TestCase_EXPIRE_COST(t *testing.T) {
	const many = 100_000
	m := New(Config{Expiration: 100 * time.Millisecond})
	for pid := range int64(many) {
		if err := m.Commit(pid, 0, 0, 1, pid); err != nil {
			t.Fatal(err)
		}
	}
	m.Expire(time.UnixMilli(0))
	if err := m.Commit(2_000_000, 0, 0, 1, many); err != nil {
		t.Fatal(err)
	}

	stop, served := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for seq := int32(1); ; seq++ {
			select {
			case <-stop:
				served <- n
				return
			default:
			}
			if res, err := m.Check(2_000_000, 0, seq, 1); err != nil || res.Verdict != Append {
				t.Errorf("%+v, %v", res, err)
			}
			if err := m.Commit(2_000_000, 0, seq, 1, int64(many)+int64(seq)); err != nil {
				t.Error(err)
			}
			n++
		}
	}()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	goroutines := runtime.NumGoroutine()
	n := m.Expire(time.UnixMilli(100))
	if got := runtime.NumGoroutine(); got > goroutines {
		t.Errorf("%d goroutines, and %d before", got, goroutines)
	}
	runtime.ReadMemStats(&after)
	close(stop)
	if <-served == 0 {
		t.Error("no batch was served meanwhile")
	}
	if n != many || m.Len() != 1 {
		t.Errorf("%d were forgotten and %d are left, want %d and 1", n, m.Len(), many)
	}
	// What it allocates is buckets of the index, each joined from two.
	if got := after.TotalAlloc - before.TotalAlloc; got > 16*many {
		t.Errorf("it allocated %d bytes for %d producers", got, many)
	}
	audit(t, m)
}

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
