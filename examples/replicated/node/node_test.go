package node

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/wire"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

// A rig is a node that is alone and leads, with a topic of one partition, and a
// client of it.
type rig struct {
	testing.TB
	node *Node
	kgo  *kgo.Client
}

func newRig(t testing.TB, change func(*Config)) *rig {
	t.Helper()
	cfg := testConfig(t, t.TempDir())
	if change != nil {
		change(&cfg)
	}
	n, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{TB: t, node: n}
	t.Cleanup(r.stop)
	r.kgo, err = kgo.NewClient(kgo.SeedBrokers(cfg.Peers[0].Client), kgo.RequestRetries(0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.kgo.Close)
	awaitReady(t, n)
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = kmsg.StringPtr("numbers")
	req := kmsg.NewPtrMetadataRequest()
	req.AllowAutoTopicCreation, req.Topics = true, []kmsg.MetadataRequestTopic{topic}
	if resp := request(r, req).(*kmsg.MetadataResponse); resp.Topics[0].ErrorCode != 0 || resp.Topics[0].Partitions[0].Leader != 1 {
		t.Fatalf("metadata %+v", resp.Topics[0])
	}
	return r
}

// testConfig is that of a node that is alone, on ports of its own.
func testConfig(t testing.TB, dir string) Config {
	t.Helper()
	cfg := Config{ID: 1, Dir: dir, ElectionTimeout: 50 * time.Millisecond, Topic: statemachine.TopicConfig{Partitions: 1}}
	for _, ln := range []*net.Listener{&cfg.RaftListener, &cfg.ClientListener} {
		var err error
		if *ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	cfg.Peers = []Peer{{1, cfg.RaftListener.Addr().String(), cfg.ClientListener.Addr().String()}}
	return cfg
}

func awaitReady(t testing.TB, n *Node) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !n.Ready(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a node that is alone does not lead")
		}
	}
}

// stop stops the node, if it runs.
func (r *rig) stop() {
	r.Helper()
	if n := r.node; n != nil {
		r.node = nil
		if err := n.Close(); err != nil {
			r.Error(err)
		}
	}
}

// request makes a request to the node.
func request(r *rig, req kmsg.Request) kmsg.Response {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), 20*time.Second)
	defer cancel()
	resp, err := r.kgo.Broker(1).Request(ctx, req)
	if err != nil {
		r.Fatal(err)
	}
	return resp
}

// produce sends a batch and returns the answer.
func (r *rig) produce(topic string, partition int32, batch []byte) kmsg.ProduceResponseTopicPartition {
	r.Helper()
	return request(r, produceRequest(topic, partition, batch, -1)).(*kmsg.ProduceResponse).Topics[0].Partitions[0]
}

func produceRequest(topic string, partition int32, batch []byte, acks int16) *kmsg.ProduceRequest {
	p := kmsg.NewProduceRequestTopicPartition()
	p.Partition, p.Records = partition, batch
	t := kmsg.NewProduceRequestTopic()
	t.Topic, t.Partitions = topic, []kmsg.ProduceRequestTopicPartition{p}
	req := kmsg.NewPtrProduceRequest()
	req.Acks, req.TimeoutMillis, req.Topics = acks, 5000, []kmsg.ProduceRequestTopic{t}
	return req
}

