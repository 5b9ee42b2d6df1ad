package idempotence

// This file reads and stamps the header of an Apache Kafka record batch of
// format v2, the 61 bytes before its records, and reads the record of a
// transaction marker. All integers are big-endian:
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
// The batch length counts the bytes after it. The CRC is a CRC-32C of
// everything from the attributes to the end of the batch. It does not cover the
// base offset, the batch length, the leader epoch and the magic.

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
)

// BatchHeaderSize is the size in bytes of a v2 record batch without records,
// and the number of bytes that [ParseBatch] needs.
const BatchHeaderSize = 61

// Positions of the fields of a record batch. The older formats have base
// offset, batch length and magic in the same places.
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

	// batchLengthEnd is the number of bytes that the batch length does not count.
	batchLengthEnd = 12

	magicV2 = 2
)

// castagnoli is the table of CRC-32C. The standard library computes it once and
// shares it; it is read only.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// BatchHeader holds the fields of a v2 batch header that are not part of the
// [Batch].
type BatchHeader struct {
	BaseOffset           int64           // offset of the first record; producers send 0
	LastOffsetDelta      int32           // last offset minus base offset, 0 to 2147483646
	Size                 int             // bytes of the whole batch, header included, at least 61
	PartitionLeaderEpoch int32           // epoch of the leader that appended the batch, -1 if unknown
	CRC                  uint32          // CRC-32C as stored; see VerifyCRC
	Attributes           BatchAttributes // flags of the batch
	BaseTimestamp        int64           // milliseconds since 1970; see Attributes.DeleteHorizon
	MaxTimestamp         int64           // milliseconds since 1970, -1 if there is none

	// Records is the number of records in the batch, at least 0. Compaction
	// lowers it, down to 0, and leaves LastOffsetDelta as it was, so Records
	// says nothing about sequences. In a batch from a producer it equals
	// Batch.Count; a produce handler refuses a batch in which it does not.
	Records int32
}

// BatchAttributes are the attribute bits of a record batch.
type BatchAttributes int16

// Compression returns the codec of the records: 0 none, 1 gzip, 2 snappy,
// 3 LZ4, 4 zstd; 5 to 7 are not assigned.
func (a BatchAttributes) Compression() int { return int(a & 0x7) }

// LogAppendTime reports whether the broker, and not the producer, set the
// timestamps.
func (a BatchAttributes) LogAppendTime() bool { return a&0x08 != 0 }

// Transactional reports whether the batch belongs to a transaction. Markers do.
func (a BatchAttributes) Transactional() bool { return a&0x10 != 0 }

// Control reports whether the batch holds a control record, such as a
// transaction marker, and no data. Only brokers write control batches: a produce
// handler refuses one from a client. A control batch has no sequence, so it is
// not for Check and Commit; see [ParseMarker].
func (a BatchAttributes) Control() bool { return a&0x20 != 0 }

// DeleteHorizon reports whether BaseTimestamp is the time from which compaction
// may remove tombstones and markers.
func (a BatchAttributes) DeleteHorizon() bool { return a&0x40 != 0 }

// LastOffset returns the offset of the last record that the batch was produced
// with. Compaction may have removed the record.
func (h BatchHeader) LastOffset() int64 { return h.BaseOffset + int64(h.LastOffsetDelta) }

// VerifyCRC checks the batch that begins at p[0] against the checksum in its
// header h. It ignores the bytes of p after the batch, so a caller can walk a
// record set by slicing off h.Size bytes at a time. The error is
// [ErrCorruptBatch] if the checksum is wrong or p is shorter than the batch.
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

