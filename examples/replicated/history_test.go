package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/history/spec"
)

const (
	historyBatches = 25 // of each history
	historyWorkers = 3
)

// A history is what the batches of one producer were answered, which a few
// workers send at the same time: the first batches that were not acknowledged
// yet, and those that were once more.
type history struct {
	client     *kgo.Client
	leader     func(context.Context) int32
	producerID int64
	partition  int32
	begun      time.Time

	mu           sync.Mutex
	rng          *rand.Rand
	acknowledged int // batches from the first on
	ops          []attempt
}

// An attempt is one batch that was sent, and the answer.
type attempt struct {
	client        int
	sequence      int32 // each batch has one record
	called, ended int64
	code          int16
	offset        int64 // for code 0
	unknown       bool  // it may have taken effect or not, or take effect yet
}

// recordHistories makes one history after the other until working ends.
func recordHistories(ctx, working context.Context, c *cluster, partition int32, seed uint64) (histories []*history, err error) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(c.seeds()...), kgo.DialTimeout(time.Second),
		kgo.MetadataMinAge(20*time.Millisecond), kgo.RequestTimeoutOverhead(time.Second),
		kgo.RetryBackoffFn(func(int) time.Duration { return 20 * time.Millisecond }))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	for n := uint64(0); working.Err() == nil; n++ {
		h := &history{
			client:    cl,
			partition: partition,
			begun:     time.Now(),
			rng:       rand.New(rand.NewPCG(seed, n)),
			leader: func(ctx context.Context) int32 {
				ctx, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				if m, err := c.awaitLeader(ctx); err == nil {
					return m.id
				}
				return 1
			},
		}
		id, err := kmsg.NewPtrInitProducerIDRequest().RequestWith(ctx, cl)
		if err == nil {
			err = kerr.ErrorForCode(id.ErrorCode)
		}
		if err != nil {
			if ctx.Err() != nil {
				return histories, err
			}
			continue
		}
		h.producerID = id.ProducerID
		g, ctx := errgroup.WithContext(ctx)
		for worker := range historyWorkers {
			g.Go(func() error { return h.work(ctx, worker) })
		}
		if err := g.Wait(); err != nil {
			return histories, err
		}
		histories = append(histories, h)
	}
	return histories, nil
}

// work sends batches until all are acknowledged.
func (h *history) work(ctx context.Context, client int) error {
	for ctx.Err() == nil {
		sequence, ok := h.next()
		if !ok {
			return nil
		}
		a := attempt{client: client, sequence: sequence, called: int64(time.Since(h.begun))}
		h.send(ctx, &a)
		a.ended = int64(time.Since(h.begun))
		h.mu.Lock()
		h.ops = append(h.ops, a)
		if !a.unknown && a.code == 0 {
			h.acknowledged = max(h.acknowledged, int(sequence)+1)
		}
		h.mu.Unlock()
		if a.unknown {
			time.Sleep(50 * time.Millisecond)
		}
	}
	return ctx.Err()
}

// next chooses a batch to send.
func (h *history) next() (sequence int32, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.acknowledged
	switch h.rng.IntN(5) {
	case 0:
		n -= 1 + h.rng.IntN(spec.Window)
	case 1:
		n += 1
	}
	return int32(max(0, min(n, historyBatches-1))), h.acknowledged < historyBatches
}

func (h *history) send(ctx context.Context, a *attempt) {
	batch := segmenttest.Batch(h.producerID, 0, a.sequence, fmt.Sprintf("history-%d %08d", h.producerID, a.sequence))
	var err error
	a.code, a.offset, err = produceTo(ctx, h.client, h.leader(ctx), h.partition, batch, time.Second)
	a.unknown = err != nil || a.code == kerr.NotLeaderForPartition.Code || a.code == kerr.RequestTimedOut.Code ||
		a.code == kerr.UnknownTopicOrPartition.Code
}

// operations returns the history for the checker. The log says where each batch
// is.
//
// An attempt with an unknown end may take effect at any time after it was made,
// and one that has no effect may as well be the last of all. Of those of one
// batch only one can take effect, so the first stands for all of them.
func (h *history) operations(offsets map[int32]int64) []porcupine.Operation {
	var ops []porcupine.Operation
	unknown := make(map[int32]bool)
	slices.SortFunc(h.ops, func(a, b attempt) int { return cmp.Compare(a.called, b.called) })
	for _, a := range h.ops {
		if a.unknown && unknown[a.sequence] {
			continue
		}
		op := porcupine.Operation{
			ClientId: a.client,
			Input:    spec.Call{Method: "Apply", First: a.sequence, Count: 1, Base: offsets[a.sequence]},
			Call:     a.called,
			Output:   a,
			Return:   a.ended,
		}
		if a.unknown {
			unknown[a.sequence] = true
			op.Return = math.MaxInt64
		}
		ops = append(ops, op)
	}
	return ops
}

// produceModel is the sequential specification as a client sees it, which is
// not told whether its batch was a duplicate.
func produceModel() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return spec.State{} },
		Step: func(s, in, out any) (bool, any) {
			call, got := in.(spec.Call), out.(attempt)
			next, want := s.(spec.State).Step(call, 0)
			switch {
			case got.unknown:
				return true, next
			case want.Verdict == "append":
				return got.code == 0 && got.offset == call.Base, next
			case want.Verdict == "duplicate":
				return got.code == 0 && got.offset == want.Base, next
			case want.Refused == "out of order":
				return got.code == kerr.OutOfOrderSequenceNumber.Code, next
			case want.Refused == "unknown":
				return got.code == kerr.UnknownProducerID.Code, next
			}
			return false, next
		},
	}
}

// checkHistories checks each history against the specification, and returns how
// many attempts there were of each kind.
func checkHistories(t *testing.T, histories []*history, offsets map[int64]map[int32]int64) map[string]int {
	t.Helper()
	met := make(map[string]int)
	for _, h := range histories {
		ops := h.operations(offsets[h.producerID])
		switch porcupine.CheckOperationsTimeout(produceModel(), ops, time.Minute) {
		case porcupine.Illegal:
			t.Errorf("producer %d: no order of these attempts has these answers: %+v\noffsets %v", h.producerID, h.ops, offsets[h.producerID])
		case porcupine.Unknown:
			t.Errorf("producer %d: the checker did not come to an end with %d attempts", h.producerID, len(ops))
		}
		for _, a := range h.ops {
			switch {
			case a.unknown:
				met["unknown"]++
			default:
				met[fmt.Sprint("code ", a.code)]++
			}
		}
	}
	return met
}
