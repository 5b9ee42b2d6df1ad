package idempotence

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file tests the rules for batches, one transcript a rule and a refusal
// (transcript_test.go says how they read).

// TestWorkedTrace is the worked trace of the package comment.
func TestWorkedTrace(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
		window pid=31 -> epoch=0 0..2@0
		batch pid=31 epoch=0 seq=3 n=2 -> OK base=3
		window pid=31 -> epoch=0 0..2@0 3..4@3
		batch pid=31 epoch=0 seq=3 n=2 -> DUP base=3
		batch pid=31 epoch=0 seq=7 n=1 -> OUT_OF_ORDER expected=5 current=0
		batch pid=31 epoch=1 seq=7 n=1 -> OUT_OF_ORDER expected=0 current=0
		window pid=31 -> epoch=0 0..2@0 3..4@3
		batch pid=31 epoch=1 seq=0 n=1 -> OK base=5
		window pid=31 -> epoch=1 0..0@5
		batch pid=31 epoch=0 seq=5 n=1 -> STALE_EPOCH current=1
		window pid=31 -> epoch=1 0..0@5
		end -> 6
		stats -> accepted=3 duplicate=1 out-of-order=2 unknown=0 fenced=1 invalid=0
	`)
}

// TestRules has a transcript for each rule, and for each way to break it.
func TestRules(t *testing.T) {
	for _, tt := range []struct{ name, trace string }{
		{"rule 0: a batch without a producer id is appended and not remembered", `
			batch pid=-1 epoch=-1 seq=-1 n=3 -> OK base=0
			batch pid=-1 epoch=-1 seq=-1 n=3 -> OK base=3
			producers -> 0
			highest-pid -> -1
			end -> 6
			stats -> accepted=2 duplicate=0 out-of-order=0 unknown=0 fenced=0 invalid=0
		`},
		{"rule 0: it is not judged, whatever its other fields say", `
			batch pid=-1 epoch=5 seq=7 n=1 -> OK base=0
			batch pid=-1 epoch=-9 seq=-9 n=1 -> OK base=1
			commit pid=-1 epoch=-1 seq=-1 n=0 base=9 -> OK
			end -> 9
			commit pid=-1 epoch=-1 seq=-1 n=-5 base=20 -> OK
			end -> 20
		`},
		{"rule 0: it may come in below the end, and moves nothing then", `
			advance to=10
			commit pid=-1 epoch=-1 seq=-1 n=2 base=3 -> OK
			end -> 10
		`},
		{"rule 1: a producer id below -1", `
			batch pid=-2 epoch=0 seq=0 n=1 -> INVALID expected=-1 current=-1
			batch pid=-9223372036854775808 epoch=0 seq=0 n=1 -> INVALID
			producers -> 0
			stats -> accepted=0 duplicate=0 out-of-order=0 unknown=0 fenced=0 invalid=2
		`},
		{"rule 1: a negative epoch", `
			batch pid=31 epoch=-1 seq=0 n=1 -> INVALID
			batch pid=31 epoch=-32768 seq=0 n=1 -> INVALID
			producers -> 0
		`},
		{"rule 1: a negative sequence", `
			batch pid=31 epoch=0 seq=-1 n=1 -> INVALID
			batch pid=31 epoch=0 seq=-2147483648 n=1 -> INVALID
			producers -> 0
		`},
		{"rule 1: a count below 1", `
			batch pid=31 epoch=0 seq=0 n=0 -> INVALID
			batch pid=31 epoch=0 seq=0 n=-1 -> INVALID
			batch pid=31 epoch=0 seq=0 n=-2147483648 -> INVALID
			producers -> 0
		`},
		{"rule 1: a known producer's malformed batch, its next sequence included", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=0 -> INVALID expected=-1 current=-1
			batch pid=31 epoch=0 seq=1 n=-1 -> INVALID
			batch pid=31 epoch=0 seq=-1 n=1 -> INVALID
			batch pid=31 epoch=-1 seq=1 n=1 -> INVALID
			commit pid=31 epoch=0 seq=1 n=0 base=1 -> REFUSED INVALID base=1 first=-1
			commit pid=31 epoch=0 seq=1 n=-1 base=1 -> REFUSED INVALID
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
		`},
		{"rule 2: an unknown producer starts at 0", `
			batch pid=31 epoch=0 seq=1 n=1 -> UNKNOWN_PRODUCER expected=0 current=-1
			commit pid=31 epoch=0 seq=1 n=1 base=0 -> REFUSED UNKNOWN_PRODUCER base=0 first=-1
			producers -> 0
			highest-pid -> -1
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			producers -> 1
			highest-pid -> 31
			stats -> accepted=1 duplicate=0 out-of-order=0 unknown=2 fenced=0 invalid=0
		`},
		{"rule 2: in any epoch", `
			batch pid=31 epoch=7 seq=1 n=1 -> UNKNOWN_PRODUCER
			batch pid=31 epoch=7 seq=0 n=1 -> OK base=0
			window pid=31 -> epoch=7 0..0@0
		`},
		{"rule 2: producer id 0 and the largest are ids like any other", `
			batch pid=0 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=9223372036854775807 epoch=0 seq=0 n=1 -> OK base=1
			batch pid=0 epoch=0 seq=0 n=1 -> DUP base=0
			batch pid=9223372036854775807 epoch=0 seq=1 n=1 -> OK base=2
			highest-pid -> 9223372036854775807
		`},
		{"rule 2, AcceptAny: an unknown producer starts anywhere, and counts from there", `
			mode=accept
			batch pid=31 epoch=0 seq=7 n=2 -> OK base=0
			window pid=31 -> epoch=0 7..8@0
			batch pid=31 epoch=0 seq=7 n=2 -> DUP base=0
			batch pid=31 epoch=0 seq=12 n=1 -> OUT_OF_ORDER expected=9 current=0
			batch pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER expected=9
			batch pid=31 epoch=0 seq=9 n=1 -> OK base=2
		`},
		{"rule 2, AcceptAny: a newer epoch of a known producer still starts at 0", `
			mode=accept
			batch pid=31 epoch=3 seq=7 n=2 -> OK base=0
			batch pid=31 epoch=4 seq=9 n=1 -> OUT_OF_ORDER expected=0 current=3
			batch pid=31 epoch=4 seq=0 n=1 -> OK base=2
		`},
		{"rule 2, StartAtZeroOnNewLog: only 0 while the log has held nothing", `
			mode=new-log-strict
			batch pid=31 epoch=0 seq=2 n=1 -> OUT_OF_ORDER expected=0 current=-1
			commit pid=31 epoch=0 seq=2 n=1 base=0 -> REFUSED OUT_OF_ORDER
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			stats -> accepted=2 duplicate=0 out-of-order=2 unknown=0 fenced=0 invalid=0
		`},
		{"rule 2, StartAtZeroOnNewLog: anything once another producer has written", `
			mode=new-log-strict
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=9 n=1 -> OK base=1
		`},
		{"rule 2, StartAtZeroOnNewLog: anything once a batch without a producer was written", `
			mode=new-log-strict
			advance to=1
			batch pid=31 epoch=0 seq=9 n=1 -> OK base=1
		`},
		{"rule 3: an older epoch is fenced, wherever it stands in the sequence", `
			batch pid=31 epoch=2 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH expected=-1 current=2
			batch pid=31 epoch=1 seq=1 n=1 -> STALE_EPOCH current=2
			batch pid=31 epoch=0 seq=9 n=1 -> STALE_EPOCH current=2
			commit pid=31 epoch=1 seq=0 n=1 base=1 -> REFUSED STALE_EPOCH current=2 base=1 first=-1
			window pid=31 -> epoch=2 0..0@0
			stats -> accepted=1 duplicate=0 out-of-order=0 unknown=0 fenced=4 invalid=0
		`},
		{"rule 3: an exact copy of a batch of the older epoch is fenced too", `
			batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
			batch pid=31 epoch=1 seq=0 n=3 -> OK base=3
			batch pid=31 epoch=0 seq=0 n=3 -> STALE_EPOCH
			batch pid=31 epoch=1 seq=0 n=3 -> DUP base=3
		`},
		{"rule 4: a newer epoch starts at 0, and skips as many as it likes", `
			batch pid=31 epoch=0 seq=0 n=5 -> OK base=0
			batch pid=31 epoch=9 seq=5 n=1 -> OUT_OF_ORDER expected=0 current=0
			commit pid=31 epoch=9 seq=5 n=1 base=5 -> REFUSED OUT_OF_ORDER expected=0 current=0
			batch pid=31 epoch=9 seq=0 n=1 -> OK base=5
			window pid=31 -> epoch=9 0..0@5
			batch pid=31 epoch=32767 seq=0 n=1 -> OK base=6
			window pid=31 -> epoch=32767 0..0@6
		`},
		{"rule 4: a refused newer epoch is not adopted", `
			batch pid=31 epoch=0 seq=0 n=5 -> OK base=0
			batch pid=31 epoch=1 seq=5 n=1 -> OUT_OF_ORDER
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
			commit pid=31 epoch=1 seq=0 n=1 base=4 -> REFUSED OFFSET_ORDER base=4 lowest=6 expected=-1 current=0
			batch pid=31 epoch=0 seq=6 n=1 -> OK base=6
		`},
		{"rule 4: a checked newer epoch is not adopted before its Commit", `
			batch pid=31 epoch=0 seq=0 n=5 -> OK base=0
			check pid=31 epoch=1 seq=0 n=1 -> OK #A
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
			append-failed #A
			batch pid=31 epoch=0 seq=6 n=1 -> OK base=6
		`},
		{"rule 4: the batches of the older epoch are gone, and their order with them", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=3
			batch pid=31 epoch=1 seq=2 n=1 -> OUT_OF_ORDER expected=1 current=1
			batch pid=31 epoch=1 seq=1 n=2 -> OK base=4
			window pid=31 -> epoch=1 0..0@3 1..2@4
		`},
		{"rule 5: each of the last five is a duplicate, at its own offset", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=2 -> OK base=1
			batch pid=32 epoch=0 seq=0 n=4 -> OK base=3
			batch pid=31 epoch=0 seq=3 n=3 -> OK base=7
			batch pid=31 epoch=0 seq=6 n=4 -> OK base=10
			batch pid=31 epoch=0 seq=10 n=5 -> OK base=14
			window pid=31 -> epoch=0 0..0@0 1..2@1 3..5@7 6..9@10 10..14@14
			batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
			batch pid=31 epoch=0 seq=1 n=2 -> DUP base=1
			batch pid=31 epoch=0 seq=3 n=3 -> DUP base=7
			batch pid=31 epoch=0 seq=6 n=4 -> DUP base=10
			batch pid=31 epoch=0 seq=10 n=5 -> DUP base=14
			stats -> accepted=6 duplicate=5 out-of-order=0 unknown=0 fenced=0 invalid=0
		`},
		{"rule 5: the sixth pushes the first out", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
			window pid=31 -> epoch=0 1..1@1 2..2@2 3..3@3 4..4@4 5..5@5
			batch pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER expected=6
			batch pid=31 epoch=0 seq=1 n=1 -> DUP base=1
		`},
		{"rule 5: a duplicate does not make its batch any newer", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
			batch pid=31 epoch=0 seq=0 n=1 -> OUT_OF_ORDER
		`},
		{"rule 5: producers do not see one another's batches", `
			batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
			batch pid=32 epoch=0 seq=0 n=3 -> OK base=3
			batch pid=31 epoch=0 seq=0 n=3 -> DUP base=0
			batch pid=32 epoch=0 seq=0 n=3 -> DUP base=3
		`},
		{"rule 5 before rule 6: after a full turn, what comes next may be a remembered range", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=2147483647 -> OK base=1
			window pid=31 -> epoch=0 0..0@0 1..2147483647@1
			batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=2147483648
		`},
		{"rule 6: the next sequence, of any length", `
			batch pid=31 epoch=0 seq=0 n=1000 -> OK base=0
			batch pid=31 epoch=0 seq=1000 n=1 -> OK base=1000
			batch pid=31 epoch=0 seq=1001 n=2147482646 -> OK base=1001
			window pid=31 -> epoch=0 0..999@0 1000..1000@1000 1001..2147483646@1001
			batch pid=31 epoch=0 seq=2147483647 n=1 -> OK base=2147483647
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=2147483648
		`},
		{"rule 6: a batch may span the wrap", `
			mode=accept
			batch pid=31 epoch=0 seq=2147483646 n=4 -> OK base=0
			window pid=31 -> epoch=0 2147483646..1@0
			batch pid=31 epoch=0 seq=1 n=1 -> OUT_OF_ORDER expected=2
			batch pid=31 epoch=0 seq=2147483646 n=4 -> DUP base=0
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=4
		`},
		{"rule 7: gaps, overlaps, splits, mergers and old ranges", `
			batch pid=31 epoch=0 seq=0 n=4 -> OK base=0
			batch pid=31 epoch=0 seq=4 n=4 -> OK base=4
			batch pid=31 epoch=0 seq=9 n=4 -> OUT_OF_ORDER expected=8 current=0
			batch pid=31 epoch=0 seq=2147483647 n=1 -> OUT_OF_ORDER expected=8
			batch pid=31 epoch=0 seq=7 n=4 -> OUT_OF_ORDER expected=8
			batch pid=31 epoch=0 seq=4 n=2 -> OUT_OF_ORDER expected=8
			batch pid=31 epoch=0 seq=6 n=2 -> OUT_OF_ORDER expected=8
			batch pid=31 epoch=0 seq=5 n=2 -> OUT_OF_ORDER expected=8
			batch pid=31 epoch=0 seq=4 n=5 -> OUT_OF_ORDER expected=8
			batch pid=31 epoch=0 seq=0 n=8 -> OUT_OF_ORDER expected=8
			batch pid=31 epoch=0 seq=2 n=4 -> OUT_OF_ORDER expected=8
			batch pid=31 epoch=0 seq=0 n=3 -> OUT_OF_ORDER expected=8
			commit pid=31 epoch=0 seq=9 n=1 base=8 -> REFUSED OUT_OF_ORDER expected=8 current=0 base=8 first=-1
			batch pid=31 epoch=0 seq=8 n=1 -> OK base=8
		`},
	} {
		t.Run(tt.name, func(t *testing.T) { play(t, tt.trace) })
	}
}

// TestWhichRefusalWins has batches to which two refusals apply: the one named
// first in the rules is given.
func TestWhichRefusalWins(t *testing.T) {
	for _, tt := range []struct{ name, trace string }{
		{"malformed before unknown", `
			batch pid=31 epoch=0 seq=5 n=0 -> INVALID
			batch pid=31 epoch=-1 seq=5 n=1 -> INVALID
			commit pid=31 epoch=0 seq=5 n=0 base=0 -> REFUSED INVALID
		`},
		{"malformed before fenced and before a newer epoch", `
			batch pid=31 epoch=3 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=2 seq=0 n=0 -> INVALID
			batch pid=31 epoch=4 seq=0 n=0 -> INVALID
			batch pid=31 epoch=-1 seq=7 n=1 -> INVALID
		`},
		{"malformed before out of order and before duplicate", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=9 n=0 -> INVALID
			batch pid=31 epoch=0 seq=0 n=0 -> INVALID
		`},
		{"unknown is an out of order, and the narrower one is said", `
			batch pid=31 epoch=0 seq=9 n=1 -> UNKNOWN_PRODUCER
		`},
		{"fenced before out of order", `
			batch pid=31 epoch=3 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=2 seq=9 n=1 -> STALE_EPOCH
		`},
		{"every refusal of the batch before one of its offset", `
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=1 seq=1 n=1 -> OK base=1
			commit pid=31 epoch=1 seq=2 n=0 base=0 -> REFUSED INVALID base=0
			commit pid=32 epoch=1 seq=1 n=1 base=-1 -> REFUSED UNKNOWN_PRODUCER base=-1
			commit pid=31 epoch=0 seq=2 n=1 base=0 -> REFUSED STALE_EPOCH base=0
			commit pid=31 epoch=2 seq=2 n=1 base=0 -> REFUSED OUT_OF_ORDER base=0
			commit pid=31 epoch=1 seq=3 n=1 base=0 -> REFUSED OUT_OF_ORDER base=0
			commit pid=31 epoch=1 seq=1 n=1 base=0 -> REFUSED DUPLICATE_SEQUENCE base=0 first=1
		`},
	} {
		t.Run(tt.name, func(t *testing.T) { play(t, tt.trace) })
	}
}

