package idempotence

// This file rebuilds the state from the log. The log is the truth: nothing is
// judged, only whether the bytes are still those that were written. Four ways
// in which a log can end are told apart, because a broker does something else
// about each: the clean end, a tail torn off by a crash, damage, and a failing
// read.

import (
	"errors"
	"fmt"
	"io"
)

// textError is an error that keeps its message in JSON.
type textError struct{ error }

func (e textError) Unwrap() error                { return e.error }
func (e textError) MarshalText() ([]byte, error) { return []byte(e.Error()), nil }

// LogError is the error of a log that could not be read to a clean end: the reason,
// and where the good part ends. Get it with errors.As, and test for the reason with
// errors.Is.
type LogError struct {
	// Position is [ReplayResult].Bytes: the position in the input, in bytes, at which
	// the good part ends and the bad entry begins.
	Position int64
	// Offset is one past the last offset of the good part:
	// [ReplayResult].EndOffset.
	Offset int64
	// Err is the reason. It wraps ErrTornTail, ErrCorruptLog or the error that the
	// reader returned.
	Err error
}

// Unwrap returns the reason.
func (e *LogError) Unwrap() error { return e.Err }

// Error begins with the reason and says where the good part ends.
func (e *LogError) Error() string {
	return fmt.Sprintf("%v; the log is good up to byte %d, offset %d", e.Err, e.Position, e.Offset)
}

// ReplayResult describes the good part of a log: all of it, or what comes before the
// first entry that is not whole and right.
type ReplayResult struct {
	// Bytes is the length of the good part in bytes.
	Bytes int64
	// EndOffset is one past the last offset of the good part. If that is empty, it is
	// the EndOffset that the manager had before.
	EndOffset int64
	// Batches counts the data batches of format v2, with or without a producer id,
	// including those that compaction has emptied.
	Batches int64
	// Markers counts the markers that end a transaction.
	Markers int64
	// Skipped counts the entries that say nothing about producers: other control
	// batches, and messages of format v0 and v1, where a compressed set is one.
	Skipped int64
}

// Replay applies a batch that is already in the log, with its first record at
// baseOffset: in recovery, or on a follower. The log is the truth, so nothing is
// judged: a batch is remembered as the newest of its producer whether or not its
// sequence follows, since compaction leaves gaps. Batches must come in the order
// of the log.
//
// A batch that begins at or below the last offset remembered of its producer, or has
// an older epoch, is skipped. So a replay may overlap a snapshot, though it brings back a
// forgotten producer if it meets a batch of it. An older epoch that an earlier fault
// has left in the log does no harm. (Kafka's ProducerStateManager adopts such an
// epoch. Keeping the newer one is safer.)
//
// A batch with base sequence -1 (RecordBatch.NO_SEQUENCE) was written by a broker in
// the name of a producer, as Kafka's group coordinator writes the offsets that a
// transaction commits. It can raise the epoch and open a transaction, and is not
// remembered. A batch without a producer id only
// moves the end offset. What the producer of an applied batch has in flight is
// abandoned.
//
// Replay returns a [*BatchError] and changes nothing for what cannot be in a log:
// ErrInvalidBatch for a malformed batch, and ErrOffsetOrder for an offset that is
// negative or leaves no room for the batch; with Config.Contiguous also for one beyond
// EndOffset. The producer of an applied batch counts as active. Stats does not count
// replayed batches. Safe for concurrent use; hold
// back appends until a recovery is done.
func (m *ProducerStateManager) Replay(b Batch, baseOffset int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case b.ProducerID != NoProducerID && !b.replayable():
		return newBatchError(b, baseOffset, ErrInvalidBatch)
	case !roomAt(baseOffset, b.offsets()) || !m.reaches(baseOffset, m.inFlight.offsets()):
		e := newBatchError(b, baseOffset, ErrOffsetOrder)
		e.LowestOffset = m.endOffset
		return e
	}
	isNew := m.mayBeNew(baseOffset, true)
	end := baseOffset + b.offsets()
	m.advance(end)
	if b.ProducerID != NoProducerID {
		m.replay(&b, baseOffset, isNew)
	}
	m.inFlight.replayed(baseOffset, end, m.endOffset)
	return nil
}

// mayBeNew reports whether the log may hold an entry at offset that the manager has
// not been told of, or a transactional batch if transactional is set.
func (s *state) mayBeNew(offset int64, transactional bool) bool {
	return offset >= s.endOffset || s.inFlight != nil && s.inFlight.tail.mayHold(offset, transactional)
}

// replayable reports whether every field is in the range it may have in a log.
func (b *Batch) replayable() bool {
	return b.ProducerID >= 0 && b.Epoch >= 0 && b.BaseSequence >= noSequence && b.Count >= 1
}

