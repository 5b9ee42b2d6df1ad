package idempotence

import (
	"cmp"
	"slices"
)

// This file is the ledger of a trace: what Kafka remembers of each producer, which
// segments and snapshots it has, and what lies in its log. It is kept from the trace
// and from Kafka's answers alone, so that nothing in the library can leave a line out
// of the comparison.

// Why a line of testdata/txn-vectors is left out of the comparison.
const (
	// guards: verification (KIP-890 part 1) is the broker's here.
	guards = "verification guards"
	// coordBatch: the group coordinator's batches are replayed here, not judged.
	coordBatch = "batches of the group coordinator"
	// newerEpochJoins: Kafka lets a batch of a newer epoch join the open transaction
	// of the older one. Here it waits for the marker (rule T1b).
	newerEpochJoins = "a newer epoch inside an open transaction (T1b)"
	// plainReplica: Kafka's follower refuses a plain batch inside a transaction. A
	// replay judges nothing here.
	plainReplica = "a replicated plain batch inside an open transaction"
	// olderReplica: Kafka's follower adopts an older epoch. The newer one stays here.
	olderReplica = "a producer whose epoch a replica has put back"
	// olderCoordinator: the same for the epoch of the coordinator.
	olderCoordinator = "a producer whose coordinator epoch a replica has put back"
	// expireTime: idle time is counted from calls of Expire here, and from the
	// timestamps of batches in Kafka.
	expireTime = "time by Expire"
	// deleted: nothing is known here of what lies below the log's start.
	deletedRange = "aborted transactions below the log's start"
	// lostStart: Kafka has read a log whose head was deleted, and takes a later batch
	// of a transaction for its first.
	lostStart = "a first offset that Kafka lost with the log's head"
)

// account is what is known of one producer.
type account struct {
	epoch, highestEpoch             int64
	coordinator, highestCoordinator int64
	txnFirst                        int64
	stamp                           int64 // the timestamp of its last entry, for Kafka
	active                          int64 // when it was last active here, or unticked
	gone                            bool  // Kafka has forgotten it
	stray                           string
	coordinatorStray                string
}

// unticked is the time of an activity since the last Expire.
const unticked int64 = -1

// accounts are all of them, by producer id.
type accounts map[int64]*account

func (all accounts) clone() accounts {
	c := accounts{}
	for pid, a := range all {
		copied := *a
		c[pid] = &copied
	}
	return c
}

// asWritten returns a copy with the times that WriteKafka writes: those active since
// the last Expire have its time.
func (all accounts) asWritten(lastExpire int64) accounts {
	c := all.clone()
	for _, a := range c {
		if a.active == unticked {
			a.active = lastExpire
		}
	}
	return c
}

// ledgerEntry is an entry of the log with its timestamp.
type ledgerEntry struct {
	logged
	stamp int64
}

// enter does what an entry of the log does in Kafka, and notes where this library
// does something else.
func (all accounts) enter(e ledgerEntry) {
	if e.pid() == NoProducerID {
		return
	}
	a := all[e.pid()]
	epoch := int64(e.epoch())
	if a == nil {
		a = &account{epoch: epoch, highestEpoch: epoch, coordinator: -1, highestCoordinator: -1, txnFirst: -1}
		all[e.pid()] = a
	}
	if a.gone {
		a.gone, a.epoch, a.coordinator = false, epoch, -1
	}
	a.stamp, a.active = e.stamp, unticked
	switch {
	case epoch > a.highestEpoch:
		a.stray = ""
	case epoch < max(a.epoch, a.highestEpoch):
		a.stray = cmp.Or(a.stray, olderReplica)
	}
	a.epoch, a.highestEpoch = epoch, max(a.highestEpoch, epoch)
	switch k := e.marker; {
	case k == nil && e.batch.Transactional && a.txnFirst < 0:
		a.txnFirst = e.base
	case k != nil:
		a.txnFirst = -1
		a.coordinator = int64(k.CoordinatorEpoch)
		if a.coordinator < a.highestCoordinator {
			a.coordinatorStray = cmp.Or(a.coordinatorStray, olderCoordinator)
		} else {
			a.highestCoordinator, a.coordinatorStray = a.coordinator, ""
		}
	}
}

// ledger is everything together.
type ledger struct {
	verification bool
	expiration   int64
	clock        int64
	ticked       int64 // when the library was last told it
	producers    accounts
	log          []ledgerEntry // from offset 0 on, also what has been deleted
	hw           int64
	start, end   int64
	segments     []int64 // base offsets
	snapshots    []ledgerSnapshot
}

// ledgerSnapshot is a snapshot on Kafka's disk, and the same of this library.
type ledgerSnapshot struct {
	end       int64
	producers accounts
	bytes     []byte
}

func newLedger() *ledger {
	return &ledger{clock: 1000, producers: accounts{}, segments: []int64{0}}
}

