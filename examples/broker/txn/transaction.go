package txn

// This file is the rules for one transactional id. They are functions from what
// is known of it to what is known next, without locks and without a log.

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
)

// lastClientEpoch is the last epoch that a client gets. The one above it is only
// used to fence.
const lastClientEpoch = math.MaxInt16 - 1

// A Producer is a producer id and an epoch.
type Producer struct {
	ID    int64
	Epoch int16
}

// NoProducer stands for no producer id and no epoch, as it does in requests.
var NoProducer = Producer{ID: -1, Epoch: -1}

// A Partition names a partition of a topic.
type Partition struct {
	Topic     string
	Partition int32
}

func comparePartitions(a, b Partition) int {
	return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
}

// A State is where a transactional id stands. The values are those that Kafka
// uses in its own log.
type State int8

const (
	Empty          State = iota // a producer holds the transactional id and has begun nothing
	Ongoing                     // a transaction is open
	PrepareCommit               // decided: commit. Markers are being written
	PrepareAbort                // decided: abort. Markers are being written
	CompleteCommit              // committed, no markers are left to write
	CompleteAbort               // aborted, no markers are left to write
)

var stateNames = [...]string{"Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"}

// String returns the name that Kafka's ListTransactions and
// DescribeTransactions use.
func (s State) String() string {
	if s < 0 || int(s) >= len(stateNames) {
		return fmt.Sprintf("State(%d)", int8(s))
	}
	return stateNames[s]
}

// IsState reports whether name is the name of a State.
func IsState(name string) bool { return slices.Contains(stateNames[:], name) }

func (s State) preparing() bool { return s == PrepareCommit || s == PrepareAbort }

func (s State) complete() bool { return s == CompleteCommit || s == CompleteAbort }

// ended reports whether s is that of a transaction which ended that way.
func (s State) ended(commit bool) bool {
	if commit {
		return s == PrepareCommit || s == CompleteCommit
	}
	return s == PrepareAbort || s == CompleteAbort
}

// A transaction is what is known of a transactional id. It is immutable: rules
// return a changed copy, or the same pointer where nothing changes.
//
// Invariants:
//
//	previousID >= 0    implies  lastEpoch >= 0
//	nextID >= 0        implies  the state is Prepare*, epoch 32767, version 2
//	partitions         are empty in Empty and Complete*, and not in Prepare*
//	groups             are empty in Empty and Complete*
//	offsets            are staged in Ongoing, applied by the record of
//	                   PrepareCommit or CompleteCommit, and empty otherwise
//
// Partitions, groups and offsets are sorted and hold nothing twice.
type transaction struct {
	id         string   // the transactional id
	producer   Producer // bears the markers
	lastEpoch  int16    // of last, or -1
	previousID int64    // of last where the producer id was rotated, or -1
	nextID     int64    // takes over when the transaction is complete, or -1
	timeout    int32    // milliseconds
	state      State
	version    int8  // of the newest transaction: 1, 2, or 0 before the first
	start      int64 // of the newest transaction, in milliseconds
	updated    int64 // when the record was written, in milliseconds

	partitions []Partition
	groups     []string
	offsets    []stagedOffset

	// fenced is not in the log. It is set on a transition that fences, and in
	// Ongoing where that transition could not be recorded: the producer is
	// refused nevertheless.
	fenced bool
}

// A stagedOffset is an offset that a group commits when the transaction does.
type stagedOffset struct {
	group string
	Offset
}

func compareStaged(a, b stagedOffset) int {
	return cmp.Or(strings.Compare(a.group, b.group), comparePartitions(a.Partition, b.Partition))
}

// present returns what the client that holds the transactional id was told.
func (t *transaction) present() Producer {
	if t.nextID >= 0 {
		return Producer{ID: t.nextID}
	}
	return t.producer
}

// last returns what the client was told before that, if it may have missed the
// answer since, and [NoProducer] otherwise.
func (t *transaction) last() Producer {
	switch {
	case t.lastEpoch < 0:
		return NoProducer
	case t.previousID >= 0:
		return Producer{t.previousID, t.lastEpoch}
	}
	return Producer{t.producer.ID, t.lastEpoch}
}

// An idSource returns a producer id that was never handed out.
type idSource func() (int64, error)

