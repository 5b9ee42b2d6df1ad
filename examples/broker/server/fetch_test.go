package server_test

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// A client newer than the broker is answered in version 0, with the list by
// which it finds a common version; every other request of a version that is
// not served ends the connection, since its answer would have no known form.
func TestApiVersions(t *testing.T) {
	b := start(t, server.Config{})
	c := b.dial()
	for version := int16(0); version <= 3; version++ {
		req := kmsg.NewPtrApiVersionsRequest()
		req.Version = version
		if resp := ask[*kmsg.ApiVersionsResponse](c, req); resp.ErrorCode != 0 || len(resp.ApiKeys) != 17 {
			t.Errorf("version %d: %+v", version, resp)
		}
	}

	newer := kmsg.NewPtrApiVersionsRequest()
	newer.Version = newer.MaxVersion()
	c.send(newer)
	old := kmsg.NewPtrApiVersionsRequest() // reads an answer in version 0
	resp, err := c.receive(old)
	if err != nil {
		t.Fatal(err)
	}
	got := resp.(*kmsg.ApiVersionsResponse)
	if got.ErrorCode != kerr.UnsupportedVersion.Code || len(got.ApiKeys) != 1 ||
		got.ApiKeys[0].ApiKey != int16(kmsg.ApiVersions) || got.ApiKeys[0].MaxVersion != 3 {
		t.Errorf("newer version: %+v, want the versions of ApiVersions alone", got)
	}

	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Version = metadata.MaxVersion()
	c.send(metadata)
	if !c.closed() {
		t.Error("an unknown version of Metadata left the connection open")
	}
}

func TestMetadata(t *testing.T) {
	b := start(t, server.Config{MaxPartitions: 7})
	c := b.dial()
	ask := func(version int16, create bool, topics ...string) *kmsg.MetadataResponse {
		req := kmsg.NewPtrMetadataRequest()
		req.Version = version
		req.AllowAutoTopicCreation = create
		req.Topics = []kmsg.MetadataRequestTopic{}
		for _, topic := range topics {
			req.Topics = append(req.Topics, kmsg.MetadataRequestTopic{Topic: &topic})
		}
		return ask[*kmsg.MetadataResponse](c, req)
	}
	for _, step := range []struct {
		version int16
		create  bool
		topic   string
		want    *kerr.Error
	}{
		{4, false, "t", kerr.UnknownTopicOrPartition},
		{4, true, "t", nil},
		{9, false, "t", nil},
		{1, false, "u", nil}, // version 1 cannot say no
		{9, true, "third", kerr.PolicyViolation},
		{9, true, "", kerr.InvalidTopicException},
		{9, true, "..", kerr.InvalidTopicException},
		{9, true, "../../etc", kerr.InvalidTopicException},
		{9, true, "a/b", kerr.InvalidTopicException},
		{9, true, fmt.Sprintf("%0250d", 0), kerr.InvalidTopicException},
	} {
		resp := ask(step.version, step.create, step.topic).Topics[0]
		var want int16
		if step.want != nil {
			want = step.want.Code
		}
		if resp.ErrorCode != want || want == 0 && len(resp.Partitions) != 3 {
			t.Errorf("version %d, create %t, %q: %+v, want code %d", step.version, step.create, step.topic, resp, want)
		}
	}

	resp := ask(9, true)
	if len(resp.Topics) != 0 {
		t.Errorf("asked for no topics, got %+v", resp.Topics)
	}
	host, port, _ := net.SplitHostPort(b.addr)
	if got := resp.Brokers[0]; got.Host != host || strconv.Itoa(int(got.Port)) != port {
		t.Errorf("advertised %s:%d, want %s", got.Host, got.Port, b.addr)
	}
	everything := kmsg.NewPtrMetadataRequest()
	everything.Version = 9
	c.send(everything)
	all, err := c.receive(everything)
	if err != nil || len(all.(*kmsg.MetadataResponse).Topics) != 2 {
		t.Errorf("all topics: %+v, %v", all, err)
	}
}

func TestFetch(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	for seq := range int32(4) {
		c.batch(31, 0, seq, 1)
	}
	size := len(segmenttest.Batch(31, 0, 0, ""))
	for version := int16(4); version <= 12; version++ {
		req := fetchRequest("t", 0, 1)
		req.Version = version
		if got := c.fetch(req); len(got.RecordBatches) != 3*size || got.HighWatermark != 4 || got.ErrorCode != 0 {
			t.Errorf("version %d: %d bytes, high watermark %d, code %d", version, len(got.RecordBatches), got.HighWatermark, got.ErrorCode)
		}
	}

	req := fetchRequest("t", 0, 0)
	req.Topics[0].Partitions[0].PartitionMaxBytes = 1
	if got := c.fetch(req); len(got.RecordBatches) != size {
		t.Errorf("at most 1 byte: got %d, want one batch of %d", len(got.RecordBatches), size)
	}
	req.MaxBytes = int32(2 * size)
	req.Topics[0].Partitions[0].PartitionMaxBytes = 1 << 20
	req.Topics[0].Partitions = append(req.Topics[0].Partitions, req.Topics[0].Partitions[0])
	resp := ask[*kmsg.FetchResponse](c, req).Topics[0].Partitions
	if len(resp[0].RecordBatches) != 2*size || len(resp[1].RecordBatches) != 0 {
		t.Errorf("at most two batches: got %d and %d bytes", len(resp[0].RecordBatches), len(resp[1].RecordBatches))
	}

	for name, tt := range map[string]struct {
		req  *kmsg.FetchRequest
		want *kerr.Error
	}{
		"beyond the end":    {fetchRequest("t", 0, 5), kerr.OffsetOutOfRange},
		"negative offset":   {fetchRequest("t", 0, -1), kerr.OffsetOutOfRange},
		"unknown partition": {fetchRequest("t", 9, 0), kerr.UnknownTopicOrPartition},
		"unknown topic":     {fetchRequest("u", 0, 0), kerr.UnknownTopicOrPartition},
	} {
		tt.req.MinBytes, tt.req.MaxWaitMillis = 1, 60_000 // an error is not waited for
		if got := c.fetch(tt.req); got.ErrorCode != tt.want.Code {
			t.Errorf("%s: code %d, want %d", name, got.ErrorCode, tt.want.Code)
		}
	}
}

