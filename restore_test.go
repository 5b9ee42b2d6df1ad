package idempotence

import (
	"bytes"
	"sync"
	"testing"
	"time"
)

// TestF14_RestoredSnapshotKnowsTheLogsEnd: a broker that keeps snapshots elsewhere
// need not keep the log's end with them. Restore reads it, and a Snapshot taken then says
// how far the log must reach.
func TestF14_RestoredSnapshotKnowsTheLogsEnd(t *testing.T) {
	m := New(Config{})
	settled(t, m.Commit(31, 0, 0, 5, 0))
	r, _, err := m.Reserve(Batch{ProducerID: 32, Count: 2})
	settled(t, err)
	settled(t, m.Commit(31, 0, 5, 3, 7))
	var kept bytes.Buffer
	if _, err := m.Snapshot().WriteTo(&kept); err != nil {
		t.Fatal(err)
	}
	settled(t, r.Commit(5))

	n := New(Config{})
	settled(t, n.Restore(&kept))
	if s := n.Snapshot(); s.EndOffset() != 5 || s.LogEndOffset() != 10 {
		t.Errorf("the snapshot ends at %d of a log that reaches %d, want 5 and 10", s.EndOffset(), s.LogEndOffset())
	}
	for _, l := range []logged{
		{batch: Batch{ProducerID: 32, Count: 2}, base: 5},
		{batch: Batch{ProducerID: 31, BaseSequence: 5, Count: 3}, base: 7},
		{batch: Batch{ProducerID: 32, BaseSequence: 2, Count: 2}, base: 10},
	} {
		settled(t, apply(n, l))
	}
	if s := n.Snapshot(); s.EndOffset() != 12 || s.LogEndOffset() != 12 {
		t.Errorf("after the replay a snapshot ends at %d of %d, want 12 of 12", s.EndOffset(), s.LogEndOffset())
	}
}

// TestConcurrentRestores: a restore that replaces the state races with nothing that
// another one, Expire or a SnapshotDir reads.
func TestConcurrentRestores(t *testing.T) {
	m := logOf(t, 5)
	ours, dir := encoded(t, m), openDisk(t, newDisk(), 2)
	if err := dir.Save(m.Snapshot()); err != nil {
		t.Fatal(err)
	}
	kafka := inKafka(t, m)
	var running sync.WaitGroup
	for _, call := range []func() error{
		func() error { return m.Restore(bytes.NewReader(ours)) },
		func() error { return m.RestoreKafka(bytes.NewReader(kafka), 5) },
		func() error { _, err := dir.Load(m, 0, 5); return err },
		func() error { m.Expire(time.Unix(0, 0)); return nil },
	} {
		running.Add(1)
		go func() {
			defer running.Done()
			for range 100 {
				if err := call(); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	running.Wait()
}
