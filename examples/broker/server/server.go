// Package server is a single-node Kafka broker around package idempotence:
// one log and one ProducerStateManager a partition. See partition.go, which is
// where the library is used: a batch is judged and takes its place under a lock,
// gets to disk without one, together with others, and is remembered then.
//
// It serves idempotent producers and plain partition consumers. Transactions,
// consumer groups, replication, authentication and retention are not here.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// Config is how a broker is set up. Zero values mean the default given with
// each field.
type Config struct {
	Dir       string // where topics and producer ids are kept; required
	Advertise string // host:port told to clients; default: where they connected to

	Partitions    int32 // of a topic created on first use; default 3
	MaxPartitions int   // of all topics together; default 3000
	SegmentBytes  int64 // size at which a segment is rolled; default 128 MiB
	MaxBatchBytes int   // largest record batch; default 1 MiB and a little, as in Kafka

	MaxConnections  int   // more are closed at once; default 1000
	MaxRequestBytes int   // largest Produce request; default 8 MiB
	RequestMemory   int64 // for requests being read and served; default 64 MiB
	FetchMemory     int64 // for Fetch answers on their way; default 64 MiB

	// NoSync leaves it to the operating system when an append gets to disk: what
	// is acknowledged outlives the broker, but perhaps not a loss of power. By
	// default nothing is acknowledged before it is on disk.
	NoSync bool

	// ExpireAfter is how long a producer may be idle before a partition forgets
	// it; default 24 hours, negative: never. MaxProducers is the most that a
	// partition remembers; default: no limit.
	ExpireAfter  time.Duration
	MaxProducers int

	// OpenFile opens the segments of logs; default os.OpenFile. Tests open files
	// with it that fail.
	OpenFile func(name string, flag int, perm os.FileMode) (segment.File, error)

	// WithoutDeduplication appends whatever comes, to show what happens then.
	WithoutDeduplication bool

	// Observe is called with the verdict on each batch: after it was appended
	// and committed, or recognised, or refused, and before the producer is
	// answered. It is called concurrently, without any lock.
	Observe func(Event)

	Log *slog.Logger // default: nothing is logged
}

