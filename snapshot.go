package idempotence

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"sync/atomic"
)

// This file makes the state survive a restart: a snapshot is taken quickly,
// written to a file without a lock, and restored into a manager. The log from
// the snapshot's end offset on does the rest.
//
// The format, version 1. Numbers are little-endian, as the processors are that
// it is read on. It is frozen: files of it are in testdata, and a change of it is
// another version.
//
//	offset  size
//	     0     4  magic "idps"
//	     4     4  version, 1
//	     8    16  identity of the log, or zeros
//	    24     8  end offset
//	    32     8  highest producer id ever remembered, or -1
//	    40     8  offset of the last marker, or -1
//	    48     8  end offset when a producer was last forgotten, or 0
//	    56     8  time of the last Expire, milliseconds since 1970
//	    64     4  and nanoseconds within the millisecond, in 0..999999
//	    68     4  flags: 1 Truncate can no longer be exact
//	    72     4  number of times, T
//	    76     4  number of producers, P
//	    80  16*T  times of activity, rising
//	              +0  8  milliseconds since 1970
//	              +8  4  nanoseconds within the millisecond
//	             +12  4  how many producers were last active then, 1 or more
//	     .     .  P producers, the one active longest ago first
//	              +0  8  producer id
//	              +8  4  coordinator epoch, or -1
//	             +12  2  epoch
//	             +14  1  flags: 1 the window has dropped a batch or may lack one,
//	                     2 there was another epoch before, 4 a marker was seen,
//	                     8 a transaction is open
//	             +15  1  number of batches in the window, N, in 0..5
//	            (+16  8  with flag 8 only: first offset of the transaction)
//	               .  N batches, the oldest first
//	                  +0  4  number of sequences, 1 or more
//	                  +4  4  first sequence
//	                  +8  8  base offset
//	     .     4  CRC-32C of everything before
//
// The times say who was active when: the first time's producers come first, then
// the second's, and so on; those after the last time's have been active since
// the last Expire. A producer with a full window takes 96 bytes.
//
// The bytes are a function of the state alone. Where producers lie in memory,
// how the marks are numbered, how a window is turned and who is parked does not
// show, and neither do Stats and Config, but for LogID. Producers active at the
// same time are in the order in which they committed last, as eviction takes
// them. A manager without a cap does not keep that order; there it is that of
// the newest base offsets, with producers of which no batch is remembered before
// all others, and where offsets agree, that of the producer ids.

// The layout above, in numbers.
const (
	snapshotMagic   = "idps"
	snapshotVersion = 1

	headerSize   = 80
	timeSize     = 16
	producerSize = 16
	txnSize      = 8
	entrySize    = 16
	checksumSize = 4

	flagInexact uint32 = 1 << 0 // of the header

	// Of a producer.
	flagRolled byte = 1 << 0
	flagEpoch  byte = 1 << 1
	flagMarker byte = 1 << 2
	flagTxn    byte = 1 << 3
	flagsKnown      = flagRolled | flagEpoch | flagMarker | flagTxn

	producerLimit = producerSize + txnSize + WindowSize*entrySize
)

var littleEndian = binary.LittleEndian

// Returned by [ProducerStateManager.Restore] and
// [ProducerStateManager.RestoreKafka]. The state is as it was.
var (
	// ErrCorruptSnapshot: what was read is not a snapshot, or not as it was
	// written: it is cut off or too long, the checksum is wrong, or it says what
	// cannot be. The broker takes an older snapshot, as [SnapshotDir.Load] does,
	// or rebuilds the state from the whole log.
	ErrCorruptSnapshot error = &reason{text: "corrupt snapshot", code: codeKafkaStorageError}

	// ErrSnapshotVersion: the snapshot has a version that this library does not
	// know: a newer one has written it. The broker does as for a corrupt one,
	// which it also is to whoever does not tell the two apart.
	ErrSnapshotVersion error = &reason{text: "unknown version of snapshot", code: codeKafkaStorageError, wider: ErrCorruptSnapshot}

	// ErrSnapshotLog: the snapshot is whole, but of another log: its identity is
	// not Config.LogID. A broker that finds one in a log's directory has mixed
	// its directories up, or a topic was deleted and created again under the
	// same name; the snapshot must not be used.
	ErrSnapshotLog error = &reason{text: "snapshot of another log", code: codeKafkaStorageError}
)

