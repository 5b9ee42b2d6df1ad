package server_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/server"
)

func transactional(t *testing.T, b *broker, id string, timeout time.Duration) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.addr), kgo.TransactionalID(id), kgo.DefaultProduceTopic("t"),
		kgo.TransactionTimeout(timeout), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.AllowAutoTopicCreation())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// readAll reads partition 0 up to the end that a consumer of that level is told.
func readAll(t *testing.T, b *broker, level kgo.IsolationLevel, n int) []string {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.addr), kgo.FetchIsolationLevel(level),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"t": {0: kgo.NewOffset().At(0)}}))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var values []string
	for len(values) < n && ctx.Err() == nil {
		cl.PollFetches(ctx).EachRecord(func(r *kgo.Record) { values = append(values, string(r.Value)) })
	}
	return values
}

// latest is what ListOffsets answers at an isolation level.
func (c *client) latest(level int8) int64 {
	c.t.Helper()
	req := kmsg.NewPtrListOffsetsRequest()
	req.Version, req.IsolationLevel = 6, level
	p := kmsg.NewListOffsetsRequestTopicPartition()
	p.Timestamp = -1
	req.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: "t", Partitions: []kmsg.ListOffsetsRequestTopicPartition{p}}}
	return ask[*kmsg.ListOffsetsResponse](c, req).Topics[0].Partitions[0].Offset
}

// awaitStable waits until nothing holds the last stable offset back.
func (c *client) awaitStable() int64 {
	c.t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if end := c.latest(0); c.latest(1) == end {
			return end
		}
	}
	c.t.Fatalf("last stable offset %d, end %d", c.latest(1), c.latest(0))
	return 0
}

