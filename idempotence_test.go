package idempotence

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// This file holds the rules to their word, one transcript a rule and a refusal
// (see transcript_test.go for how they read), and the API around them.

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
		{"rule 2, StartAtZeroOnNewLog: anything once nobody in particular has written", `
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
		{"two appenders raced: the second is refused, whoever checked first", `
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

// TestMaxProducerID: the highest id accepted, whatever the order, and nothing
// that was refused.
func TestMaxProducerID(t *testing.T) {
	play(t, `
		batch pid=7 epoch=0 seq=0 n=1 -> OK base=0
		highest-pid -> 7
		batch pid=3 epoch=0 seq=0 n=1 -> OK base=1
		highest-pid -> 7
		batch pid=9 epoch=0 seq=1 n=1 -> UNKNOWN_PRODUCER
		check pid=9 epoch=0 seq=0 n=1 -> OK
		highest-pid -> 7
		batch pid=9 epoch=0 seq=0 n=1 -> OK base=2
		highest-pid -> 9
	`)
}

// TestViewsAreCopies: writing to what a look gave changes nothing.
func TestViewsAreCopies(t *testing.T) {
	part := play(t, `
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
	`)
	before := stateOf(part.m)
	scribble := func(p ProducerState) {
		for i := range p.Window {
			p.Window[i] = BatchMetadata{9, 9, 9}
		}
		_ = append(p.Window, BatchMetadata{8, 8, 8})
	}
	p, _ := part.m.Producer(31)
	scribble(p)
	for p := range part.m.Producers() {
		scribble(p)
	}
	if diff := cmp.Diff(before, stateOf(part.m)); diff != "" {
		t.Errorf("the state changed with the view (-before +after):\n%s", diff)
	}
	if _, err := part.m.Check(31, 0, 2, 1); err != nil {
		t.Errorf("the next batch: %v", err)
	}
}

// TestViewKeepsItsMoment: a view does not follow what is committed after it.
func TestViewKeepsItsMoment(t *testing.T) {
	part := play(t, `batch pid=31 epoch=0 seq=0 n=1 -> OK base=0`)
	before, _ := part.m.Producer(31)
	if err := part.m.Commit(31, 1, 0, 1, 1); err != nil {
		t.Fatal(err)
	}
	want := ProducerState{ProducerID: 31, Window: []BatchMetadata{{0, 0, 0}}, CurrentTxnFirstOffset: -1, CoordinatorEpoch: -1}
	if diff := cmp.Diff(want, before); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if p, ok := part.m.Producer(32); ok {
		t.Errorf("producer 32 is known as %+v", p)
	}
}

// TestProducersInOrder: Producers goes by id, whatever the order of arrival,
// and across pages.
func TestProducersInOrder(t *testing.T) {
	const n = 3*pageRows + 5
	m := New(Config{})
	for i := range int64(n) {
		pid := i * 7919 % n // n and 7919 have no common factor: every id once
		if err := m.Commit(pid, 0, 0, 1, i); err != nil {
			t.Fatal(err)
		}
	}
	var ids, want []int64
	for p := range m.Producers() {
		ids = append(ids, p.ProducerID)
	}
	for pid := range int64(n) {
		want = append(want, pid)
	}
	if diff := cmp.Diff(want, ids); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if m.Len() != n {
		t.Errorf("Len is %d, want %d", m.Len(), n)
	}
}

// TestProducersKeepTheirMoment: a walk sees the state of the moment it begins,
// although its own body commits new batches and new producers; a second walk
// over the same sequence sees the state anew, and a walk may be left.
func TestProducersKeepTheirMoment(t *testing.T) {
	m := New(Config{})
	const n = 2*pageRows + 3
	for pid := range int64(n) {
		if err := m.Commit(pid, 0, 0, 1, pid); err != nil {
			t.Fatal(err)
		}
	}
	all := m.Producers()
	seen := int64(0)
	for p := range all {
		want := ProducerState{ProducerID: seen, Window: []BatchMetadata{{0, 0, seen}}, CurrentTxnFirstOffset: -1, CoordinatorEpoch: -1}
		if diff := cmp.Diff(want, p); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
		for pid := int64(n) - 1; pid > p.ProducerID; pid -= pageRows {
			if err := m.Commit(pid, int16(seen)+1, 0, 1, m.EndOffset()); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Commit(n+seen, 0, 0, 1, m.EndOffset()); err != nil {
			t.Fatal(err)
		}
		seen++
		audit(t, m)
	}
	if seen != n {
		t.Errorf("the walk saw %d producers, want the %d of its beginning", seen, n)
	}
	if again := len(slices.Collect(all)); again != 2*n {
		t.Errorf("the second walk saw %d producers, want %d", again, 2*n)
	}
	for range all {
		break
	}
	if m.Len() != 2*n {
		t.Errorf("Len is %d, want %d", m.Len(), 2*n)
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

// TestFault_F8_OffsetInsideNewestBatch: no log gives an offset inside a batch. The
// newest one remembered of the producer begins at 4 and ends at 7; anything below its
// end is ErrOffsetOrder, whatever records it.
func TestFault_F8_OffsetInsideNewestBatch(t *testing.T) {
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

// TestFault_F18_ForgottenBetweenCheckAndCommit: Check changes nothing, so it cannot hold
// a producer. One that is forgotten while its batch is being appended is unknown to
// Commit, by Expire as by the cap. So in the first loop Expire is called under the append
// lock; a reservation holds its producer.
func TestFault_F18_ForgottenBetweenCheckAndCommit(t *testing.T) {
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