// Snapshot is a copy of a manager's state at one moment. It never changes, and
// its methods hold no lock of the manager's and are safe for concurrent use. It
// shares memory with the manager, which the manager replaces piece by piece as
// it changes; let go of a Snapshot when it is written.
type Snapshot struct {
	rows   frozen
	marks  []mark
	idle   list
	parked list
	head   snapshotHead
	// current is the mark of those active since the last Expire.
	current uint32
	// capped says that the order of the lists is that of the commits.
	capped bool
	// cuts counts those of the manager, and cutsBefore is how many there were.
	cuts       *atomic.Uint64
	cutsBefore uint64
	// trimmed says that some of what is remembered lies past the end offset.
	trimmed bool
}

// snapshotHead is what a snapshot holds beside the producers.
type snapshotHead struct {
	logID         [16]byte
	endOffset     int64
	maxProducerID int64
	lastMarker    int64
	forgotAt      int64
	now           instant // of the last Expire
	inexact       bool
}

// Snapshot returns a copy of the state at this moment: a consistent one, however
// many goroutines commit. It copies half a byte for each producer, and 16 for each
// time of activity; what it shares is copied later, 64 producers at a time, by
// the commits that change it. Write it with [Snapshot.WriteTo], without a lock. Safe
// for concurrent use.
//
// It holds what was committed, and nothing that is in flight; see
// [Snapshot.EndOffset].
func (m *ProducerStateManager) Snapshot() *Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	end := m.snapshotEnd()
	return &Snapshot{
		rows:       m.table.freeze(),
		marks:      slices.Clone(m.activity.marks),
		idle:       m.activity.idle,
		parked:     m.activity.parked,
		current:    m.activity.current,
		capped:     m.cfg.MaxProducers > 0,
		trimmed:    end < m.endOffset,
		cuts:       &m.cuts,
		cutsBefore: m.cuts.Load(),
		head: snapshotHead{
			logID:         m.cfg.LogID,
			endOffset:     end,
			maxProducerID: m.maxProducerID,
			lastMarker:    min(m.lastMarker, end-1),
			forgotAt:      min(m.forgotAt, end),
			now:           m.activity.now,
			inexact:       m.inexact && end > 0,
		},
	}
}

// EndOffset returns the offset that the snapshot is good up to: a replay of the
// log from there on, after a restore, meets every batch that the snapshot does
// not hold. It is the manager's EndOffset, unless something was in flight: then
// it is the lowest offset at which that can be, and the snapshot is the state of
// a log that ends there.
//
// The promise takes that a batch is committed before the append lock is given
// up, or reserved before it is appended.
func (s *Snapshot) EndOffset() int64 { return s.head.endOffset }

// stale reports whether the log was cut since.
func (s *Snapshot) stale() bool { return s.cuts.Load() != s.cutsBefore }

// LogID returns the identity of the log, as it was in Config.
func (s *Snapshot) LogID() [16]byte { return s.head.logID }

// at returns the producer in a row as the snapshot holds it, or nil where
// nothing of it lies below the end offset, and whether that is known to be right.
// Where it takes a copy, that is made in scratch.
func (s *Snapshot) at(row uint32, scratch *producer) (p *producer, known bool) {
	p = s.rows.at(row)
	switch {
	case !s.trimmed || p.endsBy(s.head.endOffset):
		return p, true
	case s.head.endOffset == 0:
		return nil, true
	}
	*scratch = *p
	known, gone := scratch.cut(s.head.endOffset)
	if gone {
		return nil, known
	}
	return scratch, known
}

