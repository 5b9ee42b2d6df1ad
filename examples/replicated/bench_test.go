package main

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
	"golang.org/x/sync/errgroup"

	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
	"github.com/idempotence-go/idempotence/examples/replicated/node"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

const benchRounds = 5 // of each comparison

// benchCluster starts a cluster with a topic for each mode.
func benchCluster(b *testing.B, topics map[string]statemachine.Deduplication) *cluster {
	b.Helper()
	c, err := startCluster(b.Context(), node.Config{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := c.close(); err != nil {
			b.Error(err)
		}
	})
	for name, mode := range topics {
		create := statemachine.CreateTopic(name, statemachine.TopicConfig{Partitions: 4, Deduplication: mode})
		if _, err := c.propose(b.Context(), create); err != nil {
			b.Fatal(err)
		}
	}
	return c
}

// oneInFlight makes an idempotent client wait for each answer before its next
// request, as it does with Kafka 0.11: that has Produce up to version 3, and
// remembers one batch of a producer.
func oneInFlight() kgo.Opt {
	versions := kversion.Stable()
	versions.SetMaxKeyVersion(int16(kmsg.Produce), 3)
	return kgo.MaxVersions(versions)
}

// rate sends records and returns how many a second are acknowledged.
func rate(b *testing.B, c *cluster, records, producers, partitions int, options ...kgo.Opt) float64 {
	b.Helper()
	var all errgroup.Group
	begun := time.Now()
	for p := range producers {
		all.Go(func() error {
			cl, err := newProducer(c.seeds(), options...)
			if err != nil {
				return err
			}
			defer cl.Close()
			var acks readback.Acks
			for i := range records / producers {
				cl.Produce(b.Context(), record(fmt.Sprint("bench-", p), i, int32(i%partitions)), acks.Promise)
			}
			if err := cl.Flush(b.Context()); err != nil {
				return err
			}
			_, err = acks.Places()
			return err
		})
	}
	if err := all.Wait(); err != nil {
		b.Fatal(err)
	}
	return float64(records) / time.Since(begun).Seconds()
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// BenchmarkInFlight compares five requests in flight with one, to one partition,
// each batch in the raft logs of a majority, synced, before it is acknowledged.
// Medians of five, by turns.
func BenchmarkInFlight(b *testing.B) {
	c := benchCluster(b, map[string]statemachine.Deduplication{topic: statemachine.WhenApplied})
	for b.Loop() {
		var one, five []float64
		for range benchRounds {
			one = append(one, rate(b, c, 20_000, 1, 1, oneInFlight()))
			five = append(five, rate(b, c, 20_000, 1, 1))
		}
		b.ReportMetric(median(one), "one-records/s")
		b.ReportMetric(median(five), "five-records/s")
		b.ReportMetric(median(five)/median(one), "five/one")
	}
}

// BenchmarkDeduplication compares a topic with the library with one without.
// Medians of five, by turns.
func BenchmarkDeduplication(b *testing.B) {
	c := benchCluster(b, map[string]statemachine.Deduplication{"with": statemachine.WhenApplied, "without": statemachine.Never})
	for b.Loop() {
		var with, without []float64
		for range benchRounds {
			with = append(with, rate(b, c, 60_000, 4, 4, kgo.DefaultProduceTopic("with")))
			without = append(without, rate(b, c, 60_000, 4, 4, kgo.DefaultProduceTopic("without")))
		}
		b.ReportMetric(median(with), "with-records/s")
		b.ReportMetric(median(without), "without-records/s")
		b.ReportMetric(median(with)/median(without), "with/without")
	}
}

// BenchmarkLostLeader measures how long it takes, from when a leader stops or is
// cut off, until a record is acknowledged that was sent after that.
func BenchmarkLostLeader(b *testing.B) {
	for name, lose := range map[string]func(*cluster, *member) error{
		"stopped": func(_ *cluster, m *member) error { return m.stop() },
		"cut off": func(c *cluster, m *member) error {
			for _, o := range c.others(m) {
				m.links[o.id].Close()
				o.links[m.id].Close()
			}
			return nil
		},
	} {
		b.Run(name, func(b *testing.B) {
			c := benchCluster(b, map[string]statemachine.Deduplication{topic: statemachine.WhenApplied})
			for b.Loop() {
				var times []float64
				for range benchRounds {
					times = append(times, unavailable(b, c, lose).Seconds())
				}
				b.ReportMetric(median(times), "median-s")
				b.ReportMetric(slices.Max(times), "max-s")
			}
		})
	}
}

// unavailable loses the leader once.
func unavailable(b *testing.B, c *cluster, lose func(*cluster, *member) error) time.Duration {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
	defer cancel()
	leader, err := c.awaitLeader(ctx)
	if err != nil {
		b.Fatal(err)
	}
	cl, err := newProducer(c.seeds())
	if err != nil {
		b.Fatal(err)
	}
	defer cl.Close()
	if err := cl.ProduceSync(ctx, record("before", 0, 0)).FirstErr(); err != nil {
		b.Fatal(err)
	}
	begun := time.Now()
	if err := lose(c, leader); err != nil {
		b.Fatal(err)
	}
	if err := cl.ProduceSync(ctx, record("after", 0, 0)).FirstErr(); err != nil {
		b.Fatal(err)
	}
	took := time.Since(begun)
	if leader.running() == nil {
		err = c.start(leader)
	} else {
		err = c.heal()
	}
	if err != nil {
		b.Fatal(err)
	}
	return took
}
