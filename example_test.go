package idempotence_test

import (
	"errors"
	"fmt"
	"sync"

	"github.com/idempotence-go/idempotence"
)

// partition is what a broker keeps for each partition.
type partition struct {
	appendLock sync.Mutex // held from Check to Commit
	producers  *idempotence.ProducerStateManager
	log        log
}

func newPartition() *partition {
	return &partition{producers: idempotence.New(idempotence.Config{Contiguous: true})}
}

// produce is the loop: check, append, commit, answer.
func (p *partition) produce(b idempotence.Batch, records ...string) (baseOffset int64, err error) {
	p.appendLock.Lock()
	defer p.appendLock.Unlock()

	res, err := p.producers.CheckBatch(b)
	if err != nil {
		return noOffset, err // refused; nothing has changed
	}
	if res.Verdict == idempotence.Duplicate {
		return res.BaseOffset, nil // in the log already; answer as the first time
	}
	baseOffset, err = p.log.append(records)
	if err != nil {
		return noOffset, err // nothing is remembered; the producer may retry
	}
	if err := p.producers.CommitBatch(b, baseOffset); err != nil {
		return noOffset, err // impossible while the lock is held; see ExampleBatchError
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

// errorCode returns the code of the answer. The library knows the code of a
// refusal. A failure of the broker's own needs one that makes the producer retry.
func errorCode(err error) int16 {
	const kafkaStorageError = 56
	if errors.Is(err, errDiskFull) {
		return kafkaStorageError
	}
	return idempotence.KafkaErrorCode(err)
}

// The whole loop. A producer loses an acknowledgement and its broker runs out of
// space, so it sends batches again, and each record is in the log once.
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
	send(3, "d", "e") // a retry, since the acknowledgement was lost

	p.log.full = true
	send(5, "f") // not appended, so not remembered
	p.log.full = false
	send(5, "f")

	send(7, "h") // sequence 6, "g", is missing
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
