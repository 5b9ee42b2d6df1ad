package idempotence

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// This file is the part of the audit that is about reservations: the invariants
// of queue and inFlightSet, by their numbers there.

// auditInFlight checks everything about reservations.
func auditInFlight(m *ProducerStateManager) error {
	set := m.inFlight
	if set == nil {
		return auditNoQueues(m)
	}
	return errors.Join(auditTail(m), auditOwners(m), auditQueues(m), auditCounts(set), auditFailedFirst(m))
}

func auditTail(m *ProducerStateManager) error {
	t := m.inFlight.tail
	if t.unknown && (t.from < 0 || t.from > m.knownEnd() || t.txnFrom != noOffset && t.txnFrom < t.from) {
		return fmt.Errorf("tail: unknown from %d, transactional from %d, end offset %d", t.from, t.txnFrom, m.endOffset)
	}
	return nil
}

// auditCounts counts again what the set has counted.
func auditCounts(set *inFlightSet) error {
	open, uncommitted, floors := 0, int64(0), map[int64]int64{}
	for n := range set.queues {
		q := &set.queues[n]
		for i := range q.count {
			f := q.at(i)
			open++
			if !f.committed {
				uncommitted += int64(f.span.count())
			}
			if f.transactional {
				floors[int64(f.ticket)] = f.floor
			}
		}
	}
	if open != set.open || uncommitted != set.uncommitted {
		return fmt.Errorf("inFlightSet 2: %d in flight for %d offsets, counted %d and %d", open, uncommitted, set.open, set.uncommitted)
	}
	return auditOffsets("inFlightSet 3", &set.txnFloors, floors)
}

// auditOffsets holds an offsetQueue against what should be in it.
func auditOffsets(name string, q *offsetQueue, want map[int64]int64) error {
	live := 0
	for i, e := range q.entries {
		if i > 0 && q.entries[i-1].key >= e.key {
			return fmt.Errorf("%s: offsetQueue 1: key %d comes after %d", name, e.key, q.entries[i-1].key)
		}
		if e.value == removed {
			continue
		}
		if i < q.head {
			return fmt.Errorf("%s: offsetQueue 2: entry %d is live, and the head is %d", name, i, q.head)
		}
		live++
		if v, ok := want[e.key]; !ok || v != e.value {
			return fmt.Errorf("%s: has %d at %d, want %d (%t)", name, e.value, e.key, v, ok)
		}
	}
	if q.head < len(q.entries) && q.entries[q.head].value == removed {
		return fmt.Errorf("%s: offsetQueue 2: the head is removed", name)
	}
	if live != q.live || live != len(want) || len(q.entries) > 2*live+33 {
		return fmt.Errorf("%s: offsetQueue 3: %d of %d entries are live, counted %d, want %d", name, live, len(q.entries), q.live, len(want))
	}
	return nil
}

func auditNoQueues(m *ProducerStateManager) error {
	for row := range m.table.rows {
		if p := m.table.at(row); p.queue != 0 {
			return fmt.Errorf("inFlightSet 1: producer %d has queue %d, and nothing was ever reserved", p.id, p.queue-1)
		}
	}
	return nil
}

// auditOwners counts the producers that name a queue. A queue of batches without a
// producer id has none.
func auditOwners(m *ProducerStateManager) error {
	pl := m.inFlight
	owners := make([]int, len(pl.queues))
	claim := func(who string, pid int64, n uint32) error {
		if int(n) >= len(owners) || pl.queues[n].pid != pid || pid == NoProducerID {
			return fmt.Errorf("inFlightSet 1: %s of producer %d names queue %d, which is not its own", who, pid, n)
		}
		owners[n]++
		return nil
	}
	for row := range m.table.rows {
		p := m.table.at(row)
		if p.queue == 0 {
			continue
		}
		if err := claim("the row", p.id, p.queue-1); err != nil {
			return err
		}
	}
	for pid, n := range pl.newcomers {
		if auditRow(m, pid) != nil {
			return fmt.Errorf("inFlightSet 1: producer %d has a row and is a newcomer", pid)
		}
		if err := claim("the newcomer", pid, n); err != nil {
			return err
		}
	}
	for n := range pl.queues {
		free := 0
		for _, f := range pl.free {
			if int(f) == n {
				free++
			}
		}
		used := owners[n]
		if l := &pl.queues[n]; l.pid == NoProducerID && l.count > 0 {
			used++
		}
		if free+used != 1 {
			return fmt.Errorf("inFlightSet 1: queue %d is %d times free and has %d owners", n, free, used)
		}
		if (free == 1) != (pl.queues[n].count == 0) {
			return fmt.Errorf("queue 1: queue %d is %d times free and holds %d batches", n, free, pl.queues[n].count)
		}
	}
	return nil
}

// auditRow returns the row of a producer, or nil, and leaves no mark.
func auditRow(m *ProducerStateManager, pid int64) *producer {
	for row := range m.table.rows {
		if p := m.table.at(row); p.id == pid {
			return p
		}
	}
	return nil
}

