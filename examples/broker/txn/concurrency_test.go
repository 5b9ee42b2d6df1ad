package txn

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// A groupLog is a log whose records wait for a sync, one after the other. All
// that has been appended when a sync begins is durable when it ends.
type groupLog struct {
	mu       sync.Mutex
	bytes    []byte
	appended int
	synced   int
	syncing  sync.Mutex
	syncs    int
}

func (l *groupLog) Append(record []byte) func() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bytes = append(l.bytes, record...)
	l.appended++
	mine := l.appended
	return func() error {
		l.syncing.Lock()
		defer l.syncing.Unlock()
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.synced >= mine {
			return nil
		}
		l.syncs++
		group := l.appended
		l.mu.Unlock()
		time.Sleep(100 * time.Microsecond) // the disk
		l.mu.Lock()
		l.synced = group
		return nil
	}
}

// Producers of different transactional ids run transactions at once, with a
// sender of markers, a clock and readers beside them. The log then holds what
// the coordinator shows.
func TestConcurrentProducers(t *testing.T) {
	const producers, transactions = 8, 40
	log := new(groupLog)
	r, err := Recover(nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewCoordinator(Config{}, r, log)
	if err != nil {
		t.Fatal(err)
	}
	now := time.UnixMilli(1_700_000_000_000)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)

	stop := make(chan struct{})
	var beside, work sync.WaitGroup
	loop := func(f func()) {
		beside.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					f()
				}
			}
		})
	}
	loop(func() { // the sender
		for _, m := range c.Markers() {
			if err := c.MarkerDone(now, m, nil); err != nil {
				t.Error(err)
			}
		}
	})
	loop(func() {
		if err := c.Expire(now); err != nil {
			t.Error(err)
		}
		c.List()
		c.OffsetFetch("g", nil, true)
		c.Epoch()
		time.Sleep(time.Millisecond)
	})
	for i := range producers {
		work.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			id, version := fmt.Sprintf("id-%d", i), int8(1+i%2)
			p, err := c.InitProducerID(now, id, NoProducer, time.Minute)
			if err != nil {
				t.Error(err)
				return
			}
			again := func(f func() error) {
				for err := f(); err != nil; err = f() {
					if ok(err) != "CONCURRENT_TRANSACTIONS" {
						t.Errorf("%s: %v", id, err)
						return
					}
					time.Sleep(50 * time.Microsecond)
				}
			}
			for n := range transactions {
				partitions := []Partition{{"t", int32(random.IntN(3))}, {"u", 0}}
				var adding sync.WaitGroup // as Produce requests for different partitions
				for _, partition := range partitions {
					adding.Go(func() {
						again(func() error { return c.AddPartitionsToTxn(now, id, p, version, []Partition{partition}) })
					})
				}
				adding.Wait()
				if version == 1 {
					again(func() error { return c.AddOffsetsToTxn(now, id, p, "g") })
				}
				offset := Offset{Partition{"in", int32(i)}, int64(n), -1, ""}
				again(func() error { return c.TxnOffsetCommit(now, id, p, version, "g", []Offset{offset}) })
				again(func() error {
					next, err := c.EndTxn(now, id, p, version, n%4 != 3)
					if err == nil {
						p = next
					}
					return err
				})
			}
		})
	}
	work.Wait()
	for len(c.Markers()) > 0 {
		time.Sleep(time.Millisecond)
	}
	close(stop)
	beside.Wait()

	w := &world{t: t, c: c, now: now}
	if diff := cmp.Diff(w.shown(), recovered(t, log.bytes)); diff != "" {
		t.Errorf("(-live +recovered):\n%s", diff)
	}
	for i := range producers {
		d, _ := c.Describe(fmt.Sprintf("id-%d", i))
		if want := int16(transactions * (i % 2)); d.Producer.Epoch != want || d.State != CompleteAbort {
			t.Errorf("%s: %v %v, want epoch %d", d.TransactionalID, d.State, d.Producer, want)
		}
		got := c.OffsetFetch("g", []Partition{{"in", int32(i)}}, true)[0]
		if got.Committed.Offset != transactions-2 {
			t.Errorf("producer %d: offset %d, want %d", i, got.Committed.Offset, transactions-2)
		}
	}
	if log.syncs >= log.appended {
		t.Errorf("%d syncs for %d records: none were shared", log.syncs, log.appended)
	}
	t.Logf("%d records, %d syncs", log.appended, log.syncs)
}

// Requests for one transactional id take turns: no two get the same epoch.
func TestConcurrentInitProducerID(t *testing.T) {
	const requests = 50
	w := newWorld(t)
	w.c.log = new(groupLog) // whose records are long in coming
	got := make(chan Producer, requests)
	var all sync.WaitGroup
	for range requests {
		all.Go(func() {
			p, err := w.c.InitProducerID(w.now, "a", NoProducer, time.Minute)
			if err != nil {
				t.Error(err)
			}
			got <- p
		})
	}
	all.Wait()
	close(got)
	seen := map[Producer]bool{}
	for p := range got {
		if seen[p] || p.ID != firstID || p.Epoch < 0 || p.Epoch >= requests {
			t.Errorf("got %v", p)
		}
		seen[p] = true
	}
	if len(w.c.locks) != 0 {
		t.Errorf("%d locks are left", len(w.c.locks))
	}
}
