package idempotence

import (
	"context"
	"errors"
	"testing"
)

// This file is pipelined appends, rule by rule, as transcripts (transcript_test.go
// says how to read one). Every `reserve` line also asks Check, which must give
// the same answer (rule 7), and every refusal is held against the state before
// it, reservations included.

// TestReserve_1_JudgedAgainstReserved is rule 1: a batch is judged against what
// is committed and everything reserved before it, in the order of reservation.
func TestReserve_1_JudgedAgainstReserved(t *testing.T) {
	t.Run("successors of what is in flight are in order", func(t *testing.T) {
		play(t, `
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
			reserve pid=31 epoch=0 seq=2 n=3 -> OK #A
			reserve pid=31 epoch=0 seq=5 n=1 -> OK #B
			in-flight pid=31 -> epoch=0 2..4 5..5
			reserve pid=31 epoch=0 seq=7 n=1 -> OUT_OF_ORDER expected=6 current=0
			reserve pid=31 epoch=0 seq=2 n=1 -> OUT_OF_ORDER expected=6 current=0
			reserve pid=31 epoch=0 seq=2 n=4 -> OUT_OF_ORDER expected=6 current=0
			commit #A base=2 -> OK
			commit #B base=5 -> OK
			window pid=31 -> epoch=0 0..1@0 2..4@2 5..5@5
		`)
	})
	t.Run("the first batch of an unknown producer too", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=3 seq=5 n=1 -> UNKNOWN_PRODUCER expected=0 current=-1
			reserve pid=31 epoch=3 seq=0 n=2 -> OK #A
			producers -> 0
			reserve pid=31 epoch=3 seq=2 n=2 -> OK #B
			reserve pid=31 epoch=3 seq=9 n=2 -> OUT_OF_ORDER expected=4 current=3
			producers -> 0
			highest-pid -> -1
			commit #A base=0 -> OK
			commit #B base=2 -> OK
			producers -> 1
			highest-pid -> 31
			window pid=31 -> epoch=3 0..1@0 2..3@2
		`)
	})
	t.Run("a newer epoch that is in flight fences the older one", func(t *testing.T) {
		play(t, `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=2 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=2 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=1 n=1 -> STALE_EPOCH current=2
			reserve pid=31 epoch=0 seq=0 n=1 -> STALE_EPOCH current=2
			reserve pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH current=2
			window pid=31 -> epoch=0 0..0@0
			commit #A base=1 -> OK
			window pid=31 -> epoch=2 0..0@1
			commit #B base=2 -> OK
			window pid=31 -> epoch=2 0..0@1 1..1@2
		`)
	})
	t.Run("a newer epoch that fails leaves the older one current", func(t *testing.T) {
		play(t, `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=31 epoch=1 seq=0 n=1 -> OK #A
			append-failed #A -> OK
			window pid=31 -> epoch=0 0..0@0
			reserve pid=31 epoch=0 seq=0 n=1 -> DUP base=0
			reserve pid=31 epoch=1 seq=1 n=1 -> OUT_OF_ORDER expected=0 current=0
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			commit #B base=1 -> OK
		`)
	})
	t.Run("malformed batches", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=0 -> INVALID
			reserve pid=31 epoch=0 seq=-1 n=1 -> INVALID
			reserve pid=31 epoch=-1 seq=1 n=1 -> INVALID
			reserve pid=-2 epoch=0 seq=0 n=1 -> INVALID
			commit #A base=0 -> OK
		`)
	})
	t.Run("the policy counts what is committed, not what is reserved", func(t *testing.T) {
		play(t, `
			mode=new-log-strict
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=32 epoch=0 seq=7 n=1 -> OUT_OF_ORDER
			commit #A base=0 -> OK
			reserve pid=32 epoch=0 seq=7 n=1 -> OK #B
			commit #B base=1 -> OK
		`)
	})
}

// TestReserve_2_HandleOnlyForAppend is rule 2: Append comes with a reservation;
// a duplicate of a committed batch comes with its offset and without one, also
// while later ones are in flight. (The player holds every answer against it.)
func TestReserve_2_HandleOnlyForAppend(t *testing.T) {
	play(t, `
		reserve pid=31 epoch=0 seq=0 n=3 -> OK #A
		commit #A base=7 -> OK
		reserve pid=31 epoch=0 seq=0 n=3 -> DUP base=7
		reserve pid=31 epoch=0 seq=3 n=1 -> OK #B
		reserve pid=31 epoch=0 seq=0 n=3 -> DUP base=7
		commit #B base=10 -> OK
		reserve pid=31 epoch=0 seq=0 n=3 -> DUP base=7
	`)
}

