package main

// This file looks at what the replicas have.

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

// settle stops and starts all nodes, with clocks that stand still, and returns
// when each has applied the same commands.
func (c *cluster) settle(ctx context.Context) error {
	c.cfg.ExpireInterval = time.Hour
	for _, m := range c.members {
		if err := m.stop(); err != nil {
			return err
		}
	}
	for _, m := range c.members {
		if err := c.start(m); err != nil {
			return err
		}
	}
	// A snapshot is of commands, so there has to be one.
	last, err := c.propose(ctx, statemachine.Expire(time.Now()))
	if err != nil {
		return err
	}
	for _, m := range c.members {
		if err := m.running().Machine().WaitReached(ctx, last); err != nil {
			return fmt.Errorf("node %d: %w", m.id, err)
		}
	}
	return nil
}

// propose has a command applied, and returns its index.
func (c *cluster) propose(ctx context.Context, command []byte) (index uint64, err error) {
	for {
		m, err := c.awaitLeader(ctx)
		if err != nil {
			return 0, err
		}
		proposed := m.running().Raft().Apply(command, time.Second)
		if proposed.Error() == nil {
			return proposed.Index(), nil
		}
	}
}

// compareReplicas returns an error unless all replicas of a settled cluster take
// the same snapshot, which has the logs in it.
func (c *cluster) compareReplicas() error {
	var sums [][sha256.Size]byte
	for _, m := range c.members {
		taken := m.running().Raft().Snapshot()
		if err := taken.Error(); err != nil {
			return fmt.Errorf("node %d: snapshot: %w", m.id, err)
		}
		_, r, err := taken.Open()
		if err != nil {
			return err
		}
		sum := sha256.New()
		_, err = io.Copy(sum, r)
		if err := errors.Join(err, r.Close()); err != nil {
			return err
		}
		sums = append(sums, [sha256.Size]byte(sum.Sum(nil)))
	}
	if sums[0] != sums[1] || sums[0] != sums[2] {
		return fmt.Errorf("snapshots of the replicas differ: %x", sums)
	}
	return nil
}

// offsetsOf goes over a log and returns where the batches of the first epoch of
// each producer are, by their first sequences. It returns an error unless the
// batches of every producer are in the order of their sequences, each once.
func offsetsOf(p *statemachine.Partition) (map[int64]map[int32]int64, error) {
	offsets := make(map[int64]map[int32]int64)
	next := make(map[int64]idempotence.Batch) // by producer
	for offset := p.Log.Start(); offset < p.Log.End(); {
		batches, err := p.Log.Read(offset, 1<<20)
		if err != nil {
			return nil, err
		}
		for len(batches) > 0 {
			b, h, err := idempotence.ParseBatch(batches)
			if err != nil {
				return nil, err
			}
			want := next[b.ProducerID]
			if b.Epoch > want.Epoch { // a client that is in doubt begins again
				want = idempotence.Batch{Epoch: b.Epoch}
			}
			if b.Epoch != want.Epoch || b.BaseSequence != want.BaseSequence || h.BaseOffset != offset {
				return nil, fmt.Errorf("offset %d: producer %d, epoch %d, sequence %d, where %d and %d are next",
					offset, b.ProducerID, b.Epoch, b.BaseSequence, want.Epoch, want.BaseSequence)
			}
			if offsets[b.ProducerID] == nil {
				offsets[b.ProducerID] = make(map[int32]int64)
			}
			if b.Epoch == 0 {
				offsets[b.ProducerID][b.BaseSequence] = offset
			}
			want.BaseSequence += b.Count
			next[b.ProducerID] = want
			offset += int64(b.Count)
			batches = batches[h.Size:]
		}
	}
	return offsets, nil
}

// recordsOf returns the records of the log that have a name, in order.
func recordsOf(log []string, name string) []string {
	var records []string
	for _, r := range log {
		if len(r) > len(name) && r[:len(name)+1] == name+" " {
			records = append(records, r)
		}
	}
	return records
}
