package idempotence

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
)

// This file reads and writes the snapshots that Apache Kafka's broker keeps
// beside the segments of a log, so that a directory can change hands. The
// format, version 1, as Kafka's ProducerStateManager has it; big-endian:
//
//	offset  size
//	     0     2  version, 1
//	     2     4  CRC-32C of everything after it
//	     6     4  number of producers, P
//	    10  46*P  producers, in no order
//	              +0  8  producer id
//	              +8  2  epoch
//	             +10  4  last sequence of the newest batch, or -1
//	             +14  8  its last offset, or -1
//	             +22  4  its last offset less its first
//	             +26  8  time of the last activity, milliseconds since 1970
//	             +34  4  coordinator epoch, or -1
//	             +38  8  first offset of the open transaction, or -1
//
// It holds no more than the newest batch of a producer. Whoever restores it has
// forgotten the four before, and the end offset is in the name of the file
// alone.

const (
	kafkaVersion      = 1
	kafkaHeaderSize   = 10
	kafkaSummedFrom   = 6
	kafkaProducerSize = 46

	// noTimestamp is the time of an activity that is not known
	// (RecordBatch.NO_TIMESTAMP).
	noTimestamp int64 = -1
)

var bigEndian = binary.BigEndian

// WriteKafka writes the snapshot to w in the format of Kafka's own snapshots, in
// the order of producer ids, and returns the number of bytes written. Name the
// file by EndOffset, in 20 digits, as Kafka does: 00000000000000078114.snapshot.
// It returns the first error of w, wrapped; what was written then is worthless.
//
// What the format has no room for is left out: all but the newest batch of each
// window, the identity of the log, MaxProducerID. So is what lies at or past
// EndOffset, which Kafka refuses to load. The time of a producer's last activity
// is cut to milliseconds; for one that has been active since the last Expire it
// is the time of that call, and -1 if there was none, which Kafka takes for very
// long ago. So call Expire right before Snapshot.
//
// It takes 46 bytes for each producer, and 16 or 32 to sort them.
func (s *Snapshot) WriteKafka(w io.Writer) (int64, error) {
	ranks := s.rows.byID()
	b := make([]byte, kafkaHeaderSize, kafkaHeaderSize+len(ranks)*kafkaProducerSize)
	for ranks := range slices.Chunk(ranks, rowsAhead) {
		s.rows.look(ranks)
		for _, r := range ranks {
			if p, ok := s.beforeEnd(r.row); ok {
				b = p.appendKafka(b, s.timestamp(p))
			}
		}
	}
	bigEndian.PutUint16(b, kafkaVersion)
	bigEndian.PutUint32(b[kafkaSummedFrom:], uint32((len(b)-kafkaHeaderSize)/kafkaProducerSize))
	bigEndian.PutUint32(b[2:], crc32.Checksum(b[kafkaSummedFrom:], castagnoli))
	e := newSnapshotEncoder(w, b)
	e.flush()
	return e.result()
}

// beforeEnd returns the producer in a row without what lies at or past the end
// offset, and whether anything is left.
func (s *Snapshot) beforeEnd(row uint32) (p *producer, ok bool) {
	p = s.rows.at(row)
	switch end := s.head.endOffset; {
	case end == 0:
		return nil, false
	case p.endsBy(end):
		return p, true
	default:
		c := *p
		_, gone := c.cut(end)
		return &c, !gone
	}
}

// timestamp returns when a producer was last active, as far as it is known.
func (s *Snapshot) timestamp(p *producer) int64 {
	switch {
	case p.tick != s.current:
		return s.ticks[p.tick].ms
	case s.head.now.ms == longAgo:
		return noTimestamp
	}
	return s.head.now.ms
}

func (p *producer) appendKafka(b []byte, timestamp int64) []byte {
	lastSequence, lastOffset, delta := noSequence, noOffset, int32(0)
	if p.window.count > 0 {
		newest := p.window.newest()
		lastSequence, delta = newest.span.last(), newest.span.count()-1
		lastOffset = newest.baseOffset + int64(delta)
	}
	b = bigEndian.AppendUint64(b, uint64(p.id))
	b = bigEndian.AppendUint16(b, uint16(p.epoch))
	b = bigEndian.AppendUint32(b, uint32(lastSequence))
	b = bigEndian.AppendUint64(b, uint64(lastOffset))
	b = bigEndian.AppendUint32(b, uint32(delta))
	b = bigEndian.AppendUint64(b, uint64(timestamp))
	b = bigEndian.AppendUint32(b, uint32(p.coordinatorEpoch))
	return bigEndian.AppendUint64(b, uint64(p.txnFirst))
}