// times returns the times of the marks, each once and rising, and for each mark
// which of them it has. That of the current mark, and of those not in use, is one
// past the last.
func (s *Snapshot) times() (times []mark, timeOf []uint32) {
	for i, k := range s.marks {
		if uint32(i) != s.current && k.producers > 0 {
			times = append(times, mark{ms: k.ms, ns: k.ns})
		}
	}
	slices.SortFunc(times, compareTimes)
	times = slices.Compact(times)
	timeOf = make([]uint32, len(s.marks))
	for i, k := range s.marks {
		timeOf[i] = uint32(len(times))
		if uint32(i) != s.current && k.producers > 0 {
			at, _ := slices.BinarySearchFunc(times, k, compareTimes)
			timeOf[i] = uint32(at)
		}
	}
	return times, timeOf
}

func compareTimes(a, b mark) int {
	return cmp.Or(cmp.Compare(a.ms, b.ms), cmp.Compare(a.ns, b.ns))
}

// contents is what a snapshot is written from, beside the head.
type contents struct {
	rows    []uint32 // in the order of the format
	times   []mark   // with the numbers of their producers
	inexact bool     // what is left of a trimmed producer may not be right
}

func (s *Snapshot) contents() contents {
	times, timeOf := s.times()
	counts := make([]uint32, len(times)+1)
	ranks := make([]ranked, 0, s.rows.rows)
	inexact := false
	var scratch producer
	for row := range s.rows.rows {
		p, known := s.at(row, &scratch)
		inexact = inexact || !known
		if p != nil {
			ranks = append(ranks, ranked{key: uint64(p.newestOffset() + 1), row: row, time: timeOf[p.mark]})
			counts[timeOf[p.mark]]++
		}
	}
	if s.capped {
		s.rankByCommit(ranks)
	}
	for i := range times {
		times[i].producers = counts[i]
	}
	times = slices.DeleteFunc(times, func(k mark) bool { return k.producers == 0 })
	return contents{s.rows.inOrder(ranks), times, inexact}
}

// rankByCommit makes the place in the lists the key. A parked producer comes
// before the idle ones of the same time: its turn had come first.
func (s *Snapshot) rankByCommit(ranks []ranked) {
	// The links are gathered first: a walk from row to row would wait for memory
	// at every step.
	newer := make([]link, s.rows.rows)
	for row := range newer {
		newer[row] = s.rows.at(uint32(row)).newer
	}
	place := make([]uint32, s.rows.rows)
	next := uint32(0)
	for _, l := range []list{s.parked, s.idle} {
		for at := l.oldest; at != 0; at = newer[at.row()] {
			place[at.row()] = next
			next++
		}
	}
	for i := range ranks {
		ranks[i].key = uint64(place[ranks[i].row])
	}
}

// WriteTo writes the snapshot to w, in the format drawn above, and returns how
// many bytes it wrote. Equal states give equal bytes. It returns the first error
// of w, wrapped; what was written then is worthless.
//
// It takes a buffer of 64 KiB, and for each producer 16 bytes, or twice that
// where they are not in the order of their last activity.
func (s *Snapshot) WriteTo(w io.Writer) (int64, error) {
	c := s.contents()
	e := newSnapshotEncoder(w)
	head := s.head
	head.inexact = head.inexact || c.inexact
	e.buf = head.append(e.buf)
	e.buf = littleEndian.AppendUint32(e.buf, uint32(len(c.times)))
	e.buf = littleEndian.AppendUint32(e.buf, uint32(len(c.rows)))
	for _, k := range c.times {
		e.room(timeSize)
		e.buf = k.at().append(e.buf)
		e.buf = littleEndian.AppendUint32(e.buf, k.producers)
	}
	var scratch producer
	for rows := c.rows; len(rows) > 0; {
		n := min(len(rows), rowsAhead)
		e.room(s.size(rows[:n]))
		for _, row := range rows[:n] {
			p, _ := s.at(row, &scratch)
			e.buf = p.append(e.buf)
		}
		rows = rows[n:]
	}
	e.flush()
	e.buf = littleEndian.AppendUint32(e.buf, e.sum)
	e.flush()
	return e.result()
}

