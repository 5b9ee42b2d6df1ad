package idempotence

import (
	"iter"
	"slices"
	"time"
)

// This file is for looking in: counts, and copies of what is remembered. Nothing
// in it changes anything.

// Len returns how many producers are remembered. Safe for concurrent use.
func (m *ProducerStateManager) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return int(m.table.rows)
}

// MaxProducerID returns the highest producer id that was ever remembered, or
// NoProducerID if none was. Hand out only ids above it, since two sessions under one
// id cannot be told apart. Safe for concurrent use.
func (m *ProducerStateManager) MaxProducerID() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.maxProducerID
}

// Stats holds counters of the answers that a manager has given since New, and gauges
// of what it keeps beside producers. A refusal counts the same whether Check, Commit,
// Apply or Reserve returned it.
type Stats struct {
	Accepted          uint64 // batches committed and visible, including those without a producer id
	Duplicate         uint64 // retries recognised by Check, Apply and Reserve
	OutOfOrder        uint64 // ErrOutOfOrderSequence, ErrDuplicateSequence and ErrOffsetOrder
	Unknown           uint64 // ErrUnknownProducer
	Fenced            uint64 // ErrFenced
	Invalid           uint64 // ErrInvalidBatch
	InFlight          uint64 // ErrInFlight
	InvalidTxn        uint64 // ErrInvalidTxnState
	ConcurrentTxn     uint64 // ErrConcurrentTransactions
	CoordinatorFenced uint64 // ErrCoordinatorFenced
	Markers           uint64 // markers committed
	Expired           uint64 // producers forgotten by Expire
	Evicted           uint64 // producers forgotten for Config.MaxProducers

	OpenReservations   int // reservations not yet visible, aborted or abandoned
	FailedFirstAppends int // unknown producers whose first batch failed; see Reservation.Abort
	OpenTransactions   int // producers with an open transaction
	AbortedRanges      int // aborted transactions kept for AbortedTransactions
}

// Stats returns the counters and gauges, as a copy. It does not allocate. Safe for
// concurrent use.
func (m *ProducerStateManager) Stats() Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.stats
	if set := m.inFlight; set != nil {
		s.OpenReservations, s.FailedFirstAppends = set.open, len(set.failedFirst.batches)
	}
	if t := m.txns; t != nil {
		s.OpenTransactions, s.AbortedRanges = t.open.live, t.aborted.len()
	}
	return s
}

// ProducerState is what is remembered of one producer, as a copy: changing it
// changes nothing else.
type ProducerState struct {
	// ProducerID is 0 or above.
	ProducerID int64
	// Epoch is the current epoch, in 0..32767. Batches of an older one are
	// fenced.
	Epoch int16
	// Window holds the newest batches of this epoch, oldest first, at most
	// WindowSize of them. It is empty for a producer known only by its epoch.
	Window []BatchMetadata
	// LastActivity is the time of the call of Expire that first counted the
	// producer's newest batch or marker; zero until there was one.
	LastActivity time.Time
	// CurrentTxnFirstOffset is the offset of the first batch of the open
	// transaction, or -1 if none is open.
	CurrentTxnFirstOffset int64
	// CoordinatorEpoch is the highest coordinator epoch that a marker of the
	// producer carried, or -1 if no marker was seen.
	CoordinatorEpoch int32
	// InFlight is how many batches are reserved and not yet visible.
	InFlight int
}

// view copies the producer for a reader. ticks holds the tick that it refers to.
func (p *producer) view(ticks []tick, current uint32) ProducerState {
	s := ProducerState{
		ProducerID:            p.id,
		Epoch:                 p.epoch,
		Window:                p.window.appendTo(make([]BatchMetadata, 0, p.window.count)),
		CurrentTxnFirstOffset: p.txnFirst,
		CoordinatorEpoch:      p.coordinatorEpoch,
	}
	if p.tick != current {
		s.LastActivity = ticks[p.tick].at().time()
	}
	return s
}

// Producer returns what is remembered of a producer, as a copy, and whether
// anything is. It allocates the Window. Safe for concurrent use.
func (m *ProducerStateManager) Producer(pid int64) (ProducerState, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.producer(pid)
}

func (s *state) producer(pid int64) (ProducerState, bool) {
	p := s.table.find(pid)
	if p == nil {
		return ProducerState{}, false
	}
	v := p.view(s.recency.ticks, s.recency.current)
	if q := s.inFlight.queueOf(pid, p); q != nil {
		v.InFlight = int(q.count)
	}
	return v, true
}

// Producers returns a sequence of everything remembered, in the order of
// producer ids. Each walk over it sees the state of the moment it starts. The
// states are copies, so it allocates their Windows, and some 20 to 40 bytes for
// each producer to put them in order. Safe for concurrent use: the walk holds no
// lock while it yields, so its body may call the manager.
func (m *ProducerStateManager) Producers() iter.Seq[ProducerState] {
	return func(yield func(ProducerState) bool) {
		m.mu.Lock()
		all := m.table.freeze()
		ticks, current := slices.Clone(m.recency.ticks), m.recency.current
		counts := m.inFlight.counts()
		m.mu.Unlock()
		for _, r := range all.byID() {
			p := all.at(r.row)
			s := p.view(ticks, current)
			s.InFlight = counts.of(p)
			if !yield(s) {
				return
			}
		}
	}
}
