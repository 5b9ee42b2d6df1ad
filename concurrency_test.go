package idempotence

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// This file uses one manager from many goroutines. Run it with -race.

// crowd is how many producers there are, each with as many goroutines that all
// send the same batches, as retries over several connections do.
const (
	crowdProducers = 6
	crowdSenders   = 3
	crowdBatches   = 200
)

// forEachSender runs send in a goroutine for each sender of each producer, and
// lookers beside them until the last is done.
func forEachSender(m *ProducerStateManager, send func(pid int64)) {
	var senders, lookers sync.WaitGroup
	var done atomic.Bool
	for range 2 {
		lookers.Add(1)
		go func() {
			defer lookers.Done()
			for !done.Load() {
				lookAtEverything(m)
			}
		}()
	}
	for pid := range int64(crowdProducers) {
		for range crowdSenders {
			senders.Add(1)
			go func() {
				defer senders.Done()
				send(pid)
			}()
		}
	}
	senders.Wait()
	done.Store(true)
	lookers.Wait()
}

// lookAtEverything calls every method that may be called at any time.
func lookAtEverything(m *ProducerStateManager) {
	for p := range m.Producers() {
		if _, ok := m.Producer(p.ProducerID); !ok {
			panic(fmt.Sprintf("producer %d is gone", p.ProducerID))
		}
	}
	m.Advance(m.EndOffset())
	m.Expire(time.UnixMilli(1))
	_, _ = m.Check(int64(m.Len()), 0, 0, 1)
	_, _ = m.Check(m.MaxProducerID(), 0, int32(m.Stats().Accepted%crowdBatches), 1)
}

// TestConcurrentWithAppendLock: the append lock is held from Check to Commit, as
// documented. Whoever comes first, each batch is stored exactly once, in order,
// and every sender is told the same offset.
func TestConcurrentWithAppendLock(t *testing.T) {
	var appendLock sync.Mutex
	p := newPartition(Config{})
	var told sync.Map
	forEachSender(p.m, func(pid int64) {
		for seq := range int32(crowdBatches) {
			b := Batch{ProducerID: pid, BaseSequence: seq, Count: 1}
			appendLock.Lock()
			res, err := p.produce(b)
			appendLock.Unlock()
			// A sender that others have left more than five batches behind is
			// where no client can be: it has the oldest unacknowledged batch.
			if errors.Is(err, ErrOutOfOrderSequence) {
				continue
			}
			base, _ := told.LoadOrStore(b, res.BaseOffset)
			if err != nil || base != res.BaseOffset {
				t.Errorf("producer %d sequence %d: %+v, %v; another was told %d", pid, seq, res, err, base)
			}
		}
	})
	audit(t, p.m)
	requireOnceInOrder(t, p.log)
}

// requireOnceInOrder reads the log: each producer's batches, each once and none
// out of order.
func requireOnceInOrder(t *testing.T, log []logged) {
	t.Helper()
	next := map[int64]int32{}
	for _, l := range log {
		if l.batch.BaseSequence != next[l.batch.ProducerID] {
			t.Fatalf("producer %d has sequence %d at offset %d, want %d",
				l.batch.ProducerID, l.batch.BaseSequence, l.base, next[l.batch.ProducerID])
		}
		next[l.batch.ProducerID]++
	}
	for pid := range int64(crowdProducers) {
		if next[pid] != crowdBatches {
			t.Errorf("producer %d has %d batches in the log, want %d", pid, next[pid], crowdBatches)
		}
	}
}

// TestConcurrentWithoutAppendLock: no lock is held from Check to Commit, so
// several appenders pass Check with the same batch. Commit takes one of them and
// refuses the others, and the state stays sound.
func TestConcurrentWithoutAppendLock(t *testing.T) {
	m := New(Config{})
	var logEnd, refused atomic.Int64
	committed := make([][crowdBatches]atomic.Int32, crowdProducers)
	forEachSender(m, func(pid int64) {
		for seq := range int32(crowdBatches) {
			res, err := m.Check(pid, 0, seq, 1)
			if err != nil && !errors.Is(err, ErrOutOfOrderSequence) {
				t.Errorf("Check of producer %d sequence %d: %v", pid, seq, err)
			}
			if res.Verdict != Append {
				continue
			}
			err = m.Commit(pid, 0, seq, 1, logEnd.Add(1)-1)
			switch {
			case err == nil:
				committed[pid][seq].Add(1)
			case errors.Is(err, ErrOutOfOrderSequence):
				refused.Add(1)
			default:
				t.Errorf("Commit of producer %d sequence %d: %v", pid, seq, err)
			}
		}
	})
	audit(t, m)
	for pid := range committed {
		for seq := range committed[pid] {
			if n := committed[pid][seq].Load(); n != 1 {
				t.Errorf("producer %d sequence %d was committed %d times", pid, seq, n)
			}
		}
	}
	if got := m.Stats().Accepted; got+uint64(refused.Load()) != uint64(logEnd.Load()) {
		t.Errorf("%d accepted and %d refused of %d appended", got, refused.Load(), logEnd.Load())
	}
}

// TestSecondCommitRefused is the race of the test above, step by step: two
// appenders have both passed Check.
func TestSecondCommitRefused(t *testing.T) {
	play(t, `
		check pid=31 epoch=0 seq=0 n=3 -> OK #A
		check pid=31 epoch=0 seq=0 n=3 -> OK #B
		commit #A base=0 -> OK
		commit #B base=3 -> REFUSED DUPLICATE_SEQUENCE base=3 first=0
		batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
	`)
}
