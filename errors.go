package idempotence

import (
	"errors"
	"fmt"
)

// This file is what the library says when it refuses: one sentinel for each reason,
// typed errors with the facts, and the Kafka code to put on the wire. Test for a
// reason with errors.Is, and reach the facts with errors.As.

// reason is the type of every sentinel. A sentinel that is a case of another one
// has that one as wider.
type reason struct {
	text  string
	code  int16
	wider error
}

func (r *reason) Error() string { return "idempotence: " + r.text }
func (r *reason) Unwrap() error { return r.wider }

// MarshalText returns the text of Error, so that an error which wraps the sentinel
// keeps its reason in JSON.
func (r *reason) MarshalText() ([]byte, error) { return []byte(r.Error()), nil }

// Error codes of the Kafka protocol, by Kafka's names
// (org.apache.kafka.common.protocol.Errors).
const (
	codeUnknownServerError     int16 = -1
	codeNone                   int16 = 0
	codeCorruptMessage         int16 = 2
	codeNotLeaderOrFollower    int16 = 6
	codeRequestTimedOut        int16 = 7
	codeOutOfOrderSequence     int16 = 45
	codeDuplicateSequence      int16 = 46
	codeInvalidProducerEpoch   int16 = 47
	codeInvalidTxnState        int16 = 48
	codeConcurrentTransactions int16 = 51
	codeCoordinatorFenced      int16 = 52
	codeKafkaStorageError      int16 = 56
	codeUnknownProducerID      int16 = 59
	codeInvalidRecord          int16 = 87
)

// Returned when a batch is judged: by Check, Commit, Apply and Reserve, in a
// [*BatchError]. None of them changes the state. ErrFenced and ErrInvalidBatch are
// also returned for a marker, in a [*MarkerError].
var (
	// ErrOutOfOrderSequence: the batch is neither the next one nor a retry of a
	// remembered one. It is a gap, an overlap, a retry split or merged
	// differently, a range that has left the window, or a newer epoch that does
	// not start at 0. From an unknown producer, it is not the first batch that the
	// policy requires, or not the failed one that must come again (see
	// [Reservation.Abort]). The broker must not append it and answers 45
	// OUT_OF_ORDER_SEQUENCE_NUMBER. (KIP-98; Kafka's
	// ProducerAppendInfo.checkSequence.)
	ErrOutOfOrderSequence error = &reason{text: "out of order sequence", code: codeOutOfOrderSequence}

	// ErrUnknownProducer: the producer is unknown and its batch does not start at
	// 0, so a batch before it may be missing. Only the policy StartAtZero leads to
	// it. The broker must not append the batch and answers 59 UNKNOWN_PRODUCER_ID.
	// It is also an ErrOutOfOrderSequence. (KIP-360.)
	ErrUnknownProducer error = &reason{text: "unknown producer", code: codeUnknownProducerID, wider: ErrOutOfOrderSequence}

	// ErrFenced: the epoch is older than the producer's current one. A newer
	// instance of the producer has taken over. The broker answers 47
	// INVALID_PRODUCER_EPOCH. (KIP-98; Kafka's
	// ProducerAppendInfo.checkProducerEpoch.)
	ErrFenced error = &reason{text: "fenced by a newer epoch", code: codeInvalidProducerEpoch}

	// ErrInvalidBatch: a producer id below -1, a negative epoch or base sequence,
	// or a count below 1; in a marker, a negative number. No correct client sends
	// that and no retry helps. The broker answers 87 INVALID_RECORD. A replay
	// returns it too, for what cannot be in a log.
	ErrInvalidBatch error = &reason{text: "malformed batch", code: codeInvalidRecord}

	// ErrInvalidTxnState: the batch is not transactional, but a transaction of
	// its producer is open. The broker must not append it and answers 48
	// INVALID_TXN_STATE. (Kafka's ProducerAppendInfo.appendDataBatch.)
	ErrInvalidTxnState error = &reason{text: "batch outside the open transaction", code: codeInvalidTxnState}

	// ErrConcurrentTransactions: the batch has a newer epoch than the transaction
	// that is open. It must wait for the marker of that transaction, which is
	// probably on its way. The broker answers 51 CONCURRENT_TRANSACTIONS, which
	// clients retry; to a Produce request below version 12 it answers 19
	// NOT_ENOUGH_REPLICAS, as Kafka does.
	ErrConcurrentTransactions error = &reason{text: "transaction of an older epoch is open", code: codeConcurrentTransactions}

	// ErrInFlight: the batch or marker cannot be judged until an append in flight
	// has settled. A batch is an exact copy of that append or has a newer epoch, or
	// WindowSize batches or a marker of its producer are in flight. A marker waits
	// for anything in flight of its producer. The broker must neither append nor
	// acknowledge it. It waits for [InFlightError].Done
	// and asks again, as [ProducerStateManager.ReserveWait] does, or answers 7
	// REQUEST_TIMED_OUT, which clients retry. It comes in an [*InFlightError].
	ErrInFlight error = &reason{text: "append in flight", code: codeRequestTimedOut}
)