func TestProduce(t *testing.T) {
	r := newRig(t, nil)
	damaged := segmenttest.Batch(7, 0, 2, "a")
	damaged[len(damaged)-1] ^= 1
	with := func(attributes int16) []byte {
		return segmenttest.Edit(segmenttest.Batch(7, 0, 2, "a"), func(b *kmsg.RecordBatch) { b.Attributes |= attributes })
	}
	gappy := segmenttest.Edit(segmenttest.Batch(7, 0, 2, "a"), func(b *kmsg.RecordBatch) { b.LastOffsetDelta = 4 })
	for _, step := range []struct {
		what      string
		topic     string
		partition int32
		batch     []byte
		code      *kerr.Error
		offset    int64
	}{
		{"a batch", "numbers", 0, segmenttest.Batch(7, 0, 0, "a", "b"), nil, 0},
		{"its copy", "numbers", 0, segmenttest.Batch(7, 0, 0, "a", "b"), nil, 0},
		{"another producer", "numbers", 0, segmenttest.Batch(8, 0, 0, "a"), nil, 2},
		{"a gap", "numbers", 0, segmenttest.Batch(7, 0, 3, "a"), kerr.OutOfOrderSequenceNumber, -1},
		{"an unknown producer", "numbers", 0, segmenttest.Batch(9, 0, 3, "a"), kerr.UnknownProducerID, -1},
		{"a new epoch", "numbers", 0, segmenttest.Batch(8, 1, 0, "a"), nil, 3},
		{"an old epoch", "numbers", 0, segmenttest.Batch(8, 0, 1, "a"), kerr.InvalidProducerEpoch, -1},
		{"a negative sequence", "numbers", 0, segmenttest.Batch(7, 0, -5, "a"), kerr.InvalidRecord, -1},
		{"no such topic", "letters", 0, segmenttest.Batch(7, 0, 2, "a"), kerr.UnknownTopicOrPartition, -1},
		{"no such partition", "numbers", 1, segmenttest.Batch(7, 0, 2, "a"), kerr.UnknownTopicOrPartition, -1},
		{"no batch", "numbers", 0, []byte{}, kerr.InvalidRecord, -1},
		{"two batches", "numbers", 0, append(segmenttest.Batch(7, 0, 2, "a"), segmenttest.Batch(7, 0, 3, "a")...), kerr.InvalidRecord, -1},
		{"a damaged batch", "numbers", 0, damaged, kerr.CorruptMessage, -1},
		{"offsets without records", "numbers", 0, gappy, kerr.InvalidRecord, -1},
		{"a control batch", "numbers", 0, with(0x20), kerr.InvalidRecord, -1},
		{"append times", "numbers", 0, with(0x08), kerr.InvalidTimestamp, -1},
		{"a transaction", "numbers", 0, with(0x10), kerr.InvalidTxnState, -1},
		{"an unknown codec", "numbers", 0, with(0x05), kerr.UnsupportedCompressionType, -1},
		{"too large", "numbers", 0, segmenttest.Batch(7, 0, 2, strings.Repeat("a", statemachine.MaxBatchBytes)), kerr.MessageTooLarge, -1},
		{"no harm done", "numbers", 0, segmenttest.Batch(7, 0, 2, "a"), nil, 4},
	} {
		want := int16(0)
		if step.code != nil {
			want = step.code.Code
		}
		got := r.produce(step.topic, step.partition, step.batch)
		if got.ErrorCode != want || got.BaseOffset != step.offset {
			t.Errorf("%s: code %d, offset %d, want code %d and offset %d", step.what, got.ErrorCode, got.BaseOffset, want, step.offset)
		}
	}
}

// TestRetryIsAnsweredEarly: a duplicate, and a producer that is fenced, need no
// entry in the raft log; a gap does, since what is missing may be there.
func TestRetryIsAnsweredEarly(t *testing.T) {
	r := newRig(t, nil)
	r.produce("numbers", 0, segmenttest.Batch(7, 1, 0, "a"))
	for _, step := range []struct {
		what     string
		batch    []byte
		proposed bool
	}{
		{"a duplicate", segmenttest.Batch(7, 1, 0, "a"), false},
		{"fenced", segmenttest.Batch(7, 0, 0, "a"), false},
		{"invalid", segmenttest.Batch(7, 1, -3, "a"), false},
		{"a gap", segmenttest.Batch(7, 1, 5, "a"), true},
		{"the next", segmenttest.Batch(7, 1, 1, "a"), true},
	} {
		before := r.node.raft.LastIndex()
		r.produce("numbers", 0, step.batch)
		if proposed := r.node.raft.LastIndex() > before; proposed != step.proposed {
			t.Errorf("%s: proposed %v", step.what, proposed)
		}
	}
}

// TestNoAnswers: with acks 0 a refusal shows in the end of the connection.
func TestNoAnswers(t *testing.T) {
	r := newRig(t, nil)
	conn, err := net.Dial("tcp", r.node.cfg.Peers[0].Client)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for sequence, records := range [][]byte{segmenttest.Batch(7, 0, 0, "a"), segmenttest.Batch(7, 0, 9, "a")} {
		req := produceRequest("numbers", 0, records, 0)
		if _, err := conn.Write(frame(req, 9, int32(sequence))); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("%d bytes and error %v, want the end of the connection", n, err)
	}
	if got := r.produce("numbers", 0, segmenttest.Batch(7, 0, 0, "a")); got.ErrorCode != 0 || got.BaseOffset != 0 {
		t.Errorf("the first batch is not there: %+v", got)
	}
}

// frame is a request as it is sent.
func frame(req kmsg.Request, version int16, correlationID int32) []byte {
	req.SetVersion(version)
	f := kmsg.NewRequestFormatter(kmsg.FormatterClientID("test"))
	return f.AppendRequest(nil, req, correlationID)
}

