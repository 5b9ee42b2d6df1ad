package idempotence

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// This file is the part of the audit that is about reservations: the invariants
// of lane and pipelines, by their numbers there.

// auditPipelines checks everything about reservations.
func auditPipelines(m *ProducerStateManager) error {
	pl := m.inFlight
	if pl == nil {
		return auditNoLanes(m)
	}
	if pl.unknownFrom < noOffset || pl.unknownFrom > m.endOffset {
		return fmt.Errorf("pipelines 2: in doubt from %d, end offset %d", pl.unknownFrom, m.endOffset)
	}
	return errors.Join(auditOwners(m), auditLanes(m), auditOwed(m))
}

func auditNoLanes(m *ProducerStateManager) error {
	for row := range m.table.rows {
		if p := m.table.at(row); p.queue != 0 {
			return fmt.Errorf("pipelines 1: producer %d has lane %d, and nothing was ever reserved", p.id, p.queue-1)
		}
	}
	return nil
}

// auditOwners counts who says that a lane is his. A lane without a producer id
// has no owner, and is nobody else's.
func auditOwners(m *ProducerStateManager) error {
	pl := m.inFlight
	owners := make([]int, len(pl.queues))
	claim := func(who string, pid int64, n uint32) error {
		if int(n) >= len(owners) || pl.queues[n].pid != pid || pid == NoProducerID {
			return fmt.Errorf("pipelines 1: %s of producer %d names lane %d, which is not its own", who, pid, n)
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
			return fmt.Errorf("pipelines 1: producer %d has a row and is a newcomer", pid)
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
			return fmt.Errorf("pipelines 1: lane %d is %d times free and has %d owners", n, free, used)
		}
		if (free == 1) != (pl.queues[n].count == 0) {
			return fmt.Errorf("lane 1: lane %d is %d times free and holds %d batches", n, free, pl.queues[n].count)
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

func auditLanes(m *ProducerStateManager) error {
	tickets := map[uint64]bool{}
	for n := range m.inFlight.queues {
		l := &m.inFlight.queues[n]
		if l.count > WindowSize || l.start >= WindowSize {
			return fmt.Errorf("lane 1: lane %d begins at %d and holds %d", n, l.start, l.count)
		}
		if l.count == 0 {
			continue
		}
		if err := auditLane(l, auditRow(m, l.pid)); err != nil {
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

func auditLane(l *queue, p *producer) error {
	if p != nil && l.epoch < p.epoch {
		return fmt.Errorf("lane 2: epoch %d in flight, and %d is remembered", l.epoch, p.epoch)
	}
	if p != nil && l.epoch == p.epoch && l.at(0).span.first() != p.window.next {
		return fmt.Errorf("lane 2: sequence %d is at the head, and %d is next", l.at(0).span.first(), p.window.next)
	}
	if l.at(0).committed {
		return fmt.Errorf("lane 3: the head is committed")
	}
	end := int64(0)
	for i := range l.count {
		f := l.at(i)
		if i > 0 && f.span.first() != after(l.at(i-1).span) {
			return fmt.Errorf("lane 2: sequence %d follows a batch that ends before %d", f.span.first(), after(l.at(i-1).span))
		}
		if f.committed && f.baseOffset < end {
			return fmt.Errorf("lane 4: batch %d lies at %d, and those before it need %d", i, f.baseOffset, end)
		}
		if f.committed {
			end = f.baseOffset
		}
		end += int64(f.span.count())
	}
	if l.pid != NoProducerID && l.next != after(l.at(l.count-1).span) {
		return fmt.Errorf("lane 2: next is %d, the newest batch ends before %d", l.next, after(l.at(l.count-1).span))
	}
	return nil
}

// auditOwed: what is owed is owed by the unknown.
func auditOwed(m *ProducerStateManager) error {
	o := &m.inFlight.failedFirst
	for _, generation := range []map[int64]firstBatch{o.young, o.old} {
		for pid := range generation {
			if auditRow(m, pid) != nil {
				return fmt.Errorf("owed: producer %d is known", pid)
			}
		}
		if limit := m.cfg.MaxProducers; limit > 0 && len(generation) > limit {
			return fmt.Errorf("owed: %d producers in a generation, the cap is %d", len(generation), limit)
		}
	}
	return nil
}

// laneState is what one producer has in flight, as plain values.
type laneState struct {
	ProducerID int64
	Epoch      int16
	Batches    []flightState
}

// flightState is one batch in flight. BaseOffset is -1 where it is not
// committed.
type flightState struct {
	FirstSequence, LastSequence int32
	BaseOffset                  int64
}

// lanesOf returns what is in flight, in the order of producer ids and, of those
// without one, of reservation.
func queuesOf(m *ProducerStateManager) []laneState {
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
	var all []laneState
	for _, l := range queues {
		s := laneState{ProducerID: l.pid, Epoch: l.epoch}
		for i := range l.count {
			f := l.at(i)
			fs := flightState{FirstSequence: f.span.first(), LastSequence: f.span.last(), BaseOffset: noOffset}
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
func (l laneState) words() []string {
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