// Returned when an appended batch or marker is recorded: by Commit, Apply, the
// Commit of a Reservation and the marker calls; ErrOffsetOrder also by a replay.
// From a Commit each says that the log holds something that it should not: the
// append lock was not held from Check to Commit, Check was skipped, or the offset
// is wrong. The state is unchanged, but it no longer agrees with the log. The
// broker cuts the batch off again, or rebuilds the state from the log.
var (
	// ErrDuplicateSequence: the appended batch is a retry of a remembered one, so
	// the log holds it twice, or Commit was called twice. The broker cuts the
	// second copy off and answers with the offset of the first, in
	// [BatchError].FirstCopy; without cutting, it answers 46
	// DUPLICATE_SEQUENCE_NUMBER. It is also an ErrOutOfOrderSequence.
	ErrDuplicateSequence error = &reason{text: "already committed", code: codeDuplicateSequence, wider: ErrOutOfOrderSequence}

	// ErrOffsetOrder: the log cannot have given this offset. It is negative, lies
	// below the end of the newest batch remembered of the producer, or leaves no
	// room below the largest offset or for what else is in flight. With
	// Config.Contiguous, it is also an offset at which the log does not continue.
	// Either the offset belongs to another batch, or batches were committed in
	// another order than they were appended, or the log has changed and the manager
	// was not told. The broker answers 56 KAFKA_STORAGE_ERROR, which clients retry.
	ErrOffsetOrder error = &reason{text: "offset out of order", code: codeKafkaStorageError}
)

// Returned when a marker is judged, in a [*MarkerError].
var (
	// ErrCoordinatorFenced: the marker's coordinator epoch is below one that was
	// seen, so another coordinator has taken over. The broker answers 52
	// TRANSACTION_COORDINATOR_FENCED, and the coordinator drops the marker.
	// (KIP-98; Kafka's ProducerAppendInfo.checkCoordinatorEpoch.)
	ErrCoordinatorFenced error = &reason{text: "fenced by a newer coordinator", code: codeCoordinatorFenced}
)

// Returned by [ProducerStateManager.AbortedTransactions].
var (
	// ErrAbortedUnknown: not all aborted transactions from the offset on are
	// known, since the state was restored from a snapshot that does not hold
	// them, or the offset lies below the log's start. The broker answers 56
	// KAFKA_STORAGE_ERROR. The remedy is Reset and a replay from the log's start.
	ErrAbortedUnknown error = &reason{text: "aborted transactions are not known", code: codeKafkaStorageError}
)

// Returned by the methods of a [Reservation].
var (
	// ErrAbandoned: the reservation was ended otherwise: an earlier one of its
	// producer was aborted, or AbandonReservations, Truncate, Reset, a restore or
	// a replay ended it. The batch is not remembered, but it may be in the log:
	// then it must be cut off or replayed. The broker answers 6
	// NOT_LEADER_OR_FOLLOWER, and the client looks for the leader and retries.
	ErrAbandoned error = &reason{text: "reservation abandoned", code: codeNotLeaderOrFollower}

	// ErrSettled: this handle was committed or aborted before, so the producer has
	// had its answer. The call is a mistake and has changed nothing. The code is
	// -1.
	ErrSettled error = &reason{text: "reservation already settled", code: codeUnknownServerError}

	// ErrGap: the aborted append comes before one of the same producer that is
	// committed, so the log has a gap that no retry can fill. The reservation has
	// ended and so have all behind it, including those committed: none of them is
	// remembered. The broker cuts the log off before [BatchError].NextOffset, or
	// gives up leadership. It answers 56 KAFKA_STORAGE_ERROR, which clients retry.
	ErrGap error = &reason{text: "aborted append leaves a gap in the log", code: codeKafkaStorageError}
)

