package idempotence

// This file reads a log segment entry by entry, verifies each checksum, and
// judges the bytes at which the log stops being good. It knows the formats and not
// the manager. An entry is a record batch of format v2, or a message or a
// compressed message set of format v0 or v1. Offset, length and magic have the
// same positions in all of them.
//
// Whether a broker may cut a log depends on the first entry that is not whole and
// right. The tail is torn, as a crash or a power cut leaves it, if that entry
//
//   - is cut short by the end of the input, or
//   - has zero for its length: the file has grown and the bytes were never
//     written, as in a preallocated segment, or
//   - is complete and its checksum is wrong: one part of it was not written,
//
// and nothing behind its beginning was written whole: no intact entry begins
// there, at whatever position, and no second complete entry, intact or not,
// follows one whose checksum is wrong. So what is lost by cutting a torn tail off
// is at most one complete entry, and it was the last.
//
// Everything else is damage. So is a checksum that comes out right at the end of
// the input: only the length of that entry has changed.
//
// The length of a bad entry cannot be trusted, so the search for an intact entry
// tries every position from inside the bad entry to the end of the input. An
// entry counts as intact if its checksum is right and its offset fits behind the
// good part. A record may hold the bytes of such an entry, so the search can take
// a torn tail for damage; it never does the opposite.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
)

const (
	// segmentBufferSize is the memory that reading takes, however long the input
	// is.
	segmentBufferSize = 128 << 10
	// wholeEntry is the largest entry that is read into the buffer as a whole.
	// Filling the buffer may move as many bytes, so it is a part of the buffer.
	wholeEntry = 32 << 10
	// maxEmptyReads is how often in a row a reader may return neither bytes nor
	// an error.
	maxEmptyReads = 100
)

// Sizes of a message of the older formats without key and value: offset, size,
// CRC-32, magic, attributes, from v1 on a timestamp, and two lengths.
const (
	minSizeV0 = 26
	minSizeV1 = 34
	// legacyCRCAt is the position of the CRC-32 of everything behind it.
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
	// header is complete for format v2. The older formats have Size, CRC (not a
	// CRC-32C) and BaseOffset, which is the last offset there.
	header BatchHeader
	legacy bool // of format v0 or v1
	// The CRC covers the bytes from sumFrom to the end.
	sumFrom  int
	sumTable *crc32.Table
}

// errShortHeader: the header is incomplete, and may be good as far as it goes.
var errShortHeader = errors.New("incomplete header")

// parseEntry reads the header of the entry that begins at p[0] and checks magic
// and length, which say how long the entry is and where its checksum is. It
// requires p to reach past the magic. The error is errShortHeader, or describes what
// is invalid.
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
	switch {
	case isMarkerBatch(&e.batch, &e.header):
		e.kind = markerEntry
	case e.header.Attributes.Control():
		e.kind = otherEntry
	}
	return nil
}

// parseLegacyEntry reads the frame of a message of an older format. Nothing else
// in it matters here.
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
		legacy:   true,
		sumFrom:  magicAt,
		sumTable: crc32.IEEETable,
	}
	return nil
}

// validate reports what is invalid in an entry whose checksum is right: a field out
// of range, or a base offset below from.
func (e *segmentEntry) validate(from int64) error {
	if err := e.validateFields(); err != nil {
		return err
	}
	if e.header.BaseOffset < from {
		return fmt.Errorf("base offset %d, want %d or more", e.header.BaseOffset, from)
	}
	return nil
}

func (e *segmentEntry) validateFields() error {
	if e.legacy {
		return validateOffset(e.header.BaseOffset, 0)
	}
	return e.header.validate()
}

// readMarker completes a markerEntry from its first bytes. A control record of
// another type makes it an otherEntry.
func (e *segmentEntry) readMarker(p []byte) error {
	if e.kind != markerEntry || len(p) < BatchHeaderSize {
		return nil
	}
	var err error
	e.marker, err = decodeMarker(&e.batch, &e.header, p[BatchHeaderSize:])
	if err == ErrNotMarker {
		e.kind = otherEntry
		return nil
	}
	return err
}

