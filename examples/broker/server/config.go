package server

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// Config says how a broker is set up. A zero field means the default given with
// it.
type Config struct {
	Dir       string // of topics and transactions; required
	Advertise string // host:port told to clients; default: the address that a client has connected to

	Partitions    int32 // of a topic created on first use; default 3
	MaxPartitions int   // of all topics together; default 3000
	SegmentBytes  int64 // size at which a segment is rolled; default 128 MiB
	MaxBatchBytes int   // of a record batch; default 1 MiB + 12, as in Kafka

	MaxConnections  int   // more are closed at once; default 1000
	MaxRequestBytes int   // of a Produce request; default 8 MiB
	RequestMemory   int64 // for all requests being received and served; default 64 MiB
	FetchMemory     int64 // for all Fetch answers being sent; default 64 MiB

	// NoSync leaves it to the operating system when an append reaches the disk.
	// What is acknowledged survives the process, but may not survive a power
	// cut. By default a batch is acknowledged when it is on disk.
	NoSync bool

	// UnknownProducer is the policy for the first batch of a producer that a
	// partition does not know; default idempotence.StartAtZero.
	UnknownProducer idempotence.UnknownProducerPolicy

	// ExpireAfter is the idle time after which a partition forgets a producer;
	// default 24 hours, negative: never. MaxProducers is the number of producers
	// that a partition remembers; default: no limit.
	ExpireAfter  time.Duration
	MaxProducers int

	// TransactionVersion is the highest version of transactions that clients may
	// use: 1, or 2 (KIP-890), which is the default.
	TransactionVersion int16

	// OpenTxnLog opens the log of transactions; default os.OpenFile. Tests replace
	// it with one whose file fails.
	OpenTxnLog func(name string, flag int, perm os.FileMode) (segment.File, error)

	// OpenFile opens the segments of logs; default os.OpenFile. Tests replace it
	// with one whose files fail.
	OpenFile func(name string, flag int, perm os.FileMode) (segment.File, error)

	// WithoutDeduplication appends every batch, to show what happens then.
	WithoutDeduplication bool

	// Observe is called with the verdict on each batch, before its producer is
	// answered and, if the batch was appended, after it was committed. It is
	// called concurrently and without a lock.
	Observe func(Event)

	// ObserveMarker is called before the coordinator writes a marker, and again
	// when it is written and the coordinator has not heard of it yet. It is
	// called concurrently and without a lock.
	ObserveMarker func(m txn.Marker, written bool)

	// ObserveAnswer is called with each answer to a request other than Produce
	// before it is sent, concurrently and without a lock.
	ObserveAnswer func(kmsg.Request, kmsg.Response)

	// Opened is called with the broker before Open returns it.
	Opened func(*Server)

	Log *slog.Logger // default: discard

	repeated *slog.Logger // for what may fail again and again: see quietHandler
}

// An Event is the verdict on one batch.
type Event struct {
	Topic     string
	Partition int32
	Batch     idempotence.Batch
	Result    idempotence.Result // with the base offset, also of an appended batch
	Err       error              // not nil if the batch was refused
}

func (cfg Config) withDefaults() Config {
	setDefault(&cfg.Partitions, 3)
	setDefault(&cfg.MaxPartitions, 3000)
	setDefault(&cfg.SegmentBytes, 128<<20)
	setDefault(&cfg.MaxBatchBytes, 1<<20+12)
	setDefault(&cfg.MaxConnections, 1000)
	setDefault(&cfg.MaxRequestBytes, 8<<20)
	setDefault(&cfg.RequestMemory, 64<<20)
	setDefault(&cfg.FetchMemory, 64<<20)
	setDefault(&cfg.ExpireAfter, idempotence.DefaultExpiration)
	setDefault(&cfg.TransactionVersion, 2)
	if cfg.OpenTxnLog == nil {
		cfg.OpenTxnLog = func(name string, flag int, perm os.FileMode) (segment.File, error) {
			return os.OpenFile(name, flag, perm)
		}
	}
	if cfg.Observe == nil {
		cfg.Observe = func(Event) {}
	}
	if cfg.ObserveMarker == nil {
		cfg.ObserveMarker = func(txn.Marker, bool) {}
	}
	if cfg.ObserveAnswer == nil {
		cfg.ObserveAnswer = func(kmsg.Request, kmsg.Response) {}
	}
	if cfg.Opened == nil {
		cfg.Opened = func(*Server) {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.repeated = cfg.Log
	return cfg
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// check returns an error for a field out of its range, and for limits that
// contradict each other: every request and every answer that is allowed must fit
// into the memory for it.
func (cfg Config) check() error {
	if cfg.Dir == "" {
		return errors.New("config: no data directory")
	}
	if cfg.Advertise != "" {
		if host, port, err := splitHostPort(cfg.Advertise); err != nil || host == "" || port == 0 {
			return fmt.Errorf("config: advertised address %q, want host:port", cfg.Advertise)
		}
	}
	for _, f := range []struct {
		name             string
		value, low, high int64
	}{
		{"partitions a topic", int64(cfg.Partitions), 1, int64(cfg.MaxPartitions)},
		{"partitions", int64(cfg.MaxPartitions), 1, math.MaxInt32},
		{"segment bytes", cfg.SegmentBytes, 1, math.MaxInt64},
		{"connections", int64(cfg.MaxConnections), 1, math.MaxInt32},
		{"producers a partition", int64(cfg.MaxProducers), 0, math.MaxInt64},
		{"as the version of transactions", int64(cfg.TransactionVersion), 1, 2},
		{"request bytes", int64(cfg.MaxRequestBytes), 1, math.MaxInt32},
		{"batch bytes", int64(cfg.MaxBatchBytes), 1, int64(cfg.MaxRequestBytes)},
		{"request memory", cfg.RequestMemory, minRequestMemory(cfg.MaxRequestBytes), math.MaxInt64},
		{"fetch memory", cfg.FetchMemory, fetchClaim(maxFetchBytes, cfg.MaxBatchBytes), math.MaxInt64},
	} {
		if f.value < f.low || f.value > f.high {
			return fmt.Errorf("config: %d %s, want %d to %d", f.value, f.name, f.low, f.high)
		}
	}
	return nil
}

// splitHostPort takes an address of the form host:port apart.
func splitHostPort(addr string) (host string, port uint16, err error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, err
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("port of %s: %w", addr, err)
	}
	return host, uint16(n), nil
}
