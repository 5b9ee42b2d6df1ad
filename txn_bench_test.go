package idempotence

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
)

// This file measures the promises of the package's cost that are about transactions, as
// bench_test.go does the others.

// BenchmarkTxnCost measures a batch and a marker as ratios, in turns of a thousand and as
// the median of all turns: inside-x is Check and Commit of a batch inside an open
// transaction to the same without one, opening-x that of a batch that opens one, commit-x
// and abort-x CheckMarker and CommitMarker.
func BenchmarkTxnCost(b *testing.B) {
	for _, n := range []int{1000, 100_000} {
		b.Run(fmt.Sprintf("producers=%d", n), func(b *testing.B) {
			c := newTxnCost(n)
			var plains, inside, opening, commit, abort []float64
			b.ResetTimer()
			for done := 0; done < b.N; done += costTurn {
				plain := c.time(c.plain, c.batches)
				plains = append(plains, plain/costTurn)
				inside = append(inside, c.time(c.inside, c.batches)/plain)
				pids := c.choose(c.idle)
				opening = append(opening, timeOf(c.batches, pids, c.idle)/plain)
				if end := timeOf(c.markers, pids, c.idle) / plain; c.commits {
					commit = append(commit, end)
				} else {
					abort = append(abort, end)
				}
				c.commits = !c.commits
				c.m.LastStableOffset(c.offset)
				c.m.AdvanceStart(c.offset - 20*costTurn)
			}
			b.ReportMetric(median(plains), "plain-ns")
			b.ReportMetric(median(inside), "inside-x")
			b.ReportMetric(median(opening), "opening-x")
			b.ReportMetric(median(append(commit, math.Inf(1))), "commit-x")
			b.ReportMetric(median(append(abort, math.Inf(1))), "abort-x")
		})
	}
}

// txnCost is a manager with as many producers without a transaction as inside one, and
// as many that begin and end one in each turn.
type txnCost struct {
	m                   *ProducerStateManager
	plain, inside, idle *txnKind
	offset              int64
	commits             bool
}

// txnKind is producers that do the same.
type txnKind struct {
	first int64
	seqs  []int32
	txn   bool
}

func newTxnCost(n int) *txnCost {
	c := &txnCost{m: New(Config{})}
	kind := func(i int, txn bool) *txnKind { return &txnKind{first: int64(i * n), seqs: make([]int32, n), txn: txn} }
	c.plain, c.inside, c.idle = kind(0, false), kind(1, true), kind(2, true)
	for range WindowSize {
		for _, k := range []*txnKind{c.plain, c.inside, c.idle} {
			k.txn = k == c.inside
			all := make([]int64, n)
			for i := range all {
				all[i] = int64(i)
			}
			c.batches(all, k)
		}
	}
	c.idle.txn = true
	return c
}

// choose chooses the producers of a turn, each once.
func (c *txnCost) choose(k *txnKind) []int64 {
	n := len(k.seqs)
	at, step := rand.IntN(n), 7919%n // a prime, so that no neighbours follow
	pids := make([]int64, costTurn)
	for i := range pids {
		pids[i] = int64((at + i*step) % n)
	}
	return pids
}

func (c *txnCost) time(k *txnKind, do func([]int64, *txnKind)) float64 {
	return timeOf(do, c.choose(k), k)
}

func timeOf(do func([]int64, *txnKind), pids []int64, k *txnKind) float64 {
	start := time.Now()
	do(pids, k)
	return float64(time.Since(start))
}

func (c *txnCost) batches(pids []int64, k *txnKind) {
	for _, i := range pids {
		batch := Batch{ProducerID: k.first + i, BaseSequence: k.seqs[i], Count: 1, Transactional: k.txn}
		if _, err := c.m.CheckBatch(batch); err != nil {
			panic(err)
		}
		if err := c.m.CommitBatch(batch, c.offset); err != nil {
			panic(err)
		}
		k.seqs[i]++
		c.offset++
	}
}

func (c *txnCost) markers(pids []int64, k *txnKind) {
	for _, i := range pids {
		marker := Marker{ProducerID: k.first + i, Commit: c.commits}
		if err := c.m.CheckMarker(marker); err != nil {
			panic(err)
		}
		if err := c.m.CommitMarker(marker, c.offset); err != nil {
			panic(err)
		}
		c.offset++
	}
}

