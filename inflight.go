package idempotence

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// This file is what is in flight: batches and markers that have been judged and are
// being appended. It knows nothing of the manager.
//
// The batches in flight of a producer are in a queue, in the order of their
// reservations. A committed one leaves at the head and enters the window. Aborting
// one also ends every later one in its queue, since committing those would leave a
// gap. A producer has a queue only while something of it is in flight.

// inFlightBatch is one batch in flight, or one marker. Once it has left, done is
// nil and the rest is meaningless.
type inFlightBatch struct {
	ticket        uint64
	span          span
	baseOffset    int64 // once committed
	floor         int64 // the end offset at its reservation: the lowest it can lie
	done          chan struct{}
	transactional bool
	committed     bool // and behind one that is not
}

// end releases those that wait for the batch.
func (f *inFlightBatch) end() {
	if f.done != nil {
		close(f.done)
		f.done = nil
	}
}

// queue holds what is in flight of one producer, oldest first.
//
// Invariants (audited in the tests):
//  1. 0 <= count <= WindowSize, and a queue in use has count > 0.
//  2. Each span starts one after the one before it ends, and next is one after
//     the newest; all are of one epoch, which is not older than the producer's.
//  3. The head is not committed.
//  4. The base offsets of committed batches rise, with room for those between.
//  5. A marker is alone in its queue.
type queue struct {
	pid     int64
	epoch   int16
	start   uint8
	count   uint8
	next    int32
	marker  *Marker // if what is in flight is a marker
	batches [WindowSize]inFlightBatch
}

// slot maps position i, counted from the head, to its place in batches.
func (q *queue) slot(i uint8) uint8 { return ringSlot(q.start, i) }

// at returns batch i, counted from the head. It requires i < count, or i == count
// for the place of the next one.
func (q *queue) at(i uint8) *inFlightBatch { return &q.batches[q.slot(i)] }

// batch returns a batch in flight as it was reserved.
func (q *queue) batch(f *inFlightBatch) Batch {
	return Batch{ProducerID: q.pid, Epoch: q.epoch, BaseSequence: f.span.first(), Count: f.span.count(), Transactional: f.transactional}
}

// find returns the position of the batch with a ticket.
func (q *queue) find(ticket uint64) (uint8, bool) {
	for i := range q.count {
		if q.at(i).ticket == ticket {
			return i, true
		}
	}
	return 0, false
}

// copyOf returns the batch that covers exactly s, or nil.
func (q *queue) copyOf(s span) *inFlightBatch {
	for i := range q.count {
		if f := q.at(i); f.span == s {
			return f
		}
	}
	return nil
}

// transactional reports whether a transactional batch is in flight.
func (q *queue) transactional() bool {
	for i := range q.count {
		if q.at(i).transactional {
			return true
		}
	}
	return false
}

// obstacle returns what b must wait for: its own copy, the oldest batch if there
// are too many, and otherwise the newest.
func (q *queue) obstacle(b *Batch) *inFlightBatch {
	if b.Epoch == q.epoch && q.marker == nil {
		if f := q.copyOf(b.span()); f != nil {
			return f
		}
		if q.count == WindowSize {
			return q.at(0)
		}
	}
	return q.at(q.count - 1)
}

// push adds a batch at the end. It requires count < WindowSize. It reuses a place
// whose done is nil, so that no pointer is written.
func (q *queue) push(s span) *inFlightBatch {
	f := q.at(q.count)
	f.span, f.committed = s, false
	q.count++
	q.next = nextSequence(s.last())
	return f
}

// pop removes the head.
func (q *queue) pop() {
	q.at(0).end()
	q.start, q.count = q.slot(1), q.count-1
}

// cut ends batch i and all behind it.
func (q *queue) cut(i uint8) {
	q.next = q.at(i).span.first()
	for j := i; j < q.count; j++ {
		q.at(j).end()
	}
	q.count = i
}

// lowestFor returns the lowest base offset that batch i can have behind the batches
// before it, of which the first can lie at low. Each takes as many offsets as its
// count. It is the largest int64 if they need more offsets than there are.
func (q *queue) lowestFor(i uint8, low int64) int64 {
	end := uint64(low)
	for j := range i {
		f := q.at(j)
		if f.committed {
			end = uint64(f.baseOffset)
		}
		end += uint64(f.span.count())
	}
	return int64(min(end, math.MaxInt64))
}