// Returned when the bytes of a record batch are read.
var (
	// ErrCorruptBatch: the bytes cannot be the header of a record batch, or the
	// batch is cut short, or its checksum is wrong. The broker must not append it;
	// it answers 2 CORRUPT_MESSAGE.
	ErrCorruptBatch error = &reason{text: "corrupt record batch", code: codeCorruptMessage}

	// ErrUnsupportedMagic: the batch is not of format v2. The older formats have
	// no producer id; a newer one cannot be read. The broker answers 87
	// INVALID_RECORD, as Kafka does from version 3 of the produce request on
	// (ProduceRequest.validateRecords).
	ErrUnsupportedMagic error = &reason{text: "unsupported record batch format", code: codeInvalidRecord}

	// ErrNotMarker: the batch is sound but does not end a transaction: it holds
	// data, or a control record of another type, such as a leader change. Only
	// ParseMarker returns it. A follower appends such a control batch and reports
	// its end with [ProducerStateManager.Advance]. A broker that got it from a
	// client in place of a marker answers 87 INVALID_RECORD.
	ErrNotMarker error = &reason{text: "not a transaction marker", code: codeInvalidRecord}
)

// Returned by [ProducerStateManager.ReplayLog] and [VerifyLog], in a [*LogError].
var (
	// ErrTornTail: the log ends in what a crash or a power cut leaves of an append:
	// a batch that is cut short, zeros, or one batch with a wrong checksum. Nothing
	// intact is behind it. The broker cuts the segment off after
	// [ReplayResult].Bytes and goes on. Only the newest segment of a log can be torn;
	// in an older one this is damage too.
	ErrTornTail error = &reason{text: "torn tail of log", code: codeKafkaStorageError}

	// ErrCorruptLog: the log is damaged, and good batches may follow. Cutting the
	// segment off may lose acknowledged records, so a broker does not do it by
	// itself: it fetches the rest from a replica, or leaves the partition offline.
	// A power cut leaves this too if several appends were not synced and a later one
	// of them is intact. A broker that knows that everything behind
	// [ReplayResult].Bytes was neither synced nor acknowledged may cut there.
	ErrCorruptLog error = &reason{text: "corrupt log", code: codeKafkaStorageError}
)

// Returned by [ProducerStateManager.Restore] and
// [ProducerStateManager.RestoreKafka]. The state is unchanged.
var (
	// ErrCorruptSnapshot: what was read is not a snapshot, or not as it was
	// written: it is cut off or too long, the checksum is wrong, or a field is out
	// of range. The broker takes an older snapshot, as [SnapshotDir.Load]
	// does, or rebuilds the state from the whole log.
	ErrCorruptSnapshot error = &reason{text: "corrupt snapshot", code: codeKafkaStorageError}

	// ErrSnapshotVersion: a newer version of the library has written the snapshot.
	// The broker does as for a corrupt one. It is also an ErrCorruptSnapshot.
	ErrSnapshotVersion error = &reason{text: "unknown version of snapshot", code: codeKafkaStorageError, wider: ErrCorruptSnapshot}

	// ErrSnapshotLog: the snapshot is intact, but of another log: its identity is
	// not Config.LogID. The broker has mixed up its directories, or a topic was
	// deleted and created again under the same name. The snapshot must not be
	// used.
	ErrSnapshotLog error = &reason{text: "snapshot of another log", code: codeKafkaStorageError}
)

// Returned by [SnapshotDir].
var (
	// ErrSnapshotDirInUse: another process, or another SnapshotDir of this one, has
	// the directory open. The broker must not start: two brokers that write to one
	// log lose data.
	ErrSnapshotDirInUse error = &reason{text: "snapshot directory is in use", code: codeKafkaStorageError}

	// ErrStaleSnapshot: the log was cut or deleted after the snapshot was taken, so
	// it may hold batches that are gone. It is not saved. The broker takes another
	// one.
	ErrStaleSnapshot error = &reason{text: "log was cut after the snapshot", code: codeKafkaStorageError}
)

// KafkaErrorCode returns the error code of the Kafka protocol for err: 0 for nil,
// the code that the sentinel's comment names for an error of this package, however
// it is wrapped, and -1 UNKNOWN_SERVER_ERROR for any other error. An error that the
// same request can overcome later has a code that clients retry. Safe for concurrent
// use.
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

// BatchError is the error of a refused batch: the reason, and the facts that led to
// it. Reach it with errors.As. A batch that must wait gets an [InFlightError]
// instead.
type BatchError struct {
	// Batch is the batch that was refused, as it was given.
	Batch Batch
	// Expected is the base sequence that would have been accepted in the batch's
	// place, in 0..2147483647. It is -1 if the sequence is not the reason.
	Expected int32
	// CurrentEpoch is the producer's epoch, including what is in flight; -1 if the
	// producer is unknown or was not looked up.
	CurrentEpoch int16
	// BaseOffset is the base offset given to Commit, Apply or a replay, or -1.
	BaseOffset int64
	// FirstCopy is the base offset of the remembered copy for
	// ErrDuplicateSequence, else -1.
	FirstCopy int64
	// LowestOffset is the lowest base offset that would have been accepted, for
	// ErrOffsetOrder, else -1.
	LowestOffset int64
	// NextOffset is the base offset of the first batch behind the gap for ErrGap,
	// else -1.
	NextOffset int64
	// Err is the reason, one of the package's sentinels.
	Err error
}