func (h *snapshotHead) append(b []byte) []byte {
	b = append(b, snapshotMagic...)
	b = littleEndian.AppendUint32(b, snapshotVersion)
	b = append(b, h.logID[:]...)
	b = littleEndian.AppendUint64(b, uint64(h.endOffset))
	b = littleEndian.AppendUint64(b, uint64(h.maxProducerID))
	b = littleEndian.AppendUint64(b, uint64(h.lastMarker))
	b = littleEndian.AppendUint64(b, uint64(h.forgotAt))
	b = h.now.append(b)
	var flags uint32
	if h.inexact {
		flags |= flagInexact
	}
	return littleEndian.AppendUint32(b, flags)
}

func (i instant) append(b []byte) []byte {
	b = littleEndian.AppendUint64(b, uint64(i.ms))
	return littleEndian.AppendUint32(b, uint32(i.ns))
}

// rowsAhead is how many rows are encoded at a time. Their size is added up
// first, and that brings them into the cache, all at once and not one after the
// other.
const rowsAhead = 32

// size returns how many bytes the rows take at most.
func (s *Snapshot) size(rows []uint32) int {
	n := 0
	for _, row := range rows {
		n += s.rows.at(row).size()
	}
	return n
}

// size returns how many bytes the producer takes in a snapshot.
func (p *producer) size() int {
	n := producerSize + int(p.window.count)*entrySize
	if p.txnFirst != noTxn {
		n += txnSize
	}
	return n
}

// append appends the producer in the format of a snapshot. It requires that
// there is room in b.
func (p *producer) append(b []byte) []byte {
	n := len(b)
	b = b[:n+p.size()]
	to := b[n:]
	littleEndian.PutUint64(to, uint64(p.id))
	littleEndian.PutUint32(to[8:], uint32(p.coordinatorEpoch))
	littleEndian.PutUint16(to[12:], uint16(p.epoch))
	to[14], to[15] = p.flags(), p.window.count
	to = to[producerSize:]
	if p.txnFirst != noTxn {
		littleEndian.PutUint64(to, uint64(p.txnFirst))
		to = to[txnSize:]
	}
	for i := range p.window.count {
		e := &p.window.ring[p.window.slot(i)]
		littleEndian.PutUint64(to, uint64(e.span))
		littleEndian.PutUint64(to[8:], uint64(e.baseOffset))
		to = to[entrySize:]
	}
	return b
}

func (p *producer) flags() byte {
	var flags byte
	if p.window.rolled {
		flags |= flagRolled
	}
	if p.past&pastEpoch != 0 {
		flags |= flagEpoch
	}
	if p.past&pastMarker != 0 {
		flags |= flagMarker
	}
	if p.txnFirst != noTxn {
		flags |= flagTxn
	}
	return flags
}

// Restore replaces the state by that of a snapshot which WriteTo wrote, read
// from r to its end. What is not in the log below the snapshot's end offset,
// which is the manager's EndOffset afterwards, must be replayed before anything
// is judged.
//
// On any error the state is untouched: ErrCorruptSnapshot, ErrSnapshotVersion,
// ErrSnapshotLog, or the error that r returned, wrapped. Memory is taken as the
// bytes come in, whatever count they announce.
//
// Of the former state remains MaxProducerID, if it is the higher one, the time
// of the last Expire, if it is the later one, and the counts of Stats. Open
// reservations are abandoned. Where the snapshot has more producers than
// Config.MaxProducers, the least recently active ones are forgotten.
//
// Safe for concurrent use. It holds the lock only at the end, for a time that
// does not depend on the number of producers.
func (m *ProducerStateManager) Restore(r io.Reader) error {
	n, err := m.read(r)
	if err != nil {
		return err
	}
	m.replaceBy(n)
	return nil
}

// read returns a manager with the same Config and the state of a snapshot.
func (m *ProducerStateManager) read(r io.Reader) (*ProducerStateManager, error) {
	d := newSnapshotDecoder(r)
	n := New(m.cfg)
	logID := n.decode(d)
	if none := [16]byte{}; d.err == nil && logID != m.cfg.LogID && logID != none && m.cfg.LogID != none {
		d.err = fmt.Errorf("%w: it is of log %x, this is log %x", ErrSnapshotLog, logID, m.cfg.LogID)
	}
	return n, d.err
}

