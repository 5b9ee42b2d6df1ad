package server_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// txnBatch produces n records of the session by the rules of version 2.
func (s *session) txnBatch(seq int32, n int) answer {
	s.t.Helper()
	return s.txnBatchAt(12, seq, n)
}

func (s *session) txnBatchAt(version int16, seq int32, n int) answer {
	s.t.Helper()
	batch := segmenttest.Edit(segmenttest.Batch(s.producer, s.epoch, seq, make([]string, n)...),
		func(b *kmsg.RecordBatch) { b.Attributes |= 1 << 4 })
	req := produceRequest("t", 0, batch)
	req.Version, req.TransactionID = version, &s.id
	return s.produce(req)
}

func (c *client) describeProducers(topic string) kmsg.DescribeProducersResponseTopicPartition {
	c.t.Helper()
	req := kmsg.NewPtrDescribeProducersRequest()
	req.Topics = []kmsg.DescribeProducersRequestTopic{{Topic: topic, Partitions: []int32{0}}}
	return ask[*kmsg.DescribeProducersResponse](c, req).Topics[0].Partitions[0]
}

// writeMarker asks for a marker in partition 0 of topic.
func (c *client) writeMarker(topic string, m kmsg.WriteTxnMarkersRequestMarker) int16 {
	c.t.Helper()
	req := kmsg.NewPtrWriteTxnMarkersRequest()
	req.Version = 2
	m.Topics = []kmsg.WriteTxnMarkersRequestMarkerTopic{{Topic: topic, Partitions: []int32{0}}}
	req.Markers = []kmsg.WriteTxnMarkersRequestMarker{m}
	return ask[*kmsg.WriteTxnMarkersResponse](c, req).Markers[0].Topics[0].Partitions[0].ErrorCode
}

// A transaction of which the coordinator has lost sight is found by
// DescribeProducers, and ended by WriteTxnMarkers.
func TestHangingTransaction(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir()}
	b := start(t, cfg)
	c := b.dial()
	c.create("t")
	s := c.newSession("x")
	wantAnswer(t, "open", s.txnBatch(0, 2), answer{0, 0})
	b.kill()
	if err := os.Remove(filepath.Join(cfg.Dir, server.TxnLogName)); err != nil {
		t.Fatal(err)
	}

	b = start(t, cfg)
	c = b.dial()
	s.client = c
	found := c.describeProducers("t")
	if len(found.ActiveProducers) != 1 {
		t.Fatalf("producers: %+v", found)
	}
	p := found.ActiveProducers[0]
	if p.ProducerID != s.producer || p.CurrentTxnStartOffset != 0 || p.LastSequence != 1 {
		t.Errorf("producer: %+v", p)
	}
	if stable := c.latest(1); stable != 0 {
		t.Errorf("last stable offset %d, want 0", stable)
	}
	wantCode(t, "EndTxn that nobody coordinates", s.endTxn(5, true).ErrorCode, kerr.InvalidProducerIDMapping)

	abort := kmsg.NewWriteTxnMarkersRequestMarker()
	abort.ProducerID, abort.ProducerEpoch, abort.CoordinatorEpoch = s.producer, s.epoch, 5
	abort.TransactionVersion = 1
	wantCode(t, "no such partition", c.writeMarker("nowhere", abort), kerr.UnknownTopicOrPartition)
	older := abort
	older.ProducerEpoch = -1
	wantCode(t, "no epoch", c.writeMarker("t", older), kerr.InvalidRecord)
	same := abort
	same.TransactionVersion = 2
	wantCode(t, "version 2 at the epoch of the transaction", c.writeMarker("t", same), kerr.InvalidProducerEpoch)
	wantCode(t, "abort", c.writeMarker("t", abort), nil)
	if stable, end := c.latest(1), c.latest(0); stable != 3 || end != 3 {
		t.Errorf("last stable offset %d, log end offset %d, want 3 for both", stable, end)
	}
	older = abort
	older.CoordinatorEpoch = 4
	wantCode(t, "an older coordinator", c.writeMarker("t", older), kerr.TransactionCoordinatorFenced)
	if end := c.latest(0); end != 3 {
		t.Errorf("log end offset %d after refused markers, want 3", end)
	}
	if p := c.describeProducers("t").ActiveProducers[0]; p.CurrentTxnStartOffset != -1 || p.CoordinatorEpoch != 5 {
		t.Errorf("producer: %+v", p)
	}
	wantCode(t, "producers of no partition", c.describeProducers("nowhere").ErrorCode, kerr.UnknownTopicOrPartition)
}

