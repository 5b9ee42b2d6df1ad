package idempotence_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/idempotence-go/idempotence"
)

// A txnPartition is a partition with transactions. Its log is one record an offset,
// and the zero record where a marker lies. Everything in it is replicated at once.
type txnPartition struct {
	appendLock sync.Mutex // held from CheckBatch to CommitBatch, and over a marker
	producers  *idempotence.ProducerStateManager
	log        []txnRecord
}

type txnRecord struct {
	producerID int64
	value      string
	txn        bool
}

func (p *txnPartition) highWatermark() int64 { return int64(len(p.log)) }

// produce appends a batch of one record.
func (p *txnPartition) produce(b idempotence.Batch, value string) error {
	p.appendLock.Lock()
	defer p.appendLock.Unlock()
	res, err := p.producers.CheckBatch(b)
	if err != nil || res.Verdict == idempotence.Duplicate {
		return err
	}
	p.log = append(p.log, txnRecord{b.ProducerID, value, b.Transactional})
	return p.producers.CommitBatch(b, int64(len(p.log))-1)
}

// writeMarker appends the marker that a coordinator has sent.
func (p *txnPartition) writeMarker(k idempotence.Marker) error {
	p.appendLock.Lock()
	defer p.appendLock.Unlock()
	if err := p.producers.CheckMarker(k); err != nil {
		return err
	}
	p.log = append(p.log, txnRecord{})
	return p.producers.CommitMarker(k, int64(len(p.log))-1)
}

// fetchCommitted returns the records below the last stable offset, without those of
// aborted transactions. (A Kafka client is sent the records and the aborted
// transactions, and leaves out by itself.)
func (p *txnPartition) fetchCommitted(from int64) (values []string, next int64, err error) {
	next = p.producers.LastStableOffset(p.highWatermark())
	records := p.log[from:next]
	aborted, err := p.producers.AbortedTransactions(from, next)
	if err != nil {
		return nil, from, err
	}
	for i, r := range records {
		if r.value != "" && !isAborted(aborted, r, from+int64(i)) {
			values = append(values, r.value)
		}
	}
	return values, next, nil
}

func isAborted(aborted []idempotence.AbortedTransaction, r txnRecord, offset int64) bool {
	for _, a := range aborted {
		if r.txn && r.producerID == a.ProducerID && a.FirstOffset <= offset && offset < a.LastOffset {
			return true
		}
	}
	return false
}

// Two producers, each in a transaction, and a third in none. A reader of committed
// records waits for the first transaction that is open, and is never shown what was
// aborted.
func Example_transactions() {
	p := &txnPartition{producers: idempotence.New(idempotence.Config{Contiguous: true})}
	read, next := "", int64(0)
	show := func(what string, err error) {
		if err != nil {
			fmt.Println(what, "->", err)
			return
		}
		values, to, err := p.fetchCommitted(next)
		if err != nil {
			fmt.Println(err)
		}
		read, next = strings.Join(values, " "), to
		fmt.Printf("%-24s -> the reader gets [%s] and waits at %d\n", what, read, next)
	}
	inTxn := func(pid int64, seq int32) idempotence.Batch {
		return idempotence.Batch{ProducerID: pid, BaseSequence: seq, Count: 1, Transactional: true}
	}

	show("31 writes paid", p.produce(inTxn(31, 0), "paid"))
	show("32 writes shipped", p.produce(inTxn(32, 0), "shipped"))
	show("33 writes logged-in", p.produce(idempotence.Batch{ProducerID: 33, Count: 1}, "logged-in"))
	show("32 aborts", p.writeMarker(idempotence.Marker{ProducerID: 32}))
	show("31 writes booked", p.produce(inTxn(31, 1), "booked"))
	show("31 commits", p.writeMarker(idempotence.Marker{ProducerID: 31, Commit: true}))
	show("32 writes shipped again", p.produce(inTxn(32, 1), "shipped"))
	show("32 commits", p.writeMarker(idempotence.Marker{ProducerID: 32, Commit: true}))

	// Output:
	// 31 writes paid           -> the reader gets [] and waits at 0
	// 32 writes shipped        -> the reader gets [] and waits at 0
	// 33 writes logged-in      -> the reader gets [] and waits at 0
	// 32 aborts                -> the reader gets [] and waits at 0
	// 31 writes booked         -> the reader gets [] and waits at 0
	// 31 commits               -> the reader gets [paid logged-in booked] and waits at 6
	// 32 writes shipped again  -> the reader gets [] and waits at 6
	// 32 commits               -> the reader gets [shipped] and waits at 8
}

