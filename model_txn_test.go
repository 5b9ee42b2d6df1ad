package idempotence

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
)

// This file is the model of transactions. It is a list of what the manager was told
// and a list of what lies in the log, and it answers each question by reading them
// from the beginning.

// txnSpan is a transaction in a log. Where it is open, marker is -1.
type txnSpan struct {
	pid, first, marker int64
	commit             bool
}

// transactionsIn reads the transactions out of a log, by definition: from the first
// transactional batch of a producer to its next marker. Those that have ended come in
// the order of their markers, and those that are open in the order of first offsets.
func transactionsIn(log []logged) (ended, open []txnSpan) {
	first := map[int64]int64{}
	for _, l := range log {
		at, isOpen := first[l.pid()]
		switch {
		case l.marker == nil && l.batch.Transactional && !isOpen:
			first[l.pid()] = l.base
		case l.marker != nil && l.marker.CoordinatorEpoch >= 0 && isOpen:
			ended = append(ended, txnSpan{l.pid(), at, l.base, l.marker.Commit})
			delete(first, l.pid())
		}
	}
	for _, pid := range slices.Sorted(maps.Keys(first)) {
		open = append(open, txnSpan{pid: pid, first: first[pid], marker: -1})
	}
	slices.SortFunc(open, func(a, b txnSpan) int { return cmp.Compare(a.first, b.first) })
	return ended, open
}

// abortedIn returns what a reader of [from, to) must know, by definition.
func abortedIn(log []logged, from, to int64) (all []AbortedTransaction) {
	ended, _ := transactionsIn(log)
	for _, txn := range ended {
		if !txn.commit && txn.marker >= from && txn.first < to {
			all = append(all, AbortedTransaction{txn.pid, txn.first, txn.marker})
		}
	}
	return all
}

// txnModel is what a manager should know.
type txnModel struct {
	cfg       Config
	told      []txnEvent // in the order in which it was told
	inFlight  []*txnAppend
	log       []logged // what it was told of the log, in the order of the log
	end       int64
	start     int64
	readFrom  int64          // the log is read from here on because something in it may be unknown
	asked     bool           // LastStableOffset was called
	watermark int64          // the highest it was given
	released  map[int64]bool // markers of ended transactions that hold nothing back
	markers   uint64         // committed
}

// txnEvent is a batch or marker, or a producer being forgotten.
type txnEvent struct {
	logged
	again  bool // it was told before, and knows it
	forgot bool
}

// txnAppend is a batch or marker in flight.
type txnAppend struct {
	logged          // its base is noOffset while it is not in the log
	floor     int64 // the end offset at its reservation
	committed bool  // behind something that is not
	r         *Reservation
}

func newTxnModel(cfg Config) *txnModel {
	return &txnModel{cfg: cfg, readFrom: math.MaxInt64, released: map[int64]bool{}}
}

// copy returns a copy of what a snapshot holds.
func (m *txnModel) copy() *txnModel {
	c := newTxnModel(m.cfg)
	c.told, c.log, c.start = slices.Clone(m.told), slices.Clone(m.log), m.start
	return c
}

// toldAgain reports whether something of a producer was replayed that was known before
// the producer was last forgotten. Truncate does not notice if the window skipped it.
func (m *txnModel) toldAgain() bool {
	forgot := map[int64]bool{}
	for _, e := range m.told {
		if e.forgot {
			forgot[e.pid()] = true
		} else if e.again && forgot[e.pid()] {
			return true
		}
	}
	return false
}

// txnProducer is what is remembered of one producer.
type txnProducer struct {
	known       bool
	epoch       int16
	batches     []modelBatch // of this epoch
	coordinator int32
}

// newest returns the newest base offset, or -1.
func (p *txnProducer) newest() int64 {
	if len(p.batches) == 0 {
		return -1
	}
	return p.batches[len(p.batches)-1].base
}