// replaceBy makes the state of n, which nobody else knows, that of m.
func (m *ProducerStateManager) replaceBy(n *ProducerStateManager) {
	if limit := m.cfg.MaxProducers; limit > 0 {
		n.evictDownTo(limit, math.MaxInt)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetFlights()
	if n.activity.now.before(m.activity.now) {
		n.activity.now = m.activity.now
	}
	m.table, m.activity = n.table, n.activity
	m.endOffset, m.lastMarker, m.forgotAt, m.inexact = n.endOffset, n.lastMarker, n.forgotAt, n.inexact
	m.maxProducerID = max(m.maxProducerID, n.maxProducerID)
	m.stats.Evicted += n.stats.Evicted
}

// decode fills an empty manager, and returns the identity of the log. What went
// wrong is in d.
func (m *ProducerStateManager) decode(d *snapshotDecoder) (logID [16]byte) {
	head := d.head()
	times, producers := d.uint32(), d.uint32()
	m.endOffset, m.maxProducerID = head.endOffset, head.maxProducerID
	m.lastMarker, m.forgotAt, m.inexact = head.lastMarker, head.forgotAt, head.inexact
	m.activity.now = head.now
	m.decodeTimes(d, times, producers)
	m.decodeProducers(d, producers)
	sum := d.checksum()
	d.requireSum(sum, d.uint32())
	m.indexAll(d)
	return head.logID
}

// indexAll makes what was decoded fit to be looked up.
func (m *ProducerStateManager) indexAll(d *snapshotDecoder) {
	if d.err != nil {
		return
	}
	if twice := m.table.indexAll(); twice != nil {
		d.fail("producer %d is in it twice", twice.id)
	}
}

// decodeTimes reads the times as marks, and makes the mark of those active since
// the last one the current one.
func (m *ProducerStateManager) decodeTimes(d *snapshotDecoder, times, producers uint32) {
	a := &m.activity
	rest := producers
	for i := range times {
		k := d.mark()
		if d.err != nil {
			return
		}
		if k.producers == 0 || k.producers > rest || i > 0 && compareTimes(a.marks[i-1], k) >= 0 {
			d.fail("time %d is %d of %d producers, in disorder or without any", i, k.producers, rest)
			return
		}
		rest -= k.producers
		a.marks = append(a.marks, k)
	}
	if producers > 0 {
		a.ahead = times > 0 && a.now.before(a.marks[times-1].at())
		a.marks = append(a.marks, mark{producers: rest})
		a.current = times
	}
}

// decodeProducers reads the producers, each into a row of its own, so that the
// rows are in the order of the list.
func (m *ProducerStateManager) decodeProducers(d *snapshotDecoder, producers uint32) {
	a := &m.activity
	of, left := uint32(0), uint32(0)
	for i := range producers {
		if d.err != nil {
			return
		}
		for ; left == 0; of++ {
			left = a.marks[of].producers
		}
		left--
		p := m.table.add()
		size := p.decode(d.peek(producerLimit))
		if d.skip(size); size == 0 || p.id > m.maxProducerID || !p.endsBy(m.endOffset) {
			d.fail("producer %d, number %d of %d, cannot be like that: %+v", p.id, i, producers, p.window)
		}
		p.mark = of - 1
		p.older, p.newer = link(i), link(i+2)
	}
	if producers > 0 {
		m.table.at(producers - 1).newer = 0
		a.idle = list{oldest: linkTo(0), newest: linkTo(producers - 1)}
		m.parkOldest()
	}
}

// decode reads a producer that append has appended, and returns how many bytes
// it took: more than there are in b if it is cut off, and none if it cannot be
// like that.
func (p *producer) decode(b []byte) int {
	if len(b) < producerSize {
		return producerSize
	}
	p.id = int64(littleEndian.Uint64(b))
	p.coordinatorEpoch = int32(littleEndian.Uint32(b[8:]))
	p.epoch = int16(littleEndian.Uint16(b[12:]))
	flags, batches := b[14], b[15]
	if p.id < 0 || p.epoch < 0 || p.coordinatorEpoch < noCoordinator || flags&^flagsKnown != 0 || batches > WindowSize {
		return 0
	}
	p.setFlags(flags)
	size := producerSize
	if flags&flagTxn != 0 {
		size += txnSize
	}
	at := size
	if size += int(batches) * entrySize; size > len(b) {
		return size
	}
	p.txnFirst = noTxn
	if flags&flagTxn != 0 {
		if p.txnFirst = int64(littleEndian.Uint64(b[producerSize:])); p.txnFirst < 0 {
			return 0
		}
	}
	for last := noOffset; at < size; at += entrySize {
		e := entry{span(littleEndian.Uint64(b[at:])), int64(littleEndian.Uint64(b[at+8:]))}
		if !e.wellFormed() || e.baseOffset <= last {
			return 0
		}
		p.window.push(e.span, e.baseOffset)
		last = e.baseOffset
	}
	return size
}

func (p *producer) setFlags(flags byte) {
	p.window.rolled = flags&flagRolled != 0
	if flags&flagEpoch != 0 {
		p.past |= pastEpoch
	}
	if flags&flagMarker != 0 {
		p.past |= pastMarker
	}
}

// wellFormed reports whether a batch can be like that.
func (e *entry) wellFormed() bool {
	return e.span.first() >= 0 && e.span.count() >= 1 && roomAt(e.baseOffset, e.span.count())
}

// snapshotChunk is how much is read or written at a time.
const snapshotChunk = 64 << 10

// snapshotEncoder gathers bytes into chunks, and sums them up.
type snapshotEncoder struct {
	w       io.Writer
	buf     []byte
	sum     uint32
	written int64
	err     error // the first one of w; nothing is written after it
}

func newSnapshotEncoder(w io.Writer) *snapshotEncoder {
	return &snapshotEncoder{w: w, buf: make([]byte, 0, snapshotChunk)}
}

// room makes sure that n more bytes fit into buf.
func (e *snapshotEncoder) room(n int) {
	if cap(e.buf)-len(e.buf) < n {
		e.flush()
	}
}

func (e *snapshotEncoder) flush() {
	e.sum = crc32.Update(e.sum, castagnoli, e.buf)
	if e.err == nil {
		var n int
		n, e.err = e.w.Write(e.buf)
		e.written += int64(n)
		if e.err == nil && n < len(e.buf) {
			e.err = io.ErrShortWrite
		}
	}
	e.buf = e.buf[:0]
}

func (e *snapshotEncoder) result() (int64, error) {
	if e.err != nil {
		return e.written, fmt.Errorf("idempotence: writing a snapshot: %w", e.err)
	}
	return e.written, nil
}

// snapshotDecoder reads in chunks, and sums them up. It turns bad once, and
// then gives zeros.
type snapshotDecoder struct {
	r          io.Reader
	buf        []byte
	start, end int // of what is in buf and not taken yet
	summed     int // of buf
	sum        uint32
	readErr    error // of r
	err        error
}

func newSnapshotDecoder(r io.Reader) *snapshotDecoder {
	return &snapshotDecoder{r: r, buf: make([]byte, snapshotChunk)}
}

// fail notes the first thing that is wrong.
func (d *snapshotDecoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s", ErrCorruptSnapshot, fmt.Sprintf(format, args...))
	}
}

