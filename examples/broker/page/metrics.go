package page

// This file is /metrics. The counts are those that the managers keep: they are
// read when a scrape asks for them, and nothing is counted a second time on the
// way of a batch.

import (
	"cmp"
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

const (
	// maxLabelled is how many partitions have labels of their own. All others
	// are counted together, with the labels otherLabel.
	maxLabelled = 200
	otherLabel  = "(other)"

	scrapesAtOnce = 2
)

func (p *Page) metricsHandler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		newCollector(func() []partition { return partitionsOf(p.broker.Load()) }),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	gather := prometheus.GathererFunc(func() (families []*dto.MetricFamily, err error) {
		ctx, cancel := context.WithTimeout(context.Background(), gateTimeout)
		defer cancel()
		busy := p.gate.do(ctx, func() { families, err = registry.Gather() })
		return families, cmp.Or(err, busy)
	})
	return promhttp.HandlerFor(gather, promhttp.HandlerOpts{MaxRequestsInFlight: scrapesAtOnce})
}

// A partition is what the collector wants of a server.PartitionView.
type partition interface {
	Topic() string
	Index() int32
	Offline() error
	Offsets() (start, lastStable, end int64)
	Len() int
	Stats() idempotence.Stats
	Timings() server.Timings
}

func partitionsOf(s *server.Server) []partition {
	if s == nil {
		return nil
	}
	var list []partition
	for _, v := range s.Partitions() {
		list = append(list, v)
	}
	return list
}

// A collector exports the Stats of partitions, and what else can be measured of
// them. A producer is never a label: there is no limit on their number. Nor is
// there one on topics, so only the first maxLabelled partitions that a scrape
// meets have labels of their own. They keep them.
//
// The counts of a partition begin at 0 when its manager is made. With a label for
// each partition that is the reset that a rate allows for. A sum over partitions
// would fall whenever one of them went.
type collector struct {
	partitions func() []partition

	mu       sync.Mutex
	labelled map[topicPartition]bool
}

type topicPartition struct {
	topic     string
	partition int32
}

func newCollector(partitions func() []partition) *collector {
	return &collector{partitions: partitions, labelled: make(map[topicPartition]bool)}
}

var partitionLabels = []string{"topic", "partition"}

func describe(name, help string, more ...string) *prometheus.Desc {
	labels := append(append([]string{}, partitionLabels...), more...)
	return prometheus.NewDesc("idempotence_"+name, help, labels, nil)
}

var (
	answersDesc   = describe("answers_total", "Batches and markers accepted, recognised and refused.", "answer")
	forgottenDesc = describe("producers_forgotten_total", "Producers forgotten.", "reason")

	producersDesc    = describe("producers", "Producers remembered.")
	reservationsDesc = describe("open_reservations", "Appends in flight.")
	failedFirstDesc  = describe("failed_first_appends", "Unknown producers whose first append failed.")
	transactionsDesc = describe("open_transactions", "Transactions that are open.")
	abortedDesc      = describe("aborted_ranges", "Aborted transactions kept for consumers of committed records.")

	startDesc   = describe("log_start_offset", "Offset of the first record of the log.")
	stableDesc  = describe("last_stable_offset", "Offset up to which consumers of committed records read.")
	endDesc     = describe("log_end_offset", "Offset that the next record gets.")
	offlineDesc = describe("partitions_offline", "Partitions that are not served.")

	recoveryDesc        = describe("recovery_seconds", "Time that the recovery of the producers took at start.")
	snapshotsDesc       = describe("snapshot_seconds", "Time that saving snapshots took, and their number.")
	snapshotsFailedDesc = describe("snapshots_failed_total", "Snapshots that could not be saved.")
	lastSnapshotDesc    = describe("last_snapshot_timestamp_seconds", "When the newest snapshot was saved; 0 if none was since the start.")

	partitionsDesc = prometheus.NewDesc("idempotence_partitions", "Partitions, by whether they have labels of their own.", []string{"labelled"}, nil)
)

func (c *collector) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		answersDesc, forgottenDesc,
		producersDesc, reservationsDesc, failedFirstDesc, transactionsDesc, abortedDesc,
		startDesc, stableDesc, endDesc, offlineDesc,
		recoveryDesc, snapshotsDesc, snapshotsFailedDesc, lastSnapshotDesc,
		partitionsDesc,
	} {
		descs <- d
	}
}

