// Package show shows the example broker at work over a network that cuts
// connections at the worst moment: idempotent producers with deduplication and
// without, and applications with transactions and without. It also shows what
// several requests in flight are worth.
package show

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/show/faults"
	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
)

const (
	demoTopic      = "numbers"
	demoRecords    = 50_000
	demoPartitions = 3
	demoInFlight   = 5
	demoCutEvery   = 40 // appended batches

	// demoTimeout ends a demo that hangs. It takes a few seconds.
	demoTimeout = 3 * time.Minute

	shutdownTimeout = 10 * time.Second
)

// Run produces numbered records over a bad network to a broker that deduplicates
// and to one that does not, and prints how each fared. Then it does the same with
// transactions and without. It returns an error unless the first broker stored
// every record exactly once, and committed readers got exactly the transactions
// that were committed, although producers had to retry. observe, if it is not nil,
// gets the verdicts of the first part. watch, if it is not nil, gets the configuration
// of the first broker to add to it.
func Run(ctx context.Context, out io.Writer, observe func(server.Event), watch func(server.Config) server.Config) error {
	return run(ctx, out, observe, watch, demoTransactions)
}

func run(ctx context.Context, out io.Writer, observe func(server.Event), watch func(server.Config) server.Config, transactions int) error {
	ctx, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	fmt.Fprintf(out, "%s numbered records to %d partitions, %d requests in flight. After every %dth append\n"+
		"all connections are cut before the producer hears of it, so it has to send again.\n",
		thousands(demoRecords), demoPartitions, demoInFlight, demoCutEvery)

	fmt.Fprintln(out, "\nWith deduplication:")
	cfg := server.Config{Observe: observe}
	if watch != nil {
		cfg = watch(cfg)
	}
	with, err := demoRun(ctx, out, cfg)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "\nWithout:")
	without, err := demoRun(ctx, out, server.Config{Observe: observe, WithoutDeduplication: true})
	if err != nil {
		return err
	}
	printTable(out, with, without)
	return errors.Join(with.judge(), showTransactions(ctx, out, transactions), showThroughput(ctx, out))
}

// An outcome is what one run came to.
type outcome struct {
	sent, acknowledged  int
	cuts                int
	retried, recognised int // batches
	refused             int // batches with a gap before them, which then came again
	readback.Counts
}

// judge returns why the run does not show what it should, or nil.
func (o outcome) judge() error {
	switch {
	case o.acknowledged != o.sent || o.Counts != readback.Counts{}:
		return errors.New("with deduplication, the log is not what the producer was told: not exactly once")
	case o.retried == 0 || o.recognised == 0:
		return errors.New("no batch had to be sent again: the faults never bit, and nothing was shown")
	}
	return nil
}

func printTable(out io.Writer, with, without outcome) {
	fmt.Fprintf(out, "\n%-36s%18s%12s\n", "", "deduplication on", "off")
	for _, row := range []struct {
		name          string
		with, without int
	}{
		{"records sent", with.sent, without.sent},
		{"records acknowledged", with.acknowledged, without.acknowledged},
		{"connections cut after an append", with.cuts, without.cuts},
		{"batches that came again", with.retried, without.retried},
		{"duplicates recognised", with.recognised, without.recognised},
		{"gaps refused, filled and sent again", with.refused, without.refused},
		{"records missing", with.Missing, without.Missing},
		{"records duplicated", with.Duplicated, without.Duplicated},
		{"records out of order", with.OutOfOrder, without.OutOfOrder},
		{"not at the offset acknowledged", with.Misplaced, without.Misplaced},
	} {
		fmt.Fprintf(out, "%-36s%18s%12s\n", row.name, thousands(row.with), thousands(row.without))
	}
	fmt.Fprintln(out)
}

// thousands formats n, which is not negative, with separators.
func thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}

// demoRun sets up a broker behind a proxy, produces, and reads everything back.
func demoRun(ctx context.Context, out io.Writer, cfg server.Config) (o outcome, err error) {
	proxy, err := faults.New("127.0.0.1:0")
	if err != nil {
		return o, err
	}
	defer proxy.Close()
	worst := &worstMoment{cut: proxy.Cut, seen: make(map[arrival]bool), next: cfg.Observe}
	cfg.Advertise, cfg.Partitions, cfg.Observe = proxy.Addr(), demoPartitions, worst.observe
	addr, stop, err := startLocal(cfg)
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := proxy.MoveTo(addr); err != nil {
		return o, err
	}

	acknowledged, err := demoProduce(ctx, out, proxy.Addr(), worst.cuts.Load)
	if err != nil {
		return o, err
	}
	records, err := readback.Read(ctx, proxy.Addr(), demoTopic, demoPartitions)
	if err != nil {
		return o, err
	}
	o = worst.outcome()
	o.sent, o.acknowledged = demoRecords, len(acknowledged)
	o.Counts = readback.Count(records, acknowledged)
	fmt.Fprintln(out, "  everything read back and counted")
	return o, nil
}