// An Event is one batch and what became of it.
type Event struct {
	Topic     string
	Partition int32
	Batch     idempotence.Batch
	Result    idempotence.Result // with the batch's offset also when appended
	Err       error              // the refusal, if it was refused
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
	if cfg.Observe == nil {
		cfg.Observe = func(Event) {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return cfg
}

// check finds limits that contradict each other: a request or an answer that
// is allowed must fit into the memory for it.
func (cfg Config) check() error {
	switch {
	case cfg.Dir == "":
		return errors.New("config: no data directory")
	case cfg.Partitions < 1 || int(cfg.Partitions) > cfg.MaxPartitions:
		return fmt.Errorf("config: %d partitions a topic, 1 to %d are possible", cfg.Partitions, cfg.MaxPartitions)
	case cfg.MaxBatchBytes > cfg.MaxRequestBytes:
		return fmt.Errorf("config: a batch of %d bytes does not fit into a request of %d", cfg.MaxBatchBytes, cfg.MaxRequestBytes)
	case cfg.RequestMemory < int64(max(cfg.MaxRequestBytes, maxSmallRequest*smallRequestRatio)):
		return fmt.Errorf("config: request memory of %d bytes is less than one request may take", cfg.RequestMemory)
	case cfg.FetchMemory < int64(2*(maxFetchBytes+cfg.MaxBatchBytes)):
		return fmt.Errorf("config: fetch memory of %d bytes is less than one answer may take", cfg.FetchMemory)
	}
	return nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// A Server is one broker. Its methods may be called concurrently.
type Server struct {
	cfg           Config
	lock          *os.File
	topics        *topics
	producerIDs   *producerIDs
	requestMemory *semaphore.Weighted
	fetchMemory   *semaphore.Weighted

	// closing ends with Shutdown; requests that wait for something give up.
	closing context.Context
	close   context.CancelFunc

	mu        sync.Mutex
	listeners map[net.Listener]struct{}
	conns     map[net.Conn]struct{}
	serving   sync.WaitGroup // one for each connection
	expiring  sync.WaitGroup // the ticker
}

// Open opens the data directory, which no other broker may have open, and
// rebuilds the state of every producer from the logs in it.
func Open(cfg Config) (_ *Server, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return nil, err
	}
	s := &Server{
		cfg:           cfg,
		requestMemory: semaphore.NewWeighted(cfg.RequestMemory),
		fetchMemory:   semaphore.NewWeighted(cfg.FetchMemory),
		listeners:     make(map[net.Listener]struct{}),
		conns:         make(map[net.Conn]struct{}),
	}
	s.closing, s.close = context.WithCancel(context.Background())

	if s.lock, err = lockFile(filepath.Join(cfg.Dir, "lock")); err != nil {
		return nil, fmt.Errorf("data directory %s: %w", cfg.Dir, err)
	}
	if s.topics, err = openTopics(cfg); err != nil {
		return nil, errors.Join(err, s.lock.Close())
	}
	s.producerIDs, err = openProducerIDs(filepath.Join(cfg.Dir, "producer-ids"), s.topics.maxProducerID())
	if err != nil {
		return nil, errors.Join(err, s.topics.close(false), s.lock.Close())
	}
	s.expiring.Go(s.expire)
	return s, nil
}

// Producers are forgotten at most one interval late.
const maxExpireInterval = time.Minute

// expire has producers forgotten until Shutdown.
func (s *Server) expire() {
	ticker := time.NewTicker(expireInterval(s.cfg.ExpireAfter))
	defer ticker.Stop()
	for {
		select {
		case now := <-ticker.C:
			s.topics.expire(now)
		case <-s.closing.Done():
			return
		}
	}
}

// expireInterval is short against the time that producers may be idle. Where
// they are never forgotten it still tells when they were active.
func expireInterval(after time.Duration) time.Duration {
	if after < 0 {
		return maxExpireInterval
	}
	return min(max(after/10, time.Millisecond), maxExpireInterval)
}

// Serve accepts connections until Shutdown, and then returns nil.
func (s *Server) Serve(ln net.Listener) error {
	s.mu.Lock()
	s.listeners[ln] = struct{}{}
	s.mu.Unlock()
	for s.closing.Err() == nil {
		nc, err := ln.Accept()
		switch {
		case s.closing.Err() != nil:
			if err == nil {
				nc.Close()
			}
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil:
			// Most likely out of file descriptors, which passes.
			s.cfg.Log.Warn("accept failed", "err", err)
			time.Sleep(50 * time.Millisecond)
		case !s.admit(nc):
			s.cfg.Log.Warn("too many connections", "refused", nc.RemoteAddr())
			nc.Close()
		default:
			go s.serveConn(nc)
		}
	}
	return nil
}

// admit takes the connection on, unless there are too many or it is too late.
func (s *Server) admit(nc net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing.Err() != nil || len(s.conns) >= s.cfg.MaxConnections {
		return false
	}
	s.conns[nc] = struct{}{}
	s.serving.Add(1)
	return true
}

func (s *Server) dismiss(nc net.Conn) {
	nc.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, nc)
	s.serving.Done()
}

// Shutdown stops accepting, lets requests that have arrived be answered, and
// closes the logs, synced and with a snapshot of their producers. Once ctx ends
// it waits for nothing but the appends that are under way; a ctx that has ended
// already makes it an abrupt stop.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.close()
	for ln := range s.listeners {
		ln.Close()
	}
	// Wakes the connections that wait for their client's next request.
	for nc := range s.conns {
		nc.SetReadDeadline(time.Now())
	}
	s.mu.Unlock()

	stop := context.AfterFunc(ctx, s.closeConns)
	defer stop()
	s.serving.Wait()
	s.expiring.Wait()
	return errors.Join(s.topics.close(ctx.Err() == nil), s.lock.Close())
}

func (s *Server) closeConns() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for nc := range s.conns {
		nc.Close()
	}
}