// A consumer at the end waits until there is something, or its time is up.
func TestFetchWaits(t *testing.T) {
	b := start(t, server.Config{})
	c, producer := b.dial(), b.dial()
	c.create("t")
	req := fetchRequest("t", 0, 0)
	req.MinBytes, req.MaxWaitMillis = 1, 50
	begun := time.Now()
	if got := c.fetch(req); len(got.RecordBatches) != 0 || got.ErrorCode != 0 {
		t.Errorf("fetched %+v from an empty partition", got)
	}
	if waited := time.Since(begun); waited < 50*time.Millisecond {
		t.Errorf("answered after %v, wanted to wait 50ms", waited)
	}

	req.MaxWaitMillis = 30_000
	c.send(req)
	// The other partitions have nothing to do with it.
	other := produceRequest("t", 1, segmenttest.Batch(31, 0, 0, "x"))
	wantAnswer(t, "other partition", producer.produce(other), stored(0))
	wantAnswer(t, "this partition", producer.batch(31, 0, 0, 1), stored(0))
	resp, err := c.receive(req)
	if err != nil {
		t.Fatal(err)
	}
	if got := resp.(*kmsg.FetchResponse).Topics[0].Partitions[0]; len(got.RecordBatches) == 0 {
		t.Errorf("woken up for nothing: %+v", got)
	}
	if waited := time.Since(begun); waited > patience {
		t.Errorf("woken up only after %v", waited)
	}
}

func TestListOffsets(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	c.batch(31, 0, 0, 3) // records of time 1000
	c.batch(31, 0, 3, 1)
	for version := int16(1); version <= 6; version++ {
		for timestamp, want := range map[int64]int64{-1: 4, -2: 0, 0: 0, 1000: 0, 1001: -1} {
			req := kmsg.NewPtrListOffsetsRequest()
			req.Version = version
			p := kmsg.NewListOffsetsRequestTopicPartition()
			p.Timestamp = timestamp
			unknown := p
			unknown.Partition = 3
			req.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: "t", Partitions: []kmsg.ListOffsetsRequestTopicPartition{p, unknown}}}
			got := ask[*kmsg.ListOffsetsResponse](c, req).Topics[0].Partitions
			if got[0].ErrorCode != 0 || got[0].Offset != want {
				t.Errorf("version %d, time %d: offset %d, code %d, want %d", version, timestamp, got[0].Offset, got[0].ErrorCode, want)
			}
			if got[1].ErrorCode != kerr.UnknownTopicOrPartition.Code {
				t.Errorf("unknown partition: %+v", got[1])
			}
		}
	}
}

// A slowFile takes its time over each read, once it is slow.
type slowFile struct {
	segment.File
	slow *atomic.Bool
}

const slowRead = 50 * time.Millisecond

func (f slowFile) ReadAt(p []byte, at int64) (int, error) {
	if f.slow.Load() {
		time.Sleep(slowRead)
	}
	return f.File.ReadAt(p, at)
}

// A request for a point in time in many partitions, each a walk through a
// segment, does not keep the broker from ending.
func TestShutdownDuringListOffsets(t *testing.T) {
	const partitions = 40
	var slow atomic.Bool
	b := start(t, server.Config{
		Partitions: partitions, NoSync: true,
		OpenFile: func(name string, flag int, perm os.FileMode) (segment.File, error) {
			f, err := os.OpenFile(name, flag, perm)
			return slowFile{f, &slow}, err
		},
	})
	c := b.dial()
	c.create("t")
	req := kmsg.NewPtrListOffsetsRequest()
	req.Version = 1
	req.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: "t"}}
	for i := range int32(partitions) {
		c.produce(produceRequest("t", i, segmenttest.Batch(31, 0, 0, "x")))
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.Timestamp = i, 500
		req.Topics[0].Partitions = append(req.Topics[0].Partitions, p)
	}
	slow.Store(true)
	c.send(req)
	time.Sleep(2 * slowRead) // it is being served
	begun := time.Now()
	b.stop()
	if took := time.Since(begun); took > partitions*slowRead/2 {
		t.Errorf("the broker took %v to end", took)
	}
}
