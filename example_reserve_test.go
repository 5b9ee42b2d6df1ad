package idempotence_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/idempotence-go/idempotence"
)

// A groupPartition is a partition whose log writes batches in groups, so that an
// append finishes after Produce has returned.
type groupPartition struct {
	producers *idempotence.ProducerStateManager
	log       groupLog

	// order is held over Reserve and the hand-over to the log, so that batches are
	// queued in the order in which they are judged. No wait happens under it.
	order   sync.Mutex
	offline error // why no batch is judged, or nil; protected by order
}

// A pendingBatch is a batch on its way into the log.
type pendingBatch struct {
	batch       idempotence.Batch
	records     []string
	reservation *idempotence.Reservation

	settled    chan struct{} // closed when the following are set
	baseOffset int64
	err        error
}

func (a *pendingBatch) settle(baseOffset int64, err error) {
	a.baseOffset, a.err = baseOffset, err
	close(a.settled)
}

// Produce takes a batch in and returns at once, so that its connection can go on
// to the next request. The function that it returns waits for the answer.
func (p *groupPartition) Produce(b idempotence.Batch, records ...string) (wait func(context.Context) (int64, error)) {
	a, baseOffset, err := p.reserve(b, records)
	return func(ctx context.Context) (int64, error) {
		for {
			if a != nil {
				<-a.settled
				return a.baseOffset, a.err
			}
			var inFlight *idempotence.InFlightError
			if !errors.As(err, &inFlight) {
				return baseOffset, err // a duplicate, or refused
			}
			select { // its first copy is in flight: wait for what becomes of it
			case <-inFlight.Done():
			case <-ctx.Done():
				return -1, err
			}
			a, baseOffset, err = p.reserve(b, records)
		}
	}
}

// reserve judges a batch. On Append it hands the batch over to the log.
func (p *groupPartition) reserve(b idempotence.Batch, records []string) (*pendingBatch, int64, error) {
	p.order.Lock()
	defer p.order.Unlock()
	if p.offline != nil {
		return nil, -1, p.offline
	}
	r, res, err := p.producers.Reserve(b)
	switch {
	case err != nil:
		return nil, -1, err
	case res.Verdict == idempotence.Duplicate:
		return nil, res.BaseOffset, nil
	}
	a := &pendingBatch{batch: b, records: records, reservation: r, settled: make(chan struct{})}
	p.log.enqueue(a)
	return a, 0, nil
}

// committed is called by the log when a batch is written, in the order of the log.
func (p *groupPartition) committed(a *pendingBatch, baseOffset int64) {
	if err := a.reservation.Commit(baseOffset); err != nil {
		p.order.Lock()
		p.takeOffline(err) // the log and the state have parted
		p.order.Unlock()
		a.settle(-1, err)
		return
	}
	a.settle(baseOffset, nil)
}

// failed is called by the log when a write has failed and what it left behind has
// been cut off. It holds order, so that no batch is judged to follow a failed one.
func (p *groupPartition) failed(written []*pendingBatch, why error) {
	p.order.Lock()
	defer p.order.Unlock()
	for _, a := range append(written, p.log.dropQueue()...) {
		if errors.Is(a.reservation.Abort(), idempotence.ErrGap) {
			p.takeOffline(idempotence.ErrGap) // impossible in a log written from front to back
		}
		a.settle(-1, why)
	}
}

// takeOffline stops judging, after a fault or when leadership is lost. Retries
// that wait for a reservation are released. It requires order.
func (p *groupPartition) takeOffline(why error) {
	if p.offline == nil {
		p.offline = why
		p.producers.AbandonReservations()
	}
}

// resume goes on after takeOffline, once the log has settled. The log may hold
// batches that the manager does not know.
func (p *groupPartition) resume() error {
	p.order.Lock()
	defer p.order.Unlock()
	from := p.producers.Snapshot().EndOffset()
	for _, e := range p.log.entries {
		if e.baseOffset < from {
			continue
		}
		if err := p.producers.Replay(e.batch, e.baseOffset); err != nil {
			return err
		}
	}
	p.producers.ReplayedTo(p.log.endOffset)
	p.offline = nil
	return nil
}

// A groupLog is a queue of batches and the log that they are written to.
type groupLog struct {
	mu        sync.Mutex
	queue     []*pendingBatch
	entries   []logEntry
	endOffset int64
}

// A logEntry is a batch in the log.
type logEntry struct {
	batch      idempotence.Batch
	baseOffset int64
	records    []string
}

func (l *groupLog) enqueue(a *pendingBatch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, a)
}

// dropQueue empties the queue and returns what was in it.
func (l *groupLog) dropQueue() []*pendingBatch { return l.take(math.MaxInt) }

// take removes up to n batches from the head of the queue.
func (l *groupLog) take(n int) []*pendingBatch {
	l.mu.Lock()
	defer l.mu.Unlock()
	n = min(n, len(l.queue))
	taken := l.queue[:n:n]
	l.queue = l.queue[n:]
	return taken
}

// write is the log's writer. It writes the first n batches of the queue as a
// group, unless the disk fails.
func (p *groupPartition) write(n int, disk error) {
	group := p.log.take(n)
	if disk != nil {
		p.failed(group, disk)
		return
	}
	for _, a := range group {
		base := p.log.endOffset
		p.log.entries = append(p.log.entries, logEntry{a.batch, base, a.records})
		p.log.endOffset += int64(len(a.records))
		p.committed(a, base)
	}
}

// A complete handler for appends that finish later. A retry that meets its first
// copy in flight waits for it, an append that fails takes the later ones of its
// producer along, and what was in flight when leadership was lost is found in the
// log again.
func ExampleProducerStateManager_Reserve() {
	p := &groupPartition{producers: idempotence.New(idempotence.Config{Contiguous: true})}
	produce := func(seq int32, records ...string) (print func()) {
		wait := p.Produce(idempotence.Batch{ProducerID: 31, BaseSequence: seq, Count: int32(len(records))}, records...)
		return func() {
			offset, err := wait(context.Background())
			fmt.Printf("%v: offset %d, %v\n", records, offset, err)
		}
	}

	first := produce(0, "a", "b", "c")
	second := produce(3, "d", "e")
	retry := produce(0, "a", "b", "c") // its first copy is in flight
	p.write(2, nil)
	first()
	second()
	retry()

	fmt.Println("--- a write fails")
	first = produce(5, "f")
	second = produce(6, "g")
	p.write(1, errors.New("no space left on device")) // "g" is dropped from the queue
	first()
	second()
	produce(6, "g")() // would leave a gap
	first = produce(5, "f")
	p.write(1, nil)
	first()

	fmt.Println("--- leadership is lost and regained")
	first = produce(6, "g")
	p.order.Lock()
	p.takeOffline(errors.New("not the leader"))
	p.order.Unlock()
	p.write(1, nil) // the append ends all the same
	first()
	produce(7, "h")()
	if err := p.resume(); err != nil {
		fmt.Println(err)
	}
	produce(6, "g")()

	// Output:
	// [a b c]: offset 0, <nil>
	// [d e]: offset 3, <nil>
	// [a b c]: offset 0, <nil>
	// --- a write fails
	// [f]: offset -1, no space left on device
	// [g]: offset -1, no space left on device
	// [g]: offset -1, idempotence: out of order sequence: producer 31 epoch 0 sequence 6 count 1: expected sequence 5 in epoch 0
	// [f]: offset 5, <nil>
	// --- leadership is lost and regained
	// [g]: offset -1, idempotence: reservation abandoned
	// [h]: offset -1, not the leader
	// [g]: offset 6, <nil>
}