// roomBehind reports whether the batches behind batch i have room if it ends at end.
func (q *queue) roomBehind(i uint8, end int64) bool {
	low := uint64(end)
	for j := i + 1; j < q.count; j++ {
		f := q.at(j)
		if f.committed {
			return uint64(f.baseOffset) >= low
		}
		low += uint64(f.span.count())
	}
	return true
}

// firstCommitted returns the offset of the first committed batch from batch i on,
// or noOffset.
func (q *queue) firstCommitted(i uint8) int64 {
	for ; i < q.count; i++ {
		if f := q.at(i); f.committed {
			return f.baseOffset
		}
	}
	return noOffset
}

// inFlightSet is everything in flight in one manager. A nil inFlightSet is empty.
// Queues are reused and never freed. Each takes some 300 bytes, and there are as many
// as producers ever had something in flight at the same time.
//
// Invariants (audited in the tests):
//  1. A queue is in free, or it has one owner: the producer whose row has its
//     number plus one, the producer without a row that newcomers has it for, or a
//     batch without a producer id.
//  2. open counts what is in flight, and uncommitted adds up the offsets that the
//     uncommitted ones will take.
//  3. txnFloors has the floor of every transactional batch in flight.
type inFlightSet struct {
	queues      []queue
	free        []uint32
	newcomers   map[int64]uint32 // queues of producers without a row
	tickets     uint64           // handed out so far
	open        int
	uncommitted int64
	txnFloors   offsetQueue // by ticket

	block []Reservation // of which the first used have been handed out
	used  int

	tail        tail
	failedFirst failedFirst
}

// offsets returns how many offsets what is in flight will take.
func (s *inFlightSet) offsets() int64 {
	if s == nil {
		return 0
	}
	return s.uncommitted
}

// empty reports whether nothing is in flight.
func (s *inFlightSet) empty() bool { return s == nil || s.open == 0 }

// queueOf returns the queue of a producer, or nil if nothing of it is in flight. p
// is the producer, or nil if it is unknown.
func (s *inFlightSet) queueOf(pid int64, p *producer) *queue {
	if p != nil && p.queue == 0 {
		return nil
	}
	if n, ok := s.numberOf(pid, p); ok {
		return &s.queues[n]
	}
	return nil
}

// numberOf is queueOf for the number of the queue, and reports whether there is one.
func (s *inFlightSet) numberOf(pid int64, p *producer) (uint32, bool) {
	switch {
	case s == nil || pid == NoProducerID:
		return 0, false
	case p != nil:
		return p.queue - 1, p.queue != 0
	}
	n, ok := s.newcomers[pid]
	return n, ok
}

// take returns an unused queue for a producer and epoch.
func (s *inFlightSet) take(pid int64, epoch int16) uint32 {
	n := uint32(len(s.queues))
	if last := len(s.free) - 1; last >= 0 {
		n, s.free = s.free[last], s.free[:last]
	} else {
		s.queues = append(s.queues, queue{})
	}
	q := &s.queues[n]
	q.pid, q.epoch, q.start, q.marker = pid, epoch, 0, nil
	return n
}

// add puts a batch at the end of a queue. The log ends at floor.
func (s *inFlightSet) add(n uint32, sp span, floor int64, transactional bool) uint64 {
	s.tickets++
	f := s.queues[n].push(sp)
	f.ticket, f.floor, f.transactional = s.tickets, floor, transactional
	s.open++
	s.uncommitted += int64(sp.count())
	if transactional {
		s.txnFloors.add(int64(f.ticket), floor)
	}
	return f.ticket
}

// commit notes that a batch is in the log.
func (s *inFlightSet) commit(f *inFlightBatch, baseOffset int64) {
	f.committed, f.baseOffset = true, baseOffset
	s.uncommitted -= int64(f.span.count())
}

// left notes that a batch has left its queue.
func (s *inFlightSet) left(f *inFlightBatch) {
	s.open--
	if !f.committed {
		s.uncommitted -= int64(f.span.count())
	}
	if f.transactional {
		s.txnFloors.remove(int64(f.ticket), f.floor)
	}
}

// cut ends batch i of a queue and all behind it. It returns the offset of the first
// of them that is committed, or noOffset. The log ends at end.
func (s *inFlightSet) cut(n uint32, i uint8, end int64) (gap int64) {
	q := &s.queues[n]
	gap = q.firstCommitted(i)
	if gap != noOffset {
		s.addUnknown(q, i+1, end)
	}
	for j := i; j < q.count; j++ {
		s.left(q.at(j))
	}
	q.cut(i)
	return gap
}

