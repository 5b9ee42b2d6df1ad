package idempotence

import (
	"context"
	"errors"
	"fmt"
)

// This file is for brokers whose append finishes later: replicated, grouped, or
// sent to object storage. A batch is judged and takes its place when it is reserved,
// and it is remembered when its append has succeeded. In between it is in flight
// (inflight.go).

// Reservation is the place of a batch or marker that is being appended. It must end
// in exactly one call of Commit or Abort. Until then its producer is not forgotten,
// and retries of the batch wait.
//
// Its methods are safe for concurrent use, and a late or repeated call does no
// harm. Do not copy it.
type Reservation struct {
	m      *ProducerStateManager
	ticket uint64
	queue  uint32
	ended  bool // by Commit or Abort of this handle; guarded by m.mu
}

// reservationBlock is how many reservations are allocated together, since one
// allocation for each would cost as much as the rest of Reserve and Commit. A block
// takes 1.5 KiB, into which a 64th would not fit beside the allocator's header. It
// stays in memory as long as one of its reservations does.
const reservationBlock = 63

// Reserve judges a batch against what is remembered of its producer and everything
// of it that is in flight, in the order of the reservations.
//
// For Append it returns a Reservation, which must end in Commit or Abort. For a
// Duplicate of a committed batch it returns none. It refuses what CheckBatch refuses.
// It returns an [*InFlightError] for what cannot be judged until something in flight
// has settled: an exact copy of a batch in flight, a newer epoch while an older one
// is in flight, a batch while WindowSize of its producer are in flight, and anything
// behind a marker in flight. A newer epoch in flight fences an older one.
//
// A batch without a producer id gets a Reservation too. Nothing waits for it.
//
// The batches of a producer must enter the log in the order in which they are
// reserved. The broker holds a lock over Reserve and the hand-over to the log, but
// not until the append has finished. Safe for concurrent use. Append makes one
// allocation for every 63 reservations.
func (m *ProducerStateManager) Reserve(b Batch) (*Reservation, Result, error) {
	m.mu.Lock()
	res := Result{Verdict: Append}
	p := m.table.find(b.ProducerID)
	if p == nil || !p.continuedBy(&b) {
		var err error
		if res, err = m.check(&b); err != nil || res.Verdict == Duplicate {
			m.mu.Unlock()
			return nil, res, err
		}
	}
	n, ticket := m.reserve(&b, p)
	r := m.inFlight.reservation(m, n, ticket)
	m.mu.Unlock()
	return r, res, nil
}

// reserve gives a batch that was judged Append its place, and returns the number of
// its queue and its ticket. p is its producer, or nil if it is unknown or the batch
// names none.
func (s *state) reserve(b *Batch, p *producer) (n uint32, ticket uint64) {
	n = s.queueFor(b.ProducerID, b.Epoch, p)
	return n, s.inFlight.add(n, makeSpan(b.BaseSequence, max(b.Count, 0)), s.knownEnd(), b.Transactional)
}

// queueFor returns the queue that something of a producer belongs in, and opens one
// if there is none.
func (s *state) queueFor(pid int64, epoch int16, p *producer) uint32 {
	if s.inFlight == nil {
		s.inFlight = &inFlightSet{newcomers: make(map[int64]uint32)}
	}
	set := s.inFlight
	switch {
	case pid == NoProducerID:
		return set.take(pid, epoch)
	case p == nil:
		n, ok := set.newcomers[pid]
		if !ok {
			n = set.take(pid, epoch)
			set.newcomers[pid] = n
		}
		return n
	case p.queue == 0:
		n := set.take(pid, epoch)
		p, _ = s.table.edit(pid)
		p.queue = n + 1
		return n
	}
	return p.queue - 1
}

// reservation returns a Reservation that was not handed out before.
func (s *inFlightSet) reservation(m *ProducerStateManager, queue uint32, ticket uint64) *Reservation {
	if s.used == len(s.block) {
		s.block, s.used = make([]Reservation, reservationBlock), 0
		for i := range s.block {
			s.block[i].m = m
		}
	}
	r := &s.block[s.used]
	s.used++
	r.queue, r.ticket = queue, ticket
	return r
}

// ReserveWait is [ProducerStateManager.Reserve] for a caller that can wait: if the
// batch cannot be judged until an append in flight has settled, it waits for that
// and asks again. So a retry that meets its own first copy in flight is a duplicate
// once the copy is in the log, and takes its place if the append failed. If the log
// is lazy, make sure that something flushes it, or the wait does not end.
//
// When ctx is done, it returns an error that wraps both the cause of ctx and an
// [*InFlightError]. The append that it waited for is not affected. Safe for concurrent
// use.
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

