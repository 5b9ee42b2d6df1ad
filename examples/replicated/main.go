// Command replicated is a Kafka-protocol broker on three machines that embeds
// package idempotence in the state machine of hashicorp/raft.
//
//	go run ./examples/replicated
//
// shows it at work: three nodes in one process, idempotent producers, leaders
// that are cut off, stopped and replaced all the time, and a count of what ended
// up in the logs, with deduplication and without.
//
//	go run ./examples/replicated -node 1 -data DIR -peers \
//	    1=HOST:PORT/HOST:PORT,2=HOST:PORT/HOST:PORT,3=HOST:PORT/HOST:PORT
//
// runs one node until interrupted. The peers are all nodes, each with the
// address for the other nodes and the address for clients, and the node listens
// on its own. A node that has lost its directory must not be started again under
// its id: it could vote for a leader that lacks what it has acknowledged. Only the
// nodes may reach the address for the others, which is not protected.
//
// Clients with a transactional id are refused: the state machine applies the
// markers that end transactions, but there is no coordinator to write them.
//
// Package statemachine is where the library is used, in machine.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/idempotence-go/idempotence/examples/replicated/node"
)

func main() {
	var cfg node.Config
	id := flag.Int("node", 0, "run the node with this `id` instead of showing the demo")
	peers := flag.String("peers", "", "all nodes, as `ID=RAFT-HOST:PORT/CLIENT-HOST:PORT,...`, with -node")
	flag.StringVar(&cfg.Dir, "data", "", "`directory` for what the node keeps, with -node")
	flag.IntVar(&cfg.Topic.Partitions, "partitions", 3, "partitions of a topic created on first use")
	flag.DurationVar(&cfg.Topic.Expiration, "expire-after", 0, "idle time after which a producer is forgotten; 0: 24 hours, negative: never")
	flag.IntVar(&cfg.Topic.MaxProducers, "max-producers", 0, "most producers that a partition remembers; 0: no limit")
	flag.DurationVar(&cfg.ElectionTimeout, "election-timeout", 0, "how long a leader may be silent; 0: 300ms")
	flag.Uint64Var(&cfg.SnapshotThreshold, "snapshot-threshold", 0, "entries of the raft log after which a snapshot is taken; 0: 50,000")
	flag.DurationVar(&cfg.SnapshotInterval, "snapshot-interval", 0, "time between two looks whether there are so many; 0: 10s")
	flag.Parse()
	cfg.ID = int32(*id)

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	defer stop()
	if err := run(ctx, cfg, *peers, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "replicated:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, cfg node.Config, peers string, args []string) error {
	switch {
	case len(args) > 0:
		return fmt.Errorf("unexpected argument %q", args[0])
	case cfg.ID == 0 && peers == "" && cfg.Dir == "":
		return demo(ctx, os.Stdout)
	case cfg.ID == 0 || peers == "" || cfg.Dir == "":
		return errors.New("-node, -peers and -data go together")
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	return serve(ctx, cfg, peers)
}

// serve runs a node until ctx ends.
func serve(ctx context.Context, cfg node.Config, peers string) (err error) {
	if cfg.Peers, err = node.ParsePeers(peers); err != nil {
		return err
	}
	self, err := node.PeerOf(cfg.Peers, cfg.ID)
	if err != nil {
		return err
	}
	if cfg.RaftListener, err = net.Listen("tcp", self.Raft); err != nil {
		return err
	}
	if cfg.ClientListener, err = net.Listen("tcp", self.Client); err != nil {
		return errors.Join(err, cfg.RaftListener.Close())
	}
	n, err := node.Start(cfg)
	if err != nil {
		return err
	}
	cfg.Log.Info("serving", "node", cfg.ID, "clients", self.Client)
	<-ctx.Done()
	cfg.Log.Info("shutting down")
	return n.Close()
}
