package show

// This file shows what transactions are worth to applications that give up in the
// middle of their work, or die there and are replaced.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
	"golang.org/x/sync/errgroup"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/show/faults"
	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
)

const (
	demoTransactions = 1000

	txnRecords      = 50 // of each transaction
	txnApplications = 8  // at once
	txnAbortEvery   = 10 // transactions, halfway
	txnDieEvery     = 20 // transactions, halfway

	// Appended batches, and AddPartitionsToTxn and EndTxn requests that were
	// accepted, from one cut to the next.
	txnCutProduceEvery, txnCutAddEvery, txnCutEndEvery = 50, 25, 25
)

// showTransactions has applications send n transactions over a bad network, and
// the same records without transactions, and prints what a reader of committed
// records gets. It returns an error unless it got each transaction that was
// committed once, and nothing of the others.
func showTransactions(ctx context.Context, out io.Writer, n int) error {
	fmt.Fprintf(out, "Transactions: %s of %d records to %d partitions. Every %dth is given up halfway, and in\n"+
		"every %dth the application dies halfway and another one begins again. All connections are cut\n"+
		"after every %dth append, %dth AddPartitionsToTxn and %dth EndTxn, before the client hears of it.\n",
		thousands(n), txnRecords, demoPartitions, txnAbortEvery, txnDieEvery, txnCutProduceEvery, txnCutAddEvery, txnCutEndEvery)
	with, err := runTransactions(ctx, n, true)
	if err != nil {
		return err
	}
	without, err := runTransactions(ctx, n, false)
	if err != nil {
		return err
	}
	printTransactions(out, with, without)
	return with.judge(n)
}

func printTransactions(out io.Writer, with, without txnOutcome) {
	fmt.Fprintf(out, "\n%-36s%18s%12s\n", "", "transactions on", "off")
	for _, row := range []struct {
		name          string
		with, without int
	}{
		{"transactions committed", with.committed, without.committed},
		{"given up halfway", with.aborted, without.aborted},
		{"begun again by another application", with.again, without.again},
		{"cut after an append", with.cuts[kmsg.Produce], without.cuts[kmsg.Produce]},
		{"cut after AddPartitionsToTxn", with.cuts[kmsg.AddPartitionsToTxn], without.cuts[kmsg.AddPartitionsToTxn]},
		{"cut after EndTxn", with.cuts[kmsg.EndTxn], without.cuts[kmsg.EndTxn]},
		{"batches recognised as duplicates", with.recognised, without.recognised},
		{"transactions whole", with.Whole, without.Whole},
		{"transactions in part", with.InPart, without.InPart},
		{"transactions lost", with.Lost, without.Lost},
		{"transactions doubled", with.Doubled, without.Doubled},
		{"aborted records seen", with.AbortedRecords, without.AbortedRecords},
	} {
		fmt.Fprintf(out, "%-36s%18s%12s\n", row.name, thousands(row.with), thousands(row.without))
	}
	fmt.Fprintln(out)
}

// A txnOutcome is what one run came to.
type txnOutcome struct {
	committed, aborted, again int
	cuts                      map[kmsg.Key]int // by the answer that was cut off
	recognised                int              // batches
	txnCounts
}

// judge returns why a run with n transactions does not show what it should, or
// nil.
func (o txnOutcome) judge(n int) error {
	switch {
	case o.txnCounts != txnCounts{Whole: o.committed} || o.committed+o.aborted != n:
		return errors.New("with transactions, a reader does not get exactly what was committed")
	case o.aborted == 0 || o.again == 0:
		return errors.New("no transaction was aborted, or none begun again: nothing was shown")
	case o.cuts[kmsg.Produce] == 0 || o.cuts[kmsg.AddPartitionsToTxn] == 0 || o.cuts[kmsg.EndTxn] == 0 || o.recognised == 0:
		return errors.New("not every kind of answer was cut off, or no batch came again: nothing was shown")
	}
	return nil
}

// txnCounts is what a reader of committed records gets of the transactions.
// Whole, InPart, Lost and Doubled are numbers of transactions.
type txnCounts struct {
	Whole          int // each record, once
	InPart         int // some records, but not all
	Lost           int // committed, and no record is there
	Doubled        int // some record more than once
	AbortedRecords int // of transactions that were not committed
}

// countTransactions compares what was read with the transactions that were
// committed.
func countTransactions(log [][]string, records int, committed map[string]bool) txnCounts {
	var c txnCounts
	seen := make(map[string]map[string]int) // by transaction and record
	for _, partition := range log {
		for _, r := range partition {
			name, _, _ := strings.Cut(r, " ")
			if seen[name] == nil {
				seen[name] = make(map[string]int)
			}
			seen[name][r]++
			if !committed[name] {
				c.AbortedRecords++
			}
		}
	}
	for name := range committed {
		if seen[name] == nil {
			c.Lost++
		}
	}
	for _, times := range seen {
		doubled := false
		for _, n := range times {
			doubled = doubled || n > 1
		}
		switch {
		case doubled:
			c.Doubled++
		case len(times) < records:
			c.InPart++
		default:
			c.Whole++
		}
	}
	return c
}

// A txnLoad is what the applications of a run share.
type txnLoad struct {
	addr          string
	n             int // transactions
	transactional bool

	next atomic.Int64 // transaction to be sent

	mu         sync.Mutex
	answers    map[kmsg.Key]int
	cuts       map[kmsg.Key]int
	recognised int
	committed  map[string]bool
	aborted    int
	again      int
}

