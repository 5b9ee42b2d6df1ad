package server_test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// stored is the answer to a batch that is in the log, now or already.
func stored(base int64) answer { return answer{0, base} }

func refused(err *kerr.Error) answer { return answer{err.Code, -1} }

// What the library decides, as it reaches a producer on the wire. The trace is
// that of the package documentation and what it leaves out.
func TestVerdictsOnTheWire(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	for _, step := range []struct {
		name  string
		pid   int64
		epoch int16
		seq   int32
		n     int
		want  answer
	}{
		{"first batch", 31, 0, 0, 3, stored(0)},
		{"next batch", 31, 0, 3, 2, stored(3)},
		{"retry of the next batch", 31, 0, 3, 2, stored(3)},
		{"retry of the first batch", 31, 0, 0, 3, stored(0)},
		{"gap", 31, 0, 7, 1, refused(kerr.OutOfOrderSequenceNumber)},
		{"overlap", 31, 0, 4, 2, refused(kerr.OutOfOrderSequenceNumber)},
		{"split retry", 31, 0, 3, 1, refused(kerr.OutOfOrderSequenceNumber)},
		{"merged retry", 31, 0, 0, 5, refused(kerr.OutOfOrderSequenceNumber)},
		{"new epoch that does not start at 0", 31, 1, 7, 1, refused(kerr.OutOfOrderSequenceNumber)},
		{"old epoch, still the current one", 31, 0, 5, 1, stored(5)},
		{"new epoch", 31, 1, 0, 1, stored(6)},
		{"old epoch, fenced", 31, 0, 6, 1, refused(kerr.InvalidProducerEpoch)},
		{"retry from the old epoch, fenced", 31, 0, 5, 1, refused(kerr.InvalidProducerEpoch)},
		{"new epoch goes on", 31, 1, 1, 1, stored(7)},
		{"unknown producer in the middle", 32, 0, 5, 1, refused(kerr.UnknownProducerID)},
		{"unknown producer from the start", 32, 0, 0, 1, stored(8)},
		{"not idempotent", -1, -1, -1, 2, stored(9)},
		{"not idempotent, again", -1, -1, -1, 2, stored(11)},
		{"producer id below -1", -2, 0, 0, 1, refused(kerr.InvalidRecord)},
		{"negative epoch", 31, -1, 2, 1, refused(kerr.InvalidRecord)},
		{"negative sequence", 31, 1, -1, 1, refused(kerr.InvalidRecord)},
		{"and on, as if nothing had been refused", 31, 1, 2, 1, stored(13)},
	} {
		wantAnswer(t, step.name, c.batch(step.pid, step.epoch, step.seq, step.n), step.want)
	}
	if end := c.end(); end != 14 {
		t.Errorf("the log ends at %d, want 14: a refusal or a duplicate was stored", end)
	}
}

