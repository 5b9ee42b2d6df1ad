package main

// An application reads a topic, transforms each record, and writes the result to
// another topic, with its position in the same transaction. It is killed together
// with the broker, again and again. Nothing may be missing at the end, and
// nothing doubled, which idempotence alone cannot do: an application that starts
// again is another producer.

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/show/faults"
	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
)

var exactlyOnceKills = flag.Int("exactly-once-kills", 3, "how `often` TestExactlyOnce kills the application and the broker")

// beTransformer in the environment makes the test binary the application. It
// holds the name of a client and the broker's address.
const beTransformer = "IDEMPOTENCE_TEST_BE_TRANSFORMER"

const (
	outTopic      = "out"
	outPartitions = 3
	group         = "transformers"
	transformerID = "transformer"

	// transformBatch is how many records a transaction has, at most.
	transformBatch = 20
)

func transformed(record string) string { return "transformed " + record }

// A transformer writes the results of some records, and the position behind them,
// in one transaction. After an error it is not used any more.
type transformer interface {
	write(ctx context.Context, records []*kgo.Record) error
	close()
}

// transformers start a transformer, and so end the transaction that the last one
// may have left. franz-go uses version 2 of transactions, Sarama version 1.
var transformers = map[string]func(ctx context.Context, addr string) (transformer, error){
	"franz-go": newFranzTransformer,
	"Sarama":   newSaramaTransformer,
}

// transformForever is the application. After an error it begins again, as a new
// process would.
func transformForever(client, addr string) {
	for {
		err := transform(context.Background(), transformers[client], addr)
		fmt.Fprintln(os.Stderr, "the application begins again:", err)
	}
}

// transform reads on from the position that was committed last, until there is an
// error.
func transform(ctx context.Context, start func(context.Context, string) (transformer, error), addr string) error {
	out, err := start(ctx, addr)
	if err != nil {
		return fmt.Errorf("start: %w", err)
	}
	defer out.close()
	next, err := position(ctx, addr)
	if err != nil {
		return fmt.Errorf("position: %w", err)
	}
	in, err := newFranz(addr, kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.Dialer(faults.Dial),
		kgo.FetchMaxWait(50*time.Millisecond),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(next)}}))
	if err != nil {
		return err
	}
	defer in.Close()
	for {
		fetches := in.PollRecords(ctx, transformBatch)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("poll: %w", err)
		}
		if records := fetches.Records(); len(records) > 0 {
			if err := out.write(ctx, records); err != nil {
				return err
			}
		}
	}
}

type franzTransformer struct{ cl *kgo.Client }

func newFranzTransformer(ctx context.Context, addr string) (transformer, error) {
	cl, err := newFranz(addr, kgo.TransactionalID(transformerID), kgo.DefaultProduceTopic(outTopic), kgo.Dialer(faults.Dial),
		kgo.ConcurrentTransactionsBackoff(5*time.Millisecond))
	if err != nil {
		return nil, err
	}
	if _, _, err := cl.ProducerID(ctx); err != nil {
		cl.Close()
		return nil, err
	}
	return franzTransformer{cl}, nil
}

func (f franzTransformer) close() { f.cl.Close() }

func (f franzTransformer) write(ctx context.Context, records []*kgo.Record) error {
	if err := f.cl.BeginTransaction(); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	var acks readback.Acks
	for _, r := range records {
		result := kgo.StringRecord(transformed(string(r.Value)))
		result.Partition = int32(r.Offset % outPartitions)
		f.cl.Produce(ctx, result, acks.Promise)
	}
	err := f.cl.Flush(ctx)
	_, failed := acks.Places()
	if err := errors.Join(err, failed); err != nil {
		return fmt.Errorf("produce: %w", err)
	}
	if err := f.commitPosition(ctx, records[len(records)-1].Offset+1); err != nil {
		return fmt.Errorf("commit the position: %w", err)
	}
	if err := f.cl.EndTransaction(ctx, kgo.TryCommit); err != nil {
		return fmt.Errorf("end: %w", err)
	}
	return nil
}

// commitPosition commits the position in the transaction. franz-go does it by
// itself only for members of a group.
func (f franzTransformer) commitPosition(ctx context.Context, next int64) error {
	id, epoch, err := f.cl.ProducerID(ctx)
	if err != nil {
		return err
	}
	req := kmsg.NewPtrTxnOffsetCommitRequest()
	req.TransactionalID, req.Group, req.ProducerID, req.ProducerEpoch = transformerID, group, id, epoch
	req.Generation = -1 // of a consumer that is no member
	p := kmsg.NewTxnOffsetCommitRequestTopicPartition()
	p.Offset = next
	t := kmsg.NewTxnOffsetCommitRequestTopic()
	t.Topic = topic
	t.Partitions = append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	resp, err := req.RequestWith(ctx, f.cl)
	if err != nil {
		return err
	}
	if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
		return fmt.Errorf("no answer for the partition: %+v", resp)
	}
	return kerr.ErrorForCode(resp.Topics[0].Partitions[0].ErrorCode)
}

type saramaTransformer struct{ p sarama.SyncProducer }

func newSaramaTransformer(_ context.Context, addr string) (transformer, error) {
	cfg := saramaConfig()
	cfg.Producer.Transaction.ID = transformerID
	p, err := sarama.NewSyncProducer([]string{addr}, cfg)
	return saramaTransformer{p}, err
}

func (s saramaTransformer) close() { s.p.Close() }