// TestReserve_3_InFlight is rule 3: what cannot be judged until something in
// flight settles is neither acknowledged nor stored, and the answer names what
// it waits for.
func TestReserve_3_InFlight(t *testing.T) {
	t.Run("an exact copy waits for its first", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=3 -> OK #A
			reserve pid=31 epoch=0 seq=3 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=0 n=3 -> IN_FLIGHT waits=0:0..2
			reserve pid=31 epoch=0 seq=3 n=1 -> IN_FLIGHT waits=0:3..3
			reserve pid=31 epoch=0 seq=0 n=2 -> OUT_OF_ORDER expected=4
			stats -> accepted=0 duplicate=0 out-of-order=2 unknown=0 fenced=0 invalid=0
			commit #A base=0 -> OK
			reserve pid=31 epoch=0 seq=0 n=3 -> DUP base=0
			reserve pid=31 epoch=0 seq=3 n=1 -> IN_FLIGHT waits=0:3..3
			append-failed #B -> OK
			reserve pid=31 epoch=0 seq=3 n=1 -> OK #C
			commit #C base=3 -> OK
		`)
	})
	t.Run("a newer epoch waits for all of the older one", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=4 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=4 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=5 seq=0 n=1 -> IN_FLIGHT waits=4:1..1
			reserve pid=31 epoch=5 seq=1 n=1 -> OUT_OF_ORDER expected=0 current=4
			reserve pid=31 epoch=5 seq=0 n=1 -> IN_FLIGHT waits=4:1..1
			commit #A base=0 -> OK
			reserve pid=31 epoch=5 seq=0 n=1 -> IN_FLIGHT waits=4:1..1
			commit #B base=1 -> OK
			reserve pid=31 epoch=5 seq=0 n=1 -> OK #C
			commit #C base=2 -> OK
			window pid=31 -> epoch=5 0..0@2
		`)
	})
	t.Run("a sixth batch waits for the oldest", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #C
			reserve pid=31 epoch=0 seq=3 n=1 -> OK #D
			reserve pid=31 epoch=0 seq=4 n=1 -> OK #E
			reserve pid=31 epoch=0 seq=5 n=1 -> IN_FLIGHT waits=0:0..0
			reserve pid=31 epoch=0 seq=6 n=1 -> OUT_OF_ORDER expected=5
			commit #E base=4 -> OK
			commit #B base=1 -> OK
			reserve pid=31 epoch=0 seq=5 n=1 -> IN_FLIGHT waits=0:0..0
			commit #A base=0 -> OK
			in-flight pid=31 -> epoch=0 2..2 3..3 4..4@4
			reserve pid=31 epoch=0 seq=5 n=1 -> OK #F
			reserve pid=31 epoch=0 seq=6 n=1 -> OK #G
			reserve pid=31 epoch=0 seq=7 n=1 -> IN_FLIGHT waits=0:2..2
			reserve pid=31 epoch=0 seq=5 n=1 -> IN_FLIGHT waits=0:5..5
			append-failed #C -> GAP next=4
		`)
	})
	t.Run("producers do not wait for each other", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=32 epoch=0 seq=0 n=1 -> OK #B
			reserve pid=33 epoch=0 seq=0 n=1 -> OK #C
			commit #C base=2 -> OK
			commit #B base=1 -> OK
			reserve pid=32 epoch=0 seq=0 n=1 -> DUP base=1
			append-failed #A -> OK
			reserve pid=33 epoch=0 seq=0 n=1 -> DUP base=2
		`)
	})
}

