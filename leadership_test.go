package idempotence

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file is exactly once across a change of leader. Two nodes keep a
// partition each. The leader reserves a batch, appends it to its log, and
// commits and acknowledges it once the other node has it; the follower takes
// over the leader's log by Replay. Leadership moves while appends are in flight:
// the follower goes on with what it has, and the old leader learns of it later,
// having appended more meanwhile that will never be acknowledged. It abandons
// its reservations, cuts its log back to where the two part, and follows. Nodes
// crash, and writes fail. The clients, and what must hold in the end, are those
// of endtoend_test.go.

var errNotLeader = errors.New("not the leader")

// cluster is two nodes, and clients and a network as in the world of one.
type cluster struct {
	*world
	nodes  [2]*node
	leader int // by decree; the other one may not have heard of it
	// common is where the logs of the two part while the old leader has not
	// heard.
	common int64
}

// node is one replica.
type node struct {
	w       *world
	m       *ProducerStateManager
	log     []clusterEntry
	leads   bool  // as it believes
	hw      int64 // up to which the other node has the log, as it knows
	pending []*clusterAppend
	saved   []savedNode
}

// clusterEntry is a batch in a log.
type clusterEntry struct {
	request request
	base    int64
}

func (e clusterEntry) end() int64 { return e.base + int64(e.request.batch.Count) }

// clusterAppend is an append in flight.
type clusterAppend struct {
	clusterEntry
	r *Reservation
}

// savedNode is a snapshot of a node whose log ended at logEnd, as the manager
// knew it.
type savedNode struct {
	bytes       []byte
	end, logEnd int64
}

func newCluster(t rapid.TB, c chooser, clients int) *cluster {
	cl := &cluster{world: newWorld(t, c, clients)}
	for i := range cl.nodes {
		cl.nodes[i] = &node{w: cl.world, m: New(Config{}), leads: i == 0}
	}
	return cl
}

// clusterHappenings is what can happen, the frequent things more than once.
var clusterHappenings = []func(*cluster){
	wire((*world).sendNew), wire((*world).sendNew), wire((*world).sendNew), wire((*world).sendNew),
	(*cluster).arrive, (*cluster).arrive, (*cluster).arrive, (*cluster).arrive, (*cluster).arrive,
	(*cluster).replicate, (*cluster).replicate, (*cluster).replicate, (*cluster).replicate,
	(*cluster).settle, (*cluster).settle, (*cluster).settle, (*cluster).settle,
	wire((*world).deliverReply), wire((*world).deliverReply), wire((*world).deliverReply),
	wire((*world).resend), wire((*world).resend),
	wire((*world).loseRequest), wire((*world).duplicateRequest),
	wire((*world).loseReply), wire((*world).duplicateReply),
	wire((*world).giveUp),
	(*cluster).failWrite, (*cluster).moveLeadership, (*cluster).hear, (*cluster).crash, (*cluster).save, (*cluster).verify,
}

func wire(f func(*world)) func(*cluster) {
	return func(c *cluster) { f(c.world) }
}

// run lets things happen, then heals everything and reads the log.
func (c *cluster) run(steps int) {
	for step := range steps {
		clusterHappenings[c.c.pick(len(clusterHappenings))](c)
		audit(c.t, c.nodes[step%2].m)
	}
	c.heal()
	c.verify()
	for _, e := range c.nodes[c.leader].log {
		c.world.log = append(c.world.log, e.request.records...)
	}
	c.readLog()
}

func (c *cluster) other() *node { return c.nodes[1-c.leader] }

// arrive delivers a request to a node, mostly to the leader.
func (c *cluster) arrive() {
	r, ok := takeAny(c.c, &c.requests)
	if !ok {
		return
	}
	n := c.nodes[c.leader]
	if c.c.pick(4) == 3 {
		n = c.other()
	}
	c.produce(n, r)
}

// produce is the produce handler. What it appends it answers later.
func (c *cluster) produce(n *node, r request) {
	if !n.leads {
		c.met["not leader"]++
		c.answer(r, 0, errNotLeader)
		return
	}
	reservation, res, err := n.m.Reserve(r.batch)
	switch {
	case err != nil:
		c.met[refusalName(err)]++
		c.answer(r, 0, err)
	case res.Verdict == Duplicate && res.BaseOffset+int64(r.batch.Count) > n.hw:
		c.met["duplicate not replicated"]++
		c.answer(r, 0, ErrInFlight)
	case res.Verdict == Duplicate:
		c.met["duplicate"]++
		c.answer(r, res.BaseOffset, nil)
	default:
		e := clusterEntry{r, n.end()}
		n.log = append(n.log, e)
		n.pending = append(n.pending, &clusterAppend{e, reservation})
	}
}

