package idempotence

// This file takes back what the log has lost: its tail, when a follower cuts
// off what the new leader does not have, or all of it.

// Truncate tells the manager that the log was cut to end at to: every record at
// or past it is gone. The remembered batches that reach to or past it are
// forgotten, since a log does not cut a batch in half, and a producer of which
// nothing is left is forgotten with them. The end offset becomes to, if it was
// higher. A to below 0 counts as 0. Open reservations are abandoned in any case.
//
// It returns whether what is left is exactly what would be remembered if the log
// had never been longer than to, LastActivity aside. That is what a rebuild from
// the log gives, but for producers that had been forgotten before and batches
// that retention has deleted. It is always true where to is 0. It is false where
// that cannot be known, since the past is not kept:
//
//   - where a producer loses batches and had more than the window holds,
//   - where one loses all batches of its newest epoch and had another before,
//   - where a transaction marker, or a batch without sequences, was cut off,
//   - where to lies before a point at which producers were forgotten,
//   - and after any of these from then on, and also once a replay has brought back
//     a producer that was forgotten, until a restore, Reset, or a Truncate to 0;
//   - where batches that were in flight may be in the log below to, until that is
//     replayed or cut off.
//
// What is left then is safe (no batch that was cut off is answered as a
// duplicate) but may refuse what a rebuild would accept, and may accept a first
// batch anew of which the window is gone. The embedder calls Reset, restores the
// newest snapshot at or before to and replays from there.
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
	case to < m.logEndOffset():
		m.truncate(to)
	}
	return exact && !m.inexact
}

// truncate is Truncate below the log's end offset.
func (m *state) truncate(to int64) {
	m.truncations.Add(1)
	m.inexact = m.inexact || to <= m.lastMarker || to < m.lastForgetEnd
	m.endOffset = min(m.endOffset, to)
	m.lastMarker = min(m.lastMarker, to-1)
	m.lastForgetEnd = min(m.lastForgetEnd, to)
	m.restoredLogEnd = min(m.restoredLogEnd, to)
	// From the last row down, since forgetting one moves the last row, which
	// has been looked at, into its place.
	for row := m.table.rows; row > 0; row-- {
		if !m.truncateRow(row-1, to) {
			m.inexact = true
		}
	}
	// Some may no longer have a transaction open. Those that do are parked again
	// when their turn comes.
	m.unpinAll()
}

// truncateRow takes back what the producer in a row did at or past to, and
// returns whether what is left of it is known to be right.
func (m *state) truncateRow(row uint32, to int64) bool {
	if m.table.at(row).endsBy(to) {
		return true
	}
	known, gone := m.table.own(row).cut(to)
	if gone {
		m.forget(row)
	}
	return known
}

// endsBy reports whether all that is remembered lies below to.
func (p *producer) endsBy(to int64) bool {
	return p.txnFirst < to && !p.reaches(to)
}

// cut takes back what the producer did at or past to. It returns whether what is
// left is known to be right, and whether nothing is.
func (p *producer) cut(to int64) (known, gone bool) {
	p.txnFirst = before(p.txnFirst, to)
	known = !p.window.evicted
	for p.reaches(to) {
		p.txnFirst = before(p.txnFirst, p.window.newest().baseOffset)
		p.window.pop()
	}
	if p.window.count > 0 {
		return known, false
	}
	known = known && p.history&hadEpoch == 0
	return known, known && p.history&hadMarker == 0
}

// reaches reports whether the newest batch remembered is not wholly below to.
func (p *producer) reaches(to int64) bool {
	if p.window.count == 0 {
		return false
	}
	newest := p.window.newest()
	return newest.baseOffset > to-int64(newest.span.count())
}

// before returns the first offset of a transaction, or noTxn if that is not
// before limit.
func before(txnFirst, limit int64) int64 {
	if txnFirst >= limit {
		return noTxn
	}
	return txnFirst
}

// Reset tells the manager that the log was deleted and created again: every
// producer is forgotten, and the end offset is 0. What it keeps is MaxProducerID,
// which no deletion makes untrue, the time of the last Expire, and the counts of
// Stats. Open reservations are abandoned. Safe for concurrent use.
func (m *ProducerStateManager) Reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dropInFlight()
	m.empty()
}

// empty forgets everything that an empty log has nothing of. Requires mu held,
// and nothing in flight.
func (m *state) empty() {
	m.truncations.Add(1)
	m.table = newTable()
	m.recency = recency{now: m.recency.now}
	m.endOffset, m.restoredLogEnd = 0, 0
	m.lastMarker, m.lastForgetEnd, m.inexact = noOffset, 0, false
}
