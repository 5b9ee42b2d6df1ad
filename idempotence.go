package idempotence

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// NoProducerID is the producer id of a batch whose producer is not idempotent
// (RecordBatch.NO_PRODUCER_ID). Such a batch is always appended and never
// remembered.
const NoProducerID int64 = -1

// What stands for none of each, in a BatchError and inside.
const (
	noEpoch    int16 = -1
	noSequence int32 = -1
	noOffset   int64 = -1
)

// UnknownProducerPolicy says what is asked of the first batch of a producer of
// which nothing is remembered: it is new, or it has been forgotten. A value
// other than the three below counts as StartAtZero.
type UnknownProducerPolicy uint8

const (
	// StartAtZero, the zero value, accepts only base sequence 0 and refuses
	// anything else with ErrUnknownProducer. It is the safe choice: a producer
	// whose first batch was lost can never leave a hole. (Kafka before 2.5.)
	StartAtZero UnknownProducerPolicy = iota

	// AcceptAny accepts any first sequence, so that a producer whose state was
	// lost goes on without noticing; a batch lost before its first one is lost
	// without notice too. (Kafka 2.5 to 4.4.)
	AcceptAny

	// StartAtZeroOnNewLog accepts only base sequence 0 while the log has never
	// held a record (EndOffset is 0), and refuses anything else with
	// ErrOutOfOrderSequence, since the batch before it is probably on its way.
	// After that it accepts any first sequence. (Kafka from 4.5.)
	StartAtZeroOnNewLog
)

// String returns the policy's name in the source.
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

// Config is what a manager is made with. The zero Config is ready to use and
// follows the rules as the package comment states them.
type Config struct {
	// UnknownProducer says what is asked of the first batch of a producer of
	// which nothing is remembered. The zero value is StartAtZero.
	UnknownProducer UnknownProducerPolicy

	// Expiration is how long a producer may be idle before Expire forgets it.
	// Zero is DefaultExpiration, negative is never. It should be longer than
	// any producer goes on retrying.
	Expiration time.Duration

	// MaxProducers is the most producers that are remembered; zero or less is
	// no limit. A commit of one more makes the manager forget the least
	// recently committed one. Producers with an open transaction or a
	// reservation are never forgotten, so where there are more of those than
	// the limit, the limit is exceeded; and where a hundred of them stand
	// before the first that may be forgotten, it is exceeded by a few for as
	// long as it takes to pass them, a part with each newcomer.
	MaxProducers int

	// LogID is the identity of the log. It is kept in snapshots, and a snapshot
	// of another log is refused with ErrSnapshotLog. All zeros mean that it has
	// none: that is compared with nothing.
	LogID [16]byte
}

// Verdict is what to do with a batch that is not refused. The zero Verdict is
// neither of the two and comes only with an error.
type Verdict uint8

const (
	// Append: the batch is the next one. Append it to the log, then Commit it.
	Append Verdict = iota + 1
	// Duplicate: the batch is already in the log. Do not append it; answer the
	// producer with the offset of the first copy, as if it had just been
	// written.
	Duplicate
)

// String returns the verdict's name in the source, or "none" for the zero Verdict.
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
	// Verdict is Append or Duplicate; zero only where an error is returned.
	Verdict Verdict
	// BaseOffset is the base offset of the first copy, for Duplicate. The
	// records there may have been deleted by retention since: the offset is
	// still the right answer. It is 0 for Append, whose offset the log has yet
	// to give.
	BaseOffset int64
}

// Batch is what the header of a record batch says of its producer.
type Batch struct {
	// ProducerID is 0 or above, or NoProducerID.
	ProducerID int64
	// Epoch is the producer's epoch, in 0..32767.
	Epoch int16
	// BaseSequence is the sequence of the first record, in 0..2147483647.
	BaseSequence int32
	// Count is how many sequences the batch covers, in 1..2147483647: the
	// header's lastOffsetDelta plus one, which is not the number of records
	// left in it after compaction.
	Count int32
	// Transactional says that the batch is part of a transaction.
	Transactional bool
}

