package idempotence_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/idempotence-go/idempotence"
)

// These examples go on from the one in example_test.go, with the same toy broker.

// The trace of one producer on one partition: the answer to each batch, and what is
// remembered afterwards. The window shows the last five batches as first..last
// sequence @ base offset.
func Example_trace() {
	m := idempotence.New(idempotence.Config{Contiguous: true})
	step := func(epoch int16, seq, count int32) {
		res, err := m.Check(31, epoch, seq, count)
		reply := fmt.Sprint("refused: ", err)
		switch res.Verdict {
		case idempotence.Append:
			base := m.EndOffset() // this log has no other writer
			if err := m.Commit(31, epoch, seq, count, base); err != nil {
				fmt.Println("commit:", err)
			}
			reply = fmt.Sprint("append, base ", base)
		case idempotence.Duplicate:
			reply = fmt.Sprint("duplicate, base ", res.BaseOffset)
		}
		fmt.Printf("epoch %d, seq %d, count %d\n  %s\n  %s\n", epoch, seq, count, reply, remembered(m, 31))
	}

	step(0, 0, 3)
	step(0, 3, 2)
	step(0, 3, 2)
	step(0, 7, 1)
	step(1, 7, 1)
	step(1, 0, 1)
	step(0, 5, 1)

	// Output:
	// epoch 0, seq 0, count 3
	//   append, base 0
	//   epoch 0: [0..2 @ 0]
	// epoch 0, seq 3, count 2
	//   append, base 3
	//   epoch 0: [0..2 @ 0] [3..4 @ 3]
	// epoch 0, seq 3, count 2
	//   duplicate, base 3
	//   epoch 0: [0..2 @ 0] [3..4 @ 3]
	// epoch 0, seq 7, count 1
	//   refused: idempotence: out of order sequence: producer 31 epoch 0 sequence 7 count 1: expected sequence 5 in epoch 0
	//   epoch 0: [0..2 @ 0] [3..4 @ 3]
	// epoch 1, seq 7, count 1
	//   refused: idempotence: out of order sequence: producer 31 epoch 1 sequence 7 count 1: expected sequence 0 in epoch 0
	//   epoch 0: [0..2 @ 0] [3..4 @ 3]
	// epoch 1, seq 0, count 1
	//   append, base 5
	//   epoch 1: [0..0 @ 5]
	// epoch 0, seq 5, count 1
	//   refused: idempotence: fenced by a newer epoch: producer 31 epoch 0 sequence 5 count 1: current epoch is 1
	//   epoch 1: [0..0 @ 5]
}

// remembered returns what a manager knows of a producer, as text.
func remembered(m *idempotence.ProducerStateManager, pid int64) string {
	state, ok := m.Producer(pid)
	if !ok {
		return "unknown"
	}
	var s strings.Builder
	fmt.Fprintf(&s, "epoch %d:", state.Epoch)
	for _, b := range state.Window {
		fmt.Fprintf(&s, " [%d..%d @ %d]", b.FirstSequence, b.LastSequence, b.BaseOffset)
	}
	return s.String()
}

// A topic of three partitions has three managers. A producer counts from 0 on each.
func Example_partitions() {
	topic := []*partition{newPartition(), newPartition(), newPartition()}
	send := func(partition int, seq int32, record string) {
		offset, err := topic[partition].produce(
			idempotence.Batch{ProducerID: 31, BaseSequence: seq, Count: 1}, record)
		fmt.Printf("partition %d, seq %d: offset %d, error code %d\n", partition, seq, offset, errorCode(err))
	}

	send(0, 0, "a")
	send(0, 1, "b")
	send(1, 0, "c") // in order: sequences count per partition
	send(0, 1, "b") // a retry on partition 0
	send(2, 1, "d") // partition 2 has not seen this producer's sequence 0

	for i, p := range topic {
		fmt.Printf("partition %d: %v, producers known: %d\n", i, p.log.records, p.producers.Len())
	}

	// Output:
	// partition 0, seq 0: offset 0, error code 0
	// partition 0, seq 1: offset 1, error code 0
	// partition 1, seq 0: offset 0, error code 0
	// partition 0, seq 1: offset 1, error code 0
	// partition 2, seq 1: offset -1, error code 59
	// partition 0: [a b], producers known: 1
	// partition 1: [c], producers known: 1
	// partition 2: [], producers known: 0
}

