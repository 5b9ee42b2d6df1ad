package server

// This file is how a partition outlives the broker: what is remembered of the
// producers is saved now and then, and brought up to date from the log at start.

import (
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/durable"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// openPartition opens the log and its snapshots, which share a directory, and
// recovers what was known of the producers, so that a retry of a batch from
// before the restart is recognised.
func openPartition(cfg Config, topic string, i int32) (_ *partition, err error) {
	p := &partition{
		cfg: cfg,
		dir: dirOf(cfg, topic, i),
		producers: idempotence.New(idempotence.Config{
			Expiration:   cfg.ExpireAfter,
			MaxProducers: cfg.MaxProducers,
			LogID:        logID(topic, i),
		}),
		waiters: make(map[chan<- struct{}]struct{}),
	}
	p.log, err = segment.Open(p.dir, segment.Options{NoSync: cfg.NoSync, OpenFile: cfg.OpenFile})
	if err != nil {
		return nil, err
	}
	if p.snapshots, err = idempotence.OpenSnapshotDir(p.dir, 0); err != nil {
		return nil, errors.Join(err, p.log.Close())
	}
	if err := errors.Join(p.recover(), durable.SyncDir(cfg.Dir)); err != nil {
		return nil, errors.Join(err, p.close(false))
	}
	return p, nil
}

// logID keeps a partition from taking the snapshots of another one for its own,
// should files be put into the wrong directory.
func logID(topic string, i int32) (id [16]byte) {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s-%d", topic, i))
	copy(id[:], sum[:])
	return id
}

// recover loads the newest good snapshot and replays the log from there on.
func (p *partition) recover() error {
	// What is past the end of the log is of records that a crash has lost, and
	// would pass for a snapshot of what takes their offsets.
	end := p.log.End()
	if err := p.snapshots.DropAfter(end); err != nil {
		return err
	}
	loaded, err := p.snapshots.Load(p.producers, end)
	if err != nil {
		// Nothing was loaded. The log is all here, and tells everything.
		p.cfg.Log.Warn("no snapshot could be read", "log", p.dir, "err", err)
	}
	for _, err := range loaded.PassedOver {
		p.cfg.Log.Warn("snapshot passed over", "log", p.dir, "err", err)
	}
	if err := p.log.Replay(loaded.EndOffset, p.producers.ReplayLog); err != nil {
		return err
	}
	p.cfg.Log.Info("recovered", "log", p.dir, "snapshot", loaded.EndOffset, "end", end, "producers", p.producers.Len())
	return nil
}

// saveInBackground saves a snapshot of this moment, without anybody waiting for
// it. While the one before is still being saved there is none; the next roll
// will do.
func (p *partition) saveInBackground() {
	if p.cfg.WithoutDeduplication || !p.saving.TryLock() {
		return
	}
	s := p.producers.Snapshot()
	p.background.Go(func() {
		defer p.saving.Unlock()
		if err := p.snapshots.Save(s); err != nil {
			p.cfg.Log.Warn("snapshot not saved", "log", p.dir, "err", err)
		}
	})
}

// close waits for appends under way and closes the files; with a clean end, the
// log is synced and a snapshot saved, so that the next start need read nothing.
func (p *partition) close(clean bool) error {
	p.background.Wait()
	var err error
	if clean {
		err = p.finish()
	}
	return errors.Join(err, p.log.Close(), p.snapshots.Close())
}

// finish saves what there is to save. Without deduplication that is nothing: the
// manager does not know what is in the log, and must learn it from there.
func (p *partition) finish() error {
	if err := p.log.Sync(); err != nil {
		return err
	}
	if p.cfg.WithoutDeduplication || p.offline != nil {
		return nil
	}
	return p.snapshots.Save(p.producers.Snapshot())
}