// segmentReader reads a segment through a buffer of fixed size.
//
// Invariants:
//  1. buf[start:end] has been read and not consumed; pos is the position of
//     buf[start] in the input.
//  2. Except inside fill, the buffer was filled to its end or err is set, so
//     that the result does not depend on the sizes of the reads.
type segmentReader struct {
	src        io.Reader
	buf        []byte
	start, end int
	pos        int64
	err        error // of src, io.EOF included; the bytes before it still count

	entryPos   int64 // position of the entry at hand
	nextOffset int64 // one past the last offset of the entry before
	legacy     bool  // whether the entry before is of an older format
	search     search
}

func newSegmentReader(src io.Reader) *segmentReader {
	return &segmentReader{src: src, buf: make([]byte, segmentBufferSize)}
}

// next reads the next entry into e and consumes it. The error is io.EOF at a
// clean end. Any other is, or wraps, ErrTornTail, ErrCorruptLog or what the source
// returned, and then e means nothing.
func (s *segmentReader) next(e *segmentEntry) error {
	s.entryPos = s.pos
	p := s.peek(BatchHeaderSize)
	switch {
	case len(p) == 0:
		return s.endOr(io.EOF)
	case len(p) <= magicAt:
		return s.endOr(tornTail(cutShort(int64(len(p)), BatchHeaderSize)))
	}
	err := parseEntry(p, e)
	switch {
	case err == errShortHeader:
		return s.endOr(tornTail(cutShort(int64(len(p)), batchSize(p))))
	case err == nil:
		return s.readBody(e)
	case int32At(p, batchLengthAt) == 0:
		return s.unwritten(err)
	}
	return corruptLog(err)
}

// readBody consumes an entry whose header has been read, and verifies it.
func (s *segmentReader) readBody(e *segmentEntry) error {
	size := e.header.Size
	p := s.peek(min(size, wholeEntry))
	markerErr := e.readMarker(p)
	if len(p) == size && crc32.Checksum(p[e.sumFrom:], e.sumTable) == e.header.CRC {
		s.consume(size)
		return s.accept(e, markerErr)
	}
	// It is long, or bad. Search while reading, since a long one cannot be read
	// again once it turns out to be bad.
	s.beginSearch(e)
	s.consume(e.sumFrom)
	whole := s.pass(size - e.sumFrom)
	sum := s.search.sum
	switch {
	case whole && sum == e.header.CRC:
		return s.accept(e, markerErr)
	case whole:
		return s.judge(e, fmt.Errorf("CRC is %08x, the entry says %08x", sum, e.header.CRC))
	case s.err != io.EOF:
		return s.endOr(nil)
	}
	return s.judge(e, cutShort(s.pos-s.entryPos, int64(size)))
}

// accept takes an entry whose checksum is right. The error of its marker counts
// only now.
func (s *segmentReader) accept(e *segmentEntry, markerErr error) error {
	err := e.validate(s.nextOffset)
	if err == nil {
		err = markerErr
	}
	if err != nil {
		return corruptLog(err)
	}
	s.nextOffset, s.legacy = e.header.LastOffset()+1, e.legacy
	return nil
}

// judge returns the error for an entry that is bad for a reason: a torn tail or
// damage. All that there is of the entry has been passed.
func (s *segmentReader) judge(e *segmentEntry, reason error) error {
	secondEnd := s.endOfNext()
	intact, err := s.searchRest()
	switch {
	case intact:
		return corruptLog(fmt.Errorf("%w, and an intact entry follows", reason))
	case err != nil:
		return err
	case s.search.sum == e.header.CRC:
		return corruptLog(fmt.Errorf("%w, but its CRC is right after %d bytes", reason, s.pos-s.entryPos))
	case secondEnd <= s.pos:
		return corruptLog(fmt.Errorf("%w, and the entry behind it is not intact either", reason))
	}
	return tornTail(reason)
}

