package node

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/raft"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

// Config is how a node is set up. Zero values mean the default given with each
// field.
type Config struct {
	ID    int32  // of this node, one of Peers
	Peers []Peer // all nodes, this one included, as this node reaches them
	Dir   string // for the raft log, snapshots and partitions; nobody else's

	// Where other nodes and clients connect. Serve closes them.
	RaftListener, ClientListener net.Listener

	// Topic is what topics are created with that a client asks for when this
	// node leads; default 3 partitions. It is then part of the replicated state.
	Topic statemachine.TopicConfig

	// ExpireInterval is the time between two rounds of forgetting idle
	// producers; default one minute. Clock is what tells the time for it;
	// default time.Now.
	ExpireInterval time.Duration
	Clock          func() time.Time

	// ElectionTimeout is how long a leader may be silent until another is
	// elected; default 300 ms. A leader that reaches no majority for half of
	// that steps down.
	ElectionTimeout time.Duration

	// SnapshotThreshold is the number of entries after which a snapshot is
	// taken, and TrailingLogs how many of those before it are kept for a
	// follower that is behind; default 50,000 and 10,000. SnapshotInterval is
	// the time between two looks whether there are so many; default 10 s.
	SnapshotThreshold, TrailingLogs uint64
	SnapshotInterval                time.Duration

	MaxConnections  int   // of clients; more are closed at once; default 1000
	MaxRequestBytes int   // largest request; default 8 MiB
	RequestMemory   int64 // for requests being read and served; default 64 MiB
	FetchMemory     int64 // for answers to Fetch; default 64 MiB

	// LogStore wraps the raft log, which tests do to make it slow or fail.
	LogStore func(raft.LogStore) raft.LogStore

	// Observe is called with what each batch is answered, before the client
	// hears of it. It is called concurrently.
	Observe func(Event)

	Log *slog.Logger // default: nothing is logged
}

// A Peer is a node and where it is reached.
type Peer struct {
	ID     int32
	Raft   string // host:port for the other nodes
	Client string // host:port for clients
}

// ParsePeers reads a list of peers, separated by commas, each of the form
// ID=RAFT-HOST:PORT/CLIENT-HOST:PORT.
func ParsePeers(list string) ([]Peer, error) {
	var peers []Peer
	for _, text := range strings.Split(list, ",") {
		id, addresses, _ := strings.Cut(text, "=")
		raftAddr, client, ok := strings.Cut(addresses, "/")
		n, err := strconv.ParseInt(id, 10, 32)
		if !ok || err != nil {
			return nil, fmt.Errorf("peer %q is not of the form ID=RAFT-HOST:PORT/CLIENT-HOST:PORT", text)
		}
		peers = append(peers, Peer{int32(n), raftAddr, client})
	}
	return peers, nil
}

// PeerOf returns the peer with an id.
func PeerOf(peers []Peer, id int32) (Peer, error) {
	for _, p := range peers {
		if p.ID == id {
			return p, nil
		}
	}
	return Peer{}, fmt.Errorf("node %d is not among the peers", id)
}

// An Event is one batch and what its producer is answered.
type Event struct {
	Topic     string
	Partition int32
	Batch     idempotence.Batch
	Result    idempotence.Result // with the batch's offset also when appended
	Err       error              // the refusal, if it was refused
}

func (cfg Config) withDefaults() Config {
	setDefault(&cfg.Topic.Partitions, 3)
	setDefault(&cfg.ExpireInterval, time.Minute)
	setDefault(&cfg.ElectionTimeout, 300*time.Millisecond)
	setDefault(&cfg.SnapshotThreshold, 50_000)
	setDefault(&cfg.TrailingLogs, 10_000)
	setDefault(&cfg.SnapshotInterval, 10*time.Second)
	setDefault(&cfg.MaxConnections, 1000)
	setDefault(&cfg.MaxRequestBytes, 8<<20)
	setDefault(&cfg.RequestMemory, 64<<20)
	setDefault(&cfg.FetchMemory, 64<<20)
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.LogStore == nil {
		cfg.LogStore = func(s raft.LogStore) raft.LogStore { return s }
	}
	if cfg.Observe == nil {
		cfg.Observe = func(Event) {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return cfg
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (cfg Config) check() error {
	if cfg.Dir == "" {
		return errors.New("config: no data directory")
	}
	if cfg.RaftListener == nil || cfg.ClientListener == nil {
		return errors.New("config: no listeners")
	}
	taken := make(map[any]bool)
	for _, p := range cfg.Peers {
		if p.ID < 1 {
			return fmt.Errorf("config: peer %d: ids begin at 1", p.ID)
		}
		for _, address := range []string{p.Raft, p.Client} {
			_, port, err := net.SplitHostPort(address)
			if err == nil {
				_, err = strconv.ParseUint(port, 10, 16)
			}
			if err != nil {
				return fmt.Errorf("config: peer %d: %w", p.ID, err)
			}
		}
		for _, of := range []any{p.ID, p.Raft, p.Client} {
			if taken[of] {
				return fmt.Errorf("config: peers: %v is there twice", of)
			}
			taken[of] = true
		}
	}
	if int64(cfg.MaxRequestBytes) > cfg.RequestMemory {
		return errors.New("config: request memory is less than one request may take")
	}
	if cfg.FetchMemory < fetchClaim(&kmsg.FetchRequest{MaxBytes: maxFetchBytes}) {
		return errors.New("config: fetch memory is less than one answer may take")
	}
	if err := cfg.Topic.Check(); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	_, err := PeerOf(cfg.Peers, cfg.ID)
	return err
}