// TestReserve_3_DoneChannel: Done is closed when what is waited for has become
// visible, and not when it was only committed; when it was aborted; and when it
// was abandoned.
func TestReserve_3_DoneChannel(t *testing.T) {
	for _, end := range []struct {
		name string
		of   func(m *ProducerStateManager, a, b *Reservation)
	}{
		{"visible", func(_ *ProducerStateManager, a, b *Reservation) { settled(t, b.Commit(1), a.Commit(0)) }},
		{"aborted", func(_ *ProducerStateManager, _, b *Reservation) { settled(t, b.Abort()) }},
		{"an earlier one aborted", func(_ *ProducerStateManager, a, _ *Reservation) { settled(t, a.Abort()) }},
		{"abandoned", func(m *ProducerStateManager, _, _ *Reservation) { m.AbandonReservations() }},
		{"reset", func(m *ProducerStateManager, _, _ *Reservation) { m.Reset() }},
		{"truncated", func(m *ProducerStateManager, _, _ *Reservation) { m.Truncate(0) }},
		{"replayed", func(m *ProducerStateManager, _, _ *Reservation) {
			settled(t, m.Replay(Batch{ProducerID: 31, Count: 1}, 0))
		}},
		{"marker replayed", func(m *ProducerStateManager, _, _ *Reservation) {
			settled(t, m.ReplayMarker(Marker{ProducerID: 31, Epoch: 1}, 0))
		}},
	} {
		t.Run(end.name, func(t *testing.T) {
			m := New(Config{})
			a, b := reserved(t, m, 0, 1), reserved(t, m, 1, 1)
			first := waitFor(t, m, Batch{ProducerID: 31, BaseSequence: 1, Count: 1})
			second := waitFor(t, m, Batch{ProducerID: 31, Epoch: 1, Count: 1})
			if isClosed(first) || isClosed(second) {
				t.Fatal("closed while in flight")
			}
			end.of(m, a, b)
			if !isClosed(first) || !isClosed(second) {
				t.Fatalf("still open: of the copy %t, of the newer epoch %t", !isClosed(first), !isClosed(second))
			}
			audit(t, m)
		})
	}
	t.Run("committed behind one that is not", func(t *testing.T) {
		m := New(Config{})
		a, b := reserved(t, m, 0, 1), reserved(t, m, 1, 1)
		done := waitFor(t, m, Batch{ProducerID: 31, BaseSequence: 1, Count: 1})
		settled(t, b.Commit(1))
		if isClosed(done) {
			t.Fatal("closed, and the batch is not visible")
		}
		settled(t, a.Commit(0))
		if !isClosed(done) {
			t.Fatal("open, and the batch is visible")
		}
	})
}

