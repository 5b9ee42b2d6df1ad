package idempotence

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

// TestSequences is the arithmetic at its edges: the modulus is 2^31, so that
// 2147483647 is a sequence and 0 comes after it.
func TestSequences(t *testing.T) {
	const top = math.MaxInt32
	for _, tt := range []struct {
		first, count int32
		last, next   int32
	}{
		{0, 1, 0, 1},
		{0, 5, 4, 5},
		{top - 1, 1, top - 1, top},
		{top, 1, top, 0},
		{top, 2, 0, 1},
		{top - 1, 4, 1, 2},
		{0, top, top - 1, top},
		{1, top, top, 0},
		{2, top, 0, 1},
		{top, top, top - 2, top - 1},
	} {
		if got := lastSequence(tt.first, tt.count); got != tt.last {
			t.Errorf("%d records from %d end at %d, want %d", tt.count, tt.first, got, tt.last)
		}
		if got := nextSequence(tt.last); got != tt.next {
			t.Errorf("after %d comes %d, want %d", tt.last, got, tt.next)
		}
	}
}

// TestSequencesAgainstInt64: the mask against a remainder in 64 bits, and a span
// gives back what it was made of.
func TestSequencesAgainstInt64(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := rapid.Int32Range(0, math.MaxInt32).Draw(t, "first")
		count := rapid.Int32Range(1, math.MaxInt32).Draw(t, "count")
		s := makeSpan(first, count)
		if s.first() != first || s.count() != count || s == 0 {
			t.Fatalf("the span %x of %d, %d", s, first, count)
		}
		if want := int32((int64(first) + int64(count) - 1) % modulus); s.last() != want {
			t.Fatalf("last is %d, want %d", s.last(), want)
		}
		if want := int32((int64(first) + int64(count)) % modulus); nextSequence(s.last()) != want {
			t.Fatalf("next is %d, want %d", nextSequence(s.last()), want)
		}
	})
}