// A producer that was replaced comes back. Its successor has a newer epoch, so it is
// fenced.
func Example_fenced() {
	p := newPartition()
	send := func(epoch int16, seq int32, record string) {
		b := idempotence.Batch{ProducerID: 31, Epoch: epoch, BaseSequence: seq, Count: 1}
		if _, err := p.produce(b, record); errors.Is(err, idempotence.ErrFenced) {
			fmt.Println("error code", errorCode(err), err)
		}
	}

	send(0, 0, "from the first")
	send(1, 0, "from its successor") // a new epoch starts at 0
	send(0, 1, "from the first again")
	send(1, 1, "from its successor again")

	for _, record := range p.log.records {
		fmt.Println(record)
	}

	// Output:
	// error code 47 idempotence: fenced by a newer epoch: producer 31 epoch 0 sequence 1 count 1: current epoch is 1
	// from the first
	// from its successor
	// from its successor again
}

// The answer to each error. errorCode alone gives the right code. The switch is for
// a broker that wants to log or count some of them.
func ExampleKafkaErrorCode() {
	p := newPartition()
	if _, err := p.produce(idempotence.Batch{ProducerID: 31, Epoch: 2, BaseSequence: 0, Count: 1}, "a"); err != nil {
		fmt.Println("unexpected:", err)
	}

	for _, b := range []idempotence.Batch{
		{ProducerID: 31, Epoch: 2, BaseSequence: 0, Count: 1}, // a retry
		{ProducerID: 31, Epoch: 2, BaseSequence: 5, Count: 1}, // 1 to 4 are missing
		{ProducerID: 32, Epoch: 0, BaseSequence: 5, Count: 1}, // never seen
		{ProducerID: 31, Epoch: 1, BaseSequence: 1, Count: 1}, // replaced
		{ProducerID: 31, Epoch: 2, BaseSequence: 1, Count: 0}, // malformed
	} {
		_, err := p.produce(b, "b")
		code := errorCode(err)
		switch {
		case err == nil:
			fmt.Println(code, "in the log: acknowledge")
		case errors.Is(err, idempotence.ErrUnknownProducer): // is an ErrOutOfOrderSequence too
			fmt.Println(code, "unknown: most clients start again in a new epoch")
		case errors.Is(err, idempotence.ErrOutOfOrderSequence):
			fmt.Println(code, "a batch before it is missing")
		case errors.Is(err, idempotence.ErrFenced):
			fmt.Println(code, "another producer has taken over")
		case errors.Is(err, idempotence.ErrInvalidBatch):
			fmt.Println(code, "the client has a fault: log a warning")
		}
	}

	// The library has no code for a failure of the broker's own.
	p.log.full = true
	_, err := p.produce(idempotence.Batch{ProducerID: 31, Epoch: 2, BaseSequence: 1, Count: 1}, "b")
	fmt.Println(errorCode(err), "not appended: the producer retries")

	// Output:
	// 0 in the log: acknowledge
	// 45 a batch before it is missing
	// 59 unknown: most clients start again in a new epoch
	// 47 another producer has taken over
	// 87 the client has a fault: log a warning
	// 56 not appended: the producer retries
}

// A refused Commit. The append lock was not held, so two copies of a batch were
// checked before either was committed, and the log holds both. The second copy is
// cut off again.
func ExampleBatchError() {
	p := newPartition()
	b := idempotence.Batch{ProducerID: 31, BaseSequence: 0, Count: 1}

	for range 2 {
		if res, err := p.producers.CheckBatch(b); err != nil || res.Verdict != idempotence.Append {
			fmt.Println("unexpected:", res, err)
		}
	}
	for range 2 {
		base, _ := p.log.append([]string{"a"})
		err := p.producers.CommitBatch(b, base)
		var refused *idempotence.BatchError
		if errors.As(err, &refused) {
			fmt.Println(err)
			p.log.records = p.log.records[:refused.BaseOffset]
			fmt.Println("acknowledge with offset", refused.FirstCopy)
		}
	}
	fmt.Println("the log:", p.log.records)

	// Output:
	// idempotence: already committed: producer 31 epoch 0 sequence 0 count 1: appended at offset 1, first copy at offset 0
	// acknowledge with offset 0
	// the log: [a]
}

