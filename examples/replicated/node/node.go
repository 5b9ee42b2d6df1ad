// Package node is one of several brokers that keep the same partitions. It
// joins the state machine of package statemachine, which embeds the library, with
// hashicorp/raft, which keeps the commands, and with clients of the Kafka
// protocol.
//
// It serves idempotent producers and plain partition consumers: ApiVersions,
// Metadata, InitProducerId, Produce, Fetch and ListOffsets. All partitions have
// one leader, the one of the raft group. Transactions, consumer groups,
// authentication and retention are not here.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	raftwal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"
	"golang.org/x/sync/semaphore"

	"github.com/idempotence-go/idempotence/examples/broker/durable"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

const (
	// enqueueTimeout is how long a command may wait for room in the queue of the
	// leader. Nothing else is read from its connection meanwhile.
	enqueueTimeout = 5 * time.Second

	// proposeTimeout is how long the node waits for a command of its own.
	proposeTimeout = 10 * time.Second

	// barrierRetry is the time between two tries of a new leader to get ready.
	barrierRetry = 20 * time.Millisecond
)

// A Node is one broker. Its methods may be called concurrently.
type Node struct {
	cfg         Config
	machine     *statemachine.Machine
	lock        *os.File // of the directory
	raft        *raft.Raft
	wal         *raftwal.WAL
	walMeta     metadb.BoltMetaDB
	leadership  chan bool
	ready       atomic.Bool // leads, and has applied what its predecessors left
	producerIDs producerIDs

	requestMemory *semaphore.Weighted
	fetchMemory   *semaphore.Weighted
	closing       context.Context
	close         context.CancelFunc

	mu         sync.Mutex
	conns      map[net.Conn]struct{}
	serving    sync.WaitGroup // one for each connection, and the listener
	background sync.WaitGroup
}

// Start starts a node. The first start of all ends with an election among
// Config.Peers; the one with the lowest id has to be there for that. A later one
// finds in the directory what the node knew. The listeners are closed also with
// an error.
func Start(cfg Config) (_ *Node, err error) {
	cfg = cfg.withDefaults()
	n := &Node{
		cfg:           cfg,
		leadership:    make(chan bool, 1000), // raft waits when it is full
		requestMemory: semaphore.NewWeighted(cfg.RequestMemory),
		fetchMemory:   semaphore.NewWeighted(cfg.FetchMemory),
		conns:         make(map[net.Conn]struct{}),
	}
	n.closing, n.close = context.WithCancel(context.Background())
	if err := n.open(); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	n.background.Go(n.followLeadership)
	n.background.Go(n.expire)
	n.serving.Go(n.acceptAll)
	return n, nil
}

func (n *Node) open() error {
	if err := n.cfg.check(); err != nil {
		return err
	}
	if err := n.openDir(); err != nil {
		return fmt.Errorf("data directory %s: %w", n.cfg.Dir, err)
	}
	logger := n.raftLogger()
	snapshots, err := raft.NewFileSnapshotStoreWithLogger(n.cfg.Dir, 2, logger)
	if err != nil {
		return err
	}
	existing, err := raft.HasExistingState(n.wal, n.wal, snapshots)
	if err != nil {
		return err
	}
	transport := n.transport(logger)
	if err := n.newRaft(snapshots, transport); err != nil {
		return errors.Join(err, transport.Close())
	}
	if first := slices.MinFunc(n.cfg.Peers, byID); !existing && n.cfg.ID == first.ID {
		return n.raft.BootstrapCluster(n.servers()).Error()
	}
	return n.checkMembers()
}

// nodeKey is where the stable store has the id of the node.
var nodeKey = []byte("node")

// openDir opens the raft log. Only then is it this node's directory, and no other
// process's, so that the partitions may be made again.
func (n *Node) openDir() (err error) {
	if err := durable.MkdirAll(filepath.Join(n.cfg.Dir, "raft")); err != nil {
		return err
	}
	if n.lock, err = durable.Lock(filepath.Join(n.cfg.Dir, "lock")); err != nil {
		return err
	}
	n.wal, err = raftwal.Open(filepath.Join(n.cfg.Dir, "raft"),
		raftwal.WithLogger(n.raftLogger()), raftwal.WithMetaStore(&n.walMeta))
	if err != nil {
		return err
	}
	// With the directory of another node this one would vote a second time in
	// elections in which that one has voted.
	id, err := n.wal.GetUint64(nodeKey)
	if err == nil && id == 0 {
		id = uint64(n.cfg.ID)
		err = n.wal.SetUint64(nodeKey, id)
	}
	if err == nil && id != uint64(n.cfg.ID) {
		err = fmt.Errorf("it is the directory of node %d", id)
	}
	if err == nil {
		n.machine, err = statemachine.New(filepath.Join(n.cfg.Dir, "partitions"))
	}
	return err
}

