package txn

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
)

// A Log is where the records of a coordinator go.
type Log interface {
	// Append puts the record at the end of the log, in the order of the calls,
	// and returns a function that waits until the record is durable. Append must
	// not block: it is called under the coordinator's lock. The waiting function
	// is called once, without that lock, and records that wait at the same time
	// can share one sync.
	//
	// An error of the waiting function means that the record is not in the log,
	// nor will be after a restart. A log that cannot be sure of that takes no
	// further records.
	Append(record []byte) (wait func() error)
}

// Config is what a coordinator is set to. The zero value is ready to use.
type Config struct {
	// MaxTimeout is the longest time-out that a transaction may have. Zero means
	// 15 minutes.
	MaxTimeout time.Duration

	// IDExpiration is how long a transactional id is remembered that has no open
	// transaction and does not change. Zero means seven days.
	IDExpiration time.Duration

	// FirstProducerID is the lowest producer id to hand out: one more than the
	// highest that is in use and was not reserved in the log.
	FirstProducerID int64

	// InUse reports whether a partition knows a producer id, for instance
	// because a client has made it up. Such an id is passed over. InUse may be
	// nil. It must not call the coordinator.
	InUse func(producerID int64) bool
}

// idBlock is how many producer ids are reserved at a time.
const idBlock = 1000

// A Coordinator is the transaction coordinator. Create one with
// [NewCoordinator].
//
// Its methods may be called concurrently. Those that change a transactional id
// take turns for that id, and return once the change is durable; changes of
// different ids wait for the log at the same time. Methods that only read never
// wait for the log, and never see a change that is not durable.
//
// Locks, in the order in which they are taken: the lock of a transactional id is
// held while a request is judged, recorded and applied. ids is held while a
// block of producer ids is reserved. mu guards the state and the order of
// records, and is never held while the log is waited for.
type Coordinator struct {
	cfg Config
	log Log

	ids     sync.Mutex
	nextID  int64 // the next producer id
	idLimit int64 // ids from here on are not reserved

	mu    sync.Mutex
	state *state
	locks map[string]*idLock
}

// An idLock is the lock of a transactional id. It exists while it is used.
type idLock struct {
	sync.Mutex
	users int // holds it or waits for it; guarded by Coordinator.mu
}

// NewCoordinator returns a coordinator that goes on from what was recovered. It
// records the start in log, and returns once the record is durable. The log must
// be synced before, without its tail. A Recovery serves for one coordinator.
func NewCoordinator(cfg Config, r *Recovery, log Log) (*Coordinator, error) {
	cfg.MaxTimeout = cmp.Or(cfg.MaxTimeout, 15*time.Minute)
	cfg.IDExpiration = cmp.Or(cfg.IDExpiration, 7*24*time.Hour)
	c := &Coordinator{cfg: cfg, log: log, state: r.state, locks: make(map[string]*idLock)}
	c.nextID = max(c.state.reserved, cfg.FirstProducerID)
	c.idLimit = c.nextID
	if c.state.epoch == math.MaxInt32 {
		return nil, errors.New("txn: no coordinator epochs left")
	}
	if err := c.write(startRecord{c.state.epoch + 1}); err != nil {
		return nil, err
	}
	return c, nil
}

// Stop records a clean end, so that any damage done to the log until the next
// start is noticed there. The coordinator must not be used afterwards.
func (c *Coordinator) Stop() error { return c.write(stopRecord{}) }

// Epoch returns the coordinator epoch: the number of starts, this one included.
func (c *Coordinator) Epoch() int32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.epoch
}