// The three policies for an unknown producer that does not start at 0: on a new log,
// and on one that has held records.
func ExampleUnknownProducerPolicy() {
	for _, policy := range []idempotence.UnknownProducerPolicy{
		idempotence.StartAtZero,
		idempotence.AcceptAny,
		idempotence.StartAtZeroOnNewLog,
	} {
		m := idempotence.New(idempotence.Config{UnknownProducer: policy})
		_, onNew := m.Check(31, 0, 7, 1)
		m.Advance(100) // records without a producer id were appended
		_, onOld := m.Check(31, 0, 7, 1)
		fmt.Printf("%v: error code %d on a new log, %d later\n",
			policy, idempotence.KafkaErrorCode(onNew), idempotence.KafkaErrorCode(onOld))
	}

	// Output:
	// StartAtZero: error code 59 on a new log, 59 later
	// AcceptAny: error code 0 on a new log, 0 later
	// StartAtZeroOnNewLog: error code 45 on a new log, 0 later
}

// Forgetting idle producers. A goroutine of the broker calls Expire for each
// partition at every tick, under the append lock. Here the ticks are made by hand; a
// broker uses the channel of a time.Ticker.
func ExampleProducerStateManager_Expire() {
	p := &partition{producers: idempotence.New(idempotence.Config{Contiguous: true, Expiration: time.Hour})}
	expireOn := func(ticks <-chan time.Time, partitions ...*partition) {
		for now := range ticks {
			for _, p := range partitions {
				p.appendLock.Lock()
				forgotten := p.producers.Expire(now)
				p.appendLock.Unlock()
				fmt.Println(now.Format("15:04"), "forgotten:", forgotten, "known:", p.producers.Len())
			}
		}
	}

	if _, err := p.produce(idempotence.Batch{ProducerID: 31, BaseSequence: 0, Count: 1}, "a"); err != nil {
		fmt.Println("unexpected:", err)
	}
	noon := time.Date(2025, time.June, 1, 12, 0, 0, 0, time.UTC)
	ticks := make(chan time.Time, 3)
	ticks <- noon // the first tick after the batch: the producer is idle from here on
	ticks <- noon.Add(59 * time.Minute)
	ticks <- noon.Add(60 * time.Minute)
	close(ticks)
	expireOn(ticks, p)

	// Output:
	// 12:00 forgotten: 0 known: 1
	// 12:59 forgotten: 0 known: 1
	// 13:00 forgotten: 1 known: 0
}

// ReserveWait waits: a retry that meets its first copy in flight is answered when
// that has settled.
func ExampleProducerStateManager_ReserveWait() {
	producers := idempotence.New(idempotence.Config{Contiguous: true})
	producers.Advance(40) // records without a producer id
	b := idempotence.Batch{ProducerID: 31, Count: 1}
	first, _, _ := producers.Reserve(b)

	answer := make(chan string)
	go func() {
		_, res, err := producers.ReserveWait(context.Background(), b)
		answer <- fmt.Sprint(res.Verdict, " ", res.BaseOffset, " ", err)
	}()
	if err := first.Commit(40); err != nil {
		fmt.Println(err)
	}
	fmt.Println(<-answer)
	// Output:
	// Duplicate 40 <nil>
}

// A restart. The state is restored from a snapshot, and what the log holds behind it
// is replayed. A retry of a batch from before the crash is still recognised.
func ExampleProducerStateManager_Restore() {
	type appended struct {
		batch      idempotence.Batch
		baseOffset int64
	}
	var log []appended        // survives the crash
	var snapshot bytes.Buffer // and so does this

	producers := idempotence.New(idempotence.Config{Contiguous: true})
	produce := func(seq int32) {
		b := idempotence.Batch{ProducerID: 31, BaseSequence: seq, Count: 1}
		base := int64(len(log))
		log = append(log, appended{b, base})
		if err := producers.CommitBatch(b, base); err != nil {
			fmt.Println(err)
		}
	}
	produce(0)
	produce(1)
	if _, err := producers.Snapshot().WriteTo(&snapshot); err != nil {
		fmt.Println(err)
	}
	produce(2) // after the snapshot; then the power fails

	producers = idempotence.New(idempotence.Config{Contiguous: true})
	if err := producers.Restore(&snapshot); err != nil {
		fmt.Println(err) // damaged: restore an older one, or replay the whole log
	}
	fmt.Println("restored up to offset", producers.EndOffset())
	for _, a := range log[producers.EndOffset():] {
		if err := producers.Replay(a.batch, a.baseOffset); err != nil {
			fmt.Println(err)
		}
	}
	for seq := range int32(4) {
		res, err := producers.Check(31, 0, seq, 1)
		fmt.Println("sequence", seq, res.Verdict, res.BaseOffset, err)
	}
	// Output:
	// restored up to offset 2
	// sequence 0 Duplicate 0 <nil>
	// sequence 1 Duplicate 1 <nil>
	// sequence 2 Duplicate 2 <nil>
	// sequence 3 Append 0 <nil>
}

