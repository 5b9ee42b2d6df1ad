package idempotence

import (
	"context"
	"errors"
	"fmt"
)

// This file is for brokers whose append finishes later: replicated, grouped, or
// sent to object storage. A batch is judged and takes its place when it is
// reserved, and it is remembered when its append has succeeded. Between the two
// it is in flight, and several batches of one producer may be.
//
// The batches in flight of a producer stand in a lane, in the order in which
// they were reserved. What has been committed leaves at the head and enters the
// window; whoever aborts takes everything behind along, since it would leave a
// gap. A producer has a lane only while something of it is in flight.

// Returned by Reserve, and by Check and Commit where a reservation is in the
// way.
var (
	// ErrInFlight: the batch cannot be judged until an append that is in flight
	// has settled: it is an exact copy of one, it has a newer epoch than one, or
	// WindowSize batches of its producer are in flight already. It must be
	// neither appended nor acknowledged. The broker waits for
	// [InFlightError].Done and asks again, as [ProducerStateManager.ReserveWait]
	// does, or answers 7 REQUEST_TIMED_OUT, which makes a client try again. It
	// comes in an [*InFlightError].
	ErrInFlight error = &reason{text: "append in flight", code: codeRequestTimedOut}
)

// Returned by the methods of a Reservation.
var (
	// ErrAbandoned: the reservation was ended by somebody else: an earlier one
	// of its producer was aborted, or AbandonReservations, Truncate, Reset, a
	// restore or a replay came between. The batch is not remembered. If it is in
	// the log all the same, it must be cut off, unless it is found there again
	// by a replay. The broker answers 6 NOT_LEADER_OR_FOLLOWER, which makes a
	// client look for the leader and try again.
	ErrAbandoned error = &reason{text: "reservation abandoned", code: codeNotLeaderOrFollower}

	// ErrSettled: the reservation was committed or aborted before, by this very
	// handle. Nothing has changed. It is a fault of the caller, who has had the
	// answer for the producer already; it has no code of its own (-1).
	ErrSettled error = &reason{text: "reservation already settled", code: codeUnknownServerError}

	// ErrHole: the aborted append comes before one of the same producer that is
	// already in the log, so the log has a hole that no retry can fill. The
	// reservation has ended and so have all behind it, those that were committed
	// included: none of them is remembered. The broker cuts the log off before
	// the first of them that is in the log, or gives up leadership. It answers
	// 56 KAFKA_STORAGE_ERROR, which makes a client try again. It comes in a
	// [*BatchError], whose FirstOffset is that of the first committed one.
	ErrHole error = &reason{text: "aborted append leaves a hole in the log", code: codeKafkaStorageError}
)

// InFlightError says that a batch cannot be judged yet, and on what it waits.
// Reach it with errors.As; it is an ErrInFlight.
type InFlightError struct {
	// Batch is the batch that was asked about, as it was given.
	Batch Batch
	// Epoch, FirstSequence and LastSequence tell which append it waits for.
	Epoch                       int16
	FirstSequence, LastSequence int32

	done chan struct{}
}

// Done returns a channel that is closed once the append in the way has settled:
// it has become visible, has been aborted, or has been abandoned. Ask again
// then; the answer may be anything, ErrInFlight included. Safe for concurrent
// use.
func (e *InFlightError) Done() <-chan struct{} { return e.done }

// Unwrap returns ErrInFlight.
func (e *InFlightError) Unwrap() error { return ErrInFlight }

// Error names the batch and what it waits for.
func (e *InFlightError) Error() string {
	return fmt.Sprintf("%v: producer %d epoch %d sequence %d count %d: waits for epoch %d sequences %d to %d", ErrInFlight,
		e.Batch.ProducerID, e.Batch.Epoch, e.Batch.BaseSequence, e.Batch.Count, e.Epoch, e.FirstSequence, e.LastSequence)
}

