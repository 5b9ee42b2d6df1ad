package lesson

// This file puts answers into words.

import (
	"errors"
	"fmt"
	"math"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/idempotence-go/idempotence"
)

// A Kind is what an answer comes to. It is also the name of its colour on the
// page.
type Kind string

// The kinds of answers.
const (
	Append     Kind = "append"
	Duplicate  Kind = "duplicate"
	OutOfOrder Kind = "out-of-order"
	Unknown    Kind = "unknown-producer"
	Fenced     Kind = "fenced"
	InFlight   Kind = "in-flight"
	Refused    Kind = "refused" // for another reason
)

// A Batch is a batch as the page shows it. The producer id is a string, since a
// browser rounds numbers of that size.
type Batch struct {
	Producer int64 `json:"producer,string"`
	Epoch    int16 `json:"epoch"`
	First    int32 `json:"first"` // sequence
	Last     int32 `json:"last"`  // sequence
	Count    int32 `json:"count"`
}

// An Answer is the answer to a batch, in words.
type Answer struct {
	Batch  Batch  `json:"batch"`
	Kind   Kind   `json:"kind"`
	Label  string `json:"label"`
	Offset int64  `json:"offset"` // base offset; -1 with a refusal
	Code   int16  `json:"code"`   // of the Kafka protocol
	Name   string `json:"name"`   // of the code; empty for 0
	Words  string `json:"words"`  // the facts
}

// Next returns the sequence that follows s: after 2147483647 comes 0.
func Next(s int32) int32 { return (s + 1) & math.MaxInt32 }

// lastOf returns the last sequence of a batch.
func lastOf(b idempotence.Batch) int32 {
	return int32((int64(b.BaseSequence) + int64(max(b.Count, 1)) - 1) & math.MaxInt32)
}

// Explain puts the answer to a batch into words. err is nil unless the batch was
// refused; code is the one that its producer gets.
func Explain(b idempotence.Batch, res idempotence.Result, err error, code int16) Answer {
	a := Answer{
		Batch:  Batch{b.ProducerID, b.Epoch, b.BaseSequence, lastOf(b), b.Count},
		Offset: -1,
		Code:   code,
	}
	if err == nil {
		a.Offset = res.BaseOffset
		a.explainSuccess(b, res)
		return a
	}
	if k, ok := errors.AsType[*kerr.Error](kerr.ErrorForCode(code)); ok {
		a.Name = k.Message
	}
	a.explainRefusal(b, err)
	return a
}

func (a *Answer) explainSuccess(b idempotence.Batch, res idempotence.Result) {
	switch {
	case res.Verdict == idempotence.Duplicate:
		a.Kind, a.Label = Duplicate, "Duplicate"
		a.Words = fmt.Sprintf("%s already in the log at offset %d. Nothing is appended; the producer gets that offset.",
			isAre(b.Count, "This record is", "These records are"), res.BaseOffset)
	case b.ProducerID == idempotence.NoProducerID:
		a.Kind, a.Label = Append, "Append"
		a.Words = fmt.Sprintf("Appended at offset %d. The producer is not idempotent, so nothing is remembered.", res.BaseOffset)
	default:
		a.Kind, a.Label = Append, "Append"
		a.Words = fmt.Sprintf("%s appended at offset %d.", isAre(b.Count, "1 record", fmt.Sprint(b.Count, " records")), res.BaseOffset)
	}
}

func (a *Answer) explainRefusal(b idempotence.Batch, err error) {
	var facts idempotence.BatchError
	if e, ok := errors.AsType[*idempotence.BatchError](err); ok {
		facts = *e
	}
	wait, waits := errors.AsType[*idempotence.InFlightError](err)
	switch {
	case waits:
		a.Kind, a.Label = InFlight, "In flight"
		a.Words = fmt.Sprintf("Sequences %d to %d of epoch %d are still being appended. Until that has ended, this batch cannot be judged.",
			wait.FirstSequence, wait.LastSequence, wait.Epoch)
	case errors.Is(err, idempotence.ErrUnknownProducer):
		a.Kind, a.Label = Unknown, "Unknown producer"
		a.Words = fmt.Sprintf("Sequence %d came from a producer that is not known here. Batches before it may be missing.", b.BaseSequence)
	case errors.Is(err, idempotence.ErrFenced):
		a.Kind, a.Label = Fenced, "Fenced"
		a.Words = fmt.Sprintf("Epoch %d came; the current epoch is %d. A newer instance of the producer has taken over.", b.Epoch, facts.CurrentEpoch)
	case errors.Is(err, idempotence.ErrOutOfOrderSequence):
		a.Kind, a.Label = OutOfOrder, "Out of order"
		a.Words = outOfOrder(b, facts)
	default:
		a.Kind, a.Label = Refused, "Refused"
		a.Words = err.Error()
	}
}

func outOfOrder(b idempotence.Batch, facts idempotence.BatchError) string {
	came := fmt.Sprintf("Sequence %d came; %d was expected. ", b.BaseSequence, facts.Expected)
	ahead := (b.BaseSequence - facts.Expected) & math.MaxInt32
	switch {
	case facts.Expected < 0:
		return facts.Error()
	case facts.CurrentEpoch >= 0 && b.Epoch > facts.CurrentEpoch:
		return came + "A new epoch starts at 0."
	case ahead <= math.MaxInt32/2:
		return came + fmt.Sprintf("%s missing.", isAre(ahead, "1 record is", fmt.Sprint(ahead, " records are")))
	}
	return came + "It was passed before, and this is not a copy of one of the last five batches."
}

// isAre returns one or many, by n.
func isAre(n int32, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}
