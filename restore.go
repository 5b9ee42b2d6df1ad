package idempotence

import (
	"fmt"
	"hash/crc32"
	"io"
)

// This file reads snapshots. It believes nothing that they say before it is
// known to be possible, and changes nothing before everything has been read:
// the state is built aside and put in place at the end.

// Restore replaces the state by that of a snapshot which WriteTo wrote, read
// from r to its end. The manager's EndOffset is then that of the snapshot: replay
// the log from there before anything is judged.
//
// The log must still reach the snapshot's [Snapshot.LogEndOffset], or the state
// holds batches that are gone. m.Snapshot().LogEndOffset() after the restore
// gives it; where the log is shorter, Reset and restore an older snapshot.
//
// On any error the state is untouched: ErrCorruptSnapshot, ErrSnapshotVersion,
// ErrSnapshotLog, or the error that r returned, wrapped. Memory is taken as the
// bytes come in, whatever count they announce.
//
// Of the former state remain MaxProducerID, if it is the higher one, the time of
// the last Expire, if it is the later one, and the counts of Stats. Open
// reservations are abandoned. A restore evicts nothing: where the snapshot holds
// more producers than Config.MaxProducers, newcomers evict the excess.
//
// Safe for concurrent use. It holds the lock only at the end, for a time that
// does not depend on the number of producers.
func (m *ProducerStateManager) Restore(r io.Reader) error {
	n, err := readSnapshot(r, m.cfg)
	if err != nil {
		return err
	}
	m.replace(n)
	return nil
}

// readSnapshot returns the state that a snapshot holds, for a manager with cfg.
func readSnapshot(r io.Reader, cfg Config) (*state, error) {
	d := newSnapshotDecoder(r)
	n := newState(cfg)
	logID := n.decode(d)
	if none := [16]byte{}; d.err == nil && logID != cfg.LogID && logID != none && cfg.LogID != none {
		d.err = fmt.Errorf("%w: it is of log %x, this is log %x", ErrSnapshotLog, logID, cfg.LogID)
	}
	return &n, d.err
}

// replace makes n the state, with what a restore keeps of the former one.
func (m *ProducerStateManager) replace(n *state) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dropInFlight()
	if n.recency.now.before(m.recency.now) {
		n.recency.now = m.recency.now
	}
	n.maxProducerID = max(n.maxProducerID, m.maxProducerID)
	n.keepTxns(&m.state)
	n.stats, n.truncations, n.inFlight = m.stats, m.truncations, m.inFlight
	m.state = *n
}

// decode fills an empty manager, and returns the identity of the log. What went
// wrong is in d.
func (m *state) decode(d *snapshotDecoder) (logID [16]byte) {
	head := d.head()
	times, producers := d.uint32(), d.uint32()
	m.endOffset, m.maxProducerID = head.endOffset, head.maxProducerID
	m.restoredLogEnd, m.exactness = head.logEndOffset, head.exactness
	m.recency.now = head.now
	m.decodeTimes(d, times, producers)
	m.decodeProducers(d, producers)
	m.decodeAborted(d, &head)
	sum := d.checksum()
	d.requireSum(sum, d.uint32())
	m.finish(d)
	if d.err == nil {
		m.findOpenTxns()
	}
	return head.logID
}

// decodeAborted reads what version 2 has behind the producers. A snapshot of version 1
// does not hold the transactions that were aborted below its end, unless it has seen
// no marker.
func (m *state) decodeAborted(d *snapshotDecoder, head *snapshotHead) {
	if d.version == 1 {
		if head.lastMarker != noOffset {
			m.setBounds(0, head.endOffset)
		}
		return
	}
	logStart, abortedFrom, n := d.int64(), d.int64(), d.int64()
	if end := m.restoredLogEnd; logStart < 0 || logStart > end || abortedFrom < 0 || abortedFrom > end || n < 0 {
		d.fail("log start offset %d, %d aborted transactions known from %d, of a log that ends at %d", logStart, n, abortedFrom, end)
	}
	m.setBounds(logStart, abortedFrom)
	last := logStart - 1
	for i := int64(0); i < n && d.err == nil; i++ {
		r := AbortedTransaction{d.int64(), d.int64(), d.int64()}
		if d.err == nil && (r.ProducerID < 0 || r.ProducerID > m.maxProducerID || r.FirstOffset < 0 || r.FirstOffset >= r.LastOffset ||
			r.LastOffset <= last || r.LastOffset >= m.restoredLogEnd) {
			d.fail("entry %d of %d: aborted transaction of producer %d: invalid offsets %d to %d", i, n, r.ProducerID, r.FirstOffset, r.LastOffset)
			return
		}
		m.transactions().aborted.add(r)
		last = r.LastOffset
	}
}

// finish makes the index of the rows, if nothing was wrong.
func (s *state) finish(d *snapshotDecoder) {
	if d.err != nil {
		return
	}
	if twice := s.table.reindex(); twice != nil {
		d.fail("producer %d is in it twice", twice.id)
	}
}