// TestHostileConnections: what is no request costs its sender the connection, and
// nobody else anything.
func TestHostileConnections(t *testing.T) {
	r := newRig(t, func(cfg *Config) { cfg.MaxRequestBytes, cfg.RequestMemory, cfg.MaxConnections = 2<<20, 2<<20, 4 })
	length := func(n uint32, more ...byte) []byte { return append(binary.BigEndian.AppendUint32(nil, n), more...) }
	for what, bytes := range map[string][]byte{
		"a length below zero":        length(1<<32-1, 0, 18),
		"a length of one":            length(1, 0, 18),
		"a long request":             length(70_000, 0, 18),
		"a Produce request too long": length(2<<20+1, 0, 0),
		"an unknown request":         length(10, 0, 99, 0, 0, 0, 0, 0, 1, 0xff, 0xff),
		"a request that breaks off":  length(12, 0, 3, 0, 1, 0, 0, 0, 1, 0xff, 0xff, 0, 0),
	} {
		conn, err := net.Dial("tcp", r.node.cfg.Peers[0].Client)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(bytes); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !isReset(err) {
			t.Errorf("%s: %v, want the end of the connection", what, err)
		}
		conn.Close()
	}
	var idle []net.Conn
	for range 8 { // more than are served
		conn, err := net.Dial("tcp", r.node.cfg.Peers[0].Client)
		if err != nil {
			t.Fatal(err)
		}
		idle = append(idle, conn)
	}
	for _, conn := range idle {
		conn.Close()
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := r.kgo.Broker(1).Request(ctx, produceRequest("numbers", 0, segmenttest.Batch(7, 0, 0, "a"), -1))
		cancel()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func isReset(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && !op.Timeout()
}

// FuzzRequests: what can be decoded can be answered. A Fetch does not wait here, and
// topics are not created, or there would soon be too many.
func FuzzRequests(f *testing.F) {
	r := newRig(f, nil)
	for key, versions := range apis {
		for version := versions.Min; version <= versions.Max; version++ {
			req := kmsg.RequestForKey(key)
			switch req := req.(type) {
			case *kmsg.ProduceRequest:
				*req = *produceRequest("numbers", 0, segmenttest.Batch(7, 0, 0, "a"), -1)
			case *kmsg.FetchRequest:
				p := kmsg.NewFetchRequestTopicPartition()
				p.PartitionMaxBytes = 1 << 20
				req.MaxBytes, req.Topics = 1<<20, []kmsg.FetchRequestTopic{{Topic: "numbers", Partitions: []kmsg.FetchRequestTopicPartition{p}}}
			case *kmsg.ListOffsetsRequest:
				p := kmsg.NewListOffsetsRequestTopicPartition()
				req.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: "numbers", Partitions: []kmsg.ListOffsetsRequestTopicPartition{p}}}
			case *kmsg.MetadataRequest:
				req.Topics = []kmsg.MetadataRequestTopic{{Topic: kmsg.StringPtr("numbers")}}
			}
			f.Add(frame(req, version, 1)[4:])
		}
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		_, req, err := wire.Decode(frame, apis)
		if err != nil {
			return
		}
		x := &exchange{}
		switch req := req.(type) {
		case *kmsg.MetadataRequest:
			for _, asked := range req.Topics {
				if _, err := r.node.machine.Topic(*asked.Topic); err != nil {
					return
				}
			}
		case *kmsg.FetchRequest:
			if req.MaxWaitMillis > 0 {
				return
			}
		}
		if err := r.node.begin(x, frame); err != nil {
			t.Fatal(err)
		}
		resp, err := x.answer()
		r.node.fetchMemory.Release(x.claim)
		if err == nil && resp != nil {
			resp.SetVersion(x.header.Version)
			wire.AppendResponse(nil, x.header.CorrelationID, resp)
		}
	})
}

// TestNewerClient: a client that asks in a version to come is told which there
// are, in version 0.
func TestNewerClient(t *testing.T) {
	r := newRig(t, nil)
	conn, err := net.Dial("tcp", r.node.cfg.Peers[0].Client)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, 10), 0, 18, 0, 99, 0, 0, 0, 5, 0xff, 0xff)); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 4+4+2)
	if _, err := io.ReadFull(conn, head); err != nil {
		t.Fatal(err)
	}
	if id, code := binary.BigEndian.Uint32(head[4:]), int16(binary.BigEndian.Uint16(head[8:])); id != 5 || code != kerr.UnsupportedVersion.Code {
		t.Errorf("correlation id %d, code %d", id, code)
	}
}

