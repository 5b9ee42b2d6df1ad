package idempotence

import (
	"errors"
	"math"
	"testing"
	"time"
)

// This file tests the queue of what is in flight: its order, its offsets, what an abort
// takes along, and the failed first batches. The transcripts reserve and settle
// (transcript_test.go says how they read).

// TestReserve_1_Wrap: the sequence goes on from 2147483647 to 0 while both ends
// of the wrap are in flight.
func TestReserve_1_Wrap(t *testing.T) {
	play(t, `
		mode=accept
		reserve pid=31 epoch=0 seq=2147483646 n=1 -> OK #A
		reserve pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER expected=2147483647
		reserve pid=31 epoch=0 seq=2147483647 n=2 -> OK #B
		reserve pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER expected=1
		reserve pid=31 epoch=0 seq=1 n=1 -> OK #C
		commit #C base=3 -> OK
		commit #B base=1 -> OK
		in-flight pid=31 -> epoch=0 2147483646..2147483646 2147483647..0@1 1..1@3
		commit #A base=0 -> OK
		window pid=31 -> epoch=0 2147483646..2147483646@0 2147483647..0@1 1..1@3
	`)
}

// TestReserve_1_LargestCounts: batches of 2147483647 sequences, of which three in
// flight span more than the sequence space, so that one may come round to the
// sequences of another. An exact copy waits for its first, as by rule 5 before 6.
func TestReserve_1_LargestCounts(t *testing.T) {
	play(t, `
		reserve pid=31 epoch=0 seq=0 n=2147483647 -> OK #A
		reserve pid=31 epoch=0 seq=2147483647 n=2147483647 -> OK #B
		reserve pid=31 epoch=0 seq=2147483646 n=2 -> OK #C
		in-flight pid=31 -> epoch=0 0..2147483646 2147483647..2147483645 2147483646..2147483647
		reserve pid=31 epoch=0 seq=0 n=2147483647 -> IN_FLIGHT waits=0:0..2147483646
		reserve pid=31 epoch=0 seq=0 n=1 -> OK #D
		commit #D base=4294967295 -> REFUSED OFFSET_ORDER
		commit #D base=4294967296 -> OK
		commit #C base=4294967295 -> REFUSED OFFSET_ORDER
		commit #C base=4294967294 -> OK
		commit #A base=0 -> OK
		commit #B base=2147483647 -> OK
		window pid=31 -> epoch=0 0..2147483646@0 2147483647..2147483645@2147483647 2147483646..2147483647@4294967294 0..0@4294967296
		reserve pid=31 epoch=0 seq=0 n=2147483647 -> DUP base=0
	`)
}