// decodeTimes reads the times as marks, and makes the mark of those active since
// the last one the current one.
func (m *state) decodeTimes(d *snapshotDecoder, times, producers uint32) {
	a := &m.recency
	rest := producers
	for i := range times {
		k := d.tick()
		if d.err != nil {
			return
		}
		if k.producers == 0 || k.producers > rest || i > 0 && compareTimes(a.ticks[i-1], k) >= 0 {
			d.fail("time %d is %d of %d producers, in disorder or without any", i, k.producers, rest)
			return
		}
		rest -= k.producers
		a.ticks = append(a.ticks, k)
	}
	if producers > 0 {
		a.ahead = times > 0 && a.now.before(a.ticks[times-1].at())
		a.ticks = append(a.ticks, tick{producers: rest})
		a.current = times
	}
}

// decodeProducers reads the producers, each into a row of its own, so that the
// rows are in the order of the list.
func (m *state) decodeProducers(d *snapshotDecoder, producers uint32) {
	a := &m.recency
	of, left := uint32(0), uint32(0)
	for i := range producers {
		if d.err != nil {
			return
		}
		for ; left == 0; of++ {
			left = a.ticks[of].producers
		}
		left--
		b := d.peek(producerLimit)
		if len(b) < producerSize {
			d.cutOff(producerSize)
			return
		}
		p := m.table.append(int64(littleEndian.Uint64(b)))
		size := p.decode(b, m.restoredLogEnd)
		if d.skip(size); size == 0 || p.id > m.maxProducerID {
			d.fail("producer %d, number %d of %d, cannot be like that: %+v", p.id, i, producers, p.window)
		}
		p.tick, p.pinned = of-1, p.inTransaction()
		m.push(p, i)
	}
}

// decode reads all but the id of a producer that append has appended, and returns
// how many bytes it took: more than there are in b if it is cut off, and none if
// it cannot be like that in a log that ends at logEndOffset. It requires
// producerSize bytes.
func (p *producer) decode(b []byte, logEndOffset int64) int {
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
		p.txnFirst = int64(littleEndian.Uint64(b[producerSize:]))
		if p.txnFirst < 0 || p.txnFirst >= logEndOffset {
			return 0
		}
	}
	newest := entry{baseOffset: noOffset}
	for ; at < size; at += entrySize {
		e := entry{span(littleEndian.Uint64(b[at:])), int64(littleEndian.Uint64(b[at+8:]))}
		if !e.wellFormed() || e.baseOffset <= newest.baseOffset {
			return 0
		}
		p.window.refill(e.span, e.baseOffset)
		newest = e
	}
	if newest.baseOffset > logEndOffset-int64(newest.span.count()) {
		return 0
	}
	return size
}

func (p *producer) setFlags(flags byte) {
	p.window.evicted = flags&flagEvicted != 0
	if flags&flagEpoch != 0 {
		p.history |= hadEpoch
	}
	if flags&flagMarker != 0 {
		p.history |= hadMarker
	}
}

// wellFormed reports whether a batch can be like that.
func (e *entry) wellFormed() bool {
	return e.span.first() >= 0 && e.span.count() >= 1 && roomAt(e.baseOffset, int64(e.span.count()))
}

// snapshotDecoder reads in chunks, and sums them up. It turns bad once, and
// then gives zeros.
type snapshotDecoder struct {
	r          io.Reader
	buf        []byte
	start, end int // of what is in buf and not taken yet
	summed     int // of buf
	sum        uint32
	version    uint32
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
	d.readVersion()
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

func (d *snapshotDecoder) tick() tick {
	i := d.instant()
	return tick{ms: i.ms, ns: i.ns, producers: d.uint32()}
}

// readVersion reads what every version begins with.
func (d *snapshotDecoder) readVersion() {
	if b := d.take(len(snapshotMagic)); b != nil && string(b) != snapshotMagic {
		d.fail("it begins with %x", b)
	}
	if d.version = d.uint32(); (d.version < 1 || d.version > snapshotVersion) && d.err == nil {
		d.err = fmt.Errorf("%w: %d, known are 1 to %d", ErrSnapshotVersion, d.version, snapshotVersion)
	}
}

// head reads the header up to the counts.
func (d *snapshotDecoder) head() snapshotHead {
	d.readVersion()
	var h snapshotHead
	copy(h.logID[:], d.take(len(h.logID)))
	h.endOffset, h.logEndOffset = d.int64(), d.int64()
	h.maxProducerID, h.lastMarker, h.lastForgetEnd = d.int64(), d.int64(), d.int64()
	h.now = d.instant()
	flags := d.uint32()
	h.inexact = flags&flagInexact != 0
	if h.endOffset < 0 || h.logEndOffset < h.endOffset || h.maxProducerID < NoProducerID || h.lastMarker < noOffset || h.lastMarker >= h.logEndOffset ||
		h.lastForgetEnd < 0 || h.lastForgetEnd > h.logEndOffset || flags&^flagInexact != 0 {
		d.fail("end offset %d of a log that ends at %d, highest producer id %d, last marker at %d, forgot at %d, flags %#x",
			h.endOffset, h.logEndOffset, h.maxProducerID, h.lastMarker, h.lastForgetEnd, flags)
	}
	return h
}