// A snapshot that Apache Kafka wrote. Its file name is the end offset of the log. It
// holds the last batch of each producer.
func ExampleProducerStateManager_RestoreKafka() {
	f, err := os.Open("testdata/kafka-snapshots/three.snapshot")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer f.Close()

	producers := idempotence.New(idempotence.Config{})
	if err := producers.RestoreKafka(f, 10); err != nil {
		fmt.Println(err)
		return
	}
	for p := range producers.Producers() {
		fmt.Println("producer", p.ProducerID, "epoch", p.Epoch, p.Window, "in transaction:", p.CurrentTxnFirstOffset >= 0)
	}
	// Output:
	// producer 5 epoch 2 [] in transaction: false
	// producer 31 epoch 0 [{3 4 3}] in transaction: false
	// producer 4000000001 epoch 7 [{0 3 5}] in transaction: true
}

// Two transactions, one of them aborted, and what a reader of committed records is
// given: the records below the last stable offset, and the aborted ranges to leave
// out.
func ExampleProducerStateManager_LastStableOffset() {
	m := idempotence.New(idempotence.Config{Contiguous: true})
	write := func(pid int64, seq int32) {
		b := idempotence.Batch{ProducerID: pid, BaseSequence: seq, Count: 2, Transactional: true}
		if err := m.CommitBatch(b, m.EndOffset()); err != nil {
			fmt.Println(err)
		}
	}
	end := func(pid int64, commit bool) {
		k := idempotence.Marker{ProducerID: pid, Commit: commit}
		if err := m.CommitMarker(k, m.EndOffset()); err != nil {
			fmt.Println(err)
		}
	}
	read := func() {
		to := m.LastStableOffset(m.EndOffset()) // everything is replicated
		aborted, err := m.AbortedTransactions(0, to)
		fmt.Println("readable up to", to, "aborted", aborted, err)
	}

	write(31, 0) // at 0
	write(32, 0) // at 2
	read()
	end(31, false) // at 4
	read()
	end(32, true) // at 5
	read()

	// Output:
	// readable up to 0 aborted [] <nil>
	// readable up to 2 aborted [{31 0 4}] <nil>
	// readable up to 6 aborted [{31 0 4}] <nil>
}

// A replicated state machine calls Apply for each command of its log, on every
// replica. What clients send is proposed as it comes, retries included, and the
// replicas agree on the answers.
func ExampleProducerStateManager_Apply() {
	commands := []idempotence.Batch{
		{ProducerID: 31, BaseSequence: 0, Count: 3},
		{ProducerID: 31, BaseSequence: 3, Count: 2},
		{ProducerID: 31, BaseSequence: 0, Count: 3}, // a retry to another leader
	}
	for replica := range 2 {
		m := idempotence.New(idempotence.Config{Contiguous: true})
		for _, b := range commands {
			base := m.EndOffset()
			res, err := m.Apply(b, base)
			if res.Verdict == idempotence.Append {
				res.BaseOffset = base // append the records here
			}
			fmt.Println("replica", replica, res.Verdict, res.BaseOffset, err)
		}
	}
	// Output:
	// replica 0 Append 0 <nil>
	// replica 0 Append 3 <nil>
	// replica 0 Duplicate 0 <nil>
	// replica 1 Append 0 <nil>
	// replica 1 Append 3 <nil>
	// replica 1 Duplicate 0 <nil>
}
