package show

// This file measures what several requests in flight are worth to a producer
// whose every batch has to be on disk before it is acknowledged.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
)

const throughputRecords = 60_000

// showThroughput produces the same records twice to one partition of a healthy
// broker over a healthy network: with one request in flight, and with several.
// It returns an error unless the log has each of them exactly once.
func showThroughput(ctx context.Context, out io.Writer) error {
	fmt.Fprintf(out, "Pipelining: %s records to one partition, each batch synced before it is acknowledged.\n\n",
		thousands(throughputRecords))
	one, err := measure(ctx, oneInFlight())
	if err != nil {
		return err
	}
	several, err := measure(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%-36s%18s%12s\n", "requests in flight", fmt.Sprint(demoInFlight), "1")
	fmt.Fprintf(out, "%-36s%18s%12s\n", "records acknowledged a second", thousands(several), thousands(one))
	return nil
}

// oneInFlight makes an idempotent client wait for each answer before its next
// request, as it does with Kafka 0.11, which has Produce up to version 3 and
// remembers one batch of a producer.
func oneInFlight() kgo.Opt {
	versions := kversion.Stable()
	versions.SetMaxKeyVersion(int16(kmsg.Produce), 3)
	return kgo.MaxVersions(versions)
}

// measure returns how many records a second a producer gets acknowledged.
func measure(ctx context.Context, options ...kgo.Opt) (rate int, err error) {
	addr, stop, err := startLocal(server.Config{Partitions: 1})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	cl, err := newDemoClient(addr, options...)
	if err != nil {
		return 0, err
	}
	defer cl.Close()

	begun := time.Now()
	var acks readback.Acks
	for i := range throughputRecords {
		cl.Produce(ctx, demoRecord(i, 0), acks.Promise)
	}
	err = cl.Flush(ctx)
	places, failed := acks.Places()
	if err := errors.Join(err, failed); err != nil {
		return 0, err
	}
	rate = int(throughputRecords / time.Since(begun).Seconds())

	records, err := readback.Read(ctx, addr, demoTopic, 1)
	if err != nil {
		return 0, err
	}
	if c := readback.Count(records, places); c != (readback.Counts{}) || len(places) != throughputRecords {
		return 0, fmt.Errorf("not exactly once, without any fault: %d acknowledged, %+v", len(places), c)
	}
	return rate, nil
}