// A client died inside a transaction, and its coordinator does not know the
// transaction any more. An administrator finds what holds readers back and aborts it.
// The marker has the transaction's own epoch, so its version is 1.
func ExampleProducerStateManager_OldestTransaction() {
	p := &txnPartition{producers: idempotence.New(idempotence.Config{Contiguous: true})}
	must := func(err error) {
		if err != nil {
			fmt.Println(err)
		}
	}
	must(p.produce(idempotence.Batch{ProducerID: 31, Epoch: 4, Count: 1, Transactional: true}, "lost"))
	must(p.produce(idempotence.Batch{ProducerID: 32, Count: 1}, "good"))
	fmt.Println("readers wait at", p.producers.LastStableOffset(p.highWatermark()))

	hanging, ok := p.producers.OldestTransaction()
	fmt.Println("open:", ok, "producer", hanging.ProducerID, "epoch", hanging.Epoch, "from offset", hanging.CurrentTxnFirstOffset)

	abort := idempotence.Marker{ProducerID: hanging.ProducerID, Epoch: hanging.Epoch, CoordinatorEpoch: max(hanging.CoordinatorEpoch, 0), Version: 1}
	old := abort
	old.Epoch--
	fmt.Println(p.producers.CheckMarker(old))
	must(p.writeMarker(abort))

	values, next, err := p.fetchCommitted(0)
	fmt.Println("readers get", values, "and wait at", next, err)

	// Output:
	// readers wait at 0
	// open: true producer 31 epoch 4 from offset 0
	// idempotence: fenced by a newer epoch: abort marker of producer 31 epoch 3 coordinator epoch 0: current epoch is 4
	// readers get [good] and wait at 3 <nil>
}

// A marker arrives while a batch of its transaction is in flight. It must not be
// refused, since a coordinator drops a marker that is, and it must not overtake the
// batch. It waits until the batch has settled and asks again.
func ExampleProducerStateManager_ReserveMarker() {
	m := idempotence.New(idempotence.Config{})
	batch, _, err := m.Reserve(idempotence.Batch{ProducerID: 31, Count: 3, Transactional: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	commit := idempotence.Marker{ProducerID: 31, Commit: true}
	_, err = m.ReserveMarker(commit)
	var inFlight *idempotence.InFlightError
	if !errors.As(err, &inFlight) {
		fmt.Println("not expected:", err)
		return
	}
	fmt.Printf("the marker waits for sequences %d to %d\n", inFlight.FirstSequence, inFlight.LastSequence)

	go func() { // the batch is replicated
		if err := batch.Commit(0); err != nil {
			fmt.Println(err)
		}
	}()
	<-inFlight.Done()

	marker, err := m.ReserveMarker(commit)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, _, err = m.Reserve(idempotence.Batch{ProducerID: 31, BaseSequence: 3, Count: 1, Transactional: true})
	fmt.Println("the next batch waits for the marker:", errors.Is(err, idempotence.ErrInFlight))
	fmt.Println("last stable offset", m.LastStableOffset(3), "while the marker is in flight")
	if err := marker.Commit(3); err != nil {
		fmt.Println(err)
	}
	fmt.Println("and", m.LastStableOffset(4), "once it is replicated")

	// Output:
	// the marker waits for sequences 0 to 2
	// the next batch waits for the marker: true
	// last stable offset 0 while the marker is in flight
	// and 4 once it is replicated
}