// startLocal starts a broker over a temporary directory. stop ends it and removes
// the directory.
func startLocal(cfg server.Config) (addr string, stop func() error, err error) {
	if cfg.Dir, err = os.MkdirTemp("", "broker-demo-"); err != nil {
		return "", nil, err
	}
	s, err := server.Open(cfg)
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(cfg.Dir))
	}
	stop = func() error {
		ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
		defer cancel()
		return errors.Join(s.Shutdown(ctx), os.RemoveAll(cfg.Dir))
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, errors.Join(err, stop())
	}
	go s.Serve(ln)
	return ln.Addr().String(), stop, nil
}

// newDemoClient returns an idempotent producer, by default with up to five
// requests in flight.
func newDemoClient(addr string, more ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(addr),
		kgo.DefaultProduceTopic(demoTopic),
		kgo.AllowAutoTopicCreation(),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchMaxBytes(4 << 10), // small, so that there are many to retry
		kgo.ProducerBatchCompression(kgo.NoCompression()),
		// The network is bad but near, so it can try again soon.
		kgo.RetryBackoffFn(func(int) time.Duration { return 10 * time.Millisecond }),
		kgo.MetadataMinAge(20 * time.Millisecond),
		kgo.AlwaysRetryEOF(), // even a connection that is cut at its very beginning
	}, more...)...)
}

func demoRecord(i int, partition int32) *kgo.Record {
	return &kgo.Record{Value: fmt.Appendf(nil, "record %08d %064d", i, i), Partition: partition}
}

// demoProduce sends the records and returns where each was acknowledged.
func demoProduce(ctx context.Context, out io.Writer, addr string, cuts func() int64) (map[string]readback.Place, error) {
	cl, err := newDemoClient(addr)
	if err != nil {
		return nil, err
	}
	defer cl.Close()

	var acks readback.Acks
	stop := every(time.Second, func() { printProgress(out, acks.Len(), cuts()) })
	for i := range demoRecords {
		cl.Produce(ctx, demoRecord(i, int32(i%demoPartitions)), acks.Promise)
	}
	err = cl.Flush(ctx)
	stop()
	printProgress(out, acks.Len(), cuts())
	places, failed := acks.Places()
	return places, errors.Join(err, failed)
}

func printProgress(out io.Writer, acknowledged int, cuts int64) {
	fmt.Fprintf(out, "  %6s of %s acknowledged, connections cut %d times\n",
		thousands(acknowledged), thousands(demoRecords), cuts)
}

// every calls f regularly until stop is called, which waits for it.
func every(d time.Duration, f func()) (stop func()) {
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		t := time.NewTicker(d)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				f()
			case <-done:
				return
			}
		}
	}()
	return func() { close(done); <-stopped }
}

// An arrival identifies a batch as its producer made it.
type arrival struct {
	partition int32
	batch     idempotence.Batch
}

// A worstMoment watches the broker's verdicts. From time to time it cuts all
// connections after a batch is appended and before it is acknowledged. Then the
// producer cannot know that the batch is stored, and has to send it again.
type worstMoment struct {
	cut  func() error
	next func(server.Event) // or nil
	cuts atomic.Int64

	mu                  sync.Mutex
	seen                map[arrival]bool
	appended            int
	retried, recognised int
	refused             int
}

func (w *worstMoment) observe(e server.Event) {
	if w.next != nil {
		w.next(e)
	}
	if w.record(e) {
		w.cuts.Add(1)
		w.cut() // fails only if the proxy is gone, and then nothing connects
	}
}

// record counts the verdict and reports whether it is time for a cut.
func (w *worstMoment) record(e server.Event) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	id := arrival{e.Partition, e.Batch}
	if w.seen[id] {
		w.retried++
	}
	if e.Err != nil {
		w.refused++
	}
	w.seen[id] = true
	switch e.Result.Verdict {
	case idempotence.Duplicate:
		w.recognised++
	case idempotence.Append:
		w.appended++
		return w.appended%demoCutEvery == 0
	}
	return false
}

func (w *worstMoment) outcome() outcome {
	w.mu.Lock()
	defer w.mu.Unlock()
	return outcome{
		cuts:       int(w.cuts.Load()),
		retried:    w.retried,
		recognised: w.recognised,
		refused:    w.refused,
	}
}
