package idempotence

// This file reads the header of an Apache Kafka record batch of format v2, the
// 61 bytes in front of its records. All integers are big-endian:
//
//	 0       8        12       16      17    21           23
//	+-------+--------+--------+-------+-----+------------+-------------------+
//	| base  | batch  | leader | magic | CRC | attributes | last offset delta |
//	| offset| length | epoch  | (2)   |     |            |                   |
//	+-------+--------+--------+-------+-----+------------+-------------------+
//	 27          35          43       51       53         57        61
//	+-----------+-----------+--------+--------+----------+---------+---------
//	| base      | max       | prod.  | prod.  | base     | record  | records
//	| timestamp | timestamp | id     | epoch  | sequence | count   | ...
//	+-----------+-----------+--------+--------+----------+---------+---------
//
// The batch length counts the bytes that follow it. The CRC is a CRC-32C of
// everything from the attributes to the end of the batch, so base offset,
// batch length, leader epoch and magic are not covered by it.

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
)

// BatchHeaderSize is the number of bytes [ParseBatch] needs: the size of a v2
// record batch without records.
const BatchHeaderSize = 61

// Where the fields of a record batch are. The first four, and the magic, are
// in the same place in the older formats.
const (
	baseOffsetAt      = 0
	batchLengthAt     = 8
	leaderEpochAt     = 12
	magicAt           = 16
	crcAt             = 17
	attributesAt      = 21
	lastOffsetDeltaAt = 23
	baseTimestampAt   = 27
	maxTimestampAt    = 35
	producerIDAt      = 43
	producerEpochAt   = 51
	baseSequenceAt    = 53
	recordCountAt     = 57

	// batchLengthEnd is what the batch length does not count.
	batchLengthEnd = 12

	magicV2 = 2
)

// castagnoli is read only: the table of CRC-32C, which the standard library
// computes once and shares.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Returned when the bytes of a record batch are read.
var (
	// ErrCorruptBatch: the bytes cannot be the header of a record batch, or the
	// batch is cut short, or its checksum is wrong. Nothing in it can be
	// trusted, so the broker must not append it; it answers 2 CORRUPT_MESSAGE,
	// and the producer sends the batch again.
	ErrCorruptBatch error = &reason{text: "corrupt record batch", code: codeCorruptMessage}

	// ErrUnsupportedMagic: the batch is not of format v2. The older formats
	// have no producer id, so there is nothing to deduplicate; a newer one
	// cannot be read. The broker answers 87 INVALID_RECORD, as Kafka does from
	// version 3 of the produce request on (ProduceRequest.validateRecords).
	ErrUnsupportedMagic error = &reason{text: "unsupported record batch format", code: codeInvalidRecord}
)

// BatchHeader is what the header of a v2 record batch says beyond the
// [Batch] itself.
type BatchHeader struct {
	BaseOffset           int64 // offset of the first record; producers send 0
	LastOffsetDelta      int32 // last offset less base offset, 0 to 2147483646
	Size                 int   // bytes of the whole batch, header included, at least 61
	PartitionLeaderEpoch int32
	CRC                  uint32 // CRC-32C as stored; see VerifyCRC
	Attributes           BatchAttributes
	BaseTimestamp        int64 // milliseconds since 1970; see Attributes.DeleteHorizon
	MaxTimestamp         int64 // milliseconds since 1970, -1 where there is none

	// Records is the number of records left in the batch, at least 0.
	// Compaction lowers it, down to an empty batch, and leaves LastOffsetDelta
	// alone, so it says nothing about sequences. In a batch fresh from a
	// producer it equals Batch.Count; a produce handler refuses one in which it
	// does not.
	Records int32
}

// BatchAttributes are the attribute bits of a record batch.
type BatchAttributes int16

// Compression returns the codec of the records: 0 none, 1 gzip, 2 snappy,
// 3 LZ4, 4 zstd; 5 to 7 are not assigned.
func (a BatchAttributes) Compression() int { return int(a & 0x7) }

// LogAppendTime reports whether the timestamps were set by the broker at append
// rather than by the producer.
func (a BatchAttributes) LogAppendTime() bool { return a&0x08 != 0 }

// Transactional reports whether the batch is part of a transaction, or ends
// one.
func (a BatchAttributes) Transactional() bool { return a&0x10 != 0 }

// Control reports whether the batch holds a control record, such as the marker
// that ends a transaction, instead of data. Brokers write these; a produce
// handler refuses one that comes from a client. It has no sequence, so it is
// neither checked nor committed as a batch.
func (a BatchAttributes) Control() bool { return a&0x20 != 0 }

// DeleteHorizon reports whether compaction has put the time from which
// tombstones and markers may go into BaseTimestamp.
func (a BatchAttributes) DeleteHorizon() bool { return a&0x40 != 0 }

// LastOffset returns the offset of the last record of the batch as it was
// produced, whether or not compaction has removed that record.
func (h BatchHeader) LastOffset() int64 { return h.BaseOffset + int64(h.LastOffsetDelta) }

