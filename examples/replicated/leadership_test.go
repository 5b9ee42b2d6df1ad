package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/replicated/node"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

// A rig is a cluster with a topic of one partition, and a client that sends what
// it is told to.
type rig struct {
	*testing.T
	ctx     context.Context
	cluster *cluster
	client  *kgo.Client
}

func newRig(t *testing.T, cfg node.Config) *rig {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	c, err := startCluster(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.close(); err != nil {
			t.Error(err)
		}
	})
	cl, err := kgo.NewClient(kgo.SeedBrokers(c.seeds()...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	index, err := c.propose(ctx, statemachine.CreateTopic(topic, statemachine.TopicConfig{Partitions: 1}))
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t, ctx, c, cl}
	r.reach(index)
	if err := cl.Ping(ctx); err != nil { // or it does not know the nodes by their ids
		t.Fatal(err)
	}
	return r
}

// reach waits until all nodes have applied what is up to an index.
func (r *rig) reach(index uint64) {
	r.Helper()
	for _, m := range r.cluster.members {
		if err := m.running().Machine().WaitReached(r.ctx, index); err != nil {
			r.Fatalf("node %d: %v", m.id, err)
		}
	}
}

// leader waits for the leader.
func (r *rig) leader() *member {
	r.Helper()
	m, err := r.cluster.awaitLeader(r.ctx)
	if err != nil {
		r.Fatal(err)
	}
	return m
}

// lead makes a member the leader.
func (r *rig) lead(m *member) {
	r.Helper()
	for r.leader() != m {
		from := r.leader().running().Raft()
		servers := from.GetConfiguration().Configuration().Servers
		_ = from.LeadershipTransferToServer(servers[m.id-1].ID, servers[m.id-1].Address).Error()
		if r.ctx.Err() != nil {
			r.Fatal(r.ctx.Err())
		}
	}
}

// send sends a batch of one record of producer 7 to a node.
func (r *rig) send(to *member, sequence int32, timeout time.Duration) (code int16, offset int64) {
	r.Helper()
	code, offset, err := produceTo(r.ctx, r.client, to.id, 0, segmenttest.Batch(7, 0, sequence, "a"), timeout)
	if err != nil {
		r.Fatal(err)
	}
	return code, offset
}

// expect fails the test unless a batch is answered with an offset.
func (r *rig) expect(to *member, sequence int32, offset int64) {
	r.Helper()
	if code, got := r.send(to, sequence, 10*time.Second); code != 0 || got != offset {
		r.Errorf("node %d: sequence %d is answered with code %d and offset %d, want offset %d", to.id, sequence, code, got, offset)
	}
}

// end returns where the partition ends on a node.
func (r *rig) end(m *member) int64 {
	r.Helper()
	p, err := m.running().Machine().Partition(topic, 0)
	if err != nil {
		r.Fatal(err)
	}
	return p.Log.End()
}

// TestCommittedAfterTimeout: a batch whose producer was told that time was up is
// committed later, and its retry gets the offset of the first copy.
func TestCommittedAfterTimeout(t *testing.T) {
	r := newRig(t, node.Config{ElectionTimeout: 2 * time.Second})
	leader := r.leader()
	r.expect(leader, 0, 0)
	for _, m := range r.cluster.others(leader) { // they answer heartbeats all the same
		m.disk.delay.Store(int64(500 * time.Millisecond))
	}
	if code, _ := r.send(leader, 1, 50*time.Millisecond); code != kerr.RequestTimedOut.Code {
		t.Fatalf("code %d, want %d", code, kerr.RequestTimedOut.Code)
	}
	for _, m := range r.cluster.members {
		if end := r.end(m); end > 1 {
			t.Errorf("node %d: the log ends at %d before a majority has the batch", m.id, end)
		}
	}
	// The retry may come before or after the first copy is applied.
	if code, _ := r.send(leader, 1, 50*time.Millisecond); code != kerr.RequestTimedOut.Code {
		t.Fatalf("code %d, want %d", code, kerr.RequestTimedOut.Code)
	}
	for _, m := range r.cluster.members {
		m.disk.delay.Store(0)
	}
	r.expect(leader, 1, 1)
	r.expect(leader, 2, 2)
	if end := r.end(leader); end != 3 {
		t.Errorf("the log ends at %d, want 3", end)
	}
}

