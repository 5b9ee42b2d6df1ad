package main

// This file sends records.

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/replicated/node"
)

const topic = "numbers"

// newProducer returns a producer, idempotent and with up to five requests in
// flight unless told otherwise, that never gives up.
func newProducer(seeds []string, more ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(seeds...),
		kgo.DefaultProduceTopic(topic),
		kgo.AllowAutoTopicCreation(),
		kgo.UnknownTopicRetries(-1),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchMaxBytes(4 << 10), // many batches, to have many to retry
		kgo.ProducerBatchCompression(kgo.NoCompression()),
		kgo.ProduceRequestTimeout(2 * time.Second),
		// The nodes are near: no need to wait long to try again, or to ask who
		// leads.
		kgo.RetryBackoffFn(func(int) time.Duration { return 20 * time.Millisecond }),
		kgo.MetadataMinAge(20 * time.Millisecond),
		kgo.DialTimeout(time.Second),
		kgo.AlwaysRetryEOF(), // even a connection that is cut at its very beginning
	}, more...)...)
}

// record returns the record with a number of a producer.
func record(name string, number int, partition int32) *kgo.Record {
	return &kgo.Record{Value: fmt.Appendf(nil, "%s %08d %064d", name, number, number), Partition: partition}
}

// produce sends a few records to each partition again and again, until working
// ends. It returns how many it sent when all of them have been acknowledged, or
// when ctx ends.
func produce(ctx, working context.Context, seeds []string, name string, partitions int, interval time.Duration, promise func(*kgo.Record, error)) (sent int, err error) {
	cl, err := newProducer(seeds)
	if err != nil {
		return 0, err
	}
	defer cl.Close()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for working.Err() == nil {
		for i := range partitions * 2 {
			cl.Produce(ctx, record(name, sent, int32(i%partitions)), promise)
			sent++
		}
		<-ticker.C
	}
	return sent, cl.Flush(ctx)
}

// An arrival identifies a batch as its producer made it.
type arrival struct {
	partition int32
	batch     idempotence.Batch
}

// A tally counts what batches were answered.
type tally struct {
	mu                          sync.Mutex
	seen                        map[arrival]bool
	retried, recognised, gapped int
}

func newTally() *tally { return &tally{seen: make(map[arrival]bool)} }

func (t *tally) observe(e node.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	id := arrival{e.Partition, e.Batch}
	if t.seen[id] {
		t.retried++
	}
	t.seen[id] = true
	switch {
	case e.Result.Verdict == idempotence.Duplicate:
		t.recognised++
	case idempotence.KafkaErrorCode(e.Err) == 45:
		t.gapped++
	}
}
