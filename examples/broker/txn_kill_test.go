package main

// The broker is killed while transactions end.

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

var txnKills = flag.Int("txn-kills", 20, "how often TestKilledWhileTransactionsEnd kills the broker")

// dieAt in the environment makes the test binary a broker that kills itself at one
// of these points. Its arguments are a directory and the version of transactions.
const dieAt = "IDEMPOTENCE_TEST_DIE_AT"

const (
	beforeFirstMarker = "before the first marker"
	betweenMarkers    = "between two markers"
	beforeComplete    = "before COMPLETE"
	atRandom          = "at random" // by the test
)

// txnPartitions is how many partitions a transaction has, and how many markers.
const txnPartitions = 3

func dieEnding(at string) {
	version, _ := strconv.ParseInt(os.Args[2], 10, 16)
	var mu sync.Mutex
	begun, written := 0, 0
	cfg := server.Config{
		Dir: os.Args[1], Partitions: txnPartitions, TransactionVersion: int16(version),
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		ObserveMarker: func(_ txn.Marker, done bool) {
			mu.Lock() // and not unlocked on the way to the end: no other marker gets further
			if done {
				written++
			} else {
				begun++
			}
			switch {
			case at == beforeFirstMarker, at == betweenMarkers && done, at == beforeComplete && written == txnPartitions:
				self, err := os.FindProcess(os.Getpid())
				if err == nil {
					err = self.Kill()
				}
				panic(fmt.Sprint("not killed: ", err))
			case at == betweenMarkers && begun > 1:
				mu.Unlock()
				select {} // only the first marker is written
			}
			mu.Unlock()
		},
	}
	if err := serve(context.Background(), "127.0.0.1:0", cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(1)
}

// A broker is killed between PREPARE and the first marker, between two markers,
// before COMPLETE, and at random moments. After the next start no transaction stays
// open, each has the outcome that transactions.log has recorded, in all of its
// partitions, and committed readers see exactly that.
func TestKilledWhileTransactionsEnd(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	dir := t.TempDir()
	committed := make(map[string]bool) // the records that are to be seen
	outcomes := make(map[string]int)
	points := []string{beforeFirstMarker, betweenMarkers, beforeComplete, atRandom}
	for i := range *txnKills {
		point, commit, version := points[i%len(points)], i/len(points)%2 == 0, 1+i/(2*len(points))%2
		values := endKilled(t, rng, dir, fmt.Sprintf("txn-%d", i), point, commit, version)
		outcome := recorded(t, dir)
		outcomes[fmt.Sprintf("%s: %v", point, outcome)]++
		switch {
		case point != atRandom && outcome != (map[bool]txn.State{true: txn.PrepareCommit, false: txn.PrepareAbort})[commit]:
			t.Errorf("kill %d, %s: %v is recorded, commit %v", i, point, outcome, commit)
		case outcome == txn.PrepareCommit || outcome == txn.CompleteCommit:
			for _, v := range values {
				committed[v] = true
			}
		}
		settle(t, dir, committed, i)
		if t.Failed() {
			t.FailNow()
		}
	}
	for _, o := range slices.Sorted(maps.Keys(outcomes)) {
		t.Logf("killed %s: %d times", o, outcomes[o])
	}
}

// endKilled produces a transaction of a record in each partition and ends it, while
// the broker dies. It returns the records.
func endKilled(t *testing.T, rng *rand.Rand, dir, name, point string, commit bool, version int) (values []string) {
	t.Helper()
	p := startAs(t, dieAt+"="+point, dir, strconv.Itoa(version))
	if !p.serves(func(string) {}) {
		t.Fatal("the broker did not start")
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cl, err := newFranz(p.addr, kgo.TransactionalID("x"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	if err := cl.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	var records []*kgo.Record
	for i := range int32(txnPartitions) {
		v := fmt.Sprintf("%s-%d", name, i)
		values = append(values, v)
		records = append(records, &kgo.Record{Topic: topic, Partition: i, Value: []byte(v)})
	}
	if err := cl.ProduceSync(ctx, records...).FirstErr(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		cl.EndTransaction(ctx, kgo.TransactionEndTry(commit)) // what comes of it is in transactions.log
	}()
	if point == atRandom {
		time.Sleep(time.Duration(rng.IntN(10_000)) * time.Microsecond)
		p.end(syscall.SIGKILL)
	} else {
		p.reading.Wait()
		p.cmd.Wait()
	}
	cancel()
	<-ended
	return values
}

// recorded returns the state of the transaction in transactions.log.
func recorded(t *testing.T, dir string) txn.State {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, server.TxnLogName))
	if err != nil {
		t.Fatal(err)
	}
	found, err := txn.Recover(text)
	if err != nil {
		t.Fatal(err)
	}
	c, err := txn.NewCoordinator(txn.Config{}, found, forgetful{})
	if err != nil {
		t.Fatal(err)
	}
	x, ok := c.Describe("x")
	if !ok {
		t.Fatal("no transaction is recorded")
	}
	return x.State
}

// A forgetful log is for a coordinator that is only asked.
type forgetful struct{}

func (forgetful) Append([]byte) func() error { return func() error { return nil } }

// settle starts a broker that lives, waits until no transaction holds readers back,
// and compares what they see.
func settle(t *testing.T, dir string, committed map[string]bool, kill int) {
	t.Helper()
	p := startProcess(t, "-data", dir, "-partitions", strconv.Itoa(txnPartitions))
	if !p.serves(func(line string) {
		if complaint.MatchString(line) && !torn.MatchString(line) {
			t.Errorf("after kill %d the broker complains: %s", kill, line)
		}
	}) {
		t.Fatal("the broker did not start again")
	}
	defer p.end(syscall.SIGTERM)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cl, err := newFranz(p.addr, kgo.TransactionalID("x")) // aborts a transaction that is open
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	if _, _, err := cl.ProducerID(ctx); err != nil {
		t.Fatal(err)
	}
	adm := kadm.NewClient(cl)
	for stable := false; !stable; time.Sleep(5 * time.Millisecond) {
		ends, err := adm.ListEndOffsets(ctx, topic)
		if err != nil {
			t.Fatalf("after kill %d: %v", kill, err)
		}
		stables, err := adm.ListCommittedOffsets(ctx, topic)
		if err != nil {
			t.Fatalf("after kill %d: %v", kill, err)
		}
		stable = true
		ends.Each(func(end kadm.ListedOffset) {
			o, _ := stables.Lookup(topic, end.Partition)
			stable = stable && o.Offset == end.Offset
		})
	}
	log, err := readback.Read(ctx, p.addr, topic, txnPartitions, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for _, partition := range log {
		for _, v := range partition {
			if seen[v] {
				t.Errorf("after kill %d: %s is there twice", kill, v)
			}
			seen[v] = true
		}
	}
	if !maps.Equal(seen, committed) {
		t.Errorf("after kill %d: committed readers see %v, want %v", kill,
			slices.Sorted(maps.Keys(seen)), slices.Sorted(maps.Keys(committed)))
	}
}