// reserved reserves a batch of producer 31.
func reserved(t *testing.T, m *ProducerStateManager, seq, n int32) *Reservation {
	t.Helper()
	r, _, err := m.Reserve(Batch{ProducerID: 31, BaseSequence: seq, Count: n})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// waitFor returns what a batch that is in flight must wait for.
func waitFor(t *testing.T, m *ProducerStateManager, b Batch) <-chan struct{} {
	t.Helper()
	_, err := m.CheckBatch(b)
	var waits *InFlightError
	if !errors.As(err, &waits) {
		t.Fatalf("Check of %+v: %v, want an InFlightError", b, err)
	}
	return waits.Done()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func settled(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestReserve_6_Late is rule 6: a call too many or too late does no harm and
// returns an error. (That nothing changes is the player's to see.)
func TestReserve_6_Late(t *testing.T) {
	t.Run("settled by its own handle", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #C
			commit #B base=1 -> OK
			commit #B base=1 -> REFUSED SETTLED
			append-failed #B -> SETTLED
			commit #A base=0 -> OK
			commit #A base=0 -> REFUSED SETTLED
			append-failed #A -> SETTLED
			append-failed #C -> OK
			append-failed #C -> SETTLED
			commit #C base=2 -> REFUSED SETTLED
		`)
	})
	for name, end := range map[string]string{
		"abandon":       "abandon",
		"reset":         "reset",
		"truncate":      "truncate to=0 -> exact",
		"replay":        "replay pid=31 epoch=0 seq=0 n=1 base=0",
		"replay-marker": "replay-marker pid=31 epoch=0 coord=1 abort base=0",
	} {
		t.Run(name, func(t *testing.T) {
			play(t, `
				reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
				reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
				`+end+`
				in-flight pid=31 -> none
				commit #B base=1 -> REFUSED ABANDONED
				append-failed #B -> ABANDONED
				commit #A base=0 -> REFUSED ABANDONED
				append-failed #A -> ABANDONED
				commit #A base=0 -> REFUSED ABANDONED
			`)
		})
	}
	t.Run("when the place has been taken", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			abandon
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #B
			commit #A base=0 -> REFUSED ABANDONED
			append-failed #A -> ABANDONED
			in-flight pid=31 -> epoch=0 0..0
			commit #B base=0 -> OK
			append-failed #A -> ABANDONED
		`)
	})
}

// TestReserve_7_CheckSees is rule 7: Check and Commit see what is in flight. A
// plain Commit of a producer with reservations is refused, whatever Check says:
// two ways of appending at once have no order.
func TestReserve_7_CheckSees(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		reserve pid=31 epoch=0 seq=1 n=2 -> OK #A
		check pid=31 epoch=0 seq=1 n=2 -> IN_FLIGHT waits=0:1..2
		check pid=31 epoch=0 seq=0 n=1 -> DUP base=0
		check pid=31 epoch=0 seq=3 n=1 -> OK #B
		check pid=31 epoch=0 seq=4 n=1 -> OUT_OF_ORDER expected=3
		check pid=31 epoch=1 seq=0 n=1 -> IN_FLIGHT waits=0:1..2
		batch pid=31 epoch=0 seq=3 n=1 -> IN_FLIGHT waits=0:1..2
		commit #B base=3 -> REFUSED IN_FLIGHT waits=0:1..2
		commit pid=31 epoch=0 seq=1 n=2 base=1 -> REFUSED IN_FLIGHT waits=0:1..2
		commit pid=31 epoch=0 seq=0 n=1 base=1 -> REFUSED DUPLICATE_SEQUENCE first=0
		commit pid=31 epoch=1 seq=0 n=1 base=1 -> REFUSED IN_FLIGHT
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
		commit #A base=2 -> OK
		batch pid=31 epoch=0 seq=3 n=1 -> OK base=4
	`)
	t.Run("of an unknown producer", func(t *testing.T) {
		play(t, `
			reserve pid=31 epoch=0 seq=0 n=2 -> OK #A
			batch pid=31 epoch=0 seq=2 n=1 -> IN_FLIGHT waits=0:0..1
			commit pid=31 epoch=0 seq=0 n=2 base=0 -> REFUSED IN_FLIGHT
			producers -> 0
			append-failed #A -> OK
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
		`)
	})
}

// TestReserve_8_Protected is rule 8: a producer with something in flight is
// neither expired nor evicted. Its turn comes when its last append has settled.
func TestReserve_8_Protected(t *testing.T) {
	t.Run("expired only afterwards", func(t *testing.T) {
		play(t, `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 t=0 -> OK base=0
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
			expire now=1000 -> 0
			reserve pid=31 epoch=0 seq=0 n=1 -> DUP base=0
			append-failed #A -> OK
			activity pid=31 -> since the last Expire
			expire now=1000 -> 0
			expire now=1099 -> 0
			expire now=1100 -> 1
			producers -> 0
		`)
	})
	t.Run("a commit is activity, also of a pinned producer", func(t *testing.T) {
		play(t, `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 t=0 -> OK base=0
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
			expire now=1000 -> 0
			commit #A base=1 -> OK
			expire now=1050 -> 0
			activity pid=31 -> 1050
			expire now=1149 -> 0
			expire now=1150 -> 1
		`)
	})
	t.Run("one still in flight protects all", func(t *testing.T) {
		play(t, `
			ttl=100
			reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
			reserve pid=31 epoch=0 seq=1 n=1 -> OK #B
			reserve pid=31 epoch=0 seq=2 n=1 -> OK #C
			commit #A base=0 -> OK
			expire now=0 -> 0
			expire now=1000 -> 0
			append-failed #C -> OK
			expire now=2000 -> 0
			append-failed #B -> OK
			expire now=2000 -> 0
			expire now=2099 -> 0
			expire now=2100 -> 1
		`)
	})
	t.Run("active again when it is released", func(t *testing.T) {
		play(t, `
			ttl=100
			batch pid=1 epoch=0 seq=0 n=1 t=0 -> OK base=0
			batch pid=2 epoch=0 seq=0 n=1 t=10 -> OK base=1
			batch pid=3 epoch=0 seq=0 n=1 t=20 -> OK base=2
			reserve pid=1 epoch=0 seq=1 n=1 -> OK #A
			reserve pid=2 epoch=0 seq=1 n=1 -> OK #B
			expire now=115 -> 0
			append-failed #B -> OK
			append-failed #A -> OK
			expire now=115 -> 0
			activity pid=1 -> 115
			activity pid=2 -> 115
			window pid=3 -> epoch=0 0..0@2
			expire now=120 -> 1
			expire now=214 -> 0
			expire now=215 -> 2
		`)
	})
	t.Run("evicted only afterwards, in the order of release", func(t *testing.T) {
		play(t, `
			cap=3
			batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=2 epoch=0 seq=0 n=1 -> OK base=1
			batch pid=3 epoch=0 seq=0 n=1 -> OK base=2
			reserve pid=1 epoch=0 seq=1 n=1 -> OK #A
			reserve pid=2 epoch=0 seq=1 n=1 -> OK #B
			batch pid=4 epoch=0 seq=0 n=1 -> OK base=3
			window pid=3 -> none
			append-failed #B -> OK
			append-failed #A -> OK
			batch pid=5 epoch=0 seq=0 n=1 -> OK base=4
			window pid=4 -> none
			window pid=2 -> epoch=0 0..0@1
			batch pid=6 epoch=0 seq=0 n=1 -> OK base=5
			window pid=2 -> none
			window pid=1 -> epoch=0 0..0@0
			batch pid=7 epoch=0 seq=0 n=1 -> OK base=6
			window pid=1 -> none
		`)
	})
	t.Run("where all are in flight, the cap is exceeded", func(t *testing.T) {
		play(t, `
			cap=1
			batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=1 epoch=0 seq=1 n=1 -> OK #A
			reserve pid=2 epoch=0 seq=0 n=1 -> OK #B
			reserve pid=3 epoch=0 seq=0 n=1 -> OK #C
			commit #B base=1 -> OK
			producers -> 2
			commit #C base=2 -> OK
			producers -> 2
			window pid=2 -> none
			commit #A base=3 -> OK
			batch pid=4 epoch=0 seq=0 n=1 -> OK base=4
			producers -> 1
		`)
	})
	t.Run("newcomers are not counted until they are remembered", func(t *testing.T) {
		play(t, `
			cap=1
			batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
			reserve pid=2 epoch=0 seq=0 n=1 -> OK #A
			producers -> 1
			window pid=1 -> epoch=0 0..0@0
			commit #A base=1 -> OK
			producers -> 1
			window pid=1 -> none
		`)
	})
}

// TestReserve_NoProducerID: a batch without a producer id has a reservation too,
// and holds up no other batch.
func TestReserve_NoProducerID(t *testing.T) {
	play(t, `
		reserve pid=-1 epoch=-1 seq=-1 n=3 -> OK #A
		reserve pid=-1 epoch=-1 seq=-1 n=3 -> OK #B
		reserve pid=-1 epoch=0 seq=0 n=0 -> OK #C
		batch pid=-1 epoch=-1 seq=-1 n=1 -> OK base=0
		commit #B base=9 -> OK
		end -> 12
		append-failed #A -> OK
		reserve pid=-1 epoch=-1 seq=-1 n=3 -> OK #D
		commit #D base=-1 -> REFUSED OFFSET_ORDER base=-1
		commit #D base=3 -> OK
		commit #D base=3 -> REFUSED SETTLED
		end -> 12
		abandon
		commit #C base=20 -> REFUSED ABANDONED
		producers -> 0
		stats -> accepted=3 duplicate=0 out-of-order=1 unknown=0 fenced=0 invalid=0
	`)
}

// TestReserve_Transactional: the first transactional batch that is committed opens the
// transaction, at its own offset, and none that fails does.
func TestReserve_Transactional(t *testing.T) {
	play(t, `
		reserve pid=31 epoch=0 seq=0 n=1 txn -> OK #A
		reserve pid=31 epoch=0 seq=1 n=1 txn -> OK #B
		commit #B base=5 -> OK
		txn pid=31 -> none coord=none
		commit #A base=3 -> OK
		txn pid=31 -> open@3 coord=none
		replay-marker pid=31 epoch=0 coord=7 commit base=6
		reserve pid=31 epoch=0 seq=2 n=1 txn -> OK #C
		append-failed #C -> OK
		txn pid=31 -> none coord=7
		reserve pid=31 epoch=0 seq=2 n=1 -> OK #D
		commit #D base=7 -> OK
		txn pid=31 -> none coord=7
	`)
}

// TestReserve_Replay: a replay ends what its own producer has in flight, and
// nothing else. One that is skipped ends nothing.
func TestReserve_Replay(t *testing.T) {
	play(t, `
		batch pid=31 epoch=1 seq=0 n=1 -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
		reserve pid=31 epoch=1 seq=1 n=1 -> OK #A
		reserve pid=32 epoch=0 seq=1 n=1 -> OK #B
		replay pid=31 epoch=1 seq=0 n=1 base=0
		replay pid=31 epoch=0 seq=9 n=1 base=5
		replay pid=-1 epoch=-1 seq=-1 n=1 base=6
		replay pid=33 epoch=0 seq=0 n=1 base=7
		in-flight pid=31 -> epoch=1 1..1
		in-flight pid=32 -> epoch=0 1..1
		replay pid=32 epoch=0 seq=1 n=3 base=8
		in-flight pid=31 -> epoch=1 1..1
		in-flight pid=32 -> none
		commit #B base=8 -> REFUSED ABANDONED
		commit #A base=11 -> OK
		window pid=32 -> epoch=0 0..0@1 1..3@8
	`)
}

// TestReserve_AsBatchAfterAbandon: what was abandoned may be reserved or checked
// again at once, as if it had never been.
func TestReserve_AsBatchAfterAbandon(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
		reserve pid=32 epoch=0 seq=0 n=1 -> OK #B
		reserve pid=-1 epoch=-1 seq=-1 n=1 -> OK #C
		abandon
		abandon
		in-flight pid=31 -> none
		in-flight pid=32 -> none
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=2
	`)
}

