package page

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

const (
	topic    = "orders"
	patience = 20 * time.Second
)

// A rig is a broker with a page that is served.
type rig struct {
	t      testing.TB
	page   *Page
	server *server.Server
	addr   string // of the broker
	url    string // of the page
	stop   func() // ends the broker
}

func start(t testing.TB, cfg server.Config) *rig {
	t.Helper()
	r := &rig{t: t, page: New("")}
	r.serve()
	r.broker(cfg)
	return r
}

// serve serves the page until the test ends.
func (r *rig) serve() {
	r.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.url = "http://" + ln.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- r.page.Serve(ctx, smallBuffers{ln}, slog.New(slog.DiscardHandler)) }()
	r.t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			r.t.Errorf("Serve: %v", err)
		}
	})
}

// smallBuffers has the kernel take little for a reader that does not read.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err == nil {
		nc.(*net.TCPConn).SetWriteBuffer(4 << 10)
	}
	return nc, err
}

// broker starts a broker that the page shows, until the test ends.
func (r *rig) broker(cfg server.Config) {
	r.t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = r.t.TempDir()
	}
	s, err := server.Open(r.page.Watch(cfg))
	if err != nil {
		r.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.server, r.addr = s, ln.Addr().String()
	go s.Serve(ln)
	r.stop = sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			r.t.Errorf("Shutdown: %v", err)
		}
	})
	r.t.Cleanup(r.stop)
}

// produce sends n records to partition 0 with a producer of its own.
func (r *rig) produce(n int) {
	r.t.Helper()
	cl := r.client()
	defer cl.Close()
	for range n {
		if err := cl.ProduceSync(r.t.Context(), kgo.StringRecord("record")).FirstErr(); err != nil {
			r.t.Fatal(err)
		}
	}
}

func (r *rig) client() *kgo.Client {
	r.t.Helper()
	cl, err := kgo.NewClient(
		kgo.SeedBrokers(r.addr),
		kgo.DefaultProduceTopic(topic),
		kgo.AllowAutoTopicCreation(),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.MetadataMinAge(10*time.Millisecond),
	)
	if err != nil {
		r.t.Fatal(err)
	}
	return cl
}

// get returns the answer to a request for a path.
func (r *rig) get(path string) (code int, body string) {
	r.t.Helper()
	resp, err := http.Get(r.url + path)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// A batchSender sends batches to partition 0 as a test makes them.
type batchSender struct {
	t  testing.TB
	cl *kgo.Client
}

// dial connects to the broker, and has the topic created.
func dial(t testing.TB, r *rig) *batchSender {
	t.Helper()
	cl := r.client()
	t.Cleanup(cl.Close)
	req := kmsg.NewPtrMetadataRequest()
	req.AllowAutoTopicCreation = true
	name := kmsg.NewMetadataRequestTopic()
	name.Topic = kmsg.StringPtr(topic)
	req.Topics = append(req.Topics, name)
	s := &batchSender{t, cl}
	s.request(req)
	return s
}

// produce sends a batch of n records, whatever the answer.
func (s *batchSender) produce(producer int64, epoch int16, sequence int32, n int) {
	s.t.Helper()
	p := kmsg.NewProduceRequestTopicPartition()
	p.Records = segmenttest.Batch(producer, epoch, sequence, make([]string, n)...)
	to := kmsg.NewProduceRequestTopic()
	to.Topic = topic
	to.Partitions = append(to.Partitions, p)
	req := kmsg.NewPtrProduceRequest()
	req.Acks = -1
	req.TimeoutMillis = 1000
	req.Topics = append(req.Topics, to)
	s.request(req)
}

func (s *batchSender) request(req kmsg.Request) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := s.cl.SeedBrokers()[0].Request(ctx, req); err != nil {
		s.t.Fatal(err)
	}
}
