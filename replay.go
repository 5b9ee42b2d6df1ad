package idempotence

// This file rebuilds the state from the log. The log is the truth: nothing is
// judged, only whether the bytes are still those that were written. Four ways
// in which a log can end are told apart, because a broker does something else
// about each: the clean end, a tail torn off by a crash, damage, and a failing
// read.

import (
	"fmt"
	"io"
)

// Returned by [ProducerStateManager.ReplayLog], inside a [*LogError].
var (
	// ErrTornTail: the log ends in a batch that is incomplete, as a crash in the
	// middle of an append leaves it, or in zeros, as a preallocated segment
	// does. No complete batch follows. The broker cuts the segment off after
	// [ReplayResult].Bytes and goes on. Only the newest segment of a log can be
	// torn; in an older one this is damage too.
	ErrTornTail error = &reason{text: "torn tail of log", code: codeKafkaStorageError}

	// ErrCorruptLog: what stands in the log is not what was once written there,
	// or never was a batch, and good batches may follow. Cutting the segment off
	// may lose acknowledged records, so a broker does not do it unasked: it
	// fetches the rest from a replica, or leaves the partition offline.
	ErrCorruptLog error = &reason{text: "corrupt log", code: codeKafkaStorageError}
)

// LogError is the error of a log that could not be read to a clean end: why,
// and where the good part of it ends. Reach it with errors.As. Test for the
// reason with errors.Is.
type LogError struct {
	// Position is where the good part ends, in bytes from the beginning of the
	// input: [ReplayResult].Bytes. What is wrong begins there.
	Position int64
	// Offset is one past the last offset of the good part:
	// [ReplayResult].EndOffset.
	Offset int64
	// Err is the reason: it is ErrTornTail or ErrCorruptLog, or wraps the error
	// that the reader returned.
	Err error
}

// Unwrap returns the reason.
func (e *LogError) Unwrap() error { return e.Err }

// Error begins with the reason and says where the good part ends.
func (e *LogError) Error() string {
	return fmt.Sprintf("%v; the log is good up to byte %d, offset %d", e.Err, e.Position, e.Offset)
}

// ReplayResult says what the good part of a log holds: all of it, or what comes
// before the first batch that is not whole and right.
type ReplayResult struct {
	// Bytes is the length of the good part.
	Bytes int64
	// EndOffset is one past the last offset of the good part. Where nothing is
	// in it, it is the EndOffset that the manager had before.
	EndOffset int64
	// Batches counts the data batches of format v2, with a producer id or
	// without, those emptied by compaction included.
	Batches int64
	// Markers counts the markers that end a transaction.
	Markers int64
	// Others counts what says nothing about producers: other control batches,
	// and messages of format v0 and v1, of which a compressed set counts once.
	Others int64
}

// logSink is told what a log holds, in log order and only after the checksum
// was found right. An error ends the reading in front of the entry.
type logSink interface {
	replayBatch(b Batch, baseOffset int64) error
	replayMarker(m endMarker, offset int64) error
	// skipTo is called for what says nothing about producers, and ends at
	// endOffset.
	skipTo(endOffset int64) error
}

// readLog reads a log to its end, or to where it stops being good, and tells
// sink what is in it. The sink knows of everything up to endOffset.
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
			return res, &LogError{Position: res.Bytes, Offset: res.EndOffset, Err: err}
		}
		res.Bytes, res.EndOffset = s.pos, s.nextOffset
	}
}

// apply tells sink of an entry and counts it.
func (r *ReplayResult) apply(e *segmentEntry, sink logSink) error {
	var err error
	count := &r.Others
	switch e.kind {
	case dataEntry:
		count = &r.Batches
		err = sink.replayBatch(e.batch, e.header.BaseOffset)
	case markerEntry:
		count = &r.Markers
		err = sink.replayMarker(e.marker, e.header.BaseOffset)
	default:
		err = sink.skipTo(e.header.LastOffset() + 1)
	}
	if err == nil {
		*count++
	}
	return err
}
