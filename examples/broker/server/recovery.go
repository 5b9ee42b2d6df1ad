package server

// This file is how the state of the producers survives the broker. It is saved
// now and then, and at start it is brought up to date from the log.

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/durable"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// open opens the log and the snapshots, which are in the same directory, and
// recovers the producers, so that a retry of a batch from before the restart is
// recognised.
func (p *partition) open() error {
	if err := p.openLog(); err != nil {
		return err
	}
	var err error
	p.snapshots, err = durable.AwaitLock(idempotence.ErrSnapshotDirInUse, func() (*idempotence.SnapshotDir, error) {
		return idempotence.OpenSnapshotDir(p.dir, 0)
	})
	if err == nil {
		err = p.recover()
	}
	if err != nil {
		err = errors.Join(err, p.close(false))
		p.log = nil
		return err
	}
	p.clean = false
	return nil
}

func (p *partition) openLog() error {
	log, err := segment.Open(p.dir, segment.Options{NoSync: p.cfg.NoSync, Clean: p.clean, OpenFile: p.cfg.OpenFile})
	if err != nil {
		return err
	}
	p.log = log
	if cut := log.Cut(); cut != nil {
		p.cfg.Log.Error("log cut after an unclean stop", "log", p.dir, "segment", cut.File, "at", cut.Position,
			"bytes", cut.Bytes, "end", cut.Offset, "err", cut.Err)
	}
	return nil
}

// LogID returns the identity of a partition's log, which its snapshots bear. It
// keeps a partition from loading a snapshot of another one, if files were put
// into the wrong directory.
func LogID(topic string, i int32) (id [16]byte) {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s-%d", topic, i))
	copy(id[:], sum[:])
	return id
}

// recover recovers the producers. If that took more than the newest segment, it
// saves a snapshot, so that the next recovery does not take as long.
func (p *partition) recover() error {
	begun := time.Now()
	found, err := recoverProducers(p.producers, p.log, p.snapshots)
	if err != nil {
		return err
	}
	p.timings.recovered(time.Since(begun))
	for _, err := range found.Skipped {
		p.cfg.Log.Warn("snapshot not loaded", "log", p.dir, "err", err)
	}
	end := p.log.End()
	p.cfg.Log.Info("recovered", "log", p.dir, "snapshot", found.EndOffset, "end", end, "producers", p.producers.Len())
	replayed := end > max(found.EndOffset, p.log.Start())
	if replayed && (!found.Found || found.EndOffset < p.log.ActiveBase()) {
		p.save()
	}
	p.saved = p.saved || !replayed
	return nil
}

// recoverProducers loads the newest good snapshot of a log, and replays the log
// from there on. If no snapshot could be read it replays the whole log.
func recoverProducers(m *idempotence.ProducerStateManager, log *segment.Log, snapshots *idempotence.SnapshotDir) (idempotence.LoadResult, error) {
	// Snapshots past the end of the log are of records that a crash has lost.
	// They must not be there when other records get those offsets.
	if err := snapshots.DropAfter(log.End()); err != nil {
		return idempotence.LoadResult{}, err
	}
	found, err := snapshots.Load(m, log.Start(), log.End())
	if err != nil {
		found.Skipped = append(found.Skipped, err)
	}
	m.Advance(log.Start()) // where there is neither a snapshot nor a batch
	if err := log.Replay(found.EndOffset, m.ReplayLog); err != nil {
		return found, err
	}
	m.ReplayedTo(log.End())
	return found, nil
}

// saveInBackground saves a snapshot of this moment while the broker goes on. If
// one is still being saved, there is none until the next roll.
func (p *partition) saveInBackground() {
	if p.cfg.WithoutDeduplication || !p.saving.TryLock() {
		return
	}
	s := p.producers.Snapshot()
	p.background.Go(func() {
		defer p.saving.Unlock()
		if err := p.saveSnapshot(s); err != nil {
			p.cfg.repeated.Warn("snapshot not saved", "log", p.dir, "err", err)
		}
	})
}

// save saves a snapshot while nothing is appended.
func (p *partition) save() {
	if err := p.saveSnapshot(p.producers.Snapshot()); err != nil {
		p.cfg.repeated.Warn("snapshot not saved", "log", p.dir, "err", err)
		return
	}
	p.saved = true
}

// close waits for the writer and closes the files. With inOrder it first syncs
// the log and saves a snapshot, so that the next start has nothing to replay.
func (p *partition) close(inOrder bool) error {
	p.background.Wait()
	if p.log == nil {
		return nil
	}
	var err error
	if inOrder && p.offline == nil {
		err = p.finish()
		p.clean = err == nil
	}
	err = errors.Join(err, p.log.Close())
	if p.snapshots != nil {
		err = errors.Join(err, p.snapshots.Close())
	}
	return err
}

// finish syncs the log and saves a snapshot. Without deduplication there is
// none: the manager does not know what is in the log and must learn it from
// there.
func (p *partition) finish() error {
	if err := p.log.Sync(); err != nil {
		return err
	}
	if p.cfg.WithoutDeduplication || p.saved {
		return nil
	}
	return p.saveSnapshot(p.producers.Snapshot())
}

func (p *partition) saveSnapshot(s *idempotence.Snapshot) error {
	begun := time.Now()
	err := p.snapshots.Save(s)
	p.timings.saved(begun, err)
	return err
}
