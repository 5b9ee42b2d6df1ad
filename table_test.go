package idempotence

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file holds the table and its index against a built-in map. The epoch of a row
// stands for all its fields.

// tableRig is a table, the map that it must equal, and copies taken meanwhile.
type tableRig struct {
	t      rapid.TB
	table  table
	want   map[int64]int16
	copies []tableCopy
}

// tableCopy is a frozen table and the map that it must go on to equal.
type tableCopy struct {
	frozen frozen
	want   map[int64]int16
}

func newTableRig(t rapid.TB) *tableRig {
	return &tableRig{t: t, table: newTable(), want: map[int64]int16{}}
}

// put writes an epoch to a producer's row, and inserts the row if there is none.
func (r *tableRig) put(pid int64, epoch int16) {
	p := r.table.find(pid)
	if _, known := r.want[pid]; known != (p != nil) {
		r.t.Fatalf("find(%d): %v, and the map has it: %t", pid, p, known)
	}
	if p == nil {
		p, _ = r.table.insert(pid)
	} else {
		p, _ = r.table.edit(pid)
	}
	p.epoch = epoch
	r.want[pid] = epoch
}

func (r *tableRig) remove(pid int64) {
	if r.table.find(pid) == nil {
		return
	}
	_, row := r.table.edit(pid)
	r.table.remove(row)
	delete(r.want, pid)
}

func (r *tableRig) freeze() {
	r.copies = append(r.copies, tableCopy{r.table.freeze(), maps.Clone(r.want)})
}

// verify compares the table with the map, and every copy with the map of its moment.
func (r *tableRig) verify() {
	r.t.Helper()
	if err := auditTable(&r.table); err != nil {
		r.t.Fatalf("the table is unsound: %v", err)
	}
	if int(r.table.rows) != len(r.want) {
		r.t.Fatalf("%d rows, want %d", r.table.rows, len(r.want))
	}
	for pid, epoch := range r.want {
		if p := r.table.find(pid); p == nil || p.epoch != epoch {
			r.t.Fatalf("find(%d): %+v, want epoch %d", pid, p, epoch)
		}
	}
	for i, c := range r.copies {
		got := map[int64]int16{}
		var ids []int64
		for _, r := range c.frozen.byID() {
			p := c.frozen.at(r.row)
			ids = append(ids, p.id)
			got[p.id] = p.epoch
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			r.t.Fatalf("copy %d has changed (-want +got):\n%s", i, diff)
		}
		if !slices.IsSorted(ids) {
			r.t.Fatalf("copy %d is not in the order of ids: %v", i, ids)
		}
	}
}

// TestTableAgainstMap: after any inserts, writes, removals and freezes, the table
// holds what a map holds, and no copy has changed.
func TestTableAgainstMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newTableRig(t)
		pids := rapid.OneOf(rapid.Int64Range(0, 300), rapid.Int64Range(math.MaxInt64-3, math.MaxInt64))
		epochs := rapid.Int16Range(0, math.MaxInt16)
		t.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { r.verify() },
			"put": func(t *rapid.T) {
				r.put(pids.Draw(t, "pid"), epochs.Draw(t, "epoch"))
			},
			"put many": func(t *rapid.T) {
				first := pids.Draw(t, "first")
				for pid := first; pid < first+80 && pid > 0; pid++ {
					r.put(pid, int16(pid%math.MaxInt16))
				}
			},
			"remove": func(t *rapid.T) { r.remove(pids.Draw(t, "pid")) },
			"remove many": func(t *rapid.T) {
				first := pids.Draw(t, "first")
				for pid := first; pid < first+80 && pid > 0; pid++ {
					r.remove(pid)
				}
			},
			"freeze": func(t *rapid.T) {
				if len(r.copies) < 8 {
					r.freeze()
				}
			},
		})
	})
}

// TestTableGrowsAndShrinks: up to tens of thousands of producers and down to none,
// the index splits and joins its buckets soundly, and gives its memory back.
func TestTableGrowsAndShrinks(t *testing.T) {
	const n = 40_000
	for name, pid := range map[string]func(int) int64{
		"consecutive ids": func(i int) int64 { return int64(i) },
		"ids far apart":   func(i int) int64 { return int64(i) << 20 },
		"random ids":      func(i int) int64 { return int64(rand.New(rand.NewPCG(1, uint64(i))).Uint64() >> 1) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newTableRig(t)
			for i := range n {
				r.put(pid(i), 1)
				if i == n/2 {
					r.freeze()
				}
				if i%9973 == 0 {
					r.verify()
				}
			}
			r.verify()
			slots, directory := r.size()
			if depth := r.table.index.depth; depth < 6 || depth > 10 {
				t.Errorf("%d producers make a directory of depth %d", n, depth)
			}
			if slots > 4*n {
				t.Errorf("%d producers take %d slots", n, slots)
			}
			for i, at := range rand.New(rand.NewPCG(1, 2)).Perm(n) {
				r.remove(pid(at))
				if i%9973 == 0 {
					r.verify()
				}
			}
			r.verify()
			if slots, _ := r.size(); slots > groupSlots || len(r.table.pages) != 0 {
				t.Errorf("empty again, the table keeps %d slots and %d pages", slots, len(r.table.pages))
			}
			if len(r.table.index.dir) != 1 {
				t.Errorf("empty again, the directory has %d entries, and had %d", len(r.table.index.dir), directory)
			}
			r.put(7, 7)
			r.verify()
		})
	}
}

