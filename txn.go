package idempotence

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
)

// This file is what follows from one partition's log about transactions: which are
// open, the judging of markers, the last stable offset, and which transactions were
// aborted. The coordinator (who takes part, when a transaction ends, time-outs) is
// the embedder's.
//
// A transaction is what one producer appends to the partition with Transactional
// set, from the first such batch to the marker. The rules are those of KIP-98,
// KIP-360, KIP-447 and KIP-890, as Kafka's UnifiedLog, ProducerAppendInfo and
// ProducerStateManager keep them.

// Marker is the control record that ends a transaction (KIP-98). It takes one
// offset of the log.
type Marker struct {
	// ProducerID is 0 or above.
	ProducerID int64
	// Epoch is in 0..32767. With version 2, and when a coordinator fences a
	// producer, it is above that of the transaction's batches.
	Epoch int16
	// CoordinatorEpoch is 0 or above. In a log it is -1 if compaction has removed
	// the record and kept the batch, which still has the producer's epoch. Commit
	// is meaningless then.
	CoordinatorEpoch int32
	// Commit reports whether the transaction was committed, not aborted.
	Commit bool
	// Version is the transaction version of the request, as in version 2 of
	// WriteTxnMarkers. 0 and 1 are alike; from 2 on the epoch of a marker must be
	// above that of its transaction (KIP-890, KIP-1228). It is not in the log,
	// and a replay ignores it.
	Version int8
}

// batch returns the marker as a batch, for an InFlightError.
func (k *Marker) batch() Batch {
	return Batch{ProducerID: k.ProducerID, Epoch: k.Epoch, BaseSequence: noSequence, Transactional: true}
}

// transactions is what is known of the transactions of a partition. The first offset
// of an open one is in the row of its producer too.
//
// Invariants (audited in the tests):
//  1. open has exactly the producers with an open transaction, by first offset.
//  2. Every marker in ended lies at or past watermark, which is not noOffset.
type transactions struct {
	open        offsetQueue // producer ids by first offset
	ended       endedQueue
	aborted     abortedRanges
	watermark   int64 // the highest given to LastStableOffset, or noOffset
	logStart    int64 // the highest given to AdvanceStart
	abortedFrom int64 // aborted transactions are known from here on
}

// transactions returns s.txns, and creates it if there is none.
func (s *state) transactions() *transactions {
	if s.txns == nil {
		s.txns = &transactions{watermark: noOffset}
	}
	return s.txns
}

// bounds returns the log start offset, and the offset from which on aborted
// transactions are known as far as the log reaches back.
func (t *transactions) bounds() (logStart, abortedFrom int64) {
	if t == nil {
		return 0, 0
	}
	return t.logStart, t.abortedFrom
}

// setBounds sets what bounds returns.
func (s *state) setBounds(logStart, abortedFrom int64) {
	if s.txns != nil || logStart > 0 || abortedFrom > 0 {
		t := s.transactions()
		t.logStart, t.abortedFrom = logStart, abortedFrom
	}
}

// empty forgets every transaction, since the log ends at end and holds none. It keeps
// whether LastStableOffset was called.
func (t *transactions) empty(end int64) {
	if t != nil {
		*t = transactions{watermark: min(t.watermark, end)}
	}
}

// openTxn opens a transaction of p at baseOffset, unless one is open.
func (s *state) openTxn(p *producer, baseOffset int64) {
	if !p.inTransaction() {
		p.txnFirst = baseOffset
		s.transactions().open.add(baseOffset, p.id)
	}
}

// shareAborted returns the aborted transactions for a snapshot.
func (t *transactions) shareAborted() []AbortedTransaction {
	if t == nil {
		return nil
	}
	return t.aborted.share()
}

// findOpenTxns enters the open transactions of a restored state into txns. The
// producers that have one are pinned.
func (s *state) findOpenTxns() {
	var open []offsetEntry
	for at := s.recency.pinned.oldest; at != 0; at = s.table.at(at.row()).newer {
		p := s.table.at(at.row())
		open = append(open, offsetEntry{p.txnFirst, p.id})
	}
	if len(open) == 0 {
		return
	}
	slices.SortStableFunc(open, func(a, b offsetEntry) int { return cmp.Compare(a.key, b.key) })
	s.transactions().open = offsetQueue{entries: open, live: len(open)}
}

