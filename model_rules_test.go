package idempotence

import (
	"errors"
	"math"
	"sort"
)

// This file is the model of the rules: the rules once more, written so plainly that they
// can be checked by reading. It shares no arithmetic and no data structure with the code
// under test. A model of a subject says what it knows of a producer, as an outlook, and
// judge answers for all of them.
//
// model, the simplest, keeps every batch that was ever accepted, and throws nothing away.

// outlook is what is known of one producer when a batch of it is judged.
type outlook struct {
	known  bool         // something of it is remembered
	epoch  int16        // that is remembered
	window []modelBatch // the newest five batches of that epoch, oldest first
	open   bool         // a transaction is open
	queue  []Batch      // in flight, oldest first
	marker bool         // what is in flight is a marker
	failed *Batch       // the first batch, whose append failed
}

// modelBatch is a batch in the log. Sequences are int64 here, so that nothing
// overflows.
type modelBatch struct {
	epoch              int16
	first, count, base int64
}

// judge answers a batch by the rules, in their order. The log ends at endOffset.
func judge(policy UnknownProducerPolicy, endOffset int64, o outlook, b Batch) (Result, error) {
	accept := Result{Verdict: Append}
	if b.ProducerID == -1 {
		return accept, nil // rule 0
	}
	if b.ProducerID < -1 || b.Epoch < 0 || b.BaseSequence < 0 || b.Count < 1 {
		return Result{}, ErrInvalidBatch // rule 1
	}
	if !o.known && len(o.queue) == 0 {
		if err := judgeFirst(policy, endOffset, o.failed, b); err != nil {
			return Result{}, err // rule 2
		}
		return accept, nil
	}
	epoch, next := o.next()
	newer := b.Epoch > epoch
	if b.Epoch < epoch {
		return Result{}, ErrFenced // rule 3
	}
	asked := modelBatch{first: int64(b.BaseSequence), count: int64(b.Count)}
	for _, old := range o.window {
		if b.Epoch == o.epoch && b.Epoch == epoch && old.first == asked.first && old.last() == asked.last() {
			return Result{Duplicate, old.base}, nil // rule 5
		}
	}
	if o.marker {
		return Result{}, ErrInFlight
	}
	txnInFlight := false
	for _, f := range o.queue {
		txnInFlight = txnInFlight || f.Transactional
		if !newer && f.BaseSequence == b.BaseSequence && f.Count == b.Count {
			return Result{}, ErrInFlight
		}
	}
	switch {
	case newer && asked.first != 0:
		return Result{}, ErrOutOfOrderSequence // rule 4
	case !newer && asked.first != next:
		return Result{}, ErrOutOfOrderSequence // rule 7
	case !b.Transactional && (o.open || !newer && txnInFlight):
		return Result{}, ErrInvalidTxnState // rule T1a
	case newer && o.open:
		return Result{}, ErrConcurrentTransactions // rule T1b
	case newer && len(o.queue) > 0, len(o.queue) == 5:
		return Result{}, ErrInFlight
	}
	return accept, nil // rules 4 and 6
}

// judgeFirst is rule 2, for the first batch of a producer.
func judgeFirst(policy UnknownProducerPolicy, endOffset int64, failed *Batch, b Batch) error {
	newLog := policy == StartAtZeroOnNewLog && endOffset == 0
	switch {
	case b.BaseSequence != 0 && policy == StartAtZero:
		return ErrUnknownProducer
	case b.BaseSequence != 0 && newLog:
		return ErrOutOfOrderSequence
	case failed != nil && failed.Epoch == b.Epoch && failed.BaseSequence != b.BaseSequence && !newLog:
		return ErrOutOfOrderSequence
	}
	return nil
}

// next returns the current epoch and the next sequence, including what is in flight. The
// epoch is -1 if there is neither.
func (o outlook) next() (epoch int16, sequence int64) {
	if n := len(o.queue); n > 0 && !o.marker {
		return o.queue[n-1].Epoch, int64(nextAfter(o.queue[n-1]))
	}
	if !o.known {
		return -1, 0
	}
	if n := len(o.window); n > 0 {
		sequence = (o.window[n-1].last() + 1) % modulus
	}
	return o.epoch, sequence
}

// nextAfter returns the sequence that follows a batch.
func nextAfter(b Batch) int32 {
	return int32((int64(b.BaseSequence) + int64(b.Count)) % modulus)
}

// modulus is how many sequences there are.
const modulus = int64(1) << 31

// last returns the sequence of the batch's last record.
func (b modelBatch) last() int64 { return (b.first + b.count - 1) % modulus }

// model is what a manager should be.
type model struct {
	cfg       Config
	accepted  map[int64][]modelBatch // of each producer, oldest first
	endOffset int64
	maxID     int64
	stats     Stats
}

func newModel(cfg Config) *model {
	return &model{cfg: cfg, accepted: map[int64][]modelBatch{}, maxID: NoProducerID}
}

// outlook returns what is known of a producer: the last five batches of all in the
// current epoch.
func (m *model) outlook(pid int64) outlook {
	all := m.accepted[pid]
	if len(all) == 0 {
		return outlook{}
	}
	o := outlook{known: true, epoch: all[len(all)-1].epoch}
	for _, b := range all {
		if b.epoch == o.epoch {
			o.window = append(o.window, b)
		}
	}
	o.window = o.window[max(0, len(o.window)-5):]
	return o
}

// sent returns the batches of a producer as they were sent.
func (m *model) sent(pid int64) (all []Batch) {
	for _, b := range m.accepted[pid] {
		all = append(all, Batch{ProducerID: pid, Epoch: b.epoch, BaseSequence: int32(b.first), Count: int32(b.count)})
	}
	return all
}

// judge answers a batch.
func (m *model) judge(b Batch) (Result, error) {
	return judge(m.cfg.UnknownProducer, m.endOffset, m.outlook(b.ProducerID), b)
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
		for _, b := range m.outlook(pid).window {
			p.Window = append(p.Window, BatchMetadata{int32(b.first), int32(b.last()), b.base})
		}
		s.Producers = append(s.Producers, p)
	}
	sort.Slice(s.Producers, func(i, j int) bool { return s.Producers[i].ProducerID < s.Producers[j].ProducerID })
	return s
}
