package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// A coordinator that has lost its log knows nothing of a transaction that was
// open. The partition does, and no time-out ends it. An administrator finds it
// and ends it.
func TestHangingTransaction(t *testing.T) {
	for _, version := range []int16{1, 2} {
		t.Run(fmt.Sprintf("version %d", version), func(t *testing.T) {
			t.Parallel()
			b := startTxnBroker(t, version)
			begin, send, end := script(t, newFranzTxn(t, b.addr, "before", time.Minute))
			begin()
			send("before")
			end(commit)
			b.await(2, 2)
			gone := newFranzTxn(t, b.addr, "gone", time.Second)
			begin, send, _ = script(t, gone)
			begin()
			send("lost")
			b.await(3, 2)
			gone.vanish()
			b.stop(time.Now())
			if err := os.Remove(filepath.Join(b.cfg.Dir, server.TxnLogName)); err != nil {
				t.Fatal(err)
			}

			b.start()
			begin, send, end = script(t, newFranzTxn(t, b.addr, "after", time.Minute))
			begin()
			send("kept")
			b.await(4, 2)
			// The coordinator knows only the transaction that came after.
			listed, err := b.adm.ListTransactions(t.Context(), nil, nil)
			if err != nil || len(listed) != 1 || listed["after"].State != "Ongoing" {
				t.Errorf("listed: %v, %v", listed, err)
			}
			described, err := b.adm.DescribeTransactions(t.Context(), "gone", "after")
			after := described["after"]
			if err != nil || !errors.Is(described["gone"].Err, kerr.TransactionalIDNotFound) || after.Err != nil ||
				after.State != "Ongoing" || !after.Topics.Lookup(topic, 0) || after.TimeoutMillis != 60_000 {
				t.Errorf("described: %+v, %v", described, err)
			}
			end(commit)
			b.await(5, 2)

			hanging := b.hanging()
			if len(hanging) != 1 || hanging[0].CurrentTxnStartOffset != 2 {
				t.Fatalf("described as open: %+v, want one from offset 2", hanging)
			}
			found, err := server.Inspect(filepath.Join(b.cfg.Dir, topic+"-0"))
			if err != nil {
				t.Fatal(err)
			}
			oldest, open := found.Producers.OldestTransaction()
			if !open || oldest.ProducerID != hanging[0].ProducerID || oldest.Epoch != hanging[0].ProducerEpoch || oldest.CurrentTxnFirstOffset != 2 {
				t.Errorf("the oldest transaction: %+v, %v, want that of %+v", oldest, open, hanging[0])
			}

			var partitions kadm.TopicsSet
			partitions.Add(topic, 0)
			answers, err := b.adm.WriteTxnMarkers(t.Context(), kadm.TxnMarkers{
				ProducerID:       hanging[0].ProducerID,
				ProducerEpoch:    hanging[0].ProducerEpoch,
				CoordinatorEpoch: max(0, hanging[0].CoordinatorEpoch),
				Topics:           partitions,
			})
			if err != nil {
				t.Fatal(err)
			}
			written := 0
			answers.EachPartition(func(p kadm.TxnMarkersPartitionResponse) {
				written++
				if p.Err != nil {
					t.Error(p.Err)
				}
			})
			if written != 1 {
				t.Errorf("%d answers, want 1", written)
			}
			b.await(6, 6)
			if hanging := b.hanging(); len(hanging) > 0 {
				t.Errorf("still described as open: %+v", hanging)
			}
			finish(t, b.addr)
			b.check([]string{"before", "lost", "kept"}, []string{"before", "kept"})
		})
	}
}

// hanging returns the producers with a transaction on the partition.
func (b *txnBroker) hanging() []kadm.DescribedProducer {
	b.t.Helper()
	var partitions kadm.TopicsSet
	partitions.Add(topic, 0)
	described, err := b.adm.DescribeProducers(b.t.Context(), partitions)
	if err != nil {
		b.t.Fatal(err)
	}
	var open []kadm.DescribedProducer
	described.EachProducer(func(p kadm.DescribedProducer) {
		if p.CurrentTxnStartOffset >= 0 {
			open = append(open, p)
		}
	})
	return open
}
