package idempotence

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// TestWindowRing draws the ring as it turns: > is the oldest entry, and the
// number is the first sequence of the batch in the slot.
func TestWindowRing(t *testing.T) {
	var w window
	for _, step := range []struct {
		first, count int32
		base         int64
		ring         string
	}{
		{0, 1, 0, "> 0   -   -   -   - "},
		{1, 2, 1, "> 0   1   -   -   - "},
		{3, 1, 3, "> 0   1   3   -   - "},
		{4, 3, 4, "> 0   1   3   4   - "},
		{7, 1, 7, "> 0   1   3   4   7 "},
		{8, 1, 8, "  8 > 1   3   4   7 "},
		{9, 1, 9, "  8   9 > 3   4   7 "},
		{10, 1, 10, "  8   9   A > 4   7 "},
		{11, 1, 11, "  8   9   A   B > 7 "},
		{12, 1, 12, "> 8   9   A   B   C "},
	} {
		w.push(makeSpan(step.first, step.count), step.base)
		if err := auditWindow(&w); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(step.ring, drawRing(&w)); diff != "" {
			t.Fatalf("after sequence %d (-want +got):\n%s", step.first, diff)
		}
	}
}

func drawRing(w *window) string {
	text := ""
	for i, e := range w.ring {
		arrow, digit := " ", "-"
		if w.count > 0 && i == int(w.start) {
			arrow = ">"
		}
		if e != (entry{}) {
			digit = "0123456789ABC"[e.span.first() : e.span.first()+1]
		}
		text += arrow + " " + digit + " "
	}
	return text
}

// TestWindowAgainstSlice: the ring against a slice that keeps the last five, with
// gaps and repeats as a log may have them, and with the newest taken back.
func TestWindowAgainstSlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w window
		var want []entry
		base := int64(-1)
		for range 40 {
			if len(want) > 0 && rapid.IntRange(0, 5).Draw(t, "pop") == 0 {
				w.pop()
				want = want[:len(want)-1]
			} else {
				first := w.next
				if rapid.IntRange(0, 3).Draw(t, "stray") == 0 {
					first = rapid.Int32Range(0, 6).Draw(t, "first")
				}
				count := rapid.OneOf(rapid.Int32Range(1, 3), rapid.Just(int32(maxPlainCount)), rapid.Just(int32(maxPlainCount+1))).Draw(t, "count")
				base += rapid.Int64Range(1, 3).Draw(t, "step")
				w.push(makeSpan(first, count), base)
				want = append(want, entry{makeSpan(first, count), base})
				want = want[max(0, len(want)-WindowSize):]
			}
			if err := auditWindow(&w); err != nil {
				t.Fatal(err)
			}
			requireWindow(t, &w, want)
		}
	})
}

func requireWindow(t rapid.TB, w *window, want []entry) {
	t.Helper()
	var list []BatchMetadata
	for _, e := range want {
		list = append(list, BatchMetadata{e.span.first(), e.span.last(), e.baseOffset})
	}
	if diff := cmp.Diff(list, w.appendTo(nil)); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	for _, e := range want {
		i := slices.IndexFunc(want, func(o entry) bool { return o.span == e.span })
		if got := w.find(e.span); got == nil || *got != want[i] {
			t.Fatalf("find(%x) is %+v, want %+v", e.span, got, want[i])
		}
		other := makeSpan(e.span.first(), e.span.count()+1)
		if w.find(other) != nil && !slices.ContainsFunc(want, func(o entry) bool { return o.span == other }) {
			t.Fatalf("find(%x) finds what was never pushed", other)
		}
	}
	if w.follows(w.next) && w.find(makeSpan(w.next, 1)) != nil {
		t.Fatal("the next sequence is one that is remembered, and the window says it need not look")
	}
}
