package server_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// framed puts a length before a request.
func framed(p ...byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(p))), p...)
}

func encode(req kmsg.Request) []byte {
	return kmsg.NewRequestFormatter().AppendRequest(nil, req, 7)
}

// Bytes that are no request end the connection they came on, at once, and
// nobody else's.
func TestHostileBytes(t *testing.T) {
	b := start(t, server.Config{MaxRequestBytes: 2 << 20})
	good := b.dial()
	good.create("t")

	produce := encode(produceRequest("t", 0, segmenttest.Batch(31, 0, 0, "x")))
	// A Produce request whose arrays claim to be as long as an int32 allows.
	claims := bytes.Clone(produce[:len(produce)-len(segmenttest.Batch(31, 0, 0, "x"))-20])
	claims = framed(append(claims[4:], 0xff, 0xff, 0xff, 0xff, 0x07)...)

	seq := int32(0)
	for name, p := range map[string][]byte{
		"a web browser":          []byte("GET / HTTP/1.1\r\nHost: broker\r\n\r\n"),
		"a TLS client":           {0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03, 0x03},
		"length 0":               framed(),
		"length 1":               framed(0),
		"negative length":        {0xff, 0xff, 0xff, 0xff, 0, 0},
		"length of 2 GiB":        {0x7f, 0xff, 0xff, 0xff, 0, 0},
		"unknown request":        framed(0x7f, 0xff, 0, 0, 0, 0, 0, 0, 0, 0),
		"not served":             encode(kmsg.NewPtrDeleteTopicsRequest()),
		"half a header":          framed(0, 0, 0, 9, 0, 0),
		"no body":                framed(0, 0, 0, 9, 0, 0, 0, 0, 0xff, 0xff, 0),
		"cut in the middle":      framed(produce[4 : len(produce)-10]...),
		"endless array":          claims,
		"zeros":                  make([]byte, 1<<16),
		"long small request":     {0, 1, 0, 1, 0, 3, 0, 9},
		"longer than allowed":    {0, 0x20, 0, 1, 0, 0, 0, 9},
		"client id past the end": framed(0, 3, 0, 1, 0, 0, 0, 0, 0x7f, 0xff),
	} {
		bad := b.dial()
		if _, err := bad.nc.Write(p); err != nil && name != "zeros" { // closed before all is sent
			t.Fatal(err)
		}
		if !bad.closed() {
			t.Errorf("%s: the connection stayed open", name)
		}
		wantAnswer(t, "good client after "+name, good.batch(31, 0, seq, 1), stored(int64(seq)))
		seq++
	}
}

// Requests that are damaged at random places do not take the broker down, are
// never stored as something that they are not, and disturb nobody.
func TestDamagedRequests(t *testing.T) {
	b := start(t, server.Config{})
	good := b.dial()
	good.create("t")
	const rounds, seed = 1200, 1
	rng := rand.New(rand.NewPCG(seed, seed))
	requests := [][]byte{
		encode(produceRequest("t", 1, segmenttest.Batch(31, 0, 0, "x", "y"))),
		encode(fetchRequest("t", 1, 0)),
		encode(kmsg.NewPtrMetadataRequest()),
		encode(kmsg.NewPtrListOffsetsRequest()),
		encode(kmsg.NewPtrInitProducerIDRequest()),
		encode(kmsg.NewPtrApiVersionsRequest()),
		encode(&kmsg.FindCoordinatorRequest{Version: 4, CoordinatorType: 1, CoordinatorKeys: []string{"x"}}),
		encode(&kmsg.InitProducerIDRequest{Version: 4, TransactionalID: kmsg.StringPtr("x"), TransactionTimeoutMillis: 1000, ProducerID: -1, ProducerEpoch: -1}),
		encode(&kmsg.AddPartitionsToTxnRequest{Version: 3, TransactionalID: "x", Topics: []kmsg.AddPartitionsToTxnRequestTopic{{Topic: "t", Partitions: []int32{1}}}}),
		encode(&kmsg.AddOffsetsToTxnRequest{Version: 3, TransactionalID: "x", Group: "g"}),
		encode(&kmsg.TxnOffsetCommitRequest{Version: 5, TransactionalID: "x", Group: "g", Generation: -1, Topics: []kmsg.TxnOffsetCommitRequestTopic{{Topic: "t", Partitions: []kmsg.TxnOffsetCommitRequestTopicPartition{{Partition: 1}}}}}),
		encode(&kmsg.EndTxnRequest{Version: 5, TransactionalID: "x"}),
		encode(&kmsg.OffsetCommitRequest{Version: 8, Group: "g", Generation: -1, Topics: []kmsg.OffsetCommitRequestTopic{{Topic: "t", Partitions: []kmsg.OffsetCommitRequestTopicPartition{{Partition: 1}}}}}),
		encode(&kmsg.OffsetFetchRequest{Version: 8, Groups: []kmsg.OffsetFetchRequestGroup{{Group: "g"}}}),
		encode(&kmsg.OffsetFetchRequest{Version: 7, Group: "g"}),
		encode(&kmsg.WriteTxnMarkersRequest{Version: 2, Markers: []kmsg.WriteTxnMarkersRequestMarker{{ProducerID: 31, Topics: []kmsg.WriteTxnMarkersRequestMarkerTopic{{Topic: "t", Partitions: []int32{1}}}}}}),
		encode(&kmsg.DescribeProducersRequest{Topics: []kmsg.DescribeProducersRequestTopic{{Topic: "t", Partitions: []int32{1}}}}),
		encode(&kmsg.DescribeTransactionsRequest{TransactionalIDs: []string{"x"}}),
		encode(&kmsg.ListTransactionsRequest{}),
	}
	for i := range rounds {
		p := bytes.Clone(requests[rng.IntN(len(requests))])
		for range 1 + rng.IntN(4) {
			p[4+rng.IntN(len(p)-4)] ^= byte(1 + rng.IntN(255))
		}
		bad := b.dial()
		if _, err := bad.nc.Write(p); err != nil {
			t.Fatal(err)
		}
		bad.nc.Close()
		if i%20 == 0 {
			seq := int32(i / 20)
			wantAnswer(t, "good client", good.batch(31, 0, seq, 1), stored(int64(seq)))
		}
	}
	// Whatever got past the checksum is a batch, and the log is sound.
	got := good.fetch(fetchRequest("t", 1, 0))
	if got.ErrorCode != 0 {
		t.Errorf("seed %d: the damaged partition answers code %d", seed, got.ErrorCode)
	}
}