// TestReserve_Errors: what each refusal says, and its code.
func TestReserve_Errors(t *testing.T) {
	m := New(Config{})
	a, b := reserved(t, m, 0, 3), reserved(t, m, 3, 1)
	copied := Batch{ProducerID: 31, BaseSequence: 0, Count: 3}
	_, _, inFlight := m.Reserve(copied)
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("the client has gone")
	cancel(why)
	_, _, cancelled := m.ReserveWait(ctx, copied)
	tooLow := b.Commit(2)
	settled(t, b.Commit(5))
	hole := a.Abort()
	twice := a.Abort()
	c := reserved(t, m, 0, 3)
	m.AbandonReservations()
	abandoned := c.Commit(9)
	for _, c := range []struct {
		err  error
		is   error
		code int16
		text string
	}{
		{inFlight, ErrInFlight, 7,
			"idempotence: append in flight: producer 31 epoch 0 sequence 0 count 3: waits for sequences 0 to 2 of epoch 0"},
		{cancelled, why, 7,
			"idempotence: append in flight: producer 31 epoch 0 sequence 0 count 3: waits for sequences 0 to 2 of epoch 0: the client has gone"},
		{cancelled, ErrInFlight, 7, ""},
		{tooLow, ErrOffsetOrder, 56,
			"idempotence: offset out of order: producer 31 epoch 0 sequence 3 count 1: base offset 2, lowest possible is 3"},
		{hole, ErrGap, 56,
			"idempotence: aborted append leaves a gap in the log: producer 31 epoch 0 sequence 0 count 3: a later batch is in the log at offset 5"},
		{twice, ErrSettled, -1, "idempotence: reservation already settled"},
		{abandoned, ErrAbandoned, 6, "idempotence: reservation abandoned"},
	} {
		if !errors.Is(c.err, c.is) {
			t.Errorf("%v is not %v", c.err, c.is)
			continue
		}
		if code := KafkaErrorCode(c.err); code != c.code {
			t.Errorf("%v has code %d, want %d", c.err, code, c.code)
		}
		if c.text != "" && c.err.Error() != c.text {
			t.Errorf("got  %s\nwant %s", c.err, c.text)
		}
	}
	var e *InFlightError
	if !errors.As(cancelled, &e) || e.Batch != copied || e.LastSequence != 2 {
		t.Errorf("the facts are not in %#v", cancelled)
	}
	if s := m.Stats(); s.InFlight != 2 {
		t.Errorf("InFlight is counted %d times, want 2", s.InFlight)
	}
}

