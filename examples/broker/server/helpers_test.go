package server_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// patience is how long a test waits for what should come at once.
const patience = 10 * time.Second

// A broker is a server under test.
type broker struct {
	t    *testing.T
	s    *server.Server
	addr string
	down bool
}

// start starts a broker. Without a directory it gets one of its own.
func start(t *testing.T, cfg server.Config) *broker {
	t.Helper()
	return startOn(t, cfg, func(ln net.Listener) net.Listener { return ln })
}

// startOn starts a broker on a listener that is wrapped.
func startOn(t *testing.T, cfg server.Config, wrap func(net.Listener) net.Listener) *broker {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	s, err := server.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(wrap(ln)) }()
	b := &broker{t: t, s: s, addr: ln.Addr().String()}
	t.Cleanup(func() {
		if !b.down {
			b.stop()
		}
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return b
}

// A logBuffer keeps what a broker logs.
type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// stop shuts the broker down the clean way.
func (b *broker) stop() {
	b.t.Helper()
	b.down = true
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := b.s.Shutdown(ctx); err != nil {
		b.t.Errorf("Shutdown: %v", err)
	}
}

// kill stops the broker without letting anything be answered or synced.
func (b *broker) kill() {
	b.t.Helper()
	b.down = true
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.s.Shutdown(ctx); err != nil {
		b.t.Errorf("Shutdown: %v", err)
	}
}

// A client is one connection that speaks the protocol with no help from a
// client library, and so sees the answers as they are on the wire.
type client struct {
	t  *testing.T
	nc net.Conn
}

func (b *broker) dial() *client {
	b.t.Helper()
	nc, err := net.Dial("tcp", b.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(3 * patience))
	return &client{b.t, nc}
}

func (c *client) send(req kmsg.Request) {
	c.t.Helper()
	if _, err := c.nc.Write(kmsg.NewRequestFormatter().AppendRequest(nil, req, 7)); err != nil {
		c.t.Fatal(err)
	}
}

// receive reads the answer to req.
func (c *client) receive(req kmsg.Request) (kmsg.Response, error) {
	var size [4]byte
	if _, err := io.ReadFull(c.nc, size[:]); err != nil {
		return nil, err
	}
	p := make([]byte, binary.BigEndian.Uint32(size[:]))
	if _, err := io.ReadFull(c.nc, p); err != nil {
		return nil, err
	}
	r := kbin.Reader{Src: p}
	if id := r.Int32(); id != 7 {
		return nil, errors.New("answer to another request")
	}
	resp := req.ResponseKind()
	if _, versions := req.(*kmsg.ApiVersionsRequest); !versions && req.IsFlexible() {
		kmsg.SkipTags(&r)
	}
	return resp, resp.ReadFrom(r.Src)
}

// ask sends a request and returns its answer.
func ask[R kmsg.Response](c *client, req kmsg.Request) R {
	c.t.Helper()
	c.send(req)
	resp, err := c.receive(req)
	if err != nil {
		c.t.Fatalf("%s: %v", kmsg.NameForKey(req.Key()), err)
	}
	return resp.(R)
}

// closed reports whether the broker has closed the connection.
func (c *client) closed() bool {
	c.nc.SetReadDeadline(time.Now().Add(patience))
	_, err := c.nc.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// create makes a topic the way clients do, by asking for it.
func (c *client) create(topic string) int16 {
	c.t.Helper()
	req := kmsg.NewPtrMetadataRequest()
	req.Version = 9
	req.AllowAutoTopicCreation = true
	req.Topics = []kmsg.MetadataRequestTopic{{Topic: &topic}}
	return ask[*kmsg.MetadataResponse](c, req).Topics[0].ErrorCode
}

// produceRequest has the version that most clients use.
func produceRequest(topic string, partition int32, batch []byte) *kmsg.ProduceRequest {
	req := kmsg.NewPtrProduceRequest()
	req.Version = 9
	req.Acks = -1
	req.Topics = []kmsg.ProduceRequestTopic{{
		Topic:      topic,
		Partitions: []kmsg.ProduceRequestTopicPartition{{Partition: partition, Records: batch}},
	}}
	return req
}

// An answer is what a producer learns about a batch: an error code or, with
// code 0, its base offset.
type answer struct {
	Code int16
	Base int64
}

func (c *client) produce(req *kmsg.ProduceRequest) answer {
	c.t.Helper()
	p := ask[*kmsg.ProduceResponse](c, req).Topics[0].Partitions[0]
	return answer{p.ErrorCode, p.BaseOffset}
}

// batch sends n records of a producer to partition 0 of topic "t".
func (c *client) batch(producerID int64, epoch int16, seq int32, n int) answer {
	c.t.Helper()
	return c.produce(produceRequest("t", 0, segmenttest.Batch(producerID, epoch, seq, make([]string, n)...)))
}

func (c *client) initProducerID() (int64, int16) {
	c.t.Helper()
	req := kmsg.NewPtrInitProducerIDRequest()
	req.Version = 4
	resp := ask[*kmsg.InitProducerIDResponse](c, req)
	return resp.ProducerID, resp.ErrorCode
}

func fetchRequest(topic string, partition int32, offset int64) *kmsg.FetchRequest {
	req := kmsg.NewPtrFetchRequest()
	req.Version = 11
	req.MaxBytes = 1 << 20
	p := kmsg.NewFetchRequestTopicPartition()
	p.Partition, p.FetchOffset, p.PartitionMaxBytes = partition, offset, 1<<20
	req.Topics = []kmsg.FetchRequestTopic{{Topic: topic, Partitions: []kmsg.FetchRequestTopicPartition{p}}}
	return req
}

func (c *client) fetch(req *kmsg.FetchRequest) kmsg.FetchResponseTopicPartition {
	c.t.Helper()
	return ask[*kmsg.FetchResponse](c, req).Topics[0].Partitions[0]
}

// end returns the offset after the last record of partition 0 of topic "t".
func (c *client) end() int64 {
	c.t.Helper()
	return c.fetch(fetchRequest("t", 0, 0)).HighWatermark
}

func wantAnswer(t *testing.T, what string, got, want answer) {
	t.Helper()
	if got != want {
		t.Errorf("%s: answered %+v, want %+v", what, got, want)
	}
}
