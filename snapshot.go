package idempotence

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"sync/atomic"
)

// This file takes and writes snapshots, which carry the state over a restart. A
// snapshot is taken under the lock and written without it. A replay of the log from
// the snapshot's end offset completes it.
//
// The format, version 2, is little-endian and frozen: files of it are in testdata, and
// a change needs another version.
//
//	offset  size
//	     0     4  magic "idps"
//	     4     4  version, 2
//	     8    16  identity of the log, or zeros
//	    24     8  end offset: where the replay starts
//	    32     8  log end offset: batches below it are remembered
//	    40     8  highest producer id ever remembered, or -1
//	    48     8  offset of the last marker, or -1
//	    56     8  log end offset when a producer was last forgotten, or 0
//	    64     8  time of the last Expire, milliseconds since 1970
//	    72     4  and nanoseconds within the millisecond, in 0..999999
//	    76     4  flags: 1 Truncate can no longer be exact
//	    80     4  number of times, T
//	    84     4  number of producers, P
//	    88  16*T  times of activity, rising
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
//	     .     8  log start offset
//	     .     8  offset from which aborted transactions are known
//	     .     8  number of aborted transactions, A
//	     .  24*A  aborted transactions, in the order of their last offsets
//	              +0  8  producer id
//	              +8  8  first offset
//	             +16  8  last offset
//	     .     4  CRC-32C of everything before
//
// Version 1 ends after the producers. It is still read.
//
// The first producers were last active at the first time, the next ones at the second,
// and so on. Those after the last time have been active since the last Expire. A
// producer with a full window takes 96 bytes.
//
// Equal states have equal bytes. Producers last active at the same time are in this
// order: those with an open transaction first; then, with Config.MaxProducers, in the
// order of activity, which is that of eviction, and without it by newest base offset,
// those without a batch first, and by producer id where offsets agree. The bytes do not
// depend on rows, on numbers of ticks, on places in a window, on Stats, or on any of
// Config but LogID and whether MaxProducers is set.

// The layout above, in numbers.
const (
	snapshotMagic   = "idps"
	snapshotVersion = 2

	headerSize   = 88
	timeSize     = 16
	producerSize = 16
	txnSize      = 8
	entrySize    = 16
	abortedSize  = 24
	checksumSize = 4

	flagInexact uint32 = 1 << 0 // of the header

	// Of a producer.
	flagEvicted byte = 1 << 0
	flagEpoch   byte = 1 << 1
	flagMarker  byte = 1 << 2
	flagTxn     byte = 1 << 3
	flagsKnown       = flagEvicted | flagEpoch | flagMarker | flagTxn

	producerLimit = producerSize + txnSize + WindowSize*entrySize
)

var littleEndian = binary.LittleEndian

// Snapshot is a copy of a manager's state at one moment. It does not change. It shares
// memory with the manager, and keeps what the manager has replaced since, so do not keep
// a Snapshot longer than needed. It is safe for concurrent use, and its methods take no
// lock of the manager.
type Snapshot struct {
	rows    frozen
	ticks   []tick
	idle    list
	pinned  list
	head    snapshotHead
	aborted []AbortedTransaction // shared with the manager
	// current is the tick since the last Expire.
	current uint32
	// capped is set if the lists are in the order of activity within a tick too.
	capped bool
	// truncations is the manager's counter. It was truncationsBefore when the
	// snapshot was taken.
	truncations       *atomic.Uint64
	truncationsBefore uint64
}

// snapshotHead is the fixed part of a snapshot.
type snapshotHead struct {
	logID         [16]byte
	endOffset     int64
	logEndOffset  int64
	maxProducerID int64
	exactness
	now         instant // of the last Expire
	logStart    int64
	abortedFrom int64
}

