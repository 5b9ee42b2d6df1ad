package statemachine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

// A workload makes commands at random: topics of all policies, few producers,
// which send in order, again, with gaps, in newer and in older epochs, in and out
// of transactions, which are ended at any time; a clock
// that goes back and far ahead; and commands that make no sense.
type workload struct {
	rng    *rand.Rand
	topics map[int]bool
	epochs [6]int16         // of producers
	next   map[sender]int32 // sequences
	sent   [][]byte         // batch commands
	clock  int64
}

// A sender is a producer as a partition knows it.
type sender struct {
	producer, partition int
	epoch               int16
}

func (w *workload) command() []byte {
	switch n := w.rng.IntN(100); {
	case n < 60:
		return w.batch()
	case n < 80 && len(w.sent) > 0:
		return w.sent[len(w.sent)-1-w.rng.IntN(min(len(w.sent), 30))]
	case n < 90:
		return w.expire()
	case n < 93:
		return ProducerIDs(uint32(w.rng.IntN(1000)))
	case n < 96:
		return w.topic()
	}
	garbage := make([]byte, w.rng.IntN(80))
	for i := range garbage {
		garbage[i] = byte(w.rng.IntN(8))
	}
	return garbage
}

func (w *workload) topic() []byte {
	n := w.rng.IntN(4)
	w.topics[n] = true
	return CreateTopic(fmt.Sprintf("topic-%d", n), TopicConfig{
		Partitions:      2,
		UnknownProducer: idempotence.UnknownProducerPolicy(w.rng.IntN(3)),
		Expiration:      time.Duration(w.rng.IntN(3)-1) * time.Hour,
		MaxProducers:    w.rng.IntN(8),
		Deduplication:   Deduplication(max(0, w.rng.IntN(12)-9)),
	})
}

func (w *workload) batch() []byte {
	from := sender{producer: w.rng.IntN(len(w.epochs))}
	if n := 2 * len(w.topics); n > 0 && w.rng.IntN(40) > 0 {
		from.partition = w.rng.IntN(n) // which may not be there
	}
	if w.rng.IntN(40) == 0 {
		w.epochs[from.producer]++
	}
	from.epoch = w.epochs[from.producer]
	first := w.next[from]
	switch w.rng.IntN(15) {
	case 0:
		from.epoch--
	case 1:
		first++
	}
	values := make([]string, 1+w.rng.IntN(3))
	batch := segmenttest.Batch(int64(from.producer), from.epoch, first, values...)
	switch w.rng.IntN(30) {
	case 0:
		batch = segmenttest.Batch(idempotence.NoProducerID, -1, -1, values...)
	case 1, 2, 3, 4, 5:
		batch = transactional(batch)
	case 6, 7, 8:
		epoch := from.epoch + int16(w.rng.IntN(2))
		return Marker(uint32(from.partition), int8(w.rng.IntN(3)),
			marker(int64(from.producer), epoch, int32(w.rng.IntN(3)), w.rng.IntN(2) == 0))
	}
	w.next[from] = first + int32(len(values))
	command := Batch(uint32(from.partition), batch)
	w.sent = append(w.sent, command)
	return command
}

func (w *workload) expire() []byte {
	switch w.rng.IntN(6) {
	case 0:
		return Expire(at(w.clock - 5000))
	case 1:
		return Expire(at(w.clock + 200_000))
	}
	w.clock += int64(w.rng.IntN(2000))
	return Expire(at(w.clock))
}

// TestDeterminism: replicas that are given the same commands, in other groups,
// and one of them restored from a snapshot now and then, give the same answers
// and have the same bytes.
func TestDeterminism(t *testing.T) {
	answered := make(map[string]int)
	for seed := range uint64(24) {
		rng := rand.New(rand.NewPCG(seed, 0))
		w := &workload{rng: rng, topics: make(map[int]bool), next: make(map[sender]int32)}
		plain, other := newMachine(t), newMachine(t)
		var log []*raft.Log
		for round := range 8 {
			from := len(log)
			for range 20 + rng.IntN(100) {
				log = append(log, &raft.Log{Index: uint64(len(log) + 1), Type: raft.LogCommand, Data: w.command()})
			}
			if rng.IntN(2) == 0 {
				other = restored(t, snapshotOf(t, other))
			}
			want, got := applyAll(plain, log[from:]), applyGrouped(other, log[from:], rng)
			for i := range want {
				if a, b := fmt.Sprint(want[i]), fmt.Sprint(got[i]); a != b {
					t.Fatalf("seed %d: entry %d is answered %s on one replica and %s on the other", seed, from+i+1, a, b)
				}
				answered[kindOf(want[i])]++
			}
			for i, p := range plain.state.partitions {
				if a, b := p.LastStableOffset(), other.state.partitions[i].LastStableOffset(); a != b {
					t.Fatalf("seed %d, round %d: partition %d is stable up to %d on one replica and %d on the other", seed, round, i, a, b)
				}
				if p.LastStableOffset() < p.end {
					answered["unstable"]++
				}
			}
			if a, b := snapshotOf(t, plain), snapshotOf(t, other); !bytes.Equal(a, b) {
				t.Fatalf("seed %d, round %d: snapshots of replicas differ, %d and %d bytes", seed, round, len(a), len(b))
			}
		}
	}
	t.Log(answered)
	for _, kind := range []string{"Append", "Duplicate", "45", "47", "52", "59", "unstable"} {
		if answered[kind] < 20 {
			t.Errorf("%s came up only %d times", kind, answered[kind])
		}
	}
}

// kindOf is the verdict or the Kafka error code.
func kindOf(a Answer) string {
	if a.Err != nil {
		return fmt.Sprint(idempotence.KafkaErrorCode(a.Err))
	}
	return a.Result.Verdict.String()
}