func TestProducerIDs(t *testing.T) {
	r := newRig(t, nil)
	seen := make(map[int64]bool)
	for range producerIDBlock + 5 {
		id, err := r.node.freshProducerID()
		if err != nil {
			t.Fatal(err)
		}
		if seen[id] {
			t.Fatalf("id %d was handed out twice", id)
		}
		seen[id] = true
	}
	// A client makes one up; nobody gets that one later.
	made := r.node.producerIDs.next + 1
	r.produce("numbers", 0, segmenttest.Batch(made, 0, 0, "a"))
	for range 5 {
		resp := request(r, kmsg.NewPtrInitProducerIDRequest()).(*kmsg.InitProducerIDResponse)
		if resp.ErrorCode != 0 || resp.ProducerEpoch != 0 || seen[resp.ProducerID] || resp.ProducerID == made {
			t.Errorf("%+v", resp)
		}
	}
}

// TestTransactionalIDs: a client with a transactional id is told at once that there
// are no transactions here.
func TestTransactionalIDs(t *testing.T) {
	r := newRig(t, nil)
	cl, err := kgo.NewClient(kgo.SeedBrokers(r.node.cfg.Peers[0].Client), kgo.TransactionalID("t"))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	if err := cl.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	// It does not even find FindCoordinator among the requests that are served.
	if err := cl.ProduceSync(ctx, &kgo.Record{Topic: "numbers"}).FirstErr(); err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "broker") {
		t.Errorf("produced with error %v", err)
	}
	id := kmsg.NewPtrInitProducerIDRequest()
	id.TransactionalID = kmsg.StringPtr("t")
	if resp := request(r, id).(*kmsg.InitProducerIDResponse); resp.ErrorCode != kerr.InvalidRequest.Code {
		t.Errorf("InitProducerId: code %d", resp.ErrorCode)
	}
	req := produceRequest("numbers", 0, segmenttest.Batch(7, 0, 0, "a"), -1)
	req.TransactionID = kmsg.StringPtr("t")
	if p := request(r, req).(*kmsg.ProduceResponse).Topics[0].Partitions[0]; p.ErrorCode != kerr.InvalidTxnState.Code || !strings.Contains(*p.ErrorMessage, "no transactions") {
		t.Errorf("Produce: code %d, %q", p.ErrorCode, *p.ErrorMessage)
	}
}

func TestFetchAndListOffsets(t *testing.T) {
	r := newRig(t, func(cfg *Config) { cfg.FetchMemory = 2 * (maxFetchBytes + statemachine.MaxBatchBytes) })
	r.produce("numbers", 0, segmenttest.Batch(7, 0, 0, "a", "b"))
	r.produce("numbers", 0, segmenttest.Batch(7, 0, 2, "c"))
	fetch := func(topic string, offset int64, wait int32) kmsg.FetchResponseTopicPartition {
		p := kmsg.NewFetchRequestTopicPartition()
		p.FetchOffset, p.PartitionMaxBytes = offset, 1<<20
		ft := kmsg.NewFetchRequestTopic()
		ft.Topic, ft.Partitions = topic, []kmsg.FetchRequestTopicPartition{p}
		req := kmsg.NewPtrFetchRequest()
		req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.Topics = wait, 1, 1<<20, []kmsg.FetchRequestTopic{ft}
		return request(r, req).(*kmsg.FetchResponse).Topics[0].Partitions[0]
	}
	for _, step := range []struct {
		topic  string
		offset int64
		code   *kerr.Error
		base   int64 // of the first batch, or -1
	}{
		{"numbers", 0, nil, 0},
		{"numbers", 1, nil, 0},
		{"numbers", 2, nil, 2},
		{"numbers", 3, nil, -1},
		{"numbers", 4, kerr.OffsetOutOfRange, -1},
		{"numbers", -1, kerr.OffsetOutOfRange, -1},
		{"letters", 0, kerr.UnknownTopicOrPartition, -1},
	} {
		got := fetch(step.topic, step.offset, 10)
		base := int64(-1)
		if _, h, err := idempotence.ParseBatch(got.RecordBatches); err == nil {
			base = h.BaseOffset
		}
		code := int16(0)
		if step.code != nil {
			code = step.code.Code
		}
		if got.ErrorCode != code || base != step.base {
			t.Errorf("%s at %d: code %d, batch at %d, want code %d and %d", step.topic, step.offset, got.ErrorCode, base, code, step.base)
		}
	}

	// Answers share the memory for them, and give it back.
	var consumers sync.WaitGroup
	for range 8 {
		consumers.Go(func() {
			for range 10 {
				if got := fetch("numbers", 0, 10); len(got.RecordBatches) == 0 {
					t.Errorf("no records: %+v", got)
				}
			}
		})
	}
	consumers.Wait()

	// A Fetch at the end waits for the next batch.
	arrived := make(chan kmsg.FetchResponseTopicPartition)
	go func() { arrived <- fetch("numbers", 3, 20_000) }()
	if _, err := r.node.propose(statemachine.Batch(0, segmenttest.Batch(7, 0, 3, "d"))); err != nil {
		t.Fatal(err)
	}
	if got := <-arrived; len(got.RecordBatches) == 0 || got.HighWatermark != 4 || got.LastStableOffset != 4 {
		t.Errorf("%d bytes, high watermark %d, last stable offset %d", len(got.RecordBatches), got.HighWatermark, got.LastStableOffset)
	}

	for timestamp, want := range map[int64]int64{-1: 4, -2: 0, 1000: 0, 1001: -1} {
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Timestamp = timestamp
		lt := kmsg.NewListOffsetsRequestTopic()
		lt.Topic, lt.Partitions = "numbers", []kmsg.ListOffsetsRequestTopicPartition{p}
		req := kmsg.NewPtrListOffsetsRequest()
		req.Topics = []kmsg.ListOffsetsRequestTopic{lt}
		got := request(r, req).(*kmsg.ListOffsetsResponse).Topics[0].Partitions[0]
		if got.ErrorCode != 0 || got.Offset != want {
			t.Errorf("time %d: code %d, offset %d, want %d", timestamp, got.ErrorCode, got.Offset, want)
		}
	}
}

