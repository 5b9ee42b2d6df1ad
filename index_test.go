package idempotence

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// This file tests the index, and measures what it is worth. table_test.go holds it
// against a map in use.

// TestIndexSeed: two tables hash the same ids differently, so a client cannot choose
// ids that all fall into one bucket.
func TestIndexSeed(t *testing.T) {
	a, b := newIndex(), newIndex()
	same := 0
	for pid := range int64(64) {
		if a.hash(pid) == b.hash(pid) {
			same++
		}
	}
	if same > 1 {
		t.Errorf("%d of 64 hashes are the same in two tables", same)
	}
}

// TestGroup: the word tricks of a group against a plain loop over its bytes.
// matches may name a slot too many but never misses one; the lowest free slot is
// always right.
func TestGroup(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var g group
		tags := rapid.SliceOfN(rapid.SampledFrom([]uint8{0, 1, 3, 127, 129, 255}), groupSlots, groupSlots).Draw(t, "tags")
		for i, tag := range tags {
			g.set(i, tag, uint32(i))
		}
		for i, tag := range tags {
			if g.tag(i) != tag || g.rows[i] != uint32(i) {
				t.Fatalf("slot %d has tag %d, row %d, want tag %d", i, g.tag(i), g.rows[i], tag)
			}
		}
		if want := slices.Index(tags, 0); want < 0 && g.free() != 0 || want >= 0 && lowest(g.free()) != want {
			t.Fatalf("free slot of %v: marks %x, want %d", tags, g.free(), want)
		}
		for _, asked := range []uint8{1, 3, 127, 129, 255} {
			found := map[int]bool{}
			for marks := g.matches(asked); marks != 0; marks &= marks - 1 {
				found[lowest(marks)] = true
			}
			for i, tag := range tags {
				if tag == asked && !found[i] {
					t.Fatalf("tag %d in slot %d of %v is missed: %v", asked, i, tags, found)
				}
			}
		}
	})
}

// BenchmarkIndexAgainstMap holds the index against a built-in map from producer id
// to row. It takes turns of a thousand random look-ups, each of which reads the
// row, and reports as map-x what a look-up by the map takes in multiples of one by
// the index: the median over all turns. index-B and map-B are bytes of heap a
// producer, and index-left-B and map-left-B those that are left, for each producer
// there was, after 99 of 100 are removed.
func BenchmarkIndexAgainstMap(b *testing.B) {
	for _, n := range []int{1000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("producers=%d", n), func(b *testing.B) {
			x := newIndexRig(n)
			var ratios []float64
			b.ResetTimer()
			for done := 0; done < b.N; done += indexTurn {
				x.next()
				byIndex := x.time(func(pid int64) *producer {
					p := x.table.probe(pid)
					return p
				})
				x.next()
				byMap := x.time(func(pid int64) *producer { return x.table.at(x.byID[pid]) })
				ratios = append(ratios, byMap/byIndex)
			}
			b.ReportMetric(median(ratios), "map-x")
			b.ReportMetric(0, "ns/op")
			x.reportMemory(b)
		})
	}
}

const indexTurn = 1000

type indexRig struct {
	n     int
	table table
	byID  map[int64]uint32
	turn  []int64
	sum   int64
	// index holds the same entries as table.index, and no rows beside them.
	index index
	// bytes of heap that each took when it was made
	indexBytes, mapBytes int64
}

// newIndexRig makes rows for producers 0 to n-1, and both ways to find them.
func newIndexRig(n int) *indexRig {
	x := &indexRig{n: n, table: newTable(), index: newIndex(), turn: make([]int64, indexTurn)}
	for pid := range int64(n) {
		x.table.insert(pid)
	}
	before := heapInUse()
	for pid := range int64(n) {
		x.index.put(x.index.hash(pid), uint32(pid), x.hashOf)
	}
	x.indexBytes = heapInUse() - before
	before = heapInUse()
	x.byID = make(map[int64]uint32)
	for pid := range int64(n) {
		x.byID[pid] = uint32(pid)
	}
	x.mapBytes = heapInUse() - before
	return x
}

// hashOf gives the index a hash of a row: row and producer id are the same here.
func (x *indexRig) hashOf(row uint32) uint64 { return x.index.hash(int64(row)) }

// next chooses the producers of a turn.
func (x *indexRig) next() {
	for i := range x.turn {
		x.turn[i] = rand.Int64N(int64(x.n))
	}
}

func (x *indexRig) time(find func(pid int64) *producer) float64 {
	start := time.Now()
	for _, pid := range x.turn {
		x.sum += find(pid).id
	}
	return float64(time.Since(start))
}

func (x *indexRig) reportMemory(b *testing.B) {
	report := func(name string, bytes int64) { b.ReportMetric(float64(bytes)/float64(x.n), name) }
	report("index-B", x.indexBytes)
	report("map-B", x.mapBytes)
	full := heapInUse()
	for pid := range int64(x.n) {
		if pid%100 != 0 {
			x.index.remove(x.index.hash(pid), uint32(pid), x.hashOf)
		}
	}
	report("index-left-B", x.indexBytes-(full-heapInUse()))
	full = heapInUse()
	for pid := range int64(x.n) {
		if pid%100 != 0 {
			delete(x.byID, pid)
		}
	}
	report("map-left-B", x.mapBytes-(full-heapInUse()))
	runtime.KeepAlive(x)
}
