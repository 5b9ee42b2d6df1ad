package page

import (
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// A stubPartition has a manager, and the rest as a test wants it.
type stubPartition struct {
	*idempotence.ProducerStateManager
	topic   string
	index   int32
	offline error
	timings server.Timings
}

func (p *stubPartition) Topic() string           { return p.topic }
func (p *stubPartition) Index() int32            { return p.index }
func (p *stubPartition) Offline() error          { return p.offline }
func (p *stubPartition) Timings() server.Timings { return p.timings }
func (p *stubPartition) Offsets() (start, stable, end int64) {
	return 0, p.LastStableOffset(p.EndOffset()), p.EndOffset()
}

func collectorOf(partitions ...partition) *collector {
	return newCollector(func() []partition { return partitions })
}

func TestMetrics(t *testing.T) {
	m := idempotence.New(idempotence.Config{})
	if err := m.Commit(31, 0, 0, 1, 0); err != nil {
		t.Fatal(err)
	}
	m.Check(31, 0, 0, 1) // a retry
	m.Check(31, 0, 2, 1) // a gap
	m.Check(31, 0, 3, 1) // another
	if err := m.CommitBatch(idempotence.Batch{ProducerID: 32, Count: 4, Transactional: true}, 1); err != nil {
		t.Fatal(err)
	}
	p := &stubPartition{m, "orders", 7, errors.New("disk full"), server.Timings{
		Recovery: 1500 * time.Millisecond, Snapshots: 2, SnapshotTime: 250 * time.Millisecond,
		LastSnapshot: time.Unix(1767225600, 0), FailedSnapshots: 3,
	}}

	// Series by name, without what is 0. The labels of the partition are added.
	want := map[string]string{
		`answers_total{answer="accepted"}`:     "2",
		`answers_total{answer="duplicate"}`:    "1",
		`answers_total{answer="out_of_order"}`: "2",
		`producers`:                            "2",
		`open_transactions`:                    "1",
		`last_stable_offset`:                   "1",
		`log_end_offset`:                       "5",
		`partitions_offline`:                   "1",
		`recovery_seconds`:                     "1.5",
		`snapshot_seconds_count`:               "2",
		`snapshot_seconds_sum`:                 "0.25",
		`snapshots_failed_total`:               "3",
		`last_snapshot_timestamp_seconds`:      "1.7672256e+09",
		`partitions{labelled="true"}`:          "1",
	}
	c := collectorOf(p)
	for series, value := range scrape(t, c) {
		short := strings.NewReplacer(`partition="7"`, "", `topic="orders"`, "", "idempotence_", "", ",", "").Replace(series)
		short = strings.TrimSuffix(short, "{}")
		if value != "0" && want[short] != value {
			t.Errorf("%s is %s, want %q", series, value, want[short])
		}
		if value != "0" {
			delete(want, short)
		}
	}
	for series, value := range want {
		t.Errorf("%s is missing, want %s", series, value)
	}

	problems, err := testutil.CollectAndLint(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("lint: %s: %s", p.Metric, p.Text)
	}
}

// scrape returns the series of a scrape and their values, as text.
func scrape(t *testing.T, c prometheus.Collector) map[string]string {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(c)
	w := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatal(w.Body)
	}
	series := make(map[string]string)
	for line := range strings.Lines(w.Body.String()) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			series[name] = value
		}
	}
	return series
}

