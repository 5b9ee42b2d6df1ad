package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
	"github.com/idempotence-go/idempotence/examples/replicated/node"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

var (
	nemesisTime = flag.Duration("nemesis", 20*time.Second, "how long the nemesis is at work")
	nemesisSeed = flag.Uint64("seed", 0, "seed of the nemesis; 0: a new one each time")
)

func TestNemesis(t *testing.T) {
	seed := *nemesisSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	counts := newTally()
	cfg := node.Config{
		Topic:           statemachine.TopicConfig{Partitions: 4},
		ElectionTimeout: 300 * time.Millisecond,
		ExpireInterval:  200 * time.Millisecond,
		TrailingLogs:    10,
		Observe:         counts.observe,
	}
	ctx, cancel := context.WithTimeout(t.Context(), *nemesisTime+2*time.Minute)
	defer cancel()
	c, err := startCluster(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.close(); err != nil {
			t.Error(err)
		}
	}()
	var acks readback.Acks
	var sent atomic.Int64
	working, stop := context.WithTimeout(ctx, *nemesisTime)
	defer stop()
	g, _ := errgroup.WithContext(ctx)
	for i := range 4 {
		g.Go(func() error {
			return produce(ctx, working, c.seeds(), fmt.Sprint("franz", i), 4, 50*time.Millisecond, &sent, &acks)
		})
	}
	n := &nemesis{cluster: c, rng: rand.New(rand.NewPCG(seed, 0)), events: everything, tell: func(what string) {
		t.Logf("%s (%d acknowledged)", what, acks.Len())
	}}
	happened, err := n.run(working)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(happened)
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	places, err := acks.Places()
	if err != nil {
		t.Fatal(err)
	}
	logs, err := readback.Read(ctx, c.seeds()[0], topic, 4)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(sent.Load(), len(places), counts.retried, counts.recognised, counts.gapped)
	if c := readback.Count(logs, places); c != (readback.Counts{}) || int(sent.Load()) != len(places) {
		t.Errorf("%d sent, %d acknowledged, %+v", sent.Load(), len(places), c)
	}
}