// append adds an entry to the log.
func (l *ledger) append(e ledgerEntry) {
	l.log = append(l.log, e)
	l.producers.enter(e)
}

// whyBatch returns why the answer to a batch is not compared, or "".
func (l *ledger) whyBatch(op txnOp, kafka string) string {
	a := l.producers[op.pid()]
	switch {
	case op.verb == "coordbatch" && (a == nil || a.stray == ""):
		return coordBatch
	case op.verb == "replicate":
		if kafka == "INVALID_TXN_STATE" {
			return plainReplica
		}
		return ""
	case l.verification:
		return guards
	case a == nil:
		return ""
	case a.stray != "":
		return a.stray
	case kafka == "OK" && a.txnFirst >= 0 && op.nums[1] > a.epoch:
		return newerEpochJoins
	}
	return ""
}

// whyMarker returns why the answer to a marker is not compared, or "".
func (l *ledger) whyMarker(op txnOp) string {
	a := l.producers[op.pid()]
	if a == nil || op.verb == "replicate-marker" {
		return ""
	}
	return cmp.Or(a.stray, a.coordinatorStray)
}

// mayTick reports whether the library can be told the time without forgetting anyone.
func (l *ledger) mayTick() bool {
	for _, a := range l.producers {
		if a.txnFirst < 0 && a.active != unticked && a.active+l.expiration <= l.clock {
			return false
		}
	}
	return true
}

// tick notes that the library was told the time.
func (l *ledger) tick() {
	l.ticked = l.clock
	for _, a := range l.producers {
		if a.active == unticked {
			a.active = l.clock
		}
	}
}

// expire forgets producers on both sides, Kafka at now and the library at the clock.
// One that only Kafka forgets is a stray.
func (l *ledger) expire(now int64) {
	l.tick()
	for pid, a := range l.producers {
		if a.txnFirst >= 0 {
			continue
		}
		a.gone = a.gone || a.stamp+l.expiration <= now
		if a.active+l.expiration <= l.clock {
			delete(l.producers, pid)
		} else if a.gone {
			a.stray, a.coordinatorStray = expireTime, expireTime
		}
	}
}

// ownOnly returns how many producers only the library remembers.
func (l *ledger) ownOnly() (n int) {
	for _, a := range l.producers {
		if a.gone {
			n++
		}
	}
	return n
}

// newest returns the newest snapshot, or one of an empty state at the log's start.
func (l *ledger) newest() ledgerSnapshot {
	if len(l.snapshots) == 0 {
		return ledgerSnapshot{end: l.start, producers: accounts{}}
	}
	return l.snapshots[len(l.snapshots)-1]
}

// dropSnapshots drops those that do not lie in (start, end].
func (l *ledger) dropSnapshots(end int64) {
	l.snapshots = slices.DeleteFunc(l.snapshots, func(s ledgerSnapshot) bool { return s.end > end || s.end <= l.start })
}

// dropStraySnapshots drops those at no segment's beginning, but for the newest of
// them if it lies behind the last segment's.
func (l *ledger) dropStraySnapshots() {
	last := slices.Max(l.segments)
	newest := last
	for _, s := range l.snapshots {
		if !slices.Contains(l.segments, s.end) {
			newest = max(newest, s.end)
		}
	}
	l.snapshots = slices.DeleteFunc(l.snapshots, func(s ledgerSnapshot) bool {
		return !slices.Contains(l.segments, s.end) && s.end < newest
	})
}

// roll begins a segment.
func (l *ledger) roll() {
	if !slices.Contains(l.segments, l.end) {
		l.segments = append(l.segments, l.end)
	}
}

// deleteSegments deletes the segments wholly below the log's start, and their
// snapshots. It returns how many there were.
func (l *ledger) deleteSegments() (n int) {
	for len(l.segments) > 1 && l.segments[1] <= l.start {
		base := l.segments[0]
		l.snapshots = slices.DeleteFunc(l.snapshots, func(s ledgerSnapshot) bool { return s.end == base })
		l.segments = l.segments[1:]
		n++
	}
	return n
}

// cut cuts the log to end at to.
func (l *ledger) cut(to int64) {
	l.log = slices.DeleteFunc(l.log, func(e ledgerEntry) bool { return e.logged.end() > to })
	l.segments = slices.DeleteFunc(l.segments, func(base int64) bool { return base > to })
	l.end, l.hw = to, min(l.hw, to)
}

// entries returns the log without the timestamps.
func (l *ledger) entries() []logged {
	var all []logged
	for _, e := range l.log {
		all = append(all, e.logged)
	}
	return all
}

// behind returns the part of the log that a restart from a snapshot reads.
func (l *ledger) behind(offset int64) []ledgerEntry {
	return slices.DeleteFunc(slices.Clone(l.log), func(e ledgerEntry) bool { return e.logged.end() <= max(offset, l.start) })
}
