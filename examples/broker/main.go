// Command broker is a small Kafka-protocol broker that embeds package
// idempotence the way a user would.
//
//	go run ./examples/broker
//
// shows the library at work: idempotent producers, a network that cuts
// connections at the worst moment, and a count of what is in the log at the end,
// with deduplication and without. Then the same with transactions and without. It
// also measures the throughput with one and with several requests in flight.
//
//	go run ./examples/broker -listen 127.0.0.1:9092 -data DIR
//
// serves Kafka clients until it is interrupted. Package server is the broker. Its
// file partition.go is where the library is used.
//
// With -http 127.0.0.1:8080, both also serve a page that shows what the broker
// does, with a lesson on the rules, metrics at /metrics and what is remembered of
// producers at /debug/producers. That is package page.
//
//	go run ./examples/broker inspect PATH...
//
// prints what is remembered of producers and transactions: in a data directory or
// that of one partition, in transactions.log, in a snapshot of this broker or of
// Apache Kafka, or in a segment of a log.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/page"
	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/show"
)

// shutdownTimeout is how long a stop may take in good order.
const shutdownTimeout = 10 * time.Second

func main() {
	cfg := server.Config{
		Partitions:      3,
		SegmentBytes:    128 << 20,
		ExpireAfter:     idempotence.DefaultExpiration,
		MaxConnections:  1000,
		MaxRequestBytes: 8 << 20,
		RequestMemory:   64 << 20,
	}
	listen := flag.String("listen", "", "serve on this `address` instead of showing the demo; goes with -data")
	httpAddr := flag.String("http", "", "`address` of a page that shows what the broker does, such as 127.0.0.1:8080; on loopback if it has no host")
	verbose := flag.Bool("v", false, "print each verdict")
	flag.StringVar(&cfg.Dir, "data", "", "`directory` for topics and transactions; goes with -listen")
	flag.StringVar(&cfg.Advertise, "advertise", "", "`host:port` told to clients, if they cannot use the one they connected to")
	flag.Func("partitions", "`number` of partitions of a topic created on first use (default 3)", func(text string) error {
		n, err := strconv.ParseInt(text, 10, 32)
		cfg.Partitions = int32(n)
		return err
	})
	flag.Func("transaction-version", "highest `version` of transactions, 1 or 2 (default 2)", func(text string) error {
		n, err := strconv.ParseInt(text, 10, 16)
		cfg.TransactionVersion = int16(n)
		return err
	})
	flag.TextVar(&cfg.UnknownProducer, "unknown-producer", cfg.UnknownProducer,
		"`policy` for producers that a partition does not know: StartAtZero, AcceptAny or StartAtZeroOnNewLog")
	flag.Int64Var(&cfg.SegmentBytes, "segment-bytes", cfg.SegmentBytes, "size at which a log segment is rolled")
	flag.BoolVar(&cfg.NoSync, "no-sync", false, "acknowledge before a batch is on disk: it survives the broker, but perhaps not a power cut")
	flag.DurationVar(&cfg.ExpireAfter, "expire-after", cfg.ExpireAfter, "idle time after which a producer is forgotten; negative: never")
	flag.IntVar(&cfg.MaxProducers, "max-producers", 0, "number of producers that a partition remembers; 0: no limit")
	flag.IntVar(&cfg.MaxConnections, "max-connections", cfg.MaxConnections, "number of connections served at once")
	flag.IntVar(&cfg.MaxRequestBytes, "max-request-bytes", cfg.MaxRequestBytes, "size of the largest Produce request")
	flag.Int64Var(&cfg.RequestMemory, "request-memory", cfg.RequestMemory, "bytes for all requests being received and served")
	flag.Parse()
	if *verbose {
		cfg.Observe = printVerdict
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *listen, *httpAddr, cfg, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "broker:", err)
		os.Exit(1)
	}
}

// checkFlags refuses zeros, which to the server would mean its defaults.
func checkFlags(cfg server.Config) error {
	for name, value := range map[string]int64{
		"partitions":        int64(cfg.Partitions),
		"segment-bytes":     cfg.SegmentBytes,
		"expire-after":      int64(cfg.ExpireAfter),
		"max-connections":   int64(cfg.MaxConnections),
		"max-request-bytes": int64(cfg.MaxRequestBytes),
		"request-memory":    cfg.RequestMemory,
	} {
		if value == 0 {
			return fmt.Errorf("-%s is 0", name)
		}
	}
	return nil
}

func run(ctx context.Context, listen, httpAddr string, cfg server.Config, args []string) error {
	switch {
	case len(args) > 1 && args[0] == "inspect":
		return inspect(os.Stdout, args[1:])
	case len(args) == 1 && args[0] == "inspect":
		return errors.New("inspect needs a path")
	case len(args) > 0:
		return fmt.Errorf("unexpected argument %q", args[0])
	case (listen == "") != (cfg.Dir == ""):
		return errors.New("-listen and -data go together")
	}
	if err := checkFlags(cfg); err != nil {
		return err
	}
	if httpAddr == "" {
		if listen != "" {
			return serve(ctx, listen, cfg)
		}
		return show.Run(ctx, os.Stdout, cfg.Observe, nil)
	}
	p, err := servePage(ctx, httpAddr, cfg.Log)
	if err != nil {
		return fmt.Errorf("-http: %w", err)
	}
	if listen != "" {
		return serve(ctx, listen, p.Watch(cfg))
	}
	if err := show.Run(ctx, os.Stdout, cfg.Observe, p.Watch); err != nil {
		return err
	}
	fmt.Println("\nThe page stays up, with the first of these brokers as it was at its end. Interrupt the program to end.")
	<-ctx.Done()
	return nil
}

// servePage serves a page on addr until ctx ends.
func servePage(ctx context.Context, addr string, log *slog.Logger) (*page.Page, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port))
	if err != nil {
		return nil, err
	}
	p := page.New(host)
	log.Info("look inside", "page", "http://"+ln.Addr().String())
	go func() {
		if err := p.Serve(ctx, ln, log); err != nil {
			log.Error("page failed", "err", err)
		}
	}()
	return p, nil
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