// peek returns what is next: n bytes or more, or all that is left.
func (d *snapshotDecoder) peek(n int) []byte {
	if d.end-d.start < n {
		d.fill(n)
	}
	return d.buf[d.start:d.end]
}

// skip passes over n bytes. It fails if there are no more as many.
func (d *snapshotDecoder) skip(n int) {
	if n > d.end-d.start {
		d.cutOff(n)
		return
	}
	d.start += n
}

// take returns the next n bytes, which are good until the next peek, or nil.
func (d *snapshotDecoder) take(n int) []byte {
	b := d.peek(n)
	if d.skip(n); d.err != nil {
		return nil
	}
	return b[:n]
}

// fill makes n bytes lie in buf, if they come. It requires that n fits.
func (d *snapshotDecoder) fill(n int) {
	d.checksum()
	d.end = copy(d.buf, d.buf[d.start:d.end])
	d.start, d.summed = 0, 0
	for idle := 0; d.end < n && d.readErr == nil; idle++ {
		var got int
		got, d.readErr = d.r.Read(d.buf[d.end:])
		d.end += got
		if got > 0 {
			idle = 0
		} else if idle == maxEmptyReads && d.readErr == nil {
			d.readErr = io.ErrNoProgress
		}
	}
}

// cutOff notes why n more bytes did not come.
func (d *snapshotDecoder) cutOff(n int) {
	if d.readErr == io.EOF {
		d.fail("it ends after %d bytes of the next %d", d.end-d.start, n)
	} else if d.err == nil {
		d.err = fmt.Errorf("idempotence: reading a snapshot: %w", d.readErr)
	}
}