// replay applies a replayable batch. isNew reports whether it may be new to the
// manager.
func (s *state) replay(b *Batch, baseOffset int64, isNew bool) {
	p := s.table.find(b.ProducerID)
	if p != nil && (b.Epoch < p.epoch || baseOffset < p.newestEnd()) {
		s.replayStale(b, baseOffset, isNew)
		return
	}
	p, row := s.overtake(b.ProducerID, b.Epoch, baseOffset)
	if b.BaseSequence != noSequence {
		p.record(b, baseOffset)
	} else {
		s.lastMarker = max(s.lastMarker, baseOffset+b.offsets()-1)
		p.adopt(b.Epoch)
		p.history |= hadMarker
	}
	if b.Transactional {
		s.openTxn(p, baseOffset)
	}
	s.touch(p, row)
}

// replayStale applies a batch that the window skips. If it may be new to the manager,
// it still opens a transaction. Places in the log decide over transactions, not epochs:
// a log may hold an older epoch behind a newer one, and a snapshot may know a later
// epoch than the log up to its end.
func (s *state) replayStale(b *Batch, baseOffset int64, isNew bool) {
	if !b.Transactional || !isNew || s.table.find(b.ProducerID).inTransaction() {
		return
	}
	p, row := s.table.edit(b.ProducerID)
	s.lastMarker = max(s.lastMarker, baseOffset+b.offsets()-1)
	s.openTxn(p, baseOffset)
	s.touch(p, row)
}

// overtake returns a producer as edit does, for an entry of the log at offset. It
// abandons what the producer has in flight, since the log has moved under it. A
// producer that was forgotten, and comes back because a replay overlaps what was
// known, may have more in the log than is replayed.
func (s *state) overtake(pid int64, epoch int16, offset int64) (*producer, uint32) {
	p := s.table.find(pid)
	if offset < s.lastForgetEnd && p.newestOffset() == noOffset {
		s.inexact = true
	}
	if n, ok := s.inFlight.numberOf(pid, p); ok {
		s.abandonQueue(n)
	}
	return s.edit(pid, epoch)
}

// ReplayMarker applies a transaction marker that is already in the log at offset. It
// ends the producer's transaction if that began before it, and enters its range if it
// was aborted, whatever the epochs. A newer epoch is adopted, and the batches of the
// older one are forgotten. An unknown producer becomes known by its epoch. The
// coordinator epoch becomes the higher of the two. A marker that compaction has
// emptied (CoordinatorEpoch -1) ends nothing.
//
// Like Replay it judges nothing, and a marker that is known already changes nothing.
// What the producer has in flight is abandoned: for a marker that the broker itself
// appends, use CheckMarker and CommitMarker, or ReserveMarker.
//
// It returns a [*MarkerError] and changes nothing for what cannot be in a log:
// ErrInvalidBatch for a negative producer id or epoch, and ErrOffsetOrder for an
// offset that is negative or the largest int64; with Config.Contiguous also for one
// beyond EndOffset. Safe for concurrent use.
func (m *ProducerStateManager) ReplayMarker(k Marker, offset int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.replayMarker(&k, offset, offset+1)
}

// replayMarker is ReplayMarker for a control batch that takes the offsets up to end.
func (s *state) replayMarker(k *Marker, offset, end int64) error {
	switch {
	case k.ProducerID < 0 || k.Epoch < 0:
		return newMarkerError(*k, offset, ErrInvalidBatch)
	case !roomAt(offset, 1) || !s.reaches(offset, s.inFlight.offsets()):
		return newMarkerError(*k, offset, ErrOffsetOrder)
	}
	isNew := s.mayBeNew(offset, false)
	s.advance(end)
	s.lastMarker = max(s.lastMarker, end-1)
	if p := s.table.find(k.ProducerID); p != nil && (k.Epoch < p.epoch || offset < p.newestOffset()) {
		s.replayStaleMarker(k, offset, isNew)
	} else {
		s.overtake(k.ProducerID, k.Epoch, offset)
		s.applyMarker(k, offset)
	}
	s.inFlight.replayed(offset, end, s.endOffset)
	return nil
}

// replayStaleMarker applies a marker of a known producer that is older than what is
// remembered of it. It can still end a transaction that began before it. If it is not
// new to the manager it changes nothing else, since the producer may have been forgotten
// after it.
func (s *state) replayStaleMarker(k *Marker, offset int64, isNew bool) {
	p, row := s.table.edit(k.ProducerID)
	if k.CoordinatorEpoch != noCoordinator {
		s.txns.end(p, offset, k.Commit)
	}
	if isNew {
		p.coordinatorEpoch = max(p.coordinatorEpoch, k.CoordinatorEpoch)
		p.history |= hadMarker
	}
	if p.pinned && !p.busy() {
		s.touch(p, row)
	}
}