// Reservation is the place of a batch that is being appended. It must end in
// exactly one call of Commit or Abort. One that never ends keeps its producer
// from being forgotten, and keeps whoever waits for it waiting.
//
// Reservations are allocated reservationBlock at a time, since one allocation
// for each would cost as much as all the rest of Reserve and Commit.
//
// Its methods are safe for concurrent use, and a late or repeated call does no
// harm. It must not be copied.
type Reservation struct {
	m      *ProducerStateManager
	ticket uint64
	queue  uint32
	ended  bool // by Commit or Abort of this handle; protected by m.mu
}

// reservationBlock is how many reservations are allocated together. A single one
// that is kept keeps the block, of 1.5 KiB; one more would not fit into that with
// the allocator's header.
const reservationBlock = 63

// flight is one batch in flight. Where it has left, done is nil, and the rest
// means nothing.
type inFlightBatch struct {
	ticket        uint64
	span          span
	baseOffset    int64 // where committed
	floor         int64 // the end offset when it was reserved; it lies no lower
	done          chan struct{}
	transactional bool
	committed     bool // but behind one that is not
}

// lowest returns the lowest offset at which the batch may lie.
func (f *inFlightBatch) lowest() int64 {
	if f.committed {
		return f.baseOffset
	}
	return f.floor
}

// end lets go whoever waits for the flight.
func (f *inFlightBatch) end() {
	if f.done != nil {
		close(f.done)
		f.done = nil
	}
}

// lane holds the batches in flight of one producer, oldest first.
//
// Invariants (audited in the tests):
//  1. 0 <= count <= WindowSize, and a lane in use has count > 0.
//  2. Each span starts one after the last one ends, and next is one after the
//     newest; all are of one epoch, which is not older than the producer's.
//  3. The head is not committed: it would have left.
//  4. Base offsets of committed ones rise, with room for those between.
type queue struct {
	pid     int64
	epoch   int16
	start   uint8
	count   uint8
	next    int32
	batches [WindowSize]inFlightBatch
}

// slot maps position i, counted from the head, to its place in flights.
func (l *queue) slot(i uint8) uint8 { return ringSlot(l.start, i) }

// at returns flight i, counted from the head. It requires i < count, or, for
// the place of the next one, i == count.
func (l *queue) at(i uint8) *inFlightBatch { return &l.batches[l.slot(i)] }

// find returns the position of the flight with a ticket.
func (l *queue) find(ticket uint64) (uint8, bool) {
	for i := range l.count {
		if l.at(i).ticket == ticket {
			return i, true
		}
	}
	return 0, false
}

// copyOf returns the flight of exactly s, or nil.
func (l *queue) copyOf(s span) *inFlightBatch {
	for i := range l.count {
		if f := l.at(i); f.span == s {
			return f
		}
	}
	return nil
}

// roomFor reports whether flight i can lie at baseOffset: behind everything
// before it, of which what is not committed yet takes at least its count, and
// likewise in front of what is behind it. The first of them can lie from low on.
//
// It reckons without a sign: what is reserved may need more offsets than there
// are.
func (l *queue) roomFor(i uint8, baseOffset, low int64) bool {
	end := uint64(low)
	for j := range i {
		f := l.at(j)
		if f.committed {
			end = uint64(f.baseOffset)
		}
		end += uint64(f.span.count())
	}
	count := l.at(i).span.count()
	return roomAt(baseOffset, count) && uint64(baseOffset) >= end && l.roomBehind(i, uint64(baseOffset)+uint64(count))
}

// roomBehind reports whether what is behind flight i can lie from end on.
func (l *queue) roomBehind(i uint8, end uint64) bool {
	for j := i + 1; j < l.count; j++ {
		f := l.at(j)
		if f.committed {
			return uint64(f.baseOffset) >= end
		}
		end += uint64(f.span.count())
	}
	return true
}

