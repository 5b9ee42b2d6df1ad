package server

// This file shares memory out among connections. A connection may hold memory
// while it waits for its client to send the rest of a request, or to take an
// answer. If others need that memory, clients have to keep up a minimum pace.

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
)

const (
	// networkPiece is how much is read or written at a time. A client that takes
	// longer than maxStall for a piece is too slow to hold memory that others
	// wait for: the minimum pace is 320 KiB/s.
	networkPiece = 64 << 10
	maxStall     = 200 * time.Millisecond
)

// errBusy is returned when memory for a request or an answer did not become
// free in time.
var errBusy = errors.New("server: out of memory for requests or answers")

// A holder is a connection as a pool sees it.
type holder interface {
	stalled(now time.Time) bool // has it waited for its client for too long?
	drop()                      // ends it, so that it soon releases what it holds
}

// A pool is an amount of memory. While a holder waits for more of it than is
// free, holders that have stalled are dropped. Waiting holders are served in
// the order in which they came.
type pool struct {
	free *semaphore.Weighted

	mu       sync.Mutex
	held     map[holder]int64
	waiting  int  // calls of acquire
	dropping bool // dropStalled is running
}

func newPool(bytes int64) *pool {
	return &pool{free: semaphore.NewWeighted(bytes), held: make(map[holder]int64)}
}

// acquire waits until n bytes are free, or ctx ends, which is errBusy. Each call
// without an error needs a call of release.
func (p *pool) acquire(ctx context.Context, h holder, n int64) error {
	if !p.free.TryAcquire(n) && p.wait(ctx, n) != nil {
		return errBusy
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[h] += n
	return nil
}

func (p *pool) release(h holder, n int64) {
	p.mu.Lock()
	if p.held[h] -= n; p.held[h] == 0 {
		delete(p.held, h)
	}
	p.mu.Unlock()
	p.free.Release(n)
}

func (p *pool) wait(ctx context.Context, n int64) error {
	p.mu.Lock()
	p.waiting++
	if !p.dropping {
		p.dropping = true
		go p.dropStalled()
	}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.waiting--
	}()
	return p.free.Acquire(ctx, n)
}

// dropStalled drops stalled holders while there are calls that wait.
func (p *pool) dropStalled() {
	for p.wanted() {
		p.mu.Lock()
		holders := slices.Collect(maps.Keys(p.held))
		p.mu.Unlock()
		for _, h := range holders {
			if h.stalled(time.Now()) {
				h.drop()
			}
		}
		time.Sleep(maxStall / 5)
	}
}

func (p *pool) wanted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropping = p.waiting > 0
	return p.dropping
}

// A claim is memory that was acquired from a pool. The zero claim is none.
type claim struct {
	pool  *pool
	bytes int64
}

func (c claim) release(h holder) {
	if c.pool != nil {
		c.pool.release(h, c.bytes)
	}
}

// A pace is what a connection notes while it reads or writes: when its client
// last took or sent a piece. The zero pace is that of a connection that is not
// waiting for its client.
type pace struct{ nanos atomic.Int64 }

func (p *pace) moves()  { p.nanos.Store(time.Now().UnixNano()) }
func (p *pace) pauses() { p.nanos.Store(0) }

func (p *pace) stalled(now time.Time) bool {
	moved := p.nanos.Load()
	return moved != 0 && now.UnixNano()-moved > int64(maxStall)
}