// RestoreKafka replaces the state by that of one of Kafka's own snapshots, read
// from r to its end. endOffset is the end offset of the log that it was taken of,
// which Kafka has in the file's name only. It is the manager's EndOffset
// afterwards, and what is in the log from there on must be replayed before
// anything is judged.
//
// On any error the state is untouched: ErrCorruptSnapshot, ErrSnapshotVersion,
// which is one too, or the error that r returned, wrapped. It refuses what Kafka
// refuses, and beyond that what Kafka never writes: bytes after the last
// producer, one that is there twice, negative ids and epochs, and offsets at or
// past endOffset.
//
// Of each producer the newest batch is known, so that older retries are refused
// and not recognised, and Truncate is not exact below endOffset. A batch without
// sequences, which Kafka writes itself, is not remembered. A time of -1 is not
// known: the producer counts as active until the next Expire, and so does one
// with a time after that. Otherwise it is as with Restore.
func (m *ProducerStateManager) RestoreKafka(r io.Reader, endOffset int64) error {
	d := newSnapshotDecoder(r)
	n := newState(m.cfg)
	n.endOffset = max(endOffset, 0)
	n.lastMarker = n.endOffset - 1
	n.setBounds(0, n.endOffset)
	n.decodeKafka(d)
	if d.err != nil {
		return d.err
	}
	m.replace(&n)
	return nil
}

// decodeKafka fills an empty manager but for the offsets. What went wrong is in
// d.
func (m *state) decodeKafka(d *snapshotDecoder) {
	if b := d.take(2); b != nil && bigEndian.Uint16(b) != kafkaVersion {
		d.err = fmt.Errorf("%w: %d, known is %d", ErrSnapshotVersion, bigEndian.Uint16(b), kafkaVersion)
	}
	var want, producers uint32
	if b := d.take(4); b != nil {
		want = bigEndian.Uint32(b)
		d.sumFromHere()
	}
	if b := d.take(4); b != nil {
		producers = bigEndian.Uint32(b)
	}
	var timed, untimed []ranked
	for i := range producers {
		b := d.take(kafkaProducerSize)
		if b == nil {
			return
		}
		p := m.table.append(int64At(b, 0))
		if !p.decodeKafka(b, m.endOffset) {
			d.fail("producer %d, number %d of %d, cannot be like that in a log of %d: %x", p.id, i, producers, m.endOffset, b)
			return
		}
		m.maxProducerID = max(m.maxProducerID, p.id)
		if at := int64At(b, 26); at == noTimestamp {
			untimed = append(untimed, ranked{row: i})
		} else {
			timed = append(timed, ranked{uint64(at) ^ signBit, i})
		}
	}
	d.requireSum(d.checksum(), want)
	m.finish(d)
	if d.err == nil {
		m.enlist(timed, untimed)
		m.findOpenTxns()
	}
}

// decodeKafka reads all of a producer but its id and its time, and reports
// whether it can be like that in a log that ends at endOffset.
func (p *producer) decodeKafka(b []byte, endOffset int64) bool {
	p.epoch = int16At(b, 8)
	p.coordinatorEpoch = int32At(b, 34)
	p.txnFirst = int64At(b, 38)
	return p.id >= 0 && p.epoch >= 0 && p.coordinatorEpoch >= noCoordinator &&
		p.txnFirst >= noTxn && p.txnFirst < endOffset && p.decodeKafkaBatch(b, endOffset)
}

// decodeKafkaBatch reads the newest batch. The window may lack those before it,
// and a producer without one is known by something else.
func (p *producer) decodeKafkaBatch(b []byte, endOffset int64) bool {
	last := int32At(b, 10)
	lastOffset := int64At(b, 14)
	delta := int32At(b, 22)
	switch {
	case delta < 0 || delta == math.MaxInt32 || lastOffset >= endOffset:
		return false
	case last == noSequence:
		p.history |= hadMarker
		return lastOffset == noOffset && delta == 0 || lastOffset >= int64(delta)
	case last < 0 || lastOffset < int64(delta):
		return false
	}
	count := delta + 1
	p.window.push(makeSpan(firstSequence(last, count), count), lastOffset-int64(delta))
	p.window.evicted = true
	return true
}

// signBit makes the order of signed numbers that of unsigned ones.
const signBit = 1 << 63

// enlist puts all rows into the lists: by their times, which are the keys of timed,
// and those without one last.
func (s *state) enlist(timed, untimed []ranked) {
	all := &frozen{pages: s.table.pages, rows: s.table.rows}
	all.sort(timed)
	for len(timed) > 0 {
		at, n := timed[0].key, 1
		for n < len(timed) && timed[n].key == at {
			n++
		}
		s.enlistAt(all, int64(at^signBit), timed[:n])
		timed = timed[n:]
	}
	r := &s.recency
	if len(untimed) > 0 {
		s.enlistAt(all, 0, untimed)
	} else if len(r.ticks) > 0 {
		r.current = r.newTick()
	}
	r.ahead = true
}

// enlistAt puts rows into the lists as those last active at one time, and makes
// that the current tick. Within it they are in the order of their newest batches.
func (s *state) enlistAt(all *frozen, ms int64, rows []ranked) {
	for i := range rows {
		rows[i].key = uint64(all.at(rows[i].row).newestOffset() + 1)
	}
	all.sort(rows)
	s.recency.current = s.recency.newTick()
	s.recency.ticks[s.recency.current].ms = ms
	for _, r := range rows {
		p := all.at(r.row)
		p.pinned = p.inTransaction()
		s.recency.give(p)
		s.push(p, r.row)
	}
}