// answer sends a reply. Every acknowledgement of a batch must say the same.
func (c *cluster) answer(r request, base int64, err error) {
	if told, ok := c.told[r.batch]; err == nil && ok && told != base {
		c.t.Fatalf("%+v was said to be at %d, and now at %d", r.batch, told, base)
	}
	if err == nil {
		c.told[r.batch] = base
	}
	c.replies = append(c.replies, reply{client: r.client, batch: r.batch, baseOffset: base, err: err})
}

// replicate is a fetch of the follower: one batch, and with it the leader learns
// how far the follower has come.
func (c *cluster) replicate() {
	leader, follower := c.nodes[c.leader], c.other()
	if follower.leads {
		return // it has not heard
	}
	if len(follower.log) < len(leader.log) {
		e := leader.log[len(follower.log)]
		if err := follower.m.Replay(e.request.batch, e.base); err != nil {
			c.t.Fatalf("replay of %+v: %v", e, err)
		}
		follower.log = append(follower.log, e)
	}
	leader.hw = follower.end()
}

// settle commits one of the appends that are replicated, in any order.
func (c *cluster) settle() {
	n := c.nodes[c.leader]
	ready := 0
	for ready < len(n.pending) && n.pending[ready].end() <= n.hw {
		ready++
	}
	if ready == 0 {
		return
	}
	i := c.c.pick(ready)
	p := n.pending[i]
	n.pending = slices.Delete(n.pending, i, i+1)
	if err := p.r.Commit(p.base); err != nil {
		c.t.Fatalf("commit of %+v: %v", p.clusterEntry, err)
	}
	c.met["committed"]++
	c.answer(p.request, p.base, nil)
}

// failWrite makes a node lose the tail of its log that the other does not have:
// the group of appends that a write or a sync has failed for.
func (c *cluster) failWrite() {
	n := c.nodes[c.c.pick(2)]
	first := len(n.pending) - c.c.pick(4)
	if !n.leads || first < 0 || first >= len(n.pending) || n.pending[first].end() <= n.hw || c.reached(n.pending[first]) {
		return
	}
	at := slices.IndexFunc(n.log, func(e clusterEntry) bool { return e.base == n.pending[first].base })
	if len(n.log)-at != len(n.pending)-first {
		return // behind it lies something that a restart has found
	}
	n.log = n.log[:at]
	for _, p := range n.pending[first:] {
		if err := p.r.Abort(); err != nil && !errors.Is(err, ErrAbandoned) {
			c.t.Fatalf("abort of %+v: %v", p.clusterEntry, err)
		}
		c.met["write failed"]++
		c.answer(p.request, 0, errAppendFailed)
	}
	n.pending = n.pending[:first]
}

// reached reports whether the other node has an append of the leader's already.
func (c *cluster) reached(p *clusterAppend) bool {
	return p.base < c.other().end() && !c.other().leads
}

// moveLeadership makes the follower the leader. The old one has not heard yet.
func (c *cluster) moveLeadership() {
	if c.other().leads || c.c.pick(3) == 0 {
		return
	}
	c.met["moved"]++
	c.leader = 1 - c.leader
	n := c.nodes[c.leader]
	n.leads = true
	n.hw = n.end() // whatever it has, it has from the old leader
	c.common = n.end()
}

// hear makes the old leader learn that it is the leader no more.
func (c *cluster) hear() {
	n := c.other()
	if !n.leads {
		return
	}
	n.leads = false
	n.m.AbandonReservations()
	for _, p := range n.pending {
		if err := p.r.Commit(p.base); !errors.Is(err, ErrAbandoned) {
			c.t.Fatalf("commit of %+v on a node that has lost leadership: %v", p.clusterEntry, err)
		}
		c.met["abandoned"]++
		c.answer(p.request, 0, errNotLeader)
	}
	n.pending = nil
	n.truncate(c.common)
	c.verifyNode(n)
}

// crash loses a node's memory. Its log is what it was, with what was in flight.
func (c *cluster) crash() {
	if c.c.pick(4) > 0 {
		return
	}
	c.met["crashed"]++
	n := c.nodes[c.c.pick(2)]
	n.m, n.pending, n.hw = New(Config{}), nil, 0
	n.rebuild()
	c.verifyNode(n)
}

