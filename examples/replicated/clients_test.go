package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// saramaProduce does with Sarama what produce does, to one partition. Sarama has
// one request in flight, which is all that it allows an idempotent producer.
func saramaProduce(ctx, working context.Context, seeds []string, name string, partition int32, interval time.Duration, promise func(*kgo.Record, error)) (sent int, err error) {
	cfg := sarama.NewConfig()
	cfg.Version = sarama.V2_8_0_0
	cfg.Net.MaxOpenRequests = 1
	cfg.Net.DialTimeout = time.Second
	cfg.Producer.Idempotent = true
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	cfg.Producer.Timeout = 2 * time.Second
	cfg.Producer.Partitioner = sarama.NewManualPartitioner
	cfg.Producer.Flush.MaxMessages = 20
	cfg.Producer.Retry.Max = 1_000_000
	cfg.Producer.Retry.Backoff = 20 * time.Millisecond
	cfg.Producer.Transaction.Retry.Max = 1_000_000 // for the producer id
	cfg.Producer.Transaction.Retry.Backoff = 20 * time.Millisecond
	cfg.Producer.Return.Successes = true
	cfg.Metadata.Retry.Max = 1_000_000
	cfg.Metadata.Retry.Backoff = 20 * time.Millisecond
	p, err := sarama.NewAsyncProducer(seeds, cfg)
	if err != nil {
		return 0, err
	}
	produced := make(chan int)
	go func() {
		n := 0
		for working.Err() == nil {
			p.Input() <- &sarama.ProducerMessage{
				Topic: topic, Partition: partition,
				Value: sarama.ByteEncoder(record(name, n, partition).Value),
			}
			n++
			time.Sleep(interval)
		}
		produced <- n
	}()
	// It is closed only when nothing is left to retry, since it would not.
	sent = -1
	for settled := 0; settled != sent; {
		select {
		case m := <-p.Successes():
			promise(&kgo.Record{Value: m.Value.(sarama.ByteEncoder), Partition: m.Partition, Offset: m.Offset}, nil)
			settled++
		case err := <-p.Errors():
			return sent, err
		case sent = <-produced:
		case <-ctx.Done():
			return sent, ctx.Err()
		}
	}
	return sent, p.Close()
}

// kcatProduce does with kcat what produce does, to one partition. kcat is
// librdkafka, which has five requests in flight. It does not tell at which
// offsets it was acknowledged, only whether anything was not.
func kcatProduce(ctx, working context.Context, seeds []string, name string, partition int32, interval time.Duration) (sent int, err error) {
	cmd := exec.CommandContext(ctx, "kcat", "-b", strings.Join(seeds, ","), "-t", topic, "-p", fmt.Sprint(partition), "-P", "-E",
		"-X", "enable.idempotence=true", "-X", "batch.num.messages=20", "-X", "retry.backoff.ms=20",
		"-X", "request.timeout.ms=2000", "-X", "reconnect.backoff.ms=5", "-X", "reconnect.backoff.max.ms=50",
		"-X", "topic.metadata.refresh.fast.interval.ms=50")
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	for working.Err() == nil && err == nil {
		_, err = fmt.Fprintf(in, "%s\n", record(name, sent, partition).Value)
		sent++
		time.Sleep(interval)
	}
	in.Close()
	if err := errors.Join(err, cmd.Wait()); err != nil || strings.Contains(said.String(), "Delivery failed") {
		return sent, fmt.Errorf("kcat: %v\n%s", err, said.String())
	}
	return sent, nil
}

// consume reads a topic from its beginning until working ends, and returns an
// error where an offset does not follow the one before it. It may be asked by its
// client to go to any node.
func consume(working context.Context, seeds []string, partitions int) (records [][]string, err error) {
	starts := make(map[int32]kgo.Offset)
	for i := range partitions {
		starts[int32(i)] = kgo.NewOffset().At(0)
	}
	cl, err := kgo.NewClient(
		kgo.SeedBrokers(seeds...),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: starts}),
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		kgo.MetadataMinAge(20*time.Millisecond),
		kgo.DialTimeout(time.Second),
		kgo.FetchMaxWait(200*time.Millisecond),
		kgo.AlwaysRetryEOF(),
	)
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	records = make([][]string, partitions)
	for {
		fetches := cl.PollFetches(working)
		if working.Err() != nil {
			return records, nil
		}
		for _, e := range fetches.Errors() {
			if !kerr.IsRetriable(e.Err) {
				return records, fmt.Errorf("partition %d: %w", e.Partition, e.Err)
			}
		}
		for r := range fetches.RecordsAll() {
			if next := int64(len(records[r.Partition])); r.Offset != next {
				return records, fmt.Errorf("partition %d: offset %d, want %d", r.Partition, r.Offset, next)
			}
			records[r.Partition] = append(records[r.Partition], string(r.Value))
		}
	}
}

// latest asks where partitions end until working ends, and returns an error where
// the answer does not show what was acknowledged before the question, and how
// often it was answered.
func latest(working context.Context, seeds []string, acknowledged func(partition int32) (offset int64)) (answered int, err error) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(seeds...), kgo.MetadataMinAge(20*time.Millisecond),
		kgo.DialTimeout(time.Second), kgo.RetryTimeout(time.Second),
		kgo.RetryBackoffFn(func(int) time.Duration { return 20 * time.Millisecond }))
	if err != nil {
		return 0, err
	}
	defer cl.Close()
	for partition := int32(0); working.Err() == nil; partition = (partition + 1) % nemesisPartitions {
		asked := kmsg.NewListOffsetsRequestTopicPartition()
		asked.Partition, asked.Timestamp = partition, -1
		of := kmsg.NewListOffsetsRequestTopic()
		of.Topic, of.Partitions = topic, []kmsg.ListOffsetsRequestTopicPartition{asked}
		req := kmsg.NewPtrListOffsetsRequest()
		req.Topics = append(req.Topics, of)
		least := acknowledged(partition) + 1
		resp, err := req.RequestWith(working, cl)
		time.Sleep(5 * time.Millisecond)
		if err != nil || len(resp.Topics) == 0 || resp.Topics[0].Partitions[0].ErrorCode != 0 {
			continue
		}
		answered++
		if end := resp.Topics[0].Partitions[0].Offset; end < least {
			return answered, fmt.Errorf("partition %d: ends at %d, but offset %d was acknowledged", partition, end, least-1)
		}
	}
	return answered, nil
}

// produceTo sends a batch to a node, once, and returns the answer.
func produceTo(ctx context.Context, cl *kgo.Client, node, partition int32, batch []byte, timeout time.Duration) (code int16, offset int64, err error) {
	p := kmsg.NewProduceRequestTopicPartition()
	p.Partition, p.Records = partition, batch
	t := kmsg.NewProduceRequestTopic()
	t.Topic, t.Partitions = topic, []kmsg.ProduceRequestTopicPartition{p}
	req := kmsg.NewPtrProduceRequest()
	req.Acks, req.TimeoutMillis, req.Topics = -1, int32(timeout.Milliseconds()), []kmsg.ProduceRequestTopic{t}
	resp, err := cl.Broker(int(node)).Request(ctx, req)
	if err != nil {
		return 0, 0, err
	}
	answer := resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0]
	return answer.ErrorCode, answer.BaseOffset, nil
}

// needKcat fails the test if kcat is missing. A test that were skipped would not
// be seen.
func needKcat(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("kcat"); err != nil {
		t.Fatal("kcat is not installed; install it with: apt-get install kcat (or brew install kcat)")
	}
}
