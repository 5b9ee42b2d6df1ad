package idempotence

import "math"

// This file is the end of the log, as far as the manager knows it, and which offsets
// the log can have given to an append. It knows neither sequences nor epochs.

// logEnd is what is known of the log's end.
//
// Invariant (audited in the tests): endOffset and restoredLogEnd are 0 or above.
type logEnd struct {
	// endOffset is one past the highest offset known. It falls only when the log
	// is cut or the state is replaced.
	endOffset int64
	// restoredLogEnd is the log end offset recorded in the restored snapshot, or
	// 0. The state is incomplete until replay reaches it.
	restoredLogEnd int64
	contiguous     bool // Config.Contiguous: the log has no gaps
}

// knownEnd returns one past the highest offset at which something may be
// remembered. That is the end offset, or more until the replay after a restore is
// complete.
func (l *logEnd) knownEnd() int64 { return max(l.endOffset, l.restoredLogEnd) }

func (l *logEnd) advance(endOffset int64) {
	l.endOffset = max(l.endOffset, endOffset)
}

// truncate notes that the log was cut to end at to.
func (l *logEnd) truncate(to int64) {
	l.endOffset = min(l.endOffset, to)
	l.restoredLogEnd = min(l.restoredLogEnd, to)
}

// roomAt reports whether a log can hold count records from baseOffset on.
func roomAt(baseOffset, count int64) bool {
	return baseOffset >= 0 && baseOffset <= math.MaxInt64-count
}

// reaches reports whether the log can continue at offset: if it has no gaps, only the
// given number of offsets in flight can lie between its end and offset.
func (l *logEnd) reaches(offset, inFlight int64) bool {
	return !l.contiguous || offset-l.endOffset <= inFlight
}

// lowestNext returns the lowest base offset that the log can give to an append of a
// producer whose newest batch ends at after.
func (l *logEnd) lowestNext(after int64) int64 {
	if l.contiguous {
		return l.knownEnd()
	}
	return after
}

// fits reports whether the log can have given baseOffset to an append of count records
// of a producer whose newest batch ends at after.
func (l *logEnd) fits(after, baseOffset, count, inFlight int64) bool {
	return roomAt(baseOffset, count) && baseOffset >= l.lowestNext(after) && l.reaches(baseOffset, inFlight)
}

// isNext is fits for the plain next append: nothing remembered lies at or past
// baseOffset, and if the log has no gaps, baseOffset is the known end.
func (l *logEnd) isNext(baseOffset, count int64) bool {
	if baseOffset != l.endOffset && (baseOffset < l.endOffset || l.contiguous) {
		return false
	}
	return baseOffset >= l.restoredLogEnd && baseOffset <= math.MaxInt64-count
}

// Advance tells the manager that the log ends at endOffset, one past its last
// record. Use it for appends that carry no producer id and were not committed. An
// endOffset at or below the one known is ignored. Safe for concurrent use.
func (m *ProducerStateManager) Advance(endOffset int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.advance(endOffset)
}

// EndOffset returns one past the highest offset that the manager knows, from what
// was committed, replayed or restored and from Advance; 0 for a new one. Only
// Truncate, Reset and a restore lower it. Safe for concurrent use.
func (m *ProducerStateManager) EndOffset() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.endOffset
}