// producer reads what was told of one producer.
func (m *txnModel) producer(pid int64) txnProducer {
	unknown := txnProducer{coordinator: -1}
	p := unknown
	for _, e := range m.told {
		if e.pid() != pid {
			continue
		}
		if e.forgot {
			p = unknown
			continue
		}
		if !p.known {
			p.known, p.epoch = true, e.epoch()
		}
		if e.marker != nil {
			stale := e.epoch() < p.epoch || e.base < p.newest()
			if !stale || !e.again {
				p.coordinator = max(p.coordinator, e.marker.CoordinatorEpoch)
			}
			if e.epoch() > p.epoch && !stale {
				p.epoch, p.batches = e.epoch(), nil
			}
			continue
		}
		if e.epoch() < p.epoch || e.base <= p.newest() {
			continue
		}
		if e.epoch() > p.epoch {
			p.epoch, p.batches = e.epoch(), nil
		}
		p.batches = append(p.batches, modelBatch{e.epoch(), int64(e.batch.BaseSequence), int64(e.batch.Count), e.base})
	}
	return p
}

// window returns the newest five batches.
func (p *txnProducer) window() []modelBatch { return p.batches[max(0, len(p.batches)-5):] }

// queue returns what a producer has in flight, oldest first.
func (m *txnModel) queue(pid int64) (q []*txnAppend) {
	for _, a := range m.inFlight {
		if a.pid() == pid && pid != NoProducerID {
			q = append(q, a)
		}
	}
	return q
}

// openOf returns the first offset of a producer's open transaction, or -1.
func (m *txnModel) openOf(pid int64) int64 {
	_, open := transactionsIn(m.log)
	for _, txn := range open {
		if txn.pid == pid {
			return txn.first
		}
	}
	return -1
}

// outlook returns what is known of a producer.
func (m *txnModel) outlook(pid int64) outlook {
	p, q := m.producer(pid), m.queue(pid)
	o := outlook{known: p.known, epoch: p.epoch, window: p.window(), open: m.openOf(pid) >= 0}
	for _, a := range q {
		o.queue = append(o.queue, a.batch)
		o.marker = a.marker != nil
	}
	return o
}

// judge answers a batch.
func (m *txnModel) judge(b Batch) (Result, error) {
	return judge(m.cfg.UnknownProducer, m.end, m.outlook(b.ProducerID), b)
}

// judgeMarker answers a marker.
func (m *txnModel) judgeMarker(k Marker) error {
	p, open := m.producer(k.ProducerID), m.openOf(k.ProducerID) >= 0
	switch {
	case k.ProducerID < 0 || k.Epoch < 0 || k.CoordinatorEpoch < 0:
		return ErrInvalidBatch
	case len(m.queue(k.ProducerID)) > 0:
		return ErrInFlight
	case !p.known:
		return nil
	case k.Epoch < p.epoch:
		return ErrFenced
	case k.Version >= 2 && k.Epoch == p.epoch && open && k.Epoch != math.MaxInt16:
		return ErrFenced
	case k.CoordinatorEpoch < p.coordinator:
		return ErrCoordinatorFenced
	}
	return nil
}

// tell notes that the manager was told of an entry of the log, perhaps again.
func (m *txnModel) tell(l logged) {
	m.end = max(m.end, l.end())
	at, again := slices.BinarySearchFunc(m.log, l, func(a, b logged) int { return cmp.Compare(a.base, b.base) })
	m.told = append(m.told, txnEvent{logged: l, again: again && l.base < m.readFrom})
	if !again {
		m.log = slices.Insert(m.log, at, l)
	}
}

// settle takes what is committed at the head of each queue into the log.
func (m *txnModel) settle() {
	behind := map[int64]bool{}
	m.inFlight = slices.DeleteFunc(m.inFlight, func(a *txnAppend) bool {
		if !a.committed || behind[a.pid()] {
			behind[a.pid()] = a.pid() != NoProducerID
			return false
		}
		m.tell(a.logged)
		return true
	})
}

