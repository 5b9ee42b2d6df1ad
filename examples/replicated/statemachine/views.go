package statemachine

// This file is what others see of the state.

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/idempotence-go/idempotence"
)

// Topic returns the topic with a name, or ErrUnknownPartition.
func (m *Machine) Topic(name string) (*Topic, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if t := m.state.byName[name]; t != nil {
		return t, nil
	}
	return nil, ErrUnknownPartition
}

// Topics returns all topics, in the order of their creation.
func (m *Machine) Topics() []*Topic {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.Clone(m.state.topics)
}

// Partition returns a partition of a topic, or ErrUnknownPartition. It is that
// of the present state: after a Restore, which a replica that has fallen behind
// goes through, its log is closed.
func (m *Machine) Partition(topic string, index int32) (*Partition, error) {
	t, err := m.Topic(topic)
	if err != nil {
		return nil, err
	}
	if index < 0 || int(index) >= len(t.Partitions) {
		return nil, ErrUnknownPartition
	}
	return t.Partitions[index], nil
}

// Check judges a batch by what has been applied so far, and reports whether the
// answer is final: it stays true whatever is applied next, so that the batch
// need not be proposed. That a batch is a duplicate, is fenced, or is invalid, is
// final. A gap is not: what is missing may be in the raft log.
func (p *Partition) Check(b idempotence.Batch) (result idempotence.Result, final bool, err error) {
	if p.deduplication == Never {
		return result, false, nil
	}
	result, err = p.producers.CheckBatch(b)
	final = result.Verdict == idempotence.Duplicate ||
		errors.Is(err, idempotence.ErrFenced) || errors.Is(err, idempotence.ErrInvalidBatch) ||
		err != nil && p.deduplication == WhenProposed
	return result, final, err
}

// LastStableOffset returns the offset up to which no transaction is open.
func (p *Partition) LastStableOffset() int64 { return p.stable.Load() }

// KnowsProducer reports whether any partition remembers a producer.
func (m *Machine) KnowsProducer(id int64) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.ContainsFunc(m.state.partitions, func(p *Partition) bool {
		_, known := p.producers.Producer(id)
		return known
	})
}

// Clock returns the time of the last expire command, and false if there was
// none.
func (m *Machine) Clock() (time.Time, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return time.Unix(0, m.state.clock), m.state.clock != 0
}

// Reached notes that nothing up to a raft index is left to be applied. The
// machine does so itself; others do for entries that it is not given.
func (m *Machine) Reached(index uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reached = max(m.reached, index)
	close(m.changed)
	m.changed = make(chan struct{})
}

// Changed returns a channel that is closed at the next change of the state.
func (m *Machine) Changed() <-chan struct{} {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.changed
}

// WaitReached returns when nothing up to a raft index is left to be applied, or
// with the error of ctx.
func (m *Machine) WaitReached(ctx context.Context, index uint64) error {
	for {
		m.mu.RLock()
		reached, changed := m.reached, m.changed
		m.mu.RUnlock()
		if reached >= index {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
