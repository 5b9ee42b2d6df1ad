package main

// A recipe: what a partition counts, as metrics. MIGRATING.md refers to it.

import (
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/idempotence-go/idempotence"
)

// A collector exports the Stats of partitions. They are read when a scrape asks
// for them; nothing is counted a second time on the way of a batch.
type collector map[topicPartition]*idempotence.ProducerStateManager

type topicPartition struct {
	topic     string
	partition int32
}

// The counts of a partition begin at 0 when its manager is made, and with a label
// for each partition that is the reset that a rate allows for. A sum over
// partitions would fall whenever one of them is closed.
var (
	partitionLabels = []string{"topic", "partition"}
	answersDesc     = prometheus.NewDesc("idempotence_answers_total",
		"Batches accepted, recognised and refused.", append(partitionLabels, "answer"), nil)
	forgottenDesc = prometheus.NewDesc("idempotence_producers_forgotten_total",
		"Producers forgotten.", append(partitionLabels, "reason"), nil)
	producersDesc = prometheus.NewDesc("idempotence_producers",
		"Producers remembered.", partitionLabels, nil)
)

func (c collector) Describe(descs chan<- *prometheus.Desc) {
	descs <- answersDesc
	descs <- forgottenDesc
	descs <- producersDesc
}

func (c collector) Collect(metrics chan<- prometheus.Metric) {
	for tp, m := range c {
		labels := []string{tp.topic, strconv.Itoa(int(tp.partition))}
		count := func(desc *prometheus.Desc, n uint64, what string) {
			metrics <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), append(labels, what)...)
		}
		s := m.Stats()
		count(answersDesc, s.Accepted, "accepted")
		count(answersDesc, s.Duplicate, "duplicate")
		count(answersDesc, s.OutOfOrder, "out_of_order")
		count(answersDesc, s.Unknown, "unknown_producer")
		count(answersDesc, s.Fenced, "fenced")
		count(answersDesc, s.Invalid, "invalid")
		count(answersDesc, s.InFlight, "in_flight")
		count(forgottenDesc, s.Expired, "expired")
		count(forgottenDesc, s.Evicted, "evicted")
		metrics <- prometheus.MustNewConstMetric(producersDesc, prometheus.GaugeValue, float64(m.Len()), labels...)
	}
}

func TestCollector(t *testing.T) {
	m := idempotence.New(idempotence.Config{})
	if err := m.Commit(31, 0, 0, 1, 0); err != nil {
		t.Fatal(err)
	}
	m.Check(31, 0, 0, 1) // a retry
	m.Check(31, 0, 2, 1) // a gap
	m.Check(31, 0, 3, 1) // another

	want := `
# HELP idempotence_answers_total Batches accepted, recognised and refused.
# TYPE idempotence_answers_total counter
idempotence_answers_total{answer="accepted",partition="7",topic="orders"} 1
idempotence_answers_total{answer="duplicate",partition="7",topic="orders"} 1
idempotence_answers_total{answer="fenced",partition="7",topic="orders"} 0
idempotence_answers_total{answer="in_flight",partition="7",topic="orders"} 0
idempotence_answers_total{answer="invalid",partition="7",topic="orders"} 0
idempotence_answers_total{answer="out_of_order",partition="7",topic="orders"} 2
idempotence_answers_total{answer="unknown_producer",partition="7",topic="orders"} 0
# HELP idempotence_producers Producers remembered.
# TYPE idempotence_producers gauge
idempotence_producers{partition="7",topic="orders"} 1
# HELP idempotence_producers_forgotten_total Producers forgotten.
# TYPE idempotence_producers_forgotten_total counter
idempotence_producers_forgotten_total{partition="7",reason="evicted",topic="orders"} 0
idempotence_producers_forgotten_total{partition="7",reason="expired",topic="orders"} 0
`
	if err := testutil.CollectAndCompare(collector{{"orders", 7}: m}, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
