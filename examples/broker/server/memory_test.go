package server_test

import (
	"context"
	"encoding/binary"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// attack runs connections of an attacker until the test ends: each does its
// worst, waits until it is dropped, and comes back. It returns when each has done
// so once.
func (b *broker) attack(connections int, worst func(net.Conn) error) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var attacking, first sync.WaitGroup
	b.t.Cleanup(func() { cancel(); attacking.Wait() })
	for range connections {
		first.Add(1)
		attacked := sync.OnceFunc(first.Done)
		attacking.Go(func() {
			for ctx.Err() == nil {
				nc, err := net.Dial("tcp", b.addr)
				if err != nil {
					continue // the broker has ended
				}
				stop := context.AfterFunc(ctx, func() { nc.Close() })
				if worst(nc) == nil {
					attacked()
					awaitDrop(nc)
				}
				stop()
				nc.Close()
			}
			attacked()
		})
	}
	first.Wait()
}

// awaitDrop waits until the broker closes a connection, without taking what it
// sends.
func awaitDrop(nc net.Conn) {
	for {
		time.Sleep(20 * time.Millisecond)
		// Only a write tells, since a read would take what was sent.
		if _, err := nc.Write([]byte{0}); err != nil {
			return
		}
	}
}

// served demands that a client is served soon, some times over. It takes less than
// a second on a quiet machine, and took some ten without a minimum pace.
func served(t *testing.T, what string, serve func()) {
	t.Helper()
	var took []time.Duration
	for range 7 {
		begun := time.Now()
		serve()
		took = append(took, time.Since(begun))
		time.Sleep(50 * time.Millisecond)
	}
	slices.Sort(took)
	t.Logf("%s: %v to %v", what, took[0], took[len(took)-1])
	// The machine may have been busy for a moment, but not most of the time.
	if median := took[len(took)/2]; median > 4*time.Second {
		t.Errorf("%s: took %v", what, median)
	}
}

// Seventeen connections each send half of a request of the largest size and
// stop, and come back when they are dropped; the memory is large enough for
// eight. A client with small requests is served as ever, and one with large
// requests within a second. (B8)
func TestB8_HalfRequestsStarveNobody(t *testing.T) {
	const size = 2 << 20
	b := start(t, server.Config{NoSync: true, MaxRequestBytes: size, RequestMemory: 8 * size})
	c := b.dial()
	c.create("t")
	half := make([]byte, 4+size/2)
	binary.BigEndian.PutUint32(half, size)
	copy(half[4:], []byte{0, 0, 0, 9}) // Produce, version 9
	b.attack(17, func(nc net.Conn) error {
		_, err := nc.Write(half)
		return err
	})
	seq := int32(0)
	served(t, "small request", func() {
		wantAnswer(t, "small request", c.batch(31, 0, seq, 1), stored(int64(seq)))
		seq++
	})
	value := string(make([]byte, 900_000))
	served(t, "large request", func() {
		p := segmenttest.Batch(31, 0, seq, value)
		wantAnswer(t, "large request", c.produce(produceRequest("t", 0, p)), stored(int64(seq)))
		seq++
	})
}

// A smallBuffers listener has the system keep little of what is sent.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err == nil {
		nc.(*net.TCPConn).SetWriteBuffer(16 << 10)
	}
	return nc, err
}

// Eight connections each ask for as much as they can get and do not take it, and
// come back when they are dropped. Another consumer is served within a second.
// (B8)
func TestB8_SlowReadersStarveNobody(t *testing.T) {
	const batches = 16
	cfg := server.Config{NoSync: true, MaxBatchBytes: 600_000, FetchMemory: 3 * 2 * (2<<20 + 600_000)}
	b := startOn(t, cfg, func(ln net.Listener) net.Listener { return smallBuffers{ln} })
	c := b.dial()
	c.create("t")
	for seq := range int32(batches) {
		p := segmenttest.Batch(31, 0, seq, string(make([]byte, 500_000)))
		wantAnswer(t, "large batch", c.produce(produceRequest("t", 0, p)), stored(int64(seq)))
	}
	req := fetchRequest("t", 0, 0)
	req.MaxBytes, req.Topics[0].Partitions[0].PartitionMaxBytes = 64<<20, 64<<20
	p := kmsg.NewRequestFormatter().AppendRequest(nil, req, 7)
	b.attack(8, func(nc net.Conn) error {
		nc.(*net.TCPConn).SetReadBuffer(1 << 10)
		_, err := nc.Write(p)
		return err
	})
	served(t, "consumer", func() {
		if got := c.fetch(req); got.ErrorCode != 0 || len(got.RecordBatches) < 500_000 {
			t.Errorf("fetched %d bytes, code %d", len(got.RecordBatches), got.ErrorCode)
		}
	})
	served(t, "small answer", func() {
		if got := c.fetch(fetchRequest("t", 0, batches-1)); got.ErrorCode != 0 || len(got.RecordBatches) < 500_000 {
			t.Errorf("fetched %d bytes, code %d", len(got.RecordBatches), got.ErrorCode)
		}
	})
	served(t, "producer", func() {
		wantAnswer(t, "retry", c.produce(produceRequest("t", 0, segmenttest.Batch(31, 0, batches-1, string(make([]byte, 500_000))))), stored(batches-1))
	})
}

// More clients than there is memory for send large requests at once. They get
// along: none waits for memory while it keeps some from others.
func TestLargeRequestsGetAlong(t *testing.T) {
	b := start(t, server.Config{NoSync: true, Partitions: 1, MaxRequestBytes: 2 << 20, RequestMemory: 12 << 20})
	b.dial().create("t")
	value := string(make([]byte, 1_000_000))
	const clients, batches = 24, 3
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			c := b.dial()
			for seq := int32(0); seq < batches && !t.Failed(); {
				req := produceRequest("t", 0, segmenttest.Batch(int64(i), 0, seq, value))
				c.nc.Write(encode(req))
				resp, err := c.receive(req)
				if err != nil {
					c = b.dial() // it was too slow, on a machine that is busy
					continue
				}
				if code := resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0].ErrorCode; code != 0 {
					t.Errorf("client %d: code %d", i, code)
				}
				seq++
			}
		})
	}
	wg.Wait()
	if end := b.dial().end(); end != clients*batches {
		t.Errorf("the log ends at %d, want %d", end, clients*batches)
	}
}

// Without others who wait for memory, a client may take its time.
func TestSlowClientAlone(t *testing.T) {
	b := start(t, server.Config{})
	c := b.dial()
	c.create("t")
	p := encode(produceRequest("t", 0, segmenttest.Batch(31, 0, 0, string(make([]byte, 900_000)))))
	for i, piece := range [][]byte{p[:3], p[3:9], p[9:70_000], p[70_000:800_000], p[800_000:]} {
		if i > 0 {
			time.Sleep(250 * time.Millisecond)
		}
		if _, err := c.nc.Write(piece); err != nil {
			t.Fatal(err)
		}
	}
	wantAnswer(t, "slow client", c.answer(), stored(0))
}