// TestF2_MarkerBehindAppendInFlight: a coordinator's marker comes while an append
// of its producer is in flight. CheckMarker and ReserveMarker let it wait, so the append
// ends as if there had been no marker. ReplayMarker is for a marker that is in the log:
// it ends the reservation.
func TestF2_MarkerBehindAppendInFlight(t *testing.T) {
	k := Marker{ProducerID: 31, CoordinatorEpoch: 1}
	retry := Batch{ProducerID: 31, BaseSequence: 1, Count: 1, Transactional: true}
	setup := func() (*ProducerStateManager, *Reservation) {
		m := New(Config{})
		settled(t, m.CommitBatch(Batch{ProducerID: 31, Count: 1, Transactional: true}, 0))
		r, _, err := m.Reserve(retry)
		settled(t, err)
		return m, r
	}

	m, r := setup()
	if err := m.CheckMarker(k); !errors.Is(err, ErrInFlight) || KafkaErrorCode(err) != 7 {
		t.Errorf("CheckMarker: %v, want ErrInFlight", err)
	}
	if err := m.CommitMarker(k, 2); !errors.Is(err, ErrInFlight) {
		t.Errorf("CommitMarker: %v, want ErrInFlight", err)
	}
	_, err := m.ReserveMarker(k)
	var waits *InFlightError
	if !errors.As(err, &waits) || waits.FirstSequence != 1 || waits.Batch.BaseSequence != -1 {
		t.Fatalf("ReserveMarker: %#v, want an InFlightError for sequence 1", err)
	}
	if isClosed(waits.Done()) {
		t.Error("Done is closed while the append is in flight")
	}
	settled(t, r.Commit(1))
	if !isClosed(waits.Done()) {
		t.Error("Done is open after the append was committed")
	}
	settled(t, m.CheckMarker(k), m.CommitMarker(k, 2))
	audit(t, m)
	if res, err := m.CheckBatch(retry); err != nil || res != (Result{Duplicate, 1}) {
		t.Errorf("the retry gets %+v, %v", res, err)
	}

	m, r = setup()
	settled(t, m.ReplayMarker(k, 2))
	audit(t, m)
	if err := r.Commit(1); !errors.Is(err, ErrAbandoned) {
		t.Errorf("Commit after ReplayMarker: %v, want ErrAbandoned", err)
	}
	if end := m.Snapshot().EndOffset(); end > 1 {
		t.Errorf("the append may be in the log at 1, and a snapshot ends at %d", end)
	}
}