// There are so many connections and no more; one that ends makes room.
func TestConnectionLimit(t *testing.T) {
	b := start(t, server.Config{MaxConnections: 2})
	first, second := b.dial(), b.dial()
	first.create("t")
	second.create("t")
	if !b.dial().closed() {
		t.Error("a third connection was served")
	}
	first.nc.Close()
	second.create("t")
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		c := b.dial()
		c.send(kmsg.NewPtrApiVersionsRequest())
		if _, err := c.receive(kmsg.NewPtrApiVersionsRequest()); err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no room after a connection ended")
		}
	}
}

// A client that announces much and sends little holds little: here many of
// them announce far more than the broker would ever spare.
func TestAnnouncedRequestsTakeNoMemory(t *testing.T) {
	b := start(t, server.Config{MaxRequestBytes: 8 << 20, RequestMemory: 12 << 20})
	good := b.dial()
	good.create("t")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 50 {
		if _, err := b.dial().nc.Write([]byte{0, 0x7f, 0, 0, 0, 0, 0, 9}); err != nil {
			t.Fatal(err)
		}
	}
	for seq := range int32(20) {
		wantAnswer(t, "good client", good.batch(31, 0, seq, 1), stored(int64(seq)))
	}
	runtime.ReadMemStats(&after)
	if grown := after.HeapAlloc - min(before.HeapAlloc, after.HeapAlloc); grown > 32<<20 {
		t.Errorf("the heap grew by %d bytes for requests that never came", grown)
	}
}

// Nor do many that announce a request which is small, but counts for much more
// than its bytes once it is there: nobody waits for them.
func TestHalfRequestsTakeNoMemory(t *testing.T) {
	b := start(t, server.Config{MaxRequestBytes: 8 << 20, RequestMemory: 12 << 20})
	good := b.dial()
	good.create("t")
	for range 50 {
		if _, err := b.dial().nc.Write([]byte{0, 1, 0, 0, 0, 3, 0, 9}); err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	for seq := range int32(20) {
		wantAnswer(t, "good client", good.batch(31, 0, seq, 1), stored(int64(seq)))
	}
	if took := time.Since(begun); took > patience/2 {
		t.Errorf("half requests held up a good client for %v", took)
	}
}

// A value out of range, or a limit that another one makes impossible, is found
// at the start. (B5)
func TestB5_ConfigIsChecked(t *testing.T) {
	for name, cfg := range map[string]server.Config{
		"no directory":                  {},
		"negative partitions":           {Partitions: -1},
		"more partitions than possible": {Partitions: 4, MaxPartitions: 3},
		"negative connections":          {MaxConnections: -1},
		"negative segment size":         {SegmentBytes: -1},
		"negative batch size":           {MaxBatchBytes: -1},
		"negative request size":         {MaxRequestBytes: -1},
		"negative number of producers":  {MaxProducers: -1},
		"negative request memory":       {RequestMemory: -1},
		"negative fetch memory":         {FetchMemory: -1},
		"batch larger than a request":   {MaxBatchBytes: 2, MaxRequestBytes: 1},
		"request larger than its share": {MaxRequestBytes: 9 << 20, RequestMemory: 11 << 20},
		"memory for no small request":   {MaxRequestBytes: 2 << 20, RequestMemory: 4 << 20},
		"answer larger than memory":     {FetchMemory: 1 << 20},
		"address without a port":        {Advertise: "broker.example"},
		"address without a host":        {Advertise: ":9092"},
		"address with a named port":     {Advertise: "broker.example:kafka"},
		"address with port 0":           {Advertise: "broker.example:0"},
		"address with port 65536":       {Advertise: "broker.example:65536"},
	} {
		if name != "no directory" {
			cfg.Dir = t.TempDir()
		}
		if s, err := server.Open(cfg); err == nil {
			t.Errorf("%s: opened", name)
			s.Shutdown(context.Background())
		}
	}
	// The least of everything fits together.
	start(t, server.Config{
		Partitions: 1, MaxPartitions: 1, SegmentBytes: 1, MaxConnections: 1, MaxProducers: 1, MaxBatchBytes: 1, MaxRequestBytes: 1,
		RequestMemory: 4 * 40 * 64 << 10, FetchMemory: 2 * (2<<20 + 1), Advertise: "broker.example:1",
	})
}
