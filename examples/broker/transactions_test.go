package main

// Real transactional clients, step by step.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// patience is how long a test waits for what should come soon.
const patience = 20 * time.Second

// A txnBroker is a broker with one partition a topic. It notes the refused
// batches, and the versions of EndTxn.
type txnBroker struct {
	t      *testing.T
	cfg    server.Config
	server *server.Server
	addr   string
	cl     *kgo.Client
	adm    *kadm.Client
	uses   int16 // the version of transactions that the client under test uses

	mu      sync.Mutex
	refused []error
	endTxn  map[int16]int // answers, by version
}

func startTxnBroker(t *testing.T, version int16) *txnBroker {
	t.Helper()
	b := &txnBroker{t: t, endTxn: make(map[int16]int)}
	b.cfg = server.Config{
		Dir: t.TempDir(), Partitions: 1, TransactionVersion: version, Observe: b.observe, ObserveAnswer: b.observeAnswer,
	}
	b.start()
	t.Cleanup(func() { b.stop(time.Now().Add(patience)) })
	create := kmsg.NewPtrMetadataRequest()
	create.AllowAutoTopicCreation = true
	create.Topics = []kmsg.MetadataRequestTopic{{Topic: kmsg.StringPtr(topic)}}
	if _, err := create.RequestWith(t.Context(), b.cl); err != nil {
		t.Fatal(err)
	}
	return b
}

// start starts the broker, at another address if it ran before.
func (b *txnBroker) start() {
	b.t.Helper()
	var err error
	if b.server, err = server.Open(b.cfg); err != nil {
		b.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.t.Fatal(err)
	}
	b.addr = ln.Addr().String()
	go b.server.Serve(ln)
	if b.cl, err = kgo.NewClient(kgo.SeedBrokers(b.addr)); err != nil {
		b.t.Fatal(err)
	}
	b.adm = kadm.NewClient(b.cl)
}

// stop stops the broker. The stop is an unclean one if the deadline has passed.
func (b *txnBroker) stop(deadline time.Time) {
	b.t.Helper()
	b.cl.Close()
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	if err := b.server.Shutdown(ctx); err != nil {
		b.t.Error(err)
	}
}

func (b *txnBroker) observe(e server.Event) {
	if e.Err != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.refused = append(b.refused, e.Err)
	}
}

func (b *txnBroker) observeAnswer(req kmsg.Request, _ kmsg.Response) {
	if req.Key() == int16(kmsg.EndTxn) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.endTxn[req.GetVersion()]++
	}
}

// ends returns the end of the partition for readers of everything, and the last
// stable offset, which is the end for committed readers.
func (b *txnBroker) ends() (end, stable int64) {
	b.t.Helper()
	for _, list := range []struct {
		offset *int64
		ask    func(context.Context, ...string) (kadm.ListedOffsets, error)
	}{{&stable, b.adm.ListCommittedOffsets}, {&end, b.adm.ListEndOffsets}} {
		offsets, err := list.ask(b.t.Context(), topic)
		if err != nil {
			b.t.Fatal(err)
		}
		at, ok := offsets.Lookup(topic, 0)
		if !ok || at.Err != nil {
			b.t.Fatalf("offsets: %v", offsets)
		}
		*list.offset = at.Offset
	}
	return end, stable
}

// await waits until the partition ends at one offset and is stable up to
// another.
func (b *txnBroker) await(end, stable int64) {
	b.t.Helper()
	var gotEnd, gotStable int64
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if gotEnd, gotStable = b.ends(); gotEnd == end && gotStable == stable {
			return
		}
	}
	b.t.Fatalf("the partition ends at %d and is stable up to %d, want %d and %d", gotEnd, gotStable, end, stable)
}

// A transactor is a transactional producer, driven step by step. It sends to
// partition 0. An error is what the client says of its own failure.
type transactor interface {
	begin() error
	send(value string) error // may return before it is acknowledged
	end(commit bool) error
	vanish() // without ending the transaction, or being heard of again
}

// A txnClient starts a transactor.
type txnClient func(t *testing.T, addr, id string, timeout time.Duration) transactor