// What the broker itself refuses, before the library is asked. None of it may
// be remembered: the same sequence is sent, and stored, at the end.
func TestRefusalsOnTheWire(t *testing.T) {
	c := start(t, server.Config{MaxBatchBytes: 10_000}).dial()
	c.create("t")
	good := segmenttest.Batch(31, 0, 0, "a", "b")
	edit := func(change func(*kmsg.RecordBatch)) *kmsg.ProduceRequest {
		return produceRequest("t", 0, segmenttest.Edit(good, change))
	}
	bytes := func(change func(p []byte) []byte) *kmsg.ProduceRequest {
		return produceRequest("t", 0, change(segmenttest.Batch(31, 0, 0, "a", "b")))
	}
	request := func(change func(*kmsg.ProduceRequest)) *kmsg.ProduceRequest {
		req := produceRequest("t", 0, segmenttest.Batch(31, 0, 0, "a", "b"))
		change(req)
		return req
	}
	zstd := edit(func(b *kmsg.RecordBatch) { b.Attributes = 4 })
	zstd.Version = 6

	for name, step := range map[string]struct {
		req  *kmsg.ProduceRequest
		want *kerr.Error
	}{
		"flipped payload bit":   {bytes(func(p []byte) []byte { p[len(p)-1] ^= 1; return p }), kerr.CorruptMessage},
		"flipped sequence bit":  {bytes(func(p []byte) []byte { p[56] ^= 1; return p }), kerr.CorruptMessage},
		"one byte short":        {bytes(func(p []byte) []byte { return p[:len(p)-1] }), kerr.CorruptMessage},
		"half a header":         {bytes(func(p []byte) []byte { return p[:30] }), kerr.CorruptMessage},
		"negative length":       {bytes(func(p []byte) []byte { p[8] = 0x80; return p }), kerr.CorruptMessage},
		"no batch":              {bytes(func([]byte) []byte { return nil }), kerr.InvalidRecord},
		"two batches":           {bytes(func(p []byte) []byte { return append(p, p...) }), kerr.InvalidRecord},
		"magic 1":               {edit(func(b *kmsg.RecordBatch) { b.Magic = 1 }), kerr.InvalidRecord},
		"fewer records":         {edit(func(b *kmsg.RecordBatch) { b.NumRecords = 1 }), kerr.InvalidRecord},
		"more offsets":          {edit(func(b *kmsg.RecordBatch) { b.LastOffsetDelta = 2 }), kerr.InvalidRecord},
		"control batch":         {edit(func(b *kmsg.RecordBatch) { b.Attributes = 1 << 5 }), kerr.InvalidRecord},
		"log append time":       {edit(func(b *kmsg.RecordBatch) { b.Attributes = 1 << 3 }), kerr.InvalidTimestamp},
		"transactional":         {edit(func(b *kmsg.RecordBatch) { b.Attributes = 1 << 4 }), kerr.InvalidTxnState},
		"unknown codec":         {edit(func(b *kmsg.RecordBatch) { b.Attributes = 5 }), kerr.UnsupportedCompressionType},
		"zstd before version 7": {zstd, kerr.UnsupportedCompressionType},
		"too large":             {edit(func(b *kmsg.RecordBatch) { b.Records = make([]byte, 10_000) }), kerr.MessageTooLarge},
		"acks 2":                {request(func(req *kmsg.ProduceRequest) { req.Acks = 2 }), kerr.InvalidRequiredAcks},
		"unknown topic":         {request(func(req *kmsg.ProduceRequest) { req.Topics[0].Topic = "u" }), kerr.UnknownTopicOrPartition},
		"unknown partition":     {request(func(req *kmsg.ProduceRequest) { req.Topics[0].Partitions[0].Partition = 3 }), kerr.UnknownTopicOrPartition},
		"partition -1":          {request(func(req *kmsg.ProduceRequest) { req.Topics[0].Partitions[0].Partition = -1 }), kerr.UnknownTopicOrPartition},
	} {
		wantAnswer(t, name, c.produce(step.req), refused(step.want))
	}
	wantAnswer(t, "the same, whole", c.produce(produceRequest("t", 0, good)), stored(0))
	if end := c.end(); end != 2 {
		t.Errorf("the log ends at %d, want 2: a refused batch was stored", end)
	}
}

// A damaged retry is a damaged batch, not a duplicate: its sequence cannot be
// trusted.
func TestDamagedRetryIsNoDuplicate(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	wantAnswer(t, "first copy", c.batch(31, 0, 0, 2), stored(0))
	p := segmenttest.Batch(31, 0, 0, "", "")
	p[len(p)-1] ^= 1
	wantAnswer(t, "damaged retry", c.produce(produceRequest("t", 0, p)), refused(kerr.CorruptMessage))
}

// Every batch of a request is judged and answered on its own.
func TestSeveralBatchesInARequest(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	c.create("u")
	partition := func(i int32, seq int32) kmsg.ProduceRequestTopicPartition {
		return kmsg.ProduceRequestTopicPartition{Partition: i, Records: segmenttest.Batch(31, 0, seq, "x")}
	}
	for version := int16(3); version <= 11; version++ {
		seq := int32(version - 3)
		req := produceRequest("t", 0, nil)
		req.Version = version
		req.Topics = []kmsg.ProduceRequestTopic{
			{Topic: "t", Partitions: []kmsg.ProduceRequestTopicPartition{partition(0, seq), partition(1, seq+5), partition(2, seq)}},
			{Topic: "v", Partitions: []kmsg.ProduceRequestTopicPartition{partition(0, seq)}},
			{Topic: "u", Partitions: []kmsg.ProduceRequestTopicPartition{partition(2, seq), partition(2, seq)}},
		}
		var got []string
		for _, topic := range ask[*kmsg.ProduceResponse](c, req).Topics {
			for _, p := range topic.Partitions {
				got = append(got, fmt.Sprintf("%s-%d: %d at %d", topic.Topic, p.Partition, p.ErrorCode, p.BaseOffset))
			}
		}
		want := []string{
			fmt.Sprintf("t-0: 0 at %d", seq), "t-1: 59 at -1", fmt.Sprintf("t-2: 0 at %d", seq),
			"v-0: 3 at -1",
			fmt.Sprintf("u-2: 0 at %d", seq), fmt.Sprintf("u-2: 0 at %d", seq),
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("version %d: %q, want %q", version, got, want)
		}
	}
}