// keepTxns takes over what a restore keeps of the former state: the higher log start
// offset, and whether LastStableOffset was called.
func (s *state) keepTxns(former *state) {
	logStart, _ := former.txns.bounds()
	s.advanceStart(logStart)
	if t := former.txns; t != nil && t.watermark != noOffset {
		s.transactions().watermark = min(t.watermark, s.endOffset)
	}
}

// opensFrom returns the lowest offset at which b may open a transaction. It is the
// highest high watermark given to LastStableOffset, since below it the last stable
// offset would fall, or 0 if b opens none. p may be nil.
func (t *transactions) opensFrom(b *Batch, p *producer) int64 {
	if t == nil || !b.Transactional || p != nil && p.inTransaction() {
		return 0
	}
	return max(t.watermark, 0)
}

// end ends the open transaction of p by the marker at offset, unless it begins behind
// the marker.
func (t *transactions) end(p *producer, offset int64, commit bool) {
	if !p.inTransaction() || p.txnFirst >= offset {
		return
	}
	if !commit && offset >= t.logStart {
		t.aborted.add(AbortedTransaction{p.id, p.txnFirst, offset})
	}
	if t.watermark != noOffset && offset >= t.watermark {
		t.ended.add(p.txnFirst, offset)
	}
	t.open.remove(p.txnFirst, p.id)
	p.txnFirst = noTxn
}

// CheckMarker judges an end-of-transaction marker that is about to be appended, and
// changes nothing but the counters of Stats. In this order, it returns
//
//   - ErrInvalidBatch for a negative producer id, epoch or coordinator epoch;
//   - an [*InFlightError] if something of the producer is in flight, since a refusal
//     must not depend on an append that may still fail: wait for it and ask again;
//   - ErrFenced if the producer's epoch is newer; with version 2 also if it is the
//     same while a transaction is open, unless it is 32767, the last one
//     (KAFKA-20090). The same epoch with none open is a retry (KAFKA-19999);
//   - ErrCoordinatorFenced if the coordinator epoch is below one that was seen.
//
// All but the second are in a [*MarkerError]. A coordinator takes 47 and 52 as
// final and drops the marker; it retries 3, 6, 7, 19, 20 and 56, and must be sent
// nothing else. A marker of an unknown producer, or without data on this partition,
// is accepted, and so is a repeated one.
//
// Safe for concurrent use; the answer holds until the next Commit for the producer,
// so hold the append lock until CommitMarker returns. (KIP-98, KIP-890 and KIP-1228;
// Kafka's ProducerAppendInfo.checkProducerEpoch and appendEndTxnMarker.)
func (m *ProducerStateManager) CheckMarker(k Marker) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, err := m.judgeMarker(&k)
	if err != nil {
		return m.refuseMarker(&k, p, noOffset, err)
	}
	return nil
}

// judgeMarker applies the rules of CheckMarker. It also returns the producer, or nil
// if it is unknown.
func (s *state) judgeMarker(k *Marker) (*producer, error) {
	if k.ProducerID < 0 || k.Epoch < 0 || k.CoordinatorEpoch < 0 {
		return nil, ErrInvalidBatch
	}
	p := s.table.find(k.ProducerID)
	switch {
	case s.inFlight.queueOf(k.ProducerID, p) != nil:
		return p, ErrInFlight
	case p == nil:
		return nil, nil
	case k.Epoch < p.epoch || k.Epoch == p.epoch && k.Version >= 2 && p.inTransaction() && k.Epoch < math.MaxInt16:
		return p, ErrFenced
	case k.CoordinatorEpoch < p.coordinatorEpoch:
		return p, ErrCoordinatorFenced
	}
	return p, nil
}

