package server_test

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/idempotence-go/idempotence"
)

// The codes of the library are those of the errors that its documentation names,
// by a list that is not its own.
func TestKafkaErrorCodes(t *testing.T) {
	for err, want := range map[error]*kerr.Error{
		idempotence.ErrOutOfOrderSequence:     kerr.OutOfOrderSequenceNumber,
		idempotence.ErrUnknownProducer:        kerr.UnknownProducerID,
		idempotence.ErrFenced:                 kerr.InvalidProducerEpoch,
		idempotence.ErrInvalidBatch:           kerr.InvalidRecord,
		idempotence.ErrInvalidTxnState:        kerr.InvalidTxnState,
		idempotence.ErrConcurrentTransactions: kerr.ConcurrentTransactions,
		idempotence.ErrInFlight:               kerr.RequestTimedOut,
		idempotence.ErrDuplicateSequence:      kerr.DuplicateSequenceNumber,
		idempotence.ErrOffsetOrder:            kerr.KafkaStorageError,
		idempotence.ErrCoordinatorFenced:      kerr.TransactionCoordinatorFenced,
		idempotence.ErrAbortedUnknown:         kerr.KafkaStorageError,
		idempotence.ErrAbandoned:              kerr.NotLeaderForPartition,
		idempotence.ErrSettled:                kerr.UnknownServerError,
		idempotence.ErrGap:                    kerr.KafkaStorageError,
		idempotence.ErrCorruptBatch:           kerr.CorruptMessage,
		idempotence.ErrUnsupportedMagic:       kerr.InvalidRecord,
		idempotence.ErrNotMarker:              kerr.InvalidRecord,
	} {
		if got := idempotence.KafkaErrorCode(err); got != want.Code {
			t.Errorf("%v: code %d, want %d %s", err, got, want.Code, want.Message)
		}
	}
}