// ParseBatch reads the header of the v2 record batch that begins at p[0], as it
// is in a produce request or a log segment. It returns the [Batch] to give
// to [ProducerStateManager.CheckBatch], and the rest of the header. It needs the
// first [BatchHeaderSize] bytes of the batch and reads no others.
//
// Batch.Count is the last offset delta plus one: the number of sequences that
// the batch covers, whether or not compaction has removed records. Producer id,
// epoch and base sequence are returned as they are; the manager judges them. A
// batch without a producer id has -1 in all three.
//
// The error is [ErrUnsupportedMagic] for another format than v2, and
// [ErrCorruptBatch] if p is too short, or if the length, the base offset or a
// count is out of range. With an error, the producer id is [NoProducerID] and
// everything else is zero. ParseBatch does not verify the checksum; see
// [BatchHeader.VerifyCRC]. It allocates only for an error, and is safe for
// concurrent use.
func ParseBatch(p []byte) (Batch, BatchHeader, error) {
	if len(p) > magicAt && p[magicAt] != magicV2 {
		return noBatch(fmt.Errorf("%w: magic %d, want %d", ErrUnsupportedMagic, int8(p[magicAt]), magicV2))
	}
	if len(p) < BatchHeaderSize {
		return noBatch(fmt.Errorf("%w: %d bytes of a header of %d", ErrCorruptBatch, len(p), BatchHeaderSize))
	}
	b, h := decodeBatchHeader(p)
	if err := h.validate(); err != nil {
		return noBatch(fmt.Errorf("%w: %w", ErrCorruptBatch, err))
	}
	return b, h, nil
}

// noBatch returns err with a batch of no producer. The zero Batch would be one
// of producer 0, which a caller that ignores the error must not judge.
func noBatch(err error) (Batch, BatchHeader, error) {
	return Batch{ProducerID: NoProducerID}, BatchHeader{}, err
}

// ParseMarker reads the transaction marker in the v2 control batch that begins
// at p[0]. It returns the [Marker] to give to
// [ProducerStateManager.ReplayMarker], with the offset h.BaseOffset, and the
// header of the batch. It reads the header and the first record, and ignores
// every other record and byte of p.
//
// Producer id and epoch are returned as they are. CoordinatorEpoch is -1 and
// Commit is false if compaction has removed the record and kept the batch.
//
// The error is [ErrNotMarker] for a data batch and for a control batch of another
// type, and [ErrCorruptBatch] if the marker is incomplete or cannot be one;
// otherwise it is that of [ParseBatch]. With an error, the producer id is
// [NoProducerID] and everything else is zero. ParseMarker does not verify the
// checksum. It allocates only for an error, and is safe for concurrent use.
func ParseMarker(p []byte) (Marker, BatchHeader, error) {
	b, h, err := ParseBatch(p)
	if err != nil {
		return noMarker(err)
	}
	if !isMarkerBatch(&b, &h) {
		return noMarker(ErrNotMarker)
	}
	k, err := decodeMarker(&b, &h, p[BatchHeaderSize:min(h.Size, len(p))])
	switch {
	case err == ErrNotMarker:
		return noMarker(err)
	case err != nil:
		return noMarker(fmt.Errorf("%w: %w", ErrCorruptBatch, err))
	}
	return k, h, nil
}

// noMarker is noBatch for a marker.
func noMarker(err error) (Marker, BatchHeader, error) {
	return Marker{ProducerID: NoProducerID}, BatchHeader{}, err
}

// SetBaseOffset writes the offset that the log has given to the first record
// into the record batch that begins at p[0]. The checksum does not cover it. It
// panics if p is shorter than 8 bytes.
func SetBaseOffset(p []byte, baseOffset int64) {
	binary.BigEndian.PutUint64(p[baseOffsetAt:], uint64(baseOffset))
}

// SetPartitionLeaderEpoch writes the epoch of the leader that appends the batch
// into the v2 record batch that begins at p[0]. The checksum does not cover it.
// It panics if p is shorter than 16 bytes. The older formats have no such field:
// in them it would overwrite the checksum.
func SetPartitionLeaderEpoch(p []byte, epoch int32) {
	binary.BigEndian.PutUint32(p[leaderEpochAt:], uint32(epoch))
}

// decodeBatchHeader reads the fields of a v2 header. It requires at least
// BatchHeaderSize bytes and validates nothing: if validate refuses the header,
// Count and Size mean nothing.
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

// validate returns an error about the first field that is out of range.
func (h *BatchHeader) validate() error {
	if err := validateSize(int64(h.Size), BatchHeaderSize); err != nil {
		return err
	}
	// The largest delta is one below the largest int32, so that the count is an
	// int32 too.
	if h.LastOffsetDelta < 0 || h.LastOffsetDelta == math.MaxInt32 {
		return fmt.Errorf("last offset delta %d, want 0 to %d", h.LastOffsetDelta, math.MaxInt32-1)
	}
	if h.Records < 0 {
		return fmt.Errorf("record count %d, want 0 or more", h.Records)
	}
	return validateOffset(h.BaseOffset, h.LastOffsetDelta)
}

