package idempotence_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/idempotence-go/idempotence"
)

// These examples are the package put to work, from the loop that every broker
// writes to what it answers on each error. They share one toy broker: a
// partition is a log in memory and what is remembered of its producers.

// partition is what a broker keeps for each partition.
type partition struct {
	appendLock sync.Mutex // held from Check to Commit
	producers  *idempotence.ProducerStateManager
	log        log
}

func newPartition() *partition {
	return &partition{producers: idempotence.New(idempotence.Config{})}
}

// produce is the loop: check, append, commit, answer.
func (p *partition) produce(b idempotence.Batch, records ...string) (baseOffset int64, err error) {
	p.appendLock.Lock()
	defer p.appendLock.Unlock()

	res, err := p.producers.CheckBatch(b)
	if err != nil {
		return noOffset, err // refused: nothing has changed
	}
	if res.Verdict == idempotence.Duplicate {
		return res.BaseOffset, nil // in the log already: answer as the first time
	}
	baseOffset, err = p.log.append(records)
	if err != nil {
		return noOffset, err // nothing is remembered: the producer may try again
	}
	if err := p.producers.CommitBatch(b, baseOffset); err != nil {
		return noOffset, err // cannot be while the lock is held; see ExampleBatchError
	}
	return baseOffset, nil
}

// noOffset is the base offset in an answer that carries an error.
const noOffset = -1

// log is a partition's log. It can be told to fail, as disks do.
type log struct {
	records []string
	full    bool
}

var errDiskFull = errors.New("no space left on device")

func (l *log) append(records []string) (baseOffset int64, err error) {
	if l.full {
		return noOffset, errDiskFull
	}
	baseOffset = int64(len(l.records))
	l.records = append(l.records, records...)
	return baseOffset, nil
}

// errorCode is what goes on the wire. For a refusal the library knows the code;
// a failure of the broker's own needs one that makes the producer try again.
func errorCode(err error) int16 {
	const kafkaStorageError = 56
	if errors.Is(err, errDiskFull) {
		return kafkaStorageError
	}
	return idempotence.KafkaErrorCode(err)
}

// The whole loop: a producer whose acknowledgement is lost and whose broker runs
// out of space sends again and again, and each record is in the log once.
func Example() {
	p := newPartition()
	send := func(seq int32, records ...string) {
		offset, err := p.produce(idempotence.Batch{
			ProducerID:   31,
			BaseSequence: seq,
			Count:        int32(len(records)),
		}, records...)
		fmt.Printf("%v: offset %d, error code %d\n", records, offset, errorCode(err))
	}

	send(0, "a", "b", "c")
	send(3, "d", "e")
	send(3, "d", "e") // the acknowledgement was lost, so here it is again

	p.log.full = true
	send(5, "f") // not appended, so not remembered either
	p.log.full = false
	send(5, "f")

	send(7, "h") // "g", sequence 6, is missing: this must wait
	send(6, "g")
	send(7, "h")

	fmt.Println("the log:", p.log.records)

	// Output:
	// [a b c]: offset 0, error code 0
	// [d e]: offset 3, error code 0
	// [d e]: offset 3, error code 0
	// [f]: offset -1, error code 56
	// [f]: offset 5, error code 0
	// [h]: offset -1, error code 45
	// [g]: offset 6, error code 0
	// [h]: offset 7, error code 0
	// the log: [a b c d e f g h]
}

