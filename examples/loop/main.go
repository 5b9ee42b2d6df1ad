// Command loop is the first loop of package idempotence in a complete program: a
// partition with a log in memory, which checks a batch, appends it and commits
// it under one lock, and recognises retries also after a restart.
package main

import (
	"bytes"
	"fmt"
	"log"
	"sync"

	"github.com/idempotence-go/idempotence"
)

// An entry is a batch in the log, with the offset of its first record.
type entry struct {
	batch      idempotence.Batch
	baseOffset int64
	records    []string
}

// A partition is a log and the state of its producers.
type partition struct {
	appendLock sync.Mutex // held from Check to Commit
	producers  *idempotence.ProducerStateManager
	log        []entry
	endOffset  int64
}

// produce accepts a batch once. A retry gets the offset of the first copy.
func (p *partition) produce(b idempotence.Batch, records ...string) (idempotence.Result, error) {
	p.appendLock.Lock()
	defer p.appendLock.Unlock()

	result, err := p.producers.CheckBatch(b)
	if err != nil || result.Verdict == idempotence.Duplicate {
		return result, err
	}
	// An append that fails returns here, without a Commit: nothing is remembered
	// of the batch, and the retry is appended.
	result.BaseOffset = p.endOffset
	p.log = append(p.log, entry{b, p.endOffset, records})
	p.endOffset += int64(len(records))
	return result, p.producers.CommitBatch(b, result.BaseOffset)
}

// snapshot returns the state of the producers as bytes to keep in a file.
func (p *partition) snapshot() ([]byte, error) {
	var file bytes.Buffer
	_, err := p.producers.Snapshot().WriteTo(&file)
	return file.Bytes(), err
}

// reopen returns a partition with the same log. It takes the state of the
// producers from a snapshot and from what the log holds behind it.
func reopen(entries []entry, snapshot []byte) (*partition, error) {
	p := &partition{producers: idempotence.New(idempotence.Config{Contiguous: true}), log: entries}
	if err := p.producers.Restore(bytes.NewReader(snapshot)); err != nil {
		return nil, err
	}
	from := p.producers.EndOffset()
	for _, e := range entries {
		p.endOffset = e.baseOffset + int64(len(e.records))
		if p.endOffset <= from {
			continue // the snapshot knows it
		}
		fmt.Printf("replayed at offset %d: %v\n", e.baseOffset, e.records)
		if err := p.producers.Replay(e.batch, e.baseOffset); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// send produces a batch and prints what its producer is answered.
func (p *partition) send(what string, pid int64, epoch int16, baseSequence int32, records ...string) {
	b := idempotence.Batch{ProducerID: pid, Epoch: epoch, BaseSequence: baseSequence, Count: int32(len(records))}
	result, err := p.produce(b, records...)
	if err != nil {
		fmt.Printf("%-26s code %d: %v\n", what, idempotence.KafkaErrorCode(err), err)
		return
	}
	fmt.Printf("%-26s %v, offset %d\n", what, result.Verdict, result.BaseOffset)
}

func main() {
	p := &partition{producers: idempotence.New(idempotence.Config{Contiguous: true})}
	p.send("first batch:", 31, 0, 0, "a", "b", "c")
	p.send("next batch, answer lost:", 31, 0, 3, "d", "e")
	p.send("its retry:", 31, 0, 3, "d", "e")
	p.send("a gap, 5 and 6 missing:", 31, 0, 7, "h")
	p.send("another producer:", 32, 0, 0, "x")

	snapshot, err := p.snapshot()
	if err != nil {
		log.Fatal(err)
	}
	p.send("a new epoch:", 31, 1, 0, "f", "g")
	p.send("the producer it replaced:", 31, 0, 5, "f")

	fmt.Println("--- restart")
	p, err = reopen(p.log, snapshot)
	if err != nil {
		log.Fatal(err)
	}
	p.send("known from the snapshot:", 32, 0, 0, "x")
	p.send("known from the replay:", 31, 1, 0, "f", "g")
	p.send("the next batch:", 31, 1, 2, "h")
}