// pipelines is everything about reservations. A manager that never had one has
// none. A lane is used again and never given back, some 300 bytes for as many
// producers as ever had something in flight at once.
//
// Invariants (audited in the tests):
//  1. A lane is in free, or is that of exactly one producer: the one whose row
//     has its number plus one, or, where the producer has no row, the one that
//     newcomers has it for.
//  2. doubt is noOffset or at most the end offset.
type inFlightSet struct {
	queues    []queue
	free      []uint32
	newcomers map[int64]uint32
	tickets   uint64        // handed out so far
	block     []Reservation // of which the first used have been handed out
	used      int
	// doubt is an offset from which on the log may hold batches whose append
	// was in flight when it was abandoned, or noOffset.
	unknownFrom int64
	// reading is set while a replay goes on that began at or before doubt.
	reading     bool
	failedFirst failedFirst
}

// owed remembers, of producers of which nothing else is remembered, the first
// batch whose append failed. Where the policy accepts any first batch, the one
// behind it would otherwise be taken for the first, and the failed one would be
// lost without anybody noticing: so it must come again before any other of its
// epoch. Two generations, of which the older is dropped as a whole when as much
// time has passed as a producer is remembered, or when there are as many as
// producers may be.
type failedFirst struct {
	young, old map[int64]firstBatch
	since      instant // when young was begun
}

type firstBatch struct {
	epoch    int16
	sequence int32
}

func (o *failedFirst) get(pid int64) (firstBatch, bool) {
	f, ok := o.young[pid]
	if !ok {
		f, ok = o.old[pid]
	}
	return f, ok
}

func (o *failedFirst) put(pid int64, f firstBatch) {
	if o.young == nil {
		o.young = make(map[int64]firstBatch)
	}
	o.young[pid] = f
}

func (o *failedFirst) drop(pid int64) {
	delete(o.young, pid)
	delete(o.old, pid)
}

func (o *failedFirst) rotate(now instant) {
	*o = failedFirst{old: o.young, since: now}
}

// Reserve judges a batch against what is remembered of its producer and
// everything of it that is in flight, in the order of the reservations.
//
// For Append it returns a Reservation, which must end in Commit or Abort. For
// Duplicate, of a batch that has been committed, it returns none. It refuses as
// CheckBatch does, and with an [*InFlightError] what cannot be judged until
// something in flight has settled: an exact copy of a batch in flight, a newer
// epoch while an older one is in flight, and one batch more than WindowSize. An
// older epoch is fenced by a newer one that is in flight.
//
// A batch without a producer id gets a Reservation too, so that the loop need
// not tell it apart. It is never in the way of anything.
//
// The order in which Reserve is called is the order in which the batches of a
// producer must enter the log. The broker holds the partition's lock over
// Reserve and the hand-over to the log, but not until the append has finished.
// Safe for concurrent use. For Append it makes one small allocation, and mostly
// none: see [Reservation].
func (m *ProducerStateManager) Reserve(b Batch) (*Reservation, Result, error) {
	m.mu.Lock()
	if p := m.table.find(b.ProducerID); p != nil && p.continuedBy(&b) {
		r := m.reserve(&b, p)
		m.mu.Unlock()
		return r, Result{Verdict: Append}, nil
	}
	r, res, err := m.reserveAny(&b)
	m.mu.Unlock()
	return r, res, err
}

// reserveAny is Reserve in general.
func (m *ProducerStateManager) reserveAny(b *Batch) (*Reservation, Result, error) {
	res, p, err := m.judge(b)
	if err != nil {
		return nil, Result{}, m.refuse(*b, p, err)
	}
	if res.Verdict == Duplicate {
		m.stats.Duplicate++
		return nil, res, nil
	}
	return m.reserve(b, p), res, nil
}

// ReserveWait is [ProducerStateManager.Reserve] for a caller who can wait: where
// the batch cannot be judged until an append in flight has settled, it waits for
// that and asks again. A retry that meets its own first copy in flight is so answered as a
// duplicate once the copy is in the log, or takes its place if that failed.
//
// It waits no longer than until ctx is done, and then returns an error that is
// both the cause of ctx and an [*InFlightError]. The append it waited for is
// not touched by that. Safe for concurrent use.
func (m *ProducerStateManager) ReserveWait(ctx context.Context, b Batch) (*Reservation, Result, error) {
	for {
		r, res, err := m.Reserve(b)
		var inFlight *InFlightError
		if !errors.As(err, &inFlight) {
			return r, res, err
		}
		select {
		case <-inFlight.Done():
		case <-ctx.Done():
			return nil, Result{}, fmt.Errorf("%w: %w", inFlight, context.Cause(ctx))
		}
	}
}

