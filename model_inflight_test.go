package idempotence

import (
	"cmp"
	"errors"
	"maps"
	"slices"
)

// This file is the model of pipelined appends: beside the model of what is
// committed (model_rules_test.go), a queue per producer of what is reserved. It does
// everything by walking lists.

// appending is a reservation as the tests hold it, with the fate of its append.
type appending struct {
	r     *Reservation
	turn  int // of its reservation
	batch Batch
	base  int64 // the offset that the log has for it

	committed bool  // reported; visible once all before it are
	gone      error // ErrSettled or ErrAbandoned, once it has ended
}

func (h *appending) end() int64 { return h.base + max(int64(h.batch.Count), 0) }

// queueModel is what a manager with reservations should be.
type queueModel struct {
	*model
	queues      map[int64][]*appending // of producers that have anything in flight
	withoutID   []*appending           // without a producer id, settled ones included
	failedFirst map[int64]Batch        // the failed first batch of an unknown producer
	failedSince int64                  // when there was none last; -1 before the first Expire

	now      int64           // of the last Expire; -1 before the first
	fresh    map[int64]bool  // active since the last Expire
	activeAt map[int64]int64 // otherwise
	turns    int
	turn     map[int64]int // of the last activity
	cap      int
	forgot   bool
}

func newQueueModel(cfg Config) *queueModel {
	return &queueModel{
		model: newModel(cfg), cap: cfg.MaxProducers, now: -1,
		queues: map[int64][]*appending{}, failedFirst: map[int64]Batch{},
		fresh: map[int64]bool{}, activeAt: map[int64]int64{}, turn: map[int64]int{},
	}
}

// copyBelow returns the model of a log that ends at an offset, without anything
// in flight.
func (m *queueModel) copyBelow(end int64) *queueModel {
	c := *m
	plain := *m.model
	c.model = &plain
	c.accepted = map[int64][]modelBatch{}
	for pid, all := range m.accepted {
		c.accepted[pid] = slices.Clone(all)
	}
	c.queues, c.withoutID, c.failedFirst = map[int64][]*appending{}, nil, map[int64]Batch{}
	c.fresh, c.activeAt, c.turn = maps.Clone(m.fresh), maps.Clone(m.activeAt), maps.Clone(m.turn)
	c.cut(end)
	return &c
}

// cut forgets what reaches past an end, and each producer that has nothing left.
func (m *queueModel) cut(end int64) {
	m.endOffset = min(m.endOffset, end)
	for pid, all := range m.accepted {
		all = slices.DeleteFunc(all, func(b modelBatch) bool { return b.base+b.count > end })
		if m.accepted[pid] = all; len(all) == 0 {
			m.forget(pid)
		}
	}
}

func (m *queueModel) forget(pid int64) {
	delete(m.accepted, pid)
	delete(m.fresh, pid)
	delete(m.activeAt, pid)
	delete(m.turn, pid)
}

// outlook returns what is known of a producer, committed and in flight.
func (m *queueModel) outlook(pid int64) outlook {
	o := m.model.outlook(pid)
	for _, h := range m.queues[pid] {
		o.queue = append(o.queue, h.batch)
	}
	if failed, ok := m.failedFirst[pid]; ok {
		o.failed = &failed
	}
	return o
}

// sent returns the batches of a producer as they were sent, committed and in flight.
func (m *queueModel) sent(pid int64) []Batch {
	return append(m.model.sent(pid), m.outlook(pid).queue...)
}

// judge answers a batch.
func (m *queueModel) judge(b Batch) (Result, error) {
	return judge(m.cfg.UnknownProducer, m.endOffset, m.outlook(b.ProducerID), b)
}

func (m *queueModel) count(err error) {
	if errors.Is(err, ErrInFlight) {
		m.stats.InFlight++
		return
	}
	m.model.count(err)
}

// check answers a batch and counts the answer.
func (m *queueModel) check(b Batch) (Result, error) {
	res, err := m.judge(b)
	m.count(err)
	if res.Verdict == Duplicate {
		m.stats.Duplicate++
	}
	return res, err
}

// reserve puts a batch that was judged Append at the end of its queue.
func (m *queueModel) reserve(h *appending) {
	m.turns++
	h.turn = m.turns
	if pid := h.batch.ProducerID; pid != NoProducerID {
		m.queues[pid] = append(m.queues[pid], h)
		return
	}
	m.withoutID = append(m.withoutID, h)
}

