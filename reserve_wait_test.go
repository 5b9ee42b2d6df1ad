package idempotence

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// This file is waiting: many goroutines that reserve, settle in any order, fail,
// wait and give up waiting. Run it with -race.

// waitersOf starts n goroutines that want a batch, and returns when each of them
// waits for it.
func waitersOf(t *testing.T, ctx context.Context, m *ProducerStateManager, b Batch, n int) <-chan reservationAnswer {
	t.Helper()
	answers := make(chan reservationAnswer, n)
	asked := m.Stats().InFlight
	for range n {
		go func() {
			r, res, err := m.ReserveWait(ctx, b)
			answers <- reservationAnswer{r, res, err}
		}()
	}
	for deadline := time.Now().Add(10 * time.Second); m.Stats().InFlight < asked+uint64(n); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d have to wait", m.Stats().InFlight-asked, n)
		}
	}
	return answers
}

type reservationAnswer struct {
	r   *Reservation
	res Result
	err error
}

// soon returns the next answer, or fails if there is none for a long time.
func soon(t *testing.T, answers <-chan reservationAnswer) reservationAnswer {
	t.Helper()
	select {
	case a := <-answers:
		return a
	case <-time.After(10 * time.Second):
		t.Fatal("a waiter hangs")
		panic("unreachable")
	}
}

// requireNothingLeft fails if a reservation is left, or more goroutines than
// there were.
func requireNothingLeft(t *testing.T, m *ProducerStateManager, goroutines int) {
	t.Helper()
	audit(t, m)
	m.mu.Lock()
	pl := m.inFlight
	if len(pl.free) != len(pl.queues) || len(pl.newcomers) != 0 {
		t.Errorf("%d of %d queues are free, %d newcomers", len(pl.free), len(pl.queues), len(pl.newcomers))
	}
	for n := range pl.queues {
		for _, f := range pl.queues[n].batches {
			if f.done != nil {
				t.Errorf("queue %d keeps a channel", n)
			}
		}
	}
	m.mu.Unlock()
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > goroutines; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines, there were %d", runtime.NumGoroutine(), goroutines)
		}
	}
}

// TestReserveWait_NoneHangs: however an append ends, all that wait for it get an
// answer: the offset where it is in the log, and otherwise one of them becomes
// the owner of the batch and the others wait for that one.
func TestReserveWait_NoneHangs(t *testing.T) {
	const waiters = 40
	copied := Batch{ProducerID: 31, BaseSequence: 1, Count: 1}
	for _, end := range []struct {
		name string
		of   func(m *ProducerStateManager, first, second *Reservation) error
		next int32 // sequence that is next if the batch did not get into the log
	}{
		{"committed", func(_ *ProducerStateManager, first, second *Reservation) error {
			return errors.Join(second.Commit(1), first.Commit(0))
		}, 2},
		{"aborted", func(_ *ProducerStateManager, first, second *Reservation) error {
			return errors.Join(first.Commit(0), second.Abort())
		}, 1},
		{"an earlier one aborted", func(_ *ProducerStateManager, first, _ *Reservation) error { return first.Abort() }, 0},
		{"abandoned", func(m *ProducerStateManager, _, _ *Reservation) error {
			m.AbandonReservations()
			return nil
		}, 0},
		{"truncated", func(m *ProducerStateManager, _, _ *Reservation) error {
			m.Truncate(0)
			return nil
		}, 0},
		{"reset", func(m *ProducerStateManager, _, _ *Reservation) error {
			m.Reset()
			return nil
		}, 0},
		{"replayed", func(m *ProducerStateManager, _, _ *Reservation) error {
			return m.Replay(Batch{ProducerID: 31, Count: 1}, 0)
		}, 1},
		{"restored", func(m *ProducerStateManager, _, _ *Reservation) error {
			var b bytes.Buffer
			_, err := m.Snapshot().WriteTo(&b)
			return errors.Join(err, m.Restore(&b))
		}, 0},
	} {
		t.Run(end.name, func(t *testing.T) {
			goroutines := runtime.NumGoroutine()
			m := New(Config{})
			first, second := reserved(t, m, 0, 1), reserved(t, m, 1, 1)
			answers := waitersOf(t, context.Background(), m, copied, waiters)
			settled(t, end.of(m, first, second))
			switch end.next {
			case 2:
				for range waiters {
					if a := soon(t, answers); a.err != nil || a.res != (Result{Duplicate, 1}) {
						t.Fatalf("%+v, %v, want the duplicate at 1", a.res, a.err)
					}
				}
			case 1:
				owner := soon(t, answers)
				if owner.r == nil {
					t.Fatalf("%+v, %v, want a reservation first", owner.res, owner.err)
				}
				settled(t, owner.r.Commit(5))
				for range waiters - 1 {
					if a := soon(t, answers); a.err != nil || a.res != (Result{Duplicate, 5}) {
						t.Fatalf("%+v, %v, want the duplicate at 5", a.res, a.err)
					}
				}
			case 0:
				for range waiters {
					if a := soon(t, answers); !errors.Is(a.err, ErrOutOfOrderSequence) {
						t.Fatalf("%+v, %v, want the gap to be refused", a.res, a.err)
					}
				}
			}
			requireNothingLeft(t, m, goroutines)
		})
	}
}