// wellFormed reports whether every field is in its range (rule 1).
func (b *Batch) wellFormed() bool {
	return b.ProducerID >= 0 && b.Epoch >= 0 && b.BaseSequence >= 0 && b.Count >= 1
}

// span returns the batch's place in the sequence space. It requires a
// well-formed batch.
func (b *Batch) span() span { return makeSpan(b.BaseSequence, b.Count) }

// ProducerStateManager remembers, for one partition, the last batches of each
// producer, and judges whether a batch is new, a retry, or neither.
//
// Make one with New for each partition: sequences count per partition, and so
// does everything else here. The loop that uses it is [ProducerStateManager.Check],
// append to the log, [ProducerStateManager.Commit]; the package comment says
// who must hold which lock meanwhile.
//
// It is safe for concurrent use. All methods share one mutex, and hold it for a
// time that does not depend on how many producers are remembered, with these
// exceptions. Truncate looks at every producer. Snapshot, and Producers when a
// walk starts, copy half a byte for each producer and 16 for each time of
// activity, and the first Expire after a restore looks at each of these times.
// What ends reservations takes its time for each of them.
//
// It must not be copied, and its zero value is not one that New has made: it takes
// producer id 0 for one that was seen, for instance.
type ProducerStateManager struct {
	mu sync.Mutex // protects state
	state
}

// state is everything that a manager knows. It has no lock: its methods are
// called with that of its manager held, or by the only one who knows it.
type state struct {
	cfg   Config
	table table
	stats Stats
	// endOffset is one past the highest offset known of. It falls only where the
	// log is cut, or the state replaced.
	endOffset int64
	// maxProducerID is the highest id ever remembered, or NoProducerID.
	maxProducerID int64
	// lastMarker is the highest offset known of something that says more of a
	// producer than its window does: a marker, or the last record of a batch
	// without sequences. It is noOffset where there was none.
	lastMarker int64
	// restoredLogEnd is the log end offset of the restored snapshot, or 0.
	// Batches up to it may be remembered. Until replay reaches it, the state is
	// incomplete.
	restoredLogEnd int64
	// forgotAt is the end offset when a producer was last forgotten, or 0.
	lastForgetEnd int64
	// inexact is set once what is remembered may differ from what a rebuild
	// would give, but for producers forgotten; see Truncate.
	inexact bool
	recency recency
	// truncations counts how often the log was cut. A Snapshot compares it to
	// know whether the log was cut since. It is an allocation of its own, so
	// that a Snapshot does not keep the manager alive.
	truncations *atomic.Uint64
	// inFlight is what has been reserved, or nil where nothing ever was.
	inFlight *inFlightSet
}

// New returns a manager for one partition of which nothing is known yet: no
// producers, end offset 0. It copies cfg. A manager that stays empty takes
// less than 512 bytes.
func New(cfg Config) *ProducerStateManager {
	return &ProducerStateManager{state: newState(cfg)}
}

func newState(cfg Config) state {
	return state{
		cfg:           cfg,
		table:         newTable(),
		maxProducerID: NoProducerID,
		lastMarker:    noOffset,
		recency:       recency{now: instant{ms: longAgo}},
		truncations:   new(atomic.Uint64),
	}
}

// Check judges a batch and changes nothing: [ProducerStateManager.CheckBatch]
// for a batch that is not transactional.
func (m *ProducerStateManager) Check(pid int64, epoch int16, baseSeq, count int32) (Result, error) {
	return m.CheckBatch(Batch{ProducerID: pid, Epoch: epoch, BaseSequence: baseSeq, Count: count})
}

// Commit records a batch that has been appended:
// [ProducerStateManager.CommitBatch] for a batch that is not transactional.
func (m *ProducerStateManager) Commit(pid int64, epoch int16, baseSeq, count int32, baseOffset int64) error {
	return m.CommitBatch(Batch{ProducerID: pid, Epoch: epoch, BaseSequence: baseSeq, Count: count}, baseOffset)
}

