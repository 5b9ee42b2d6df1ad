package idempotence

import (
	"cmp"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestAbortedRangesAgainstList: what a reader must know is found by looking at every
// range. What a snapshot shares never changes.
func TestAbortedRangesAgainstList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var a abortedRanges
		var all []AbortedTransaction
		start, end := int64(0), int64(1)
		type shared struct{ got, want []AbortedTransaction }
		var snapshots []shared
		add := func(r AbortedTransaction) {
			a.add(r)
			i, found := slices.BinarySearchFunc(all, r, func(a, b AbortedTransaction) int { return cmp.Compare(a.LastOffset, b.LastOffset) })
			if !found {
				all = slices.Insert(all, i, r)
			}
			end = max(end, r.LastOffset+1)
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				if err := auditAborted(&a, start, end); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(a.ranges[a.head:], all) || a.len() != len(all) {
					t.Fatalf("%v, want %v", a.ranges[a.head:], all)
				}
				for _, s := range snapshots {
					if !slices.Equal(s.got, s.want) {
						t.Fatalf("a snapshot has changed: %v, and it was %v", s.got, s.want)
					}
				}
			},
			"add": func(t *rapid.T) {
				last := end + int64(rapid.IntRange(0, 3).Draw(t, "step"))
				add(AbortedTransaction{31, int64(rapid.IntRange(0, int(last)-1).Draw(t, "first")), last})
			},
			"add many": func(t *rapid.T) {
				span := int64(rapid.IntRange(1, 100).Draw(t, "span"))
				for range rapid.SampledFrom([]int{50, 64, 300, fanout*fanout + 10}).Draw(t, "how many") {
					add(AbortedTransaction{31, max(0, end-span), end})
				}
			},
			"add out of order": func(t *rapid.T) {
				last := int64(rapid.IntRange(int(min(start, end-1)), int(end)).Draw(t, "last"))
				if last > start {
					add(AbortedTransaction{32, int64(rapid.IntRange(0, int(last)-1).Draw(t, "first")), last})
				}
			},
			"ask": func(t *rapid.T) {
				from := int64(rapid.IntRange(int(start), int(end)+1).Draw(t, "from"))
				to := from + int64(rapid.IntRange(-3, 50).Draw(t, "length"))
				var want []AbortedTransaction
				for _, r := range all {
					if r.LastOffset >= from && r.FirstOffset < to {
						want = append(want, r)
					}
				}
				if got := a.between(from, to); !slices.Equal(got, want) || (got == nil) != (want == nil) {
					t.Fatalf("between %d and %d: %v, want %v", from, to, got, want)
				}
			},
			"share": func(t *rapid.T) {
				got := a.share()
				snapshots = append(snapshots, shared{got, slices.Clone(got)})
			},
			"truncate": func(t *rapid.T) {
				to := int64(rapid.IntRange(int(start), int(end)).Draw(t, "to"))
				if rapid.Bool().Draw(t, "near the end") {
					to = max(start, end-int64(rapid.IntRange(0, 9).Draw(t, "cut")))
				}
				a.truncate(to)
				all = slices.DeleteFunc(all, func(r AbortedTransaction) bool { return r.LastOffset >= to })
				end = max(to, 1)
			},
			"forget": func(t *rapid.T) {
				start = int64(rapid.IntRange(int(start), int(end)).Draw(t, "start"))
				a.forgetBelow(start)
				all = slices.DeleteFunc(all, func(r AbortedTransaction) bool { return r.LastOffset < start })
			},
		})
	})
}