// TestReserveWait_Cancelled: a waiter whose context ends gets an answer at once,
// which says both why and what it waited for. The append goes on.
func TestReserveWait_Cancelled(t *testing.T) {
	goroutines := runtime.NumGoroutine()
	m := New(Config{})
	a := reserved(t, m, 0, 1)
	copied := Batch{ProducerID: 31, BaseSequence: 0, Count: 1}
	ctx, cancel := context.WithCancel(context.Background())
	leaving := waitersOf(t, ctx, m, copied, 40)
	staying := waitersOf(t, context.Background(), m, copied, 40)
	before := stateOf(m)
	cancel()
	for range 40 {
		got := soon(t, leaving)
		if !errors.Is(got.err, context.Canceled) || !errors.Is(got.err, ErrInFlight) || got.r != nil {
			t.Fatalf("%+v, %v, want both context.Canceled and ErrInFlight", got.res, got.err)
		}
	}
	if fmt.Sprint(before) != fmt.Sprint(stateOf(m)) || len(staying) != 0 {
		t.Fatalf("the append was disturbed: %+v, before %+v, %d of the others have gone", stateOf(m), before, len(staying))
	}
	settled(t, a.Commit(7))
	for range 40 {
		if got := soon(t, staying); got.err != nil || got.res != (Result{Duplicate, 7}) {
			t.Fatalf("%+v, %v, want the duplicate at 7", got.res, got.err)
		}
	}
	requireNothingLeft(t, m, goroutines)
}

// TestReserveWait_NothingToWaitFor: where the batch can be judged, a context that
// has ended is not looked at.
func TestReserveWait_NothingToWaitFor(t *testing.T) {
	m := New(Config{})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r, res, err := m.ReserveWait(ctx, Batch{ProducerID: 31, Count: 1})
	if r == nil || res.Verdict != Append || err != nil {
		t.Fatalf("%+v, %v, want Append", res, err)
	}
	if _, _, err := m.ReserveWait(ctx, Batch{ProducerID: 31, BaseSequence: 5, Count: 1}); !errors.Is(err, ErrOutOfOrderSequence) {
		t.Fatalf("a gap: %v", err)
	}
}

// throng is goroutines that all send the same batches of a few producers, and
// settle them in any order. The log is laid out in advance, a stretch for each
// producer, so that an offset needs no lock.
type throng struct {
	t                           *testing.T
	m                           *ProducerStateManager
	appended, aborted, lost     atomic.Int64
	duplicates, cancelled, gaps atomic.Int64
	appends                     sync.WaitGroup
}

const (
	throngProducers = 5
	throngSenders   = 24
	throngBatches   = 60
)

func (th *throng) base(b Batch) int64 {
	return b.ProducerID*throngBatches + int64(b.BaseSequence)
}

// send gets one batch into the log, in whichever goroutine.
func (th *throng) send(rng *rand.Rand, b Batch) {
	for {
		ctx, cancel := context.Background(), context.CancelFunc(func() {})
		if rng.IntN(4) == 0 {
			ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(200))*time.Microsecond)
		}
		r, res, err := th.m.ReserveWait(ctx, b)
		cancel()
		switch {
		case errors.Is(err, ErrInFlight):
			th.cancelled.Add(1)
		case errors.Is(err, ErrOutOfOrderSequence):
			if th.isPast(b) {
				return
			}
			th.gaps.Add(1)
			th.fill(rng, err)
		case err != nil:
			th.t.Errorf("%+v: %v", b, err)
			return
		case res.Verdict == Duplicate:
			th.duplicates.Add(1)
			if res.BaseOffset != th.base(b) {
				th.t.Errorf("%+v is at %d, and said to be at %d", b, th.base(b), res.BaseOffset)
			}
			return
		default:
			th.append(rng.IntN(12) == 0, r, b)
			if rng.IntN(2) == 0 {
				return // pipelined: the next one is sent before this is settled
			}
		}
	}
}