// Commit records that the append has succeeded, with the batch's first record
// at baseOffset. The batch becomes visible, as a duplicate to its retries, as
// soon as everything reserved before it of its producer has settled; commits
// may come in any order, as long as the offsets are in the order of the
// reservations.
//
// ErrOffsetOrder says that they are not: baseOffset is negative or below the end
// of the newest batch remembered, or leaves no room for what was reserved before
// the batch or after it. The reservation is open still. ErrAbandoned says that
// somebody else has ended the reservation, and ErrSettled that this call is the
// second. Neither changes anything. Safe for concurrent use.
func (r *Reservation) Commit(baseOffset int64) error {
	m := r.m
	m.mu.Lock()
	if m.applyAlone(r, baseOffset) {
		m.mu.Unlock()
		return nil
	}
	err := r.commit(baseOffset)
	m.mu.Unlock()
	return err
}

// landAlone commits a batch that is alone in its lane and changes nothing but
// the window of its producer. It does nothing and returns false where the case
// is not that simple.
func (m *ProducerStateManager) applyAlone(r *Reservation, baseOffset int64) bool {
	l := &m.inFlight.queues[r.queue]
	f := l.at(0)
	if r.ended || l.count != 1 || f.ticket != r.ticket || f.transactional {
		return false
	}
	p := m.table.find(l.pid)
	if p == nil || p.epoch != l.epoch || m.table.lastOwned() == nil || !m.isNewest(p, m.table.lastRow) ||
		baseOffset < m.logEndOffset() || !roomAt(baseOffset, f.span.count()) {
		return false
	}
	r.ended = true
	m.stats.Accepted++
	m.endOffset = baseOffset + int64(f.span.count())
	p.window.push(f.span, baseOffset)
	f.end()
	l.count, p.queue = 0, 0
	m.inFlight.free = append(m.inFlight.free, r.queue)
	return true
}

// commit is Commit in general. Requires m.mu held.
func (r *Reservation) commit(baseOffset int64) error {
	m := r.m
	i, err := r.position()
	if err != nil {
		return err
	}
	l := &m.inFlight.queues[r.queue]
	f := l.at(i)
	p := m.table.find(l.pid)
	if !l.roomFor(i, baseOffset, newestEnd(p)) {
		return m.refuseCommit(l.batch(f), p, ErrOffsetOrder, baseOffset, newestOffset(p))
	}
	r.ended = true
	m.advance(baseOffset + int64(f.span.count()))
	f.committed, f.baseOffset = true, baseOffset
	m.applyHead(r.queue)
	return nil
}

// Abort says that the append has failed and that the batch is not in the log.
// The reservation ends, and with it every later one of the producer, since it
// would leave a gap: their Commit returns ErrAbandoned, and so the broker must
// not append what has not been appended yet. The state is as if none of them
// had been reserved. Whoever waited for them asks again.
//
// Where a later one has already been committed, Abort does all that and returns
// ErrHole, with the offset of the first of them. ErrAbandoned says that somebody
// else has ended the reservation, and ErrSettled that this call is the second.
// Neither changes anything. Safe for concurrent use.
//
// If nothing at all is remembered of the producer, the aborted batch must be
// the first to come again. Where the policy would take another first sequence
// of its epoch, that is refused with ErrOutOfOrderSequence all the same, until
// Config.Expiration or more has passed, or Config.MaxProducers more of the kind
// have come. A snapshot does not hold that, and a restore or Reset forgets it.
func (r *Reservation) Abort() error {
	m := r.m
	m.mu.Lock()
	defer m.mu.Unlock()
	i, err := r.position()
	if err != nil {
		return err
	}
	r.ended = true
	l := &m.inFlight.queues[r.queue]
	b := *l.batch(l.at(i))
	if cut := m.cancel(r.queue, i); cut != noOffset {
		e := newBatchError(b, noOffset, ErrHole)
		e.FirstOffset = cut
		return e
	}
	return nil
}

