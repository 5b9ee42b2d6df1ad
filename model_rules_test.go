package idempotence

import (
	"errors"
	"math"
	"sort"
)

// This file is the model: the rules once more, written so plainly that they can
// be checked by reading. It keeps every batch that was ever accepted, throws
// nothing away, and answers each question by scanning the list. It shares no
// arithmetic and no data structure with the code under test.

// model is what a manager should be.
type model struct {
	cfg       Config
	accepted  map[int64][]modelBatch // of each producer, oldest first
	endOffset int64
	maxID     int64
	stats     Stats
}

// modelBatch is a batch in the log. Sequences are int64 here, so that nothing
// overflows.
type modelBatch struct {
	epoch              int16
	first, count, base int64
}

func newModel(cfg Config) *model {
	return &model{cfg: cfg, accepted: map[int64][]modelBatch{}, maxID: NoProducerID}
}

// modulus is how many sequences there are.
const modulus = int64(1) << 31

// last returns the sequence of the batch's last record.
func (b modelBatch) last() int64 { return (b.first + b.count - 1) % modulus }

// window returns the batches that a duplicate is looked for in: the last five
// of all in the current epoch.
func (m *model) window(pid int64) []modelBatch {
	all := m.accepted[pid]
	var current []modelBatch
	for _, b := range all {
		if b.epoch == all[len(all)-1].epoch {
			current = append(current, b)
		}
	}
	return current[max(0, len(current)-5):]
}

// judge answers a batch by the rules, in their order.
func (m *model) judge(b Batch) (Result, error) {
	if b.ProducerID == -1 {
		return Result{Verdict: Append}, nil // rule 0
	}
	if b.ProducerID < -1 || b.Epoch < 0 || b.BaseSequence < 0 || b.Count < 1 {
		return Result{}, ErrInvalidBatch // rule 1
	}
	all := m.accepted[b.ProducerID]
	if len(all) == 0 { // rule 2
		switch {
		case b.BaseSequence == 0 || m.cfg.UnknownProducer == AcceptAny:
			return Result{Verdict: Append}, nil
		case m.cfg.UnknownProducer == StartAtZero:
			return Result{}, ErrUnknownProducer
		case m.endOffset == 0:
			return Result{}, ErrOutOfOrderSequence
		}
		return Result{Verdict: Append}, nil
	}
	newest := all[len(all)-1]
	if b.Epoch < newest.epoch {
		return Result{}, ErrFenced // rule 3
	}
	if b.Epoch > newest.epoch { // rule 4
		if b.BaseSequence != 0 {
			return Result{}, ErrOutOfOrderSequence
		}
		return Result{Verdict: Append}, nil
	}
	asked := modelBatch{first: int64(b.BaseSequence), count: int64(b.Count)}
	for _, old := range m.window(b.ProducerID) {
		if old.first == asked.first && old.last() == asked.last() {
			return Result{Duplicate, old.base}, nil // rule 5
		}
	}
	if asked.first == (newest.last()+1)%modulus {
		return Result{Verdict: Append}, nil // rule 6
	}
	return Result{}, ErrOutOfOrderSequence // rule 7
}

// check answers a batch and counts the answer.
func (m *model) check(b Batch) (Result, error) {
	res, err := m.judge(b)
	m.count(err)
	if res.Verdict == Duplicate {
		m.stats.Duplicate++
	}
	return res, err
}

// commit answers a Commit, and takes the batch where it is accepted.
func (m *model) commit(b Batch, base int64) error {
	res, err := m.judge(b)
	if err == nil && res.Verdict == Duplicate {
		err = ErrDuplicateSequence
	}
	all := m.accepted[b.ProducerID]
	if err == nil && (base < 0 || base > math.MaxInt64-max(int64(b.Count), 0)) {
		err = ErrOffsetOrder
	}
	if err == nil && len(all) > 0 && base < all[len(all)-1].base+all[len(all)-1].count {
		err = ErrOffsetOrder
	}
	if err != nil {
		m.count(err)
		return err
	}
	m.stats.Accepted++
	m.endOffset = max(m.endOffset, base+max(int64(b.Count), 0))
	if b.ProducerID >= 0 {
		m.maxID = max(m.maxID, b.ProducerID)
		m.accepted[b.ProducerID] = append(all, modelBatch{b.Epoch, int64(b.BaseSequence), int64(b.Count), base})
	}
	return nil
}

func (m *model) count(err error) {
	switch {
	case err == nil:
	case errors.Is(err, ErrInvalidBatch):
		m.stats.Invalid++
	case errors.Is(err, ErrUnknownProducer):
		m.stats.Unknown++
	case errors.Is(err, ErrFenced):
		m.stats.Fenced++
	default:
		m.stats.OutOfOrder++
	}
}

// state is what a manager in the model's place would show.
func (m *model) state() observed {
	s := observed{EndOffset: m.endOffset, MaxProducerID: m.maxID}
	for pid, all := range m.accepted {
		p := ProducerState{ProducerID: pid, Epoch: all[len(all)-1].epoch, CurrentTxnFirstOffset: -1, CoordinatorEpoch: -1}
		for _, b := range m.window(pid) {
			p.Window = append(p.Window, BatchMetadata{int32(b.first), int32(b.last()), b.base})
		}
		s.Producers = append(s.Producers, p)
	}
	sort.Slice(s.Producers, func(i, j int) bool { return s.Producers[i].ProducerID < s.Producers[j].ProducerID })
	return s
}