// fill sends what is missing before a batch that was refused: it has failed after
// all others had gone on.
func (th *throng) fill(rng *rand.Rand, refusal error) {
	var e *BatchError
	if !errors.As(refusal, &e) {
		th.t.Errorf("an error without facts: %v", refusal)
		return
	}
	if missing := e.Batch; e.Expected < missing.BaseSequence {
		missing.BaseSequence = e.Expected
		th.send(rng, missing)
	}
}

// isPast reports whether a batch is in the log, too long ago to be remembered.
func (th *throng) isPast(b Batch) bool {
	p, ok := th.m.Producer(b.ProducerID)
	return ok && len(p.Window) > 0 && p.Window[0].FirstSequence > b.BaseSequence
}

// append lets an append succeed or fail after a while.
func (th *throng) append(fails bool, r *Reservation, b Batch) {
	th.appends.Add(1)
	go func() {
		defer th.appends.Done()
		for range rand.IntN(20) {
			runtime.Gosched()
		}
		settle := func() error { return r.Commit(th.base(b)) }
		count := &th.appended
		if fails {
			settle, count = r.Abort, &th.aborted
		}
		switch err := settle(); {
		case err == nil:
			count.Add(1)
		case errors.Is(err, ErrAbandoned):
			th.lost.Add(1)
		case !errors.Is(err, ErrGap):
			th.t.Errorf("%+v: %v", b, err)
		}
		if err := r.Abort(); !errors.Is(err, ErrSettled) && !errors.Is(err, ErrAbandoned) {
			th.t.Errorf("a second call for %+v: %v", b, err)
		}
	}()
}

// TestReserveWait_Throng: afterwards every batch is in its place, and nothing is
// left: no reservation, no waiter, no goroutine.
func TestReserveWait_Throng(t *testing.T) {
	goroutines := runtime.NumGoroutine()
	th := &throng{t: t, m: New(Config{})}
	var senders sync.WaitGroup
	for pid := range int64(throngProducers) {
		for s := range uint64(throngSenders) {
			senders.Add(1)
			go func() {
				defer senders.Done()
				rng := rand.New(rand.NewPCG(uint64(pid), s))
				for seq := range int32(throngBatches) {
					th.send(rng, Batch{ProducerID: pid, BaseSequence: seq, Count: 1})
				}
			}()
		}
	}
	stop := th.disturb()
	senders.Wait()
	stop()
	th.appends.Wait()
	rng := rand.New(rand.NewPCG(1, 1))
	for pid := range int64(throngProducers) {
		for seq := range int32(throngBatches) {
			for b := (Batch{ProducerID: pid, BaseSequence: seq, Count: 1}); !th.has(b); th.appends.Wait() {
				th.send(rng, b)
			}
		}
	}
	requireNothingLeft(t, th.m, goroutines)
	for pid := range int64(throngProducers) {
		p, _ := th.m.Producer(pid)
		if newest := p.Window[len(p.Window)-1]; newest.FirstSequence != throngBatches-1 || len(p.Window) != WindowSize {
			t.Errorf("producer %d ends in %+v", pid, newest)
		}
	}
	for what, n := range map[string]*atomic.Int64{
		"appended": &th.appended, "aborted": &th.aborted, "lost": &th.lost, "duplicates": &th.duplicates, "cancelled": &th.cancelled,
	} {
		if n.Load() < 5 {
			t.Errorf("%s: %d times", what, n.Load())
		}
	}
	t.Logf("appended %d, aborted %d, lost %d, duplicates %d, cancelled %d, gaps %d", th.appended.Load(), th.aborted.Load(),
		th.lost.Load(), th.duplicates.Load(), th.cancelled.Load(), th.gaps.Load())
}

func (th *throng) has(b Batch) bool {
	res, err := th.m.CheckBatch(b)
	return err == nil && res.Verdict == Duplicate || th.isPast(b)
}

// disturb abandons everything, again and again, by each of the ways that leave
// the log alone, and looks at everything, until it is stopped.
func (th *throng) disturb() (stop func()) {
	var done atomic.Bool
	var all sync.WaitGroup
	for _, disturbance := range []func(){
		th.m.AbandonReservations,
		func() { th.m.Truncate(1 << 40) },
		func() { th.m.Expire(time.UnixMilli(1)) },
		func() { lookAtEverything(th.m) },
		func() { th.m.Snapshot().EndOffset() },
	} {
		all.Add(1)
		go func() {
			defer all.Done()
			for !done.Load() {
				disturbance()
				time.Sleep(2 * time.Millisecond)
			}
		}()
	}
	return func() {
		done.Store(true)
		all.Wait()
	}
}
