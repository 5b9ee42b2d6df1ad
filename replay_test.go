package idempotence

import (
	"bytes"
	"hash/crc32"
	"testing"
	"time"
)

// segmentOf returns a segment of batches of 1 KiB each, of the given number of
// producers in turn.
func segmentOf(batches, producers int) []byte {
	var log []byte
	for i := range batches {
		b := testBatch{base: int64(i) * 10, delta: 9, records: 10, pid: int64(i % producers), seq: int32(i / producers * 10)}
		b.payload = bytes.Repeat([]byte{byte(i), byte(i >> 8), 31}, 321)
		log = append(log, b.encode()...)
	}
	return log
}

// BenchmarkReplayLog reports as x-of-crc how fast a segment of batches of 1 KiB
// is replayed, as a part of the speed of nothing but a CRC-32C over the same
// bytes, measured in turn with it.
func BenchmarkReplayLog(b *testing.B) {
	log := segmentOf(32<<10, 1000)
	b.ReportAllocs()
	b.ResetTimer()
	var replay, crc time.Duration
	for range b.N {
		start := time.Now()
		if _, err := New(Config{}).ReplayLog(bytes.NewReader(log)); err != nil {
			b.Fatal(err)
		}
		replay += time.Since(start)
		start = time.Now()
		crc32.Checksum(log, castagnoli)
		crc += time.Since(start)
	}
	b.ReportMetric(crc.Seconds()/replay.Seconds(), "x-of-crc")
}

// BenchmarkReplay reports how many batches a second are replayed from their
// headers alone, and as x-of-commit the cost of one as a multiple of the cost of
// a Commit, measured in turn with it on the same state.
func BenchmarkReplay(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		m, order := full(n)
		offset, seq := m.EndOffset(), int32(WindowSize)
		round := func(apply func(Batch, int64) error) time.Duration {
			start := time.Now()
			for done := 0; done < max(n, 1000); done += n {
				for _, pid := range order {
					if err := apply(Batch{ProducerID: pid, BaseSequence: seq, Count: 1}, offset); err != nil {
						b.Fatal(err)
					}
					offset++
				}
				seq = nextSequence(seq)
			}
			return time.Since(start)
		}
		var replay, commit time.Duration
		b.ResetTimer()
		for done := 0; done < b.N; done += max(n, 1000) {
			replay += round(m.Replay)
			b.StopTimer()
			commit += round(m.CommitBatch)
			b.StartTimer()
		}
		batches := (b.N + max(n, 1000) - 1) / max(n, 1000) * max(n, 1000)
		b.ReportMetric(float64(batches)/replay.Seconds(), "batches/s")
		b.ReportMetric(replay.Seconds()/commit.Seconds(), "x-of-commit")
	})
}