// TestPolicyNotNamed: a policy that is none of the three follows the rule as
// written.
func TestPolicyNotNamed(t *testing.T) {
	m := New(Config{UnknownProducer: 77})
	if _, err := m.Check(31, 0, 1, 1); !errors.Is(err, ErrUnknownProducer) {
		t.Errorf("Check: %v, want ErrUnknownProducer", err)
	}
	if got := UnknownProducerPolicy(77).String(); got != "StartAtZero" {
		t.Errorf("String: %q", got)
	}
}

// TestStrings: the names are those in the source.
func TestStrings(t *testing.T) {
	for got, want := range map[fmt.Stringer]string{
		StartAtZero: "StartAtZero", AcceptAny: "AcceptAny", StartAtZeroOnNewLog: "StartAtZeroOnNewLog",
		Append: "Append", Duplicate: "Duplicate", Verdict(0): "none", Verdict(9): "none",
	} {
		if got.String() != want {
			t.Errorf("%#v is %q, want %q", got, got, want)
		}
	}
}

// TestEpochFencing: several instances of one producer, each with an epoch of
// its own, send at random. No two epochs are ever interleaved in the log, an
// instance never writes again once a newer one has, and a refused epoch leaves
// everything as it was.
func TestEpochFencing(t *testing.T) {
	epochs := rapid.OneOf(rapid.Int16Range(0, 4), rapid.Int16Range(32760, 32767))
	rapid.Check(t, func(t *rapid.T) {
		p := newPartition(Config{})
		next := map[int16]int32{}
		current := int16(-1)
		for range 60 {
			b := Batch{ProducerID: 31, Epoch: epochs.Draw(t, "epoch"), Count: rapid.Int32Range(1, 3).Draw(t, "n")}
			b.BaseSequence = next[b.Epoch]
			if rapid.IntRange(0, 4).Draw(t, "stray") == 0 {
				b.BaseSequence = rapid.Int32Range(0, 9).Draw(t, "seq")
			}
			before := stateOf(p.m)
			res, err := p.produce(b)
			audit(t, p.m)
			switch {
			case err == nil && res.Verdict == Append:
				if b.Epoch < current {
					t.Fatalf("epoch %d wrote after %d", b.Epoch, current)
				}
				current = b.Epoch
				next[b.Epoch] = b.BaseSequence + b.Count
				continue
			case b.Epoch < current && !errors.Is(err, ErrFenced):
				t.Fatalf("epoch %d after %d gets %+v, %v, want ErrFenced", b.Epoch, current, res, err)
			case b.Epoch > current && err == nil:
				t.Fatalf("epoch %d gets %+v, and %d is the newest that wrote", b.Epoch, res, current)
			}
			if diff := cmp.Diff(before, stateOf(p.m)); diff != "" {
				t.Fatalf("epoch %d was refused and left its mark (-before +after):\n%s", b.Epoch, diff)
			}
		}
		requireRisingEpochs(t, p.log)
	})
}

// requireRisingEpochs reads the log as a consumer would.
func requireRisingEpochs(t rapid.TB, log []logged) {
	t.Helper()
	for i := 1; i < len(log); i++ {
		older, newer := log[i-1].batch, log[i].batch
		if newer.Epoch < older.Epoch {
			t.Fatalf("epoch %d is in the log after %d", newer.Epoch, older.Epoch)
		}
		want := int32(0)
		if newer.Epoch == older.Epoch {
			want = older.BaseSequence + older.Count
		}
		if newer.BaseSequence != want {
			t.Fatalf("epoch %d has sequence %d in the log where %d is next", newer.Epoch, newer.BaseSequence, want)
		}
	}
}