// Snapshot returns a consistent copy of the state. It holds every committed batch and
// none in flight; see [Snapshot.EndOffset]. Write it with [Snapshot.WriteTo], without
// holding a lock. Safe for concurrent use.
//
// It copies half a byte for each producer, and 16 bytes for each time of activity.
// The rest is shared, and later copied by the commits that change it, 64 producers at a
// time.
func (m *ProducerStateManager) Snapshot() *Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	logStart, abortedFrom := m.txns.bounds()
	return &Snapshot{
		rows:              m.table.freeze(),
		ticks:             slices.Clone(m.recency.ticks),
		idle:              m.recency.idle,
		pinned:            m.recency.pinned,
		aborted:           m.txns.shareAborted(),
		current:           m.recency.current,
		capped:            m.cfg.MaxProducers > 0,
		truncations:       m.truncations,
		truncationsBefore: m.truncations.Load(),
		head: snapshotHead{
			logID:         m.cfg.LogID,
			endOffset:     m.inFlight.lowest(m.endOffset),
			logEndOffset:  m.knownEnd(),
			maxProducerID: m.maxProducerID,
			exactness:     m.exactness,
			now:           m.recency.now,
			logStart:      logStart,
			abortedFrom:   abortedFrom,
		},
	}
}

// EndOffset returns the offset from which to replay the log after a restore. It is the
// manager's EndOffset or, if batches were in flight, the lowest offset at which one of
// them may be in the log. The replay finds those, and skips what the snapshot holds.
//
// This requires that a batch is committed before the append lock is released, or
// reserved before it is appended.
func (s *Snapshot) EndOffset() int64 { return s.head.endOffset }

// LogEndOffset returns the end offset of the log when the snapshot was taken. It is
// above EndOffset only if batches were in flight. Do not restore the snapshot if the log
// ends below it: the snapshot may hold batches that are gone. [SnapshotDir.Load] checks
// this.
func (s *Snapshot) LogEndOffset() int64 { return s.head.logEndOffset }

// stale reports whether the log was truncated since the snapshot was taken.
func (s *Snapshot) stale() bool { return s.truncations.Load() != s.truncationsBefore }

// LogID returns the identity of the log, from Config.
func (s *Snapshot) LogID() [16]byte { return s.head.logID }

// times returns the times of activity in order, with their numbers of producers, and
// for each tick the index of its time. The last time is that of the current tick.
func (s *Snapshot) times() (times []tick, timeOf []uint32) {
	timeOf = make([]uint32, len(s.ticks))
	var order []uint32
	for i, k := range s.ticks {
		if uint32(i) != s.current && k.producers > 0 {
			order = append(order, uint32(i))
		}
	}
	slices.SortFunc(order, func(i, j uint32) int { return compareTimes(s.ticks[i], s.ticks[j]) })
	if len(s.ticks) > 0 {
		order = append(order, s.current)
	}
	for _, i := range order {
		k, n := s.ticks[i], len(times)
		if i == s.current || n == 0 || compareTimes(times[n-1], k) != 0 {
			times = append(times, tick{ms: k.ms, ns: k.ns})
		}
		timeOf[i] = uint32(len(times) - 1)
		times[timeOf[i]].producers += k.producers
	}
	return times, timeOf
}

func compareTimes(a, b tick) int {
	if a.ms != b.ms {
		return cmp.Compare(a.ms, b.ms)
	}
	return cmp.Compare(a.ns, b.ns)
}

// contents returns the times, without that of the current tick, and the rows in the
// order of the format.
func (s *Snapshot) contents() (times []tick, ranks []ranked) {
	times, timeOf := s.times()
	next := make([]uint32, len(times)) // the place of each time's next row
	for i := 1; i < len(times); i++ {
		next[i] = next[i-1] + times[i-1].producers
	}
	ranks = make([]ranked, s.rows.rows)
	place := func(row uint32, key uint64) {
		p := s.rows.at(row)
		if !p.inTransaction() {
			key |= 1 << 63
		}
		time := timeOf[p.tick]
		ranks[next[time]] = ranked{key: key, row: row}
		next[time]++
	}
	if s.capped {
		s.walk(place)
	} else {
		for row := range s.rows.rows {
			place(row, uint64(s.rows.at(row).newestOffset()+1))
		}
	}
	for i, k := range times {
		s.rows.sort(ranks[next[i]-k.producers : next[i]])
	}
	return times[:max(len(times)-1, 0)], ranks
}

