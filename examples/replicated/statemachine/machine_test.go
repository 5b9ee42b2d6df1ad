package statemachine

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

// batch is a batch of producer 7.
func batch(epoch int16, baseSequence int32, records int) []byte {
	return segmenttest.Batch(7, epoch, baseSequence, make([]string, records)...)
}

// A transcript is commands and what they are answered.
type transcript []struct {
	what    string
	command []byte
	want    string // "append OFFSET", "duplicate OFFSET", "ids FIRST", "ok" or an error
}

func describe(command []byte, a Answer) string {
	switch {
	case a.Err != nil:
		return a.Err.Error()
	case command[0] == batchCommand || command[0] == markerCommand:
		return fmt.Sprint(strings.ToLower(a.Result.Verdict.String()), " ", a.Result.BaseOffset)
	case command[0] == producerIDsCommand:
		return fmt.Sprint("ids ", a.ProducerID)
	}
	return "ok"
}

// play applies the commands, all in one group or each alone, and compares the
// answers by their beginnings.
func (steps transcript) play(t *testing.T, m *Machine, together bool) {
	t.Helper()
	var commands [][]byte
	for _, s := range steps {
		commands = append(commands, s.command)
	}
	var answers []Answer
	if together {
		answers = applyAll(m, entries(commands...))
	} else {
		for _, e := range entries(commands...) {
			answers = append(answers, m.Apply(e).(Answer))
		}
	}
	for i, s := range steps {
		if got := describe(s.command, answers[i]); !strings.HasPrefix(got, s.want) {
			t.Errorf("%d, %s: %q, want %q", i+1, s.what, got, s.want)
		}
	}
}

// Both groupings of every transcript, and the same state after both.
func (steps transcript) test(t *testing.T) {
	t.Helper()
	one, each := newMachine(t), newMachine(t)
	steps.play(t, one, true)
	steps.play(t, each, false)
	if !bytes.Equal(snapshotOf(t, one), snapshotOf(t, each)) {
		t.Error("the state depends on how commands are grouped")
	}
}

func TestBatches(t *testing.T) {
	transcript{
		{"no topic yet", Batch(0, batch(0, 0, 1)), "statemachine: unknown partition"},
		{"topic", CreateTopic("numbers", TopicConfig{Partitions: 2}), "ok"},
		{"again", CreateTopic("numbers", TopicConfig{Partitions: 9}), "ok"},
		{"first batch", Batch(0, batch(0, 0, 3)), "append 0"},
		{"its copy, perhaps in the same group", Batch(0, batch(0, 0, 3)), "duplicate 0"},
		{"one that is ahead", Batch(0, batch(0, 5, 2)), "idempotence: out of order"},
		{"the missing one", Batch(0, batch(0, 3, 2)), "append 3"},
		{"now it is its turn", Batch(0, batch(0, 5, 2)), "append 5"},
		{"sequences count by partition", Batch(1, batch(0, 7, 1)), "idempotence: unknown producer"},
		{"another partition", Batch(1, batch(0, 0, 1)), "append 0"},
		{"a new epoch", Batch(0, batch(1, 0, 1)), "append 7"},
		{"the old one", Batch(0, batch(0, 7, 1)), "idempotence: fenced"},
		{"not idempotent", Batch(0, segmenttest.Batch(idempotence.NoProducerID, -1, -1, "a", "b")), "append 8"},
		{"not idempotent, again", Batch(0, segmenttest.Batch(idempotence.NoProducerID, -1, -1, "a", "b")), "append 10"},
		{"ids", ProducerIDs(1000), "ids 0"},
		{"more ids", ProducerIDs(5), "ids 1000"},
	}.test(t)
}

