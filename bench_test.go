package idempotence

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// This file measures the promises of the package's cost: what a batch costs as
// a ratio to a floor measured in the same run, and what a producer takes in
// memory.

var producerCounts = []int{1, 1000, 100_000, 1_000_000}

// full returns a manager with n producers of five remembered batches of one
// record each, and a random order of their ids.
func full(n int) (*ProducerStateManager, []int64) {
	m := New(Config{})
	offset := int64(0)
	for seq := range int32(WindowSize) {
		for pid := range int64(n) {
			if err := m.Commit(pid, 0, seq, 1, offset); err != nil {
				panic(err)
			}
			offset++
		}
	}
	return m, randomOrder(n)
}

func randomOrder(n int) []int64 {
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	order := make([]int64, n)
	for i, v := range rng.Perm(n) {
		order[i] = int64(v)
	}
	return order
}

// floor holds, for each number of producers, what BenchmarkFloor has measured
// in this process. It stands first in the file so that it is there for the
// others to be compared with.
var floor = map[int]*timing{}

type timing struct {
	took time.Duration
	n    int
}

// add takes in a run that has just ended. The testing package repeats a
// benchmark with a rising b.N; the short early runs weigh next to nothing.
func (t *timing) add(b *testing.B) {
	t.took += b.Elapsed()
	t.n += b.N
}

// perOp returns nanoseconds.
func (t *timing) perOp() float64 { return float64(t.took) / float64(t.n) }

// reportRatio reports the run that has just ended as a multiple of the floor
// for the same number of producers, where that has been measured too.
func reportRatio(b *testing.B, n int) {
	if f := floor[n]; f != nil {
		b.ReportMetric(float64(b.Elapsed())/float64(b.N)/f.perOp(), "x-floor")
	}
}

func forCounts(b *testing.B, run func(b *testing.B, n int)) {
	for _, n := range producerCounts {
		b.Run(fmt.Sprintf("producers=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			run(b, n)
		})
	}
}

// BenchmarkFloor is the least that Check and Commit could cost with a built-in
// map: two uncontended lock/unlock pairs and two look-ups.
func BenchmarkFloor(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		var mu sync.Mutex
		byID := make(map[int64]int32)
		for pid := range int64(n) {
			byID[pid] = int32(pid)
		}
		order := randomOrder(n)
		var sum int32
		b.ResetTimer()
		for i := range b.N {
			pid := order[i%n]
			for range 2 {
				mu.Lock()
				sum += byID[pid]
				mu.Unlock()
			}
		}
		b.StopTimer()
		runtime.KeepAlive(sum)
		if floor[n] == nil {
			floor[n] = &timing{}
		}
		floor[n].add(b)
	})
}

// BenchmarkCheckCommit is an accepted batch: Check, then Commit.
func BenchmarkCheckCommit(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		m, order := full(n)
		offset := m.EndOffset()
		seq := int32(WindowSize)
		b.ResetTimer()
		for i := range b.N {
			if i > 0 && i%n == 0 {
				seq = nextSequence(seq)
			}
			pid := order[i%n]
			if res, err := m.Check(pid, 0, seq, 1); err != nil || res.Verdict != Append {
				b.Fatal(res, err)
			}
			if err := m.Commit(pid, 0, seq, 1, offset); err != nil {
				b.Fatal(err)
			}
			offset++
		}
		b.StopTimer()
		reportRatio(b, n)
	})
}

// BenchmarkDuplicate is a retry of the oldest remembered batch.
func BenchmarkDuplicate(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		m, order := full(n)
		b.ResetTimer()
		for i := range b.N {
			if res, err := m.Check(order[i%n], 0, 0, 1); err != nil || res.Verdict != Duplicate {
				b.Fatal(res, err)
			}
		}
		b.StopTimer()
		reportRatio(b, n)
	})
}

// BenchmarkReserveCommit is an accepted batch by way of a reservation.
func BenchmarkReserveCommit(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		m, order := full(n)
		offset := m.EndOffset()
		seq := int32(WindowSize)
		b.ResetTimer()
		for i := range b.N {
			if i > 0 && i%n == 0 {
				seq = nextSequence(seq)
			}
			r, _, err := m.Reserve(Batch{ProducerID: order[i%n], BaseSequence: seq, Count: 1})
			if err != nil {
				b.Fatal(err)
			}
			if err := r.Commit(offset); err != nil {
				b.Fatal(err)
			}
			offset++
		}
	})
}

// BenchmarkRefusal is a gap, refused with all its facts.
func BenchmarkRefusal(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		m, order := full(n)
		b.ResetTimer()
		for i := range b.N {
			if _, err := m.Check(order[i%n], 0, WindowSize+1, 1); err == nil {
				b.Fatal("a gap was accepted")
			}
		}
	})
}