func (c *cluster) save() {
	n := c.nodes[c.c.pick(2)]
	var b bytes.Buffer
	s := n.m.Snapshot()
	if _, err := s.WriteTo(&b); err != nil {
		c.t.Fatal(err)
	}
	n.saved = append(n.saved, savedNode{b.Bytes(), s.EndOffset(), n.m.EndOffset()})
}

func (n *node) end() int64 {
	if len(n.log) == 0 {
		return 0
	}
	return n.log[len(n.log)-1].end()
}

// truncate cuts the log, and the memory with it.
func (n *node) truncate(to int64) {
	n.log = slices.DeleteFunc(n.log, func(e clusterEntry) bool { return e.base >= to })
	n.saved = slices.DeleteFunc(n.saved, func(s savedNode) bool { return s.logEnd > to })
	if n.m.Truncate(to) {
		n.w.met["exact"]++
		return
	}
	n.w.met["inexact"]++
	n.rebuild()
}

// rebuild restores the newest snapshot, and replays the log from there.
func (n *node) rebuild() {
	from := int64(0)
	if len(n.saved) == 0 {
		n.m.Reset()
	} else {
		newest := n.saved[len(n.saved)-1]
		if err := n.m.Restore(bytes.NewReader(newest.bytes)); err != nil {
			n.w.t.Fatal(err)
		}
		from = newest.end
		n.w.met["restored"]++
	}
	n.replay(n.m, from)
}

func (n *node) replay(m *ProducerStateManager, from int64) {
	for _, e := range n.log {
		if e.end() <= from {
			continue
		}
		if err := m.Replay(e.request.batch, e.base); err != nil {
			n.w.t.Fatalf("replay of %+v: %v", e, err)
		}
	}
}

// verify holds each node that has nothing in flight against its log.
func (c *cluster) verify() {
	for _, n := range c.nodes {
		if len(n.pending) == 0 {
			c.verifyNode(n)
		}
	}
}

func (c *cluster) verifyNode(n *node) {
	rebuilt := New(Config{})
	n.replay(rebuilt, 0)
	want, got := stateOf(rebuilt), stateOf(n.m)
	want.MaxProducerID = got.MaxProducerID // of batches that were cut off as well
	if !reflect.DeepEqual(want, got) {     // a diff is slower, and this is done thousands of times
		c.t.Fatalf("a node (-rebuilt from its log +lived):\n%s", cmp.Diff(want, got))
	}
}

// heal ends the faults: what is under way arrives, the old leader hears, and
// every client resends what it has until it is acknowledged.
func (c *cluster) heal() {
	c.c = first{}
	c.hear()
	for len(c.requests) > 0 {
		c.arrive()
	}
	for range 4 {
		c.catchUp()
		for _, cl := range c.clients {
			for _, o := range slices.Clone(cl.inFlight) {
				if !o.acked {
					c.produce(c.nodes[c.leader], o.request)
				}
			}
		}
	}
	c.catchUp()
	for _, cl := range c.clients {
		if len(cl.inFlight) > 0 {
			c.t.Fatalf("client %d is stuck on %+v", cl.id, cl.inFlight[0].request.batch)
		}
	}
}

// catchUp lets the follower fetch everything, the appends settle and the replies
// arrive.
func (c *cluster) catchUp() {
	for c.other().end() < c.nodes[c.leader].end() {
		c.replicate()
	}
	c.replicate()
	for len(c.nodes[c.leader].pending) > 0 {
		c.settle()
	}
	for len(c.replies) > 0 {
		c.deliverReply()
	}
}

// TestLeadership is exactly once across changes of leader.
func TestLeadership(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		newCluster(t, drawn{t}, 2).run(rapid.IntRange(0, 300).Draw(t, "steps"))
	})
}

// TestLeadershipLong is the same over thousands of moves, and sees to it that
// each kind of trouble does happen.
func TestLeadershipLong(t *testing.T) {
	met := map[string]int{}
	for seed := range uint64(40) {
		c := newCluster(t, seeded{rand.New(rand.NewPCG(seed, 11))}, 3)
		c.run(5000)
		for what, n := range c.met {
			met[what] += n
		}
	}
	if met["moved"] < 2000 {
		t.Errorf("leadership moved %d times", met["moved"])
	}
	for _, what := range []string{
		"acknowledged", "committed", "duplicate", "duplicate not replicated", "IN_FLIGHT", "OUT_OF_ORDER", "STALE_EPOCH",
		"UNKNOWN_PRODUCER", "not leader", "abandoned", "write failed", "given up", "crashed", "exact", "inexact", "restored",
	} {
		if met[what] < 20 {
			t.Errorf("%s: happened %d times", what, met[what])
		}
	}
	t.Log(met)
}