func TestTransactions(t *testing.T) {
	steps := transcript{
		{"topic", CreateTopic("numbers", TopicConfig{Partitions: 1}), "ok"},
		{"a batch", Batch(0, transactional(batch(0, 0, 2))), "append 0"},
		{"its copy", Batch(0, transactional(batch(0, 0, 2))), "duplicate 0"},
		{"another producer's", Batch(0, segmenttest.Batch(8, 0, 0, "a")), "append 2"},
		{"the end, with version 2", Marker(0, 2, marker(7, 1, 5, true)), "append 3"},
		{"the end once more", Marker(0, 2, marker(7, 1, 5, true)), "append 4"},
		{"an older coordinator", Marker(0, 2, marker(7, 2, 4, false)), "idempotence: fenced by a newer coordinator"},
		{"the next transaction", Batch(0, transactional(batch(1, 0, 1))), "append 5"},
		{"an end that is too old", Marker(0, 0, marker(7, 0, 5, true)), "idempotence: fenced"},
		{"no such partition", Marker(1, 0, marker(7, 1, 5, true)), "statemachine: unknown partition"},
		{"no marker", Marker(0, 0, batch(1, 1, 1)), "idempotence: "},
		{"half a marker", Marker(0, 0, marker(7, 1, 5, true)[:62]), "idempotence: corrupt"},
	}
	steps.test(t)
	m := newMachine(t)
	steps.play(t, m, false)
	p, err := m.Partition("numbers", 0)
	if err != nil {
		t.Fatal(err)
	}
	if end := p.LastStableOffset(); end != 5 {
		t.Errorf("stable up to %d, want 5", end)
	}
	restored := restored(t, snapshotOf(t, m))
	if p, err := restored.Partition("numbers", 0); err != nil || p.LastStableOffset() != 5 {
		t.Errorf("restored, and stable up to %d, want 5; %v", p.LastStableOffset(), err)
	}
}

// TestBadCommands: what makes no sense is answered with an error and changes
// nothing.
func TestBadCommands(t *testing.T) {
	large := make([]byte, 64<<20)
	copy(large, batch(0, 0, 1))
	topic := CreateTopic("numbers", TopicConfig{Partitions: 1})
	transcript{
		{"topic", topic, "ok"},
		{"nothing", nil, "statemachine: bad command: empty"},
		{"unknown", []byte{99, 1, 2, 3}, "statemachine: bad command: 99"},
		{"a batch without a partition", []byte{batchCommand, 0, 0}, "statemachine: bad command"},
		{"no batch", Batch(0, nil), "idempotence: corrupt record batch"},
		{"half a header", Batch(0, batch(0, 0, 1)[:30]), "idempotence: corrupt record batch"},
		{"half a batch", Batch(0, batch(0, 0, 1)[:64]), "statemachine: bad command"},
		{"two batches", Batch(0, append(batch(0, 0, 1), batch(0, 1, 1)...)), "statemachine: bad command"},
		{"a marker", Batch(0, marker(7, 0, 0, true)), "statemachine: bad command"},
		{"64 MiB", Batch(0, large), "statemachine: record batch too large"},
		{"no such partition", Batch(1, batch(0, 0, 1)), "statemachine: unknown partition"},
		{"the largest partition", Batch(1<<32-1, batch(0, 0, 1)), "statemachine: unknown partition"},
		{"a time cut short", Expire(at(1))[:8], "statemachine: bad command"},
		{"a time too long", append(Expire(at(1)), 0), "statemachine: bad command"},
		{"no ids", ProducerIDs(0), "statemachine: bad command"},
		{"a topic cut short", topic[:10], "statemachine: bad command"},
		{"a topic without a name", topic[:1+topicConfigSize], "statemachine: bad topic name"},
		{"a topic in another directory", CreateTopic("../numbers", TopicConfig{Partitions: 1}), "statemachine: bad topic name"},
		{"a topic without partitions", CreateTopic("none", TopicConfig{}), "statemachine: bad command"},
		{"a topic with too many", CreateTopic("many", TopicConfig{Partitions: MaxPartitions + 1}), "statemachine: bad command"},
		{"too many together", CreateTopic("many", TopicConfig{Partitions: MaxPartitions}), "statemachine: too many partitions"},
		{"an unknown policy", CreateTopic("odd", TopicConfig{Partitions: 1, UnknownProducer: 3}), "statemachine: bad command"},
		{"an unknown mode", CreateTopic("odd", TopicConfig{Partitions: 1, Deduplication: 3}), "statemachine: bad command"},
		{"no harm done", Batch(0, batch(0, 0, 1)), "append 0"},
	}.test(t)
}