// TestTwoLeaders: a leader that is cut off, and does not know yet, appends
// nothing; what it says of a batch that is committed is true.
func TestTwoLeaders(t *testing.T) {
	r := newRig(t, node.Config{ElectionTimeout: time.Second})
	old := r.leader()
	r.expect(old, 0, 0)
	for _, m := range r.cluster.others(old) {
		old.links[m.id].Close()
		m.links[old.id].Close()
	}
	r.expect(old, 0, 0) // it has to know that one, whoever leads
	if code, _ := r.send(old, 1, 100*time.Millisecond); code != kerr.RequestTimedOut.Code && code != kerr.NotLeaderForPartition.Code {
		t.Errorf("a new batch is answered with code %d by a leader that is cut off", code)
	}
	if end := r.end(old); end != 1 {
		t.Errorf("the log of the old leader ends at %d, want 1", end)
	}
	successor := old
	for successor == old {
		for _, m := range r.cluster.others(old) {
			if m.running().Ready() {
				successor = m
			}
		}
		if r.ctx.Err() != nil {
			t.Fatal("no new leader")
		}
		time.Sleep(5 * time.Millisecond)
	}
	r.expect(successor, 0, 0)
	r.expect(successor, 1, 1)
	r.expect(successor, 2, 2)
	if code, _ := r.send(old, 3, 100*time.Millisecond); code != kerr.NotLeaderForPartition.Code && code != kerr.RequestTimedOut.Code {
		t.Errorf("a new batch is answered with code %d by the old leader", code)
	}
	if err := r.cluster.heal(); err != nil {
		t.Fatal(err)
	}
	r.reach(successor.running().Raft().CommitIndex() - 1)
	r.expect(r.leader(), 3, 3)
	r.reach(r.leader().running().Raft().CommitIndex() - 1)
	if end := r.end(old); end < 3 {
		t.Errorf("the log of the old leader ends at %d", end)
	}
}

// TestProducerOutlivesItsLeaders: each leader knows what the ones before it have
// appended, from the first moment on.
func TestProducerOutlivesItsLeaders(t *testing.T) {
	r := newRig(t, node.Config{ElectionTimeout: time.Second})
	for i := range int64(6) {
		m := r.cluster.members[i%clusterSize]
		r.lead(m)
		if i > 0 {
			r.expect(m, int32(i-1), i-1)
		}
		r.expect(m, int32(i), i)
	}
}

// TestProducerIDsFromAnyNode: clients ask any node for a producer id, and some keep
// asking one that does not lead.
func TestProducerIDsFromAnyNode(t *testing.T) {
	r := newRig(t, node.Config{ElectionTimeout: time.Second})
	r.leader()
	seen := make(map[int64]bool)
	for range 3 {
		for _, m := range r.cluster.members {
			resp, err := r.client.Broker(int(m.id)).Request(r.ctx, kmsg.NewPtrInitProducerIDRequest())
			if err != nil {
				t.Fatal(err)
			}
			id := resp.(*kmsg.InitProducerIDResponse)
			if id.ErrorCode != 0 || id.ProducerEpoch != 0 || seen[id.ProducerID] {
				t.Errorf("node %d answers %+v", m.id, id)
			}
			seen[id.ProducerID] = true
		}
	}
}