// checksum returns the sum of all that was taken.
func (d *snapshotDecoder) checksum() uint32 {
	d.sum = crc32.Update(d.sum, castagnoli, d.buf[d.summed:d.start])
	d.summed = d.start
	return d.sum
}

// sumFromHere leaves out of the sum what was taken so far.
func (d *snapshotDecoder) sumFromHere() {
	d.checksum()
	d.sum = 0
}

// requireSum fails if the checksum is another than what was read says, or if
// anything follows.
func (d *snapshotDecoder) requireSum(sum, want uint32) {
	if sum != want {
		d.fail("its checksum is %08x, that of its bytes is %08x", want, sum)
	}
	d.requireEnd()
}

// requireEnd fails if there is another byte.
func (d *snapshotDecoder) requireEnd() {
	if len(d.peek(1)) > 0 {
		d.fail("bytes follow its end")
	} else if d.readErr != io.EOF {
		d.cutOff(1)
	}
}

// verifySnapshot returns an error if a snapshot has not the bytes that were
// written. What they say it does not look at.
func verifySnapshot(r io.Reader) error {
	d := newSnapshotDecoder(r)
	d.version()
	for len(d.peek(snapshotChunk)) == snapshotChunk {
		d.skip(snapshotChunk - checksumSize)
	}
	d.skip(max(0, d.end-d.start-checksumSize))
	sum := d.checksum()
	d.requireSum(sum, d.uint32())
	return d.err
}

func (d *snapshotDecoder) uint32() uint32 {
	if b := d.take(4); b != nil {
		return littleEndian.Uint32(b)
	}
	return 0
}

func (d *snapshotDecoder) int64() int64 {
	if b := d.take(8); b != nil {
		return int64(littleEndian.Uint64(b))
	}
	return 0
}

func (d *snapshotDecoder) instant() instant {
	i := instant{d.int64(), int32(d.uint32())}
	if i.ns < 0 || int64(i.ns) >= nsPerMilli {
		d.fail("a time has %d nanoseconds in a millisecond", i.ns)
	}
	return i
}

func (d *snapshotDecoder) mark() mark {
	i := d.instant()
	return mark{ms: i.ms, ns: i.ns, producers: d.uint32()}
}

// version reads what every version begins with.
func (d *snapshotDecoder) version() {
	if b := d.take(len(snapshotMagic)); b != nil && string(b) != snapshotMagic {
		d.fail("it begins with %x", b)
	}
	if v := d.uint32(); v != snapshotVersion && d.err == nil {
		d.err = fmt.Errorf("%w: %d, known is %d", ErrSnapshotVersion, v, snapshotVersion)
	}
}

// head reads the header up to the counts.
func (d *snapshotDecoder) head() snapshotHead {
	d.version()
	var h snapshotHead
	copy(h.logID[:], d.take(len(h.logID)))
	h.endOffset, h.maxProducerID, h.lastMarker, h.forgotAt = d.int64(), d.int64(), d.int64(), d.int64()
	h.now = d.instant()
	flags := d.uint32()
	h.inexact = flags&flagInexact != 0
	if h.endOffset < 0 || h.maxProducerID < NoProducerID || h.lastMarker < noOffset || h.lastMarker >= h.endOffset ||
		h.forgotAt < 0 || h.forgotAt > h.endOffset || flags&^flagInexact != 0 {
		d.fail("end offset %d, highest producer id %d, last marker at %d, forgot at %d, flags %#x",
			h.endOffset, h.maxProducerID, h.lastMarker, h.forgotAt, flags)
	}
	return h
}