// TestNoProducerIDsLeft: the ids end before they begin again.
func TestNoProducerIDsLeft(t *testing.T) {
	m := newMachine(t)
	m.state.nextProducerID = 1<<63 - 10
	transcript{
		{"more than there are", ProducerIDs(10), "statemachine: no producer ids left"},
		{"the last ones", ProducerIDs(9), fmt.Sprint("ids ", int64(1<<63-10))},
		{"one more", ProducerIDs(1), "statemachine: no producer ids left"},
	}.play(t, m, true)
}

// TestChangedEntryStops: a batch whose bytes are not those that were proposed is
// not judged.
func TestChangedEntryStops(t *testing.T) {
	m := newMachine(t)
	changed := batch(0, 0, 1)
	changed[len(changed)-1] ^= 1
	defer func() {
		if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), "entry 2") {
			t.Errorf("recovered %v, want a panic about entry 2", r)
		}
	}()
	applyAll(m, entries(CreateTopic("numbers", TopicConfig{Partitions: 1}), Batch(0, changed)))
}

// TestLogThatCannotFollowStops: when the log cannot be written there is no
// answer, since the other replicas have given one.
func TestLogThatCannotFollowStops(t *testing.T) {
	m := newMachine(t)
	log := entries(CreateTopic("numbers", TopicConfig{Partitions: 1}), Batch(0, batch(0, 0, 1)))
	m.ApplyBatch(log[:1])
	p, err := m.Partition("numbers", 0)
	if err != nil {
		t.Fatal(err)
	}
	p.Log.Close()
	defer func() {
		if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), "partition 0, up to entry 2") {
			t.Errorf("recovered %v, want a panic about entry 2", r)
		}
		// The files are closed; what Close says of that is of no interest.
		m.state, err = m.newState()
	}()
	m.ApplyBatch(log[1:])
}

// TestAppliedAgain: what is at or below the applied index is skipped.
func TestAppliedAgain(t *testing.T) {
	m := newMachine(t)
	log := entries(CreateTopic("numbers", TopicConfig{Partitions: 1}), Batch(0, batch(0, 0, 1)), ProducerIDs(1))
	m.ApplyBatch(log)
	want := snapshotOf(t, m)
	for i, a := range m.ApplyBatch(log) {
		if a != nil {
			t.Errorf("entry %d is answered %v once more", i+1, a)
		}
	}
	if !bytes.Equal(snapshotOf(t, m), want) {
		t.Error("commands were applied twice")
	}
}

// TestOtherEntries: raft passes on its configuration, which is not a command.
func TestOtherEntries(t *testing.T) {
	m := newMachine(t)
	log := entries([]byte("configuration"), ProducerIDs(1))
	log[0].Type = raft.LogConfiguration
	answers := m.ApplyBatch(log)
	if answers[0] != nil || answers[1] != any(Answer{}) {
		t.Errorf("answers %v", answers)
	}
	if m.state.applied != 2 {
		t.Errorf("applied %d, want 2", m.state.applied)
	}
}

// TestExpire: the clock is that of the commands.
func TestExpire(t *testing.T) {
	m := newMachine(t)
	if _, known := m.Clock(); known {
		t.Error("a new machine knows the time")
	}
	transcript{
		{"topic", CreateTopic("numbers", TopicConfig{Partitions: 1, Expiration: time.Minute}), "ok"},
		{"the time", Expire(at(1000)), "ok"},
		{"a batch", Batch(0, batch(0, 0, 1)), "append 0"},
		{"a little earlier", Expire(at(950)), "ok"},
		{"not yet", Expire(at(1059)), "ok"},
		{"still known", Batch(0, batch(0, 0, 1)), "duplicate 0"},
		{"later", Expire(at(1200)), "ok"},
		{"forgotten", Batch(0, batch(0, 1, 1)), "idempotence: unknown producer"},
	}.play(t, m, false)
	if now, _ := m.Clock(); !now.Equal(at(1200)) {
		t.Errorf("the clock shows %v", now)
	}
}

