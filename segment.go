package idempotence

// This file takes a log segment apart: the entries in it, in order, each with
// its checksum verified, and how it ends. It knows the formats and nothing of
// the manager. An entry is a record batch of format v2, or a message or a
// compressed message set of format v0 or v1; offset, length and magic are in
// the same places in all of them.
//
// Whether a broker may cut a log where it stops being good depends on how it
// stops, so the rule is spelled out. Take the first entry that is not whole
// and right. The tail is torn if
//
//   - the input ends inside the entry, or
//   - there are only zeros from somewhere inside the entry to the end of the
//     input, at least one of them past the entry. So looks an append that a
//     crash cut off in a preallocated segment, and also, with nothing of an
//     entry in front, the unused rest of such a segment.
//
// Everything else is damage. So is an input that ends inside an entry whose
// length must have changed: the checksum comes out right at the end of the
// input, or a whole later batch lies in the last bytes of it.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

const (
	// segmentBufferSize is what reading takes in memory, whatever is read.
	segmentBufferSize = 128 << 10
	// lookBack is how many bytes that were read already are kept, to look for a
	// later batch in. Every fill of the buffer moves them, so they are few
	// against its size.
	lookBack = 16 << 10
	// markerSize is how much of a control record is looked at. What counts of
	// an end-transaction marker takes less than 50 bytes.
	markerSize = 512
	// maxEmptyReads is how often in a row a reader may return neither bytes nor
	// an error.
	maxEmptyReads = 100
)

// Sizes of a message of the older formats without key and value: offset, size,
// CRC-32, magic, attributes, from v1 on a timestamp, and two lengths.
const (
	minSizeV0 = 26
	minSizeV1 = 34
	// legacyCRCAt is where the CRC-32 of everything behind it is.
	legacyCRCAt = 12
)

// entryKind is what an entry means for the producers.
type entryKind uint8

const (
	otherEntry entryKind = iota // nothing, but it takes up offsets
	dataEntry
	markerEntry
)

// segmentEntry is one entry of a segment.
type segmentEntry struct {
	kind   entryKind
	batch  Batch  // format v2
	marker Marker // markerEntry
	// header is whole for format v2. The older formats have Size, CRC (not of
	// the Castagnoli kind) and BaseOffset, which is the last offset there.
	header BatchHeader
	// The CRC is that of the bytes from sumFrom to the end.
	sumFrom  int
	sumTable *crc32.Table
}

// errShortHeader: what is there of the header may be good, but it is not all.
var errShortHeader = errors.New("incomplete header")

// parseEntry reads the header of the entry that begins at p[0]. It requires p
// to reach past the magic. The error is errShortHeader, or says what cannot be
// true.
func parseEntry(p []byte, e *segmentEntry) error {
	switch p[magicAt] {
	case 0:
		return parseLegacyEntry(p, e, minSizeV0)
	case 1:
		return parseLegacyEntry(p, e, minSizeV1)
	case magicV2:
		return parseBatchEntry(p, e)
	}
	return fmt.Errorf("magic %d, want 0 to %d", int8(p[magicAt]), magicV2)
}

func parseBatchEntry(p []byte, e *segmentEntry) error {
	if err := validateSize(batchSize(p), BatchHeaderSize); err != nil {
		return err
	}
	if len(p) < BatchHeaderSize {
		return errShortHeader
	}
	*e = segmentEntry{kind: dataEntry, sumFrom: attributesAt, sumTable: castagnoli}
	e.batch, e.header = decodeBatchHeader(p)
	if e.header.Attributes.Control() {
		e.kind = otherEntry
		if e.batch.ProducerID >= 0 {
			e.kind = markerEntry
		}
	}
	return e.header.validate()
}

// parseLegacyEntry reads the frame of a message of an older format, in which
// nothing else matters here.
func parseLegacyEntry(p []byte, e *segmentEntry, minSize int64) error {
	size := batchSize(p)
	if err := validateSize(size, minSize); err != nil {
		return err
	}
	*e = segmentEntry{
		header: BatchHeader{
			BaseOffset: int64At(p, baseOffsetAt),
			Size:       int(size),
			CRC:        binary.BigEndian.Uint32(p[legacyCRCAt:]),
		},
		sumFrom:  magicAt,
		sumTable: crc32.IEEETable,
	}
	return validateOffset(e.header.BaseOffset, 0)
}