// TestTopicFromAnyNode: clients ask any node to create a topic, too.
func TestTopicFromAnyNode(t *testing.T) {
	r := newRig(t, node.Config{ElectionTimeout: time.Second})
	r.leader()
	for _, m := range r.cluster.members {
		for name, want := range map[string]int16{fmt.Sprint("from-", m.id): 0, "not/a/name": kerr.InvalidTopicException.Code} {
			req := kmsg.NewPtrMetadataRequest()
			req.AllowAutoTopicCreation = true
			req.Topics = []kmsg.MetadataRequestTopic{{Topic: &name}}
			code := kerr.LeaderNotAvailable.Code
			for code == kerr.LeaderNotAvailable.Code { // until it is applied there
				resp, err := r.client.Broker(int(m.id)).Request(r.ctx, req)
				if err != nil {
					t.Fatal(err)
				}
				code = resp.(*kmsg.MetadataResponse).Topics[0].ErrorCode
			}
			if code != want {
				t.Errorf("node %d, topic %s: code %d, want %d", m.id, name, code, want)
			}
		}
	}
}

// TestBadCommandsOnThreeNodes: what makes no sense is refused to whoever proposed it,
// stops no node, and leaves all in the same state.
func TestBadCommandsOnThreeNodes(t *testing.T) {
	r := newRig(t, node.Config{ElectionTimeout: time.Second, ExpireInterval: time.Hour})
	large := make([]byte, 4<<20)
	copy(large, segmenttest.Batch(7, 0, 0, "a"))
	for what, command := range map[string][]byte{
		"nothing":           nil,
		"unknown":           {99, 1, 2, 3},
		"half a batch":      statemachine.Batch(0, segmenttest.Batch(7, 0, 0, "a")[:40]),
		"no such partition": statemachine.Batch(5, segmenttest.Batch(7, 0, 0, "a")),
		"a batch of 4 MiB":  statemachine.Batch(0, large),
	} {
		for r.ctx.Err() == nil {
			proposed := r.leader().running().Raft().Apply(command, time.Second)
			if proposed.Error() != nil { // another leader, which is to judge it
				continue
			}
			if proposed.Response().(statemachine.Answer).Err == nil {
				t.Errorf("%s: applied", what)
			}
			break
		}
	}
	code, offset := kerr.NotLeaderForPartition.Code, int64(-1)
	for code == kerr.NotLeaderForPartition.Code {
		code, offset = r.send(r.leader(), 0, 10*time.Second)
	}
	if code != 0 || offset != 0 {
		t.Errorf("a batch is answered with code %d and offset %d", code, offset)
	}
	if err := r.cluster.settle(r.ctx); err != nil {
		t.Fatal(err)
	}
	if err := r.cluster.compareReplicas(); err != nil {
		t.Error(err)
	}
}

// TestClockFarAhead: a leader whose clock is years ahead moves the clock of the
// producers on by ten minutes at a time, and they are not forgotten.
func TestClockFarAhead(t *testing.T) {
	var wrong atomic.Int32
	r := newRig(t, node.Config{ElectionTimeout: time.Second, ExpireInterval: 200 * time.Millisecond})
	now := time.Now()
	// The nodes were started without a clock of their own; they get one now.
	r.cluster.clock = func(id int32) time.Time {
		if id == wrong.Load() {
			return now.AddDate(10, 0, 0)
		}
		return now
	}
	for _, m := range r.cluster.members {
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range r.cluster.members {
		if err := r.cluster.start(m); err != nil {
			t.Fatal(err)
		}
	}
	r.expect(r.leader(), 0, 0)
	machine := r.cluster.members[0].running().Machine()
	for {
		if at, ok := machine.Clock(); ok && at.Equal(now) {
			break
		}
		<-machine.Changed()
	}
	wrong.Store(r.leader().id)
	last := now
	for range 5 {
		for {
			at, _ := machine.Clock()
			if at.After(last) {
				if step := at.Sub(last); step%(10*time.Minute) != 0 || step > time.Hour {
					t.Fatalf("the clock went from %v to %v", last, at)
				}
				last = at
				break
			}
			<-machine.Changed()
		}
	}
	if last.After(now.Add(12 * time.Hour)) {
		t.Fatalf("the clock is at %v already: too late to tell", last)
	}
	r.expect(r.leader(), 0, 0)
	r.expect(r.leader(), 1, 1)
}