var txnClients = map[string]struct {
	dial   txnClient
	newest int16 // version of transactions that it knows
	load   int   // transactions that it gets done through faults in a second or two
}{
	"franz-go": {newFranzTxn, 2, 24},
	"Sarama":   {newSaramaTxn, 1, 24},
	"kcat":     {newKcatTxn, 1, 8},
}

type franzTxn struct{ cl *kgo.Client }

func newFranzTxn(t *testing.T, addr, id string, timeout time.Duration) transactor {
	cl, err := newFranz(addr, kgo.TransactionalID(id), kgo.TransactionTimeout(timeout))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return franzTxn{cl}
}

func (f franzTxn) begin() error { return f.cl.BeginTransaction() }

func (f franzTxn) send(value string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return f.cl.ProduceSync(ctx, kgo.StringRecord(value)).FirstErr()
}

func (f franzTxn) end(commit bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return f.cl.EndTransaction(ctx, kgo.TransactionEndTry(commit))
}

func (f franzTxn) vanish() { f.cl.Close() }

type saramaTxn struct{ sarama.SyncProducer }

func saramaConfig() *sarama.Config {
	cfg := sarama.NewConfig()
	cfg.Version = sarama.V2_8_0_0
	cfg.Producer.Idempotent = true
	cfg.Net.MaxOpenRequests = 1
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	cfg.Producer.Partitioner = sarama.NewManualPartitioner
	cfg.Producer.Retry.Max = 100
	cfg.Producer.Retry.Backoff = 10 * time.Millisecond
	cfg.Producer.Return.Successes = true
	cfg.Metadata.Retry.Max = 100
	cfg.Metadata.Retry.Backoff = 10 * time.Millisecond
	cfg.Producer.Transaction.Retry.Max = 1000
	cfg.Producer.Transaction.Retry.Backoff = 5 * time.Millisecond
	return cfg
}

func newSaramaTxn(t *testing.T, addr, id string, timeout time.Duration) transactor {
	cfg := saramaConfig()
	cfg.Producer.Transaction.ID = id
	cfg.Producer.Transaction.Timeout = timeout
	p, err := sarama.NewSyncProducer([]string{addr}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return saramaTxn{p}
}

func (s saramaTxn) begin() error { return s.BeginTxn() }

func (s saramaTxn) send(value string) error {
	_, _, err := s.SendMessage(&sarama.ProducerMessage{Topic: topic, Value: sarama.StringEncoder(value)})
	return err
}

func (s saramaTxn) end(commit bool) error {
	if commit {
		return s.CommitTxn()
	}
	return s.AbortTxn()
}

func (s saramaTxn) vanish() {} // it falls silent

// A kcatTxn is a process for each transaction: the end of its input commits, an
// interrupt aborts.
type kcatTxn struct {
	args   []string
	cmd    *exec.Cmd
	in     io.WriteCloser
	stderr *strings.Builder
}

func newKcatTxn(t *testing.T, addr, id string, timeout time.Duration) transactor {
	needKcat(t)
	k := &kcatTxn{args: []string{"-b", addr, "-t", topic, "-p", "0", "-P", "-E",
		"-X", "transactional.id=" + id, "-X", fmt.Sprint("transaction.timeout.ms=", timeout.Milliseconds()),
		"-X", "retry.backoff.ms=10", "-X", "reconnect.backoff.ms=5", "-X", "reconnect.backoff.max.ms=20"}}
	t.Cleanup(k.vanish)
	return k
}

func (k *kcatTxn) begin() (err error) {
	k.cmd, k.stderr = exec.Command("kcat", k.args...), new(strings.Builder)
	k.cmd.Stderr = k.stderr
	if k.in, err = k.cmd.StdinPipe(); err != nil {
		return err
	}
	return k.cmd.Start()
}

// send fills kcat's buffer, or the value would stay in it. Empty lines are no
// records.
func (k *kcatTxn) send(value string) error {
	_, err := io.WriteString(k.in, value+strings.Repeat("\n", 2048))
	return err
}

func (k *kcatTxn) end(commit bool) error {
	if !commit {
		if err := k.cmd.Process.Signal(os.Interrupt); err != nil {
			return err
		}
	}
	k.in.Close()
	err := k.cmd.Wait()
	k.cmd = nil
	if err != nil || strings.Contains(k.stderr.String(), "Delivery failed") {
		return fmt.Errorf("kcat: %v: %s", err, k.stderr)
	}
	return nil
}

func (k *kcatTxn) vanish() {
	if k.cmd == nil {
		return
	}
	k.cmd.Process.Kill()
	k.cmd.Wait()
	k.cmd = nil
}

// lastRecord ends what readers read.
const lastRecord = "the end"

// finish appends the last record, outside of any transaction.
func finish(t *testing.T, addr string) {
	t.Helper()
	cl, err := newFranz(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	if err := cl.ProduceSync(t.Context(), kgo.StringRecord(lastRecord)).FirstErr(); err != nil {
		t.Fatal(err)
	}
}

// A reader reads partition 0 up to the last record.
type reader func(ctx context.Context, addr string, committed bool) ([]string, error)

var readers = map[string]reader{"franz-go": readFranz, "Sarama": readSarama, "kcat": readKcat}

func readFranz(ctx context.Context, addr string, committed bool) (values []string, err error) {
	level := kgo.ReadUncommitted()
	if committed {
		level = kgo.ReadCommitted()
	}
	cl, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.FetchIsolationLevel(level),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(0)}}))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	for !slices.Contains(values, lastRecord) {
		fetches := cl.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return values, err
		}
		fetches.EachRecord(func(r *kgo.Record) { values = append(values, string(r.Value)) })
	}
	return values, nil
}