// refuseMarker counts a refusal and gathers its facts. p may be nil.
func (s *state) refuseMarker(k *Marker, p *producer, offset int64, why error) error {
	if q := s.inFlight.queueOf(k.ProducerID, p); why == ErrInFlight && q != nil {
		s.stats.InFlight++
		return newInFlightError(k.batch(), q, q.at(q.count-1))
	}
	s.stats.count(why)
	e := newMarkerError(*k, offset, why)
	if p != nil {
		e.CurrentEpoch, e.CurrentCoordinatorEpoch, e.TransactionFirstOffset = p.epoch, p.coordinatorEpoch, p.txnFirst
	}
	return e
}

// CommitMarker records that a marker has been appended to the log at offset. The
// producer's transaction ends, and if it was aborted its range joins
// AbortedTransactions. A newer epoch is adopted and the window of the older one
// forgotten, an unknown producer becomes known by its epoch, and the coordinator
// epoch becomes the higher of the two. The producer counts as active.
//
// The marker is judged again. CommitMarker refuses what CheckMarker would refuse now,
// with the same error. It returns ErrOffsetOrder if offset is negative or the largest
// int64, lies below the end of the newest batch remembered of the producer, or does
// not lie past the first offset of its open transaction; with Config.Contiguous also
// if it is not EndOffset. An error changes nothing but the counters of Stats. As from
// CommitBatch, it means that the log and the state have parted. Safe for concurrent
// use; hold the append lock from CheckMarker until it returns.
func (m *ProducerStateManager) CommitMarker(k Marker, offset int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, err := m.judgeMarker(&k)
	if err == nil && (!m.fits(p.newestEnd(), offset, 1, m.inFlight.offsets()) || !endsTxn(p, offset)) {
		err = ErrOffsetOrder
	}
	if err != nil {
		return m.refuseMarker(&k, p, offset, err)
	}
	m.stats.Markers++
	m.advance(offset + 1)
	m.applyMarker(&k, offset)
	return nil
}

// endsTxn reports whether a marker at offset lies past the first offset of the open
// transaction of p, if there is one. p may be nil.
func endsTxn(p *producer, offset int64) bool {
	return p == nil || p.txnFirst < offset
}

// applyMarker does what a marker at offset does, whatever its epochs.
func (s *state) applyMarker(k *Marker, offset int64) {
	s.lastMarker = max(s.lastMarker, offset)
	p, row := s.edit(k.ProducerID, k.Epoch)
	if k.CoordinatorEpoch != noCoordinator {
		s.txns.end(p, offset, k.Commit)
	}
	if k.Epoch > p.epoch {
		p.adopt(k.Epoch)
	}
	p.coordinatorEpoch = max(p.coordinatorEpoch, k.CoordinatorEpoch)
	p.history |= hadMarker
	s.touch(p, row)
}

// ReserveMarker is [ProducerStateManager.CheckMarker] for a broker whose append
// finishes later: on success the marker takes a place, and the Reservation must end
// in Commit with the offset of the marker or in Abort. While the marker is in
// flight, every batch and marker of its producer gets an [*InFlightError], except
// for retries of remembered batches and what is malformed or fenced. Commit is
// CommitMarker; Abort leaves everything as it was.
//
// It returns the errors of CheckMarker. Safe for concurrent use; hold the lock of
// Reserve over ReserveMarker and the hand-over to the log.
func (m *ProducerStateManager) ReserveMarker(k Marker) (*Reservation, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, err := m.judgeMarker(&k)
	if err != nil {
		return nil, m.refuseMarker(&k, p, noOffset, err)
	}
	n := m.queueFor(k.ProducerID, k.Epoch, p)
	m.inFlight.queues[n].marker = &k
	return m.inFlight.reservation(m, n, m.inFlight.add(n, makeSpan(0, 1), m.knownEnd(), false)), nil
}

// commitMarker commits the marker in a queue, which was appended at offset.
func (s *state) commitMarker(n uint32, offset int64) error {
	q := &s.inFlight.queues[n]
	k := q.marker
	p := s.table.find(k.ProducerID)
	if !s.fitsReserved(q, 0, offset, s.lowestReserved(q, 0, p)) || !endsTxn(p, offset) {
		return s.refuseMarker(k, p, offset, ErrOffsetOrder)
	}
	s.stats.Markers++
	s.advance(offset + 1)
	s.inFlight.left(q.at(0))
	q.pop()
	s.closeQueue(n)
	s.applyMarker(k, offset)
	return nil
}

