package server

// This file is what the broker does with package idempotence while it serves.
// What it does at start and at the end is in recovery.go. The other files get
// batches to append, and answers back.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"golang.org/x/sync/semaphore"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// A partition is a log and what is remembered of its producers.
//
// Its three mutexes are held as follows. order comes first: it is held over the
// calls of the manager and of the log that are quick, and never while a disk or
// a client is waited for. saving is held while a snapshot is written; no other
// mutex is locked inside it. watching is locked last, and nothing inside it.
type partition struct {
	cfg       Config
	topic     string
	index     int32
	dir       string
	producers *idempotence.ProducerStateManager
	log       *segment.Log        // nil if it could not be opened
	clean     bool                // the log is closed, and was closed in good order
	waits     *semaphore.Weighted // of all partitions: one for each batch that waits to be judged

	// order is held from Reserve until the batch is in the queue, so that the
	// batches of a producer enter the log in the order in which they were
	// judged.
	order   sync.Mutex
	queue   []*pendingAppend // handed over, and not yet taken by the writer
	taken   int              // how many the writer has taken last
	writing bool             // the writer is running
	offline error            // why nothing can be appended, or nil

	snapshots  *idempotence.SnapshotDir
	timings    timings
	saving     sync.Mutex
	saved      bool           // the newest snapshot has everything; guarded by order
	background sync.WaitGroup // the writer, and a snapshot being saved

	watching sync.Mutex
	watchers map[chan<- struct{}]struct{} // told of each append
}

// A pendingAppend is a batch on its way into the log, or what became of it.
type pendingAppend struct {
	segment.Batch
	producer    idempotence.Batch
	marker      *idempotence.Marker // nil for a batch of a producer
	reservation *idempotence.Reservation

	// admit returns why the transaction of a transactional batch does not take
	// it, or nil. It is called under order: from then on until the batch has
	// settled, no marker can end that transaction here.
	admit func() error

	// judged is closed when a batch that had to wait has been judged. It is nil
	// for one that was judged at once.
	judged chan struct{}

	settled chan struct{} // closed when the following are set
	result  idempotence.Result
	err     error
}

// wait returns what became of the batch once that is known.
func (a *pendingAppend) wait() (idempotence.Result, error) {
	<-a.settled
	return a.result, a.err
}

// settle makes known what became of the batch.
func (a *pendingAppend) settle(result idempotence.Result, err error) {
	a.result, a.err = result, err
	close(a.settled)
}

func (a *pendingAppend) isJudged() bool {
	select {
	case <-a.judged:
		return true
	default:
		return a.judged == nil
	}
}

// begin is the first half of the loop that package idempotence describes for
// appends that finish later. It has a batch judged and handed over to the log,
// and returns at once. The second half, which settles the append, is below.
//
// A batch that cannot be judged yet, most likely because its first copy is in
// flight, waits until it can be, or ctx ends. So does one behind it on the same
// connection: before is such a batch, or nil.
func (p *partition) begin(ctx context.Context, a, before *pendingAppend) *pendingAppend {
	if p.cfg.WithoutDeduplication {
		a.producer.ProducerID = idempotence.NoProducerID // nothing is known of these
	}
	a.settled = make(chan struct{})
	if before == nil || before.isJudged() {
		before = nil
		if p.reserve(a) == nil {
			return a
		}
	}
	if !p.waits.TryAcquire(1) {
		a.settle(idempotence.Result{}, kerr.RequestTimedOut) // as if its time were up
		return a
	}
	a.judged = make(chan struct{})
	go p.beginLater(ctx, a, before)
	return a
}

// beginLater has a batch judged when it can be.
func (p *partition) beginLater(ctx context.Context, a, before *pendingAppend) {
	defer p.waits.Release(1)
	defer close(a.judged)
	if before != nil {
		<-before.judged
	}
	for {
		inFlight := p.reserve(a)
		if inFlight == nil {
			return
		}
		select {
		case <-inFlight.Done():
		case <-ctx.Done():
			a.settle(idempotence.Result{}, inFlight) // its producer tries again
			return
		}
	}
}