// Every field of Stats is exported, also one that is added later, and several
// partitions together count what they count apart.
func TestMetricsHaveAllStats(t *testing.T) {
	refused := idempotence.New(idempotence.Config{MaxProducers: 1})
	fill := func(m *idempotence.ProducerStateManager) {
		for id := range int64(3) { // of which two are evicted
			m.Apply(idempotence.Batch{ProducerID: id, Count: 1}, 10*id)
		}
		m.Check(1, 0, 5, 1)
		m.Check(2, -1, 0, 1)
		m.Check(2, 0, 9, 1)
		if _, _, err := m.Reserve(idempotence.Batch{ProducerID: 2, BaseSequence: 1, Count: 1}); err != nil {
			t.Fatal(err)
		}
		m.Check(2, 0, 1, 1) // a copy of what is in flight
	}
	fill(refused)
	p := &stubPartition{ProducerStateManager: refused, topic: "t"}
	for _, series := range []string{
		`answers_total{answer="accepted",partition="0",topic="t"} 3`,
		`answers_total{answer="unknown_producer",partition="0",topic="t"} 1`,
		`answers_total{answer="invalid",partition="0",topic="t"} 1`,
		`answers_total{answer="out_of_order",partition="0",topic="t"} 1`,
		`answers_total{answer="in_flight",partition="0",topic="t"} 1`,
		`producers_forgotten_total{partition="0",reason="evicted",topic="t"} 2`,
		`open_reservations{partition="0",topic="t"} 1`,
	} {
		name, want, _ := strings.Cut(series, " ")
		if got := scrape(t, collectorOf(p))["idempotence_"+name]; got != want {
			t.Errorf("%s is %q, want %s", name, got, want)
		}
	}

	var sum sample
	one := sampleOf(p)
	sum.add(one)
	sum.add(one)
	twice := one.Stats
	for _, n := range []*uint64{
		&twice.Accepted, &twice.Duplicate, &twice.OutOfOrder, &twice.Unknown, &twice.Fenced, &twice.Invalid, &twice.InFlight,
		&twice.InvalidTxn, &twice.ConcurrentTxn, &twice.CoordinatorFenced, &twice.Markers, &twice.Expired, &twice.Evicted,
	} {
		*n *= 2
	}
	twice.OpenReservations *= 2
	if sum.Stats != twice {
		t.Errorf("two partitions together: %+v, want %+v", sum.Stats, twice)
	}
}

// However many partitions and producers there are, the number of series is
// bounded, a partition keeps its labels, and no count is lost.
func TestMetricsAreBounded(t *testing.T) {
	var partitions []partition
	for i := range 3 * maxLabelled {
		m := idempotence.New(idempotence.Config{})
		for id := range int64(50) {
			m.Apply(idempotence.Batch{ProducerID: id, Count: 1}, id)
		}
		partitions = append(partitions, &stubPartition{ProducerStateManager: m, topic: fmt.Sprintf("t%04d", i)})
	}
	shown := partitions[100 : 100+maxLabelled+1]
	c := newCollector(func() []partition { return shown })
	scrape(t, c)
	shown = partitions // more topics, some of which come before the others by name
	series := scrape(t, c)
	if most := 30 * (maxLabelled + 1); len(series) > most {
		t.Errorf("%d series, want at most %d", len(series), most)
	}
	if got := series[`idempotence_answers_total{answer="accepted",partition="0",topic="t0100"}`]; got != "50" {
		t.Errorf("a partition of the first scrape: %q answers, want 50", got)
	}
	other := series[`idempotence_answers_total{answer="accepted",partition="(other)",topic="(other)"}`]
	if want := fmt.Sprint(50 * 2 * maxLabelled); other != want {
		t.Errorf("all others: %q answers, want %s", other, want)
	}
	if got := series[`idempotence_partitions{labelled="false"}`]; got != fmt.Sprint(2*maxLabelled) {
		t.Errorf("%s partitions without labels", got)
	}
}

func TestScrapeOfABroker(t *testing.T) {
	r := start(t, server.Config{Partitions: 1})
	r.produce(3)
	code, body := r.get("/metrics")
	if code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	for _, want := range []string{
		`idempotence_answers_total{answer="accepted",partition="0",topic="orders"} 3`,
		`idempotence_log_end_offset{partition="0",topic="orders"} 3`,
		`go_goroutines `,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("no line %s", want)
		}
	}
	problems, err := promlint.New(strings.NewReader(body)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("lint: %s: %s", p.Metric, p.Text)
	}
}
