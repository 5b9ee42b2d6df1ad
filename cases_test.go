package idempotence

import "testing"

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
// offset that nobody knows any more. The producer's next batch is not harmed.
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
// before the earlier one failed. The caller is told that the log has a hole.
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
// are told so, and whoever follows in the log is not harmed.
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