// VerifyCRC checks the batch that begins at p[0], whose header h is, against
// its checksum. Bytes of p after the batch are not looked at, so that a message
// set can be walked by slicing off h.Size bytes at a time. The error is
// [ErrCorruptBatch], also where p holds less than the whole batch.
//
// It reads every byte of the batch; [ParseBatch] reads 61.
func (h BatchHeader) VerifyCRC(p []byte) error {
	if h.Size < BatchHeaderSize || len(p) < h.Size {
		return fmt.Errorf("%w: %d bytes of a batch of %d", ErrCorruptBatch, len(p), h.Size)
	}
	if sum := crc32.Checksum(p[attributesAt:h.Size], castagnoli); sum != h.CRC {
		return fmt.Errorf("%w: CRC-32C is %08x, the header says %08x", ErrCorruptBatch, sum, h.CRC)
	}
	return nil
}

// ParseBatch reads the header of the v2 record batch that begins at p[0], as a
// produce request or a log segment has it: the [Batch] to hand to
// [ProducerStateManager.CheckBatch] and the rest of the header. It needs the
// first [BatchHeaderSize] bytes of the batch and looks at no others; the
// records, compressed or not, need not be there yet.
//
// Batch.Count is the last offset delta plus one, the number of sequences the
// batch takes up, also where compaction has since removed records. Producer id,
// epoch and base sequence are passed on as they are: to judge them is the
// manager's task. A batch without a producer id has -1 in all three.
//
// The error is [ErrUnsupportedMagic] for another format than v2 and
// [ErrCorruptBatch] where there are too few bytes, or where a length, an
// offset or a count is out of range. What it does not check is the checksum,
// see [BatchHeader.VerifyCRC]. It does not allocate unless it fails, and may be
// called concurrently.
func ParseBatch(p []byte) (Batch, BatchHeader, error) {
	if len(p) > magicAt && p[magicAt] != magicV2 {
		return Batch{}, BatchHeader{}, fmt.Errorf("%w: magic %d, want %d",
			ErrUnsupportedMagic, int8(p[magicAt]), magicV2)
	}
	if len(p) < BatchHeaderSize {
		return Batch{}, BatchHeader{}, fmt.Errorf("%w: %d bytes of a header of %d",
			ErrCorruptBatch, len(p), BatchHeaderSize)
	}
	b, h := decodeBatchHeader(p)
	if err := h.validate(); err != nil {
		return Batch{}, BatchHeader{}, fmt.Errorf("%w: %w", ErrCorruptBatch, err)
	}
	return b, h, nil
}

// decodeBatchHeader reads the fields of a v2 header. It requires at least
// BatchHeaderSize bytes and judges nothing: where validate refuses the
// header, Count and Size mean nothing.
func decodeBatchHeader(p []byte) (Batch, BatchHeader) {
	p = p[:BatchHeaderSize]
	h := BatchHeader{
		BaseOffset:           int64At(p, baseOffsetAt),
		LastOffsetDelta:      int32At(p, lastOffsetDeltaAt),
		Size:                 int(batchSize(p)),
		PartitionLeaderEpoch: int32At(p, leaderEpochAt),
		CRC:                  binary.BigEndian.Uint32(p[crcAt:]),
		Attributes:           BatchAttributes(int16At(p, attributesAt)),
		BaseTimestamp:        int64At(p, baseTimestampAt),
		MaxTimestamp:         int64At(p, maxTimestampAt),
		Records:              int32At(p, recordCountAt),
	}
	b := Batch{
		ProducerID:    int64At(p, producerIDAt),
		Epoch:         int16At(p, producerEpochAt),
		BaseSequence:  int32At(p, baseSequenceAt),
		Count:         h.LastOffsetDelta + 1,
		Transactional: h.Attributes.Transactional(),
	}
	return b, h
}

// validate tells a header that can be true from one that cannot. The error
// names the field; it is for the caller to say what it was the header of.
func (h *BatchHeader) validate() error {
	if err := validateSize(int64(h.Size), BatchHeaderSize); err != nil {
		return err
	}
	// The largest delta is one lower than its type allows, so that the count is
	// an int32 too.
	if h.LastOffsetDelta < 0 || h.LastOffsetDelta == math.MaxInt32 {
		return fmt.Errorf("last offset delta %d, want 0 to %d", h.LastOffsetDelta, math.MaxInt32-1)
	}
	if h.Records < 0 {
		return fmt.Errorf("record count %d, want 0 or more", h.Records)
	}
	return validateOffset(h.BaseOffset, h.LastOffsetDelta)
}

// validateSize checks the size of a batch or message of any format, its length
// field included. Kafka keeps this size in an int32, and so nothing it has
// written is larger; it also makes the size fit an int everywhere.
func validateSize(size, least int64) error {
	if size < least || size > math.MaxInt32 {
		return fmt.Errorf("batch length %d, want %d to %d",
			size-batchLengthEnd, least-batchLengthEnd, math.MaxInt32-batchLengthEnd)
	}
	return nil
}

// validateOffset checks that the offset after the last one of a batch exists.
func validateOffset(base int64, delta int32) error {
	if base < 0 || base >= math.MaxInt64-int64(delta) {
		return fmt.Errorf("base offset %d with last offset delta %d", base, delta)
	}
	return nil
}

// batchSize returns the size of the batch or message that begins at p[0], of
// any format, its length field included.
func batchSize(p []byte) int64 { return int64(int32At(p, batchLengthAt)) + batchLengthEnd }

func int16At(p []byte, i int) int16 { return int16(binary.BigEndian.Uint16(p[i:])) }
func int32At(p []byte, i int) int32 { return int32(binary.BigEndian.Uint32(p[i:])) }
func int64At(p []byte, i int) int64 { return int64(binary.BigEndian.Uint64(p[i:])) }
