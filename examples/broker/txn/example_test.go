package txn_test

import (
	"fmt"
	"time"

	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// A sliceLog is a log in memory. One on disk appends to a file, and waits for a
// sync that it shares with other records.
type sliceLog struct{ bytes []byte }

func (l *sliceLog) Append(record []byte) (wait func() error) {
	l.bytes = append(l.bytes, record...)
	return func() error { return nil }
}

// A transaction of version 2, from the first request to the last marker, and
// what a restart finds.
func Example() {
	now := time.Now()
	log := new(sliceLog)
	recovery, err := txn.Recover(log.bytes)
	if err != nil {
		fmt.Println(err)
		return
	}
	c, err := txn.NewCoordinator(txn.Config{}, recovery, log)
	if err != nil {
		fmt.Println(err)
		return
	}

	p, err := c.InitProducerID(now, "app-1", txn.NoProducer, time.Minute)
	fmt.Println("InitProducerId:", p, err)

	// A Produce request adds its partition.
	partition := txn.Partition{Topic: "orders", Partition: 2}
	err = c.AddPartitionsToTxn(now, "app-1", p, 2, []txn.Partition{partition})
	fmt.Println("Produce:", err)

	consumed := []txn.Offset{{Partition: txn.Partition{Topic: "carts"}, Offset: 41, LeaderEpoch: -1}}
	err = c.TxnOffsetCommit(now, "app-1", p, 2, "checkout", consumed)
	fmt.Println("TxnOffsetCommit:", err)

	p, err = c.EndTxn(now, "app-1", p, 2, true)
	fmt.Println("EndTxn:", p, err)

	// The broker is killed before it has written the marker, and starts again.
	if recovery, err = txn.Recover(log.bytes); err != nil {
		fmt.Println(err)
		return
	}
	if c, err = txn.NewCoordinator(txn.Config{}, recovery, log); err != nil {
		fmt.Println(err)
		return
	}
	for _, m := range c.Markers() {
		fmt.Printf("marker for %s-%d: producer %d, epoch %d, coordinator epoch %d, commit %t\n",
			m.Partition.Topic, m.Partition.Partition, m.ProducerID, m.Epoch, m.CoordinatorEpoch, m.Commit)
		fmt.Println("MarkerDone:", c.MarkerDone(now, m, nil)) // the partition has it
	}
	d, _ := c.Describe("app-1")
	fmt.Println(d.State)
	for _, o := range c.OffsetFetch("checkout", nil, true) {
		fmt.Printf("%s-%d: %d\n", o.Committed.Partition.Topic, o.Committed.Partition.Partition, o.Committed.Offset)
	}
	// Output:
	// InitProducerId: {0 0} <nil>
	// Produce: <nil>
	// TxnOffsetCommit: <nil>
	// EndTxn: {0 1} <nil>
	// marker for orders-2: producer 0, epoch 1, coordinator epoch 2, commit true
	// MarkerDone: <nil>
	// CompleteCommit
	// carts-0: 41
}
