// Command broker is a small Kafka-protocol broker that embeds package
// idempotence the way a user would.
//
//	go run ./examples/broker
//
// shows the library at work: idempotent producers, a network that cuts
// connections at the worst moment, and a count of what ended up in the log,
// with deduplication and without; and what several requests in flight are
// worth.
//
//	go run ./examples/broker -listen 127.0.0.1:9092 -data DIR
//
// serves any Kafka client until interrupted. Package server is the broker, and
// its file partition.go is where the library is used.
//
//	go run ./examples/broker inspect PATH...
//
// prints what is remembered of producers: in a data directory or that of one
// partition, in a snapshot of this broker or of Apache Kafka, or in a segment
// of a log.
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
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

const shutdownTimeout = 10 * time.Second

func main() {
	var cfg server.Config
	listen := flag.String("listen", "", "serve on this `address` instead of showing the demo")
	verbose := flag.Bool("v", false, "print each verdict as it falls")
	flag.StringVar(&cfg.Dir, "data", "", "`directory` for topics and producer ids, with -listen")
	flag.StringVar(&cfg.Advertise, "advertise", "", "`address` told to clients, if they cannot use the one they connected to")
	partitions := flag.Int("partitions", 3, "partitions of a topic created on first use")
	flag.Int64Var(&cfg.SegmentBytes, "segment-bytes", 128<<20, "size at which a log segment is rolled")
	flag.BoolVar(&cfg.NoSync, "no-sync", false, "acknowledge before the disk has it: outlives the broker, but not a loss of power")
	flag.DurationVar(&cfg.ExpireAfter, "expire-after", idempotence.DefaultExpiration, "idle time after which a producer is forgotten; negative: never")
	flag.IntVar(&cfg.MaxProducers, "max-producers", 0, "most producers that a partition remembers; 0: no limit")
	flag.IntVar(&cfg.MaxConnections, "max-connections", 1000, "connections served at once")
	flag.IntVar(&cfg.MaxRequestBytes, "max-request-bytes", 8<<20, "size of the largest Produce request")
	flag.Int64Var(&cfg.RequestMemory, "request-memory", 64<<20, "bytes of all requests being served at once")
	flag.Parse()
	cfg.Partitions = int32(*partitions)
	if *verbose {
		cfg.Observe = printVerdict
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *listen, cfg, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "broker:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, listen string, cfg server.Config, args []string) error {
	switch {
	case len(args) > 1 && args[0] == "inspect":
		return inspect(os.Stdout, args[1:])
	case len(args) > 0:
		return fmt.Errorf("unexpected argument %q", args[0])
	case listen == "" && cfg.Dir == "":
		return demo(ctx, os.Stdout, cfg.Observe)
	case listen == "" || cfg.Dir == "":
		return errors.New("-listen and -data go together")
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	return serve(ctx, listen, cfg)
}

// serve runs a broker until ctx ends.
func serve(ctx context.Context, listen string, cfg server.Config) error {
	s, err := server.Open(cfg)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return errors.Join(err, s.Shutdown(ctx))
	}
	cfg.Log.Info("serving", "addr", ln.Addr(), "data", cfg.Dir)
	failed := make(chan error, 1)
	go func() { failed <- s.Serve(ln) }()
	select {
	case <-ctx.Done():
	case err = <-failed:
	}

	cfg.Log.Info("shutting down")
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	return errors.Join(err, s.Shutdown(ctx))
}

func printVerdict(e server.Event) {
	b := e.Batch
	batch := fmt.Sprintf("%s-%d: producer %d epoch %d seq %d, %d records:",
		e.Topic, e.Partition, b.ProducerID, b.Epoch, b.BaseSequence, b.Count)
	if e.Err != nil {
		fmt.Println(batch, e.Err)
		return
	}
	fmt.Println(batch, e.Result.Verdict, "at", e.Result.BaseOffset)
}