// BenchmarkLastStableOffset is a call with nothing in flight.
func BenchmarkLastStableOffset(b *testing.B) {
	for _, n := range []int64{1, 100_000} {
		b.Run(fmt.Sprintf("open=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			m := withOpen(n)
			b.ResetTimer()
			for range b.N {
				m.LastStableOffset(n)
			}
		})
	}
}

// withOpen returns a manager with n open transactions.
func withOpen(n int64) *ProducerStateManager {
	m := New(Config{})
	for pid := range n {
		if err := m.CommitBatch(Batch{ProducerID: pid, Count: 1, Transactional: true}, pid); err != nil {
			panic(err)
		}
	}
	return m
}

// BenchmarkEndOpen ends open transactions one after the other, asking for the last stable
// offset each time, and reports what one takes. The order must not matter, and neither
// must their number, but for the cache.
func BenchmarkEndOpen(b *testing.B) {
	orders := map[string]func(i, n int64) int64{
		"oldest first": func(i, _ int64) int64 { return i },
		"newest first": func(i, n int64) int64 { return n - 1 - i },
		"any order":    func(i, n int64) int64 { return i * 7919 % n },
	}
	for _, n := range []int64{1000, 10_000, 100_000} {
		for _, name := range []string{"oldest first", "newest first", "any order"} {
			b.Run(fmt.Sprintf("open=%d/%s", n, name), func(b *testing.B) {
				var took time.Duration
				ended := int64(0)
				for ended < int64(b.N) || ended == 0 {
					m := withOpen(n)
					m.LastStableOffset(0)
					start := time.Now()
					for i := range n {
						if err := m.CommitMarker(Marker{ProducerID: orders[name](i, n), Commit: true}, n+i); err != nil {
							b.Fatal(err)
						}
						m.LastStableOffset(n)
					}
					took += time.Since(start)
					ended += n
				}
				b.ReportMetric(float64(took)/float64(ended), "ns/marker")
			})
		}
	}
}

// BenchmarkAbortedTransactions asks among a million ranges for none, for one, and for one
// behind a transaction that was open across all of them.
func BenchmarkAbortedTransactions(b *testing.B) {
	const n = 1_000_000
	m := New(Config{})
	for i := range int64(n) {
		abortAt(m, 31, int32(i), 3*i, 3*i+1) // and a record without a producer id at 3*i+2
	}
	across := New(Config{})
	for i := range int64(n) {
		if i == 0 {
			open := Batch{ProducerID: 32, Count: 1, Transactional: true}
			if err := across.CommitBatch(open, 0); err != nil {
				b.Fatal(err)
			}
		}
		abortAt(across, 31, int32(i), 3*i+1, 3*i+2)
	}
	if err := across.CommitMarker(Marker{ProducerID: 32}, 3*n); err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		m     *ProducerStateManager
		at    int64 // of the million, from where on
		found int
	}{
		{"none", m, 2, 0}, {"one", m, 1, 1}, {"one across all", across, 0, 1}, {"two across all", across, 1, 2},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			from := int64(0)
			for range b.N {
				at := 3*(from%n) + c.at
				if got, err := c.m.AbortedTransactions(at, at+1); err != nil || len(got) != c.found {
					b.Fatal(at, got, err)
				}
				from += 77_777
			}
		})
	}
	b.Run("memory", func(b *testing.B) {
		small := New(Config{})
		abortAt(small, 31, 0, 0, 1)
		before := heapInUse()
		for i := int64(1); i <= n; i++ {
			abortAt(small, 31, int32(i), 2*i, 2*i+1)
		}
		b.ReportMetric(float64(heapInUse()-before)/n, "B/range")
		runtime.KeepAlive(small)
	})
}

// abortAt is a transaction of one record, and its marker.
func abortAt(m *ProducerStateManager, pid int64, seq int32, first, marker int64) {
	if err := m.CommitBatch(Batch{ProducerID: pid, BaseSequence: seq, Count: 1, Transactional: true}, first); err != nil {
		panic(err)
	}
	if err := m.CommitMarker(Marker{ProducerID: pid}, marker); err != nil {
		panic(err)
	}
}
