package main

// This file makes trouble.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"
)

// An event is one kind of trouble. It ends by itself, with all nodes running and
// in reach of each other.
type event struct {
	name string
	do   func(context.Context, *nemesis) error
}

// A nemesis makes trouble for a cluster.
type nemesis struct {
	cluster *cluster
	rng     *rand.Rand
	events  []event
	tell    func(what string) // before each event
	enough  func() bool       // whether what was to happen has, or nil
}

// run makes trouble, with a rest after each event, until the time is up, each event
// has come up, and it is enough. It returns how often each did. It ends with a cluster that is
// whole.
func (n *nemesis) run(ctx context.Context, least time.Duration) (map[string]int, error) {
	happened := make(map[string]int)
	begun := time.Now()
	for next := 0; time.Since(begun) < least || next < len(n.events) || n.enough != nil && !n.enough(); next++ {
		if ctx.Err() != nil {
			break
		}
		if next%len(n.events) == 0 { // in another order each time
			n.rng.Shuffle(len(n.events), func(i, j int) { n.events[i], n.events[j] = n.events[j], n.events[i] })
		}
		e := n.events[next%len(n.events)]
		if err := e.do(ctx, n); err != nil {
			return happened, fmt.Errorf("%s: %w", e.name, err)
		}
		happened[e.name]++
		n.pause(ctx, 100*time.Millisecond, 500*time.Millisecond)
	}
	return happened, ctx.Err()
}

// pause waits for a random time.
func (n *nemesis) pause(ctx context.Context, least, most time.Duration) {
	select {
	case <-time.After(least + time.Duration(n.rng.Int64N(int64(most-least)))):
	case <-ctx.Done():
	}
}

// last is how long a fault lasts: for some of the time a new leader is elected,
// for some it is not.
func (n *nemesis) last(ctx context.Context) {
	n.pause(ctx, 100*time.Millisecond, 1500*time.Millisecond)
}

// leader returns the leader, for which it waits, and says what happens to it.
func (n *nemesis) leader(ctx context.Context, what string) (*member, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	m, err := n.cluster.awaitLeader(ctx)
	if err == nil {
		n.tell(fmt.Sprintf("node %d leads and %s", m.id, what))
	}
	return m, err
}

// awaitEntries waits a few seconds for the raft log of the leader to reach an index.
func (n *nemesis) awaitEntries(ctx context.Context, index uint64) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		if m := n.cluster.leader(); m != nil && m.running().Raft().LastIndex() >= index {
			return
		}
		n.pause(ctx, 10*time.Millisecond, 20*time.Millisecond)
	}
}

// restart starts a node that was stopped.
func (n *nemesis) restart(ctx context.Context, stopped ...*member) error {
	n.last(ctx)
	for _, m := range stopped {
		if err := n.cluster.start(m); err != nil {
			return err
		}
	}
	return nil
}

