package idempotence

import "errors"

// This file is the rules: how a batch is judged. They are written here once, for what
// is committed and for what is in flight. Nothing here changes the state but the
// counters of Stats.
//
// The rules are those of KIP-98, with the window of KAFKA-5494, as Kafka's
// ProducerAppendInfo and ProducerStateEntry keep them. The package comment numbers
// them.

// Verdict says what to do with a batch that is not refused. The zero Verdict comes
// only with an error.
type Verdict uint8

const (
	// Append: the batch is the next one. Append it to the log, then Commit it.
	Append Verdict = iota + 1
	// Duplicate: the batch is in the log already. Do not append it. Answer the
	// producer with the offset of the first copy.
	Duplicate
)

// String returns "Append" or "Duplicate", or "none" for the zero Verdict.
func (v Verdict) String() string {
	switch v {
	case Append:
		return "Append"
	case Duplicate:
		return "Duplicate"
	}
	return "none"
}

// Result is the answer to a batch that is not refused.
type Result struct {
	// Verdict is Append or Duplicate. It is zero only beside an error.
	Verdict Verdict
	// BaseOffset is the base offset of the first copy for Duplicate, and 0 for
	// Append. It is the right answer even if retention has deleted those records
	// since.
	BaseOffset int64
}

// Batch is what the header of a record batch says about its producer.
//
// The zero ProducerID is the id of a producer. A Batch for a producer that is not
// idempotent has NoProducerID.
type Batch struct {
	// ProducerID is 0 or above, or NoProducerID.
	ProducerID int64
	// Epoch is the producer's epoch, in 0..32767.
	Epoch int16
	// BaseSequence is the sequence of the first record, in 0..2147483647.
	BaseSequence int32
	// Count is the number of sequences that the batch covers, in 1..2147483647.
	// It is lastOffsetDelta+1 of the header, not the number of records that
	// compaction has left.
	Count int32
	// Transactional reports whether the batch is part of a transaction.
	Transactional bool
}

// wellFormed reports whether every field is in its range (rule 1).
func (b *Batch) wellFormed() bool {
	return b.ProducerID >= 0 && b.Epoch >= 0 && b.BaseSequence >= 0 && b.Count >= 1
}

// span returns the batch's place in the sequence space. It requires a well-formed
// batch.
func (b *Batch) span() span { return makeSpan(b.BaseSequence, b.Count) }

// offsets returns how many offsets of the log the batch takes.
func (b *Batch) offsets() int64 { return int64(max(b.Count, 0)) }

// continuedBy reports whether b is certainly the next batch of p, with nothing in
// flight and no transaction to open. It decides the common case with a few
// comparisons, which imply that the other fields are in their ranges. pinned stands
// for inTransaction, since it lies in the first cache line: with nothing in flight
// the two are equal.
func (p *producer) continuedBy(b *Batch) bool {
	return p.id == b.ProducerID && p.epoch == b.Epoch && p.window.follows(b.BaseSequence) && p.queue == 0 && b.Count > 0 &&
		b.Transactional == p.pinned
}

// judge applies rules 0 to 7. It also returns the producer, or nil if the batch
// names none or it is unknown.
func (s *state) judge(b *Batch) (Result, *producer, error) {
	if b.ProducerID == NoProducerID {
		return Result{Verdict: Append}, nil, nil
	}
	if !b.wellFormed() {
		return Result{}, nil, ErrInvalidBatch
	}
	p := s.table.find(b.ProducerID)
	q := s.inFlight.queueOf(b.ProducerID, p)
	if p == nil && q == nil {
		res, err := s.judgeUnknown(b)
		return res, nil, err
	}
	res, err := judgeKnown(b, p, q)
	return res, p, err
}

// judgeKnown applies rules 3 to 7 to a well-formed batch. p is what is committed of
// its producer and q is what is in flight. Either may be nil, but not both. What is
// in flight counts as committed. A batch whose answer depends on the outcome of an
// append in flight gets ErrInFlight.
func judgeKnown(b *Batch, p *producer, q *queue) (Result, error) {
	epoch, next := expected(p, q)
	newer := b.Epoch > epoch
	if b.Epoch < epoch { // rule 3
		return Result{}, ErrFenced
	}
	if !newer && p != nil && p.epoch == epoch { // rule 5
		if first := p.window.find(b.span()); first != nil {
			return Result{Duplicate, first.baseOffset}, nil
		}
	}
	if q != nil && (q.marker != nil || !newer && q.copyOf(b.span()) != nil) {
		return Result{}, ErrInFlight
	}
	if newer && b.BaseSequence != 0 || !newer && b.BaseSequence != next { // rules 4 and 7
		return Result{}, ErrOutOfOrderSequence
	}
	if err := judgeTxn(b, newer, p, q); err != nil { // rule T1
		return Result{}, err
	}
	if q != nil && (newer || q.count == WindowSize) {
		return Result{}, ErrInFlight
	}
	return Result{Verdict: Append}, nil // rules 4 and 6
}

