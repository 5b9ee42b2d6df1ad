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

type nullSink struct{}

func (nullSink) replayBatch(b Batch, baseOffset int64) error { return nil }
func (nullSink) replayMarker(m Marker, offset int64) error   { return nil }
func (nullSink) skipTo(endOffset int64) error                { return nil }

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
		if _, err := readLog(bytes.NewReader(log), 0, nullSink{}); err != nil {
			b.Fatal(err)
		}
		replay += time.Since(start)
		start = time.Now()
		crc32.Checksum(log, castagnoli)
		crc += time.Since(start)
	}
	b.ReportMetric(crc.Seconds()/replay.Seconds(), "x-of-crc")
}
