package server

// This file is all that the broker does with package idempotence; everything
// else is there to get batches to append and answers back.

import (
	"errors"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/durable"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// A partition is a log and what is remembered of its producers.
type partition struct {
	cfg Config

	// appending is held from Check to Commit. Without it two batches could be
	// judged against the same state and both be appended.
	appending sync.Mutex
	producers *idempotence.ProducerStateManager
	log       *segment.Log
	offline   error // set when log and producers may disagree; guarded by appending

	waitersMu sync.Mutex
	waiters   map[chan<- struct{}]struct{} // told of each append
}

// openPartition opens the log and replays it to a new manager, so that a retry
// of a batch from before the restart is recognised.
func openPartition(cfg Config, topic string, i int32) (*partition, error) {
	p := &partition{
		cfg:       cfg,
		producers: idempotence.New(idempotence.Config{}),
		waiters:   make(map[chan<- struct{}]struct{}),
	}
	var err error
	if p.log, err = segment.Open(dirOf(cfg, topic, i), p.producers.ReplayLog); err != nil {
		return nil, err
	}
	if err := durable.SyncDir(cfg.Dir); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

// append is the loop that package idempotence describes: it has the batch
// judged, appends it if that is the verdict, and commits it at the offset it
// got. The records are the batch as it came and have passed validate.
func (p *partition) append(batch idempotence.Batch, h idempotence.BatchHeader, records []byte) (idempotence.Result, error) {
	if p.cfg.WithoutDeduplication {
		batch.ProducerID = idempotence.NoProducerID // nothing is known of these
	}

	p.appending.Lock()
	defer p.appending.Unlock()
	if p.offline != nil {
		return idempotence.Result{}, kerr.KafkaStorageError
	}

	// 1. Check. A refusal is the producer's to hear, and a duplicate is
	// answered with the offset that its first copy got.
	result, err := p.producers.CheckBatch(batch)
	if err != nil || result.Verdict == idempotence.Duplicate {
		return result, err
	}

	// 2. Append. When it fails nothing has been remembered, so that the
	// producer's retry is judged as if this try had never been.
	base, err := p.appendToLog(h, records)
	if err != nil {
		p.cfg.Log.Error("append failed", "err", err)
		return idempotence.Result{}, kerr.KafkaStorageError
	}

	// 3. Commit. It cannot be refused, since nobody has changed the state
	// since Check. If it were, the log would hold a batch that is not
	// remembered, and only a restart, which reads the log, would put it right.
	if err := p.producers.CommitBatch(batch, base); err != nil {
		p.offline = fmt.Errorf("appended at %d but not committed: %w", base, err)
		p.cfg.Log.Error("partition offline", "err", p.offline)
		return idempotence.Result{}, kerr.KafkaStorageError
	}

	// 4. Answer, which is the caller's part.
	return idempotence.Result{Verdict: idempotence.Append, BaseOffset: base}, nil
}

func (p *partition) appendToLog(h idempotence.BatchHeader, records []byte) (int64, error) {
	if p.log.ActiveSize()+int64(h.Size) > p.cfg.SegmentBytes {
		if err := p.log.Roll(); err != nil {
			return 0, err
		}
	}
	base, err := p.log.Append(records, h)
	if err == nil {
		p.wakeWaiters()
	}
	return base, err
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

func (p *partition) close() error { return p.log.Close() }