// ReplayLog replays a log segment, or several in a row, from r: each data batch
// as [ProducerStateManager.Replay] does, each end-transaction marker as
// [ProducerStateManager.ReplayMarker] does; everything else only moves the end
// offset. r must begin at the beginning of a batch. Begin it at the end offset of
// the snapshot, if you can find that in the log; batches that the manager knows
// already do no harm, but an overlap brings back producers that were forgotten.
//
// It reads record batches of format v2 with any compression, which it does not
// undo, and passes over the older formats. Every checksum is verified, and
// nothing is applied before its own has been. Offsets must rise.
//
// The error is nil if r was good to its end, and otherwise a [*LogError] around
// ErrTornTail, ErrCorruptLog or the error that r returned. The good part has
// been replayed then, and the result says where it ends.
//
// It takes a buffer of 128 KiB, however long the log or a batch in it is. Safe
// for concurrent use, though the embedder holds back appends until it is done.
func (m *ProducerStateManager) ReplayLog(r io.Reader) (ReplayResult, error) {
	return readLog(r, m.EndOffset(), &managerSink{m: m, end: noOffset})
}

// VerifyLog reads a log segment, or several in a row, and verifies it as
// [ProducerStateManager.ReplayLog] does, without a manager. A broker calls it to find
// the end of its newest segment before it loads a snapshot. The result, the error and
// the memory it takes are those of ReplayLog; EndOffset is 0 if the good part is empty.
// Safe for concurrent use.
func VerifyLog(r io.Reader) (ReplayResult, error) {
	return readLog(r, 0, noSink{})
}

// noSink ignores what a log holds.
type noSink struct{}

func (noSink) replayBatch(Batch, int64) error          { return nil }
func (noSink) replayMarker(Marker, int64, int64) error { return nil }
func (noSink) skip(int64, int64) error                 { return nil }

// managerSink replays a log into a manager. An entry with a right checksum is in the
// log, so a batch that no producer could have sent is skipped and not refused.
type managerSink struct {
	m   *ProducerStateManager
	end int64 // one past the entry before, or noOffset
}

func (s *managerSink) replayBatch(b Batch, baseOffset int64) error {
	return s.took(s.m.Replay(b, baseOffset), baseOffset, baseOffset+int64(b.Count))
}

func (s *managerSink) replayMarker(k Marker, offset, endOffset int64) error {
	s.m.mu.Lock()
	err := s.m.replayMarker(&k, offset, endOffset)
	s.m.mu.Unlock()
	return s.took(err, offset, endOffset)
}

// took notes that an entry was replayed with an error or without.
func (s *managerSink) took(err error, base, endOffset int64) error {
	if errors.Is(err, ErrInvalidBatch) {
		return s.skip(base, endOffset)
	}
	s.end = endOffset
	return err
}

// skip takes in an entry that says nothing about producers. The log is then known from
// the entry before, or from base if this is the first, to endOffset.
func (s *managerSink) skip(base, endOffset int64) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.m.advance(endOffset)
	if s.end == noOffset {
		s.end = base
	}
	s.m.inFlight.replayed(s.end, endOffset, s.m.endOffset)
	s.end = endOffset
	return nil
}

// logSink receives the entries of a log in order, each after its checksum has been
// verified. An error ends the reading before the entry.
type logSink interface {
	replayBatch(b Batch, baseOffset int64) error
	// replayMarker is called for the marker at offset. Its batch ends at endOffset.
	replayMarker(m Marker, offset, endOffset int64) error
	// skip is called for an entry that says nothing about producers, from base to
	// endOffset. In the older formats base may be too high: a compressed set has only
	// the offset of its last message.
	skip(base, endOffset int64) error
}

// readLog reads a log to its end, or to the first bad entry, and gives its entries to
// sink. The result has endOffset if the log has no good entry.
func readLog(r io.Reader, endOffset int64, sink logSink) (ReplayResult, error) {
	res := ReplayResult{EndOffset: endOffset}
	s := newSegmentReader(r)
	var e segmentEntry
	for {
		err := s.next(&e)
		if err == io.EOF {
			return res, nil
		}
		if err == nil {
			err = res.apply(&e, sink)
		}
		if err != nil {
			return res, &LogError{Position: res.Bytes, Offset: res.EndOffset, Err: textError{err}}
		}
		res.Bytes, res.EndOffset = s.pos, s.nextOffset
	}
}

// apply gives an entry to sink and counts it.
func (r *ReplayResult) apply(e *segmentEntry, sink logSink) error {
	var err error
	count := &r.Skipped
	switch e.kind {
	case dataEntry:
		count = &r.Batches
		err = sink.replayBatch(e.batch, e.header.BaseOffset)
	case markerEntry:
		count = &r.Markers
		err = sink.replayMarker(e.marker, e.header.BaseOffset, e.header.LastOffset()+1)
	default:
		err = sink.skip(e.header.BaseOffset, e.header.LastOffset()+1)
	}
	if err == nil {
		*count++
	}
	return err
}