// judgeTxn applies rule T1 to a batch that is otherwise in order. newer reports
// whether the batch has a newer epoch than its producer.
func judgeTxn(b *Batch, newer bool, p *producer, q *queue) error {
	open := p != nil && p.inTransaction()
	switch {
	case !b.Transactional && (open || !newer && q != nil && q.transactional()):
		return ErrInvalidTxnState
	case open && newer:
		return ErrConcurrentTransactions
	}
	return nil
}

// expected returns the epoch and the next sequence of a producer, including what is
// in flight. p and q are as in judgeKnown; if both are nil the epoch is noEpoch.
func expected(p *producer, q *queue) (epoch int16, next int32) {
	switch {
	case q != nil && q.marker == nil:
		return q.epoch, q.next
	case p != nil:
		return p.epoch, p.window.next
	}
	return noEpoch, 0
}

// judgeUnknown applies rule 2, the policy for an unknown producer.
func (s *state) judgeUnknown(b *Batch) (Result, error) {
	switch policy := s.cfg.UnknownProducer; {
	case b.BaseSequence == 0 || policy == AcceptAny:
	case policy != StartAtZeroOnNewLog:
		return Result{}, ErrUnknownProducer
	case s.endOffset == 0:
		return Result{}, ErrOutOfOrderSequence
	}
	if f, ok := s.failedFirstOf(b.ProducerID); ok && f.epoch == b.Epoch && f.sequence != b.BaseSequence {
		return Result{}, ErrOutOfOrderSequence
	}
	return Result{Verdict: Append}, nil
}

// failedFirstOf returns the first batch of an unknown producer whose append failed.
// Under StartAtZeroOnNewLog there is none on an empty log: every producer must start
// at 0 there, but the batch may have failed before the log was cut to nothing.
func (s *state) failedFirstOf(pid int64) (firstBatch, bool) {
	if s.cfg.UnknownProducer == StartAtZeroOnNewLog && s.endOffset == 0 {
		return firstBatch{}, false
	}
	return s.inFlight.failedFirstOf(pid)
}

// refuse counts a refusal of b and gathers its facts. p may be nil.
func (s *state) refuse(b Batch, p *producer, why error) error {
	q := s.inFlight.queueOf(b.ProducerID, p)
	if why == ErrInFlight && q != nil {
		s.stats.InFlight++
		return newInFlightError(b, q, q.obstacle(&b))
	}
	s.stats.count(why)
	e := newBatchError(b, noOffset, why)
	if why == ErrInvalidBatch {
		return e
	}
	epoch, next := expected(p, q)
	if epoch == noEpoch {
		f, _ := s.failedFirstOf(b.ProducerID)
		next = f.sequence
	}
	e.CurrentEpoch = epoch
	if errors.Is(why, ErrOutOfOrderSequence) {
		e.Expected = next
		if b.Epoch > epoch && epoch != noEpoch {
			e.Expected = 0 // a newer epoch starts at 0
		}
	}
	return e
}

// count counts a refusal.
func (s *Stats) count(why error) {
	switch why {
	case ErrInvalidBatch:
		s.Invalid++
	case ErrUnknownProducer:
		s.Unknown++
	case ErrFenced:
		s.Fenced++
	case ErrInvalidTxnState:
		s.InvalidTxn++
	case ErrConcurrentTransactions:
		s.ConcurrentTxn++
	case ErrCoordinatorFenced:
		s.CoordinatorFenced++
	default:
		s.OutOfOrder++
	}
}

// refuseOffset is refuse for a base offset that does not fit.
func (s *state) refuseOffset(b Batch, p *producer, baseOffset, lowest int64) error {
	e := s.refuse(b, p, ErrOffsetOrder).(*BatchError)
	e.BaseOffset, e.LowestOffset = baseOffset, lowest
	return e
}