// commitPlain answers a Commit without a reservation.
func (m *queueModel) commitPlain(b Batch, base int64) error {
	res, err := m.judge(b)
	if err == nil && res.Verdict == Append && len(m.queues[b.ProducerID]) > 0 {
		err = ErrInFlight
	}
	if err != nil {
		m.count(err)
		return err
	}
	before := len(m.accepted[b.ProducerID])
	m.makeRoomFor(b.ProducerID)
	if err := m.model.commit(b, base); err != nil {
		return err
	}
	if len(m.accepted[b.ProducerID]) > before {
		m.active(b.ProducerID)
	}
	return nil
}

// commit answers the Commit of a reservation.
func (m *queueModel) commit(h *appending, base int64) error {
	switch {
	case h.gone != nil:
		return h.gone
	case h.committed:
		return ErrSettled
	case !m.fits(h, base):
		m.stats.OutOfOrder++
		return ErrOffsetOrder
	}
	h.committed, h.base = true, base
	m.endOffset = max(m.endOffset, h.end())
	if h.batch.ProducerID == NoProducerID {
		h.gone = ErrSettled
		m.stats.Accepted++
		return nil
	}
	pid := h.batch.ProducerID
	for len(m.queues[pid]) > 0 && m.queues[pid][0].committed {
		m.applyHead(m.queues[pid][0])
	}
	return nil
}

// land makes the head of a queue visible.
func (m *queueModel) applyHead(h *appending) {
	pid := h.batch.ProducerID
	m.makeRoomFor(pid)
	m.queues[pid] = m.queues[pid][1:]
	h.gone = ErrSettled
	m.stats.Accepted++
	m.remember(h.batch, h.base)
}

func (m *queueModel) remember(b Batch, base int64) {
	m.accepted[b.ProducerID] = append(m.accepted[b.ProducerID],
		modelBatch{b.Epoch, int64(b.BaseSequence), int64(b.Count), base})
	m.maxID = max(m.maxID, b.ProducerID)
	m.endOffset = max(m.endOffset, base+int64(b.Count))
	m.active(b.ProducerID)
}

// fits reports whether a batch can lie at base: every other one of its producer
// is laid as low as it can be on the left, and as low on the right, and none
// may then overlap or be out of order.
func (m *queueModel) fits(h *appending, base int64) bool {
	end := int64(0)
	if all := m.accepted[h.batch.ProducerID]; len(all) > 0 {
		newest := all[len(all)-1]
		end = newest.base + newest.count
	}
	queue := m.queues[h.batch.ProducerID]
	if h.batch.ProducerID == NoProducerID {
		queue, end = []*appending{h}, 0
	}
	for _, other := range queue {
		at := end
		switch {
		case other == h:
			at = base
		case other.committed:
			at = other.base
		}
		if at < end {
			return false
		}
		end = at + max(int64(other.batch.Count), 0)
	}
	return true
}

// abort answers an Abort: the offset of the first one behind that was committed,
// or -1.
func (m *queueModel) abort(h *appending) (hole int64, err error) {
	switch {
	case h.gone != nil:
		return -1, h.gone
	case h.committed:
		return -1, ErrSettled
	}
	hole = -1
	if pid := h.batch.ProducerID; pid != NoProducerID {
		i := slices.Index(m.queues[pid], h)
		for _, later := range m.queues[pid][i+1:] {
			if later.committed && hole < 0 {
				hole = later.base
			}
		}
		m.dropFrom(pid, i)
	}
	h.gone = ErrSettled
	if hole >= 0 {
		return hole, ErrGap
	}
	return -1, nil
}

// dropFrom abandons what is in a queue from place i on.
func (m *queueModel) dropFrom(pid int64, i int) {
	queue := m.queues[pid]
	if i >= len(queue) {
		return
	}
	if i == 0 && len(m.accepted[pid]) == 0 {
		if len(m.failedFirst) == 0 {
			m.failedSince = m.now
		}
		m.failedFirst[pid] = queue[0].batch
	}
	if i == 0 && len(m.accepted[pid]) > 0 {
		m.active(pid) // released
	}
	for _, h := range queue[i:] {
		h.gone = ErrAbandoned
		if h.committed {
			h.gone = ErrSettled // its own handle has had its answer
		}
	}
	m.queues[pid] = queue[:i]
}

