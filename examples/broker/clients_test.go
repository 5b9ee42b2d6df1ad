package main

// Real clients produce through faults. Then the log is compared with what each
// client was told.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/show/faults"
	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
)

const topic = "t"

// An arrival identifies a batch as its producer made it.
type arrival struct {
	partition int32
	batch     idempotence.Batch
}

// A listener keeps the connections it accepted, to close them.
type listener struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.mu.Lock()
		l.conns = append(l.conns, c)
		l.mu.Unlock()
	}
	return c, err
}

func (l *listener) hangUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = nil
}

// A rig is a broker behind a proxy, and faults that strike at the worst
// moment: after a batch has been appended, or a transaction changed, before the
// producer hears of it.
type rig struct {
	t     *testing.T
	cfg   server.Config
	proxy *faults.Proxy
	fault func(*rig) // what happens at the worst moment

	mu         sync.Mutex
	server     *server.Server
	listener   *listener
	every      int // batches appended, and answers to a request, from one fault to the next
	appended   int
	answered   map[kmsg.Key]int // requests that change a transaction
	struck     map[arrival]bool // batches that were not acknowledged at first
	recognised map[arrival]bool
	restarting sync.WaitGroup
}

func newRig(t *testing.T, every int, fault func(*rig)) *rig {
	t.Helper()
	return newRigWith(t, every, fault, server.Config{})
}

func newRigWith(t *testing.T, every int, fault func(*rig), cfg server.Config) *rig {
	t.Helper()
	proxy, err := faults.New("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	r := &rig{
		t: t, proxy: proxy, every: every, fault: fault,
		struck: make(map[arrival]bool), recognised: make(map[arrival]bool), answered: make(map[kmsg.Key]int),
	}
	cfg.Dir, cfg.Advertise, cfg.Observe, cfg.ObserveAnswer = t.TempDir(), proxy.Addr(), r.observe, r.observeAnswer
	cfg.SegmentBytes = 64 << 10 // small, so that restarts read several
	r.cfg = cfg
	r.start()
	t.Cleanup(func() { r.shutdown(context.Background()) })
	return r
}

func (r *rig) start() {
	s, err := server.Open(r.cfg)
	if err != nil {
		r.t.Error(err)
		return
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Error(err)
		return
	}
	l := &listener{Listener: ln}
	go s.Serve(l)
	r.mu.Lock()
	r.server, r.listener = s, l
	r.mu.Unlock()
	if err := r.proxy.MoveTo(ln.Addr().String()); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) shutdown(ctx context.Context) {
	r.restarting.Wait()
	r.mu.Lock()
	s := r.server
	r.mu.Unlock()
	if err := s.Shutdown(ctx); err != nil && !errors.Is(err, errDisk) {
		r.t.Error(err)
	}
}

func (r *rig) observe(e server.Event) {
	if r.strikes(arrival{e.Partition, e.Batch}, e.Result.Verdict) {
		r.fault(r)
	}
}

func (r *rig) strikes(id arrival, verdict idempotence.Verdict) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch verdict {
	case idempotence.Duplicate:
		r.recognised[id] = true
	case idempotence.Append:
		r.appended++
		r.struck[id] = r.appended%r.every == 0
		return r.struck[id]
	}
	return false
}

func (r *rig) observeAnswer(req kmsg.Request, _ kmsg.Response) {
	switch key := kmsg.Key(req.Key()); key {
	case kmsg.AddPartitionsToTxn, kmsg.EndTxn:
		r.mu.Lock()
		r.answered[key]++
		strikes := r.answered[key]%r.every == 0
		r.mu.Unlock()
		if strikes {
			r.fault(r)
		}
	}
}

// batches returns how many batches were appended so far.
func (r *rig) batches() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.appended
}

// cut is the plain fault.
func cut(r *rig) {
	if err := r.proxy.Cut(); err != nil {
		r.t.Error(err)
	}
}

// hangUp has the broker close its connections, and the proxy tell the clients.
func hangUp(r *rig) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listener.hangUp()
}

// restart cuts the broker off and replaces it by a new one over the same
// directory, which knows what it knows from the log.
func restart(clean bool) func(*rig) {
	return func(r *rig) {
		r.proxy.Close()
		r.mu.Lock()
		old := r.server
		r.mu.Unlock()
		r.restarting.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if !clean {
				cancel()
			}
			if err := old.Shutdown(ctx); err != nil && !errors.Is(err, errDisk) {
				r.t.Error(err)
			}
			r.start()
		})
	}
}