// readMarker completes a markerEntry from the first bytes of its records. A
// control record that is of another type makes it an otherEntry. (Kafka's
// ControlRecordType and EndTransactionMarker; a later version may add fields
// behind the ones known here.)
func (e *segmentEntry) readMarker(records []byte) error {
	e.marker = Marker{ProducerID: e.batch.ProducerID, Epoch: e.batch.Epoch, CoordinatorEpoch: -1}
	if e.header.Records == 0 {
		return nil
	}
	if c := e.header.Attributes.Compression(); c != 0 {
		return fmt.Errorf("control batch compressed with codec %d, want 0", c)
	}
	key, value := controlRecord(records)
	if len(key) < 4 || int16At(key, 0) < 0 {
		return fmt.Errorf("control record with a key of % x", key)
	}
	kind := int16At(key, 2)
	if kind != abortMarker && kind != commitMarker {
		e.kind = otherEntry
		return nil
	}
	if len(value) < 6 || int16At(value, 0) < 0 {
		return fmt.Errorf("end-transaction marker with a value of % x", value)
	}
	e.marker.Commit = kind == commitMarker
	e.marker.CoordinatorEpoch = int32At(value, 2)
	return nil
}

// Types of control records, as their keys have them.
const (
	abortMarker  = 0
	commitMarker = 1
)

// controlRecord returns key and value of the record that begins at p[0], as far
// as they are in p; nil where they are not.
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

// recordFields reads the fields of a record one after the other. From the first
// that is not whole it gives zeros and nils.
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

// segmentReader reads a segment through a buffer of fixed size.
//
// Invariants:
//  1. buf[start:end] is read and not consumed; pos is the position of buf[start]
//     in the input.
//  2. buf[:start] is what comes before, at least lookBack bytes of it or all
//     there is.
//  3. Except inside fill, the buffer was filled to its end or err is set, so
//     that what is returned does not depend on how the bytes came in.
type segmentReader struct {
	src        io.Reader
	buf        []byte
	start, end int
	pos        int64
	err        error // of src, io.EOF included; the bytes before it still count

	entryPos   int64 // where the entry at hand begins
	nextOffset int64 // one past the last offset of the entry before
}

func newSegmentReader(src io.Reader) *segmentReader {
	return &segmentReader{src: src, buf: make([]byte, segmentBufferSize)}
}

// next reads the next entry into e and consumes it. The error is io.EOF at a
// clean end. It is, or wraps, ErrTornTail, ErrCorruptLog or what the source
// returned otherwise, and then it is not for e to be used.
func (s *segmentReader) next(e *segmentEntry) error {
	s.entryPos = s.pos
	p := s.peek(BatchHeaderSize)
	if len(p) == 0 {
		return s.endOr(io.EOF)
	}
	if len(p) <= magicAt {
		return s.endOr(tornTail(len(p), BatchHeaderSize))
	}
	err := parseEntry(p, e)
	switch {
	case err == errShortHeader:
		return s.endOr(tornTail(len(p), batchSize(p)))
	case err == nil && e.header.BaseOffset < s.nextOffset:
		err = fmt.Errorf("base offset %d, want %d or more", e.header.BaseOffset, s.nextOffset)
	}
	if err != nil {
		return s.badHeader(p, err)
	}
	return s.readBody(e)
}

// readBody consumes an entry whose header has been read, and verifies it.
func (s *segmentReader) readBody(e *segmentEntry) error {
	var markerErr error
	if e.kind == markerEntry {
		p := s.peek(min(e.header.Size, BatchHeaderSize+markerSize))
		markerErr = e.readMarker(p[BatchHeaderSize:])
	}
	s.consume(e.sumFrom)
	size := e.header.Size - e.sumFrom
	sum, n := s.checksum(size, e.sumTable)
	switch {
	case n < size:
		return s.cutShort(e, sum)
	case sum != e.header.CRC:
		return s.badChecksum(e, sum)
	case markerErr != nil:
		return corruptLog(markerErr)
	}
	s.nextOffset = e.header.LastOffset() + 1
	return nil
}

// cutShort says what it means that the input ended inside an entry. The
// checksum of what there is of it is sum.
func (s *segmentReader) cutShort(e *segmentEntry, sum uint32) error {
	have := int(s.pos - s.entryPos)
	switch {
	case s.err != io.EOF:
		return s.endOr(nil)
	case sum == e.header.CRC:
		return corruptLog(fmt.Errorf("size of a batch is %d, but its CRC is right after %d bytes", e.header.Size, have))
	case s.laterBatch(e.header.BaseOffset):
		return corruptLog(fmt.Errorf("size of a batch is %d, but within %d bytes another follows", e.header.Size, have))
	}
	return tornTail(have, int64(e.header.Size))
}

