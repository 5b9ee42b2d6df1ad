package idempotence

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
)

// This file measures snapshots: how long they take compared with a copy and a
// checksum of their bytes, and how long they block commits.

// scattered returns a manager like full, with random producer ids and the last
// batches committed in a random order.
func scattered(n int) *ProducerStateManager {
	rng := rand.New(rand.NewPCG(3, uint64(n)))
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = rng.Int64()
	}
	m := New(Config{})
	offset := int64(0)
	for seq := range int32(WindowSize) {
		for _, i := range rng.Perm(n) {
			if err := m.Commit(ids[i], 0, seq, 1, offset); err != nil {
				panic(err)
			}
			offset++
		}
	}
	return m
}

// forSnapshots runs a benchmark with producers in order and in random order.
func forSnapshots(b *testing.B, run func(b *testing.B, m *ProducerStateManager)) {
	for _, n := range []int{1, 1000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("producers=%d", n), func(b *testing.B) {
			m, _ := full(n)
			run(b, m)
		})
		b.Run(fmt.Sprintf("producers=%d/ids=random", n), func(b *testing.B) {
			run(b, scattered(n))
		})
	}
}

// copyAndSum copies a snapshot and computes the CRC-32C of the copy. If dst is nil
// the copy is made in new memory, as a restored state is.
func copyAndSum(dst, src []byte) time.Duration {
	start := time.Now()
	if dst == nil {
		dst = bytes.Clone(src)
	} else {
		copy(dst, src)
	}
	crc32.Checksum(dst, castagnoli)
	return time.Since(start)
}

// besideFloor alternates body and copyAndSum. It reports the ratio of their medians
// as x-floor, and the size of the snapshot.
func besideFloor(b *testing.B, snapshot, dst []byte, producers int, body func()) {
	b.SetBytes(int64(len(snapshot)))
	b.ReportAllocs()
	copyAndSum(dst, snapshot)
	b.ResetTimer()
	var spent, floor []time.Duration
	for range b.N {
		b.StopTimer()
		floor = append(floor, copyAndSum(dst, snapshot))
		b.StartTimer()
		start := time.Now()
		body()
		spent = append(spent, time.Since(start))
	}
	b.ReportMetric(medianMillis(spent)/medianMillis(floor), "x-floor")
	b.ReportMetric(medianMillis(floor), "floor-ms")
	b.ReportMetric(float64(len(snapshot))/float64(producers), "B/producer")
}

// sliceWriter writes to memory of the right size, so that no buffer grows.
type sliceWriter struct{ free []byte }

func (w *sliceWriter) Write(p []byte) (int, error) {
	n := copy(w.free, p)
	w.free = w.free[n:]
	if n < len(p) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

func BenchmarkSnapshotWrite(b *testing.B) {
	forSnapshots(b, func(b *testing.B, m *ProducerStateManager) {
		snapshot := encoded(b, m)
		memory := make([]byte, len(snapshot))
		besideFloor(b, snapshot, make([]byte, len(snapshot)), m.Len(), func() {
			if _, err := m.Snapshot().WriteTo(&sliceWriter{memory}); err != nil {
				b.Fatal(err)
			}
		})
	})
}

func BenchmarkRestore(b *testing.B) {
	forSnapshots(b, func(b *testing.B, m *ProducerStateManager) {
		snapshot := encoded(b, m)
		producers := m.Len()
		besideFloor(b, snapshot, nil, producers, func() {
			n := New(Config{})
			if err := n.Restore(bytes.NewReader(snapshot)); err != nil || n.Len() != producers {
				b.Fatal(n.Len(), err)
			}
		})
	})
}

func BenchmarkWriteKafka(b *testing.B) {
	forSnapshots(b, func(b *testing.B, m *ProducerStateManager) {
		snapshot := inKafka(b, m)
		memory := make([]byte, len(snapshot))
		besideFloor(b, snapshot, make([]byte, len(snapshot)), m.Len(), func() {
			if _, err := m.Snapshot().WriteKafka(&sliceWriter{memory}); err != nil {
				b.Fatal(err)
			}
		})
	})
}

func BenchmarkRestoreKafka(b *testing.B) {
	forSnapshots(b, func(b *testing.B, m *ProducerStateManager) {
		snapshot := inKafka(b, m)
		producers, end := m.Len(), m.EndOffset()
		besideFloor(b, snapshot, nil, producers, func() {
			n := New(Config{})
			if err := n.RestoreKafka(bytes.NewReader(snapshot), end); err != nil || n.Len() != producers {
				b.Fatal(n.Len(), err)
			}
		})
	})
}

// BenchmarkStallSnapshot reports as max-ms the longest time of a Check and Commit
// while snapshots are taken and written, and as idle-max-ms the same without a
// snapshot, over as long a time. snapshot-ms is the time of Snapshot itself, which
// blocks commits.
func BenchmarkStallSnapshot(b *testing.B) {
	for _, n := range []int{100_000, 1_000_000} {
		b.Run(fmt.Sprintf("producers=%d", n), func(b *testing.B) {
			m, _ := full(n)
			runtime.GC()
			var during, quiet, took []time.Duration
			for range b.N {
				w := startWriter(m)
				start := time.Now()
				s := m.Snapshot()
				took = append(took, time.Since(start))
				if _, err := s.WriteTo(io.Discard); err != nil {
					b.Fatal(err)
				}
				spent := time.Since(start)
				during = append(during, w.stop())
				w = startWriter(m)
				time.Sleep(spent)
				quiet = append(quiet, w.stop())
			}
			b.ReportMetric(medianMillis(during), "max-ms")
			b.ReportMetric(medianMillis(quiet), "idle-max-ms")
			b.ReportMetric(medianMillis(took), "snapshot-ms")
		})
	}
}
