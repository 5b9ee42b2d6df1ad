package idempotence

import (
	"errors"
	"fmt"
)

// This file is what the library says when it refuses: one sentinel for each
// reason, one typed error with the facts, and the Kafka code to put on the
// wire. Test for a reason with errors.Is, and reach the facts with errors.As
// and [*BatchError].

// reason is the type of every sentinel of the package: its text, the code that
// tells a Kafka client the same, and the wider reason it is a case of, if any.
type reason struct {
	text  string
	code  int16
	wider error
}

func (r *reason) Error() string { return "idempotence: " + r.text }
func (r *reason) Unwrap() error { return r.wider }

// MarshalText keeps the reason in the JSON of a BatchError: encoding/json calls it
// for the field Err.
func (r *reason) MarshalText() ([]byte, error) { return []byte(r.Error()), nil }

// Error codes of the Kafka protocol. The names are Kafka's own
// (org.apache.kafka.common.protocol.Errors).
const (
	codeUnknownServerError   int16 = -1
	codeNone                 int16 = 0
	codeCorruptMessage       int16 = 2
	codeNotLeaderOrFollower  int16 = 6
	codeRequestTimedOut      int16 = 7
	codeOutOfOrderSequence   int16 = 45
	codeDuplicateSequence    int16 = 46
	codeInvalidProducerEpoch int16 = 47
	codeKafkaStorageError    int16 = 56
	codeUnknownProducerID    int16 = 59
	codeInvalidRecord        int16 = 87
)

// Returned when a batch is judged: by Check and CheckBatch, by Commit and
// CommitBatch, which judge again, and by Reserve. None of them changes any
// state.
var (
	// ErrOutOfOrderSequence: the batch is neither the next one nor a retry of
	// a remembered one. It is a gap, an overlap, a retry split or merged
	// differently, a range that has left the window, or a newer epoch that
	// does not start at 0. Of an unknown producer, it is not the batch that the
	// policy asks for, or not the failed one that has to come again first (see
	// [Reservation.Abort]). The broker must not append it; it answers 45
	// OUT_OF_ORDER_SEQUENCE_NUMBER, and the producer either sends what is
	// missing first or starts a new epoch.
	// (KIP-98; Kafka's ProducerAppendInfo.checkSequence.)
	ErrOutOfOrderSequence error = &reason{text: "out of order sequence", code: codeOutOfOrderSequence}

	// ErrUnknownProducer: nothing is remembered of the producer, and its batch
	// does not start at 0, so whether something is missing before it cannot be
	// known. Only the policy StartAtZero returns it. The broker must not
	// append; it answers 59 UNKNOWN_PRODUCER_ID, and the producer starts a new
	// epoch at 0 (KIP-360). It is also an ErrOutOfOrderSequence, for a caller
	// that does not tell the two apart.
	ErrUnknownProducer error = &reason{text: "unknown producer", code: codeUnknownProducerID, wider: ErrOutOfOrderSequence}

	// ErrFenced: the batch's epoch is older than the producer's current one.
	// A newer instance of the producer has taken over, and this one must stop.
	// The broker answers 47 INVALID_PRODUCER_EPOCH.
	// (KIP-98; Kafka's ProducerAppendInfo.checkProducerEpoch.)
	ErrFenced error = &reason{text: "fenced by a newer epoch", code: codeInvalidProducerEpoch}

	// ErrInvalidBatch: the batch is malformed: a producer id below -1, a
	// negative epoch or base sequence, or a count below 1. No correct client
	// sends it and no retry mends it. The broker answers 87 INVALID_RECORD. A
	// replay returns it too, for what cannot stand in a log.
	ErrInvalidBatch error = &reason{text: "malformed batch", code: codeInvalidRecord}
)