// One producer on one partition, batch by batch: what is answered, and what is
// remembered afterwards. The window shows the last five batches as
// first..last sequence @ base offset.
func Example_trace() {
	m := idempotence.New(idempotence.Config{})
	step := func(epoch int16, seq, count int32) {
		res, err := m.Check(31, epoch, seq, count)
		reply := fmt.Sprint("refused: ", err)
		switch res.Verdict {
		case idempotence.Append:
			base := m.EndOffset() // where this log, which has no other writer, ends
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

// remembered prints what a manager knows of a producer.
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

// A topic of three partitions has three managers: the same producer counts from
// 0 on each, and the offsets of one say nothing about another.
func Example_partitions() {
	topic := []*partition{newPartition(), newPartition(), newPartition()}
	send := func(partition int, seq int32, record string) {
		offset, err := topic[partition].produce(
			idempotence.Batch{ProducerID: 31, BaseSequence: seq, Count: 1}, record)
		fmt.Printf("partition %d, seq %d: offset %d, error code %d\n", partition, seq, offset, errorCode(err))
	}

	send(0, 0, "a")
	send(0, 1, "b")
	send(1, 0, "c") // 0 again, and in order: this is another partition
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

// A producer was taken for dead and replaced, and comes back: its successor, one
// epoch later, has fenced it.
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

// What to answer on each error. The switch is for a broker that wants to do
// something of its own about one of them; errorCode alone puts the right code on
// the wire.
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
			fmt.Println(code, "it is in the log: acknowledge")
		case errors.Is(err, idempotence.ErrUnknownProducer): // is an ErrOutOfOrderSequence too
			fmt.Println(code, "nothing is remembered of it: the producer takes a new epoch")
		case errors.Is(err, idempotence.ErrOutOfOrderSequence):
			fmt.Println(code, "something before it is missing: the producer sends that first")
		case errors.Is(err, idempotence.ErrFenced):
			fmt.Println(code, "another has taken over: the producer stops")
		case errors.Is(err, idempotence.ErrInvalidBatch):
			fmt.Println(code, "the client is broken: worth a warning in the log")
		}
	}

	// A failure of the broker's own is not the library's to name.
	p.log.full = true
	_, err := p.produce(idempotence.Batch{ProducerID: 31, Epoch: 2, BaseSequence: 1, Count: 1}, "b")
	fmt.Println(errorCode(err), "not appended: the producer tries again later")

	// Output:
	// 0 it is in the log: acknowledge
	// 45 something before it is missing: the producer sends that first
	// 59 nothing is remembered of it: the producer takes a new epoch
	// 47 another has taken over: the producer stops
	// 87 the client is broken: worth a warning in the log
	// 56 not appended: the producer tries again later
}

// A Commit that is refused says that the append lock was not held. Here two
// copies of a batch were both checked before either was committed, and now the
// log holds it twice: the second copy has to be cut off again.
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

// Three ways to treat a producer of which nothing is remembered and which does
// not start at 0: on a log that is new, and on one that has held records.
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

// Forgetting idle producers: one goroutine of the broker's own walks over all
// partitions at every tick. The library has no clock, so here the ticks are
// made by hand; a broker hands over the channel of a time.Ticker.
func ExampleProducerStateManager_Expire() {
	p := &partition{producers: idempotence.New(idempotence.Config{Expiration: time.Hour})}
	expireOn := func(ticks <-chan time.Time, partitions ...*partition) {
		for now := range ticks {
			for _, p := range partitions {
				forgotten := p.producers.Expire(now)
				fmt.Println(now.Format("15:04"), "forgotten:", forgotten, "known:", p.producers.Len())
			}
		}
	}

	if _, err := p.produce(idempotence.Batch{ProducerID: 31, BaseSequence: 0, Count: 1}, "a"); err != nil {
		fmt.Println("unexpected:", err)
	}
	noon := time.Date(2025, time.June, 1, 12, 0, 0, 0, time.UTC)
	ticks := make(chan time.Time, 3)
	ticks <- noon // the first tick after the batch: idle from here on
	ticks <- noon.Add(59 * time.Minute)
	ticks <- noon.Add(60 * time.Minute)
	close(ticks)
	expireOn(ticks, p)

	// Output:
	// 12:00 forgotten: 0 known: 1
	// 12:59 forgotten: 0 known: 1
	// 13:00 forgotten: 1 known: 0
}

// slowLog is a log whose appends finish later: they are queued in order, and a
// flush writes all of them or none.
type slowLog struct {
	records []string
	queue   []queued
}

type queued struct {
	records []string
	settle  func(baseOffset int64, err error)
}

func (l *slowLog) enqueue(settle func(int64, error), records ...string) {
	l.queue = append(l.queue, queued{records, settle})
}

// flush ends the appends in the queue, with the same error for all.
func (l *slowLog) flush(err error) {
	queue := l.queue
	l.queue = nil
	for _, q := range queue {
		base := int64(len(l.records))
		if err == nil {
			l.records = append(l.records, q.records...)
		}
		q.settle(base, err)
	}
}

// Appends that finish later: a batch takes its place when it is reserved, and is
// remembered when its append has succeeded. Meanwhile its successor is in order,
// and its retry has to wait.
func ExampleProducerStateManager_Reserve() {
	producers := idempotence.New(idempotence.Config{})
	var log slowLog

	produce := func(seq int32, records ...string) {
		b := idempotence.Batch{ProducerID: 31, BaseSequence: seq, Count: int32(len(records))}
		r, res, err := producers.Reserve(b) // the partition's lock is held from here
		switch {
		case err != nil:
			fmt.Printf("sequence %d: code %d, in flight: %t\n", seq, errorCode(err), errors.Is(err, idempotence.ErrInFlight))
			return
		case r == nil:
			fmt.Printf("sequence %d: %v of offset %d\n", seq, res.Verdict, res.BaseOffset)
			return
		}
		log.enqueue(func(base int64, err error) {
			if err != nil {
				fmt.Printf("sequence %d: append failed: %v\n", seq, r.Abort())
				return
			}
			fmt.Printf("sequence %d: offset %d, commit: %v\n", seq, base, r.Commit(base))
		}, records...) // to here
	}

	produce(0, "a", "b")
	produce(2, "c")
	produce(0, "a", "b") // a retry meets its first copy in flight
	log.flush(nil)
	produce(0, "a", "b") // and again

	produce(3, "d")
	produce(4, "e")
	log.flush(errDiskFull) // whoever is first takes the other along
	produce(4, "e")        // would leave a gap
	produce(3, "d")
	log.flush(nil)
	fmt.Println(log.records)
	// Output:
	// sequence 0: code 7, in flight: true
	// sequence 0: offset 0, commit: <nil>
	// sequence 2: offset 2, commit: <nil>
	// sequence 0: Duplicate of offset 0
	// sequence 3: append failed: <nil>
	// sequence 4: append failed: idempotence: reservation abandoned
	// sequence 4: code 45, in flight: false
	// sequence 3: offset 3, commit: <nil>
	// [a b c d]
}

// ReserveWait does the waiting: a retry that meets its first copy in flight is
// answered once it is known what became of that.
func ExampleProducerStateManager_ReserveWait() {
	producers := idempotence.New(idempotence.Config{})
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

// A restart: the state comes back from the newest snapshot, and what the log
// holds behind it is replayed. A retry of what was acknowledged before the crash
// is still a retry.
func ExampleProducerStateManager_Restore() {
	type appended struct {
		batch      idempotence.Batch
		baseOffset int64
	}
	var log []appended         // survives the crash
	var snapshot *bytes.Buffer // and so does this

	producers := idempotence.New(idempotence.Config{})
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
	snapshot = new(bytes.Buffer)
	if _, err := producers.Snapshot().WriteTo(snapshot); err != nil {
		fmt.Println(err)
	}
	produce(2) // after the snapshot; then the power fails

	producers = idempotence.New(idempotence.Config{})
	if err := producers.Restore(snapshot); err != nil {
		fmt.Println(err) // damaged: take an older one, or replay the whole log
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

// A snapshot that Apache Kafka wrote: named by the end offset it was taken at, it
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