func (s saramaTransformer) write(_ context.Context, records []*kgo.Record) error {
	if err := s.p.BeginTxn(); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	var results []*sarama.ProducerMessage
	for _, r := range records {
		results = append(results, &sarama.ProducerMessage{
			Topic: outTopic, Partition: int32(r.Offset % outPartitions), Value: sarama.StringEncoder(transformed(string(r.Value))),
		})
	}
	if err := s.p.SendMessages(results); err != nil {
		return fmt.Errorf("produce: %w", err)
	}
	next := &sarama.PartitionOffsetMetadata{Partition: 0, Offset: records[len(records)-1].Offset + 1}
	if err := s.p.AddOffsetsToTxn(map[string][]*sarama.PartitionOffsetMetadata{topic: {next}}, group); err != nil {
		return fmt.Errorf("commit the position: %w", err)
	}
	if err := s.p.CommitTxn(); err != nil {
		return fmt.Errorf("end: %w", err)
	}
	return nil
}

// position returns the position that was committed last, once no transaction
// holds another one.
func position(ctx context.Context, addr string) (int64, error) {
	cl, err := newFranz(addr, kgo.Dialer(faults.Dial))
	if err != nil {
		return 0, err
	}
	defer cl.Close()
	req := kmsg.NewPtrOffsetFetchRequest()
	req.RequireStable = true
	t := kmsg.NewOffsetFetchRequestGroupTopic()
	t.Topic, t.Partitions = topic, []int32{0}
	g := kmsg.NewOffsetFetchRequestGroup()
	g.Group = group
	g.Topics = append(g.Topics, t)
	req.Groups = append(req.Groups, g)
	for {
		resp, err := req.RequestWith(ctx, cl)
		if err != nil {
			return 0, err
		}
		if len(resp.Groups) != 1 || len(resp.Groups[0].Topics) != 1 || len(resp.Groups[0].Topics[0].Partitions) != 1 {
			return 0, fmt.Errorf("no answer for the partition: %+v", resp)
		}
		p := resp.Groups[0].Topics[0].Partitions[0]
		switch err := cmp.Or(kerr.ErrorForCode(resp.Groups[0].ErrorCode), kerr.ErrorForCode(p.ErrorCode)); {
		case errors.Is(err, kerr.UnstableOffsetCommit):
			time.Sleep(5 * time.Millisecond)
		case err != nil:
			return 0, err
		default:
			return max(p.Offset, 0), nil // -1: none was committed
		}
	}
}

func TestExactlyOnce(t *testing.T) {
	for client := range transformers {
		t.Run(client, func(t *testing.T) {
			t.Parallel()
			testExactlyOnce(t, client)
		})
	}
}

func testExactlyOnce(t *testing.T, client string) {
	limit := time.Minute + time.Duration(*exactlyOnceKills)*10*time.Second
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	proxy, err := faults.New("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close()
	proxy.Close() // until there is a broker
	dir := t.TempDir()
	said := func(line string) {
		if complaint.MatchString(line) && !torn.MatchString(line) { // a kill may tear a write
			t.Errorf("the broker complains: %s", line)
		}
	}
	start := func() (broker *process, application *exec.Cmd) {
		broker = startProcess(t, "-data", dir, "-advertise", proxy.Addr(), "-segment-bytes", "20000", "-partitions", fmt.Sprint(outPartitions))
		if !broker.serves(said) {
			t.Fatal("the broker did not start")
		}
		if err := proxy.MoveTo(broker.addr); err != nil {
			t.Fatal(err)
		}
		application = exec.Command(os.Args[0])
		application.Env = append(os.Environ(), beTransformer+"="+client+" "+proxy.Addr())
		application.Stderr = os.Stderr
		if err := application.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { application.Process.Kill() })
		return broker, application
	}

	input := newLoad(ctx, proxy.Addr(), 1)
	for range *exactlyOnceKills {
		broker, application := start()
		time.Sleep(time.Duration(100+rng.IntN(700)) * time.Millisecond)
		order := []func(){
			func() { broker.end(syscall.SIGKILL) },
			func() { application.Process.Kill(); application.Wait() },
		}
		if rng.IntN(2) == 0 {
			slices.Reverse(order)
		}
		for _, kill := range order {
			kill()
		}
	}

	broker, application := start()
	_, produced, err := input.stop()
	if err != nil {
		t.Error(err)
	}
	log := awaitTransformed(ctx, t, proxy.Addr(), produced)
	everything, err := readback.Read(ctx, proxy.Addr(), outTopic, outPartitions)
	if err != nil {
		t.Fatal(err)
	}
	application.Process.Kill()
	application.Wait()
	if err := broker.end(syscall.SIGTERM); err != nil {
		t.Errorf("the broker ended with %v", err)
	}

	times := make(map[string]int)
	for partition, records := range log {
		if !slices.IsSorted(records) {
			t.Errorf("partition %d is out of order", partition)
		}
		for _, r := range records {
			times[strings.TrimPrefix(r, transformed(""))]++
		}
	}
	for i := range produced {
		r := record("producer-0", i)
		if times[r] != 1 {
			t.Errorf("%q was transformed %d times", r, times[r])
		}
		delete(times, r)
	}
	if len(times) > 0 {
		t.Errorf("results of what was never sent: %v", times)
	}
	undone := -produced // results in transactions that were aborted
	for _, records := range everything {
		undone += len(records)
	}
	if undone == 0 && *exactlyOnceKills >= 20 {
		t.Error("no kill came in the middle of a transaction")
	}
	t.Logf("%d records, %d kills; %d results were aborted and written again", produced, *exactlyOnceKills, undone)
}

// awaitTransformed returns the committed results when there are n or more.
func awaitTransformed(ctx context.Context, t *testing.T, addr string, n int) [][]string {
	t.Helper()
	for {
		log, err := readback.Read(ctx, addr, outTopic, outPartitions, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
		if err != nil {
			t.Fatal(err)
		}
		results := 0
		for _, records := range log {
			results += len(records)
		}
		if results >= n {
			return log
		}
		time.Sleep(100 * time.Millisecond)
	}
}
