package idempotence_test

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"github.com/idempotence-go/idempotence"
)

// These examples belong to MIGRATING.md: a broker that has kept the state of its
// producers itself goes over to this package.

// oldProducers is what such a broker may have kept for a partition: a few batches
// of each producer, oldest first.
type oldProducers map[int64]*oldProducer

type oldProducer struct {
	epoch   int16
	batches []oldBatch
}

type oldBatch struct {
	first, last int32 // sequences
	baseOffset  int64
}

// placed is a batch with its place in the log.
type placed struct {
	idempotence.Batch
	baseOffset int64
}

// inLogOrder returns every batch that is remembered, in the order of the log.
func (old oldProducers) inLogOrder() []placed {
	var all []placed
	for pid, p := range old {
		for _, b := range p.batches {
			all = append(all, placed{idempotence.Batch{
				ProducerID:   pid,
				Epoch:        p.epoch,
				BaseSequence: b.first,
				Count:        (b.last-b.first)&(1<<31-1) + 1, // also where it passes 2147483647
			}, b.baseOffset})
		}
	}
	slices.SortFunc(all, func(a, b placed) int { return cmp.Compare(a.baseOffset, b.baseOffset) })
	return all
}

// State that was kept in another form is replayed into a manager, and its
// snapshot is what the partition then starts from. So a retry of a batch that the
// old code accepted is recognised by the new.
func Example_migrating() {
	old := oldProducers{
		31: {epoch: 2, batches: []oldBatch{{2147483646, 0, 70}, {1, 4, 75}}},
		32: {epoch: 0, batches: []oldBatch{{0, 1, 73}}},
	}
	const logEnd = 79

	imported := idempotence.New(idempotence.Config{}) // not Contiguous: most of the log is left out
	for _, b := range old.inLogOrder() {
		if err := imported.Replay(b.Batch, b.baseOffset); err != nil {
			fmt.Println(err)
		}
	}
	imported.Advance(logEnd) // what else is in the log is known to be there
	var file bytes.Buffer    // or SnapshotDir.Save
	if _, err := imported.Snapshot().WriteTo(&file); err != nil {
		fmt.Println(err)
	}

	producers := idempotence.New(idempotence.Config{Contiguous: true}) // from now on
	if err := producers.Restore(&file); err != nil {
		fmt.Println(err)
	}
	fmt.Println(producers.Len(), "producers, log end offset", producers.EndOffset())
	retry, err := producers.Check(31, 2, 2147483646, 3)
	fmt.Println(retry.Verdict, retry.BaseOffset, err)
	next, err := producers.Check(32, 0, 2, 1)
	fmt.Println(next.Verdict, err)
	_, err = producers.Check(32, 0, 3, 1)
	fmt.Println(err)
	// Output:
	// 2 producers, log end offset 79
	// Duplicate 70 <nil>
	// Append <nil>
	// idempotence: out of order sequence: producer 32 epoch 0 sequence 3 count 1: expected sequence 2 in epoch 0
}

// accept is the old code. It remembers the last sequence of each producer, takes
// what does not lie behind it for a retry, and appends the rest.
func (old oldProducers) accept(b idempotence.Batch) idempotence.Verdict {
	newest := &old[b.ProducerID].batches[0]
	if b.BaseSequence <= newest.last {
		return idempotence.Duplicate
	}
	newest.last = b.BaseSequence + b.Count - 1
	return idempotence.Append
}

// Before the old code goes, a manager is asked beside it and told what was
// appended. Check changes nothing and Replay judges nothing, so the manager
// follows the log also where it would have decided otherwise.
func Example_migratingShadow() {
	old := oldProducers{31: {batches: []oldBatch{{0, 2, 0}}}}
	producers := idempotence.New(idempotence.Config{Contiguous: true})
	if err := producers.Replay(idempotence.Batch{ProducerID: 31, Count: 3}, 0); err != nil {
		fmt.Println(err)
	}

	for _, b := range []idempotence.Batch{
		{ProducerID: 31, BaseSequence: 0, Count: 3}, // a retry
		{ProducerID: 31, BaseSequence: 2, Count: 2}, // a retry, and a record that is new
		{ProducerID: 31, BaseSequence: 5, Count: 1}, // 3 and 4 are missing
	} {
		result, err := producers.CheckBatch(b)
		verdict := old.accept(b)
		if verdict != result.Verdict {
			fmt.Printf("%v by the old code, by the new: %v\n", verdict, err)
		}
		if verdict == idempotence.Append {
			if err := producers.Replay(b, producers.EndOffset()); err != nil {
				fmt.Println(err)
			}
		}
	}
	// Output:
	// Duplicate by the old code, by the new: idempotence: out of order sequence: producer 31 epoch 0 sequence 2 count 2: expected sequence 3 in epoch 0
	// Append by the old code, by the new: idempotence: out of order sequence: producer 31 epoch 0 sequence 5 count 1: expected sequence 3 in epoch 0
}