// AbandonReservations ends every reservation, as a broker does that has lost
// leadership: their Commit and Abort return ErrAbandoned, and whoever waits for
// them is let go. The state is as if none of them had been made.
//
// Some of their batches may be in the log, or may get there. The manager does
// not know them, and so, before it judges again, the log must be replayed from
// the EndOffset of a Snapshot taken afterwards, or cut off there. Safe for
// concurrent use.
func (m *ProducerStateManager) AbandonReservations() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.abandon()
}

// position returns where in its lane the reservation is, or why it is not.
// Requires m.mu held.
func (r *Reservation) position() (uint8, error) {
	if r.ended {
		return 0, ErrSettled
	}
	i, ok := r.m.inFlight.queues[r.queue].find(r.ticket)
	switch {
	case !ok:
		return 0, ErrAbandoned
	case r.m.inFlight.queues[r.queue].at(i).committed:
		return 0, ErrSettled // by a copy of the handle
	}
	return i, nil
}

// newestEnd returns one past the newest batch remembered of p, which is nil
// where the producer is unknown; 0 where there is none.
func newestEnd(p *producer) int64 {
	if p == nil || p.window.count == 0 {
		return 0
	}
	e := p.window.newest()
	return e.baseOffset + int64(e.span.count())
}

// pipelines returns what there is about reservations, and makes it for the
// first one.
func (m *state) inFlightSet() *inFlightSet {
	if m.inFlight == nil {
		m.inFlight = &inFlightSet{newcomers: make(map[int64]uint32), unknownFrom: noOffset}
	}
	return m.inFlight
}

// reserve gives a batch that has been judged Append its place. p is its
// producer, or nil where it is unknown or the batch names none. Requires mu
// held.
func (m *ProducerStateManager) reserve(b *Batch, p *producer) *Reservation {
	pl := m.inFlightSet()
	n := m.queueFor(b, p)
	pl.tickets++
	f := pl.queues[n].push(makeSpan(b.BaseSequence, max(b.Count, 0)))
	f.ticket, f.floor, f.transactional = pl.tickets, m.endOffset, b.Transactional
	r := m.reservation()
	r.ticket, r.queue = pl.tickets, n
	return r
}

// reservation returns a Reservation that was not handed out before. Requires mu
// held.
func (m *ProducerStateManager) reservation() *Reservation {
	pl := m.inFlight
	if pl.used == len(pl.block) {
		pl.block, pl.used = make([]Reservation, reservationBlock), 0
		for i := range pl.block {
			pl.block[i].m = m
		}
	}
	r := &pl.block[pl.used]
	pl.used++
	return r
}

// push adds a flight at the end, and returns it for the rest to be filled in. It
// requires count < WindowSize. The place is reused, whose done is nil, so that no
// pointer is written.
func (l *queue) push(s span) *inFlightBatch {
	f := l.at(l.count)
	f.span, f.committed = s, false
	l.count++
	l.next = nextSequence(s.last())
	return f
}

// laneFor returns the lane that a batch belongs in, and opens one where there
// is none.
func (m *state) queueFor(b *Batch, p *producer) uint32 {
	pl := m.inFlight
	if n, ok := m.queueOf(b.ProducerID, p); ok {
		return n
	}
	n := pl.open(b)
	switch {
	case p != nil:
		m.table.edit(b.ProducerID).queue = n + 1
	case b.ProducerID != NoProducerID:
		pl.newcomers[b.ProducerID] = n
	}
	return n
}

// open returns an empty lane for a batch's producer and epoch.
func (pl *inFlightSet) open(b *Batch) uint32 {
	n := uint32(len(pl.queues))
	if last := len(pl.free) - 1; last >= 0 {
		n, pl.free = pl.free[last], pl.free[:last]
	} else {
		pl.queues = append(pl.queues, queue{})
	}
	l := &pl.queues[n]
	l.pid, l.epoch, l.start = b.ProducerID, b.Epoch, 0
	return n
}