// initProducerID applies an InitProducerId request for the transactional id to
// t, which is nil if that is unknown. What it returns besides the error is to be
// recorded if it is not t, even if the error is not nil.
func initProducerID(t *transaction, id string, expected Producer, timeout int32, newID idSource) (*transaction, error) {
	named := expected != NoProducer
	if t == nil {
		if named {
			return t, kerr.ProducerFenced
		}
		pid, err := newID()
		if err != nil {
			return t, err
		}
		return &transaction{
			id: id, producer: Producer{ID: pid}, lastEpoch: -1, previousID: -1, nextID: -1, timeout: timeout,
		}, nil
	}
	retry := named && expected == t.last()
	switch {
	case named && !retry && expected != t.present():
		return t, kerr.ProducerFenced
	case t.state.preparing():
		return t, kerr.ConcurrentTransactions
	case t.state == Ongoing:
		next, err := t.fence(named, newID)
		return next, cmp.Or(err, error(kerr.ConcurrentTransactions))
	case retry && t.producer.Epoch < math.MaxInt16:
		return t, nil
	}
	next := *t
	next.state, next.timeout = Empty, timeout
	next.lastEpoch, next.previousID = expected.Epoch, -1
	if t.producer.Epoch < lastClientEpoch {
		next.producer.Epoch++
		return &next, nil
	}
	pid, err := newID()
	if err != nil {
		return t, err
	}
	if named {
		next.previousID = t.producer.ID
	}
	next.producer = Producer{ID: pid}
	return &next, nil
}

// checkHolder refuses a request of a producer other than the present one. t may
// be nil.
func (t *transaction) checkHolder(p Producer) error {
	switch {
	case t == nil || p.ID != t.present().ID:
		return kerr.InvalidProducerIDMapping
	case p.Epoch != t.present().Epoch || t.fenced:
		return kerr.ProducerFenced
	}
	return nil
}

// open returns a copy of t in which a transaction of that version is open, for
// the caller to add to.
func (t *transaction) open(p Producer, version int8, now int64) (*transaction, error) {
	if err := t.checkHolder(p); err != nil {
		return nil, err
	}
	if t.state.preparing() {
		return nil, kerr.ConcurrentTransactions
	}
	next := *t
	if t.state != Ongoing {
		next.state, next.start = Ongoing, now
		next.lastEpoch, next.previousID = -1, -1
	}
	next.version = version
	return &next, nil
}

// addPartitions adds partitions to the transaction, and opens one if none is.
func (t *transaction) addPartitions(p Producer, version int8, partitions []Partition, now int64) (*transaction, error) {
	next, err := t.open(p, version, now)
	if err != nil || len(partitions) == 0 || t.state == next.state && t.version == version && t.has(partitions) {
		return t, err
	}
	next.partitions = merge(t.partitions, partitions, comparePartitions)
	return next, nil
}

// has reports whether all of the partitions take part in the transaction.
func (t *transaction) has(partitions []Partition) bool {
	for _, p := range partitions {
		if _, found := slices.BinarySearchFunc(t.partitions, p, comparePartitions); !found {
			return false
		}
	}
	return true
}

// addGroup adds a group to the transaction, and opens one if none is.
func (t *transaction) addGroup(p Producer, version int8, group string, now int64) (*transaction, error) {
	next, err := t.open(p, version, now)
	if err != nil || t.state == next.state && t.version == version && slices.Contains(t.groups, group) {
		return t, err
	}
	next.groups = merge(t.groups, []string{group}, strings.Compare)
	return next, nil
}

// stage stages offsets of a group. With version 2 it adds the group first.
func (t *transaction) stage(p Producer, version int8, group string, offsets []Offset, now int64) (*transaction, error) {
	added := t
	var err error
	if version >= 2 {
		added, err = t.addGroup(p, version, group, now)
	} else {
		err = t.verify(p, t != nil && slices.Contains(t.groups, group))
	}
	if err != nil {
		return t, err
	}
	more := make([]stagedOffset, len(offsets))
	for i, o := range offsets {
		more[i] = stagedOffset{group, o}
	}
	staged := merge(added.offsets, more, compareStaged)
	if slices.Equal(staged, added.offsets) {
		return added, nil
	}
	next := *added
	next.offsets = staged
	return &next, nil
}

// verify refuses a request of p that is about something not added to the
// transaction.
func (t *transaction) verify(p Producer, added bool) error {
	if err := t.checkHolder(p); err != nil {
		return err
	}
	switch {
	case t.state.preparing():
		return kerr.ConcurrentTransactions
	case !added:
		return kerr.InvalidTxnState
	}
	return nil
}

// merge returns the sorted elements of both, and of equal ones the last.
func merge[E any](sorted, more []E, compare func(E, E) int) []E {
	all := slices.Concat(sorted, more)
	slices.SortStableFunc(all, compare)
	n := 0
	for i := range all {
		if i+1 == len(all) || compare(all[i], all[i+1]) != 0 {
			all[n] = all[i]
			n++
		}
	}
	return all[:n]
}

