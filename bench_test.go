package idempotence

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
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
		runtime.KeepAlive(sum)
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
	})
}