// placeOf returns where in its queue a reservation is, or why it is not there.
func (s *inFlightSet) placeOf(r *Reservation) (uint8, error) {
	if r.ended {
		return 0, ErrSettled
	}
	q := &s.queues[r.queue]
	i, ok := q.find(r.ticket)
	switch {
	case !ok:
		return 0, ErrAbandoned
	case q.at(i).committed:
		return 0, ErrSettled // by a copy of the handle
	}
	return i, nil
}

// Commit records that the append has succeeded, with the first record at
// baseOffset. The batch becomes visible, as a duplicate to its retries, once
// everything reserved before it of its producer has settled. Commits may come in
// any order, as long as the offsets follow the order of the reservations. For a
// marker it is [ProducerStateManager.CommitMarker].
//
// It returns ErrOffsetOrder if baseOffset is negative, lies below the end of the
// newest batch remembered, or leaves no room for what was reserved before or after
// the batch; if the batch would open a transaction below the end that the log had at
// the reservation; and with Config.Contiguous, if any batch lies below that end, or
// further beyond EndOffset than what is in flight can fill. The reservation stays open
// then. It returns ErrAbandoned if the reservation was
// ended otherwise, and ErrSettled if this call is the second. None of them changes
// anything but the counters of Stats. Safe for concurrent use.
func (r *Reservation) Commit(baseOffset int64) error {
	m := r.m
	m.mu.Lock()
	if m.commitAlone(r, baseOffset) {
		m.mu.Unlock()
		return nil
	}
	err := m.commit(r, baseOffset)
	m.mu.Unlock()
	return err
}

// commitAlone commits a batch that is alone in its queue, if that changes nothing
// but the window of its producer. Otherwise it does nothing and returns false.
func (s *state) commitAlone(r *Reservation, baseOffset int64) bool {
	q := &s.inFlight.queues[r.queue]
	f := q.at(0)
	if r.ended || q.count != 1 || f.ticket != r.ticket || q.marker != nil {
		return false
	}
	s.table.find(q.pid)
	p, row := s.table.lastOwned()
	if p == nil || p.id != q.pid || p.epoch != q.epoch || f.transactional != p.pinned || p.pinned != p.inTransaction() ||
		!s.isFresh(p, row) || !s.isNext(baseOffset, int64(f.span.count())) {
		return false
	}
	r.ended = true
	s.accept(baseOffset, f.span.count())
	p.window.push(f.span, baseOffset)
	f.end()
	s.inFlight.left(f)
	q.count, p.queue = 0, 0
	s.inFlight.free = append(s.inFlight.free, r.queue)
	return true
}

// commit is Commit in general.
func (s *state) commit(r *Reservation, baseOffset int64) error {
	i, err := s.inFlight.placeOf(r)
	if err != nil {
		return err
	}
	q := &s.inFlight.queues[r.queue]
	if q.marker != nil {
		err := s.commitMarker(r.queue, baseOffset)
		r.ended = err == nil
		return err
	}
	p := s.table.find(q.pid)
	if lowest := s.lowestReserved(q, i, p); !s.fitsReserved(q, i, baseOffset, lowest) {
		return s.refuseOffset(q.batch(q.at(i)), p, baseOffset, lowest)
	}
	r.ended = true
	f := q.at(i)
	s.advance(baseOffset + int64(f.span.count()))
	s.inFlight.commit(f, baseOffset)
	s.applyHead(r.queue)
	return nil
}

// lowestReserved returns the lowest base offset that batch i of a queue can have. p
// is its producer, which may be nil. A batch that opens a transaction cannot lie
// below its floor, or the last stable offset would fall.
func (s *state) lowestReserved(q *queue, i uint8, p *producer) int64 {
	low := p.newestEnd()
	if s.contiguous {
		low = max(low, q.at(0).floor)
	}
	low = q.lowestFor(i, low)
	if f := q.at(i); s.contiguous || f.transactional && (p == nil || !p.inTransaction()) {
		low = max(low, f.floor)
	}
	return low
}

// fitsReserved reports whether the log can have given baseOffset to batch i of a
// queue, for which lowest is the lowest offset.
func (s *state) fitsReserved(q *queue, i uint8, baseOffset, lowest int64) bool {
	count := int64(q.at(i).span.count())
	return roomAt(baseOffset, count) && baseOffset >= lowest && q.roomBehind(i, baseOffset+count) &&
		s.reaches(baseOffset, s.inFlight.uncommitted-count)
}

