package idempotence

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// NoProducerID is the producer id of a batch whose producer is not idempotent
// (RecordBatch.NO_PRODUCER_ID). Such a batch is always appended and never
// remembered.
const NoProducerID int64 = -1

// Values that mean none.
const (
	noEpoch       int16 = -1
	noSequence    int32 = -1
	noOffset      int64 = -1
	noTxn         int64 = -1 // a first offset
	noCoordinator int32 = -1 // a coordinator epoch
)

// UnknownProducerPolicy decides which first sequence an unknown producer may use.
// A producer is unknown if it is new or has been forgotten; the two look alike.
// A value other than the three below counts as StartAtZero.
//
// The section "Unknown producers" of the package comment helps to choose.
type UnknownProducerPolicy uint8

const (
	// StartAtZero, the zero value, accepts only base sequence 0 and refuses
	// anything else with ErrUnknownProducer. A lost first batch is noticed.
	// KafkaJS and @platformatic/kafka 1.x do not recover from the refusal of a
	// forgotten producer. (Kafka before 2.5.)
	StartAtZero UnknownProducerPolicy = iota

	// AcceptAny accepts any first sequence. Every client goes on after its state
	// was lost; a batch lost before its first one is not noticed. (Kafka 2.5 to
	// 4.4.)
	AcceptAny

	// StartAtZeroOnNewLog accepts only base sequence 0 while the log has never
	// held a record (EndOffset is 0), and refuses anything else with
	// ErrOutOfOrderSequence, since the batch before it is probably on its way.
	// After that it accepts any first sequence. (Kafka from 4.5.)
	StartAtZeroOnNewLog
)

// String returns the name of the policy's constant.
func (p UnknownProducerPolicy) String() string {
	switch p {
	case AcceptAny:
		return "AcceptAny"
	case StartAtZeroOnNewLog:
		return "StartAtZeroOnNewLog"
	}
	return "StartAtZero"
}