// validateSize checks the size of a batch or message of any format, from its
// first byte to its last. Kafka keeps this size in an int32, so it has written
// nothing larger; the limit also makes the size fit an int on every platform.
func validateSize(size, least int64) error {
	if size < least || size > math.MaxInt32 {
		return fmt.Errorf("batch length %d, want %d to %d",
			size-batchLengthEnd, least-batchLengthEnd, math.MaxInt32-batchLengthEnd)
	}
	return nil
}

// validateOffset checks that the offsets of a batch, and the one after the last,
// are in 0..math.MaxInt64.
func validateOffset(base int64, delta int32) error {
	if base < 0 || base >= math.MaxInt64-int64(delta) {
		return fmt.Errorf("base offset %d with last offset delta %d", base, delta)
	}
	return nil
}

// batchSize returns the size of the batch or message of any format that begins
// at p[0], from its first byte to its last.
func batchSize(p []byte) int64 { return int64(int32At(p, batchLengthAt)) + batchLengthEnd }

func int16At(p []byte, i int) int16 { return int16(binary.BigEndian.Uint16(p[i:])) }
func int32At(p []byte, i int) int32 { return int32(binary.BigEndian.Uint32(p[i:])) }
func int64At(p []byte, i int) int64 { return int64(binary.BigEndian.Uint64(p[i:])) }

// isMarkerBatch reports whether a batch is in the form of a transaction marker:
// a control batch in the name of a producer.
func isMarkerBatch(b *Batch, h *BatchHeader) bool {
	return h.Attributes.Control() && b.ProducerID >= 0
}

// Types of control records, as their keys have them. (Kafka's ControlRecordType.)
const (
	abortMarker  = 0
	commitMarker = 1
)

// decodeMarker reads a marker from a batch for which isMarkerBatch holds and
// from its first record. The error is ErrNotMarker for a control record of
// another type; any other describes what is invalid. Later versions of the key and
// the value may add fields behind the known ones. (Kafka's
// EndTransactionMarker.)
func decodeMarker(b *Batch, h *BatchHeader, records []byte) (Marker, error) {
	k := Marker{ProducerID: b.ProducerID, Epoch: b.Epoch, CoordinatorEpoch: noCoordinator}
	if h.Records == 0 {
		return k, nil
	}
	if c := h.Attributes.Compression(); c != 0 {
		return k, fmt.Errorf("control batch compressed with codec %d, want 0", c)
	}
	key, value := controlRecord(records)
	if len(key) < 4 || int16At(key, 0) < 0 {
		return k, fmt.Errorf("control record with key [% x]", key)
	}
	kind := int16At(key, 2)
	if kind != abortMarker && kind != commitMarker {
		return k, ErrNotMarker
	}
	if len(value) < 6 || int16At(value, 0) < 0 {
		return k, fmt.Errorf("transaction marker with value [% x]", value)
	}
	k.Commit = kind == commitMarker
	k.CoordinatorEpoch = int32At(value, 2)
	return k, nil
}

// controlRecord returns the key and the value of the record that begins at p[0],
// each nil if p ends inside it.
func controlRecord(p []byte) (key, value []byte) {
	f := recordFields{p}
	f.varint() // length of the record
	f.bytes(1) // attributes
	f.varint() // timestamp delta
	f.varint() // offset delta
	key = f.bytes(f.varint())
	value = f.bytes(f.varint())
	return key, value
}

// recordFields reads the fields of a record one after the other. After the first
// incomplete field every field is zero or nil.
type recordFields struct{ p []byte }

func (f *recordFields) varint() int64 {
	v, n := binary.Varint(f.p)
	if n <= 0 {
		f.p = nil
		return 0
	}
	f.p = f.p[n:]
	return v
}

func (f *recordFields) bytes(n int64) []byte {
	if n < 0 || n > int64(len(f.p)) {
		f.p = nil
		return nil
	}
	b := f.p[:n]
	f.p = f.p[n:]
	return b
}