// TestF15_WhatAbandonLeaves: AbandonReservations does not leave everything as if
// nothing had been reserved. The producers count as active, a failed first batch must
// come again before any other of its epoch, and the log may hold the batches.
func TestF15_WhatAbandonLeaves(t *testing.T) {
	play(t, `
		mode=accept
		ttl=100
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		expire now=1000 -> 0
		reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
		reserve pid=32 epoch=1 seq=7 n=1 -> OK #B
		abandon
		activity pid=31 -> since the last Expire
		snapshot-end -> 1
		check pid=32 epoch=1 seq=8 n=1 -> OUT_OF_ORDER expected=7 current=-1
		check pid=32 epoch=2 seq=8 n=1 -> OK
		check pid=32 epoch=0 seq=8 n=1 -> OK
		expire now=1050 -> 0
		expire now=1149 -> 0
		expire now=1150 -> 1
	`)
}

// A copy of a Reservation is the same place in the log: once it is committed,
// no other handle moves it or takes it back.
func TestCommittedReservationOfCopiedHandle(t *testing.T) {
	m := New(Config{})
	first, second := reserved(t, m, 0, 1), reserved(t, m, 1, 1)
	again := *second
	settled(t, second.Commit(10))
	if err := again.Commit(20); !errors.Is(err, ErrSettled) {
		t.Errorf("second commit, by a copy: %v, want ErrSettled", err)
	}
	if err := again.Abort(); !errors.Is(err, ErrSettled) {
		t.Errorf("abort after the commit, by a copy: %v, want ErrSettled", err)
	}
	settled(t, first.Commit(5))
	want := Result{Verdict: Duplicate, BaseOffset: 10}
	if res, err := m.Check(31, 0, 1, 1); res != want || err != nil {
		t.Errorf("retry of the second batch: %+v, %v, want %+v", res, err, want)
	}
}