// runTransactions sets up a broker behind a proxy, sends the transactions, and
// reads everything back.
func runTransactions(ctx context.Context, n int, transactional bool) (o txnOutcome, err error) {
	proxy, err := faults.New("127.0.0.1:0")
	if err != nil {
		return o, err
	}
	defer proxy.Close()
	l := &txnLoad{
		addr: proxy.Addr(), n: n, transactional: transactional,
		answers: make(map[kmsg.Key]int), cuts: make(map[kmsg.Key]int), committed: make(map[string]bool),
	}
	cut := func(key kmsg.Key, every int) {
		if l.strikes(key, every) {
			proxy.Cut() // fails only if the proxy is gone, and then nothing connects
		}
	}
	addr, stop, err := startLocal(server.Config{
		Advertise: proxy.Addr(), Partitions: demoPartitions,
		Observe: func(e server.Event) {
			switch {
			case e.Err == nil && e.Result.Verdict == idempotence.Append:
				cut(kmsg.Produce, txnCutProduceEvery)
			case e.Err == nil:
				l.note(func() { l.recognised++ })
			}
		},
		ObserveAnswer: func(_ kmsg.Request, resp kmsg.Response) {
			switch resp := resp.(type) {
			case *kmsg.AddPartitionsToTxnResponse:
				if resp.Topics[0].Partitions[0].ErrorCode == 0 {
					cut(kmsg.AddPartitionsToTxn, txnCutAddEvery)
				}
			case *kmsg.EndTxnResponse:
				if resp.ErrorCode == 0 {
					cut(kmsg.EndTxn, txnCutEndEvery)
				}
			}
		},
	})
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := proxy.MoveTo(addr); err != nil {
		return o, err
	}

	g, running := errgroup.WithContext(ctx)
	for i := range txnApplications {
		g.Go(func() error { return l.apply(running, i) })
	}
	if err := g.Wait(); err != nil {
		return o, err
	}
	log, err := readback.Read(ctx, addr, demoTopic, demoPartitions, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	return txnOutcome{
		committed: len(l.committed), aborted: l.aborted, again: l.again, cuts: l.cuts, recognised: l.recognised,
		txnCounts: countTransactions(log, txnRecords, l.committed),
	}, err
}

// strikes counts an answer and reports whether it is to be cut off.
func (l *txnLoad) strikes(key kmsg.Key, every int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers[key]++
	strikes := l.answers[key]%every == 0
	if strikes {
		l.cuts[key]++
	}
	return strikes
}

// apply sends transactions as one application does, until all are sent.
func (l *txnLoad) apply(ctx context.Context, app int) error {
	cl, err := l.newClient(app)
	if err != nil {
		return err
	}
	defer func() { cl.Close() }()
	for i := int(l.next.Add(1) - 1); i < l.n; i = int(l.next.Add(1) - 1) {
		name := fmt.Sprintf("transaction-%04d", i)
		if i%txnDieEvery == 0 {
			if err := l.send(ctx, cl, name, txnRecords/2); err != nil {
				return err
			}
			cl.Close()
			next, err := l.newClient(app)
			if err != nil {
				return err
			}
			cl = next
			l.note(func() { l.again++ })
		}
		commit := i%txnAbortEvery != txnAbortEvery-1
		n := txnRecords
		if !commit {
			n /= 2
		}
		if err := l.send(ctx, cl, name, n); err != nil {
			return err
		}
		if l.transactional {
			if err := cl.EndTransaction(ctx, kgo.TransactionEndTry(commit)); err != nil {
				return fmt.Errorf("%s: end: %w", name, err)
			}
		}
		l.note(func() {
			if commit {
				l.committed[name] = true
			} else {
				l.aborted++
			}
		})
	}
	return nil
}

func (l *txnLoad) note(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

// newClient returns the producer of an application. Half of the applications use
// version 1 of transactions, since version 2 does without AddPartitionsToTxn.
func (l *txnLoad) newClient(app int) (*kgo.Client, error) {
	if !l.transactional {
		return newDemoClient(l.addr)
	}
	versions := kversion.Stable()
	if app%2 == 1 {
		versions.SetMaxKeyVersion(int16(kmsg.EndTxn), 4)
	}
	return newDemoClient(l.addr, kgo.TransactionalID(fmt.Sprintf("application-%d", app)), kgo.MaxVersions(versions),
		// The next transaction has to wait for the markers of the last one.
		kgo.ConcurrentTransactionsBackoff(2*time.Millisecond),
		kgo.RetryBackoffFn(func(int) time.Duration { return 3 * time.Millisecond }),
		// A client gives an EndTxn up that it cannot send, and does not know then
		// how the transaction has ended.
		kgo.Dialer(faults.Dial))
}

// send begins a transaction and sends its first n records.
func (l *txnLoad) send(ctx context.Context, cl *kgo.Client, name string, n int) error {
	if l.transactional {
		if err := cl.BeginTransaction(); err != nil {
			return fmt.Errorf("%s: begin: %w", name, err)
		}
	}
	var acks readback.Acks
	for i := range n {
		cl.Produce(ctx, &kgo.Record{Value: fmt.Appendf(nil, "%s %02d %064d", name, i, i), Partition: int32(i % demoPartitions)}, acks.Promise)
	}
	err := cl.Flush(ctx)
	_, failed := acks.Places()
	if err := errors.Join(err, failed); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
