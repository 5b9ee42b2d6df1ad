package idempotence

import (
	"errors"
	"io"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// This file uses transactions from many goroutines. Run it with -race.

// crowdLog is a partition whose appends finish outside its lock.
type crowdLog struct {
	m    *ProducerStateManager
	mu   sync.Mutex // the append lock
	log  []logged
	end  int64
	hw   atomic.Int64
	wait sync.WaitGroup // for appends in flight
}

// append gives an entry its place. It requires c.mu held.
func (c *crowdLog) append(l logged) int64 {
	l.base = c.end
	c.log, c.end = append(c.log, l), l.end()
	return l.base
}

// produce appends a batch, and commits it under the lock or, if it is reserved, later.
func (c *crowdLog) produce(b Batch, reserve bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !reserve {
		if _, err := c.m.CheckBatch(b); err != nil {
			return err
		}
		return c.m.CommitBatch(b, c.append(logged{batch: b}))
	}
	r, _, err := c.m.Reserve(b)
	if err != nil {
		return err
	}
	base := c.append(logged{batch: b})
	c.wait.Add(1)
	go func() {
		defer c.wait.Done()
		if err := r.Commit(base); err != nil {
			panic(err)
		}
	}()
	return nil
}

// endTxn appends a marker, once nothing of its producer is in flight.
func (c *crowdLog) endTxn(k Marker, reserve bool) error {
	for {
		c.mu.Lock()
		err := c.endTxnLocked(k, reserve)
		c.mu.Unlock()
		var inFlight *InFlightError
		if !errors.As(err, &inFlight) {
			return err
		}
		<-inFlight.Done()
	}
}

func (c *crowdLog) endTxnLocked(k Marker, reserve bool) error {
	if reserve {
		r, err := c.m.ReserveMarker(k)
		if err != nil {
			return err
		}
		return r.Commit(c.append(logged{marker: &k}))
	}
	if err := c.m.CheckMarker(k); err != nil {
		return err
	}
	return c.m.CommitMarker(k, c.append(logged{marker: &k}))
}

// read reads committed records as a Fetch does, from an offset on, and returns what is
// wrong with them.
func (c *crowdLog) read(t *testing.T, from int64) (stable int64) {
	stable = c.m.LastStableOffset(c.hw.Load())
	c.mu.Lock()
	log := slices.Clone(c.log)
	c.mu.Unlock()
	aborted, err := c.m.AbortedTransactions(from, stable)
	if errors.Is(err, ErrAbortedUnknown) {
		return stable // deleted meanwhile
	} else if err != nil {
		t.Errorf("aborted: %v", err)
	}
	var want []int64
	fate := fates(log)
	for _, l := range log {
		if l.end() <= from || l.base >= stable || l.marker != nil {
			continue
		}
		if fate[l.base] == "open" {
			t.Errorf("the batch at %d is of an open transaction, and the last stable offset is %d", l.base, stable)
		}
		if fate[l.base] != "aborted" {
			want = append(want, l.base)
		}
	}
	if got := readCommitted(log, from, stable, aborted); !slices.Equal(got, want) {
		t.Errorf("a reader of [%d, %d) sees the batches at %v, want %v", from, stable, got, want)
	}
	return stable
}

// TestConcurrentTransactions: producers, coordinators, readers, snapshots and deletion at
// once. Every reader sees whole transactions, and its last stable offset never falls.
func TestConcurrentTransactions(t *testing.T) {
	const producers, transactions = 5, 40
	c := &crowdLog{m: New(Config{Contiguous: true})}
	var writers, others sync.WaitGroup
	var done atomic.Bool
	for pid := range int64(producers) {
		writers.Add(1)
		go func() {
			defer writers.Done()
			epoch, seq := int16(0), int32(0)
			for i := range transactions {
				for range 1 + (int(pid)+i)%3 {
					b := Batch{ProducerID: pid, Epoch: epoch, BaseSequence: seq, Count: 2, Transactional: true}
					if err := c.produce(b, i%2 == 0); err != nil {
						t.Errorf("produce %+v: %v", b, err)
						return
					}
					seq += 2
				}
				k := Marker{ProducerID: pid, Epoch: epoch, Commit: (int(pid)+i)%3 == 0}
				if i%4 == 3 {
					k.Version, k.Epoch = 2, epoch+1
					epoch, seq = epoch+1, 0
				}
				if err := c.endTxn(k, i%3 == 0); err != nil {
					t.Errorf("end with %+v: %v", k, err)
					return
				}
			}
		}()
	}
	beside := func(do func()) {
		others.Add(1)
		go func() {
			defer others.Done()
			for !done.Load() {
				do()
			}
		}()
	}
	beside(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.hw.Store(c.end)
	})
	for range 2 {
		last := int64(0)
		beside(func() {
			if got := c.read(t, last/2); got < last {
				t.Errorf("the last stable offset is %d, and it was %d", got, last)
			} else {
				last = got
			}
		})
	}
	beside(func() {
		if _, err := c.m.Snapshot().WriteTo(io.Discard); err != nil {
			t.Errorf("snapshot: %v", err)
		}
		c.m.AdvanceStart(c.hw.Load() / 8)
		c.m.OldestTransaction()
		c.m.Stats()
	})
	writers.Wait()
	c.wait.Wait()
	done.Store(true)
	others.Wait()

	audit(t, c.m)
	if got := c.m.LastStableOffset(c.end); got != c.end {
		t.Errorf("all has ended, and the last stable offset is %d of %d", got, c.end)
	}
	c.hw.Store(c.end)
	c.read(t, c.end/2)
	rebuilt := New(Config{Contiguous: true})
	for _, l := range c.log {
		if err := apply(rebuilt, l); err != nil {
			t.Fatal(err)
		}
	}
	from := c.end / 2
	if got, want := mustAborted(t, rebuilt, from, math.MaxInt64), mustAborted(t, c.m, from, math.MaxInt64); !slices.Equal(got, want) || len(want) < 10 {
		t.Errorf("%d aborted transactions, and after a rebuild %d", len(want), len(got))
	}
}
