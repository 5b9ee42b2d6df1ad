package idempotence

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
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