// The events. A cluster of three has to survive each of them.
var (
	transferLeadership = event{"leadership transferred", func(ctx context.Context, n *nemesis) error {
		m, err := n.leader(ctx, "hands over")
		if err == nil {
			// There may be nobody to take it, or no time; that is not our trouble.
			_ = m.running().Raft().LeadershipTransfer().Error()
		}
		return err
	}}

	cutOffLeader = event{"leader cut off", func(ctx context.Context, n *nemesis) error {
		m, err := n.leader(ctx, "is cut off from the others")
		if err != nil {
			return err
		}
		for _, o := range n.cluster.others(m) {
			m.links[o.id].Close()
			o.links[m.id].Close()
		}
		n.last(ctx)
		return n.cluster.heal()
	}}

	cutOneWay = event{"cut one way", func(ctx context.Context, n *nemesis) error {
		m, err := n.leader(ctx, "some are cut off one way")
		if err != nil {
			return err
		}
		for _, o := range n.cluster.others(m) {
			switch n.rng.IntN(3) {
			case 0:
				m.links[o.id].Close()
			case 1:
				o.links[m.id].Close()
			}
		}
		n.last(ctx)
		return n.cluster.heal()
	}}

	stopNode = event{"node stopped and started", func(ctx context.Context, n *nemesis) error {
		m := n.cluster.members[n.rng.IntN(clusterSize)]
		n.tell(fmt.Sprintf("node %d is stopped", m.id))
		if err := m.stop(); err != nil {
			return err
		}
		return n.restart(ctx, m)
	}}

	stopLeader = event{"leader stopped and started", func(ctx context.Context, n *nemesis) error {
		m, err := n.leader(ctx, "is stopped")
		if err == nil {
			err = m.stop()
		}
		if err != nil {
			return err
		}
		return n.restart(ctx, m)
	}}

	stopAll = event{"all stopped and started", func(ctx context.Context, n *nemesis) error {
		n.tell("all nodes are stopped")
		for _, m := range n.cluster.members {
			if err := m.stop(); err != nil {
				return err
			}
		}
		return n.restart(ctx, n.cluster.members...)
	}}

	slowLink = event{"latency on a link", func(ctx context.Context, n *nemesis) error {
		m := n.cluster.members[n.rng.IntN(clusterSize)]
		to := n.cluster.others(m)[n.rng.IntN(clusterSize-1)]
		n.tell(fmt.Sprintf("50 ms from node %d to node %d", m.id, to.id))
		if err := m.links[to.id].Latency(50, 10); err != nil {
			return err
		}
		n.last(ctx)
		return n.cluster.heal()
	}}

	slowDisk = event{"slow disk", func(ctx context.Context, n *nemesis) error {
		m, err := n.leader(ctx, "has a slow disk")
		if err != nil {
			return err
		}
		m.disk.delay.Store(int64(30 * time.Millisecond))
		n.last(ctx)
		m.disk.delay.Store(0)
		return nil
	}}

	failingDisk = event{"failing disk", func(ctx context.Context, n *nemesis) error {
		m, err := n.leader(ctx, "has a write fail")
		if err != nil {
			return err
		}
		m.disk.fails.Store(1)
		n.last(ctx)
		m.disk.fails.Store(0)
		return nil
	}}

	cutClients = event{"answers lost", func(ctx context.Context, n *nemesis) error {
		n.tell("answers to clients are lost")
		n.cluster.cuts.Store(int32(1 + n.rng.IntN(20)))
		n.last(ctx)
		n.cluster.cuts.Store(0)
		return nil
	}}

	// What is cut off here was perhaps not even applied.
	cutProducers = event{"connections cut", func(ctx context.Context, n *nemesis) error {
		m, err := n.leader(ctx, "has its clients cut off, on a slow disk")
		if err != nil {
			return err
		}
		m.disk.delay.Store(int64(20 * time.Millisecond))
		defer m.disk.delay.Store(0)
		for range 1 + n.rng.IntN(5) {
			n.pause(ctx, 20*time.Millisecond, 200*time.Millisecond)
			if err := m.clients.Cut(); err != nil {
				return err
			}
		}
		return nil
	}}

	takeSnapshot = event{"snapshot", func(ctx context.Context, n *nemesis) error {
		m := n.cluster.members[n.rng.IntN(clusterSize)]
		n.tell(fmt.Sprintf("node %d takes a snapshot", m.id))
		_ = m.running().Raft().Snapshot().Error() // perhaps there is nothing new
		return nil
	}}

	// A node that is away while the others take snapshots gets one of these,
	// since the entries that it lacks are no longer in their logs.
	installSnapshot = event{"snapshot installed", func(ctx context.Context, n *nemesis) error {
		m := n.cluster.members[n.rng.IntN(clusterSize)]
		n.tell(fmt.Sprintf("node %d is stopped, and comes back to a snapshot", m.id))
		last := m.running().Raft().LastIndex()
		if err := m.stop(); err != nil {
			return err
		}
		n.awaitEntries(ctx, last+500)
		for _, o := range n.cluster.others(m) {
			_ = o.running().Raft().Snapshot().Error()
		}
		return n.restart(ctx, m)
	}}
)

// everything is all that may happen.
var everything = []event{
	transferLeadership, cutOffLeader, cutOneWay, stopNode, stopLeader, stopAll, slowLink,
	slowDisk, failingDisk, cutClients, cutProducers, takeSnapshot, installSnapshot,
}