// newBatchError returns an error with the facts that are always known.
func newBatchError(b Batch, baseOffset int64, why error) *BatchError {
	return &BatchError{
		Batch: b, Expected: noSequence, CurrentEpoch: noEpoch, BaseOffset: baseOffset,
		FirstCopy: noOffset, LowestOffset: noOffset, NextOffset: noOffset, Err: why,
	}
}

// Unwrap returns the reason.
func (e *BatchError) Unwrap() error { return e.Err }

// Error begins with the reason and gives what was received and what was expected.
func (e *BatchError) Error() string {
	return fmt.Sprintf("%v: producer %d epoch %d sequence %d count %d%s",
		e.Err, e.Batch.ProducerID, e.Batch.Epoch, e.Batch.BaseSequence, e.Batch.Count, e.facts())
}

// facts returns what the batch was compared with.
func (e *BatchError) facts() string {
	switch {
	case errors.Is(e.Err, ErrFenced), errors.Is(e.Err, ErrConcurrentTransactions):
		return fmt.Sprintf(": current epoch is %d", e.CurrentEpoch)
	case errors.Is(e.Err, ErrDuplicateSequence):
		return fmt.Sprintf(": appended at offset %d, first copy at offset %d", e.BaseOffset, e.FirstCopy)
	case errors.Is(e.Err, ErrOffsetOrder):
		return fmt.Sprintf(": base offset %d, lowest possible is %d", e.BaseOffset, e.LowestOffset)
	case errors.Is(e.Err, ErrGap):
		return fmt.Sprintf(": a later batch is in the log at offset %d", e.NextOffset)
	case errors.Is(e.Err, ErrInvalidBatch), errors.Is(e.Err, ErrInvalidTxnState):
		return ""
	case e.CurrentEpoch < 0:
		return fmt.Sprintf(": expected sequence %d", e.Expected)
	}
	return fmt.Sprintf(": expected sequence %d in epoch %d", e.Expected, e.CurrentEpoch)
}

// InFlightError says that a batch or marker cannot be judged yet, and what it waits
// for. It is an ErrInFlight. Reach it with errors.As.
type InFlightError struct {
	// Batch is the batch that was judged, as it was given. For a marker it has the
	// producer id and epoch, and the sequence -1.
	Batch Batch
	// Epoch, FirstSequence and LastSequence tell which append it waits for. The
	// sequences are -1 for a marker.
	Epoch                       int16
	FirstSequence, LastSequence int32

	done chan struct{}
}

// newInFlightError returns the error for b, which must wait for f of queue q.
func newInFlightError(b Batch, q *queue, f *inFlightBatch) *InFlightError {
	if f.done == nil {
		f.done = make(chan struct{})
	}
	e := &InFlightError{Batch: b, Epoch: q.epoch, FirstSequence: noSequence, LastSequence: noSequence, done: f.done}
	if q.marker == nil {
		e.FirstSequence, e.LastSequence = f.span.first(), f.span.last()
	}
	return e
}

// Done returns a channel that is closed when the append that the batch waits for has
// settled: it has become visible, was aborted, or was abandoned. Ask again then. Any
// answer is possible, including ErrInFlight. Safe for concurrent use.
func (e *InFlightError) Done() <-chan struct{} { return e.done }

// Unwrap returns ErrInFlight.
func (e *InFlightError) Unwrap() error { return ErrInFlight }

// Error names the batch and what it waits for.
func (e *InFlightError) Error() string {
	received, obstacle := "marker", "a marker"
	if e.Batch.BaseSequence != noSequence {
		received = fmt.Sprintf("sequence %d count %d", e.Batch.BaseSequence, e.Batch.Count)
	}
	if e.FirstSequence != noSequence {
		obstacle = fmt.Sprintf("sequences %d to %d", e.FirstSequence, e.LastSequence)
	}
	return fmt.Sprintf("%v: producer %d epoch %d %s: waits for %s of epoch %d", ErrInFlight,
		e.Batch.ProducerID, e.Batch.Epoch, received, obstacle, e.Epoch)
}