// size returns how many slots the index has, and how many directory entries.
func (r *tableRig) size() (slots, directory int) {
	buckets := map[*bucket]bool{}
	for _, b := range r.table.index.dir {
		if !buckets[b] {
			slots += len(b.groups) * groupSlots
		}
		buckets[b] = true
	}
	return slots, len(r.table.index.dir)
}

// TestTableToAndFro: a number of producers that rises and falls about the mark at
// which a bucket is split does not split and join it at every step.
func TestTableToAndFro(t *testing.T) {
	const mark = maxGroups * (groupSlots - 1)
	r := newTableRig(t)
	for i := range int64(mark + 10) {
		r.put(i, 1)
	}
	before := slices.Clone(r.table.index.dir)
	if len(before) < 2 {
		t.Fatalf("%d producers make no split", mark+10)
	}
	for range 20 {
		for i := int64(mark - 10); i < mark+10; i++ {
			r.remove(i)
		}
		for i := int64(mark - 10); i < mark+10; i++ {
			r.put(i, 1)
		}
		r.verify()
	}
	if !slices.Equal(before, r.table.index.dir) {
		t.Error("the buckets were split or joined meanwhile")
	}
}

// TestManyManagers: an empty manager takes less than 512 bytes, and the first
// producers add in proportion.
func TestManyManagers(t *testing.T) {
	const n = 2000
	for _, tt := range []struct{ producers, most int }{{0, 512}, {1, 1024}, {8, 4096}} {
		t.Run(fmt.Sprintf("producers=%d", tt.producers), func(t *testing.T) {
			managers := make([]*ProducerStateManager, n)
			before := heapInUse()
			for i := range managers {
				managers[i] = New(Config{})
				for pid := range int64(tt.producers) {
					if err := managers[i].Commit(pid, 0, 0, 1, pid); err != nil {
						t.Fatal(err)
					}
				}
			}
			if each := (int(heapInUse() - before)) / n; each >= tt.most {
				t.Errorf("a manager of %d producers takes %d bytes, want less than %d", tt.producers, each, tt.most)
			}
			if managers[n-1].Len() != tt.producers {
				t.Error("the last manager is not full")
			}
		})
	}
}

// TestReindex_NoFalseTwin: a table without a producer that is there twice is
// indexed whatever the seed of the hash. (A search may come across a free slot,
// which has row 0; that is not a second copy of the producer in row 0.)
func TestReindex_NoFalseTwin(t *testing.T) {
	for seed := range uint64(50_000) {
		table := newTable()
		table.index.seed = [2]uint64{seed * 0x9e3779b97f4a7c15, seed<<1 | 1}
		for id := range int64(6) {
			table.append(id)
		}
		if twice := table.reindex(); twice != nil {
			t.Fatalf("seed %d: producer %d is said to be there twice", seed, twice.id)
		}
	}
}

// TestRowHasNoPointer: a row is two cache lines and has no pointer, and neither has a
// group of the index, so to the garbage collector a million producers are some
// thousands of objects that it does not scan.
func TestRowHasNoPointer(t *testing.T) {
	if size := reflect.TypeFor[producer]().Size(); size != 128 {
		t.Errorf("a row takes %d bytes, want 128", size)
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[producer](), reflect.TypeFor[group](), reflect.TypeFor[tick]()} {
		if path := pointerIn(typ); path != "" {
			t.Errorf("there is a pointer in %s", path)
		}
	}
	if pointerIn(reflect.TypeFor[inFlightBatch]()) == "" {
		t.Error("the channel in flight is not found")
	}
}

// pointerIn returns where in a type there is something that is not a plain
// number, or "".
func pointerIn(typ reflect.Type) string {
	switch typ.Kind() {
	case reflect.Array:
		return pointerIn(typ.Elem())
	case reflect.Struct:
		for i := range typ.NumField() {
			if path := pointerIn(typ.Field(i).Type); path != "" {
				return typ.Name() + "." + typ.Field(i).Name + " " + path
			}
		}
		return ""
	}
	if typ.Kind() >= reflect.Bool && typ.Kind() <= reflect.Complex128 && typ.Kind() != reflect.Uintptr {
		return ""
	}
	return typ.String()
}

// TestMemoryPerProducer: a producer with a full window takes at most 160 bytes,
// everything included. (BenchmarkMemory measures a million.)
func TestMemoryPerProducer(t *testing.T) {
	const many, most = 100_000, 160
	before := heapNow()
	m, _ := full(many)
	if n := float64(heapNow()-before) / many; n > most {
		t.Errorf("%.1f bytes a producer, want at most %d", n, most)
	}
	runtime.KeepAlive(m)
}

// A free slot is row 0 to a search by tags alone. The
// producer in row 0 must not be taken for a second one because of that, or an
// intact snapshot is refused as corrupt, with some seeds and not with others.
// The seed is searched for which puts both producers' tags at 1, next to that
// of a free slot, and the producer of row 0 behind the other one.
func TestIntactSnapshotIsNotRefusedForAnySeed(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for {
		table := table{index: index{seed: [2]uint64{rng.Uint64(), rng.Uint64() | 1}}}
		table.append(7)
		table.append(8)
		first, second := table.hashOf(0), table.hashOf(1)
		if tagOf(first) != 1 || tagOf(second) != 1 || second>>56 >= first>>56 {
			continue
		}
		if twice := table.reindex(); twice != nil {
			t.Errorf("seed %#x: producer %d is there twice among 7 and 8", table.index.seed, twice.id)
		}
		return
	}
}