// Returned when an appended batch is recorded: by Commit and CommitBatch, and
// ErrOffsetOrder also by the Commit of a Reservation and by a replay. From Commit
// each says that the log holds a batch which should not be there: the append
// lock was not held from Check to Commit, or Check was skipped. The state is
// unchanged, but the log and the state have parted; the broker cuts the batch
// off again, or rebuilds the state from the log.
var (
	// ErrDuplicateSequence: the batch that was appended is a retry of one that
	// is already remembered, so it is now in the log twice, or Commit was
	// called twice for it. The broker answers the producer with the offset of
	// the first copy, in [BatchError].FirstOffset, once it has cut the second
	// off; without cutting, 46 DUPLICATE_SEQUENCE_NUMBER. It is also an
	// ErrOutOfOrderSequence: to Commit, only the next sequence is in order.
	ErrDuplicateSequence error = &reason{text: "already committed", code: codeDuplicateSequence, wider: ErrOutOfOrderSequence}

	// ErrOffsetOrder: the base offset is not above the newest one remembered
	// of the producer, is negative, or leaves no room below the largest
	// offset, or for what else the producer has in flight. A log gives rising
	// offsets, so either the offset is another batch's or batches were committed
	// in another order than they were appended. The broker answers 56
	// KAFKA_STORAGE_ERROR, which makes a client try again later.
	ErrOffsetOrder error = &reason{text: "offset out of order", code: codeKafkaStorageError}
)

// KafkaErrorCode returns the error code of the Kafka protocol that tells a
// producer what err says: 0 for nil, the code that each sentinel's comment
// names for an error of this package, however it is wrapped, and -1
// UNKNOWN_SERVER_ERROR for any other error. A situation that the same request
// can survive later has a code that clients retry.
//
// Safe for concurrent use.
func KafkaErrorCode(err error) int16 {
	if err == nil {
		return codeNone
	}
	var r *reason
	if errors.As(err, &r) {
		return r.code
	}
	return codeUnknownServerError
}

// BatchError is the error of every refused batch but one that must wait, which
// gets an [InFlightError]: the reason, and the facts that led to it. Reach it with
// errors.As. Test for the reason with errors.Is.
type BatchError struct {
	// Batch is the batch that was refused, as it was given.
	Batch Batch
	// Expected is the base sequence that would have been accepted in the
	// batch's place, in 0..2147483647, or -1 where none would have been: the
	// batch is fenced or malformed, or not its sequence is the reason.
	Expected int32
	// CurrentEpoch is the producer's epoch as remembered, or that of its batches
	// in flight where there are any; -1 where the producer is not known or was
	// not looked up.
	CurrentEpoch int16
	// BaseOffset is the base offset given to Commit or to a replay, or -1 where
	// none was given: by Check, Reserve and Abort.
	BaseOffset int64
	// FirstOffset is the base offset of the remembered copy for
	// ErrDuplicateSequence, the newest base offset remembered of the producer
	// for ErrOffsetOrder, the base offset of the first batch behind the hole for
	// ErrHole, and -1 for every other reason or where there is none.
	FirstOffset int64
	// Err is the reason, one of the package's sentinels.
	Err error
}

// newBatchError returns an error with the facts that are always known.
func newBatchError(b Batch, baseOffset int64, why error) *BatchError {
	return &BatchError{Batch: b, Expected: noSequence, CurrentEpoch: noEpoch, BaseOffset: baseOffset, FirstOffset: noOffset, Err: why}
}

// Unwrap returns the reason.
func (e *BatchError) Unwrap() error { return e.Err }

// Error begins with the reason and carries what was got and what was expected.
func (e *BatchError) Error() string {
	return fmt.Sprintf("%v: producer %d epoch %d sequence %d count %d%s",
		e.Err, e.Batch.ProducerID, e.Batch.Epoch, e.Batch.BaseSequence, e.Batch.Count, e.facts())
}

// facts words what the batch was measured against.
func (e *BatchError) facts() string {
	switch {
	case errors.Is(e.Err, ErrFenced):
		return fmt.Sprintf(": current epoch is %d", e.CurrentEpoch)
	case errors.Is(e.Err, ErrDuplicateSequence):
		return fmt.Sprintf(": appended at offset %d, first copy at offset %d", e.BaseOffset, e.FirstOffset)
	case errors.Is(e.Err, ErrOffsetOrder):
		return fmt.Sprintf(": base offset %d, newest remembered %d", e.BaseOffset, e.FirstOffset)
	case errors.Is(e.Err, ErrHole):
		return fmt.Sprintf(": a later batch is in the log at offset %d", e.FirstOffset)
	case errors.Is(e.Err, ErrInvalidBatch):
		return ""
	case e.CurrentEpoch < 0:
		return fmt.Sprintf(": expected sequence %d", e.Expected)
	}
	return fmt.Sprintf(": expected sequence %d in epoch %d", e.Expected, e.CurrentEpoch)
}