// endOfNext returns where the entry that begins at pos ends by its header, or the
// largest int64 if no entry can begin there.
func (s *segmentReader) endOfNext() int64 {
	var e segmentEntry
	p := s.peek(BatchHeaderSize)
	if len(p) <= magicAt || parseEntry(p, &e) != nil || e.validate(s.nextOffset) != nil {
		return math.MaxInt64
	}
	return s.pos + int64(e.header.Size)
}

// unwritten is judge for an entry whose length is zero.
func (s *segmentReader) unwritten(reason error) error {
	s.beginSearch(nil)
	intact, err := s.searchRest()
	switch {
	case intact:
		return corruptLog(fmt.Errorf("%w, and an intact entry follows", reason))
	case err != nil:
		return err
	}
	return tornTail(reason)
}

func cutShort(have, size int64) error {
	return fmt.Errorf("%d of %d bytes of an entry", have, size)
}

func tornTail(reason error) error   { return fmt.Errorf("%w: %w", ErrTornTail, reason) }
func corruptLog(reason error) error { return fmt.Errorf("%w: %w", ErrCorruptLog, reason) }

// endOr returns err at the end of the input, and the error of the source if that
// came instead. It requires that peek or pass has given less than was asked for.
func (s *segmentReader) endOr(err error) error {
	if s.err == io.EOF {
		return err
	}
	return fmt.Errorf("idempotence: reading a log: %w", s.err)
}

// peek returns the next n bytes without consuming them, fewer only if there are no
// more. It requires n to be at most segmentBufferSize. The bytes are valid until the
// next call of peek or pass.
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

// pass consumes the next n bytes and shows them to the search. It reports whether
// there were as many.
func (s *segmentReader) pass(n int) bool {
	for n > 0 {
		shown := s.passSome(n)
		if shown == 0 {
			return false
		}
		n -= shown
	}
	return true
}

// searchRest consumes the rest of the input, up to the end or until an intact
// entry is found.
func (s *segmentReader) searchRest() (intact bool, err error) {
	for !s.search.found && s.passSome(math.MaxInt) > 0 {
	}
	if s.search.found {
		return true, nil
	}
	return false, s.endOr(nil)
}

// passSome consumes and shows some of the next bytes, at most n, and returns how
// many. It is 0 only if there are no more.
func (s *segmentReader) passSome(n int) int {
	s.peek(BatchHeaderSize)
	p := s.buf[s.start:s.end]
	shown := len(p)
	if s.err == nil {
		shown -= BatchHeaderSize - 1 // a header that begins later is not complete in p
	}
	shown = min(shown, n)
	s.search.show(p, shown)
	s.consume(shown)
	return shown
}