func readSarama(ctx context.Context, addr string, committed bool) (values []string, err error) {
	cfg := sarama.NewConfig()
	cfg.Version = sarama.V2_8_0_0
	cfg.Consumer.MaxWaitTime = 50 * time.Millisecond // and so long it takes to end
	if committed {
		cfg.Consumer.IsolationLevel = sarama.ReadCommitted
	}
	c, err := sarama.NewConsumer([]string{addr}, cfg)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	p, err := c.ConsumePartition(topic, 0, 0)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	for !slices.Contains(values, lastRecord) {
		select {
		case m := <-p.Messages():
			values = append(values, string(m.Value))
		case <-ctx.Done():
			return values, ctx.Err()
		}
	}
	return values, nil
}

func readKcat(ctx context.Context, addr string, committed bool) ([]string, error) {
	level := "read_uncommitted"
	if committed {
		level = "read_committed"
	}
	out, err := exec.CommandContext(ctx, "kcat", "-b", addr, "-t", topic, "-p", "0", "-C", "-E", "-q", "-e", "-o", "beginning",
		"-X", "isolation.level="+level, "-X", "fetch.wait.max.ms=50").Output()
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"), err
}

// check reads the partition with each client at each level.
func (b *txnBroker) check(uncommitted, committed []string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	for name, read := range readers {
		for want, level := range map[*[]string]bool{&uncommitted: false, &committed: true} {
			got, err := read(ctx, b.addr, level)
			if err != nil || !slices.Equal(got, append(slices.Clone(*want), lastRecord)) {
				b.t.Errorf("%s reads, committed %v: %q, %v, want %q", name, level, got, err, *want)
			}
		}
	}
}

// eachTxnClient runs a test with each client and each version of transactions
// that the broker may have.
func eachTxnClient(t *testing.T, test func(t *testing.T, b *txnBroker, dial txnClient)) {
	for name, client := range txnClients {
		for _, version := range []int16{1, 2} {
			t.Run(fmt.Sprintf("%s/version %d", name, version), func(t *testing.T) {
				t.Parallel()
				b := startTxnBroker(t, version)
				b.uses = min(version, client.newest)
				test(t, b, client.dial)
			})
		}
	}
}

// script returns functions that do one step each, and end the test if the step
// fails.
func script(t *testing.T, x transactor) (begin func(), send func(value string), end func(commit bool)) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	begin = func() { t.Helper(); must(x.begin()) }
	send = func(value string) { t.Helper(); must(x.send(value)) }
	end = func(commit bool) { t.Helper(); must(x.end(commit)) }
	return begin, send, end
}

const (
	commit = true
	abort  = false
)