// With acks=0 there is no answer to tell a refusal with, so the connection
// ends, which makes a client look for what is wrong.
func TestAcksZero(t *testing.T) {
	b := start(t, server.Config{})
	c := b.dial()
	c.create("t")
	for _, seq := range []int32{0, 1, 1} { // the last one is a duplicate
		req := produceRequest("t", 0, segmenttest.Batch(31, 0, seq, "x"))
		req.Acks = 0
		c.send(req)
	}
	if end := c.end(); end != 2 {
		t.Errorf("the log ends at %d, want 2", end)
	}
	req := produceRequest("t", 0, segmenttest.Batch(31, 0, 7, "x"))
	req.Acks = 0
	c.send(req)
	if !c.closed() {
		t.Error("a refusal left the connection open")
	}
	wantAnswer(t, "acks=1", b.dial().batch(31, 0, 2, 1), stored(2))
}

// An append that fails is not remembered: the retry is stored, once.
func TestFailedAppendIsNotRemembered(t *testing.T) {
	dir := t.TempDir()
	c := start(t, server.Config{Dir: dir, SegmentBytes: 1}).dial()
	c.create("t")
	wantAnswer(t, "first", c.batch(31, 0, 0, 3), stored(0))

	// The next batch needs a new segment, whose name is taken.
	obstacle := filepath.Join(dir, "t-0", fmt.Sprintf("%020d.log", 3))
	if err := os.WriteFile(obstacle, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	wantAnswer(t, "second, failing", c.batch(31, 0, 3, 2), refused(kerr.KafkaStorageError))
	wantAnswer(t, "third, with the second missing", c.batch(31, 0, 5, 1), refused(kerr.OutOfOrderSequenceNumber))
	if err := os.Remove(obstacle); err != nil {
		t.Fatal(err)
	}
	wantAnswer(t, "second, again", c.batch(31, 0, 3, 2), stored(3))
	wantAnswer(t, "second, a retry", c.batch(31, 0, 3, 2), stored(3))
	wantAnswer(t, "third", c.batch(31, 0, 5, 1), stored(5))
}

// Many connections send the same batch of one producer at the same time, as
// happens when a client gives up on connections that still deliver. It is
// stored once, and all of them are told where.
func TestSameBatchOnManyConnections(t *testing.T) {
	b := start(t, server.Config{})
	b.dial().create("t")
	const connections, batches = 8, 300
	var clients []*client
	for range connections {
		clients = append(clients, b.dial())
	}
	for seq := range int32(batches) {
		var wg sync.WaitGroup
		for i, c := range clients {
			wg.Go(func() {
				wantAnswer(t, fmt.Sprintf("connection %d", i), c.batch(31, 0, seq, 1), stored(int64(seq)))
			})
		}
		wg.Wait()
		if t.Failed() {
			break
		}
	}
	if end := b.dial().end(); end != batches {
		t.Errorf("the log ends at %d, want %d", end, batches)
	}
}

// Every verdict reaches the observer, before the producer is answered.
func TestObserve(t *testing.T) {
	events := make(chan server.Event, 1)
	c := start(t, server.Config{Observe: func(e server.Event) { events <- e }}).dial()
	c.create("t")
	for _, step := range []struct {
		seq  int32
		want string
	}{
		{0, "Append at 0 <nil>"},
		{2, "Append at 2 <nil>"},
		{0, "Duplicate at 0 <nil>"},
		{5, "none at 0 idempotence: out of order sequence"},
	} {
		c.batch(31, 0, step.seq, 2)
		e := <-events
		got := fmt.Sprintf("%s at %d %v", e.Result.Verdict, e.Result.BaseOffset, e.Err)
		if len(got) < len(step.want) || got[:len(step.want)] != step.want {
			t.Errorf("sequence %d: observed %q, want %q", step.seq, got, step.want)
		}
		want := idempotence.Batch{ProducerID: 31, BaseSequence: step.seq, Count: 2}
		if e.Topic != "t" || e.Partition != 0 || e.Batch != want {
			t.Errorf("sequence %d: observed %+v", step.seq, e)
		}
	}
}

func TestWithoutDeduplication(t *testing.T) {
	c := start(t, server.Config{WithoutDeduplication: true}).dial()
	c.create("t")
	wantAnswer(t, "first copy", c.batch(31, 0, 0, 2), stored(0))
	wantAnswer(t, "second copy", c.batch(31, 0, 0, 2), stored(2))
	wantAnswer(t, "gap", c.batch(31, 0, 9, 1), stored(4))
}