// TestErrorCodes: whatever raft gives up with, the producer looks for the leader
// and sends again; what was not even enqueued, it sends again where it is.
func TestErrorCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want *kerr.Error
	}{
		{raft.ErrNotLeader, kerr.NotLeaderForPartition},
		{raft.ErrLeadershipTransferInProgress, kerr.NotLeaderForPartition},
		{raft.ErrLeadershipLost, kerr.NotLeaderForPartition},
		{raft.ErrRaftShutdown, kerr.NotLeaderForPartition},
		{raft.ErrAbortedByRestore, kerr.NotLeaderForPartition},
		{errors.New("the disk is full"), kerr.NotLeaderForPartition},
		{raft.ErrEnqueueTimeout, kerr.RequestTimedOut},
		{kerr.RequestTimedOut, kerr.RequestTimedOut},
		{idempotence.ErrFenced, kerr.InvalidProducerEpoch},
		{statemachine.ErrTooManyPartitions, kerr.PolicyViolation},
		{statemachine.ErrTopicName, kerr.InvalidTopicException},
	} {
		if got := errorCode(c.err); got != c.want.Code {
			t.Errorf("%v: code %d, want %d", c.err, got, c.want.Code)
		}
	}
}

// TestTopicErrors: a client that asks for a topic while there is no leader goes on
// asking.
func TestTopicErrors(t *testing.T) {
	for _, c := range []struct{ err, want error }{
		{raft.ErrNotLeader, kerr.LeaderNotAvailable},
		{raft.ErrLeadershipLost, kerr.LeaderNotAvailable},
		{raft.ErrEnqueueTimeout, kerr.LeaderNotAvailable},
		{kerr.RequestTimedOut, kerr.LeaderNotAvailable},
		{statemachine.ErrTopicName, statemachine.ErrTopicName},
		{statemachine.ErrTooManyPartitions, statemachine.ErrTooManyPartitions},
	} {
		if got := topicError(c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}

// TestAcks: a client that wants more than all or fewer than none is refused.
func TestAcks(t *testing.T) {
	for acks, want := range map[int16]error{-2: kerr.InvalidRequiredAcks, -1: nil, 0: nil, 1: nil, 2: kerr.InvalidRequiredAcks} {
		batch := segmenttest.Batch(7, 0, 0, "a")
		if _, err := validate(produceRequest("numbers", 0, batch, acks), batch); !errors.Is(err, want) {
			t.Errorf("acks %d: %v, want %v", acks, err, want)
		}
	}
}

func TestParsePeers(t *testing.T) {
	peers, err := ParsePeers("1=a:1/b:2,2=c:3/d:4")
	if err != nil || len(peers) != 2 || peers[1] != (Peer{2, "c:3", "d:4"}) {
		t.Errorf("%v, %v", peers, err)
	}
	for _, bad := range []string{"", "1", "1=a:1", "x=a:1/b:2", "1=a:1/b:2,"} {
		if _, err := ParsePeers(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}