// check reads the log back and demands that it holds every record exactly
// once, in order, and that the faults did what they were there for: each batch
// whose acknowledgement was lost came again and was recognised.
func (r *rig) check(acknowledged map[string]readback.Place, records int) {
	r.t.Helper()
	r.restarting.Wait()
	r.proxy.Heal()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	log, err := readback.Read(ctx, r.proxy.Addr(), topic, 1)
	if err != nil {
		r.t.Fatal(err)
	}
	if len(acknowledged) != records || len(log[0]) != records {
		r.t.Errorf("%d records acknowledged and %d in the log, want %d", len(acknowledged), len(log[0]), records)
	}
	if c := readback.Count(log, acknowledged); c != (readback.Counts{}) {
		r.t.Errorf("not exactly once: %+v", c)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	struck := 0
	for id, hit := range r.struck {
		if hit {
			struck++
		}
		if hit && !r.recognised[id] {
			r.t.Errorf("batch %+v was never acknowledged, nor recognised when it came again", id)
		}
	}
	if struck < 2 {
		r.t.Errorf("the fault struck %d of %d batches, want some", struck, r.appended)
	}
	r.t.Logf("%d records in %d batches, %d faults, %d batches recognised", records, r.appended, struck, len(r.recognised))
}

// record is what a test client sends; see count.
func record(name string, i int) string { return fmt.Sprintf("%s %06d", name, i) }

// A producer sends records 0 to n-1 of a name to partition 0 and returns where
// they were acknowledged, as far as it can tell.
type producer func(ctx context.Context, addr, name string, n int) (map[string]readback.Place, error)

func TestClientsThroughFaults(t *testing.T) {
	producers := map[string]producer{"franz-go": franz, "sarama": saramaClient, "kcat": kcat}
	faultsToTry := map[string]struct {
		every int
		fault func(*rig)
		setUp func(*faults.Proxy) error
	}{
		"cut":           {every: 5, fault: cut},
		"latency":       {every: 10, fault: cut, setUp: func(p *faults.Proxy) error { return p.Latency(5, 5) }},
		"slow close":    {every: 10, fault: hangUp, setUp: func(p *faults.Proxy) error { return p.SlowClose(50) }},
		"clean restart": {every: 20, fault: restart(true)},
		"killed":        {every: 20, fault: restart(false)},
	}
	for name, produce := range producers {
		for fault, f := range faultsToTry {
			t.Run(name+"/"+fault, func(t *testing.T) {
				t.Parallel()
				if name == "kcat" {
					needKcat(t)
				}
				r := newRig(t, f.every, f.fault)
				if f.setUp != nil {
					if err := f.setUp(r.proxy); err != nil {
						t.Fatal(err)
					}
				}
				const records = 1000
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				defer cancel()
				acknowledged, err := produce(ctx, r.proxy.Addr(), name, records)
				if err != nil {
					t.Fatal(err)
				}
				r.check(acknowledged, records)
			})
		}
	}
}

var errDisk = errors.New("disk failure")

// The disk fails at random, in the middle of writes, syncs and sometimes both,
// while connections are cut and the broker is restarted. A failed append is one
// that its producer sends again, and leaves neither a gap nor a copy, with five
// in flight as well.
func TestFailingDisk(t *testing.T) {
	for name, fault := range map[string]func(*rig){"cut": cut, "clean restart": restart(true), "killed": restart(false)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			var (
				mu     sync.Mutex
				rng    = rand.New(rand.NewPCG(seed, 0))
				failed int
			)
			disk := &segmenttest.Disk{Before: func(op segmenttest.Op) error {
				mu.Lock()
				defer mu.Unlock()
				if op == segmenttest.Truncate || rng.IntN(4) > 0 {
					return nil
				}
				failed++
				return errDisk
			}}
			r := newRigWith(t, 20, fault, server.Config{OpenFile: disk.OpenFile})
			const producers, records = 3, 400
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			var (
				wg  sync.WaitGroup
				all = make(map[string]readback.Place)
			)
			for i := range producers {
				wg.Go(func() {
					acknowledged, err := franz(ctx, r.proxy.Addr(), fmt.Sprintf("producer-%d", i), records)
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					maps.Copy(all, acknowledged)
				})
			}
			wg.Wait()
			r.check(all, producers*records)
			mu.Lock()
			defer mu.Unlock()
			if failed < 5 {
				t.Errorf("the disk failed %d times, want more", failed)
			}
			t.Logf("the disk failed %d times", failed)
		})
	}
}