// MarshalText returns the name of the policy, as String does.
func (p UnknownProducerPolicy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText accepts the name of a policy. Any other text is an error, and
// leaves p as it was.
func (p *UnknownProducerPolicy) UnmarshalText(text []byte) error {
	for _, policy := range []UnknownProducerPolicy{StartAtZero, AcceptAny, StartAtZeroOnNewLog} {
		if string(text) == policy.String() {
			*p = policy
			return nil
		}
	}
	return fmt.Errorf("idempotence: unknown producer policy %q, want StartAtZero, AcceptAny or StartAtZeroOnNewLog", text)
}

// Config configures a manager. The zero Config is ready to use.
type Config struct {
	// UnknownProducer is the policy for producers that are new or forgotten. The
	// zero value is StartAtZero.
	UnknownProducer UnknownProducerPolicy

	// Contiguous means that the offsets of the log have no gaps and that the
	// manager is told of every append, including markers and batches without a
	// producer id. Each append must then begin at EndOffset. Any other offset is
	// ErrOffsetOrder, so most mistakes of an embedder are an error at the first
	// batch. See "Mistakes that are caught" in the package comment. A compacted log
	// has gaps.
	Contiguous bool

	// Expiration is how long a producer may be idle before Expire forgets it.
	// Zero means DefaultExpiration, negative means never. It should be longer
	// than any producer retries.
	Expiration time.Duration

	// MaxProducers is the largest number of producers remembered; zero or less
	// means no limit. The commit of another producer then forgets the least
	// recently committed one. A producer with an open transaction or a reservation
	// is never forgotten, so such producers can exceed the limit. A restore evicts
	// nothing.
	MaxProducers int

	// LogID is the identity of the log. Snapshots keep it, and a snapshot of
	// another log is refused with ErrSnapshotLog. All zeros mean that the log has
	// none, and nothing is compared.
	LogID [16]byte
}

// ProducerStateManager remembers the last batches of each producer of one
// partition, and judges whether a batch is new, a retry, or neither.
//
// Create one with New for each partition; the zero value is not ready to use. Do
// not copy it. The package comment describes the loop around it:
// [ProducerStateManager.Check], append to the log, [ProducerStateManager.Commit].
//
// It is safe for concurrent use. All methods share one mutex. They hold it for a
// time that does not depend on the number of producers, with these exceptions:
// Truncate looks at every producer; Snapshot and Producers copy half a byte for
// each producer; AbandonReservations, Reset, Truncate and the restores take time
// linear in the open reservations.
type ProducerStateManager struct {
	mu sync.Mutex // protects state
	state
}

// state is everything that a manager knows. It has no lock. Its methods are called
// with the manager's mutex held, or on a state that no other goroutine has yet.
//
// Invariants (audited in the tests):
//  1. Nothing remembered lies at or past knownEnd.
//  2. maxProducerID is at least every producer id remembered.
type state struct {
	roster
	logEnd
	exactness
	cfg   Config
	stats Stats
	// maxProducerID is the highest producer id ever remembered, or NoProducerID.
	maxProducerID int64
	// truncations counts how often the log was cut or deleted. A snapshot keeps the
	// count, and is stale if it has risen since. It is an allocation of its own, so
	// that a snapshot does not keep the manager alive.
	truncations *atomic.Uint64
	inFlight    *inFlightSet  // nil until the first reservation
	txns        *transactions // nil until there is something to know
}

// New returns a manager for a partition with no producers and end offset 0. It
// copies cfg. An empty manager takes less than 512 bytes of heap.
func New(cfg Config) *ProducerStateManager {
	return &ProducerStateManager{state: newState(cfg)}
}

func newState(cfg Config) state {
	return state{
		roster:        roster{table: newTable(), recency: recency{now: instant{ms: longAgo}, capped: cfg.MaxProducers > 0}},
		logEnd:        logEnd{contiguous: cfg.Contiguous},
		cfg:           cfg,
		maxProducerID: NoProducerID,
		exactness:     exactness{lastMarker: noOffset},
		truncations:   new(atomic.Uint64),
	}
}

// config returns the configuration, for a restore, which does not hold the lock while
// it reads. It never changes, but another restore writes it again.
func (m *ProducerStateManager) config() Config {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cfg
}

// Check is [ProducerStateManager.CheckBatch] for a batch that is not
// transactional.
func (m *ProducerStateManager) Check(pid int64, epoch int16, baseSeq, count int32) (Result, error) {
	return m.CheckBatch(Batch{ProducerID: pid, Epoch: epoch, BaseSequence: baseSeq, Count: count})
}

// Commit is [ProducerStateManager.CommitBatch] for a batch that is not
// transactional.
func (m *ProducerStateManager) Commit(pid int64, epoch int16, baseSeq, count int32, baseOffset int64) error {
	return m.CommitBatch(Batch{ProducerID: pid, Epoch: epoch, BaseSequence: baseSeq, Count: count}, baseOffset)
}

// CheckBatch judges a batch against what is remembered of its producer. It returns
// Append, Duplicate with the offset of the first copy, or a [*BatchError] around
// ErrInvalidBatch, ErrUnknownProducer, ErrFenced, ErrOutOfOrderSequence,
// ErrInvalidTxnState or ErrConcurrentTransactions. If two refusals apply, the one
// that comes first in the rules of the package comment wins. Reserved batches of the
// producer count as they do for [ProducerStateManager.Reserve], so the error may be
// an [*InFlightError].
//
// It changes nothing but the counters of Stats. It does not allocate unless it
// refuses. Safe for concurrent use; the answer holds until the next Commit for the
// producer, so hold the partition's append lock until your own.
//
// The rules are those of KIP-98 as kept by Kafka's ProducerAppendInfo and
// ProducerStateEntry.
func (m *ProducerStateManager) CheckBatch(b Batch) (Result, error) {
	m.mu.Lock()
	if p := m.table.find(b.ProducerID); p != nil && p.queue == 0 && p.epoch == b.Epoch && b.Count > 0 {
		if p.window.follows(b.BaseSequence) && (b.Transactional || !p.pinned) {
			m.mu.Unlock()
			return Result{Verdict: Append}, nil
		}
		if first := p.window.find(b.span()); first != nil {
			m.stats.Duplicate++
			base := first.baseOffset
			m.mu.Unlock()
			return Result{Duplicate, base}, nil
		}
	}
	res, err := m.check(&b)
	m.mu.Unlock()
	return res, err
}

// check is CheckBatch in general.
func (s *state) check(b *Batch) (Result, error) {
	res, p, err := s.judge(b)
	if err != nil {
		return Result{}, s.refuse(*b, p, err)
	}
	if res.Verdict == Duplicate {
		s.stats.Duplicate++
	}
	return res, nil
}

// CommitBatch records that a batch has been appended to the log with its first
// record at baseOffset. From then on its retries are duplicates and its successor
// is in order. A newer epoch is adopted, and the batches of the older one are
// forgotten. A transactional batch opens a transaction if none is open.
//
// The batch is judged again, since the state may have moved since CheckBatch.
// CommitBatch refuses what CheckBatch would refuse now, with the same error. It also
// returns
//
//   - ErrDuplicateSequence if the batch is remembered already;
//   - ErrInFlight if something of the producer is reserved, which this batch would
//     overtake;
//   - ErrOffsetOrder if baseOffset is negative, lies below the end of the newest
//     batch remembered of the producer, or leaves no room for the batch below the
//     largest int64; with Config.Contiguous, if it is not EndOffset; and if the batch
//     would open a transaction below a high watermark given to LastStableOffset.
//
// A refusal changes nothing but the counters of Stats.
//
// For a batch without a producer id only the end offset moves, and only baseOffset
// is judged.
//
// It does not allocate unless it refuses or the producer is new. Safe for
// concurrent use; hold the partition's append lock from CheckBatch until it
// returns.
func (m *ProducerStateManager) CommitBatch(b Batch, baseOffset int64) error {
	m.mu.Lock()
	// The common case, in place: a call would cost a tenth of a commit.
	if p, row := m.table.lastOwned(); p != nil && p.continuedBy(&b) && m.isFresh(p, row) && m.isNext(baseOffset, int64(b.Count)) {
		m.accept(baseOffset, b.Count)
		p.window.push(b.span(), baseOffset)
		m.mu.Unlock()
		return nil
	}
	res, err := m.apply(&b, baseOffset)
	if res.Verdict == Duplicate {
		p := m.table.find(b.ProducerID)
		e := m.refuse(b, p, ErrDuplicateSequence).(*BatchError)
		e.BaseOffset, e.FirstCopy = baseOffset, res.BaseOffset
		err = e
	}
	m.mu.Unlock()
	return err
}

// Apply judges a batch and, on Append, records it at baseOffset, in one step. It is
// for a replicated state machine, which decides when a command is applied. Append to
// the log after it, and stop if that fails. On Duplicate and on an error only the
// counters of Stats change. On Duplicate baseOffset is ignored.
//
// It returns what CheckBatch returns, ErrOffsetOrder as CommitBatch does, and
// ErrInFlight if something of the producer is reserved. Safe for concurrent use.
// See "In a replicated state machine" in the package comment.
func (m *ProducerStateManager) Apply(b Batch, baseOffset int64) (Result, error) {
	m.mu.Lock()
	// The common case, in place: a call would cost a tenth of a commit.
	if p, row := m.table.lastOwned(); p != nil && p.continuedBy(&b) && m.isFresh(p, row) && m.isNext(baseOffset, int64(b.Count)) {
		m.accept(baseOffset, b.Count)
		p.window.push(b.span(), baseOffset)
		m.mu.Unlock()
		return Result{Verdict: Append}, nil
	}
	res, err := m.apply(&b, baseOffset)
	if res.Verdict == Duplicate {
		m.stats.Duplicate++
	}
	m.mu.Unlock()
	return res, err
}

// accept counts a batch for which isNext holds, and moves the end offset.
func (s *state) accept(baseOffset int64, count int32) {
	s.stats.Accepted++
	s.endOffset = baseOffset + int64(count)
}

// apply is Apply in general. It counts every answer but Duplicate.
func (s *state) apply(b *Batch, baseOffset int64) (Result, error) {
	res, p, err := s.judge(b)
	switch {
	case err != nil:
		err = s.refuse(*b, p, err)
		if e, ok := err.(*BatchError); ok {
			e.BaseOffset = baseOffset
		}
		return Result{}, err
	case res.Verdict == Duplicate:
		return res, nil
	case s.inFlight.queueOf(b.ProducerID, p) != nil:
		return Result{}, s.refuse(*b, p, ErrInFlight)
	case !s.fits(p.newestEnd(), baseOffset, b.offsets(), s.inFlight.offsets()) || baseOffset < s.txns.opensFrom(b, p):
		return Result{}, s.refuseOffset(*b, p, baseOffset, max(s.lowestNext(p.newestEnd()), s.txns.opensFrom(b, p)))
	}
	s.stats.Accepted++
	s.advance(baseOffset + b.offsets())
	if b.ProducerID != NoProducerID {
		s.record(b, baseOffset)
	}
	return res, nil
}

// record makes a batch the newest of its producer, and the producer the most
// recently active one.
func (s *state) record(b *Batch, baseOffset int64) {
	p, row := s.edit(b.ProducerID, b.Epoch)
	p.record(b, baseOffset)
	if b.Transactional {
		s.openTxn(p, baseOffset)
	}
	s.touch(p, row)
}

// edit returns a producer for writing, and adds it with the given epoch if it is
// unknown.
func (s *state) edit(pid int64, epoch int16) (*producer, uint32) {
	if p := s.table.find(pid); p == nil {
		return s.addProducer(pid, epoch)
	}
	return s.table.edit(pid)
}

// addProducer adds a producer that is unknown.
func (s *state) addProducer(pid int64, epoch int16) (*producer, uint32) {
	s.evict()
	s.maxProducerID = max(s.maxProducerID, pid)
	s.inFlight.dropFailedFirst(pid)
	p, row := s.table.insert(pid)
	p.epoch, p.txnFirst, p.coordinatorEpoch = epoch, noTxn, noCoordinator
	s.pushActive(p, row)
	return p, row
}
