package page

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// What 200 readers of the live page cost the producers: the same load by turns
// with them and without. ratio is the throughput with readers over that without,
// the median of the pairs.
func BenchmarkReaders(b *testing.B) {
	const pairs, records = 5, 500_000 // which take about a second
	r := start(b, server.Config{Partitions: 1, NoSync: true})
	cl := r.client()
	defer cl.Close()
	produce := func() (rate float64) {
		begun := time.Now()
		for range records {
			cl.Produce(b.Context(), kgo.StringRecord("record"), func(_ *kgo.Record, err error) {
				if err != nil {
					b.Error(err)
				}
			})
		}
		if err := cl.Flush(b.Context()); err != nil {
			b.Fatal(err)
		}
		return records / time.Since(begun).Seconds()
	}
	produce()
	var ratios, without []float64
	for b.Loop() {
		for range pairs {
			alone := produce()
			stop, messages := readers(b, r, 200, func(i int) string {
				return fmt.Sprintf("?topic=orders&partition=0&producer=%d", i)
			})
			eventually(b, "all readers have the page", func() bool { return messages() > 0 })
			watched := produce()
			stop()
			ratios, without = append(ratios, watched/alone), append(without, alone)
		}
	}
	b.ReportMetric(median(ratios), "ratio")
	b.ReportMetric(median(without), "records/s")
	b.ReportMetric(0, "ns/op")
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}
