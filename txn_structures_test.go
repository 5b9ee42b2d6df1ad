package idempotence

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// This file holds the three structures that transactions are kept in against lists.

// TestOffsetQueueAgainstList: whatever is added and removed, in any order.
func TestOffsetQueueAgainstList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q offsetQueue
		want := map[int64]int64{} // keys by value
		next, highest := int64(0), int64(0)
		add := func(key int64) {
			q.add(key, next)
			want[next] = key
			next++
			highest = max(highest, key)
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				if err := auditOpen(&q, want); err != nil {
					t.Fatal(err)
				}
				lowest := int64(math.MaxInt64)
				for _, key := range want {
					lowest = min(lowest, key)
				}
				if e, ok := q.first(); ok != (len(want) > 0) || ok && e.key != lowest {
					t.Fatalf("the first is %+v, %t, want %d of %d", e, ok, lowest, len(want))
				}
			},
			"add at the end": func(t *rapid.T) { add(highest + int64(rapid.IntRange(0, 2).Draw(t, "step"))) },
			"add many": func(t *rapid.T) {
				for range 100 {
					add(highest + 1)
				}
			},
			"add anywhere": func(t *rapid.T) { add(int64(rapid.IntRange(0, int(highest)).Draw(t, "key"))) },
			"remove": func(t *rapid.T) {
				values := slices.Sorted(maps.Keys(want))
				for range rapid.IntRange(0, 90).Draw(t, "how many") {
					if len(values) == 0 {
						return
					}
					i := rapid.IntRange(0, len(values)-1).Draw(t, "which")
					q.remove(want[values[i]], values[i])
					delete(want, values[i])
					values = slices.Delete(values, i, i+1)
				}
			},
			"remove all from the front": func(t *rapid.T) {
				for len(want) > 0 {
					e, _ := q.first()
					q.remove(e.key, e.value)
					delete(want, e.value)
				}
			},
		})
	})
}

// TestEndedQueueAgainstList: the lowest first offset of those whose marker the high
// watermark has not passed.
func TestEndedQueueAgainstList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q endedQueue
		var all []endedTxn
		hw := int64(0)
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				if err := auditEnded(&transactions{ended: q, watermark: hw}); err != nil {
					t.Fatal(err)
				}
				want := int64(math.MaxInt64)
				for _, e := range all {
					want = min(want, e.first)
				}
				if len(q) > 0 != (len(all) > 0) || len(q) > 0 && q[0].first != want {
					t.Fatalf("%+v, want %d of %+v", q, want, all)
				}
			},
			"add": func(t *rapid.T) {
				marker := hw + int64(rapid.IntRange(0, 20).Draw(t, "marker"))
				if marker == 0 {
					return
				}
				e := endedTxn{int64(rapid.IntRange(0, int(marker)-1).Draw(t, "first")), marker}
				q.add(e.first, e.marker)
				all = append(all, e)
			},
			"release": func(t *rapid.T) {
				hw += int64(rapid.IntRange(0, 6).Draw(t, "step"))
				q.release(hw)
				all = slices.DeleteFunc(all, func(e endedTxn) bool { return e.marker < hw })
			},
			"truncate": func(t *rapid.T) {
				to := hw + int64(rapid.IntRange(0, 20).Draw(t, "to"))
				q.truncate(to)
				for _, e := range q {
					if e.marker >= to || !slices.Contains(all, e) {
						t.Fatalf("%+v is left of a log that ends at %d", e, to)
					}
				}
				all = slices.Clone([]endedTxn(q)) // the rest comes back with a rebuild
			},
		})
	})
}

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