// A transaction is committed, aborted and left empty, and two are interleaved on
// one partition.
func TestTransactionalClients(t *testing.T) {
	eachTxnClient(t, func(t *testing.T, b *txnBroker, dial txnClient) {
		begin1, send1, end1 := script(t, dial(t, b.addr, "one", time.Minute))
		begin2, send2, end2 := script(t, dial(t, b.addr, "two", time.Minute))

		begin1()
		send1("a1")
		send1("a2")
		b.await(2, 0)
		end1(commit)
		b.await(3, 3)

		begin1()
		send1("a3")
		b.await(4, 3)
		end1(abort)
		b.await(5, 5)

		begin1()
		end1(commit) // of nothing
		b.await(5, 5)

		begin1()
		send1("a4")
		b.await(6, 5)
		begin2()
		send2("b1")
		b.await(7, 5)
		send1("a5")
		b.await(8, 5)
		end2(abort)
		b.await(9, 5) // one's transaction is still open
		end1(commit)
		b.await(10, 10)

		begin1()
		send1("a6")
		b.await(11, 10)
		begin2()
		send2("b2")
		b.await(12, 10)
		end1(abort)
		b.await(13, 11)
		end2(commit)
		b.await(14, 14)

		finish(t, b.addr)
		b.check([]string{"a1", "a2", "a3", "a4", "b1", "a5", "a6", "b2"}, []string{"a1", "a2", "a4", "a5", "b2"})

		b.mu.Lock()
		defer b.mu.Unlock()
		for v := range b.endTxn {
			if raises := v >= 5; raises != (b.uses == 2) {
				t.Errorf("EndTxn of version %d in transactions of version %d", v, b.uses)
			}
		}
	})
}

// A second client with the same transactional id takes over in the middle of a
// transaction. What the first one sends then is refused with 47.
func TestFencedClient(t *testing.T) {
	eachTxnClient(t, func(t *testing.T, b *txnBroker, dial txnClient) {
		first := dial(t, b.addr, "x", time.Minute)
		begin1, send1, _ := script(t, first)
		begin1()
		send1("lost")
		b.await(1, 0)

		second := dial(t, b.addr, "x", time.Minute) // aborts
		begin2, send2, end2 := script(t, second)
		begin2()
		send2("kept")
		b.await(3, 2)

		err := first.send("late")
		if err == nil {
			err = first.end(commit)
		}
		if err == nil {
			t.Error("the first client takes its transaction for committed")
		}
		t.Logf("the first client: %v", err)
		b.mu.Lock()
		if len(b.refused) == 0 || !errors.Is(b.refused[0], kerr.InvalidProducerEpoch) {
			t.Errorf("refused: %v, want a batch refused as INVALID_PRODUCER_EPOCH", b.refused)
		}
		b.mu.Unlock()

		end2(commit)
		b.await(4, 4)
		finish(t, b.addr)
		b.check([]string{"lost", "kept"}, []string{"kept"})
	})
}

// The transaction of a client that vanishes holds readers up until it is aborted
// after its time-out.
func TestVanishedClient(t *testing.T) {
	eachTxnClient(t, func(t *testing.T, b *txnBroker, dial txnClient) {
		const timeout = time.Second // kcat's shortest
		gone := dial(t, b.addr, "gone", timeout)
		begin1, send1, _ := script(t, gone)
		begin1()
		begun := time.Now()
		send1("lost")
		b.await(1, 0)
		gone.vanish()

		begin2, send2, end2 := script(t, dial(t, b.addr, "other", time.Minute))
		begin2()
		send2("kept")
		b.await(2, 0)
		end2(commit)
		finish(t, b.addr)
		b.await(4, 0)
		b.await(5, 5) // with the marker of the abort
		if waited := time.Since(begun); waited < timeout {
			t.Errorf("aborted after %v, the time-out is %v", waited, timeout)
		}
		b.check([]string{"lost", "kept"}, []string{"kept"})
	})
}