func auditQueues(m *ProducerStateManager) error {
	tickets := map[uint64]bool{}
	for n := range m.inFlight.queues {
		l := &m.inFlight.queues[n]
		if l.count > WindowSize || l.start >= WindowSize {
			return fmt.Errorf("queue 1: queue %d begins at %d and holds %d", n, l.start, l.count)
		}
		if l.count == 0 {
			continue
		}
		if err := auditQueue(l, auditRow(m, l.pid)); err != nil {
			return fmt.Errorf("producer %d: %w", l.pid, err)
		}
		for i := range l.count {
			f := l.at(i)
			if tickets[f.ticket] || f.ticket == 0 || f.ticket > m.inFlight.tickets {
				return fmt.Errorf("producer %d: ticket %d is not one of its own", l.pid, f.ticket)
			}
			tickets[f.ticket] = true
			if f.floor < 0 || f.floor > m.endOffset {
				return fmt.Errorf("producer %d: reserved at end offset %d, and it is %d", l.pid, f.floor, m.endOffset)
			}
		}
	}
	return nil
}

func auditQueue(l *queue, p *producer) error {
	if p != nil && l.epoch < p.epoch {
		return fmt.Errorf("queue 2: epoch %d in flight, and %d is remembered", l.epoch, p.epoch)
	}
	if l.marker != nil {
		if l.count != 1 || l.at(0).transactional || l.at(0).committed {
			return fmt.Errorf("queue 5: a marker of %d in flight, the head is %+v", l.count, *l.at(0))
		}
		return nil
	}
	if p != nil && l.epoch == p.epoch && l.at(0).span.first() != p.window.next {
		return fmt.Errorf("queue 2: sequence %d is at the head, and %d is next", l.at(0).span.first(), p.window.next)
	}
	if l.at(0).committed {
		return fmt.Errorf("queue 3: the head is committed")
	}
	end := int64(0)
	for i := range l.count {
		f := l.at(i)
		if i > 0 && f.span.first() != after(l.at(i-1).span) {
			return fmt.Errorf("queue 2: sequence %d follows a batch that ends before %d", f.span.first(), after(l.at(i-1).span))
		}
		if f.committed && f.baseOffset < end {
			return fmt.Errorf("queue 4: batch %d lies at %d, and those before it need %d", i, f.baseOffset, end)
		}
		if f.committed {
			end = f.baseOffset
		}
		end += int64(f.span.count())
	}
	if l.pid != NoProducerID && l.next != after(l.at(l.count-1).span) {
		return fmt.Errorf("queue 2: next is %d, the newest batch ends before %d", l.next, after(l.at(l.count-1).span))
	}
	return nil
}

// auditFailedFirst: only unknown producers have a failed first batch.
func auditFailedFirst(m *ProducerStateManager) error {
	batches := m.inFlight.failedFirst.batches
	for pid := range batches {
		if auditRow(m, pid) != nil {
			return fmt.Errorf("failedFirst: producer %d is known", pid)
		}
	}
	if len(batches) > failedFirstLimit {
		return fmt.Errorf("failedFirst: %d of at most %d", len(batches), failedFirstLimit)
	}
	return nil
}

// queueState is what one producer has in flight, as plain values.
type queueState struct {
	ProducerID int64
	Epoch      int16
	Batches    []batchState
}

// batchState is one batch in flight. BaseOffset is -1 where it is not
// committed.
type batchState struct {
	FirstSequence, LastSequence int32
	BaseOffset                  int64
}

// queuesOf returns what is in flight, in the order of producer ids and, of those
// without one, of reservation.
func queuesOf(m *ProducerStateManager) []queueState {
	if m.inFlight == nil {
		return nil
	}
	var queues []*queue
	for n := range m.inFlight.queues {
		if l := &m.inFlight.queues[n]; l.count > 0 {
			queues = append(queues, l)
		}
	}
	slices.SortFunc(queues, func(a, b *queue) int {
		return cmp.Or(cmp.Compare(a.pid, b.pid), cmp.Compare(a.at(0).ticket, b.at(0).ticket))
	})
	var all []queueState
	for _, l := range queues {
		s := queueState{ProducerID: l.pid, Epoch: l.epoch}
		for i := range l.count {
			f := l.at(i)
			fs := batchState{FirstSequence: f.span.first(), LastSequence: f.span.last(), BaseOffset: noOffset}
			if f.committed {
				fs.BaseOffset = f.baseOffset
			}
			s.Batches = append(s.Batches, fs)
		}
		all = append(all, s)
	}
	return all
}

// words writes down the batches, oldest first.
func (l queueState) words() []string {
	var words []string
	for _, f := range l.Batches {
		w := fmt.Sprintf("%d..%d", f.FirstSequence, f.LastSequence)
		if f.BaseOffset != noOffset {
			w += fmt.Sprintf("@%d", f.BaseOffset)
		}
		words = append(words, w)
	}
	return words
}