// BenchmarkContended is Check and Commit from all cores on one manager, each
// core with producers of its own. A broker holds its append lock over the two,
// and so does this.
func BenchmarkContended(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		m, _ := full(n)
		var appendLock sync.Mutex
		next := make([]int32, n)
		for i := range next {
			next[i] = WindowSize
		}
		offset := m.EndOffset()
		var worker atomic.Int64
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			rng := rand.New(rand.NewPCG(2, uint64(worker.Add(1))))
			for pb.Next() {
				pid := rng.Int64N(int64(n))
				appendLock.Lock()
				_, err := m.Check(pid, 0, next[pid], 1)
				if err == nil {
					err = m.Commit(pid, 0, next[pid], 1, offset)
				}
				if err != nil {
					panic(err)
				}
				next[pid] = nextSequence(next[pid])
				offset++
				appendLock.Unlock()
			}
		})
	})
}

// BenchmarkMemory reports the bytes of heap that a producer with a full window
// takes, everything included, and those of an empty manager.
func BenchmarkMemory(b *testing.B) {
	b.Run("empty", func(b *testing.B) {
		const managers = 10_000
		all := make([]*ProducerStateManager, managers)
		before := heapInUse()
		for i := range all {
			all[i] = New(Config{})
		}
		b.ReportMetric(float64(heapInUse()-before)/managers, "B/manager")
		runtime.KeepAlive(all)
	})
	b.Run("producers=1000000", func(b *testing.B) {
		before := heapInUse()
		m, _ := full(1_000_000)
		b.ReportMetric(float64(heapInUse()-before)/float64(m.Len()), "B/producer")
		runtime.KeepAlive(m)
	})
}

// heapInUse returns the bytes of live objects on the heap.
func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}

// BenchmarkCost measures the ratios that the package promises. It takes turns,
// a thousand operations of each kind, so that whatever else the machine does
// falls on all of them, and reports the median of the ratios of all turns:
// commit-x and duplicate-x to the floor, reserve-x to Check and Commit.
func BenchmarkCost(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		c := newCost(n)
		var commits, duplicates, reserves []float64
		b.ResetTimer()
		for done := 0; done < b.N; done += costTurn {
			c.next()
			floor := c.time(c.floor)
			commit := c.time(c.checkCommit)
			duplicates = append(duplicates, c.time(c.duplicate)/floor)
			reserve := c.time(c.reserveCommit)
			commits = append(commits, commit/floor)
			reserves = append(reserves, reserve/commit)
		}
		b.ReportMetric(median(commits), "commit-x")
		b.ReportMetric(median(duplicates), "duplicate-x")
		b.ReportMetric(median(reserves), "reserve-x")
	})
}

const costTurn = 1000

// cost is a manager and a map of the same producers, and where the turns are.
type cost struct {
	m      *ProducerStateManager
	mu     sync.Mutex
	byID   map[int64]int32
	pids   []int64 // all of them, in random order
	seqs   []int32 // the next sequence of each
	offset int64
	turn   []int64 // the producers of this turn
	sum    int32
}

func newCost(n int) *cost {
	c := &cost{byID: make(map[int64]int32, n), seqs: make([]int32, n)}
	c.m, c.pids = full(n)
	c.offset = c.m.EndOffset()
	for pid := range c.seqs {
		c.byID[int64(pid)] = int32(pid)
		c.seqs[pid] = WindowSize
	}
	return c
}

// next chooses other producers for each of the four kinds, so that none finds
// in the cache what the one before has read, unless there are too few for that.
func (c *cost) next() {
	c.turn = c.turn[:0]
	for range 4 * costTurn {
		c.turn = append(c.turn, c.pids[rand.IntN(len(c.pids))])
	}
}

// time returns what one kind takes for its part of the producers.
func (c *cost) time(kind func(pids []int64)) float64 {
	pids := c.turn[:costTurn]
	c.turn = c.turn[costTurn:]
	start := time.Now()
	kind(pids)
	return float64(time.Since(start))
}

func (c *cost) floor(pids []int64) {
	sum := int32(0)
	for _, pid := range pids {
		c.mu.Lock()
		sum += c.byID[pid]
		c.mu.Unlock()
		c.mu.Lock()
		sum += c.byID[pid]
		c.mu.Unlock()
	}
	c.sum += sum
}

func (c *cost) checkCommit(pids []int64) {
	offset, seqs := c.offset, c.seqs
	for _, pid := range pids {
		seq := seqs[pid]
		if _, err := c.m.Check(pid, 0, seq, 1); err != nil {
			panic(err)
		}
		if err := c.m.Commit(pid, 0, seq, 1, offset); err != nil {
			panic(err)
		}
		seqs[pid] = seq + 1
		offset++
	}
	c.offset = offset
}

func (c *cost) duplicate(pids []int64) {
	seqs := c.seqs
	for _, pid := range pids {
		if res, err := c.m.Check(pid, 0, seqs[pid]-WindowSize, 1); err != nil || res.Verdict != Duplicate {
			panic(fmt.Sprint(res, err))
		}
	}
}

func (c *cost) reserveCommit(pids []int64) {
	offset, seqs := c.offset, c.seqs
	for _, pid := range pids {
		seq := seqs[pid]
		r, _, err := c.m.Reserve(Batch{ProducerID: pid, BaseSequence: seq, Count: 1})
		if err != nil {
			panic(err)
		}
		if err := r.Commit(offset); err != nil {
			panic(err)
		}
		seqs[pid] = seq + 1
		offset++
	}
	c.offset = offset
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}