// TestCheck: only answers that stay true are final.
func TestCheck(t *testing.T) {
	m := newMachine(t)
	applyAll(m, entries(
		CreateTopic("numbers", TopicConfig{Partitions: 1}),
		Batch(0, batch(1, 0, 2)),
	))
	p, err := m.Partition("numbers", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what  string
		batch idempotence.Batch
		err   error
		final bool
	}{
		{"the next", idempotence.Batch{ProducerID: 7, Epoch: 1, BaseSequence: 2, Count: 1}, nil, false},
		{"a copy", idempotence.Batch{ProducerID: 7, Epoch: 1, BaseSequence: 0, Count: 2}, nil, true},
		{"a gap", idempotence.Batch{ProducerID: 7, Epoch: 1, BaseSequence: 3, Count: 1}, idempotence.ErrOutOfOrderSequence, false},
		{"unknown", idempotence.Batch{ProducerID: 8, Epoch: 0, BaseSequence: 3, Count: 1}, idempotence.ErrUnknownProducer, false},
		{"fenced", idempotence.Batch{ProducerID: 7, Epoch: 0, BaseSequence: 0, Count: 1}, idempotence.ErrFenced, true},
		{"invalid", idempotence.Batch{ProducerID: 7, Epoch: -1, BaseSequence: 0, Count: 1}, idempotence.ErrInvalidBatch, true},
	} {
		if _, final, err := p.Check(c.batch); final != c.final || !errors.Is(err, c.err) {
			t.Errorf("%s: final %v, error %v", c.what, final, err)
		}
	}
}

// TestRestoreRefuses: a snapshot that is cut off, goes on, or has a byte changed
// where that can be told leaves the state as it is.
func TestRestoreRefuses(t *testing.T) {
	m := newMachine(t)
	applyAll(m, entries(
		CreateTopic("numbers", TopicConfig{Partitions: 2}),
		Batch(0, batch(0, 0, 2)), Batch(1, batch(0, 0, 3)), Batch(0, batch(0, 2, 1)),
	))
	whole := snapshotOf(t, m)
	other := newMachine(t)
	applyAll(other, entries(ProducerIDs(5)))
	before := snapshotOf(t, other)
	refused := func(what string, p []byte) {
		if err := other.Restore(io.NopCloser(bytes.NewReader(p))); err == nil {
			t.Errorf("%s: restored", what)
		}
		if !bytes.Equal(snapshotOf(t, other), before) {
			t.Fatalf("%s: the state has changed", what)
		}
	}
	for n := 0; n < len(whole); n += 11 {
		refused(fmt.Sprintf("%d bytes", n), whole[:n])
	}
	refused("a byte more", append(bytes.Clone(whole), 0))
	for _, at := range []int{0, 11, 39, len(whole) - 1, len(whole) - 200} {
		damaged := bytes.Clone(whole)
		damaged[at] ^= 0x40
		refused(fmt.Sprintf("byte %d", at), damaged)
	}
	if err := other.Restore(io.NopCloser(bytes.NewReader(whole))); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(snapshotOf(t, other), whole) {
		t.Error("the state is not that of the snapshot")
	}
}

// TestSnapshotBesideApply: a snapshot is of the moment it was taken at, also
// when it is written later, and after the state was replaced.
func TestSnapshotBesideApply(t *testing.T) {
	m := newMachine(t)
	log := entries(CreateTopic("numbers", TopicConfig{Partitions: 1}), Batch(0, batch(0, 0, 1)), Batch(0, batch(0, 1, 1)))
	m.ApplyBatch(log[:2])
	want := snapshotOf(t, m)
	x, err := m.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	m.ApplyBatch(log[2:])
	if err := m.Restore(io.NopCloser(bytes.NewReader(snapshotOf(t, m)))); err != nil {
		t.Fatal(err)
	}
	var s sink
	if err := x.Persist(&s); err != nil {
		t.Fatal(err)
	}
	x.Release()
	if !bytes.Equal(s.Bytes(), want) {
		t.Error("the snapshot is of another moment")
	}
}