// cut takes back what lies past an end, where that is exact.
func (m *txnModel) cut(to int64) {
	m.told = slices.DeleteFunc(m.told, func(e txnEvent) bool { return !e.forgot && e.logged.end() > to })
	m.log = slices.DeleteFunc(m.log, func(l logged) bool { return l.end() > to })
	m.end, m.start, m.watermark = min(m.end, to), min(m.start, to), min(m.watermark, to)
}

// forget notes that a producer was forgotten.
func (m *txnModel) forget(pid int64) {
	m.told = append(m.told, txnEvent{logged: logged{batch: Batch{ProducerID: pid}}, forgot: true})
}

// stable returns the last stable offset for a high watermark.
func (m *txnModel) stable(hw int64) int64 {
	m.end, m.watermark = max(m.end, hw), max(m.watermark, hw)
	ended, open := transactionsIn(m.log)
	if !m.asked {
		for _, txn := range ended {
			m.released[txn.marker] = true
		}
		m.asked = true
	}
	stable := hw
	for _, txn := range open {
		stable = min(stable, txn.first)
	}
	for _, txn := range ended {
		if txn.marker >= m.watermark && !m.released[txn.marker] {
			stable = min(stable, txn.first)
		}
	}
	for _, a := range m.inFlight {
		if a.marker == nil && a.batch.Transactional {
			stable = min(stable, a.floor)
		}
	}
	return max(stable, m.start)
}

// aborted returns the aborted transactions that are kept.
func (m *txnModel) aborted() []AbortedTransaction { return abortedIn(m.log, m.start, math.MaxInt64) }

// fates says what a reader of committed records must make of each transactional batch
// in a log: it is part of a transaction that is open, committed or aborted.
func fates(log []logged) map[int64]string {
	all := map[int64]string{}
	ended, open := transactionsIn(log)
	for _, l := range log {
		if l.marker != nil || !l.batch.Transactional {
			continue
		}
		for _, txn := range ended {
			if txn.pid == l.pid() && txn.first <= l.base && l.base < txn.marker {
				all[l.base] = map[bool]string{true: "committed", false: "aborted"}[txn.commit]
			}
		}
		for _, txn := range open {
			if txn.pid == l.pid() && txn.first <= l.base {
				all[l.base] = "open"
			}
		}
	}
	return all
}

// readCommitted returns the base offsets of the batches in [from, to) that a consumer
// shows: it begins to leave out a producer's transactional batches at the first offset
// of an aborted transaction, and stops at an abort marker of the producer.
func readCommitted(log []logged, from, to int64, aborted []AbortedTransaction) (shown []int64) {
	aborted = slices.Clone(aborted)
	slices.SortStableFunc(aborted, func(a, b AbortedTransaction) int { return cmp.Compare(a.FirstOffset, b.FirstOffset) })
	hidden := map[int64]bool{}
	for _, l := range log {
		if l.end() <= from || l.base >= to {
			continue
		}
		for len(aborted) > 0 && aborted[0].FirstOffset < l.end() {
			hidden[aborted[0].ProducerID] = true
			aborted = aborted[1:]
		}
		switch {
		case l.marker != nil:
			if l.marker.CoordinatorEpoch >= 0 && !l.marker.Commit {
				delete(hidden, l.pid())
			}
		case !l.batch.Transactional || !hidden[l.pid()]:
			shown = append(shown, l.base)
		}
	}
	return shown
}

// text writes down an entry for a failing test.
func (l logged) text() string {
	if l.marker != nil {
		return fmt.Sprintf("marker pid=%d epoch=%d coord=%d commit=%t v%d base=%d", l.marker.ProducerID, l.marker.Epoch,
			l.marker.CoordinatorEpoch, l.marker.Commit, l.marker.Version, l.base)
	}
	bit := ""
	if l.batch.Transactional {
		bit = " txn"
	}
	return fmt.Sprintf("%s%s base=%d", words(l.batch), bit, l.base)
}