// reserve has the batch judged and, if it is to be appended, hands it over. If
// it cannot be judged yet, reserve returns what it has to wait for.
func (p *partition) reserve(a *pendingAppend) *idempotence.InFlightError {
	p.order.Lock()
	defer p.order.Unlock()
	if p.offline != nil {
		a.settle(idempotence.Result{}, kerr.KafkaStorageError)
		return nil
	}

	// 1. Reserve. A refusal is passed on to the producer. A duplicate is
	// answered with the offset that its first copy got.
	reservation, result, err := p.judge(a)
	var inFlight *idempotence.InFlightError
	switch {
	case errors.As(err, &inFlight):
		return inFlight
	case reservation == nil:
		a.settle(result, err)
		return nil
	}

	// 2. Append. The writer does it.
	a.reservation = reservation
	p.enqueue(a)
	return nil
}

// judge reserves the place of a batch or a marker. It requires order to be held.
func (p *partition) judge(a *pendingAppend) (*idempotence.Reservation, idempotence.Result, error) {
	if a.marker != nil {
		r, err := p.producers.ReserveMarker(*a.marker)
		return r, idempotence.Result{}, err
	}
	if a.admit != nil {
		if err := a.admit(); err != nil {
			// A duplicate is in the log, whatever became of its transaction.
			if result, judged := p.producers.CheckBatch(a.producer); judged == nil && result.Verdict == idempotence.Duplicate {
				return nil, result, nil
			}
			return nil, idempotence.Result{}, err
		}
	}
	return p.producers.Reserve(a.producer)
}

// commit settles a group that is in the log, in the order of the log.
func (p *partition) commit(group []*pendingAppend) {
	for i, a := range group {
		// 3. Commit. It cannot fail, since only the writer ends reservations. If
		// it did, the log would hold a batch that the manager does not know of,
		// so the partition goes offline. A restart reads the log.
		base := a.Header.BaseOffset
		if err := a.reservation.Commit(base); err != nil {
			p.fail(group[i:], fmt.Errorf("appended at %d but not committed: %w", base, err))
			return
		}
		// 4. Answer.
		a.settle(idempotence.Result{Verdict: idempotence.Append, BaseOffset: base}, nil)
	}
}

// fail settles a group that is not in the log, and with it all batches in the
// queue of the same producers: appended, they would leave a gap. If offline is
// not nil, it is why the partition goes offline, and all batches are settled.
//
// It holds order throughout. Otherwise a batch could be judged to follow one
// that has failed, and be queued too late to be found here.
func (p *partition) fail(group []*pendingAppend, offline error) {
	p.order.Lock()
	defer p.order.Unlock()
	if offline != nil {
		p.offline = offline
		p.cfg.Log.Error("partition offline", "log", p.dir, "err", offline)
	}
	failed := make(map[int64]bool)
	for _, a := range group {
		id := a.producer.ProducerID
		failed[id] = id != idempotence.NoProducerID
	}
	var others []*pendingAppend
	for _, a := range p.queue {
		if failed[a.producer.ProducerID] || p.offline != nil {
			group = append(group, a)
		} else {
			others = append(others, a)
		}
	}
	p.queue = others
	p.abort(group)
}

// abort ends the reservations of batches that are not in the log, in the order
// in which they were made. Aborting the first of a producer ends the later ones
// too. All answers make the producer try again.
func (p *partition) abort(group []*pendingAppend) {
	for _, a := range group {
		err := a.reservation.Abort()
		if err == nil {
			err = kerr.KafkaStorageError
		}
		a.settle(idempotence.Result{}, err)
	}
}

// offlineReason returns why nothing can be appended, or nil.
func (p *partition) offlineReason() error {
	p.order.Lock()
	defer p.order.Unlock()
	return p.offline
}

// expire forgets the producers that have been idle too long.
func (p *partition) expire(now time.Time) {
	n := p.producers.Expire(now)
	if n == 0 {
		return
	}
	p.order.Lock()
	p.saved = false
	p.order.Unlock()
	p.cfg.Log.Info("producers expired", "log", p.dir, "producers", n)
}

// watch sends to wake after every append, until stop is called.
func (p *partition) watch(wake chan<- struct{}) (stop func()) {
	p.watching.Lock()
	defer p.watching.Unlock()
	p.watchers[wake] = struct{}{}
	return func() {
		p.watching.Lock()
		defer p.watching.Unlock()
		delete(p.watchers, wake)
	}
}

// wakeWatchers never blocks: a watcher whose channel is full is awake already.
func (p *partition) wakeWatchers() {
	p.watching.Lock()
	defer p.watching.Unlock()
	for wake := range p.watchers {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}