// newRaft starts raft, which restores the newest snapshot that it can read. It
// panics where the log lacks an entry that comes after that, which is no reason
// to end without a word: the files are damaged.
func (n *Node) newRaft(snapshots raft.SnapshotStore, transport raft.Transport) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("data directory %s: the raft log or a snapshot is damaged: %v", n.cfg.Dir, r)
		}
	}()
	n.raft, err = raft.NewRaft(n.raftConfig(), n.machine, n.cfg.LogStore(n.wal), n.wal, snapshots, transport)
	return err
}

// checkMembers returns an error unless the nodes of the cluster, as far as they
// are known here, are those in Config.Peers.
func (n *Node) checkMembers() error {
	var members, peers []raft.ServerID
	for _, s := range n.raft.GetConfiguration().Configuration().Servers {
		members = append(members, s.ID)
	}
	for _, s := range n.servers().Servers {
		peers = append(peers, s.ID)
	}
	slices.Sort(members)
	slices.Sort(peers)
	if len(members) > 0 && !slices.Equal(members, peers) {
		return fmt.Errorf("the cluster has the nodes %v, and the peers are %v", members, peers)
	}
	return nil
}

func byID(a, b Peer) int { return int(a.ID - b.ID) }

func (n *Node) raftLogger() hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{Output: logWriter{n.cfg.Log}, Level: hclog.Info, DisableTime: true})
}

func (n *Node) raftConfig() *raft.Config {
	cfg := raft.DefaultConfig()
	cfg.LocalID = serverID(n.cfg.ID)
	cfg.HeartbeatTimeout = n.cfg.ElectionTimeout
	cfg.ElectionTimeout = n.cfg.ElectionTimeout
	cfg.LeaderLeaseTimeout = n.cfg.ElectionTimeout / 2
	cfg.CommitTimeout = 5 * time.Millisecond
	cfg.BatchApplyCh = true
	cfg.MaxAppendEntries = 256
	cfg.SnapshotThreshold = n.cfg.SnapshotThreshold
	cfg.SnapshotInterval = n.cfg.SnapshotInterval
	cfg.TrailingLogs = n.cfg.TrailingLogs
	cfg.Logger = n.raftLogger()
	// LeaderCh would not do: it keeps the latest value, so that leadership which
	// was lost and regained looks like nothing.
	cfg.NotifyCh = n.leadership
	return cfg
}

func serverID(id int32) raft.ServerID { return raft.ServerID(strconv.Itoa(int(id))) }

func (n *Node) servers() (c raft.Configuration) {
	for _, p := range n.cfg.Peers {
		c.Servers = append(c.Servers, raft.Server{ID: serverID(p.ID), Address: raft.ServerAddress(p.Raft)})
	}
	return c
}

// transport sends to the addresses in Config.Peers, whatever addresses are in
// the replicated configuration.
func (n *Node) transport(logger hclog.Logger) *raft.NetworkTransport {
	self, _ := PeerOf(n.cfg.Peers, n.cfg.ID) // Config was checked
	return raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		ServerAddressProvider: addressBook(n.cfg.Peers),
		Stream:                streamLayer{n.cfg.RaftListener, address(self.Raft)},
		MaxPool:               3,
		// No pipelining: when a follower refuses an entry with another one behind
		// it, the leader may never send to that follower again (hashicorp/raft
		// issue 612). Entries that are proposed together go together all the same.
		MaxRPCsInFlight: 1,
		Timeout:         10 * time.Second,
		Logger:          logger,
	})
}

type addressBook []Peer

func (peers addressBook) ServerAddr(id raft.ServerID) (raft.ServerAddress, error) {
	for _, p := range peers {
		if serverID(p.ID) == id {
			return raft.ServerAddress(p.Raft), nil
		}
	}
	return "", fmt.Errorf("node %s is not among the peers", id)
}

// A streamLayer is TCP, with an address of its own choice to be known by.
type streamLayer struct {
	net.Listener
	advertised address
}

func (s streamLayer) Addr() net.Addr { return s.advertised }