// walk calls f for each row and its place in the lists, in that order.
func (s *Snapshot) walk(f func(row uint32, place uint64)) {
	// The links are gathered first. A walk from row to row would miss the cache at
	// every step.
	newer := make([]link, s.rows.rows)
	for row := range newer {
		newer[row] = s.rows.at(uint32(row)).newer
	}
	place := uint64(0)
	for _, l := range []list{s.pinned, s.idle} {
		for at := l.oldest; at != 0; at = newer[at.row()] {
			f(at.row(), place)
			place++
		}
	}
}

// WriteTo writes the snapshot to w, in the format at the top of snapshot.go. Equal
// states give equal bytes. It returns the number of bytes written and the first error
// of w, wrapped; on an error what was written is useless. Safe for concurrent use.
//
// It allocates 64 KiB, and 16 bytes for each producer, or 32 if they are not in the
// order of their activity.
func (s *Snapshot) WriteTo(w io.Writer) (int64, error) {
	times, ranks := s.contents()
	e := newSnapshotEncoder(w, make([]byte, 0, snapshotChunk))
	e.buf = s.head.append(e.buf)
	e.buf = littleEndian.AppendUint32(e.buf, uint32(len(times)))
	e.buf = littleEndian.AppendUint32(e.buf, uint32(len(ranks)))
	for _, k := range times {
		e.room(timeSize)
		e.buf = k.at().append(e.buf)
		e.buf = littleEndian.AppendUint32(e.buf, k.producers)
	}
	for ranks := range slices.Chunk(ranks, rowsAhead) {
		s.rows.look(ranks)
		e.room(len(ranks) * producerLimit)
		for _, r := range ranks {
			e.buf = s.rows.at(r.row).append(e.buf)
		}
	}
	e.room(3 * 8)
	e.buf = littleEndian.AppendUint64(e.buf, uint64(s.head.logStart))
	e.buf = littleEndian.AppendUint64(e.buf, uint64(s.head.abortedFrom))
	e.buf = littleEndian.AppendUint64(e.buf, uint64(len(s.aborted)))
	for _, r := range s.aborted {
		e.room(abortedSize)
		e.buf = littleEndian.AppendUint64(e.buf, uint64(r.ProducerID))
		e.buf = littleEndian.AppendUint64(e.buf, uint64(r.FirstOffset))
		e.buf = littleEndian.AppendUint64(e.buf, uint64(r.LastOffset))
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
	b = littleEndian.AppendUint64(b, uint64(h.logEndOffset))
	b = littleEndian.AppendUint64(b, uint64(h.maxProducerID))
	b = littleEndian.AppendUint64(b, uint64(h.lastMarker))
	b = littleEndian.AppendUint64(b, uint64(h.lastForgetEnd))
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

// size returns the number of bytes of the producer in a snapshot.
func (p *producer) size() int {
	n := producerSize + int(p.window.count)*entrySize
	if p.txnFirst != noTxn {
		n += txnSize
	}
	return n
}

// append appends the producer in the format of a snapshot. It requires room in b.
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
	if p.window.evicted {
		flags |= flagEvicted
	}
	if p.history&hadEpoch != 0 {
		flags |= flagEpoch
	}
	if p.history&hadMarker != 0 {
		flags |= flagMarker
	}
	if p.txnFirst != noTxn {
		flags |= flagTxn
	}
	return flags
}

// snapshotChunk is the number of bytes read or written at a time.
const snapshotChunk = 64 << 10

// snapshotEncoder writes in chunks and computes their checksum.
type snapshotEncoder struct {
	w       io.Writer
	buf     []byte
	sum     uint32
	written int64
	err     error // of w; nothing is written after it
}

func newSnapshotEncoder(w io.Writer, buf []byte) *snapshotEncoder {
	return &snapshotEncoder{w: w, buf: buf}
}

// room makes room for n more bytes in buf.
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
