package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/idempotence-go/idempotence"
)

// The header of a Kafka record batch, magic 2. Numbers are big-endian.
//
//	 0  base offset            int64   set by the broker
//	 8  batch length           int32   bytes after this field
//	12  partition leader epoch int32   set by the broker
//	16  magic                  int8    2
//	17  CRC-32C                uint32  of everything from attributes on
//	21  attributes             int16
//	23  last offset delta      int32
//	27  base timestamp         int64
//	35  max timestamp          int64
//	43  producer id            int64
//	51  producer epoch         int16
//	53  base sequence          int32
//	57  number of records      int32
//	61  records, as compressed by the producer
//
// What the broker sets lies before the attributes, hence outside the CRC: a
// batch keeps the checksum its producer gave it.
const (
	headerSize  = 61
	lengthEnd   = 12 // the batch length counts from here
	crcStart    = 17
	crcEnd      = 21 // what the CRC covers starts here
	leaderEpoch = 0  // this broker is the only leader there ever was
)

// Attribute bits of a batch.
const (
	CompressionMask = 0x07
	LogAppendTime   = 1 << 3
	Transactional   = 1 << 4
	Control         = 1 << 5
)

var (
	// ErrMagic is returned for a batch in a format other than magic 2.
	ErrMagic = errors.New("segment: not a record batch of magic 2")

	// ErrCorrupt is returned for bytes that are no record batch, or not the one
	// their checksum was made for.
	ErrCorrupt = errors.New("segment: corrupt record batch")

	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// Header is what the first 61 bytes of a record batch say.
type Header struct {
	BaseOffset      int64
	Size            int // bytes of the whole batch, this header included
	CRC             uint32
	Attributes      int16
	LastOffsetDelta int32
	MaxTimestamp    int64
	ProducerID      int64
	ProducerEpoch   int16
	BaseSequence    int32
	Records         int32
}

// NextOffset is the offset after the batch's last one.
func (h Header) NextOffset() int64 { return h.BaseOffset + int64(h.LastOffsetDelta) + 1 }

// Batch is what the deduplication needs to know of the batch. Its count is
// that of offsets, not of records: compaction removes the latter.
func (h Header) Batch() idempotence.Batch {
	return idempotence.Batch{
		ProducerID:    h.ProducerID,
		Epoch:         h.ProducerEpoch,
		BaseSequence:  h.BaseSequence,
		Count:         h.LastOffsetDelta + 1,
		Transactional: h.Attributes&Transactional != 0,
	}
}

// ParseHeader reads the header at the start of p. It looks at nothing behind
// it: see [Verify] for the checksum.
func ParseHeader(p []byte) (Header, error) {
	if len(p) < headerSize {
		return Header{}, fmt.Errorf("%w: %d bytes, a header has %d", ErrCorrupt, len(p), headerSize)
	}
	be := binary.BigEndian
	if magic := int8(p[16]); magic != 2 {
		return Header{}, fmt.Errorf("%w: magic %d", ErrMagic, magic)
	}
	h := Header{
		BaseOffset:      int64(be.Uint64(p[0:])),
		Size:            lengthEnd + int(int32(be.Uint32(p[8:]))),
		CRC:             be.Uint32(p[crcStart:]),
		Attributes:      int16(be.Uint16(p[21:])),
		LastOffsetDelta: int32(be.Uint32(p[23:])),
		MaxTimestamp:    int64(be.Uint64(p[35:])),
		ProducerID:      int64(be.Uint64(p[43:])),
		ProducerEpoch:   int16(be.Uint16(p[51:])),
		BaseSequence:    int32(be.Uint32(p[53:])),
		Records:         int32(be.Uint32(p[57:])),
	}
	if h.Size < headerSize {
		return Header{}, fmt.Errorf("%w: length of %d bytes, a header has %d", ErrCorrupt, h.Size, headerSize)
	}
	if h.LastOffsetDelta < 0 {
		return Header{}, fmt.Errorf("%w: last offset delta %d", ErrCorrupt, h.LastOffsetDelta)
	}
	return h, nil
}

// Verify checks that p is the one batch that h was read from, whole and with
// the checksum it claims.
func Verify(h Header, p []byte) error {
	if h.Size != len(p) {
		return fmt.Errorf("%w: %d bytes where its length says %d", ErrCorrupt, len(p), h.Size)
	}
	if crc := crc32.Checksum(p[crcEnd:], castagnoli); crc != h.CRC {
		return fmt.Errorf("%w: checksum %08x where it says %08x", ErrCorrupt, crc, h.CRC)
	}
	return nil
}

// place fills in what a broker decides about a batch: where it lives.
func place(p []byte, baseOffset int64) {
	binary.BigEndian.PutUint64(p[0:], uint64(baseOffset))
	binary.BigEndian.PutUint32(p[lengthEnd:], leaderEpoch)
}