// Transactions come through faults whole or not at all, each once, and as the
// client was told.
func TestTransactionsThroughFaults(t *testing.T) {
	faultsToTry := map[string]struct {
		every int
		fault func(*rig)
	}{
		"cut":    {3, cut},
		"killed": {7, restart(false)},
	}
	for name, client := range txnClients {
		// A broker of version 1 is only another one for a client that knows version 2.
		for version := 3 - client.newest; version <= 2; version++ {
			for fault, f := range faultsToTry {
				t.Run(fmt.Sprintf("%s/version %d/%s", name, version, fault), func(t *testing.T) {
					t.Parallel()
					r := newRigWith(t, f.every, f.fault, server.Config{TransactionVersion: version, Partitions: 1})
					l := &txnLoad{
						t: t, appended: r.batches,
						dial: func() transactor { return client.dial(t, r.proxy.Addr(), "x", time.Minute) },
					}
					l.run(client.load, 4)
					r.restarting.Wait()
					l.check(r.proxy.Addr())
					r.mu.Lock()
					defer r.mu.Unlock()
					t.Logf("%d batches appended, answers: %v", r.appended, r.answered)
					requests := []kmsg.Key{kmsg.EndTxn}
					if min(version, client.newest) == 1 {
						requests = append(requests, kmsg.AddPartitionsToTxn)
					}
					for _, key := range requests {
						if r.answered[key] < r.every || r.appended < r.every {
							t.Errorf("no fault after an append, or none after %s", key.Name())
						}
					}
				})
			}
		}
	}
}

// A txnLoad is a client's transactions, and what the client was told of each.
type txnLoad struct {
	t        *testing.T
	dial     func() transactor
	appended func() int // batches, so far
	told     []txnFate
	values   [][]string
	errs     []error
}

// A txnFate is what a client knows of a transaction.
type txnFate string

const (
	committed txnFate = "committed"
	aborted   txnFate = "aborted"
	unknown   txnFate = "unknown" // the commit failed
)

// run sends n transactions of some records, and aborts every fourth. After an
// error the client is replaced by another one.
func (l *txnLoad) run(n, records int) {
	x := l.dial()
	for i := range n {
		values := make([]string, records)
		for j := range values {
			values[j] = fmt.Sprintf("transaction-%03d %02d", i, j)
		}
		fate, err := l.transact(x, values, i%4 < 3)
		l.told, l.values = append(l.told, fate), append(l.values, values)
		if err != nil {
			l.errs = append(l.errs, err)
			x.vanish()
			x = l.dial()
		}
	}
	x.vanish()
	// Another one ends what the last one may have left.
	begin, _, end := script(l.t, l.dial())
	begin()
	end(true)
}

// check reads the committed records, and demands each transaction that was
// committed, in order, none that was aborted, and the others whole or not at all.
func (l *txnLoad) check(addr string) {
	l.t.Helper()
	finish(l.t, addr)
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	log, err := readFranz(ctx, addr, true)
	if err != nil {
		l.t.Fatalf("%v, after %q", err, log)
	}
	count := make(map[txnFate]int)
	for i, fate := range l.told {
		count[fate]++
		values := l.values[i]
		whole := len(log) >= len(values) && slices.Equal(log[:len(values)], values)
		switch {
		case whole && fate == aborted:
			l.t.Errorf("%q is read, but was aborted", values)
		case !whole && fate == committed:
			l.t.Errorf("%q was committed, but is not what is read next: %q", values, log[:min(len(log), len(values))])
		}
		if whole {
			log = log[len(values):]
		}
	}
	if !slices.Equal(log, []string{lastRecord}) {
		l.t.Errorf("read beyond the transactions: %q", log)
	}
	if count[committed] < len(l.told)/2 {
		l.t.Errorf("only %d transactions of %d committed", count[committed], len(l.told))
	}
	l.t.Logf("transactions: %v; errors: %q", count, l.errs)
}

func (l *txnLoad) transact(x transactor, values []string, commit bool) (txnFate, error) {
	appended := l.appended()
	err := x.begin()
	for _, v := range values {
		if err == nil {
			err = x.send(v)
		}
	}
	if err != nil {
		return aborted, err
	}
	if !commit {
		// There should be something to abort.
		for deadline := time.Now().Add(patience); l.appended() == appended && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		return aborted, x.end(false)
	}
	if err := x.end(true); err != nil {
		return unknown, err
	}
	return committed, nil
}
