package server

// This file is all that the broker does with package idempotence while it
// serves; what it does at start and at the end is in recovery.go. Everything
// else is there to get batches to append and answers back.

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// A partition is a log and what is remembered of its producers.
type partition struct {
	cfg       Config
	dir       string
	producers *idempotence.ProducerStateManager
	log       *segment.Log

	// order is held over Reserve and the hand-over to the writer, so that the
	// batches of a producer enter the log in the order in which they were
	// judged. Nobody waits for a disk under it.
	order   sync.Mutex
	queue   []*pendingAppend // handed over, and not taken by the writer yet
	taken   int              // how many the writer has taken last
	writing bool             // the writer is running
	offline error            // set when nothing can be appended any more

	snapshots  *idempotence.SnapshotDir
	saving     sync.Mutex     // held while a snapshot is saved
	background sync.WaitGroup // the writer, and whoever saves a snapshot

	waitersMu sync.Mutex
	waiters   map[chan<- struct{}]struct{} // told of each append
}

// A pendingAppend is a batch on its way into the log, or what became of it.
type pendingAppend struct {
	segment.Batch
	producerID  int64
	reservation *idempotence.Reservation

	settled chan struct{} // closed when the rest is set
	result  idempotence.Result
	err     error
}

// wait returns what became of the batch once that is known.
func (a *pendingAppend) wait() (idempotence.Result, error) {
	<-a.settled
	return a.result, a.err
}

// settle makes it known what became of the batch.
func (a *pendingAppend) settle(result idempotence.Result, err error) {
	a.result, a.err = result, err
	close(a.settled)
}

// begin is the first half of the loop that package idempotence describes for
// appends that finish later: it has the batch judged and handed over to the
// log. The second half, which settles the append, is below.
//
// A batch that cannot be judged yet, most likely since its own first copy is on
// its way, is waited for and asked about again, until ctx ends. So the batches
// of one connection are judged one after the other, in the order they came.
func (p *partition) begin(ctx context.Context, batch idempotence.Batch, records segment.Batch) *pendingAppend {
	if p.cfg.WithoutDeduplication {
		batch.ProducerID = idempotence.NoProducerID // nothing is known of these
	}
	for {
		a, inFlight := p.reserve(batch, records)
		if inFlight == nil {
			return a
		}
		select {
		case <-inFlight.Done():
		case <-ctx.Done():
			return a // its error makes the producer try again
		}
	}
}

// reserve has the batch judged once and, if it is to be appended, hands it over.
// If that has to wait, it also returns for what.
func (p *partition) reserve(batch idempotence.Batch, records segment.Batch) (*pendingAppend, *idempotence.InFlightError) {
	a := &pendingAppend{Batch: records, producerID: batch.ProducerID, settled: make(chan struct{})}
	p.order.Lock()
	defer p.order.Unlock()
	if p.offline != nil {
		a.settle(idempotence.Result{}, kerr.KafkaStorageError)
		return a, nil
	}

	// 1. Reserve. A refusal is the producer's to hear, and a duplicate is
	// answered with the offset that its first copy got.
	reservation, result, err := p.producers.Reserve(batch)
	if reservation == nil {
		a.settle(result, err)
		var inFlight *idempotence.InFlightError
		errors.As(err, &inFlight)
		return a, inFlight
	}

	// 2. Append, which from here on is the writer's business.
	a.reservation = reservation
	p.enqueue(a)
	return a, nil
}

// commit settles a group that is in the log, in the order of the log.
func (p *partition) commit(group []*pendingAppend) {
	for i, a := range group {
		// 3. Commit. It cannot be refused, since nobody but the writer ends
		// reservations. If it were, the log would hold a batch that is not
		// remembered, and only a restart, which reads the log, would put it
		// right.
		base := a.Header.BaseOffset
		if err := a.reservation.Commit(base); err != nil {
			p.fail(group[i:], fmt.Errorf("appended at %d but not committed: %w", base, err))
			return
		}
		// 4. Answer, for which somebody waits.
		a.settle(idempotence.Result{Verdict: idempotence.Append, BaseOffset: base}, nil)
	}
}

// fail settles a group that is not in the log, and what is queued behind it of
// the same producers: appended, that would leave a gap. Where the partition can
// take no more, offline says why, and everything is settled.
//
// It is done under the lock. Otherwise a batch could be judged to follow one
// that has failed, and be queued when the queue has been gone through.
func (p *partition) fail(group []*pendingAppend, offline error) {
	p.order.Lock()
	defer p.order.Unlock()
	if offline != nil {
		p.offline = offline
		p.cfg.Log.Error("partition offline", "err", offline)
	}
	failed := make(map[int64]bool)
	for _, a := range group {
		failed[a.producerID] = a.producerID != idempotence.NoProducerID
	}
	var others []*pendingAppend
	for _, a := range p.queue {
		if failed[a.producerID] || p.offline != nil {
			group = append(group, a)
		} else {
			others = append(others, a)
		}
	}
	p.queue = others
	p.abort(group)
}

// abort ends the reservations of batches that are not in the log, given in the
// order in which they were made. The first of each producer abandons those
// behind it. All are answered with what makes a producer try again, and it is as
// if none of them had been here.
func (p *partition) abort(group []*pendingAppend) {
	for _, a := range group {
		err := a.reservation.Abort()
		if err == nil {
			err = kerr.KafkaStorageError
		}
		a.settle(idempotence.Result{}, err)
	}
}

// watch has wake told of every append until stop is called.
func (p *partition) watch(wake chan<- struct{}) (stop func()) {
	p.waitersMu.Lock()
	defer p.waitersMu.Unlock()
	p.waiters[wake] = struct{}{}
	return func() {
		p.waitersMu.Lock()
		defer p.waitersMu.Unlock()
		delete(p.waiters, wake)
	}
}

// wakeWaiters never blocks: a waiter whose channel is full is awake already.
func (p *partition) wakeWaiters() {
	p.waitersMu.Lock()
	defer p.waitersMu.Unlock()
	for wake := range p.waiters {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}