// ListTransactions and DescribeTransactions show what the coordinator knows.
func TestTransactionsAreListed(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	open, idle := c.newSession("open"), c.newSession("idle")
	wantAnswer(t, "open", open.txnBatch(0, 1), answer{0, 0})

	list := func(states []string, ids []int64) (found []string, unknown []string) {
		t.Helper()
		req := kmsg.NewPtrListTransactionsRequest()
		req.StateFilters, req.ProducerIDFilters = states, ids
		resp := ask[*kmsg.ListTransactionsResponse](c, req)
		for _, s := range resp.TransactionStates {
			found = append(found, s.TransactionalID+" "+s.TransactionState)
		}
		return found, resp.UnknownStateFilters
	}
	for _, f := range []struct {
		states        []string
		ids           []int64
		want, unknown []string
	}{
		{want: []string{"idle Empty", "open Ongoing"}},
		{states: []string{"Ongoing"}, want: []string{"open Ongoing"}},
		{ids: []int64{idle.producer}, want: []string{"idle Empty"}},
		{states: []string{"Ongoing"}, ids: []int64{idle.producer}},
		{states: []string{"Asleep", "Empty"}, want: []string{"idle Empty"}, unknown: []string{"Asleep"}},
	} {
		got, unknown := list(f.states, f.ids)
		if !slices.Equal(got, f.want) || !slices.Equal(unknown, f.unknown) {
			t.Errorf("states %q, ids %d: %q, unknown %q; want %q, %q", f.states, f.ids, got, unknown, f.want, f.unknown)
		}
	}

	req := kmsg.NewPtrDescribeTransactionsRequest()
	req.TransactionalIDs = []string{"open", "idle", "nobody"}
	got := ask[*kmsg.DescribeTransactionsResponse](c, req).TransactionStates
	if s := got[0]; s.State != "Ongoing" || s.ProducerID != open.producer || s.ProducerEpoch != open.epoch ||
		s.TimeoutMillis != 60_000 || s.StartTimestamp <= 0 || len(s.Topics) != 1 || s.Topics[0].Topic != "t" ||
		!slices.Equal(s.Topics[0].Partitions, []int32{0}) {
		t.Errorf("open: %+v", s)
	}
	if s := got[1]; s.State != "Empty" || s.StartTimestamp != -1 || len(s.Topics) != 0 {
		t.Errorf("idle: %+v", s)
	}
	wantCode(t, "an unknown id", got[2].ErrorCode, kerr.TransactionalIDNotFound)
}

// A small request cannot ask for a large answer by naming the same things again and
// again.
func TestAnswersNameThingsOnce(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	s := c.newSession("x")
	wantAnswer(t, "open", s.txnBatch(0, 1), answer{0, 0})
	wantCode(t, "OffsetCommit", c.commitOffset("g", "t", 5, -1), nil)

	const often = 1000
	zeros := make([]int32, often)
	producers := kmsg.NewPtrDescribeProducersRequest()
	producers.Topics = []kmsg.DescribeProducersRequestTopic{{Topic: "t", Partitions: append(zeros, 1)}, {Topic: "t", Partitions: zeros}}
	found := ask[*kmsg.DescribeProducersResponse](c, producers).Topics
	if len(found) != 2 || len(found[0].Partitions) != 2 || len(found[1].Partitions) != 0 {
		t.Fatalf("DescribeProducers: %+v", found)
	}
	if a, b := found[0].Partitions[0], found[0].Partitions[1]; len(a.ActiveProducers) != 1 || b.Partition != 1 || len(b.ActiveProducers) != 0 {
		t.Errorf("DescribeProducers: %+v, %+v", a, b)
	}

	transactions := kmsg.NewPtrDescribeTransactionsRequest()
	for range often {
		transactions.TransactionalIDs = append(transactions.TransactionalIDs, "x", "nobody")
	}
	if got := ask[*kmsg.DescribeTransactionsResponse](c, transactions).TransactionStates; len(got) != 2 || got[0].State != "Ongoing" {
		t.Errorf("DescribeTransactions: %+v", got)
	}

	for _, version := range []int16{7, 8} {
		offsets := kmsg.NewPtrOffsetFetchRequest()
		offsets.Version, offsets.Group = version, "g"
		offsets.Topics = []kmsg.OffsetFetchRequestTopic{{Topic: "t", Partitions: zeros}, {Topic: "t", Partitions: zeros}}
		g := kmsg.NewOffsetFetchRequestGroup()
		g.Group, g.Topics = "g", []kmsg.OffsetFetchRequestGroupTopic{{Topic: "t", Partitions: zeros}}
		offsets.Groups = []kmsg.OffsetFetchRequestGroup{g, g}
		resp := ask[*kmsg.OffsetFetchResponse](c, offsets)
		n, committed := 0, int64(-1)
		for _, topic := range resp.Topics {
			for _, p := range topic.Partitions {
				n, committed = n+1, p.Offset
			}
		}
		for _, g := range resp.Groups {
			for _, topic := range g.Topics {
				for _, p := range topic.Partitions {
					n, committed = n+1, p.Offset
				}
			}
		}
		if n != 1 || committed != 5 {
			t.Errorf("OffsetFetch %d: %d answers, offset %d; want one, 5", version, n, committed)
		}
	}
}

// A request for very many markers does not hold up the end of the broker. Those
// that were not begun are refused, and not in the log.
func TestManyMarkersAndShutdown(t *testing.T) {
	const markers = 15_000
	b := start(t, server.Config{})
	c := b.dial()
	c.create("t")
	req := kmsg.NewPtrWriteTxnMarkersRequest()
	req.Version = 1
	m := kmsg.NewWriteTxnMarkersRequestMarker()
	m.ProducerID, m.Topics = 7, []kmsg.WriteTxnMarkersRequestMarkerTopic{{Topic: "t", Partitions: make([]int32, markers)}}
	req.Markers = []kmsg.WriteTxnMarkersRequestMarker{m}
	c.send(req)
	other := b.dial()
	for deadline := time.Now().Add(patience); other.end() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no marker is in the log")
		}
	}
	b.stop()
	resp, err := c.receive(req)
	if err != nil {
		t.Fatal(err)
	}
	codes := make(map[int16]int)
	for _, p := range resp.(*kmsg.WriteTxnMarkersResponse).Markers[0].Topics[0].Partitions {
		codes[p.ErrorCode]++
	}
	written, refused := codes[0], codes[kerr.RequestTimedOut.Code]
	if written == 0 || refused == 0 || written+refused != markers {
		t.Errorf("markers by error code: %v, want some written and the others timed out", codes)
	}
}
