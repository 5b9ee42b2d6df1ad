package main

// This file is three nodes in one process, with proxies everywhere: before each
// node for its clients, and on each way from one node to another.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/show/faults"
	"github.com/idempotence-go/idempotence/examples/replicated/node"
)

const clusterSize = 3

// A cluster is three nodes with a directory and ports each. Only one goroutine
// at a time troubles it.
type cluster struct {
	dir     string
	cfg     node.Config              // of each node, but for what differs
	clock   func(id int32) time.Time // or nil
	members []*member

	// cuts is how many of the next answers to batches that were appended are
	// lost: all clients of the node are cut off before they hear of it.
	cuts atomic.Int32
}

// A member is a node, running or not, and what surrounds it.
type member struct {
	id      int32
	clients *faults.Proxy           // before the node
	links   map[int32]*faults.Proxy // to each other node
	address string                  // of the node, for the others
	disk    *disk

	mu   sync.Mutex
	node *node.Node // nil while stopped
}

// startCluster starts three nodes and waits until one of them leads.
func startCluster(ctx context.Context, cfg node.Config) (c *cluster, err error) {
	dir, err := os.MkdirTemp("", "replicated-")
	if err != nil {
		return nil, err
	}
	c = &cluster{dir: dir, cfg: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	for i := range clusterSize {
		m := &member{id: int32(i + 1), links: make(map[int32]*faults.Proxy), disk: &disk{}}
		c.members = append(c.members, m)
		if m.clients, err = faults.New("127.0.0.1:0"); err != nil {
			return c, err
		}
	}
	for _, m := range c.members {
		for _, to := range c.others(m) {
			if m.links[to.id], err = faults.New("127.0.0.1:0"); err != nil {
				return c, err
			}
		}
	}
	for _, m := range c.members {
		if err := c.start(m); err != nil {
			return c, err
		}
	}
	_, err = c.awaitLeader(ctx)
	return c, err
}

// others returns all members but one.
func (c *cluster) others(m *member) []*member {
	var others []*member
	for _, o := range c.members {
		if o != m {
			others = append(others, o)
		}
	}
	return others
}

// start starts a node, on ports that are new each time; the proxies keep theirs.
func (c *cluster) start(m *member) error {
	cfg := c.cfg
	cfg.ID, cfg.Dir = m.id, filepath.Join(c.dir, fmt.Sprint("node-", m.id))
	cfg.LogStore = func(s raft.LogStore) raft.LogStore { return diskLog{s, m.disk} }
	if c.clock != nil {
		cfg.Clock = func() time.Time { return c.clock(m.id) }
	}
	cfg.Observe = func(e node.Event) { c.observe(m, e) }
	var err error
	if cfg.RaftListener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return err
	}
	if cfg.ClientListener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return errors.Join(err, cfg.RaftListener.Close())
	}
	m.address = cfg.RaftListener.Addr().String()
	for _, p := range c.members {
		peer := node.Peer{ID: p.id, Raft: m.address, Client: p.clients.Addr()}
		if p != m {
			peer.Raft = m.links[p.id].Addr()
		}
		cfg.Peers = append(cfg.Peers, peer)
	}
	n, err := node.Start(cfg)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.node = n
	m.mu.Unlock()
	return errors.Join(c.heal(), m.clients.MoveTo(cfg.ClientListener.Addr().String()))
}

func (c *cluster) observe(m *member, e node.Event) {
	if c.cfg.Observe != nil {
		c.cfg.Observe(e)
	}
	if e.Result.Verdict == idempotence.Append && c.cuts.Load() > 0 && c.cuts.Add(-1) >= 0 {
		m.clients.Cut() // only fails when the proxy is gone, and then nothing connects
	}
}

// stop ends a node as if its process had been killed: of what it knows only
// what is on disk is left.
func (m *member) stop() error {
	m.mu.Lock()
	n := m.node
	m.node = nil
	m.mu.Unlock()
	if n == nil {
		return nil
	}
	return n.Close()
}

// running returns the node, or nil.
func (m *member) running() *node.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.node
}

// heal lets everybody reach everybody again.
func (c *cluster) heal() error {
	var errs []error
	for _, m := range c.members {
		for _, to := range c.others(m) {
			if to.running() != nil {
				m.links[to.id].Heal()
				errs = append(errs, m.links[to.id].MoveTo(to.address))
			}
		}
	}
	return errors.Join(errs...)
}

// leader returns the member that leads and knows it, or nil.
func (c *cluster) leader() *member {
	for _, m := range c.members {
		if n := m.running(); n != nil && n.Ready() {
			return m
		}
	}
	return nil
}

// awaitLeader returns the leader once there is one.
func (c *cluster) awaitLeader(ctx context.Context) (*member, error) {
	for {
		if m := c.leader(); m != nil {
			return m, nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return nil, fmt.Errorf("no leader: %w", ctx.Err())
		}
	}
}

// seeds returns the addresses for clients.
func (c *cluster) seeds() []string {
	var addresses []string
	for _, m := range c.members {
		addresses = append(addresses, m.clients.Addr())
	}
	return addresses
}

// close stops everything and removes the directories.
func (c *cluster) close() error {
	var errs []error
	for _, m := range c.members {
		errs = append(errs, m.stop())
		for _, p := range m.links {
			p.Close()
		}
		if m.clients != nil {
			m.clients.Close()
		}
	}
	return errors.Join(append(errs, os.RemoveAll(c.dir))...)
}

// A disk is what the raft log of a node is on.
type disk struct {
	delay atomic.Int64 // of each write, in nanoseconds
	fails atomic.Int32 // how many of the next writes fail
}

var errDisk = errors.New("input/output error")

// write returns when a write may be done, or the error with which it fails.
func (d *disk) write() error {
	time.Sleep(time.Duration(d.delay.Load()))
	if d.fails.Load() > 0 && d.fails.Add(-1) >= 0 {
		return errDisk
	}
	return nil
}

// A diskLog is the raft log on a disk.
type diskLog struct {
	raft.LogStore
	disk *disk
}

func (l diskLog) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

func (l diskLog) StoreLogs(logs []*raft.Log) error {
	if err := l.disk.write(); err != nil {
		return err
	}
	return l.LogStore.StoreLogs(logs)
}

// GetLog does not find what was deleted. The log itself does, as long as the file
// is there, and then hardly a follower is ever sent a snapshot.
func (l diskLog) GetLog(index uint64, log *raft.Log) error {
	first, err := l.FirstIndex()
	if err == nil && index < first {
		err = raft.ErrLogNotFound // which raft compares with ==
	}
	if err != nil {
		return err
	}
	return l.LogStore.GetLog(index, log)
}

// IsMonotonic passes on that the log wants no gaps, which raft asks for by this
// method.
func (l diskLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