// LastStableOffset returns the offset up to which a reader of committed records may
// read (isolation level READ_COMMITTED), for a log whose high watermark is given. It
// is the lowest of
//
//   - the high watermark, where below 0 counts as 0;
//   - the first offset of each open transaction;
//   - the first offset of each ended one whose marker lies at or past the high
//     watermark;
//   - the end that the log had when a transactional batch in flight was reserved,
//     or one that was abandoned and has not been replayed or cut off since,
//
// and never below the start given to AdvanceStart. It never falls while the high
// watermark rises and nothing is cut; a lower one brings back nothing that an
// earlier call has released.
//
// The call is an Advance(highWatermark) too. The high watermark must not lie past a
// batch that is in the log and neither committed nor reserved: move it under the
// append lock, or reserve. Ended transactions are kept for this only from the first
// call on, and until the high watermark has passed their marker. After Truncate has
// returned false, and during a recovery until the replay has reached the log's end,
// the answer means nothing.
//
// It takes amortised constant time, and allocates only at the first call. Safe for
// concurrent use. (Kafka's UnifiedLog.fetchLastStableOffsetMetadata.)
func (m *ProducerStateManager) LastStableOffset(highWatermark int64) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	stable := max(highWatermark, 0)
	m.advance(stable)
	t := m.transactions()
	t.watermark = max(t.watermark, stable)
	t.ended.release(t.watermark)
	if first, ok := t.open.first(); ok {
		stable = min(stable, first.key)
	}
	if len(t.ended) > 0 {
		stable = min(stable, t.ended[0].first)
	}
	return max(m.inFlight.lowestTxn(stable), t.logStart)
}

// AbortedTransactions returns what a reader of the offsets [from, to) must know to
// leave out the records of aborted transactions: those whose marker lies at or past
// from and whose first offset lies before to, in the order of their markers. It
// returns nil if there are none, without an allocation.
//
// For a Fetch, from is the offset asked for and to is one past the last offset
// returned, at or below the last stable offset. Call LastStableOffset, then read the
// records, then call AbortedTransactions. It returns ErrAbortedUnknown if not all are
// known from that offset on: it lies below the log's start, or below the end of a
// restored snapshot that does not hold them, which is one of Kafka's or one of format
// version 1. Safe for concurrent use. (Kafka's TransactionIndex.collectAbortedTxns.)
func (m *ProducerStateManager) AbortedTransactions(from, to int64) ([]AbortedTransaction, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if known := max(m.txns.bounds()); from < known {
		return nil, fmt.Errorf("%w: asked from offset %d, known from %d", ErrAbortedUnknown, from, known)
	}
	if m.txns == nil {
		return nil, nil
	}
	return m.txns.aborted.between(from, to), nil
}

// OldestTransaction returns the producer whose open transaction has the lowest first
// offset, as [ProducerStateManager.Producer] does, and whether one is open. That
// transaction holds the last stable offset back, for good if its coordinator has lost
// it. Safe for concurrent use.
func (m *ProducerStateManager) OldestTransaction() (ProducerState, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.txns == nil {
		return ProducerState{}, false
	}
	first, ok := m.txns.open.first()
	if !ok {
		return ProducerState{}, false
	}
	return m.producer(first.value)
}

// AdvanceStart tells the manager that every record below logStart has been deleted.
// Aborted transactions whose marker was deleted are forgotten; producers and open
// transactions are not. A logStart at or below the one known is ignored, and one
// above EndOffset is an Advance too. Snapshots hold it, a restore keeps the higher
// of the two, and Reset and Truncate(0) put it back to 0. Safe for concurrent use.
func (m *ProducerStateManager) AdvanceStart(logStart int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.advanceStart(logStart)
}

func (s *state) advanceStart(logStart int64) {
	if known, abortedFrom := s.txns.bounds(); logStart > known {
		s.setBounds(logStart, abortedFrom)
		s.advance(logStart)
		s.txns.aborted.forgetBelow(logStart)
	}
}

