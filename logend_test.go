package idempotence

import (
	"math"
	"testing"
)

// TestLogEndTruncate: a cut lowers both ends, and nothing else does.
func TestLogEndTruncate(t *testing.T) {
	for _, tt := range []struct{ end, restored, to, wantEnd, wantRestored int64 }{
		{5, 0, 7, 5, 0},
		{5, 0, 5, 5, 0},
		{5, 0, 2, 2, 0},
		{5, 8, 7, 5, 7},
		{5, 8, 2, 2, 2},
		{5, 8, 0, 0, 0},
	} {
		l := logEnd{endOffset: tt.end, restoredLogEnd: tt.restored}
		l.truncate(tt.to)
		if l.endOffset != tt.wantEnd || l.restoredLogEnd != tt.wantRestored {
			t.Errorf("%d and %d, cut to %d: %+v, want %d and %d", tt.end, tt.restored, tt.to, l, tt.wantEnd, tt.wantRestored)
		}
		l.advance(l.endOffset - 1)
		if l.endOffset != tt.wantEnd {
			t.Errorf("advance to less lowers the end offset to %d", l.endOffset)
		}
		l.advance(9)
		if l.endOffset != 9 || l.knownEnd() != 9 {
			t.Errorf("advance to 9: %+v, known end %d", l, l.knownEnd())
		}
	}
}

// TestLogEndFits: the offsets that a log which ends at 5 can give to an append.
func TestLogEndFits(t *testing.T) {
	for _, tt := range []struct {
		name                         string
		l                            logEnd
		after, base, count, inFlight int64
		want                         bool
	}{
		{"at the end", logEnd{endOffset: 5}, 3, 5, 1, 0, true},
		{"inside the producer's newest batch", logEnd{endOffset: 5}, 5, 4, 1, 0, false},
		{"before another producer's batch, if the log has gaps", logEnd{endOffset: 5}, 3, 3, 1, 0, true},
		{"before another producer's batch", logEnd{endOffset: 5, contiguous: true}, 3, 3, 1, 0, false},
		{"behind a gap, if the log has gaps", logEnd{endOffset: 5}, 3, 9, 1, 0, true},
		{"behind a gap", logEnd{endOffset: 5, contiguous: true}, 3, 6, 1, 0, false},
		{"behind what is in flight", logEnd{endOffset: 5, contiguous: true}, 3, 7, 1, 2, true},
		{"behind more than is in flight", logEnd{endOffset: 5, contiguous: true}, 3, 8, 1, 2, false},
		{"below the end of a restored log", logEnd{endOffset: 5, restoredLogEnd: 7, contiguous: true}, 3, 5, 1, 0, false},
		{"negative", logEnd{}, 0, -1, 1, 0, false},
		{"the last offset there is", logEnd{}, 0, math.MaxInt64 - 1, 1, 0, true},
		{"one more", logEnd{}, 0, math.MaxInt64, 1, 0, false},
	} {
		if got := tt.l.fits(tt.after, tt.base, tt.count, tt.inFlight); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}

// TestLogEndIsNext: isNext is fits for an append behind everything known, with nothing in
// flight.
func TestLogEndIsNext(t *testing.T) {
	for _, end := range []int64{0, 1, 5, math.MaxInt64} {
		for _, restored := range []int64{0, 1, 5, 6, 7, math.MaxInt64} {
			for _, base := range []int64{-1, 0, 1, 4, 5, 6, 7, 8, math.MaxInt64 - 2, math.MaxInt64 - 1, math.MaxInt64} {
				for _, count := range []int64{1, 2, math.MaxInt32} {
					for _, contiguous := range []bool{false, true} {
						l := logEnd{end, restored, contiguous}
						want := l.fits(l.knownEnd(), base, count, 0)
						if got := l.isNext(base, count); got != want {
							t.Errorf("%+v, %d records at %d: %t, want %t", l, count, base, got, want)
						}
					}
				}
			}
		}
	}
}
