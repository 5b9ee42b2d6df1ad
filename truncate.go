package idempotence

// This file follows a log that is cut: at its tail, when a follower drops what the
// new leader does not have, or to nothing.

// exactness is what Truncate must know of the past to tell whether what it leaves is
// what a rebuild from the log would give. The other facts are in the rows: history,
// and whether the window has evicted a batch.
type exactness struct {
	// inexact is set if the state may already differ from a rebuild, other than in
	// producers forgotten.
	inexact bool
	// lastMarker is the highest known offset of what no window shows: a marker, or
	// the last record of a batch without sequences or of an older epoch; noOffset if
	// there is none.
	lastMarker int64
	// lastForgetEnd is the log end offset when a producer was last forgotten, or 0.
	lastForgetEnd int64
}

// truncate notes that the log was cut to end at to.
func (e *exactness) truncate(to int64) {
	e.inexact = e.inexact || to <= e.lastMarker || to < e.lastForgetEnd
	e.lastMarker = min(e.lastMarker, to-1)
	e.lastForgetEnd = min(e.lastForgetEnd, to)
}

// history holds the two facts about a producer that Truncate needs and its other
// fields no longer show.
type history uint8

const (
	hadEpoch  history = 1 << iota // it had another epoch before
	hadMarker                     // a marker of it was seen, or a batch without sequences
)

// Truncate tells the manager that the log was cut to end at to. It forgets the
// batches with a record at or past to, and the producers that have nothing left. The
// end offset becomes to, if it was higher. A to below 0 counts as 0. Open reservations
// are abandoned in any case.
//
// It returns whether the state is now exact: apart from LastActivity, the one that
// the manager would have if the log had never been longer. A rebuild from the log
// gives that state too, except for producers that had been forgotten and batches that
// retention has deleted. It is always exact if to is 0. It is not if one of these was
// cut off, since the manager does not know what was remembered before:
//
//   - a batch of a producer that had more than the window holds;
//   - all batches of a producer's newest epoch, if it had another before;
//   - a transaction marker, or a batch without sequences or of an epoch older than
//     the remembered one;
//   - a record that was in the log when a producer was last forgotten.
//
// After one of these, and after a replay has brought back a forgotten producer, no
// Truncate is exact until a restore, Reset, or a Truncate to 0. Nor is it while
// batches that were abandoned in flight may be in the log below to; see ReplayedTo.
//
// It is called exact by mistake in one case: a replay that overlaps has skipped a batch
// or marker from before its producer was forgotten, since the producer had come back,
// and all that it had since is cut off. The producer is unknown then, as after Expire.
//
// A state that is not exact is safe: no batch that was cut off is a duplicate. But it
// may refuse what a rebuild would accept, and accept the first batch of a producer
// again whose window is gone. Call Reset, restore the newest snapshot at or
// before to, and replay from there.
//
// It looks at every producer remembered, under the lock. Safe for concurrent
// use; hold the partition's append lock over the cut and the call.
//
// (Kafka's ProducerStateManager.truncateAndReload always reloads.)
func (m *ProducerStateManager) Truncate(to int64) (exact bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	to = max(to, 0)
	exact = m.abandonTruncated(to)
	switch {
	case to == 0:
		m.empty()
	case to < m.knownEnd():
		m.truncate(to)
	}
	return exact && !m.inexact
}

// truncate is Truncate below the known end.
func (s *state) truncate(to int64) {
	s.truncations.Add(1)
	s.exactness.truncate(to)
	s.logEnd.truncate(to)
	// From the last row down, since forgetting one moves the last row, which has
	// been looked at, into its place.
	for row := s.table.rows; row > 0; row-- {
		if !s.truncateRow(row-1, to) {
			s.inexact = true
		}
	}
	s.txns.truncate(to)
	s.unpin()
}

// truncateRow removes what the producer in a row did at or past to. It reports
// whether what is left of it is known to be exact.
func (s *state) truncateRow(row uint32, to int64) bool {
	if s.table.at(row).endsBy(to) {
		return true
	}
	p := s.table.own(row)
	first := p.txnFirst
	known, gone := p.cut(to)
	if p.txnFirst != first {
		s.txns.open.remove(first, p.id)
	}
	if gone {
		s.remove(row)
	}
	return known
}

// endsBy reports whether all that is remembered lies below to.
func (p *producer) endsBy(to int64) bool {
	return p.txnFirst < to && p.newestEnd() <= to
}

// cut removes what the producer did at or past to. It reports whether what is left is
// known to be exact, and whether nothing is left.
func (p *producer) cut(to int64) (known, gone bool) {
	p.txnFirst = before(p.txnFirst, to)
	known = !p.window.evicted
	for p.newestEnd() > to {
		p.txnFirst = before(p.txnFirst, p.newestOffset())
		p.window.pop()
	}
	if p.window.count > 0 {
		return known, false
	}
	known = known && p.history&hadEpoch == 0
	return known, known && p.history&hadMarker == 0
}

// before returns the first offset of a transaction, or noTxn if that is not below
// limit.
func before(txnFirst, limit int64) int64 {
	if txnFirst >= limit {
		return noTxn
	}
	return txnFirst
}

// Reset tells the manager that the log was deleted and created again. Every
// producer is forgotten, and the end offset is 0. MaxProducerID, the time of the
// last Expire and the counters of Stats stay. Open reservations are abandoned. Safe
// for concurrent use.
func (m *ProducerStateManager) Reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dropInFlight()
	m.empty()
}

// empty makes the state that of an empty log. It requires that nothing is in flight.
func (s *state) empty() {
	s.truncations.Add(1)
	s.table = newTable()
	s.recency.clear()
	s.endOffset, s.restoredLogEnd = 0, 0
	s.exactness = exactness{lastMarker: noOffset}
	s.txns.empty(0)
}
