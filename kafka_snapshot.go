package idempotence

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
)

// This file reads and writes the snapshots that Apache Kafka's broker keeps beside the
// segments of a log. The format, version 1, as Kafka's ProducerStateManager has it;
// big-endian:
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
// It holds only the newest batch of a producer. The end offset is only in the name of
// the file.

const (
	kafkaVersion      = 1
	kafkaHeaderSize   = 10
	kafkaSummedFrom   = 6
	kafkaProducerSize = 46

	// noTimestamp is an unknown time (RecordBatch.NO_TIMESTAMP).
	noTimestamp int64 = -1
)

var bigEndian = binary.BigEndian

// WriteKafka writes the snapshot to w in the format of Kafka's own snapshots, in the
// order of producer ids. It returns the number of bytes written and the first error of
// w, wrapped; on an error what was written is useless. Name the file by EndOffset, in
// 20 digits, as Kafka does: 00000000000000078114.snapshot.
//
// The format holds only the newest batch of each window, and neither the identity of
// the log nor MaxProducerID nor aborted transactions. WriteKafka also leaves out what
// lies at or past EndOffset, which Kafka does not load. The time of a producer's last
// activity is in milliseconds. For a producer active since the last Expire it is the
// time of that call, or -1 if there was none, which Kafka takes for long ago: call
// Expire before Snapshot.
//
// It allocates 46 bytes for each producer, and 16 or 32 to sort them. Safe for
// concurrent use.
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

// beforeEnd returns the producer in a row without what lies at or past the end offset.
// It returns false if nothing is left.
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

// timestamp returns the time of a producer's last activity, or noTimestamp.
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

// RestoreKafka replaces the state by that of one of Kafka's own snapshots, read from r
// to its end. endOffset is the end offset of the log when the snapshot was taken, which
// Kafka has only in the name of the file. EndOffset is then endOffset: replay the log
// from there before anything is judged.
//
// On an error the state is unchanged. The error is ErrCorruptSnapshot,
// ErrSnapshotVersion, or the error of r, wrapped. RestoreKafka refuses what Kafka
// refuses, and what Kafka never writes: bytes after the last producer, a producer that
// occurs twice, negative ids and epochs, and offsets at or past endOffset.
//
// Only the newest batch of each producer is known. So retries of older ones are
// refused, Truncate is not exact below endOffset, and the transactions aborted there
// are unknown. A batch without sequences, which only a broker writes, is not
// remembered. A producer whose time is -1, or later than the next Expire, counts as
// active until that call. Otherwise RestoreKafka is like Restore.
func (m *ProducerStateManager) RestoreKafka(r io.Reader, endOffset int64) error {
	d := newSnapshotDecoder(r)
	n := newState(m.config())
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

// decodeKafka reads a snapshot into a state that is empty but for its end offset.
// Errors are in d.
func (s *state) decodeKafka(d *snapshotDecoder) {
	if b := d.take(2); b != nil && bigEndian.Uint16(b) != kafkaVersion {
		d.err = fmt.Errorf("%w: %d, want %d", ErrSnapshotVersion, bigEndian.Uint16(b), kafkaVersion)
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
		p := s.table.append(int64At(b, 0))
		if invalid := p.decodeKafka(b, s.endOffset); invalid != "" {
			d.fail("entry %d of %d: producer %d: invalid %s", i+1, producers, p.id, invalid)
			return
		}
		s.maxProducerID = max(s.maxProducerID, p.id)
		if at := int64At(b, 26); at == noTimestamp {
			untimed = append(untimed, ranked{row: i})
		} else {
			timed = append(timed, ranked{uint64(at) ^ signBit, i})
		}
	}
	d.requireSum(d.checksum(), want)
	if d.reindex(&s.table); d.err == nil {
		s.pushAll(timed, untimed)
		s.findOpenTxns()
	}
}

// decodeKafka reads the rest of a producer whose id is set, without its time. It
// returns the name of the first invalid field, if any.
func (p *producer) decodeKafka(b []byte, endOffset int64) (invalid string) {
	p.epoch = int16At(b, 8)
	p.coordinatorEpoch = int32At(b, 34)
	p.txnFirst = int64At(b, 38)
	switch {
	case p.id < 0:
		return "producer id"
	case p.epoch < 0:
		return "epoch"
	case p.coordinatorEpoch < noCoordinator:
		return "coordinator epoch"
	case p.txnFirst < noTxn || p.txnFirst >= endOffset:
		return "first offset of the transaction"
	}
	return p.decodeKafkaBatch(b, endOffset)
}

// decodeKafkaBatch reads the newest batch. The window may lack the ones before it. A
// producer without a batch is known by a marker or by a batch without sequences.
func (p *producer) decodeKafkaBatch(b []byte, endOffset int64) (invalid string) {
	last := int32At(b, 10)
	lastOffset := int64At(b, 14)
	delta := int32At(b, 22)
	none := last == noSequence && lastOffset == noOffset && delta == 0
	switch {
	case last < noSequence:
		return "last sequence"
	case delta < 0 || delta == math.MaxInt32:
		return "offset delta"
	case !none && lastOffset < int64(delta) || lastOffset >= endOffset:
		return "last offset"
	case last == noSequence:
		p.history |= hadMarker
	default:
		count := delta + 1
		p.window.push(makeSpan(firstSequence(last, count), count), lastOffset-int64(delta))
		p.window.evicted = true
	}
	return ""
}

// signBit maps signed numbers to unsigned ones in the same order.
const signBit = 1 << 63

// pushAll puts all rows into the lists: those with a time, which is their key, and then
// those without one.
func (r *roster) pushAll(timed, untimed []ranked) {
	all := &frozen{pages: r.table.pages, rows: r.table.rows}
	all.sort(timed)
	for len(timed) > 0 {
		at, n := timed[0].key, 1
		for n < len(timed) && timed[n].key == at {
			n++
		}
		r.pushAt(all, int64(at^signBit), timed[:n])
		timed = timed[n:]
	}
	if len(untimed) > 0 {
		r.pushAt(all, 0, untimed)
	} else if len(r.recency.ticks) > 0 {
		r.recency.current = r.recency.newTick()
	}
	r.recency.ahead = true
}

// pushAt puts the rows last active at one time into the lists, in the order of their
// newest batches. It makes a tick for them, and makes it the current one.
func (r *roster) pushAt(all *frozen, ms int64, rows []ranked) {
	for i := range rows {
		rows[i].key = uint64(all.at(rows[i].row).newestOffset() + 1)
	}
	all.sort(rows)
	r.recency.current = r.recency.newTick()
	r.recency.ticks[r.recency.current].ms = ms
	for _, k := range rows {
		p := all.at(k.row)
		p.pinned = p.inTransaction()
		r.recency.give(p)
		r.push(p, k.row)
	}
}