// laneOf returns the lane of a producer, if something of it is in flight. p is
// the producer, or nil where it is unknown.
func (m *state) queueOf(pid int64, p *producer) (uint32, bool) {
	switch {
	case p != nil:
		return p.queue - 1, p.queue != 0
	case m.inFlight == nil:
		return 0, false
	}
	n, ok := m.inFlight.newcomers[pid]
	return n, ok
}

// land moves what is committed from the head of a lane into the window, and
// closes the lane if it is empty then.
func (m *state) applyHead(n uint32) {
	l := &m.inFlight.queues[n]
	for l.count > 0 && l.at(0).committed {
		f := l.at(0)
		m.stats.Accepted++
		if l.pid != NoProducerID {
			m.headProducer(l.pid, n, l.epoch).record(l.batch(f), f.baseOffset)
		}
		f.end()
		l.start, l.count = l.slot(1), l.count-1
	}
	if l.count == 0 {
		m.closeQueue(n)
	}
}

// landing returns the producer of a lane as active does, and makes the lane its
// own if it was unknown until now.
func (m *state) headProducer(pid int64, n uint32, epoch int16) *producer {
	p := m.active(pid, epoch)
	if p.queue == 0 {
		p.queue = n + 1
		delete(m.inFlight.newcomers, pid)
	}
	return p
}

// batch returns a flight as the batch that it was.
func (l *queue) batch(f *inFlightBatch) *Batch {
	return &Batch{ProducerID: l.pid, Epoch: l.epoch, BaseSequence: f.span.first(), Count: f.span.count(), Transactional: f.transactional}
}

// cancel ends flight i of a lane and all behind it, and returns where the first
// of those lies that were committed, or noOffset.
func (m *state) cancel(n uint32, i uint8) (hole int64) {
	l := &m.inFlight.queues[n]
	hole = l.firstCommitted(i)
	if hole != noOffset {
		m.inFlight.addUnknown(l.lowest(i + 1))
	}
	first := l.at(i).span.first()
	for j := i; j < l.count; j++ {
		l.at(j).end()
	}
	l.count, l.next = i, first
	if i == 0 {
		m.recordFailedFirst(l, first)
		m.closeQueue(n)
	}
	return hole
}

// firstCommitted returns where the first committed batch lies, from flight i on,
// or noOffset.
func (l *queue) firstCommitted(i uint8) int64 {
	for ; i < l.count; i++ {
		if f := l.at(i); f.committed {
			return f.baseOffset
		}
	}
	return noOffset
}

// lowest returns the lowest offset at which a batch may lie, from flight i on. It
// requires i < count.
func (l *queue) lowest(i uint8) int64 {
	low := l.at(i).lowest()
	for i++; i < l.count; i++ {
		low = min(low, l.at(i).lowest())
	}
	return low
}

// owe notes that the first batch of an unknown producer has failed. Requires mu
// held.
func (m *state) recordFailedFirst(l *queue, first int32) {
	if l.pid == NoProducerID || m.table.find(l.pid) != nil {
		return
	}
	o := &m.inFlight.failedFirst
	if limit := m.cfg.MaxProducers; limit > 0 && len(o.young) >= limit {
		o.rotate(m.recency.now)
	}
	o.put(l.pid, firstBatch{l.epoch, first})
}

// closeLane frees an empty lane.
func (m *state) closeQueue(n uint32) {
	pl := m.inFlight
	pid := pl.queues[n].pid
	pl.free = append(pl.free, n)
	if m.table.find(pid) == nil {
		delete(pl.newcomers, pid)
		return
	}
	p := m.table.edit(pid)
	p.queue = 0
	if p.pinned && !p.busy() {
		m.unpin(p, m.table.lastRow)
	}
}