// TestReserve_2_WholeWindowBehindWholeQueue: five committed batches are all still
// recognised while five more are in flight, and leave the window one by one as
// those are committed.
func TestReserve_2_WholeWindowBehindWholeQueue(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
		batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
		batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
		batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
		reserve pid=31 epoch=0 seq=5 n=1 -> OK #A
		reserve pid=31 epoch=0 seq=6 n=1 -> OK #B
		reserve pid=31 epoch=0 seq=7 n=1 -> OK #C
		reserve pid=31 epoch=0 seq=8 n=1 -> OK #D
		reserve pid=31 epoch=0 seq=9 n=1 -> OK #E
		reserve pid=31 epoch=0 seq=0 n=1 -> DUP base=0
		reserve pid=31 epoch=0 seq=4 n=1 -> DUP base=4
		commit #A base=5 -> OK
		reserve pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER expected=10
		reserve pid=31 epoch=0 seq=1 n=1 -> DUP base=1
		reserve pid=31 epoch=0 seq=5 n=1 -> DUP base=5
		reserve pid=31 epoch=0 seq=10 n=1 -> OK #F
		in-flight pid=31 -> epoch=0 6..6 7..7 8..8 9..9 10..10
	`)
}

// TestReserve_4_AbortEndsLater is rule 4: an aborted append takes every later one
// of its producer along, and what is left is as if none had been reserved.
func TestReserve_4_AbortEndsLater(t *testing.T) {
	t.Run("of a known producer", func(t *testing.T) {
		play(t, `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=3 n=1 -> OK #C
			reserve pid=32 epoch=0 seq=0 n=1 -> OK #D
			append-failed #B -> OK
			in-flight pid=31 -> epoch=0 1..1
			commit #C base=3 -> REFUSED ABANDONED
			append-failed #C -> ABANDONED
			reserve pid=31 epoch=0 seq=3 n=1 -> OUT_OF_ORDER expected=2
			reserve pid=31 epoch=0 seq=2 n=2 -> OK #E
			commit #A base=1 -> OK
			commit #D base=2 -> OK
			commit #E base=3 -> OK
			window pid=31 -> epoch=0 0..0@0 1..1@1 2..3@3
		`)
	})
	t.Run("of a producer that is unknown then", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			append-failed #A -> OK
			producers -> 0
			highest-pid -> -1
			end -> 0
			commit #B base=0 -> REFUSED ABANDONED
			producers -> 0
			reserve pid=31 epoch=0 seq=1 n=1 -> UNKNOWN_PRODUCER expected=0 current=-1
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #C
			commit #C base=0 -> OK
		`)
	})
	t.Run("the queue is free for the next", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			append-failed #A -> OK
			reserve pid=32 epoch=0 seq=0 n=1 -> OK #B
			append-failed #A -> SETTLED
			commit #A base=0 -> REFUSED SETTLED
			in-flight pid=32 -> epoch=0 0..0
			commit #B base=0 -> OK
			append-failed #A -> SETTLED
		`)
	})
}

// TestReserve_4_FailedFirst: the first batch of a producer fails after the second
// was reserved. The second must not slip in as a first one, whatever the policy:
// the first would be lost unnoticed.
func TestReserve_4_FailedFirst(t *testing.T) {
	t.Run("AcceptAny", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=0 n=5 -> OK #A
			reserve pid=31 epoch=0 seq=5 n=1 -> OK #B
			append-failed #A -> OK
			commit #B base=0 -> REFUSED ABANDONED
			reserve pid=31 epoch=0 seq=5 n=1 -> OUT_OF_ORDER expected=0 current=-1
			batch pid=31 epoch=0 seq=5 n=1 -> OUT_OF_ORDER expected=0 current=-1
			commit pid=31 epoch=0 seq=5 n=1 base=0 -> REFUSED OUT_OF_ORDER expected=0
			reserve pid=31 epoch=0 seq=0 n=5 -> OK #C
			reserve pid=31 epoch=0 seq=5 n=1 -> OK #D
			commit #C base=0 -> OK
			commit #D base=5 -> OK
			window pid=31 -> epoch=0 0..4@0 5..5@5
		`)
	})
	t.Run("AcceptAny, from any sequence", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=2147483647 n=1 -> OK #A
			append-failed #A -> OK
			reserve pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER expected=2147483647 current=-1
			reserve pid=31 epoch=0 seq=2147483647 n=3 -> OK #B
			append-failed #B -> OK
			reserve pid=31 epoch=0 seq=2 n=1 -> OUT_OF_ORDER expected=2147483647 current=-1
		`)
	})
	t.Run("AcceptAny, split on its retry", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=7 n=4 -> OK #A
			append-failed #A -> OK
			reserve pid=31 epoch=0 seq=9 n=2 -> OUT_OF_ORDER expected=7
			batch pid=31 epoch=0 seq=7 n=2 -> OK base=0
			batch pid=31 epoch=0 seq=9 n=2 -> OK base=2
		`)
	})
	t.Run("AcceptAny, given up for a newer epoch", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=7 n=4 -> OK #A
			append-failed #A -> OK
			batch pid=31 epoch=1 seq=0 n=2 -> OK base=0
			batch pid=31 epoch=0 seq=7 n=4 -> STALE_EPOCH
			batch pid=31 epoch=1 seq=2 n=1 -> OK base=2
		`)
	})
	t.Run("AcceptAny, abandoned", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=0 n=5 -> OK #A
			abandon
			reserve pid=31 epoch=0 seq=5 n=1 -> OUT_OF_ORDER expected=0
			replay pid=31 epoch=0 seq=0 n=5 base=0
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
		`)
	})
	t.Run("AcceptAny, a log that was created again has no failed first batch", func(t *testing.T) {
		play(t, `
			mode=accept
			reserve pid=31 epoch=0 seq=0 n=5 -> OK #A
			append-failed #A -> OK
			reset
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=0
		`)
	})
	t.Run("StartAtZero refuses it as it always does", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=5 -> OK #A
			reserve pid=31 epoch=0 seq=5 n=1 -> OK #B
			append-failed #A -> OK
			reserve pid=31 epoch=0 seq=5 n=1 -> UNKNOWN_PRODUCER expected=0
			batch pid=31 epoch=0 seq=0 n=5 -> OK base=0
		`)
	})
	t.Run("StartAtZeroOnNewLog, on a log that has held records", func(t *testing.T) {
		play(t, `
			mode=new-log-strict
			batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=0 seq=3 n=5 -> OK #A
			reserve pid=31 epoch=0 seq=8 n=1 -> OK #B
			append-failed #A -> OK
			reserve pid=31 epoch=0 seq=8 n=1 -> OUT_OF_ORDER expected=3
			batch pid=31 epoch=0 seq=3 n=5 -> OK base=1
		`)
	})
}

// TestReserve_4_HowLongRemembered: failed first batches are remembered until
// Config.Expiration has passed since there were none, and of 4,096 producers at
// most.
func TestReserve_4_HowLongRemembered(t *testing.T) {
	t.Run("time", func(t *testing.T) {
		play(t, `
			mode=accept
			ttl=100
			expire now=1000 -> 0
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			append-failed #A -> OK
			expire now=1099 -> 0
			reserve pid=31 epoch=0 seq=1 n=1 -> OUT_OF_ORDER expected=0
			reserve pid=32 epoch=0 seq=0 n=1 -> OK #B
			append-failed #B -> OK
			reserve pid=32 epoch=0 seq=1 n=1 -> OUT_OF_ORDER expected=0
			expire now=1100 -> 0
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #C
			reserve pid=32 epoch=0 seq=1 n=1 -> OK #D
		`)
	})
	t.Run("time, after all came again", func(t *testing.T) {
		play(t, `
			mode=accept
			ttl=100
			expire now=1000 -> 0
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			append-failed #A -> OK
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=1050 -> 0
			reserve pid=32 epoch=0 seq=0 n=1 -> OK #B
			append-failed #B -> OK
			expire now=1149 -> 0
			reserve pid=32 epoch=0 seq=1 n=1 -> OUT_OF_ORDER expected=0
			expire now=1150 -> 1
			reserve pid=32 epoch=0 seq=1 n=1 -> OK #C
		`)
	})
	t.Run("time, with a clock that was wrong", func(t *testing.T) {
		play(t, `
			mode=accept
			ttl=100
			expire now=9000000 -> 0
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			append-failed #A -> OK
			expire now=1000 -> 0
			expire now=1099 -> 0
			reserve pid=31 epoch=0 seq=1 n=1 -> OUT_OF_ORDER expected=0
			expire now=1100 -> 0
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
		`)
	})
	t.Run("never", func(t *testing.T) {
		play(t, `
			mode=accept
			ttl=-1
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			append-failed #A -> OK
			expire now=1000 -> 0
			expire now=9000000000000 -> 0
			reserve pid=31 epoch=0 seq=1 n=1 -> OUT_OF_ORDER expected=0
		`)
	})
	t.Run("many, whatever the cap", func(t *testing.T) {
		m := New(Config{UnknownProducer: AcceptAny, MaxProducers: 2})
		fail := func(pid int64) {
			t.Helper()
			r, _, err := m.Reserve(Batch{ProducerID: pid, Count: 1})
			settled(t, err, r.Abort())
		}
		requireFailedFirst := func(pid int64, want bool) {
			t.Helper()
			if _, err := m.Check(pid, 0, 1, 1); errors.Is(err, ErrOutOfOrderSequence) != want {
				t.Errorf("the second batch of producer %d gets %v, want it refused: %t", pid, err, want)
			}
		}
		for pid := range int64(failedFirstLimit) {
			fail(pid)
		}
		audit(t, m)
		requireFailedFirst(0, true)
		requireFailedFirst(failedFirstLimit-1, true)
		fail(failedFirstLimit)
		audit(t, m)
		requireFailedFirst(0, false)
		requireFailedFirst(failedFirstLimit-1, false)
		requireFailedFirst(failedFirstLimit, true)
	})
}

// TestReserve_4_FailedFirstAcrossFarTime: without any call of Expire a manager never
// forgets a failed first batch.
func TestReserve_4_FailedFirstAcrossFarTime(t *testing.T) {
	m := New(Config{UnknownProducer: AcceptAny})
	settled(t, reserved(t, m, 0, 1).Abort())
	m.Expire(time.Unix(math.MaxInt32, 0))
	if _, err := m.Check(31, 0, 1, 1); !errors.Is(err, ErrOutOfOrderSequence) {
		t.Errorf("after the first Expire: %v", err)
	}
	m.Expire(time.Unix(math.MaxInt32, 0).Add(2 * DefaultExpiration))
	if res, err := m.Check(31, 0, 1, 1); err != nil {
		t.Errorf("two days later: %+v, %v", res, err)
	}
}

// TestReserve_5_AnyOrder is rule 5: commits come in any order, offsets in that of
// the reservations, and a batch is visible once it and all before it are.
func TestReserve_5_AnyOrder(t *testing.T) {
	t.Run("reversed", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=2 -> OK #A
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=3 n=3 -> OK #C
			commit #C base=9 -> OK
			end -> 12
			window pid=31 -> none
			reserve pid=31 epoch=0 seq=3 n=3 -> IN_FLIGHT waits=0:3..5
			commit #B base=5 -> OK
			reserve pid=31 epoch=0 seq=2 n=1 -> IN_FLIGHT waits=0:2..2
			in-flight pid=31 -> epoch=0 0..1 2..2@5 3..5@9
			stats -> accepted=0 duplicate=0 out-of-order=0 unknown=0 fenced=0 invalid=0
			commit #A base=0 -> OK
			in-flight pid=31 -> none
			window pid=31 -> epoch=0 0..1@0 2..2@5 3..5@9
			end -> 12
			reserve pid=31 epoch=0 seq=3 n=3 -> DUP base=9
			stats -> accepted=3 duplicate=2 out-of-order=0 unknown=0 fenced=0 invalid=0
		`)
	})
	t.Run("from the middle", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #C
			reserve pid=31 epoch=0 seq=3 n=1 -> OK #D
			commit #B base=1 -> OK
			commit #A base=0 -> OK
			window pid=31 -> epoch=0 0..0@0 1..1@1
			in-flight pid=31 -> epoch=0 2..2 3..3
			commit #D base=3 -> OK
			commit #C base=2 -> OK
			window pid=31 -> epoch=0 0..0@0 1..1@1 2..2@2 3..3@3
		`)
	})
}

// TestReserve_5_Offsets: an offset that leaves no room for what was reserved
// before the batch, or after it, is refused, and the reservation stays open. It
// makes no difference whether what is before it has become visible meanwhile.
func TestReserve_5_Offsets(t *testing.T) {
	t.Run("no room for what is before", func(t *testing.T) {
		play(t, `
			commit pid=31 epoch=0 seq=0 n=3 base=4 -> OK
			reserve pid=31 epoch=0 seq=3 n=2 -> OK #A
			reserve pid=31 epoch=0 seq=5 n=2 -> OK #B
			reserve pid=31 epoch=0 seq=7 n=2 -> OK #C
			commit #C base=10 -> REFUSED OFFSET_ORDER base=10 lowest=11 current=0
			in-flight pid=31 -> epoch=0 3..4 5..6 7..8
			commit #C base=11 -> OK
			commit #B base=8 -> REFUSED OFFSET_ORDER base=8 lowest=9
			commit #B base=9 -> OK
			commit #A base=6 -> REFUSED OFFSET_ORDER base=6 lowest=7
			commit #A base=7 -> OK
			window pid=31 -> epoch=0 0..2@4 3..4@7 5..6@9 7..8@11
		`)
	})
	t.Run("no room for what is behind", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=2 -> OK #A
			reserve pid=31 epoch=0 seq=2 n=3 -> OK #B
			reserve pid=31 epoch=0 seq=5 n=1 -> OK #C
			commit #C base=20 -> OK
			commit #A base=16 -> REFUSED OFFSET_ORDER base=16 lowest=0
			commit #B base=18 -> REFUSED OFFSET_ORDER base=18 lowest=2
			commit #A base=15 -> OK
			commit #B base=16 -> REFUSED OFFSET_ORDER base=16 lowest=17
			commit #B base=17 -> OK
			window pid=31 -> epoch=0 0..1@15 2..4@17 5..5@20
		`)
	})
	t.Run("visible or not, what is before takes its room", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=5 -> OK #A
			reserve pid=31 epoch=0 seq=5 n=1 -> OK #B
			commit #A base=0 -> OK
			commit #B base=4 -> REFUSED OFFSET_ORDER base=4 lowest=5
			commit #B base=5 -> OK
		`)
	})
	t.Run("no offset at all", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=2 -> OK #A
			commit #A base=-1 -> REFUSED OFFSET_ORDER base=-1
			commit #A base=-9223372036854775808 -> REFUSED OFFSET_ORDER
			commit #A base=9223372036854775806 -> REFUSED OFFSET_ORDER
			commit #A base=9223372036854775805 -> OK
		`)
	})
	t.Run("no offset left for what is before", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #C
			commit #A base=9223372036854775806 -> OK
			commit #C base=5 -> REFUSED OFFSET_ORDER base=5
			commit #C base=9223372036854775806 -> REFUSED OFFSET_ORDER
		`)
	})
	t.Run("no offset left for what is behind", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #C
			commit #C base=100 -> OK
			commit #A base=9223372036854775806 -> REFUSED OFFSET_ORDER
			commit #A base=98 -> OK
		`)
	})
}

