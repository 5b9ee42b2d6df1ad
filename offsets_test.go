package idempotence

import (
	"maps"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

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