func (s streamLayer) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	return net.DialTimeout("tcp", string(to), timeout)
}

// An address is host:port.
type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }

// A logWriter takes the lines that raft logs.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(line []byte) (int, error) {
	w.log.Info(string(line[:max(0, len(line)-1)]))
	return len(line), nil
}

// followLeadership keeps ready up to date until Close.
func (n *Node) followLeadership() {
	leads := false
	var retry <-chan time.Time
	for {
		select {
		case leads = <-n.leadership:
			n.ready.Store(false)
			n.cfg.Log.Info("leadership", "node", n.cfg.ID, "leads", leads)
		case <-retry:
		case <-n.closing.Done():
			return
		}
		retry = nil
		if leads && !n.prepare() {
			retry = time.After(barrierRetry)
		}
	}
}

// prepare waits until all that was committed by the predecessors of a new leader
// has been applied here. That is for readers, and for the answers that are given
// without a proposal. What is to be appended needs no wait, since it is decided
// when it is applied.
//
// It reports false where raft does not take the barrier, which may be for a
// moment: it takes nothing while leadership is being transferred.
func (n *Node) prepare() bool {
	barrier := n.raft.Barrier(enqueueTimeout)
	if err := await(n.closing, barrier); err != nil {
		n.cfg.Log.Info("not ready to lead", "node", n.cfg.ID, "err", err)
		return false
	}
	// The machine is not given the barrier, nor the entry with which raft begins
	// a term.
	n.machine.Reached(barrier.(raft.IndexFuture).Index())
	n.ready.Store(true)
	n.cfg.Log.Info("ready to lead", "node", n.cfg.ID)
	return true
}

// Leader returns the id of the node that leads, as far as this one knows, or -1.
func (n *Node) Leader() int32 {
	_, id := n.raft.LeaderWithID()
	leader, err := strconv.ParseInt(string(id), 10, 32)
	if err != nil {
		return -1
	}
	return int32(leader)
}

// Ready reports whether the node leads and has applied all that was committed
// before it did.
func (n *Node) Ready() bool { return n.ready.Load() }

// ID returns the id of the node.
func (n *Node) ID() int32 { return n.cfg.ID }

// Machine returns the state machine, to be looked at.
func (n *Node) Machine() *statemachine.Machine { return n.machine }

// Raft returns the raft node, for whoever has to look into it or to trouble it.
func (n *Node) Raft() *raft.Raft { return n.raft }

// propose has a command applied, and returns what became of it.
func (n *Node) propose(command []byte) (statemachine.Answer, error) {
	ctx, cancel := context.WithTimeout(n.closing, proposeTimeout)
	defer cancel()
	return wait(ctx, n.raft.Apply(command, enqueueTimeout))
}

// maxExpireStep is the most by which one command moves the clock of the
// producers on. So a node whose own clock is far ahead does not make all
// partitions forget all producers when it comes to lead.
const maxExpireStep = 10 * time.Minute

// expire proposes now and then, where this node leads, that idle producers be
// forgotten, until Close.
func (n *Node) expire() {
	ticker := time.NewTicker(n.cfg.ExpireInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if !n.Ready() {
				continue
			}
			now := n.cfg.Clock()
			if last, ok := n.machine.Clock(); ok && now.Sub(last) > maxExpireStep {
				now = last.Add(maxExpireStep)
			}
			if _, err := n.propose(statemachine.Expire(now)); err != nil {
				n.cfg.Log.Warn("producers not expired", "err", err)
			}
		case <-n.closing.Done():
			return
		}
	}
}

// Close ends the node. What it has acknowledged is safe, as it would be had the
// process been killed.
func (n *Node) Close() error {
	n.close()
	n.closeConns()
	var errs []error
	for _, ln := range []net.Listener{n.cfg.RaftListener, n.cfg.ClientListener} {
		if ln != nil {
			ln.Close()
		}
	}
	if n.raft != nil {
		errs = append(errs, n.raft.Shutdown().Error()) // ends the waits of connections, too
	}
	n.serving.Wait()
	n.background.Wait()
	if n.wal != nil {
		errs = append(errs, n.wal.Close())
	}
	errs = append(errs, n.walMeta.Close()) // which the log does not do
	if n.machine != nil {
		errs = append(errs, n.machine.Close())
	}
	if n.lock != nil {
		errs = append(errs, n.lock.Close())
	}
	return errors.Join(errs...)
}