// Ten producers write to the same partition through cut connections. Each has
// its own sequence; none may be mistaken for another.
func TestTenProducersOnOnePartition(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20, cut)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	const producers, records = 10, 400
	var (
		wg  sync.WaitGroup
		mu  sync.Mutex
		all = make(map[string]readback.Place)
	)
	for i := range producers {
		wg.Go(func() {
			acknowledged, err := franz(ctx, r.proxy.Addr(), fmt.Sprintf("producer-%d", i), records)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(all, acknowledged)
		})
	}
	wg.Wait()
	r.check(all, producers*records)
}

// franz has five requests in flight.
func franz(ctx context.Context, addr, name string, n int) (map[string]readback.Place, error) {
	cl, err := newFranz(addr)
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	var acks readback.Acks
	for i := range n {
		cl.Produce(ctx, kgo.StringRecord(record(name, i)), acks.Promise)
	}
	err = cl.Flush(ctx)
	places, failed := acks.Places()
	return places, errors.Join(err, failed)
}

func newFranz(addr string, more ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(addr),
		kgo.DefaultProduceTopic(topic),
		kgo.AllowAutoTopicCreation(),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchMaxBytes(512),
		kgo.RetryBackoffFn(func(int) time.Duration { return 5 * time.Millisecond }),
		kgo.MetadataMinAge(10 * time.Millisecond),
		kgo.AlwaysRetryEOF(),
	}, more...)...)
}

// saramaClient has one request in flight, which is all that Sarama allows an
// idempotent producer.
func saramaClient(ctx context.Context, addr, name string, n int) (map[string]readback.Place, error) {
	cfg := sarama.NewConfig()
	cfg.Version = sarama.V2_8_0_0
	cfg.Producer.Idempotent = true
	cfg.Net.MaxOpenRequests = 1
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	cfg.Producer.Partitioner = sarama.NewManualPartitioner
	cfg.Producer.Flush.MaxMessages = 20
	cfg.Producer.Retry.Max = 100
	cfg.Producer.Retry.Backoff = 10 * time.Millisecond
	cfg.Producer.Return.Successes = true
	cfg.Metadata.Retry.Max = 100
	cfg.Metadata.Retry.Backoff = 10 * time.Millisecond
	p, err := sarama.NewAsyncProducer([]string{addr}, cfg)
	if err != nil {
		return nil, err
	}
	go func() {
		for i := range n {
			p.Input() <- &sarama.ProducerMessage{Topic: topic, Value: sarama.StringEncoder(record(name, i))}
		}
	}()
	// It is closed only when nothing is left to retry, since it would not.
	acknowledged := make(map[string]readback.Place)
	for range n {
		select {
		case m := <-p.Successes():
			acknowledged[string(m.Value.(sarama.StringEncoder))] = readback.Place{Partition: m.Partition, Offset: m.Offset}
		case err := <-p.Errors():
			return nil, err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return acknowledged, p.Close()
}

// kcat is librdkafka, which has five requests in flight. It does not tell at
// which offsets it was acknowledged, only whether anything was not; what it
// reads back itself stands in for that.
func kcat(ctx context.Context, addr, name string, n int) (map[string]readback.Place, error) {
	var in strings.Builder
	for i := range n {
		fmt.Fprintln(&in, record(name, i))
	}
	options := []string{"-b", addr, "-t", topic, "-p", "0", "-X", "reconnect.backoff.ms=5", "-X", "reconnect.backoff.max.ms=20"}
	produce := exec.CommandContext(ctx, "kcat", append(options, "-P", "-E", "-X", "enable.idempotence=true",
		"-X", "batch.num.messages=20", "-X", "retry.backoff.ms=10")...)
	produce.Stdin = strings.NewReader(in.String())
	if out, err := produce.CombinedOutput(); err != nil || strings.Contains(string(out), "Delivery failed") {
		return nil, fmt.Errorf("kcat -P: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(ctx, "kcat", append(options, "-C", "-E", "-q", "-e", "-o", "beginning")...).Output()
	if err != nil {
		return nil, fmt.Errorf("kcat -C: %w", err)
	}
	acknowledged := make(map[string]readback.Place)
	for i, r := range slices.Collect(strings.Lines(string(out))) {
		acknowledged[strings.TrimSuffix(r, "\n")] = readback.Place{Offset: int64(i)}
	}
	return acknowledged, nil
}

// needKcat fails the test if kcat is missing. A test that were skipped would not
// be seen.
func needKcat(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("kcat"); err == nil {
		return
	}
	const install = "kcat is not installed; install it with: apt-get install kcat (or brew install kcat)"
	if testing.Short() {
		t.Skip(install)
	}
	t.Fatal(install + ", or leave it out with: go test -short")
}