func (c *collector) Collect(metrics chan<- prometheus.Metric) {
	var others sample
	labelled, other := 0, 0
	for _, p := range c.partitions() {
		tp := topicPartition{p.Topic(), p.Index()}
		s := sampleOf(p)
		if !c.label(tp) {
			other++
			others.add(s)
			continue
		}
		labelled++
		s.collect(metrics, tp.topic, strconv.Itoa(int(tp.partition)))
	}
	if other > 0 {
		others.collect(metrics, otherLabel, otherLabel)
	}
	metrics <- prometheus.MustNewConstMetric(partitionsDesc, prometheus.GaugeValue, float64(labelled), "true")
	metrics <- prometheus.MustNewConstMetric(partitionsDesc, prometheus.GaugeValue, float64(other), "false")
}

// label reports whether a partition has labels of its own.
func (c *collector) label(tp topicPartition) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.labelled[tp] && len(c.labelled) < maxLabelled {
		c.labelled[tp] = true
	}
	return c.labelled[tp]
}

// A sample is what a scrape shows of one partition, or of several together.
type sample struct {
	idempotence.Stats
	server.Timings
	start, stable, end int64
	producers, offline int
}

func sampleOf(p partition) sample {
	s := sample{Stats: p.Stats(), Timings: p.Timings(), producers: p.Len()}
	s.start, s.stable, s.end = p.Offsets()
	if p.Offline() != nil {
		s.offline = 1
	}
	return s
}

// add adds another partition: times of recovery and of the newest snapshot become
// the largest of them, everything else the sum.
func (s *sample) add(o sample) {
	s.Accepted += o.Accepted
	s.Duplicate += o.Duplicate
	s.OutOfOrder += o.OutOfOrder
	s.Unknown += o.Unknown
	s.Fenced += o.Fenced
	s.Invalid += o.Invalid
	s.InFlight += o.InFlight
	s.InvalidTxn += o.InvalidTxn
	s.ConcurrentTxn += o.ConcurrentTxn
	s.CoordinatorFenced += o.CoordinatorFenced
	s.Markers += o.Markers
	s.Expired += o.Expired
	s.Evicted += o.Evicted
	s.OpenReservations += o.OpenReservations
	s.FailedFirstAppends += o.FailedFirstAppends
	s.OpenTransactions += o.OpenTransactions
	s.AbortedRanges += o.AbortedRanges
	s.Recovery = max(s.Recovery, o.Recovery)
	s.Snapshots += o.Snapshots
	s.SnapshotTime += o.SnapshotTime
	s.FailedSnapshots += o.FailedSnapshots
	if o.LastSnapshot.After(s.LastSnapshot) {
		s.LastSnapshot = o.LastSnapshot
	}
	s.start += o.start
	s.stable += o.stable
	s.end += o.end
	s.producers += o.producers
	s.offline += o.offline
}

func (s *sample) collect(metrics chan<- prometheus.Metric, labels ...string) {
	labelled := func(more ...string) []string { return append(append([]string{}, labels...), more...) }
	count := func(desc *prometheus.Desc, n uint64, more ...string) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), labelled(more...)...)
	}
	gauge := func(desc *prometheus.Desc, value float64) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	count(answersDesc, s.Accepted, "accepted")
	count(answersDesc, s.Duplicate, "duplicate")
	count(answersDesc, s.OutOfOrder, "out_of_order")
	count(answersDesc, s.Unknown, "unknown_producer")
	count(answersDesc, s.Fenced, "fenced")
	count(answersDesc, s.Invalid, "invalid")
	count(answersDesc, s.InFlight, "in_flight")
	count(answersDesc, s.InvalidTxn, "invalid_transaction")
	count(answersDesc, s.ConcurrentTxn, "concurrent_transactions")
	count(answersDesc, s.CoordinatorFenced, "coordinator_fenced")
	count(answersDesc, s.Markers, "marker")
	count(forgottenDesc, s.Expired, "expired")
	count(forgottenDesc, s.Evicted, "evicted")

	gauge(producersDesc, float64(s.producers))
	gauge(reservationsDesc, float64(s.OpenReservations))
	gauge(failedFirstDesc, float64(s.FailedFirstAppends))
	gauge(transactionsDesc, float64(s.OpenTransactions))
	gauge(abortedDesc, float64(s.AbortedRanges))
	gauge(startDesc, float64(s.start))
	gauge(stableDesc, float64(s.stable))
	gauge(endDesc, float64(s.end))
	gauge(offlineDesc, float64(s.offline))

	gauge(recoveryDesc, s.Recovery.Seconds())
	metrics <- prometheus.MustNewConstSummary(snapshotsDesc, uint64(s.Snapshots), s.SnapshotTime.Seconds(), nil, labels...)
	count(snapshotsFailedDesc, uint64(s.FailedSnapshots))
	gauge(lastSnapshotDesc, seconds(s.LastSnapshot))
}

// seconds returns a time as Prometheus has it, and 0 for the zero time.
func seconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}
