package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
	"github.com/idempotence-go/idempotence/examples/replicated/node"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

const (
	demoPartitions = 3
	demoProducers  = 4
	demoTime       = 9 * time.Second // of each run

	// demoTimeout ends a demo that gets nowhere; it takes half a minute.
	demoTimeout = 2 * time.Minute
)

// demo produces numbered records to a cluster that keeps losing its leader, with
// deduplication and without, and prints how each fared. It returns an error
// unless the first stored every record exactly once, in spite of producers that
// had to retry.
func demo(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	fmt.Fprintf(out, "Three nodes, %d partitions, %d idempotent producers with five requests in flight.\n"+
		"Leaders are cut off, stopped and replaced, and answers are lost on the way.\n",
		demoPartitions, demoProducers)

	fmt.Fprintln(out, "\nWith deduplication:")
	with, err := demoRun(ctx, out, statemachine.WhenApplied)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "\nWithout:")
	without, err := demoRun(ctx, out, statemachine.Never)
	if err != nil {
		return err
	}
	printTable(out, with, without)
	return with.judge()
}

// An outcome is what one run came to.
type outcome struct {
	sent, acknowledged  int
	events              int
	retried, recognised int // batches
	readback.Counts
}

// judge returns why the run does not show what it should, if so.
func (o outcome) judge() error {
	switch {
	case o.acknowledged != o.sent || o.Counts != readback.Counts{}:
		return errors.New("with deduplication, the logs are not what the producers were told: not exactly once")
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
		{"leaders lost and other faults", with.events, without.events},
		{"batches that came again", with.retried, without.retried},
		{"duplicates recognised", with.recognised, without.recognised},
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

// demoRun starts a cluster, produces while there is trouble, and reads
// everything back.
func demoRun(ctx context.Context, out io.Writer, mode statemachine.Deduplication) (o outcome, err error) {
	counts := newTally()
	c, err := startCluster(ctx, node.Config{
		Topic:   statemachine.TopicConfig{Partitions: demoPartitions, Deduplication: mode},
		Observe: counts.observe,
	})
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, c.close()) }()

	var acks readback.Acks
	var sent atomic.Int64
	begun := time.Now()
	n := &nemesis{
		cluster: c,
		rng:     rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
		events:  []event{cutClients, cutOffLeader, transferLeadership, stopLeader},
		tell: func(what string) {
			fmt.Fprintf(out, "  %4.1fs %7s acknowledged: %s\n", time.Since(begun).Seconds(), thousands(acks.Len()), what)
		},
	}
	working, stop := context.WithCancel(ctx)
	defer stop()
	producers, _ := errgroup.WithContext(ctx)
	for i := range demoProducers {
		producers.Go(func() error {
			n, err := produce(ctx, working, c.seeds(), fmt.Sprint("producer-", i), demoPartitions, 20*time.Millisecond, acks.Promise)
			sent.Add(int64(n))
			return err
		})
	}
	happened, err := n.run(ctx, demoTime)
	stop()
	if err := errors.Join(err, producers.Wait()); err != nil {
		return o, err
	}
	places, err := acks.Places()
	if err != nil {
		return o, err
	}
	records, err := readback.Read(ctx, c.seeds()[0], topic, demoPartitions)
	if err != nil {
		return o, err
	}
	for _, n := range happened {
		o.events += n
	}
	o.sent, o.acknowledged = int(sent.Load()), len(places)
	o.retried, o.recognised = counts.retried, counts.recognised
	o.Counts = readback.Count(records, places)
	fmt.Fprintf(out, "  %4.1fs everything is acknowledged, read back and counted\n", time.Since(begun).Seconds())
	return o, nil
}