// endTxn applies an EndTxn request.
func (t *transaction) endTxn(p Producer, version int8, commit bool, newID idSource) (*transaction, error) {
	if version >= 2 && t.endAnswered(p) {
		if !t.state.ended(commit) {
			return t, kerr.InvalidTxnState
		}
		return t, nil
	}
	if err := t.checkHolder(p); err != nil {
		return t, err
	}
	switch {
	case t.state == Ongoing:
		return t.end(commit, version, newID)
	case version < 2 && t.state.ended(commit):
		return t, nil
	case version >= 2 && t.state.preparing():
		return t, kerr.ConcurrentTransactions
	case version >= 2 && !commit:
		return t.end(commit, version, newID)
	}
	return t, kerr.InvalidTxnState
}

// endAnswered reports whether p is what the producer was told before the
// transaction ended. Epoch 32767, which version 1 may have fenced with, is not
// for clients.
func (t *transaction) endAnswered(p Producer) bool {
	return t != nil && p == t.last() && (t.state.preparing() || t.state.complete()) &&
		t.present().Epoch < math.MaxInt16
}

// fence aborts the transaction and raises the epoch. If holder is set, it is the
// producer itself that will ask for an epoch again; otherwise another one took
// over.
func (t *transaction) fence(holder bool, newID idSource) (*transaction, error) {
	next, err := t.endRaised(false, t.version, newID)
	if err != nil {
		return t, err
	}
	if !holder {
		next.lastEpoch, next.previousID = -1, -1
	}
	next.fenced = true
	return next, nil
}

// end ends the transaction for its producer.
func (t *transaction) end(commit bool, version int8, newID idSource) (*transaction, error) {
	if version >= 2 {
		return t.endRaised(commit, version, newID)
	}
	return t.ended(commit, version), nil
}

// endRaised ends the transaction and raises the epoch by 1. A producer that was
// driven to 32767 stays there until its transaction has ended (KAFKA-20090).
func (t *transaction) endRaised(commit bool, version int8, newID idSource) (*transaction, error) {
	raised := *t
	raised.lastEpoch, raised.previousID = t.producer.Epoch, -1
	raised.producer.Epoch = min(t.producer.Epoch, lastClientEpoch) + 1
	if version >= 2 && raised.producer.Epoch == math.MaxInt16 {
		pid, err := newID()
		if err != nil {
			return t, err
		}
		raised.nextID = pid
	}
	return raised.ended(commit, version), nil
}

// ended returns t with the outcome decided.
func (t *transaction) ended(commit bool, version int8) *transaction {
	next := *t
	next.state, next.version = PrepareAbort, version
	if commit {
		next.state = PrepareCommit
	} else {
		next.offsets = nil
	}
	if len(next.partitions) == 0 {
		return next.completed()
	}
	return &next
}

// completed returns t with all of its markers written.
func (t *transaction) completed() *transaction {
	next := *t
	next.state = CompleteAbort
	if t.state == PrepareCommit {
		next.state = CompleteCommit
	}
	next.partitions, next.groups = nil, nil
	if t.nextID >= 0 {
		if t.lastEpoch >= 0 {
			next.previousID = t.producer.ID
		}
		next.producer, next.nextID = Producer{ID: t.nextID}, -1
	}
	return &next
}

// A Marker is to be written to a partition at the end of a transaction.
type Marker struct {
	TransactionalID  string
	Partition        Partition
	ProducerID       int64
	Epoch            int16
	CoordinatorEpoch int32
	Commit           bool
	Version          int8 // of the transaction: 1 or 2
}

// marker returns the marker for a partition. It requires the state Prepare*.
func (t *transaction) marker(partition Partition, coordinatorEpoch int32) Marker {
	return Marker{
		TransactionalID:  t.id,
		Partition:        partition,
		ProducerID:       t.producer.ID,
		Epoch:            t.producer.Epoch,
		CoordinatorEpoch: coordinatorEpoch,
		Commit:           t.state == PrepareCommit,
		Version:          t.version,
	}
}

// timedOut reports whether the transaction has been open for its time-out.
func (t *transaction) timedOut(now int64) bool {
	return t.state == Ongoing && t.start <= now-int64(t.timeout)
}

// idle reports whether nothing is open and nothing has changed for that long.
func (t *transaction) idle(now int64, expiration time.Duration) bool {
	return (t.state == Empty || t.state.complete()) && t.updated <= now-expiration.Milliseconds()
}