func (m *queueModel) abandon() {
	for _, pid := range m.inOrderOfReservation() {
		m.dropFrom(pid, 0)
	}
	for _, h := range m.withoutID {
		if h.gone == nil {
			h.gone = ErrAbandoned
		}
	}
	m.withoutID = nil
}

// inOrderOfReservation returns the producers that have something in flight.
func (m *queueModel) inOrderOfReservation() []int64 {
	var pids []int64
	for pid, queue := range m.queues {
		if len(queue) > 0 {
			pids = append(pids, pid)
		}
	}
	slices.SortFunc(pids, func(a, b int64) int { return cmp.Compare(m.queues[a][0].turn, m.queues[b][0].turn) })
	return pids
}

// replay applies a batch that is in the log.
func (m *queueModel) replay(b Batch, base int64) {
	m.endOffset = max(m.endOffset, base+max(int64(b.Count), 0))
	pid := b.ProducerID
	if pid == NoProducerID {
		return
	}
	if all := m.accepted[pid]; len(all) > 0 {
		if newest := all[len(all)-1]; b.Epoch < newest.epoch || base <= newest.base {
			return
		}
	}
	m.dropFrom(pid, 0)
	m.makeRoomFor(pid)
	m.remember(b, base)
}

// active notes an activity of a producer that is known.
func (m *queueModel) active(pid int64) {
	delete(m.failedFirst, pid)
	m.turns++
	m.turn[pid], m.fresh[pid] = m.turns, true
}

// makeRoomFor makes room for a producer that is unknown.
func (m *queueModel) makeRoomFor(pid int64) {
	if pid != NoProducerID && len(m.accepted[pid]) == 0 {
		m.evictDownTo(m.cap - 1)
	}
}

// evictDownTo evicts the least recently active of those that may go.
func (m *queueModel) evictDownTo(n int) {
	for m.cap > 0 && len(m.accepted) > n {
		oldest := int64(-1)
		for other := range m.accepted {
			if len(m.queues[other]) == 0 && (oldest < 0 || m.turn[other] < m.turn[oldest]) {
				oldest = other
			}
		}
		if oldest < 0 {
			return
		}
		m.forget(oldest)
		m.stats.Evicted++
		m.forgot = true
	}
}

// expire forgets who has been idle for ttl, and returns how many.
func (m *queueModel) expire(now, ttl int64) int {
	m.now = max(m.now, now)
	if m.failedSince < 0 {
		m.failedSince = m.now
	}
	if m.now-m.failedSince >= ttl {
		clear(m.failedFirst)
	}
	for pid := range m.fresh {
		m.activeAt[pid] = m.now
	}
	clear(m.fresh)
	expired := 0
	for pid := range m.accepted {
		if len(m.queues[pid]) == 0 && m.now-m.activeAt[pid] >= ttl {
			m.forget(pid)
			expired++
		}
	}
	m.stats.Expired += uint64(expired)
	m.forgot = m.forgot || expired > 0
	return expired
}

// allStats returns the counters and gauges.
func (m *queueModel) allStats() Stats {
	s := m.stats
	s.FailedFirstAppends = len(m.failedFirst)
	for _, queue := range m.queues {
		s.OpenReservations += len(queue)
	}
	for _, h := range m.withoutID {
		if h.gone == nil {
			s.OpenReservations++
		}
	}
	return s
}

// state is what a manager in the model's place would show.
func (m *queueModel) state() observed {
	s := m.model.state()
	for i := range s.Producers {
		s.Producers[i].InFlight = len(m.queues[s.Producers[i].ProducerID])
	}
	for _, pid := range slices.Sorted(maps.Keys(m.queues)) {
		if len(m.queues[pid]) == 0 {
			continue
		}
		l := queueState{ProducerID: pid, Epoch: m.queues[pid][0].batch.Epoch}
		for _, h := range m.queues[pid] {
			f := batchState{h.batch.BaseSequence, moved(nextAfter(h.batch), -1), noOffset}
			if h.committed {
				f.BaseOffset = h.base
			}
			l.Batches = append(l.Batches, f)
		}
		s.InFlight = append(s.InFlight, l)
	}
	return s
}
