package idempotence

// This file is the tail: the part of the log that may hold batches the manager does
// not know. A batch that was abandoned in flight may be in the log or still get
// there. Until a replay has covered that part, or the log was cut before it, a
// snapshot must end below it and Truncate cannot be exact.

// tail is the part of the log, from one offset on, that may hold unknown batches.
//
// Invariant (audited in the tests): if unknown, from >= 0, and txnFrom is noOffset or
// at least from.
type tail struct {
	unknown   bool  // there is such a part; otherwise the rest is meaningless
	from      int64 // the lowest offset at which an unknown batch can lie
	txnFrom   int64 // the same for a transactional one, or noOffset
	end       int64 // the end offset when the last batch was abandoned
	following bool  // a replay goes on that began at or below from
}

// add records that an abandoned batch may lie at floor or above. The end offset is
// end.
func (t *tail) add(floor, end int64, transactional bool) {
	if !t.unknown {
		*t = tail{unknown: true, from: floor, txnFrom: noOffset}
	}
	t.from = min(t.from, floor)
	t.end, t.following = end, false
	if transactional && (t.txnFrom == noOffset || floor < t.txnFrom) {
		t.txnFrom = floor
	}
}

// mayHold reports whether an unknown batch, or an unknown transactional one, can lie
// at offset.
func (t *tail) mayHold(offset int64, transactional bool) bool {
	if transactional {
		return t.unknown && t.txnFrom != noOffset && offset >= t.txnFrom
	}
	return t.unknown && offset >= t.from
}

// replayed records that a replay has covered [base, end). A replay follows the order
// of the log, so nothing lies between two of its entries. The end offset is logEnd.
func (t *tail) replayed(base, end, logEnd int64) {
	if !t.unknown || base > t.from && !t.following {
		return
	}
	t.following = true
	t.cover(end, logEnd)
}

// cover records that everything below end is known, and that nothing unknown lies at
// logEnd or above.
func (t *tail) cover(end, logEnd int64) {
	t.from = max(t.from, end)
	if t.txnFrom != noOffset {
		t.txnFrom = max(t.txnFrom, end)
	}
	t.unknown = t.unknown && (t.from < logEnd || end < logEnd)
}

// truncate records that the log was cut to end at to.
func (t *tail) truncate(to int64) {
	t.unknown = t.unknown && t.from < to
	t.end = min(t.end, to)
}

// ReplayedTo tells the manager that it has been told of everything that the log holds
// below endOffset, even if that is nothing, or only records without a producer id.
// Call it after AbandonReservations, once the log has settled and was replayed. Until
// then snapshots end below what was abandoned, and Truncate is not exact.
//
// An endOffset above EndOffset is an Advance too. ReplayLog does this itself for a
// log that begins low enough and ends cleanly. Safe for concurrent use.
func (m *ProducerStateManager) ReplayedTo(endOffset int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.advance(endOffset)
	if m.inFlight != nil {
		m.inFlight.tail.cover(endOffset, m.inFlight.tail.end)
	}
}