// addUnknown notes that batches i and later of a queue may be in the log, which ends at
// end as far as is known.
func (s *inFlightSet) addUnknown(q *queue, i uint8, end int64) {
	for ; i < q.count; i++ {
		f := q.at(i)
		s.tail.add(f.lowest(), end, f.transactional)
	}
}

// lowest returns the lowest offset at which the batch can lie.
func (f *inFlightBatch) lowest() int64 {
	if f.committed {
		return f.baseOffset
	}
	return f.floor
}

// lowest returns the lowest offset at which something in flight or abandoned can lie,
// or limit if that is lower. It looks at every queue. The head of a queue has the
// lowest floor, and what is committed behind it lies no lower.
func (s *inFlightSet) lowest(limit int64) int64 {
	if s == nil {
		return limit
	}
	for n := range s.queues {
		if q := &s.queues[n]; q.count > 0 {
			limit = min(limit, q.at(0).floor)
		}
	}
	if s.tail.unknown {
		limit = min(limit, s.tail.from)
	}
	return limit
}

// lowestTxn is lowest for transactional batches. It takes constant time.
func (s *inFlightSet) lowestTxn(limit int64) int64 {
	if s == nil {
		return limit
	}
	if first, ok := s.txnFloors.first(); ok {
		limit = min(limit, first.value)
	}
	if t := &s.tail; t.unknown && t.txnFrom != noOffset {
		limit = min(limit, t.txnFrom)
	}
	return limit
}

// replayed records that a replay has covered [base, end). The end offset is logEnd.
func (s *inFlightSet) replayed(base, end, logEnd int64) {
	if s != nil {
		s.tail.replayed(base, end, logEnd)
	}
}

// byTicket returns the numbers of the queues in use, in the order in which their
// heads were reserved. The order of the numbers would depend on calls before a
// restore, and two managers with equal states would differ.
func (s *inFlightSet) byTicket() []uint32 {
	var used []uint32
	for n := range s.queues {
		if s.queues[n].count > 0 {
			used = append(used, uint32(n))
		}
	}
	slices.SortFunc(used, func(a, b uint32) int {
		return cmp.Compare(s.queues[a].at(0).ticket, s.queues[b].at(0).ticket)
	})
	return used
}

// counts returns how many batches each queue holds, for a view.
func (s *inFlightSet) counts() queueCounts {
	if s == nil {
		return nil
	}
	counts := make(queueCounts, len(s.queues))
	for n := range counts {
		counts[n] = s.queues[n].count
	}
	return counts
}

// queueCounts is how many batches each queue held at one moment.
type queueCounts []uint8

// of returns how many batches of a producer were in flight.
func (c queueCounts) of(p *producer) int {
	if p.queue == 0 {
		return 0
	}
	return int(c[p.queue-1])
}

// failedFirst remembers the first batches of unknown producers whose append failed.
// A failed batch must come again before any other of its epoch. Under a policy that
// accepts any first batch, the one behind it would otherwise pass for the first, and
// the failed one would be lost silently.
//
// It holds failedFirstLimit batches at most. When it is full, all are forgotten.
type failedFirst struct {
	batches map[int64]firstBatch
	since   instant // when it was last empty
}

type firstBatch struct {
	epoch    int16
	sequence int32
}

// failedFirstLimit is the most failed first batches remembered.
const failedFirstLimit = 4096

func (s *inFlightSet) failedFirstOf(pid int64) (firstBatch, bool) {
	if s == nil {
		return firstBatch{}, false
	}
	f, ok := s.failedFirst.batches[pid]
	return f, ok
}

func (s *inFlightSet) addFailedFirst(pid int64, f firstBatch, now instant) {
	o := &s.failedFirst
	if len(o.batches) == 0 || len(o.batches) >= failedFirstLimit {
		*o = failedFirst{batches: make(map[int64]firstBatch), since: now}
	}
	o.batches[pid] = f
}

func (s *inFlightSet) dropFailedFirst(pid int64) {
	if s != nil {
		delete(s.failedFirst.batches, pid)
	}
}

// expireFailedFirst forgets the failed first batches if the oldest may be as old as
// a forgotten producer.
func (s *inFlightSet) expireFailedFirst(now instant, limit time.Duration) {
	if s == nil {
		return
	}
	since := &s.failedFirst.since
	if since.ms == longAgo || now.before(*since) { // no call of Expire before, or the clock was wrong
		*since = now
	}
	if !now.before(since.add(limit)) {
		s.failedFirst = failedFirst{since: now}
	}
}