// TestReserve_5_Gap: the abort of an append in front of one that is already in
// the log says so, with the offset from which on the log must be cut off, and
// what was committed behind it is not remembered.
func TestReserve_5_Gap(t *testing.T) {
	t.Run("cut off", func(t *testing.T) {
		play(t, `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=40 epoch=0 seq=0 n=1 -> OK base=1
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=3 n=1 -> OK #C
			commit #C base=5 -> OK
			commit #B base=4 -> OK
			append-failed #A -> GAP expected=-1 current=-1 base=-1 next=4
			append-failed #A -> SETTLED
			commit #B base=4 -> REFUSED SETTLED
			window pid=31 -> epoch=0 0..0@0
			in-flight pid=31 -> none
			end -> 6
			snapshot-end -> 4
			truncate to=4 -> exact
			snapshot-end -> 4
			batch pid=31 epoch=0 seq=2 n=1 -> OUT_OF_ORDER expected=1
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=4
		`)
	})
	t.Run("with an unknown one between", func(t *testing.T) {
		play(t, `
			batch pid=40 epoch=0 seq=0 n=3 -> OK base=0
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #C
			commit #C base=9 -> OK
			append-failed #A -> GAP next=9
			commit #B base=8 -> REFUSED ABANDONED
			snapshot-end -> 3
			truncate to=9 -> inexact
		`)
	})
	t.Run("found again by a replay", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			commit #B base=1 -> OK
			append-failed #A -> GAP next=1
			snapshot-end -> 1
			replay pid=31 epoch=0 seq=1 n=1 base=1
			snapshot-end -> 2
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
		`)
	})
}

// TestF7_FailedFirstAppendsAreBounded: producers whose first batch fails, without
// an end, and an idle limit of never. What is kept of them is bounded, and can be seen;
// so can a reservation of a producer that is not remembered yet.
func TestF7_FailedFirstAppendsAreBounded(t *testing.T) {
	for _, cfg := range []Config{{Expiration: -1}, {Expiration: -1, UnknownProducer: AcceptAny}, {MaxProducers: 5}} {
		m := New(cfg)
		before, most := heapNow(), 0
		for pid := range int64(100_000) {
			r, _, err := m.Reserve(Batch{ProducerID: pid, Count: 1})
			if pid%1000 == 0 && m.Stats().OpenReservations != 1 {
				t.Fatalf("%d reservations are open, want 1", m.Stats().OpenReservations)
			}
			settled(t, err, r.Abort())
			most = max(most, m.Stats().FailedFirstAppends)
		}
		if grown := int64(heapNow()) - int64(before); grown > 1<<20 {
			t.Errorf("%+v: %d bytes are held", cfg, grown)
		}
		if s := m.Stats(); most != failedFirstLimit || s.FailedFirstAppends == 0 || s.OpenReservations != 0 || m.Len() != 0 {
			t.Errorf("%+v: at most %d failed first batches, and %+v", cfg, most, s)
		}
		audit(t, m)
	}
	m := New(Config{})
	for range 3 {
		if _, _, err := m.Reserve(Batch{ProducerID: NoProducerID, Count: 1}); err != nil {
			t.Fatal(err)
		}
	}
	reserved(t, m, 0, 1)
	if s := m.Stats(); s.OpenReservations != 4 || s.InFlight != 0 {
		t.Errorf("4 reservations are open, and it says %+v", s)
	}
	m.AbandonReservations()
	if s := m.Stats(); s.OpenReservations != 0 || s.FailedFirstAppends != 1 {
		t.Errorf("all were abandoned, one of them a first batch, and it says %+v", s)
	}
}

// TestReserve_4_FailedFirstOnNewLog: a first batch that failed must come again. Once the
// log was cut to nothing, the policy requires 0 instead, so that one of the two sequences
// is accepted.
func TestReserve_4_FailedFirstOnNewLog(t *testing.T) {
	m := New(Config{UnknownProducer: StartAtZeroOnNewLog})
	m.Advance(100)
	r, _, err := m.Reserve(Batch{ProducerID: 1, BaseSequence: 7, Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Abort(); err != nil {
		t.Fatal(err)
	}
	if !m.Truncate(0) {
		t.Fatal("Truncate to 0 is not exact")
	}
	var facts *BatchError
	if _, err := m.Check(1, 0, 7, 1); !errors.As(err, &facts) || facts.Expected != 0 {
		t.Errorf("sequence 7 on a new log: %v, want it refused and 0 expected", err)
	}
	if res, err := m.Check(1, 0, 0, 1); err != nil || res.Verdict != Append {
		t.Errorf("sequence 0 on a new log: %v, %v, want Append", res.Verdict, err)
	}
}