// CheckBatch judges a batch against what is remembered of its producer and
// answers Append, Duplicate with the offset of the first copy, or a
// [*BatchError] around ErrInvalidBatch, ErrUnknownProducer,
// ErrOutOfOrderSequence or ErrFenced. Where two refusals apply, the one named
// first in the rules of the package comment wins. Where batches of the producer
// are reserved, it is judged as [ProducerStateManager.Reserve] would judge it,
// and may get an [*InFlightError].
//
// It changes nothing but the counts of Stats, so a batch that is checked and
// then not appended leaves no trace. It does not allocate unless it refuses.
// Safe for concurrent use; the answer holds until the next Commit for the
// producer, so hold the partition's append lock until your own.
//
// The rules are those of KIP-98 as kept by Kafka's ProducerAppendInfo and
// ProducerStateEntry.
func (m *ProducerStateManager) CheckBatch(b Batch) (Result, error) {
	m.mu.Lock()
	if p := m.table.find(b.ProducerID); p != nil && p.queue == 0 && p.epoch == b.Epoch && b.Count > 0 {
		if p.window.follows(b.BaseSequence) {
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
func (m *state) check(b *Batch) (Result, error) {
	res, p, err := m.judge(b)
	if err != nil {
		return res, m.refuse(*b, p, err)
	}
	if res.Verdict == Duplicate {
		m.stats.Duplicate++
	}
	return res, nil
}

// CommitBatch records that a batch has been appended to the log with its first
// record at baseOffset. From then on it is recognised as a duplicate, and its
// successor is in order. A newer epoch is adopted here, and the batches of the
// older one are forgotten.
//
// The batch is judged once more, since the state may have moved after the
// CheckBatch. What CheckBatch would refuse now is refused with the same error.
// ErrDuplicateSequence says that it is remembered already, ErrInFlight that
// something of the producer is reserved, which this batch would overtake, and
// ErrOffsetOrder that baseOffset is negative, is at or below the newest one
// remembered of the producer, or leaves no room for the batch below the largest
// int64. A refusal changes nothing but the counts of Stats.
//
// A batch without a producer id only moves the end offset. Its other fields
// are not judged.
//
// It does not allocate unless it refuses or the producer is new. Safe for
// concurrent use; hold the partition's append lock from CheckBatch until it
// returns.
func (m *ProducerStateManager) CommitBatch(b Batch, baseOffset int64) error {
	m.mu.Lock()
	if p := m.table.lastOwned(); p != nil && p.continuedBy(&b) && m.isPlain(&b, p) && m.offsetRises(&b, baseOffset) {
		m.endOffset = baseOffset + int64(b.Count)
		m.stats.Accepted++
		p.window.push(b.span(), baseOffset)
		m.mu.Unlock()
		return nil
	}
	err := m.commit(&b, baseOffset)
	m.mu.Unlock()
	return err
}

// isPlain reports whether a batch of p, the producer found last, changes
// nothing but its window.
func (m *state) isPlain(b *Batch, p *producer) bool {
	return !b.Transactional && m.isNewest(p, m.table.lastRow)
}

// offsetRises reports whether baseOffset is above every offset remembered.
func (m *state) offsetRises(b *Batch, baseOffset int64) bool {
	return baseOffset >= m.endOffset && baseOffset >= m.restoredLogEnd && roomAt(baseOffset, b.Count)
}

// commit is CommitBatch in general.
func (m *state) commit(b *Batch, baseOffset int64) error {
	res, p, err := m.judge(b)
	switch {
	case err != nil:
		return m.refuseCommit(b, p, err, baseOffset, noOffset)
	case res.Verdict == Duplicate:
		return m.refuseCommit(b, p, ErrDuplicateSequence, baseOffset, res.BaseOffset)
	case m.isInFlight(b.ProducerID, p):
		return m.refuse(*b, p, ErrInFlight)
	case !offsetInOrder(b, p, baseOffset):
		return m.refuseCommit(b, p, ErrOffsetOrder, baseOffset, newestOffset(p))
	}
	m.stats.Accepted++
	m.advance(baseOffset + int64(max(b.Count, 0)))
	if b.ProducerID != NoProducerID {
		m.active(b.ProducerID, b.Epoch).record(b, baseOffset)
	}
	return nil
}

// active returns a producer for writing, as the most recently active one, and
// makes one with the given epoch where it is unknown.
func (m *state) active(pid int64, epoch int16) *producer {
	if m.table.find(pid) == nil {
		return m.addProducer(pid, epoch)
	}
	p := m.table.edit(pid)
	m.touch(p, m.table.lastRow)
	return p
}

// welcome makes a producer that is unknown.
func (m *state) addProducer(pid int64, epoch int16) *producer {
	m.evict()
	m.maxProducerID = max(m.maxProducerID, pid)
	if m.inFlight != nil {
		m.inFlight.failedFirst.drop(pid)
	}
	p := m.table.insert(pid)
	p.epoch, p.txnFirst, p.coordinatorEpoch = epoch, noTxn, noCoordinator
	m.pushActive(p, m.table.lastRow)
	return p
}

// judge applies rules 0 to 7. Beside the answer it returns the producer, or nil
// where it is unknown or the batch names none.
func (m *state) judge(b *Batch) (Result, *producer, error) {
	if b.ProducerID == NoProducerID {
		return Result{Verdict: Append}, nil, nil
	}
	if !b.wellFormed() {
		return Result{}, nil, ErrInvalidBatch
	}
	p := m.table.find(b.ProducerID)
	l := m.inFlightOf(b.ProducerID, p)
	if p == nil && l == nil {
		res, err := m.judgeUnknown(b)
		return res, nil, err
	}
	res, err := judgeKnown(b, p, l)
	return res, p, err
}

// judgeKnown applies rules 3 to 7 to a well-formed batch of p, of which l is in
// flight. Either may be nil, but not both. What is in flight counts as
// committed, except that a batch whose answer depends on whether it will be has
// to wait.
func judgeKnown(b *Batch, p *producer, l *queue) (Result, error) {
	epoch, next := tail(p, l)
	switch {
	case b.Epoch < epoch:
		return Result{}, ErrFenced
	case b.Epoch > epoch && b.BaseSequence != 0:
		return Result{}, ErrOutOfOrderSequence
	case b.Epoch > epoch && l != nil:
		return Result{}, ErrInFlight
	case b.Epoch > epoch:
		return Result{Verdict: Append}, nil
	}
	if p != nil && p.epoch == epoch {
		if first := p.window.find(b.span()); first != nil {
			return Result{Duplicate, first.baseOffset}, nil
		}
	}
	switch {
	case l != nil && l.copyOf(b.span()) != nil:
		return Result{}, ErrInFlight
	case b.BaseSequence != next:
		return Result{}, ErrOutOfOrderSequence
	case l != nil && l.count == WindowSize:
		return Result{}, ErrInFlight
	}
	return Result{Verdict: Append}, nil
}

// tail returns the epoch of a producer and the sequence that comes next, what is
// in flight included.
func tail(p *producer, l *queue) (epoch int16, next int32) {
	if l != nil {
		return l.epoch, l.next
	}
	return p.epoch, p.window.next
}

// inFlightOf returns what is in flight of a producer, or nil.
func (m *state) inFlightOf(pid int64, p *producer) *queue {
	if n, ok := m.queueOf(pid, p); ok {
		return &m.inFlight.queues[n]
	}
	return nil
}

// judgeUnknown applies rule 2, the policy for a producer of which nothing is
// remembered.
func (m *state) judgeUnknown(b *Batch) (Result, error) {
	switch policy := m.cfg.UnknownProducer; {
	case b.BaseSequence == 0 || policy == AcceptAny:
	case policy != StartAtZeroOnNewLog:
		return Result{}, ErrUnknownProducer
	case m.endOffset == 0:
		return Result{}, ErrOutOfOrderSequence
	}
	if f, ok := m.failedFirstOf(b.ProducerID); ok && f.epoch == b.Epoch && f.sequence != b.BaseSequence {
		return Result{}, ErrOutOfOrderSequence
	}
	return Result{Verdict: Append}, nil
}

// owedBy returns the first batch of an unknown producer whose append failed. On
// a new log where everybody must start at 0, that is all there is to ask: what
// is owed from before the log was cut to nothing could never be paid. Requires
// mu held.
func (m *state) failedFirstOf(pid int64) (firstBatch, bool) {
	if m.inFlight == nil || m.cfg.UnknownProducer == StartAtZeroOnNewLog && m.endOffset == 0 {
		return firstBatch{}, false
	}
	return m.inFlight.failedFirst.get(pid)
}

func newestOffset(p *producer) int64 {
	if p == nil {
		return noOffset
	}
	return p.newestOffset()
}

// offsetInOrder reports whether the log could have given baseOffset to a batch
// of p, which is nil where the producer is unknown.
func offsetInOrder(b *Batch, p *producer, baseOffset int64) bool {
	return baseOffset > newestOffset(p) && roomAt(baseOffset, b.Count)
}

// roomAt reports whether a batch can stand in a log at baseOffset.
func roomAt(baseOffset int64, count int32) bool {
	return baseOffset >= 0 && baseOffset <= math.MaxInt64-int64(max(count, 0))
}

func (m *state) advance(endOffset int64) {
	m.endOffset = max(m.endOffset, endOffset)
}

// isInFlight reports whether something of a producer is in flight. Requires mu
// held.
func (m *state) isInFlight(pid int64, p *producer) bool {
	_, ok := m.queueOf(pid, p)
	return ok
}

// refuse counts a refusal and gathers the facts of it.
func (m *state) refuse(b Batch, p *producer, why error) error {
	if n, ok := m.queueOf(b.ProducerID, p); ok && why == ErrInFlight {
		return m.refuseInFlight(b, &m.inFlight.queues[n])
	}
	m.stats.count(why)
	e := newBatchError(b, noOffset, why)
	if why == ErrInvalidBatch {
		return e
	}
	epoch, next := m.position(b.ProducerID, p)
	e.CurrentEpoch = epoch
	if errors.Is(why, ErrOutOfOrderSequence) {
		if e.Expected = 0; b.Epoch == epoch || epoch == noEpoch {
			e.Expected = next
		}
	}
	return e
}

// position returns the epoch and the next sequence of a producer, what is in
// flight included. Where it is unknown, the epoch is noEpoch.
func (m *state) position(pid int64, p *producer) (epoch int16, next int32) {
	if n, ok := m.queueOf(pid, p); ok {
		l := &m.inFlight.queues[n]
		return l.epoch, l.next
	}
	if p != nil {
		return p.epoch, p.window.next
	}
	f, _ := m.failedFirstOf(pid)
	return noEpoch, f.sequence
}

// refuseCommit is refuse with the offsets that only a Commit knows of.
func (m *state) refuseCommit(b *Batch, p *producer, why error, base, first int64) error {
	err := m.refuse(*b, p, why)
	if e, ok := err.(*BatchError); ok {
		e.BaseOffset, e.FirstOffset = base, first
	}
	return err
}

// Advance tells the manager that the log ends at endOffset, one past its last
// record: for appends that carried no producer id and were not committed. An
// endOffset at or below the one known is ignored. Safe for concurrent use.
func (m *ProducerStateManager) Advance(endOffset int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.advance(endOffset)
}

// EndOffset returns one past the highest offset the manager knows of, from what
// was committed, replayed or restored and from Advance; 0 for a new one. Only
// Truncate, Reset and a restore lower it. Safe for concurrent use.
func (m *ProducerStateManager) EndOffset() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.endOffset
}