// fill reads until the buffer is full or the source ends. Unlike io.ReadFull, it
// keeps an io.ErrUnexpectedEOF of the source apart from the end of the input.
func (s *segmentReader) fill() {
	s.end = copy(s.buf, s.buf[s.start:s.end])
	s.start = 0
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

const (
	// maxClaims is how many entries that seem to have begun a search checks at
	// once. It bounds memory and time: a search reads each byte at most so many
	// times.
	maxClaims = 16
	// searchReach is how far behind the good part an intact entry is looked for,
	// in offsets. It is far more than any log skips, and so few that random bytes
	// do not pass for an offset.
	searchReach = 1 << 40
)

// search looks for an intact entry at any position of the bytes that it is shown.
// It reads them once: it verifies every entry that seems to begin in them, all at
// the same time.
type search struct {
	// sum is the checksum, by table, of all bytes shown, for the entry at hand.
	sum   uint32
	table *crc32.Table

	from, to int64 // an intact entry has a base offset in from..to-1
	// legacy is set if an entry of an older format counts. Behind an entry of format
	// v2 none does.
	legacy bool

	pos    int64 // position of the next byte, relative to the first one shown
	claims [maxClaims]claim
	open   int  // claims in use
	found  bool // there is one, or more seem to have begun than can be checked
}

// claim is an entry that seems to have begun. Its checksum covers the bytes up to
// end. Those up to pos are in sum.
type claim struct {
	pos, end  int64
	sum, want uint32
	table     *crc32.Table
}

// beginSearch begins a search behind the good part. The entry at hand is e, or nil
// if its header says nothing.
func (s *segmentReader) beginSearch(e *segmentEntry) {
	first := s.entryPos == 0
	q := &s.search
	*q = search{table: castagnoli, from: s.nextOffset, to: s.nextOffset, legacy: s.legacy}
	switch {
	case e != nil:
		q.table = e.sumTable
		q.legacy = s.legacy || first && e.legacy
		q.to = max(s.nextOffset, e.header.BaseOffset)
	case first:
		q.to = math.MaxInt64
	}
	if q.to <= math.MaxInt64-searchReach {
		q.to += searchReach
	}
}

// show takes in p[:n]. It requires p to hold the whole header of an entry that
// begins in p[:n], unless the input ends inside it.
func (q *search) show(p []byte, n int) {
	for x := q.candidate(p, 0); x < n && !q.found; x = q.candidate(p, x+1) {
		q.claim(p[x:], q.pos+int64(x))
	}
	for i := 0; i < q.open && !q.found; {
		if c := &q.claims[i]; c.take(p[:n], q.pos) {
			q.found = c.sum == c.want
			q.open--
			*c = q.claims[q.open]
		} else {
			i++
		}
	}
	q.sum = crc32.Update(q.sum, q.table, p[:n])
	q.pos += int64(n)
}

// candidate returns the first position in p from x on at which an entry may begin,
// by its magic and its base offset, or len(p).
func (q *search) candidate(p []byte, x int) int {
	for ; x+magicAt < len(p); x++ {
		switch magic := p[x+magicAt]; {
		case magic == magicV2 || q.legacy && magic < magicV2:
		case q.legacy:
			continue
		default:
			i := bytes.IndexByte(p[x+magicAt:], magicV2)
			if i < 0 {
				return len(p)
			}
			x += i
		}
		if base := int64At(p, x+baseOffsetAt); q.from <= base && base < q.to {
			return x
		}
	}
	return len(p)
}

// claim opens a claim for the entry that begins at p[0], which is at pos, if its header
// can be one.
func (q *search) claim(p []byte, pos int64) {
	var e segmentEntry
	if batchSize(p) < minSizeV0 || parseEntry(p, &e) != nil || e.validateFields() != nil || !e.plausible() {
		return
	}
	if q.open == maxClaims {
		q.found = true
		return
	}
	q.claims[q.open] = claim{pos: pos + int64(e.sumFrom), end: pos + int64(e.header.Size), want: e.header.CRC, table: e.sumTable}
	q.open++
}

// plausible reports whether no field has a value that no broker has written so far.
// Random bytes hardly ever pass.
func (e *segmentEntry) plausible() bool {
	if e.legacy {
		return true
	}
	b, h := &e.batch, &e.header
	return h.Attributes>>8 == 0 && h.Attributes.Compression() <= 4 && h.PartitionLeaderEpoch >= -1 &&
		b.ProducerID >= NoProducerID && b.Epoch >= -1 && b.BaseSequence >= -1
}

// take continues the checksum of a claim over p, which begins at pos, and reports
// whether that is complete now.
func (c *claim) take(p []byte, pos int64) bool {
	from, to := c.pos-pos, min(c.end-pos, int64(len(p)))
	if from < to {
		c.sum = crc32.Update(c.sum, c.table, p[from:to])
		c.pos = pos + to
	}
	return c.pos == c.end
}
