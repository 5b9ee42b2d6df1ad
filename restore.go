package idempotence

import (
	"fmt"
	"hash/crc32"
	"io"
)

// This file reads snapshots. It checks every field before it uses it. It builds the
// state aside, and replaces the manager's once all of the snapshot has been read.

// Restore replaces the state by that of a snapshot written by WriteTo, read from r to
// its end. EndOffset is then the snapshot's: replay the log from there before
// anything is judged.
//
// The log must still reach the snapshot's [Snapshot.LogEndOffset], or the state
// holds batches that are gone. m.Snapshot().LogEndOffset() returns it after a
// restore. If the log is shorter, call Reset and restore an older snapshot.
//
// On an error the state is unchanged. The error is ErrCorruptSnapshot,
// ErrSnapshotVersion, ErrSnapshotLog, or the error of r, wrapped. Memory grows with
// the bytes read, not with the counts in them.
//
// A restore keeps MaxProducerID if it is higher, the time of the last Expire if it is
// later, and the counters of Stats. It abandons open reservations. It evicts nothing:
// if the snapshot holds more producers than Config.MaxProducers, newcomers evict the
// excess.
//
// Safe for concurrent use. It holds the lock only to replace the state, for a time
// that does not depend on the number of producers.
func (m *ProducerStateManager) Restore(r io.Reader) error {
	n, err := readSnapshot(r, m.config())
	if err != nil {
		return err
	}
	m.replace(n)
	return nil
}

// readSnapshot returns the state in a snapshot, for a manager with cfg.
func readSnapshot(r io.Reader, cfg Config) (*state, error) {
	d := newSnapshotDecoder(r)
	n := newState(cfg)
	logID := n.decode(d)
	if none := [16]byte{}; d.err == nil && logID != cfg.LogID && logID != none && cfg.LogID != none {
		d.err = fmt.Errorf("%w: log %x, want %x", ErrSnapshotLog, logID, cfg.LogID)
	}
	return &n, d.err
}

// replace replaces the state by n, and keeps what survives a restore.
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

// decode reads a snapshot into an empty state, and returns the identity of its log.
// Errors are in d.
func (s *state) decode(d *snapshotDecoder) (logID [16]byte) {
	head := d.head()
	times, producers := d.uint32(), d.uint32()
	s.endOffset, s.restoredLogEnd = head.endOffset, head.logEndOffset
	s.maxProducerID, s.lastMarker, s.lastForgetEnd, s.inexact = head.maxProducerID, head.lastMarker, head.lastForgetEnd, head.inexact
	s.recency.now = head.now
	s.recency.decode(d, times, producers)
	s.decodeProducers(d, &head, producers)
	s.decodeAborted(d, &head)
	sum := d.checksum()
	d.requireSum(sum, d.uint32())
	if d.reindex(&s.table); d.err == nil {
		s.findOpenTxns()
	}
	return head.logID
}

// reindex enters the producers that were read into the index of their table.
func (d *snapshotDecoder) reindex(t *table) {
	if d.err != nil {
		return
	}
	if twice := t.reindex(); twice != nil {
		d.fail("producer %d occurs twice", twice.id)
	}
}

// decode reads the times as ticks, and adds the current tick for the producers that
// have none of them.
func (r *recency) decode(d *snapshotDecoder, times, producers uint32) {
	rest := producers
	for i := range times {
		k := d.tick()
		switch {
		case k.producers == 0 || k.producers > rest:
			d.fail("time %d of %d: invalid number of producers %d", i+1, times, k.producers)
		case i > 0 && compareTimes(r.ticks[i-1], k) >= 0:
			d.fail("time %d of %d: not after the one before", i+1, times)
		}
		if d.err != nil {
			return
		}
		rest -= k.producers
		r.ticks = append(r.ticks, k)
	}
	if producers > 0 {
		r.ahead = times > 0 && r.now.before(r.ticks[times-1].at())
		r.ticks = append(r.ticks, tick{producers: rest})
		r.current = times
	}
}

// decodeProducers reads the producers. Rows are in the order of the lists.
func (r *roster) decodeProducers(d *snapshotDecoder, head *snapshotHead, producers uint32) {
	for i, k := range r.recency.ticks {
		for range k.producers {
			if r.decodeProducer(d, head, uint32(i), producers); d.err != nil {
				return
			}
		}
	}
}