// truncate takes back what is known of transactions at or past to, except for the open
// ones.
func (t *transactions) truncate(to int64) {
	if t != nil {
		t.logStart, t.abortedFrom = min(t.logStart, to), min(t.abortedFrom, to)
		t.aborted.truncate(to)
		t.ended.truncate(to)
		t.watermark = min(t.watermark, to)
	}
}

// endedQueue holds ended transactions whose marker the high watermark has not
// passed. It keeps only those that can be the lowest. One that begins later than
// another and leaves earlier cannot be.
//
// Invariant (audited in the tests): markers and first offsets rise strictly.
type endedQueue []endedTxn

type endedTxn struct{ first, marker int64 }

func (q *endedQueue) add(first, marker int64) {
	i := len(*q)
	for i > 0 && (*q)[i-1].marker >= marker {
		i--
	}
	if i < len(*q) && (*q)[i].first <= first {
		return
	}
	from, to := i, i
	for from > 0 && (*q)[from-1].first >= first {
		from--
	}
	if to < len(*q) && (*q)[to].marker == marker {
		to++
	}
	e := endedTxn{first, marker}
	if from == len(*q) {
		*q = append(*q, e) // the common case, without the cost of Replace
	} else {
		*q = slices.Replace(*q, from, to, e)
	}
}

// release drops the transactions whose marker lies below the high watermark.
func (q *endedQueue) release(highWatermark int64) {
	n := 0
	for n < len(*q) && (*q)[n].marker < highWatermark {
		n++
	}
	if *q = (*q)[n:]; len(*q) == 0 && cap(*q) > 1024 {
		*q = nil
	}
}

// truncate drops the transactions whose marker lies at or past to. It does not bring
// back those that add left out because of them: Truncate returns false then.
func (q *endedQueue) truncate(to int64) {
	n := len(*q)
	for n > 0 && (*q)[n-1].marker >= to {
		n--
	}
	*q = (*q)[:n]
}

// MarkerError is the error of a refused marker: the reason, and the facts that led
// to it. Reach it with errors.As.
type MarkerError struct {
	// Marker is the marker that was refused, as it was given.
	Marker Marker
	// CurrentEpoch is the producer's epoch, or -1 if it is unknown.
	CurrentEpoch int16
	// CurrentCoordinatorEpoch is the highest coordinator epoch that was seen, or -1.
	CurrentCoordinatorEpoch int32
	// TransactionFirstOffset is the first offset of the open transaction, or -1.
	TransactionFirstOffset int64
	// Offset is the offset given to CommitMarker, Commit or ReplayMarker, or -1.
	Offset int64
	// Err is the reason, one of the package's sentinels.
	Err error
}

// newMarkerError returns an error with the facts that are always known.
func newMarkerError(k Marker, offset int64, why error) *MarkerError {
	return &MarkerError{
		Marker: k, CurrentEpoch: noEpoch, CurrentCoordinatorEpoch: noCoordinator,
		TransactionFirstOffset: noOffset, Offset: offset, Err: why,
	}
}

// Unwrap returns the reason.
func (e *MarkerError) Unwrap() error { return e.Err }

// Error begins with the reason and gives what was received and what was expected.
func (e *MarkerError) Error() string {
	outcome := "abort"
	if e.Marker.Commit {
		outcome = "commit"
	}
	s := fmt.Sprintf("%v: %s marker of producer %d epoch %d coordinator epoch %d", e.Err, outcome,
		e.Marker.ProducerID, e.Marker.Epoch, e.Marker.CoordinatorEpoch)
	switch {
	case errors.Is(e.Err, ErrFenced) && e.Marker.Epoch == e.CurrentEpoch:
		s += fmt.Sprintf(": version 2 requires an epoch above %d", e.CurrentEpoch)
	case errors.Is(e.Err, ErrFenced):
		s += fmt.Sprintf(": current epoch is %d", e.CurrentEpoch)
	case errors.Is(e.Err, ErrCoordinatorFenced):
		s += fmt.Sprintf(": current coordinator epoch is %d", e.CurrentCoordinatorEpoch)
	case errors.Is(e.Err, ErrOffsetOrder):
		s += fmt.Sprintf(": offset %d, transaction begins at %d", e.Offset, e.TransactionFirstOffset)
	}
	return s
}