// badHeader says what it means that the header which begins at p[0] cannot be
// true for the given reason. An append that was cut off before the length was
// written leaves a length of zero.
func (s *segmentReader) badHeader(p []byte, reason error) error {
	zero := int32At(p, batchLengthAt) == 0
	s.consume(batchLengthEnd)
	return s.tornIf(zero, reason)
}

// badChecksum says what it means that the checksum of a complete entry is sum
// and should be another one.
func (s *segmentReader) badChecksum(e *segmentEntry, sum uint32) error {
	reason := fmt.Errorf("CRC is %08x, the batch says %08x", sum, e.header.CRC)
	endsInZero := s.buf[s.start-1] == 0
	return s.tornIf(endsInZero && len(s.peek(1)) > 0, reason)
}

// tornIf returns ErrTornTail if zero holds and only zeros are left in the input.
func (s *segmentReader) tornIf(zero bool, reason error) error {
	if !zero || !s.onlyZeros() {
		return corruptLog(reason)
	}
	return s.endOr(fmt.Errorf("%w: only zeros from somewhere in a batch on: %w", ErrTornTail, reason))
}

// onlyZeros consumes the input up to its end and reports whether it was all
// zeros. It stops at the first other byte.
func (s *segmentReader) onlyZeros() bool {
	for p := s.peek(1); len(p) > 0; p = s.peek(1) {
		chunk := s.buf[s.start:s.end]
		for _, c := range chunk {
			if c != 0 {
				return false
			}
		}
		s.consume(len(chunk))
	}
	return true
}

// laterBatch reports whether a whole batch of format v2, with an offset above
// the given one, lies in the last bytes of the input, behind the beginning of
// the entry at hand. It requires the input to be consumed to its end.
func (s *segmentReader) laterBatch(offset int64) bool {
	behind := int(min(s.pos-s.entryPos-1, lookBack))
	p := s.buf[s.end-behind : s.end]
	for ; len(p) >= BatchHeaderSize; p = p[1:] {
		if p[magicAt] != magicV2 {
			continue
		}
		_, h := decodeBatchHeader(p)
		if h.BaseOffset > offset && h.validate() == nil && h.VerifyCRC(p) == nil {
			return true
		}
	}
	return false
}

func tornTail(have int, size int64) error {
	return fmt.Errorf("%w: %d of %d bytes of a batch", ErrTornTail, have, size)
}

func corruptLog(reason error) error { return fmt.Errorf("%w: %w", ErrCorruptLog, reason) }

// endOr returns err where the input has come to its end, and the error that
// came instead where it has not. It requires peek or checksum to have given
// less than was asked for.
func (s *segmentReader) endOr(err error) error {
	if s.err == io.EOF {
		return err
	}
	return fmt.Errorf("idempotence: reading a log: %w", s.err)
}

// peek returns the next n bytes without consuming them, fewer only where there
// are no more. It requires n to fit the buffer beside lookBack bytes. What it
// returns holds until the next call of peek or checksum.
func (s *segmentReader) peek(n int) []byte {
	if s.end-s.start < n && s.err == nil {
		s.fill()
	}
	return s.buf[s.start:min(s.start+n, s.end)]
}

// consume passes over n bytes that peek has returned.
func (s *segmentReader) consume(n int) {
	s.start += n
	s.pos += int64(n)
}

// checksum consumes the next n bytes, fewer only where there are no more, and
// returns their CRC and their number.
func (s *segmentReader) checksum(n int, table *crc32.Table) (sum uint32, got int) {
	for got < n {
		p := s.peek(1)
		if len(p) == 0 {
			break
		}
		p = s.buf[s.start:min(s.start+n-got, s.end)]
		sum = crc32.Update(sum, table, p)
		s.consume(len(p))
		got += len(p)
	}
	return sum, got
}

// fill reads until the buffer is full or the source ends. Like io.ReadFull, but
// an io.ErrUnexpectedEOF of the source stays apart from the end of the input.
func (s *segmentReader) fill() {
	keep := min(s.start, lookBack)
	s.end = copy(s.buf, s.buf[s.start-keep:s.end])
	s.start = keep
	for empty := 0; s.end < len(s.buf) && s.err == nil; {
		n, err := s.src.Read(s.buf[s.end:])
		s.end += n
		s.err = err
		if empty++; n > 0 {
			empty = 0
		}
		if empty == maxEmptyReads && err == nil {
			s.err = io.ErrNoProgress
		}
	}
}