// write records r, and applies it once it is durable.
func (c *Coordinator) write(r record) error {
	c.mu.Lock()
	c.state.number++
	number := c.state.number
	wait := c.log.Append(frame{number, c.state.durable, r}.appendTo(nil))
	c.mu.Unlock()
	if err := wait(); err != nil {
		return fmt.Errorf("%w: record not written: %w", kerr.CoordinatorNotAvailable, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.durable = max(c.state.durable, number)
	c.state.apply(number, r)
	return nil
}

// lock takes the lock of a transactional id and returns what gives it back.
func (c *Coordinator) lock(id string) (unlock func()) {
	c.mu.Lock()
	l := c.locks[id]
	if l == nil {
		l = new(idLock)
		c.locks[id] = l
	}
	l.users++
	c.mu.Unlock()
	l.Lock()
	return func() {
		l.Unlock()
		c.mu.Lock()
		defer c.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(c.locks, id)
		}
	}
}

func (c *Coordinator) transaction(id string) *transaction {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.transactions[id]
}

// change applies a rule to a transactional id. It returns what is known of the
// id afterwards, and the rule's error unless the change could not be recorded.
func (c *Coordinator) change(now time.Time, id string, rule func(*transaction) (*transaction, error)) (*transaction, error) {
	unlock := c.lock(id)
	defer unlock()
	t := c.transaction(id)
	next, refusal := rule(t)
	if next == t {
		return t, refusal
	}
	next.updated = now.UnixMilli()
	if err := c.write(next); err != nil {
		if next.fenced {
			c.rememberFence(t)
		}
		return t, err
	}
	return next, refusal
}

// rememberFence refuses the producer of t from now on, although the record of it
// could not be written. The epoch stays as it is, so that fencing it again
// raises it by 1 and no more (KAFKA-9666).
func (c *Coordinator) rememberFence(t *transaction) {
	fenced := *t
	fenced.fenced = true
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.transactions[t.id] = &fenced
}

// NewProducerID returns a producer id that was never handed out, for a producer
// without a transactional id. Its epoch is 0.
func (c *Coordinator) NewProducerID() (int64, error) {
	c.ids.Lock()
	defer c.ids.Unlock()
	for {
		if c.nextID == c.idLimit {
			if c.nextID > math.MaxInt64-idBlock {
				return 0, fmt.Errorf("%w: no producer ids left", kerr.CoordinatorNotAvailable)
			}
			if err := c.write(blockRecord{c.nextID + idBlock}); err != nil {
				return 0, err
			}
			c.idLimit += idBlock
		}
		id := c.nextID
		c.nextID++
		if c.cfg.InUse == nil || !c.cfg.InUse(id) {
			return id, nil
		}
	}
}

// InitProducerID makes the caller the producer of a transactional id.
// Expected is the producer that the caller has been so far, or [NoProducer]. The
// package comment has the rules.
//
// Errors: INVALID_REQUEST for an empty or overlong id and for an expected
// producer of which one half is missing, INVALID_TRANSACTION_TIMEOUT,
// PRODUCER_FENCED, CONCURRENT_TRANSACTIONS.
func (c *Coordinator) InitProducerID(now time.Time, transactionalID string, expected Producer, timeout time.Duration) (Producer, error) {
	if err := checkName(transactionalID); err != nil {
		return NoProducer, err
	}
	if expected != NoProducer && (expected.ID < 0 || expected.Epoch < 0) {
		return NoProducer, kerr.InvalidRequest
	}
	if timeout < time.Millisecond || timeout > c.cfg.MaxTimeout {
		return NoProducer, kerr.InvalidTransactionTimeout
	}
	t, err := c.change(now, transactionalID, func(t *transaction) (*transaction, error) {
		return initProducerID(t, transactionalID, expected, int32(timeout.Milliseconds()), c.NewProducerID)
	})
	if err != nil {
		return NoProducer, err
	}
	return t.present(), nil
}

// AddPartitionsToTxn adds partitions to the transaction of p, and begins one if
// none is open. Version is 1 for the request of that name, and 2 for a Produce
// request that adds the partition it produces to. The caller makes sure that the
// partitions exist; a marker to one that does not is never acknowledged.
//
// Errors: INVALID_REQUEST, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED,
// CONCURRENT_TRANSACTIONS.
func (c *Coordinator) AddPartitionsToTxn(now time.Time, transactionalID string, p Producer, version int8, partitions []Partition) error {
	if err := checkName(transactionalID); err != nil {
		return err
	}
	for _, partition := range partitions {
		if err := checkPartition(partition); err != nil {
			return err
		}
	}
	_, err := c.change(now, transactionalID, func(t *transaction) (*transaction, error) {
		return t.addPartitions(p, clampVersion(version), partitions, now.UnixMilli())
	})
	return err
}

// VerifyPartition refuses a transactional batch for a partition that was not
// added to the open transaction of p. It is for producers of version 1; version
// 2 adds it instead. A transaction may end between the answer and the append.
//
// Errors: as AddPartitionsToTxn, and INVALID_TXN_STATE.
func (c *Coordinator) VerifyPartition(transactionalID string, p Producer, partition Partition) error {
	t := c.transaction(transactionalID)
	return t.verify(p, t != nil && t.has([]Partition{partition}))
}

// AddOffsetsToTxn adds a consumer group to the transaction of p, and begins one
// if none is open.
//
// Errors: as AddPartitionsToTxn, and INVALID_GROUP_ID.
func (c *Coordinator) AddOffsetsToTxn(now time.Time, transactionalID string, p Producer, group string) error {
	if err := cmp.Or(checkName(transactionalID), checkGroup(group)); err != nil {
		return err
	}
	_, err := c.change(now, transactionalID, func(t *transaction) (*transaction, error) {
		return t.addGroup(p, 1, group, now.UnixMilli())
	})
	return err
}

// EndTxn ends the transaction of p. It returns once the outcome is durable;
// markers are written afterwards. With version 2 the answer holds the producer
// id and epoch for the next transaction.
//
// Errors: INVALID_REQUEST, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED,
// CONCURRENT_TRANSACTIONS, INVALID_TXN_STATE.
func (c *Coordinator) EndTxn(now time.Time, transactionalID string, p Producer, version int8, commit bool) (Producer, error) {
	if err := checkName(transactionalID); err != nil {
		return NoProducer, err
	}
	t, err := c.change(now, transactionalID, func(t *transaction) (*transaction, error) {
		return t.endTxn(p, clampVersion(version), commit, c.NewProducerID)
	})
	if err != nil {
		return NoProducer, err
	}
	return t.present(), nil
}

// Markers returns the markers that are not done, sorted by transactional id and
// partition. EndTxn, InitProducerID, Expire and a start bring new ones.
func (c *Coordinator) Markers() []Marker {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.markers()
}

// MarkerDone reports what became of a marker that Markers has returned: nil for
// one that is durable, else the partition's error. After
// INVALID_PRODUCER_EPOCH and TRANSACTION_COORDINATOR_FENCED the marker is
// dropped, after any other error it stays listed. The last marker completes the
// transaction; MarkerDone returns an error only if that cannot be recorded, and
// the next Expire tries again. Reports of markers that are not listed are
// ignored.
func (c *Coordinator) MarkerDone(now time.Time, m Marker, err error) error {
	if err != nil && !errors.Is(err, kerr.InvalidProducerEpoch) && !errors.Is(err, kerr.TransactionCoordinatorFenced) {
		return nil
	}
	_, err = c.change(now, m.TransactionalID, func(t *transaction) (*transaction, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		unmarked := c.state.unmarked[m.TransactionalID]
		if unmarked == nil || m != t.marker(m.Partition, c.state.epoch) {
			return t, nil
		}
		delete(unmarked, m.Partition)
		if len(unmarked) > 0 {
			return t, nil
		}
		return t.completed(), nil
	})
	return err
}

// Expire aborts what has timed out at now, forgets transactional ids that have
// been idle for too long, and completes transactions whose completion could not
// be recorded before. The caller calls it from time to time, and looks for
// markers afterwards. It goes on after an error, and returns all of them.
func (c *Coordinator) Expire(now time.Time) error {
	ms := now.UnixMilli()
	var failed []error
	for _, id := range c.due(ms) {
		_, err := c.change(now, id, func(t *transaction) (*transaction, error) {
			switch {
			case t == nil:
			case t.timedOut(ms):
				return t.fence(true, c.NewProducerID)
			case c.marked(t):
				return t.completed(), nil
			case t.idle(ms, c.cfg.IDExpiration):
				return t, c.write(forgottenRecord{id})
			}
			return t, nil
		})
		if err != nil {
			failed = append(failed, fmt.Errorf("transactional id %q: %w", id, err))
		}
	}
	return errors.Join(failed...)
}

// due returns the transactional ids for which Expire has something to do.
func (c *Coordinator) due(now int64) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var ids []string
	for id, t := range c.state.transactions {
		if t.timedOut(now) || t.idle(now, c.cfg.IDExpiration) || c.state.marked(t) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (c *Coordinator) marked(t *transaction) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.marked(t)
}

// A Transaction describes a transactional id.
type Transaction struct {
	TransactionalID string
	Producer        Producer // of the transaction; bears the markers
	State           State
	Timeout         time.Duration
	Start           time.Time // of the open or ending transaction, else the zero Time
	LastUpdate      time.Time
	Partitions      []Partition // of the open or ending transaction, sorted
	Groups          []string    // likewise
}

func (t *transaction) describe() Transaction {
	d := Transaction{
		TransactionalID: t.id,
		Producer:        t.producer,
		State:           t.state,
		Timeout:         time.Duration(t.timeout) * time.Millisecond,
		LastUpdate:      time.UnixMilli(t.updated),
		Partitions:      slices.Clone(t.partitions),
		Groups:          slices.Clone(t.groups),
	}
	if t.state == Ongoing || t.state.preparing() {
		d.Start = time.UnixMilli(t.start)
	}
	return d
}

// Describe describes a transactional id, and reports whether it is known.
func (c *Coordinator) Describe(transactionalID string) (Transaction, bool) {
	t := c.transaction(transactionalID)
	if t == nil {
		return Transaction{}, false
	}
	return t.describe(), true
}

// List describes all transactional ids, sorted.
func (c *Coordinator) List() []Transaction {
	c.mu.Lock()
	known := slices.Collect(maps.Values(c.state.transactions))
	c.mu.Unlock()
	return describeAll(known)
}

// describeAll describes transactional ids in their order.
func describeAll(known []*transaction) []Transaction {
	slices.SortFunc(known, func(a, b *transaction) int { return strings.Compare(a.id, b.id) })
	all := make([]Transaction, len(known))
	for i, t := range known {
		all[i] = t.describe()
	}
	return all
}

// clampVersion returns the version whose rules apply: 1 up to 1, else 2.
func clampVersion(version int8) int8 { return min(max(version, 1), 2) }

// maxName is the longest string that a record can hold.
const maxName = math.MaxInt16

func checkName(s string) error {
	if s == "" || len(s) > maxName {
		return kerr.InvalidRequest
	}
	return nil
}

func checkGroup(group string) error {
	if group == "" || len(group) > maxName {
		return kerr.InvalidGroupID
	}
	return nil
}

func checkPartition(p Partition) error {
	if p.Topic == "" || len(p.Topic) > maxName || p.Partition < 0 {
		return kerr.InvalidRequest
	}
	return nil
}
