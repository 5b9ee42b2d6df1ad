package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
	"github.com/idempotence-go/idempotence/examples/replicated/node"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

var (
	nemesisTime = flag.Duration("nemesis", 20*time.Second, "how long the nemesis is at work")
	nemesisSeed = flag.Uint64("seed", 0, "seed of the nemesis; 0: a new one each time")
)

const (
	nemesisPartitions = 4
	trailingLogs      = 200
)

// A trial is a cluster under a nemesis, and what its clients were told.
type trial struct {
	*testing.T
	cluster  *cluster
	counts   *tally
	acks     readback.Acks
	highest  [nemesisPartitions]atomic.Int64 // offset acknowledged, plus one
	sent     atomic.Int64                    // of what is in acks
	installs atomic.Int32                    // of snapshots that the leader sent
	seed     uint64
	happened map[string]int
	enough   func() bool // see nemesis
}

// newTrial starts a cluster. Snapshots are taken often, and of the entries that
// are in one few are kept, so that a node that falls behind gets a snapshot. They
// have to be more than a leader that is cut off has in its log and nowhere else: a
// follower with so many of these would get a snapshot too, and end in a panic
// (hashicorp/raft issue 697).
func newTrial(ctx context.Context, t *testing.T, mode statemachine.Deduplication) *trial {
	r := &trial{T: t, counts: newTally(), seed: *nemesisSeed}
	if r.seed == 0 {
		r.seed = rand.Uint64()
	}
	t.Logf("seed %d", r.seed)
	var err error
	r.cluster, err = startCluster(ctx, node.Config{
		Topic:             statemachine.TopicConfig{Partitions: nemesisPartitions, Deduplication: mode},
		ElectionTimeout:   500 * time.Millisecond, // enough with the race detector on a busy machine
		ExpireInterval:    200 * time.Millisecond,
		SnapshotThreshold: 5000,
		SnapshotInterval:  time.Second,
		TrailingLogs:      trailingLogs,
		Observe:           r.counts.observe,
		Log:               slog.New(installCounter{slog.DiscardHandler, &r.installs}),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.cluster.close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// An installCounter counts the snapshots that followers were sent, of which raft
// tells only its log.
type installCounter struct {
	slog.Handler
	installs *atomic.Int32
}

func (installCounter) Enabled(context.Context, slog.Level) bool { return true }

func (c installCounter) Handle(ctx context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "Installed remote snapshot") {
		c.installs.Add(1)
	}
	return nil
}

// promise is called for each record that was acknowledged or failed.
func (r *trial) promise(record *kgo.Record, err error) {
	r.acks.Promise(record, err)
	if err != nil {
		return
	}
	h := &r.highest[record.Partition]
	for old := h.Load(); record.Offset+1 > old && !h.CompareAndSwap(old, record.Offset+1); old = h.Load() {
	}
}

// franz starts franz-go producers.
func (r *trial) franz(ctx, working context.Context, g *errgroup.Group) {
	for i := range 4 {
		g.Go(func() error {
			n, err := produce(ctx, working, r.cluster.seeds(), fmt.Sprint("franz-", i), nemesisPartitions, 50*time.Millisecond, r.promise)
			r.sent.Add(int64(n))
			return err
		})
	}
}

// trouble lets the nemesis work.
func (r *trial) trouble(ctx context.Context, least time.Duration, events ...event) error {
	begun := time.Now()
	n := &nemesis{
		cluster: r.cluster,
		rng:     rand.New(rand.NewPCG(r.seed, 0)),
		events:  events,
		enough:  r.enough,
		tell: func(what string) {
			r.Logf("%5.1fs %d acknowledged: %s", time.Since(begun).Seconds(), r.acks.Len(), what)
		},
	}
	var err error
	r.happened, err = n.run(ctx, least)
	return err
}

// count settles the cluster and compares what the producers were told with what
// it has.
func (r *trial) count(ctx context.Context) ([][]string, readback.Counts) {
	if err := r.cluster.settle(ctx); err != nil {
		r.Fatal(err)
	}
	places, err := r.acks.Places()
	if err != nil {
		r.Fatal(err)
	}
	if int(r.sent.Load()) != len(places) {
		r.Errorf("%d records sent, %d acknowledged", r.sent.Load(), len(places))
	}
	logs, err := readback.Read(ctx, r.cluster.seeds()[0], topic, nemesisPartitions)
	if err != nil {
		r.Fatal(err)
	}
	r.Logf("%d records acknowledged; batches: %d retried, %d recognised, %d refused for a gap; %d snapshots installed",
		len(places), r.counts.retried, r.counts.recognised, r.counts.gapped, r.installs.Load())
	for _, name := range slices.Sorted(maps.Keys(r.happened)) {
		r.Logf("%d times: %s", r.happened[name], name)
	}
	return logs, readback.Count(logs, places)
}

// TestNemesis: under all kinds of trouble, each record is in the log once, where
// its producer was told, in order; what is read agrees with that at any time; and
// the replicas are the same, to the byte.
func TestNemesis(t *testing.T) {
	needKcat(t)
	ctx, cancel := context.WithTimeout(t.Context(), *nemesisTime+3*time.Minute)
	defer cancel()
	r := newTrial(ctx, t, statemachine.WhenApplied)
	working, stop := context.WithCancel(ctx)
	defer stop()
	reading, stopReading := context.WithCancel(ctx)
	defer stopReading()

	var producers, readers errgroup.Group
	r.franz(ctx, working, &producers)
	producers.Go(func() error {
		n, err := saramaProduce(ctx, working, r.cluster.seeds(), "sarama", 0, 5*time.Millisecond, r.promise)
		r.sent.Add(int64(n))
		return err
	})
	var kcatSent int
	producers.Go(func() (err error) {
		kcatSent, err = kcatProduce(ctx, working, r.cluster.seeds(), "kcat", 1, 5*time.Millisecond)
		return err
	})
	var mu sync.Mutex
	var histories [2][]*history
	for i := range histories {
		producers.Go(func() error {
			h, err := recordHistories(ctx, working, r.cluster, int32(2+i), r.seed+uint64(i))
			mu.Lock()
			defer mu.Unlock()
			histories[i] = h
			return err
		})
	}
	var consumed [][]string
	readers.Go(func() (err error) {
		consumed, err = consume(reading, r.cluster.seeds(), nemesisPartitions)
		return err
	})
	var ends int
	readers.Go(func() (err error) {
		ends, err = latest(working, r.cluster.seeds(), func(partition int32) int64 { return r.highest[partition].Load() - 1 })
		return err
	})
	// On a machine with much else to do, a node that was away may not be so far
	// behind that it gets a snapshot.
	r.enough = func() bool {
		r.counts.mu.Lock()
		defer r.counts.mu.Unlock()
		return r.counts.recognised > 0 && r.installs.Load() > 0
	}
	if err := r.trouble(ctx, *nemesisTime, everything...); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := producers.Wait(); err != nil {
		t.Fatal(err)
	}
	stopReading()
	if err := readers.Wait(); err != nil {
		t.Fatal(err)
	}

	logs, differences := r.count(ctx)
	if differences != (readback.Counts{}) {
		t.Errorf("%+v", differences)
	}
	for i, records := range consumed {
		if n := min(len(records), len(logs[i])); n == 0 || n < len(records) || !slices.Equal(records, logs[i][:n]) {
			t.Errorf("partition %d: the %d records that were consumed meanwhile are not the first %d", i, len(records), len(logs[i]))
		}
	}
	if ends == 0 {
		t.Error("the ends of the partitions were never told")
	}
	if got := recordsOf(logs[1], "kcat"); len(got) != kcatSent {
		t.Errorf("kcat sent %d records, of which the log has %d", kcatSent, len(got))
	}
	if err := r.cluster.compareReplicas(); err != nil {
		t.Error(err)
	}
	met := make(map[string]int)
	for i := range int32(nemesisPartitions) {
		p, err := r.cluster.members[0].running().Machine().Partition(topic, i)
		if err != nil {
			t.Fatal(err)
		}
		offsets, err := offsetsOf(p)
		if err != nil {
			t.Errorf("partition %d: %v", i, err)
		}
		if i >= 2 {
			for kind, n := range checkHistories(t, histories[i-2], offsets) {
				met[kind] += n
			}
		}
	}
	t.Logf("%d and %d histories with %v; the ends told %d times", len(histories[0]), len(histories[1]), met, ends)
	if r.counts.retried == 0 || r.counts.recognised == 0 || r.installs.Load() == 0 || met["code 0"] == 0 || met["unknown"] == 0 || met["code 45"] == 0 {
		t.Error("the trouble was not enough to show anything")
	}
}

// TestNemesisNotices: a checker that finds nothing proves something only if it
// finds what is wrong.
func TestNemesisNotices(t *testing.T) {
	t.Parallel() // beside TestKilled
	for name, mode := range map[string]statemachine.Deduplication{
		"nothing is judged":            statemachine.Never,
		"judged before it is proposed": statemachine.WhenProposed,
	} {
		t.Run(name, func(t *testing.T) {
			for range 10 {
				if r := briefTrial(t, mode); r.Duplicated > 0 {
					t.Logf("%+v", r)
					return
				}
			}
			t.Error("no record is stored twice")
		})
	}
}

// briefTrial returns what a few seconds of trouble lead to.
func briefTrial(t *testing.T, mode statemachine.Deduplication) readback.Counts {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r := newTrial(ctx, t, mode)
	working, stop := context.WithCancel(ctx)
	defer stop()
	var producers errgroup.Group
	r.franz(ctx, working, &producers)
	if err := r.trouble(ctx, 3*time.Second, cutClients, cutProducers, transferLeadership); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := producers.Wait(); err != nil {
		t.Fatal(err)
	}
	_, differences := r.count(ctx)
	return differences
}
