// Package server is a single-node Kafka broker around package idempotence. Each
// partition is a log and a ProducerStateManager. A batch is judged and queued
// under a lock, is written and synced without it, together with others, and is
// then committed. The file partition.go has these steps.
//
// The broker serves idempotent and transactional producers, and consumers of
// single partitions at either isolation level. It keeps the offsets of consumer
// groups, but does not run the groups. It has no replication, authentication or
// retention.
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

	"github.com/idempotence-go/idempotence/examples/broker/durable"
	"github.com/idempotence-go/idempotence/examples/broker/wire"
)

// lockName is a file of the data directory. TxnLogName and cleanStopName are
// others.
const lockName = "lock"

// A Server is one broker. Its methods may be called concurrently.
type Server struct {
	cfg         Config
	apis        wire.APIs
	quiet       *quietHandler // of cfg.repeated
	lock        *os.File
	topics      *topics
	coordinator *coordinator

	smallRequests, largeRequests, fetchAnswers *pool

	// closing ends when Shutdown begins. What waits for something else waits for
	// this too.
	closing context.Context
	close   context.CancelFunc

	mu        sync.Mutex
	listeners map[net.Listener]struct{}
	conns     map[net.Conn]struct{}
	serving   sync.WaitGroup // one for each connection
	expiring  sync.WaitGroup // the ticker
}

// Open opens the data directory, which no other broker may have open, and
// recovers the producers of each partition from its log. A partition that cannot
// be recovered is offline: see [Server.Offline].
func Open(cfg Config) (_ *Server, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	s := &Server{
		quiet:         newQuietHandler(cfg.Log.Handler(), quietInterval),
		smallRequests: newPool(cfg.RequestMemory / smallShare),
		largeRequests: newPool(cfg.RequestMemory - cfg.RequestMemory/smallShare),
		fetchAnswers:  newPool(cfg.FetchMemory),
		listeners:     make(map[net.Listener]struct{}),
		conns:         make(map[net.Conn]struct{}),
	}
	cfg.repeated = slog.New(s.quiet)
	s.cfg = cfg
	s.apis = servedAPIs(cfg.TransactionVersion)
	s.closing, s.close = context.WithCancel(context.Background())
	if err := s.openDir(); err != nil {
		return nil, err
	}
	s.expiring.Go(s.expire)
	cfg.Opened(s)
	return s, nil
}

// openDir opens what is in the data directory.
func (s *Server) openDir() (err error) {
	if err := durable.MkdirAll(s.cfg.Dir); err != nil {
		return err
	}
	s.lock, err = durable.Lock(filepath.Join(s.cfg.Dir, lockName))
	if err != nil {
		return fmt.Errorf("data directory %s: %w", s.cfg.Dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.lock.Close())
		}
	}()
	if s.topics, err = openTopics(s.cfg); err != nil {
		return err
	}
	if err := writeCleanStop(s.cfg.Dir, s.topics.all()); err != nil {
		return errors.Join(err, s.topics.close(alreadyEnded()))
	}
	if s.coordinator, err = openCoordinator(s.closing, s.cfg, s.topics); err != nil {
		return errors.Join(err, s.topics.close(alreadyEnded()))
	}
	return nil
}

// An OfflinePartition is one that is not served. Requests for it are answered
// with KAFKA_STORAGE_ERROR, which clients retry.
type OfflinePartition struct {
	Topic     string
	Partition int32
	Err       error // why
}

// Offline returns the partitions that are offline, in no particular order: those
// whose log was damaged when the broker started, and those whose log could not
// be restored after a failed append.
func (s *Server) Offline() []OfflinePartition {
	var offline []OfflinePartition
	for _, p := range s.topics.all() {
		if err := p.offlineReason(); err != nil {
			offline = append(offline, OfflinePartition{p.topic, p.index, err})
		}
	}
	return offline
}

// maxExpireInterval is how late producers may be forgotten.
const maxExpireInterval = time.Minute

// expire has idle producers forgotten until Shutdown.
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

// expireInterval is short compared with the time that producers may be idle. If
// they are never forgotten, expiry still records when they were active.
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
			// Most likely there are no file descriptors left, for now.
			s.cfg.repeated.Warn("accept failed", "err", err)
			time.Sleep(50 * time.Millisecond)
		case !s.admit(nc):
			s.cfg.repeated.Warn("too many connections", "refused", nc.RemoteAddr())
			nc.Close()
		default:
			go s.serveConn(nc)
		}
	}
	return nil
}

// admit registers a connection, unless there are too many or it is too late.
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

// Shutdown stops accepting connections, lets requests that have arrived be
// answered, and closes the logs, synced and with a snapshot of their producers.
// When ctx ends it waits only for the appends in progress. With a ctx that has
// ended already the stop is an unclean one.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.close()
	for ln := range s.listeners {
		ln.Close()
	}
	// This wakes the connections that wait for their client's next request.
	for nc := range s.conns {
		nc.SetReadDeadline(time.Now())
	}
	s.mu.Unlock()

	stop := context.AfterFunc(ctx, s.closeConns)
	defer stop()
	s.serving.Wait()
	s.expiring.Wait()
	err := s.coordinator.close(ctx.Err() == nil)
	err = errors.Join(err, s.topics.close(ctx))
	err = errors.Join(err, writeCleanStop(s.cfg.Dir, s.topics.all()))
	s.quiet.flush()
	return errors.Join(err, s.lock.Close())
}

func (s *Server) closeConns() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for nc := range s.conns {
		nc.Close()
	}
}

// alreadyEnded returns a context that has ended.
func alreadyEnded() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}