// decodeProducer reads a producer last active in a tick.
func (r *roster) decodeProducer(d *snapshotDecoder, head *snapshotHead, tick, producers uint32) {
	b := d.peek(producerLimit)
	if len(b) < producerSize {
		d.cutOff(producerSize)
		return
	}
	row := r.table.rows
	p := r.table.append(int64(littleEndian.Uint64(b)))
	size, invalid := p.decode(b, head.logEndOffset)
	if p.id > head.maxProducerID {
		invalid = "producer id"
	}
	if invalid != "" {
		d.fail("entry %d of %d: producer %d: invalid %s", row+1, producers, p.id, invalid)
		return
	}
	d.skip(size)
	p.tick, p.pinned = tick, p.inTransaction()
	r.push(p, row)
}

// decodeAborted reads what version 2 has behind the producers. Version 1 does not
// hold aborted transactions: they are known from its end offset on, or from the
// start if there was no marker.
func (s *state) decodeAborted(d *snapshotDecoder, head *snapshotHead) {
	if d.version == 1 {
		if head.lastMarker != noOffset {
			s.setBounds(0, head.endOffset)
		}
		return
	}
	logStart, abortedFrom, n := d.int64(), d.int64(), d.int64()
	if end := s.restoredLogEnd; logStart < 0 || logStart > end || abortedFrom < 0 || abortedFrom > end || n < 0 {
		d.fail("invalid log start offset %d, first offset with known aborted transactions %d or number of them %d", logStart, abortedFrom, n)
	}
	s.setBounds(logStart, abortedFrom)
	last := logStart - 1
	for i := int64(0); i < n && d.err == nil; i++ {
		r := AbortedTransaction{d.int64(), d.int64(), d.int64()}
		if d.err == nil && (r.ProducerID < 0 || r.ProducerID > s.maxProducerID || r.FirstOffset < 0 || r.FirstOffset >= r.LastOffset ||
			r.LastOffset <= last || r.LastOffset >= s.restoredLogEnd) {
			d.fail("aborted transaction %d of %d: producer %d: invalid offsets %d to %d", i+1, n, r.ProducerID, r.FirstOffset, r.LastOffset)
			return
		}
		s.transactions().aborted.add(r)
		last = r.LastOffset
	}
}

// decode reads the rest of a producer whose id is set. It returns its size, which is
// above len(b) if b ends too early, and the name of the first invalid field, if any.
// It requires len(b) >= producerSize.
func (p *producer) decode(b []byte, logEndOffset int64) (size int, invalid string) {
	p.coordinatorEpoch = int32(littleEndian.Uint32(b[8:]))
	p.epoch = int16(littleEndian.Uint16(b[12:]))
	flags, batches := b[14], b[15]
	switch {
	case p.id < 0:
		return 0, "producer id"
	case p.epoch < 0:
		return 0, "epoch"
	case p.coordinatorEpoch < noCoordinator:
		return 0, "coordinator epoch"
	case flags&^flagsKnown != 0:
		return 0, "flags"
	case batches > WindowSize:
		return 0, "number of batches"
	}
	p.setFlags(flags)
	at := producerSize
	if flags&flagTxn != 0 {
		at += txnSize
	}
	if size = at + int(batches)*entrySize; size > len(b) {
		return size, ""
	}
	p.txnFirst = noTxn
	if flags&flagTxn != 0 {
		p.txnFirst = int64(littleEndian.Uint64(b[producerSize:]))
		if p.txnFirst < 0 || p.txnFirst >= logEndOffset {
			return 0, "first offset of the transaction"
		}
	}
	return size, p.window.decode(b[at:size], logEndOffset)
}