// suspect notes that the log may hold batches from floor on that the state does
// not know.
func (pl *inFlightSet) addUnknown(floor int64) {
	if pl.unknownFrom == noOffset || floor < pl.unknownFrom {
		pl.unknownFrom = floor
	}
	pl.reading = false
}

// abandon ends every flight.
func (m *state) abandon() {
	if m.inFlight == nil {
		return
	}
	m.unpinAll() // all at once; each by itself would look for its place
	for n := range m.inFlight.queues {
		m.abandonQueue(uint32(n))
	}
}

// abandonLane ends every flight of a lane, whose batches may get into the log
// all the same.
func (m *state) abandonQueue(n uint32) {
	if l := &m.inFlight.queues[n]; l.count > 0 {
		m.inFlight.addUnknown(l.lowest(0))
		m.cancel(n, 0)
	}
}

// forgetFlights ends every flight of a log that is no longer the one they were
// meant for.
func (m *state) dropInFlight() {
	if m.inFlight == nil {
		return
	}
	m.abandon()
	m.inFlight.unknownFrom = noOffset
	m.inFlight.failedFirst = failedFirst{since: m.recency.now}
}

// cutFlights ends every flight since the log was cut to end at to, and returns
// whether nothing below to is in doubt.
func (m *state) abandonTruncated(to int64) bool {
	if m.inFlight == nil {
		return true
	}
	m.abandon()
	if m.inFlight.unknownFrom >= to {
		m.inFlight.unknownFrom = noOffset
	}
	return m.inFlight.unknownFrom == noOffset
}

// replayed notes that what the log holds up to end is known now, where the replay
// began low enough: a batch of it, the first or a later one, is from base to end.
// What is not between its batches is not in the log, since it goes in the order
// of the log.
func (m *state) replayed(base, end int64) {
	pl := m.inFlight
	if pl == nil || pl.unknownFrom == noOffset || base > pl.unknownFrom && !pl.reading {
		return
	}
	pl.reading = true
	if pl.unknownFrom = max(pl.unknownFrom, end); pl.unknownFrom >= m.endOffset {
		pl.unknownFrom = noOffset
	}
}

// snapshotEnd returns the offset from which on the log may hold batches that the
// state does not know: the end offset, unless something is in flight or in
// doubt.
func (m *state) snapshotEnd() int64 {
	pl := m.inFlight
	if pl == nil {
		return m.endOffset
	}
	end := m.endOffset
	if pl.unknownFrom != noOffset {
		end = min(end, pl.unknownFrom)
	}
	for n := range pl.queues {
		if l := &pl.queues[n]; l.count > 0 {
			end = min(end, l.lowest(0))
		}
	}
	return end
}

// laneCounts is how many batches each lane held at one moment.
type queueCounts []uint8

// inFlightCounts returns the counts of this moment.
func (m *state) inFlightCounts() queueCounts {
	if m.inFlight == nil {
		return nil
	}
	counts := make(queueCounts, len(m.inFlight.queues))
	for n := range counts {
		counts[n] = m.inFlight.queues[n].count
	}
	return counts
}

// of returns how many batches of a producer were in flight.
func (c queueCounts) of(p *producer) int {
	if p.queue == 0 {
		return 0
	}
	return int(c[p.queue-1])
}

// inTheWay returns the flight that a batch must wait for: its own copy; the
// oldest, where there are too many; otherwise the newest.
func (l *queue) inTheWay(b *Batch) *inFlightBatch {
	if f := l.copyOf(b.span()); f != nil && b.Epoch == l.epoch {
		return f
	}
	if b.Epoch == l.epoch && l.count == WindowSize {
		return l.at(0)
	}
	return l.at(l.count - 1)
}

// refuseInFlight is refuse for ErrInFlight.
func (m *state) refuseInFlight(b Batch, l *queue) error {
	m.stats.InFlight++
	f := l.inTheWay(&b)
	if f.done == nil {
		f.done = make(chan struct{})
	}
	return &InFlightError{Batch: b, Epoch: l.epoch, FirstSequence: f.span.first(), LastSequence: f.span.last(), done: f.done}
}
