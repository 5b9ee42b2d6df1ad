package statemachine

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

func newMachine(t *testing.T) *Machine {
	t.Helper()
	m, err := New(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// entries numbers commands as a raft log does, from 1 on.
func entries(commands ...[]byte) []*raft.Log {
	var log []*raft.Log
	for i, c := range commands {
		log = append(log, &raft.Log{Index: uint64(i + 1), Type: raft.LogCommand, Data: c})
	}
	return log
}

// applyAll applies entries in one group.
func applyAll(m *Machine, log []*raft.Log) []Answer {
	var answers []Answer
	for _, a := range m.ApplyBatch(log) {
		answers = append(answers, a.(Answer))
	}
	return answers
}

// applyGrouped applies entries in groups of random sizes.
func applyGrouped(m *Machine, log []*raft.Log, rng *rand.Rand) []Answer {
	var answers []Answer
	for len(log) > 0 {
		n := 1 + rng.IntN(min(len(log), 40))
		answers = append(answers, applyAll(m, log[:n])...)
		log = log[n:]
	}
	return answers
}

// A sink keeps a snapshot in memory.
type sink struct{ bytes.Buffer }

func (*sink) ID() string    { return "test" }
func (*sink) Cancel() error { return nil }
func (*sink) Close() error  { return nil }

// snapshotOf returns the snapshot of a machine.
func snapshotOf(t *testing.T, m *Machine) []byte {
	t.Helper()
	x, err := m.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	defer x.Release()
	var s sink
	if err := x.Persist(&s); err != nil {
		t.Fatal(err)
	}
	return s.Bytes()
}

// restored returns a new machine with the state of a snapshot.
func restored(t *testing.T, snapshot []byte) *Machine {
	t.Helper()
	m := newMachine(t)
	if err := m.Restore(io.NopCloser(bytes.NewReader(snapshot))); err != nil {
		t.Fatal(err)
	}
	return m
}

func at(seconds int64) time.Time { return time.Unix(seconds, 0) }

// transactional returns a batch that is part of a transaction.
func transactional(batch []byte) []byte {
	return segmenttest.Edit(batch, func(b *kmsg.RecordBatch) { b.Attributes |= 0x10 })
}

// marker returns the control batch that ends a transaction.
func marker(producerID int64, epoch int16, coordinatorEpoch int32, commit bool) []byte {
	kind := byte(0)
	if commit {
		kind = 1
	}
	r := kmsg.Record{Key: []byte{0, 0, 0, kind}, Value: binary.BigEndian.AppendUint32([]byte{0, 0}, uint32(coordinatorEpoch))}
	r.Length = int32(len(r.AppendTo(nil)) - 1)
	return segmenttest.Edit(segmenttest.Batch(producerID, epoch, -1, ""), func(b *kmsg.RecordBatch) {
		b.Attributes |= 0x10 | 0x20
		b.Records = r.AppendTo(nil)
	})
}