func produceTxn(t *testing.T, cl *kgo.Client, values ...string) {
	t.Helper()
	for _, v := range values {
		if err := cl.ProduceSync(t.Context(), kgo.StringRecord(v)).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

// A committed reader sees exactly what was committed, over a restart too.
func TestTransactions(t *testing.T) {
	for _, version := range []int16{1, 2} {
		t.Run(fmt.Sprintf("version %d", version), func(t *testing.T) {
			cfg := server.Config{Dir: t.TempDir(), TransactionVersion: version}
			b := start(t, cfg)
			one, two := transactional(t, b, "one", time.Minute), transactional(t, b, "two", time.Minute)
			begin := func(cl *kgo.Client) {
				t.Helper()
				if err := cl.BeginTransaction(); err != nil {
					t.Fatal(err)
				}
			}
			end := func(cl *kgo.Client, commit kgo.TransactionEndTry) {
				t.Helper()
				if err := cl.EndTransaction(t.Context(), commit); err != nil {
					t.Fatal(err)
				}
			}
			begin(one)
			begin(two)
			produceTxn(t, one, "a1")
			produceTxn(t, two, "b1")
			produceTxn(t, one, "a2")
			raw := b.dial()
			if stable := raw.latest(1); stable != 0 {
				t.Errorf("two open: last stable offset %d, want 0", stable)
			}
			end(two, kgo.TryAbort)
			end(one, kgo.TryCommit)
			begin(one)
			end(one, kgo.TryCommit) // of nothing
			begin(two)
			produceTxn(t, two, "b2")
			end(two, kgo.TryCommit)
			want := []string{"a1", "a2", "b2"}
			check := func(b *broker) {
				t.Helper()
				if end := b.dial().awaitStable(); end != 7 {
					t.Errorf("log end offset %d, want 7: four records and three markers", end)
				}
				if got := readAll(t, b, kgo.ReadCommitted(), len(want)); !slices.Equal(got, want) {
					t.Errorf("committed: %q, want %q", got, want)
				}
				if got := readAll(t, b, kgo.ReadUncommitted(), 4); !slices.Equal(got, []string{"a1", "b1", "a2", "b2"}) {
					t.Errorf("uncommitted: %q", got)
				}
			}
			check(b)
			b.kill()
			check(start(t, cfg))
		})
	}
}

// The second producer with a transactional id fences the first in the middle of
// a transaction.
func TestTransactionalIDFences(t *testing.T) {
	for _, version := range []int16{1, 2} {
		b := start(t, server.Config{TransactionVersion: version})
		first, second := transactional(t, b, "x", time.Minute), transactional(t, b, "x", time.Minute)
		if err := first.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		produceTxn(t, first, "lost")
		if err := second.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		produceTxn(t, second, "kept")
		err := first.ProduceSync(t.Context(), kgo.StringRecord("late")).FirstErr()
		if !errors.Is(err, kerr.InvalidProducerEpoch) {
			t.Errorf("version %d: late batch: %v, want INVALID_PRODUCER_EPOCH", version, err)
		}
		if err := second.EndTransaction(t.Context(), kgo.TryCommit); err != nil {
			t.Fatal(err)
		}
		b.dial().awaitStable()
		if got := readAll(t, b, kgo.ReadUncommitted(), 2); !slices.Equal(got, []string{"lost", "kept"}) {
			t.Errorf("version %d: log %q", version, got)
		}
	}
}

// The transaction of a client that vanishes is aborted after its time-out.
func TestTransactionTimesOut(t *testing.T) {
	b := start(t, server.Config{})
	cl := transactional(t, b, "x", 500*time.Millisecond)
	if err := cl.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	produceTxn(t, cl, "lost")
	if end := b.dial().awaitStable(); end != 2 {
		t.Errorf("log end offset %d, want 2: a record and its marker", end)
	}
}

// A transaction that is open when the broker stops, in good order or not, is open
// when it starts again: its producer goes on and ends it, and if that has vanished it
// is aborted after its time-out.
func TestOpenTransactionOverARestart(t *testing.T) {
	for _, version := range []int16{1, 2} {
		for _, clean := range []bool{true, false} {
			t.Run(fmt.Sprintf("version %d, clean %v", version, clean), func(t *testing.T) {
				t.Parallel()
				cfg := server.Config{Dir: t.TempDir(), TransactionVersion: version}
				produceVersion, stageVersion, endVersion := int16(9), int16(4), int16(4)
				if version == 2 {
					produceVersion, stageVersion, endVersion = 12, 5, 5
				}
				b := start(t, cfg)
				s := b.dial().newSession("x")
				s.create("t")
				gone := &session{client: b.dial(), id: "gone"}
				init := kmsg.NewPtrInitProducerIDRequest()
				init.Version, init.TransactionalID, init.TransactionTimeoutMillis = 4, &gone.id, 3000
				init.ProducerID, init.ProducerEpoch = -1, -1
				resp := ask[*kmsg.InitProducerIDResponse](gone.client, init)
				wantCode(t, "InitProducerId", resp.ErrorCode, nil)
				gone.producer, gone.epoch = resp.ProducerID, resp.ProducerEpoch
				for _, s := range []*session{s, gone} {
					wantCode(t, "AddPartitionsToTxn", s.addPartition(3), nil)
					wantCode(t, "AddOffsetsToTxn", s.addOffsets(s.id), nil)
					wantCode(t, "Produce", s.txnBatchAt(produceVersion, 0, 1).Code, nil)
					wantCode(t, "TxnOffsetCommit", s.stage(stageVersion, s.id, "t", 7), nil)
				}
				if clean {
					b.stop()
				} else {
					b.kill()
				}
				b = start(t, cfg)
				s.client = b.dial()
				if stable := s.latest(1); stable != 0 {
					t.Errorf("last stable offset %d after the restart, want 0", stable)
				}
				if _, code := s.committed(7, "x", true); code != kerr.UnstableOffsetCommit.Code {
					t.Errorf("a staged offset after the restart: code %d, want 88", code)
				}
				wantAnswer(t, "the batch again", s.txnBatchAt(produceVersion, 0, 1), stored(0))
				wantCode(t, "Produce", s.txnBatchAt(produceVersion, 1, 1).Code, nil)
				wantCode(t, "EndTxn", s.endTxn(endVersion, true).ErrorCode, nil)
				if end := s.awaitStable(); end != 5 {
					t.Errorf("log end offset %d, want 5: three records and two markers", end)
				}
				for group, want := range map[string]int64{"x": 7, "gone": -1} {
					if offset, code := s.committed(7, group, true); offset != want || code != 0 {
						t.Errorf("group %s: offset %d, code %d, want %d", group, offset, code, want)
					}
				}
			})
		}
	}
}
