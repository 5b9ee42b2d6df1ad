package idempotence

import (
	"cmp"
	"encoding/binary"
	"fmt"
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
// It goes over the producers twice, since the checksum comes first.
func (s *Snapshot) WriteKafka(w io.Writer) (int64, error) {
	rows := slices.DeleteFunc(s.rows.byID(), func(row uint32) bool {
		_, ok := s.beforeEnd(row)
		return !ok
	})
	sum := newSnapshotEncoder(io.Discard)
	s.encodeKafka(sum, rows)
	e := newSnapshotEncoder(w)
	e.buf = bigEndian.AppendUint16(e.buf, kafkaVersion)
	e.buf = bigEndian.AppendUint32(e.buf, sum.sum)
	s.encodeKafka(e, rows)
	return e.result()
}

// encodeKafka encodes what the checksum covers.
func (s *Snapshot) encodeKafka(e *snapshotEncoder, rows []uint32) {
	e.room(4)
	e.buf = bigEndian.AppendUint32(e.buf, uint32(len(rows)))
	for _, row := range rows {
		e.room(kafkaProducerSize)
		p, _ := s.beforeEnd(row)
		e.buf = p.appendKafka(e.buf, s.timestamp(&p))
	}
	e.flush()
}

// beforeEnd returns the producer in a row without what lies at or past the end
// offset, and whether anything is left.
func (s *Snapshot) beforeEnd(row uint32) (producer, bool) {
	p := *s.rows.at(row)
	switch end := s.head.endOffset; end {
	case s.head.logEndOffset:
		return p, true
	case 0:
		return p, false
	default:
		_, gone := p.cut(end)
		return p, !gone
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
	rows := filler{t: &m.table, left: producers}
	ranks := m.decodeKafkaProducers(d, &rows, producers)
	d.requireSum(d.checksum(), want)
	d.finish(&rows)
	if d.err == nil {
		m.enlistAll(ranks)
		m.findOpenTxns()
	}
}

// decodeKafkaProducers reads the producers, each into a row of its own, and
// returns the rows with the times of their last activity.
func (m *state) decodeKafkaProducers(d *snapshotDecoder, rows *filler, producers uint32) []ranked {
	var ranks []ranked
	for i := range producers {
		b := d.take(kafkaProducerSize)
		if b == nil {
			return nil
		}
		p := rows.add(int64At(b, 0))
		if !p.decodeKafka(b, m.endOffset) {
			d.fail("producer %d, number %d of %d, cannot be like that in a log of %d: %x", p.id, i, producers, m.endOffset, b)
			return nil
		}
		m.maxProducerID = max(m.maxProducerID, p.id)
		ranks = append(ranks, rankByTimestamp(int64At(b, 26), i))
	}
	return ranks
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

// The time of a rank says whether there is a timestamp. Those without come last.
const (
	timeKnown uint32 = iota
	timeUnknown
)

// signBit makes the order of signed numbers that of unsigned ones.
const signBit = 1 << 63

func rankByTimestamp(timestamp int64, row uint32) ranked {
	if timestamp == noTimestamp {
		return ranked{row: row, time: timeUnknown}
	}
	return ranked{key: uint64(timestamp) ^ signBit, row: row}
}

// enlistAll puts the rows of ranks, which are all there are, into the list: by
// time, and then as they committed.
func (m *state) enlistAll(ranks []ranked) {
	all := &frozen{pages: m.table.pages, rows: m.table.rows}
	rows := all.inOrder(ranks)
	var newest ranked
	for len(rows) > 0 {
		newest = ranks[rows[len(rows)-1]]
		first, n := ranks[rows[0]], 1
		for n < len(rows) && ranks[rows[n]].time == first.time && ranks[rows[n]].key == first.key {
			n++
		}
		m.enlistAt(first, rows[:n])
		rows = rows[n:]
	}
	a := &m.recency
	if n := len(ranks); n > 0 && newest.time == timeKnown {
		a.current = a.newTick()
	}
	a.ahead = true
}

// enlistAt puts rows into the list as those last active at one time, and makes
// that the current mark. They come in the order of producer ids, which is left
// where offsets agree.
func (m *state) enlistAt(when ranked, rows []uint32) {
	a := &m.recency
	slices.SortStableFunc(rows, func(p, q uint32) int {
		return cmp.Compare(m.table.at(p).newestOffset(), m.table.at(q).newestOffset())
	})
	a.current = a.newTick()
	if when.time == timeKnown {
		a.ticks[a.current].ms = int64(when.key ^ signBit)
	}
	for _, row := range rows {
		p := m.table.at(row)
		p.pinned = p.inTransaction()
		a.give(p)
		m.push(p, row)
	}
}