// decode reads batches into an empty window. It returns the name of the first invalid
// field, if any.
func (w *window) decode(b []byte, logEndOffset int64) (invalid string) {
	end := int64(0)
	for ; len(b) > 0; b = b[entrySize:] {
		e := entry{span(littleEndian.Uint64(b)), int64(littleEndian.Uint64(b[8:]))}
		switch {
		case e.span.first() < 0 || e.span.count() < 1:
			return "sequences of a batch"
		case e.baseOffset < end || e.baseOffset > logEndOffset-int64(e.span.count()):
			return "base offset of a batch"
		}
		w.refill(e.span, e.baseOffset)
		end = e.baseOffset + 1
	}
	return ""
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

// snapshotDecoder reads in chunks and computes their checksum. After the first
// error it returns zeros.
type snapshotDecoder struct {
	r          io.Reader
	buf        []byte
	start, end int // the part of buf that has not been taken yet
	summed     int // how much of buf sum covers
	sum        uint32
	version    uint32
	readErr    error // of r
	err        error
}

func newSnapshotDecoder(r io.Reader) *snapshotDecoder {
	return &snapshotDecoder{r: r, buf: make([]byte, snapshotChunk)}
}

// fail records an ErrCorruptSnapshot, if it is the first error.
func (d *snapshotDecoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s", ErrCorruptSnapshot, fmt.Sprintf(format, args...))
	}
}

// peek returns the next n bytes or more, or all that are left.
func (d *snapshotDecoder) peek(n int) []byte {
	if d.end-d.start < n {
		d.fill(n)
	}
	return d.buf[d.start:d.end]
}

// skip takes n bytes.
func (d *snapshotDecoder) skip(n int) {
	if n > d.end-d.start {
		d.cutOff(n)
		return
	}
	d.start += n
}

// take returns the next n bytes, which are valid until the next peek, or nil.
func (d *snapshotDecoder) take(n int) []byte {
	b := d.peek(n)
	if d.skip(n); d.err != nil {
		return nil
	}
	return b[:n]
}

// fill reads until buf holds n bytes or the reader ends. It requires that n fits.
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

// cutOff records why the next n bytes are not there.
func (d *snapshotDecoder) cutOff(n int) {
	if d.readErr == io.EOF {
		d.fail("unexpected end: %d bytes left, want %d", d.end-d.start, n)
	} else if d.err == nil {
		d.err = fmt.Errorf("idempotence: reading a snapshot: %w", d.readErr)
	}
}

// checksum returns the checksum of what was taken.
func (d *snapshotDecoder) checksum() uint32 {
	d.sum = crc32.Update(d.sum, castagnoli, d.buf[d.summed:d.start])
	d.summed = d.start
	return d.sum
}

// sumFromHere leaves what was taken so far out of the checksum.
func (d *snapshotDecoder) sumFromHere() {
	d.checksum()
	d.sum = 0
}

// requireSum fails unless sum is want and the reader is at its end.
func (d *snapshotDecoder) requireSum(sum, want uint32) {
	if sum != want {
		d.fail("checksum %08x, want %08x", sum, want)
	}
	d.requireEnd()
}

// requireEnd fails unless the reader is at its end.
func (d *snapshotDecoder) requireEnd() {
	if len(d.peek(1)) > 0 {
		d.fail("trailing bytes")
	} else if d.readErr != io.EOF {
		d.cutOff(1)
	}
}

// verifySnapshot checks the version and the checksum of a snapshot, and nothing else.
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
		d.fail("invalid nanoseconds %d of a time", i.ns)
	}
	return i
}

func (d *snapshotDecoder) tick() tick {
	i := d.instant()
	return tick{ms: i.ms, ns: i.ns, producers: d.uint32()}
}

// readVersion reads the magic and the version.
func (d *snapshotDecoder) readVersion() {
	if b := d.take(len(snapshotMagic)); b != nil && string(b) != snapshotMagic {
		d.fail("invalid magic %x", b)
	}
	if d.version = d.uint32(); (d.version < 1 || d.version > snapshotVersion) && d.err == nil {
		d.err = fmt.Errorf("%w: %d, want 1 to %d", ErrSnapshotVersion, d.version, snapshotVersion)
	}
}

// head reads the header, without the counts at its end.
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
		d.fail("invalid header: end offset %d, log end offset %d, highest producer id %d, last marker %d, last forgotten %d, flags %#x",
			h.endOffset, h.logEndOffset, h.maxProducerID, h.lastMarker, h.lastForgetEnd, flags)
	}
	return h
}