// Abort says that the append has failed and that the batch is not in the log. The
// reservation ends, and with it every later one of the producer, since committing
// those would leave a gap: their Commit returns ErrAbandoned, and the broker must
// not append what has not been appended yet. The state is as if none of them had
// been reserved, except that the producer counts as active. Retries that wait for
// them ask again.
//
// If a later one has been committed already, Abort does all that and returns
// ErrGap in a [*BatchError] with the offset of the first of them. It returns
// ErrAbandoned if the reservation was ended otherwise, and ErrSettled if this call
// is the second. Neither changes anything. Safe for concurrent use.
//
// If the producer is unknown, the aborted batch must come again before any other of
// its epoch: a policy that would accept another first sequence refuses it with
// ErrOutOfOrderSequence. This is remembered for up to 4,096 producers, until
// Config.Expiration has passed or until a restore or Reset. Snapshots do not hold it.
//
// Abort of a marker changes nothing else.
func (r *Reservation) Abort() error {
	m := r.m
	m.mu.Lock()
	defer m.mu.Unlock()
	i, err := m.inFlight.placeOf(r)
	if err != nil {
		return err
	}
	r.ended = true
	q := &m.inFlight.queues[r.queue]
	b := q.batch(q.at(i))
	if next := m.cut(r.queue, i); next != noOffset {
		e := newBatchError(b, noOffset, ErrGap)
		e.NextOffset = next
		return e
	}
	return nil
}

// AbandonReservations ends every reservation. A broker that has lost leadership calls
// it. Commit and Abort of each return ErrAbandoned, and retries that wait for them ask
// again. Their producers count as active.
//
// Some of their batches may be in the log or still get there, and the manager does not
// know them. Before it judges again, replay the log from the EndOffset of a Snapshot
// taken after this call and call ReplayedTo, or cut the log off there and call
// Truncate. Safe for concurrent use.
func (m *ProducerStateManager) AbandonReservations() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.abandon()
}

// applyHead moves the committed batches at the head of a queue into the window, and
// closes the queue if it is empty then.
func (s *state) applyHead(n uint32) {
	q := &s.inFlight.queues[n]
	for q.count > 0 && q.at(0).committed {
		f := q.at(0)
		s.stats.Accepted++
		if q.pid != NoProducerID {
			b := q.batch(f)
			s.record(&b, f.baseOffset)
			s.adoptQueue(q.pid, n)
		}
		s.inFlight.left(f)
		q.pop()
	}
	if q.count == 0 {
		s.closeQueue(n)
	}
}

// adoptQueue gives a producer that was unknown until now the queue that newcomers
// has for it.
func (s *state) adoptQueue(pid int64, n uint32) {
	if p := s.table.find(pid); p.queue == 0 {
		p, _ = s.table.edit(pid)
		p.queue = n + 1
		delete(s.inFlight.newcomers, pid)
	}
}

// cut ends batch i of a queue and all behind it. It returns the offset of the first
// of them that is committed, or noOffset.
func (s *state) cut(n uint32, i uint8) (gap int64) {
	q := &s.inFlight.queues[n]
	gap = s.inFlight.cut(n, i, s.endOffset)
	if i > 0 {
		return gap
	}
	if p := s.table.find(q.pid); p == nil && q.pid != NoProducerID && q.marker == nil {
		s.inFlight.addFailedFirst(q.pid, firstBatch{q.epoch, q.next}, s.recency.now)
	}
	s.closeQueue(n)
	return gap
}

// closeQueue frees an empty queue. Its producer counts as active.
func (s *state) closeQueue(n uint32) {
	set := s.inFlight
	q := &set.queues[n]
	q.marker = nil
	set.free = append(set.free, n)
	if p := s.table.find(q.pid); p == nil {
		delete(set.newcomers, q.pid)
		return
	}
	p, row := s.table.edit(q.pid)
	p.queue = 0
	s.touch(p, row)
}

// abandon ends everything in flight. The producers count as active in the order of
// their reservations.
func (s *state) abandon() {
	if s.inFlight == nil {
		return
	}
	for _, n := range s.inFlight.byTicket() {
		s.abandonQueue(n)
	}
}

// abandonQueue ends everything in a queue in use. Its batches may still get into the
// log.
func (s *state) abandonQueue(n uint32) {
	s.inFlight.addUnknown(&s.inFlight.queues[n], 0, s.endOffset)
	s.cut(n, 0)
}

// dropInFlight ends everything in flight, since the log it was meant for is gone.
func (s *state) dropInFlight() {
	if s.inFlight != nil {
		s.abandon()
		s.inFlight.tail = tail{}
		s.inFlight.failedFirst = failedFirst{}
	}
}

// abandonTruncated ends everything in flight, since the log was cut to end at to. It
// reports whether everything below to is known.
func (s *state) abandonTruncated(to int64) bool {
	if s.inFlight == nil {
		return true
	}
	s.abandon()
	s.inFlight.tail.truncate(to)
	return !s.inFlight.tail.unknown
}
