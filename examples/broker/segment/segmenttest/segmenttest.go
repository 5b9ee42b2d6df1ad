// Package segmenttest makes record batches for tests.
package segmenttest

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// Batch returns an uncompressed batch as a producer sends it, with one record
// for each value. Its records bear the time 1000 milliseconds.
func Batch(producerID int64, epoch int16, baseSequence int32, values ...string) []byte {
	b := kmsg.RecordBatch{
		PartitionLeaderEpoch: -1,
		Magic:                2,
		LastOffsetDelta:      int32(len(values)) - 1,
		FirstTimestamp:       1000,
		MaxTimestamp:         1000,
		ProducerID:           producerID,
		ProducerEpoch:        epoch,
		FirstSequence:        baseSequence,
		NumRecords:           int32(len(values)),
	}
	for i, v := range values {
		r := kmsg.Record{OffsetDelta: int32(i), Value: []byte(v)}
		// The length of a record is the size of what follows it, which is
		// found out by encoding it once with a length that takes one byte.
		r.Length = int32(len(r.AppendTo(nil)) - 1)
		b.Records = r.AppendTo(b.Records)
	}
	return seal(b)
}

// Edit returns the batch with a change to it, and the length and checksum that
// the changed one has.
func Edit(p []byte, change func(*kmsg.RecordBatch)) []byte {
	var b kmsg.RecordBatch
	if err := b.ReadFrom(p); err != nil {
		panic(err)
	}
	change(&b)
	return seal(b)
}

func seal(b kmsg.RecordBatch) []byte {
	p := b.AppendTo(nil)
	binary.BigEndian.PutUint32(p[8:], uint32(len(p)-12))
	binary.BigEndian.PutUint32(p[17:], crc32.Checksum(p[21:], crc32.MakeTable(crc32.Castagnoli)))
	return p
}
