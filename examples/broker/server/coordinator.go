package server

// This file is the transaction coordinator at work: its log, the markers that it
// wants written, and the time-outs. The rules are those of package txn.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// TxnLogName is the file of the data directory that holds what the transaction
// coordinator has recorded. It is not the log of a partition.
const TxnLogName = "transactions.log"

const (
	// txnExpireInterval is how late a transaction may be aborted that has timed
	// out.
	txnExpireInterval = 100 * time.Millisecond

	// markerRetryInterval is the time between two attempts to write a marker.
	markerRetryInterval = 200 * time.Millisecond

	// firstMadeUpID and all ids above it were made up by a client: counting from
	// 0, the broker does not get there. They are not counted on from, so no client
	// can use up the supply.
	firstMadeUpID = 1 << 62

	// lostIDs is how many ids are left out when the log that reserves them is
	// lost: more than were handed out without being seen in a partition.
	lostIDs = 1_000_000
)

// A coordinator is that of package txn with its log, and what writes its
// markers.
type coordinator struct {
	*txn.Coordinator
	cfg    Config
	log    *txnLog
	topics *topics

	closing context.Context
	working sync.WaitGroup // the markers being written, and the time-outs

	mu      sync.Mutex
	writing map[txn.Marker]bool // markers being written
}

// openCoordinator reads transactions.log, and has the start recorded there. It
// writes the markers that the last run owed.
func openCoordinator(closing context.Context, cfg Config, topics *topics) (*coordinator, error) {
	path := filepath.Join(cfg.Dir, TxnLogName)
	_, missing := os.Stat(path)
	log, found, err := openTxnLog(path, cfg)
	if err != nil {
		return nil, err
	}
	if found.Tail != nil {
		cfg.Log.Error("log cut after an unclean stop", "log", TxnLogName, "err", found.Tail)
	}
	if found.Duplicates > 0 {
		cfg.Log.Error("records found twice", "log", TxnLogName, "records", found.Duplicates)
	}
	c := &coordinator{cfg: cfg, log: log, topics: topics, closing: closing, writing: make(map[txn.Marker]bool)}
	c.Coordinator, err = txn.NewCoordinator(txn.Config{
		FirstProducerID: firstProducerID(found.Size > 0, missing == nil, topics.maxProducerID(), cfg.Log),
		InUse:           topics.knowProducer,
	}, found, log)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", TxnLogName, err), log.close())
	}
	c.writeMarkers()
	c.working.Go(c.expire)
	return c, nil
}

// firstProducerID returns the lowest id to hand out that is behind highest, the
// highest id that any partition has seen: it may come from another broker, or
// from a time before the log was lost. An id made up by a client may be higher.
func firstProducerID(recorded, existed bool, highest int64, log *slog.Logger) int64 {
	next := int64(firstMadeUpID)
	if highest < firstMadeUpID {
		next = highest + 1
	}
	switch {
	case !recorded && (existed || next > 0): // the log is lost
		next = min(next+lostIDs, firstMadeUpID)
		log.Error("producer ids lost", "continuing with", next, "log", TxnLogName)
	case next == firstMadeUpID && recorded:
		next = 0 // the log knows
	}
	return next
}

// expire aborts transactions that have timed out, until the broker stops.
func (c *coordinator) expire() {
	ticker := time.NewTicker(txnExpireInterval)
	defer ticker.Stop()
	for {
		select {
		case now := <-ticker.C:
			if err := c.Expire(now); err != nil {
				c.cfg.repeated.Error("transactions not expired", "err", err)
			}
			c.writeMarkers()
		case <-c.closing.Done():
			return
		}
	}
}

// writeMarkers begins to write the markers that are not being written yet. It
// is called after everything that can end a transaction.
func (c *coordinator) writeMarkers() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.Markers() {
		if !c.writing[m] && c.closing.Err() == nil {
			c.writing[m] = true
			c.working.Go(func() { c.writeMarker(m) })
		}
	}
}

// writeMarker writes a marker until it is done, or the broker stops.
func (c *coordinator) writeMarker(m txn.Marker) {
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.writing, m)
	}()
	for c.closing.Err() == nil {
		if c.tryMarker(m) {
			return
		}
		select {
		case <-time.After(markerRetryInterval):
		case <-c.closing.Done():
		}
	}
}

// tryMarker tries to write a marker once, and reports whether it is done.
func (c *coordinator) tryMarker(m txn.Marker) (done bool) {
	c.cfg.ObserveMarker(m, false)
	err := c.appendMarker(m)
	if err == nil {
		c.cfg.ObserveMarker(m, true)
	}
	if err := c.MarkerDone(time.Now(), m, err); err != nil {
		c.cfg.repeated.Error("transaction not completed", "transactional id", m.TransactionalID, "err", err)
	}
	switch errorCode(err) {
	case 0, invalidProducerEpoch, coordinatorFenced:
		return true
	}
	c.cfg.repeated.Warn("marker not written", "transactional id", m.TransactionalID,
		"topic", m.Partition.Topic, "partition", m.Partition.Partition, "err", err)
	return false
}

func (c *coordinator) appendMarker(m txn.Marker) error {
	p, err := c.topics.partition(m.Partition.Topic, m.Partition.Partition)
	if err != nil {
		return err
	}
	err = p.writeMarker(c.closing, idempotence.Marker{
		ProducerID:       m.ProducerID,
		Epoch:            m.Epoch,
		CoordinatorEpoch: m.CoordinatorEpoch,
		Commit:           m.Commit,
		Version:          m.Version,
	})
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", kerr.ErrorForCode(errorCode(err)), err) // as over the wire
}

// close ends the coordinator after closing has ended and no more requests are
// served. In good order it records the end.
func (c *coordinator) close(inOrder bool) error {
	c.working.Wait()
	var err error
	if inOrder {
		err = c.Stop()
	}
	return errors.Join(err, c.log.close())
}
