package txn

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
)

// A scenario starts from records and runs steps.
type scenario struct {
	name  string
	given []record
	steps []step
}

func runScenarios(t *testing.T, all []scenario) {
	t.Helper()
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			newWorld(t, s.given...).run(s.steps)
		})
	}
}

func TestInitProducerID(t *testing.T) {
	runScenarios(t, []scenario{
		{"the first time, and again", nil, []step{
			{"init a", "4000/0"},
			{"state a", "Empty 4000/0"},
			{"init a", "4000/1"},
			{"init b", "4001/0"},
			{"restart", "2"},
			{"init a", "4000/2"},
			{"state a", "Empty 4000/2"},
		}},
		{"KIP-360: named the present one, and its retry", nil, []step{
			{"init a", "4000/0"},
			{"init a expect 4000/0", "4000/1"},
			{"state a", "Empty 4000/1 last 4000/0"},
			{"quiet init a expect 4000/0", "4000/1"}, // the answer was lost
			{"restart", "2"},
			{"init a expect 4000/0", "4000/1"},
			{"init a expect 4000/1", "4000/2"},
			{"init a expect 4000/0", "PRODUCER_FENCED"}, // two below
			{"state a", "Empty 4000/2 last 4000/1"},
		}},
		{"named neither the present nor the last one", nil, []step{
			{"init a", "4000/0"},
			{"init a", "4000/1"},
			{"init a expect 4000/0", "PRODUCER_FENCED"}, // another one took over
			{"init a expect 4000/2", "PRODUCER_FENCED"},
			{"init a expect 4001/1", "PRODUCER_FENCED"},
			{"state a", "Empty 4000/1"},
		}},
		{"named one of an unknown transactional id", nil, []step{
			{"init a expect 4000/0", "PRODUCER_FENCED"},
			{"state a", "unknown"},
		}},
		{"half of a name", nil, []step{
			{"init a expect 4000/-1", "INVALID_REQUEST"},
			{"init a expect -1/0", "INVALID_REQUEST"},
			{"init a expect -2/-2", "INVALID_REQUEST"},
		}},
		{"time-outs", nil, []step{
			{"init a timeout 0s", "INVALID_TRANSACTION_TIMEOUT"},
			{"init a timeout -1ms", "INVALID_TRANSACTION_TIMEOUT"},
			{"init a timeout 15m1ms", "INVALID_TRANSACTION_TIMEOUT"},
			{"init a timeout 15m", "4000/0"},
			{"init a timeout 1ms", "4000/1"},
		}},
		{"the answer of the first one is lost", nil, []step{
			{"crash after write", ""},
			{"init a", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"init a", "4000/1"},
		}},
		{"the record of the first one is lost", nil, []step{
			{"crash before write", ""},
			{"init a", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"state a", "unknown"},
			{"init a", "5000/0"}, // the block of 4000 was reserved
		}},
		{"the record cannot be written", nil, []step{
			{"init a", "4000/0"},
			{"write fails", ""},
			{"init a expect 4000/0", "COORDINATOR_NOT_AVAILABLE"},
			{"state a", "Empty 4000/0"},
			{"init a expect 4000/0", "4000/1"},
		}},
	})
}

// Every edge of the epochs, with and without a lost answer and a restart.
func TestInitProducerIDEpochEdges(t *testing.T) {
	empty := func(epoch int16) []record { return []record{held("a", Empty, Producer{31, epoch}, 0)} }
	runScenarios(t, []scenario{
		{"0", empty(0), []step{
			{"init a expect 31/0", "31/1"},
			{"init a expect 31/0", "31/1"},
		}},
		{"32765 to 32766", empty(32765), []step{
			{"init a expect 31/32765", "31/32766"},
			{"init a expect 31/32765", "31/32766"},
			{"restart", "2"},
			{"init a expect 31/32765", "31/32766"},
			{"state a", "Empty 31/32766 last 31/32765"},
		}},
		{"32766 rotates", empty(32766), []step{
			{"init a", "4000/0"},
			{"init a expect 31/32766", "PRODUCER_FENCED"}, // another one took over
			{"state a", "Empty 4000/0"},
		}},
		{"32766 rotates for the one named, and its retry", empty(32766), []step{
			{"init a expect 31/32766", "4000/0"},
			{"init a expect 31/32766", "4000/0"},
			{"restart", "2"},
			{"init a expect 31/32766", "4000/0"},
			{"init a expect 4000/32766", "PRODUCER_FENCED"}, // never was
			{"init a expect 31/32765", "PRODUCER_FENCED"},
			{"init a expect 4000/0", "4000/1"},
			{"init a expect 31/32766", "PRODUCER_FENCED"},
		}},
		{"a rotation whose record is lost", empty(32766), []step{
			{"crash before write", ""},
			{"init a expect 31/32766", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"state a", "Empty 31/32766"},
			{"init a expect 31/32766", "5000/0"},
		}},
		{"a rotation whose answer is lost", empty(32766), []step{
			{"crash after write", ""},
			{"init a expect 31/32766", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"init a expect 31/32766", "4000/0"},
		}},
		{"32767, to which version 1 has fenced", []record{held("a", CompleteAbort, Producer{31, 32767}, 1)}, []step{
			{"init a", "4000/0"},
		}},
	})
}

func TestAddPartitionsToTxn(t *testing.T) {
	runScenarios(t, []scenario{
		{"added, retried, added to", nil, []step{
			{"init a", "4000/0"},
			{"add a 4000/0 v1 t-1", "ok"},
			{"quiet add a 4000/0 v1 t-1", "ok"}, // the answer was lost
			{"restart", "2"},
			{"add a 4000/0 v1 t-1", "ok"},
			{"add a 4000/0 v1 u-0 t-0 t-1 t-0", "ok"},
			{"state a", "Ongoing 4000/0 t-0 t-1 u-0"},
			{"markers", "none"},
		}},
		{"of another producer", nil, []step{
			{"add a 4000/0 v1 t-0", "INVALID_PRODUCER_ID_MAPPING"},
			{"init a", "4000/0"},
			{"init a", "4000/1"},
			{"add a 31/1 v1 t-0", "INVALID_PRODUCER_ID_MAPPING"},
			{"add a 4000/0 v1 t-0", "PRODUCER_FENCED"},
			{"add a 4000/2 v1 t-0", "PRODUCER_FENCED"},
			{"add a 4000/1 v1 -0", "INVALID_REQUEST"},
			{"add a 4000/1 v1 t--1", "INVALID_REQUEST"},
			{"state a", "Empty 4000/1"},
		}},
		{"nothing", nil, []step{
			{"init a", "4000/0"},
			{"quiet add a 4000/0 v1", "ok"},
			{"state a", "Empty 4000/0"},
		}},
		{"version 0 is as 1, and 3 as 2", nil, []step{
			{"init a", "4000/0"},
			{"add a 4000/0 v0 t-0", "ok"},
			{"end a 4000/0 v0 commit", "4000/0"},
			{"restart", "2"},
			{"markers", "a t-0 4000/0 commit v1 c2"},
			{"done a t-0", "ok"},
			{"add a 4000/0 v3 t-0", "ok"},
			{"end a 4000/0 v3 commit", "4000/1"},
			{"restart", "3"},
			{"markers", "a t-0 4000/1 commit v2 c3"},
		}},
		{"while markers are outstanding", nil, []step{
			{"init a", "4000/0"},
			{"add a 4000/0 v1 t-0", "ok"},
			{"end a 4000/0 v1 commit", "4000/0"},
			{"add a 4000/0 v1 t-0", "CONCURRENT_TRANSACTIONS"},
			{"done a t-0", "ok"},
			{"add a 4000/0 v1 u-0", "ok"},
			{"state a", "Ongoing 4000/0 u-0"},
		}},
		{"the answer is lost with the run", nil, []step{
			{"init a", "4000/0"},
			{"crash after write", ""},
			{"add a 4000/0 v2 t-0", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"add a 4000/0 v2 t-0", "ok"},
			{"state a", "Ongoing 4000/0 t-0"},
		}},
		{"the record is lost with the run", nil, []step{
			{"init a", "4000/0"},
			{"crash before write", ""},
			{"add a 4000/0 v2 t-0", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"state a", "Empty 4000/0"},
			{"add a 4000/0 v2 t-0", "ok"},
		}},
		{"at epoch 32766", []record{held("a", Empty, Producer{31, 32766}, 0)}, []step{
			{"add a 31/32766 v1 t-0", "ok"},
			{"restart", "2"},
			{"add a 31/32766 v1 t-0", "ok"},
			{"add a 31/32767 v1 t-0", "PRODUCER_FENCED"},
		}},
		{"a transaction forgets the last epoch", nil, []step{
			{"init a", "4000/0"},
			{"init a expect 4000/0", "4000/1"},
			{"add a 4000/1 v1 t-0", "ok"},
			{"init a expect 4000/0", "PRODUCER_FENCED"}, // a late copy; the transaction goes on
			{"state a", "Ongoing 4000/1 t-0"},
		}},
	})
}

func TestVerifyPartition(t *testing.T) {
	runScenarios(t, []scenario{
		{"a batch without a transaction", nil, []step{
			{"verify a 4000/0 t-0", "INVALID_PRODUCER_ID_MAPPING"},
			{"init a", "4000/0"},
			{"verify a 4000/0 t-0", "INVALID_TXN_STATE"},
			{"add a 4000/0 v1 t-0", "ok"},
			{"verify a 4000/0 t-0", "ok"},
			{"verify a 4000/0 t-1", "INVALID_TXN_STATE"},
			{"verify a 4000/1 t-0", "PRODUCER_FENCED"},
			{"end a 4000/0 v1 commit", "4000/0"},
			{"verify a 4000/0 t-0", "CONCURRENT_TRANSACTIONS"},
			{"done a t-0", "ok"},
			{"verify a 4000/0 t-0", "INVALID_TXN_STATE"},
		}},
	})
}

func TestEndTxnVersion1(t *testing.T) {
	runScenarios(t, []scenario{
		{"commit, and its retries", nil, []step{
			{"init a", "4000/0"},
			{"add a 4000/0 v1 t-0 t-1", "ok"},
			{"end a 4000/0 v1 commit", "4000/0"},
			{"state a", "PrepareCommit 4000/0 t-0 t-1"},
			{"markers", "a t-0 4000/0 commit v1 c1, a t-1 4000/0 commit v1 c1"},
			{"quiet end a 4000/0 v1 commit", "4000/0"}, // the answer was lost
			{"end a 4000/0 v1 abort", "INVALID_TXN_STATE"},
			{"done a t-1", "ok"},
			{"markers", "a t-0 4000/0 commit v1 c1"},
			{"done a t-0", "ok"},
			{"markers", "none"},
			{"state a", "CompleteCommit 4000/0"},
			{"end a 4000/0 v1 commit", "4000/0"},
			{"restart", "2"},
			{"end a 4000/0 v1 commit", "4000/0"},
			{"end a 4000/0 v1 abort", "INVALID_TXN_STATE"},
		}},
		{"abort, and its retries", nil, []step{
			{"init a", "4000/0"},
			{"add a 4000/0 v1 t-0", "ok"},
			{"end a 4000/0 v1 abort", "4000/0"},
			{"state a", "PrepareAbort 4000/0 t-0"},
			{"end a 4000/0 v1 abort", "4000/0"},
			{"end a 4000/0 v1 commit", "INVALID_TXN_STATE"},
			{"done a t-0", "ok"},
			{"end a 4000/0 v1 abort", "4000/0"},
			{"end a 4000/0 v1 commit", "INVALID_TXN_STATE"},
		}},
		{"nothing", nil, []step{
			{"end a 4000/0 v1 commit", "INVALID_PRODUCER_ID_MAPPING"},
			{"init a", "4000/0"},
			{"end a 4000/0 v1 commit", "INVALID_TXN_STATE"},
			{"end a 4000/0 v1 abort", "INVALID_TXN_STATE"},
		}},
		{"of another epoch or id", nil, []step{
			{"init a", "4000/0"},
			{"init a", "4000/1"},
			{"add a 4000/1 v1 t-0", "ok"},
			{"end a 4000/0 v1 commit", "PRODUCER_FENCED"},
			{"end a 4000/2 v1 commit", "PRODUCER_FENCED"},
			{"end a 31/1 v1 commit", "INVALID_PRODUCER_ID_MAPPING"},
			{"state a", "Ongoing 4000/1 t-0"},
		}},
		{"the answer is lost with the run", nil, []step{
			{"init a", "4000/0"},
			{"add a 4000/0 v1 t-0", "ok"},
			{"crash after write", ""},
			{"end a 4000/0 v1 commit", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"markers", "a t-0 4000/0 commit v1 c2"},
			{"end a 4000/0 v1 commit", "4000/0"},
			{"done a t-0", "ok"},
			{"state a", "CompleteCommit 4000/0"},
		}},
		{"the record is lost with the run", nil, []step{
			{"init a", "4000/0"},
			{"add a 4000/0 v1 t-0", "ok"},
			{"crash before write", ""},
			{"end a 4000/0 v1 commit", "COORDINATOR_NOT_AVAILABLE"},
			{"markers", "none"},
			{"restart", "2"},
			{"state a", "Ongoing 4000/0 t-0"},
			{"end a 4000/0 v1 commit", "4000/0"},
		}},
		{"at 32766 it stays", []record{held("a", Ongoing, Producer{31, 32766}, 1, Partition{"t", 0})}, []step{
			{"end a 31/32766 v1 commit", "31/32766"},
			{"markers", "a t-0 31/32766 commit v1 c1"},
			{"restart", "2"},
			{"end a 31/32766 v1 commit", "31/32766"},
			{"done a t-0", "ok"},
			{"add a 31/32766 v1 t-0", "ok"},
		}},
	})
}

func TestEndTxnVersion2(t *testing.T) {
	ongoing := func(epoch int16) []record {
		return []record{held("a", Ongoing, Producer{31, epoch}, 2, Partition{"t", 0})}
	}
	runScenarios(t, []scenario{
		{"commit raises the epoch, and its retries", ongoing(0), []step{
			{"end a 31/0 v2 commit", "31/1"},
			{"state a", "PrepareCommit 31/1 last 31/0 t-0"},
			{"markers", "a t-0 31/1 commit v2 c1"},
			{"quiet end a 31/0 v2 commit", "31/1"}, // the answer was lost
			{"end a 31/0 v2 abort", "INVALID_TXN_STATE"},
			{"restart", "2"},
			{"end a 31/0 v2 commit", "31/1"},
			{"markers", "a t-0 31/1 commit v2 c2"},
			{"done a t-0", "ok"},
			{"state a", "CompleteCommit 31/1 last 31/0"},
			{"end a 31/0 v2 commit", "31/1"},
			{"restart", "3"},
			{"end a 31/0 v2 commit", "31/1"},
			{"end a 31/0 v2 abort", "INVALID_TXN_STATE"},
		}},
		{"abort raises the epoch, and its retries", ongoing(0), []step{
			{"end a 31/0 v2 abort", "31/1"},
			{"end a 31/0 v2 abort", "31/1"},
			{"done a t-0", "ok"},
			{"end a 31/0 v2 abort", "31/1"},
			{"end a 31/0 v2 commit", "INVALID_TXN_STATE"},
			{"end a 31/1 v2 abort", "31/2"}, // not a retry: the next transaction, an empty one
			{"state a", "CompleteAbort 31/2 last 31/1"},
			{"end a 31/1 v2 abort", "31/2"},
			{"end a 31/0 v2 abort", "PRODUCER_FENCED"},
		}},
		{"the next one meets 51", ongoing(7), []step{
			{"end a 31/7 v2 commit", "31/8"},
			{"add a 31/8 v2 t-0", "CONCURRENT_TRANSACTIONS"},
			{"end a 31/8 v2 abort", "CONCURRENT_TRANSACTIONS"},
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"init a expect 31/8", "CONCURRENT_TRANSACTIONS"},
			{"init a expect 31/7", "CONCURRENT_TRANSACTIONS"},
			{"init a expect 31/6", "PRODUCER_FENCED"},
			{"add a 31/7 v2 t-0", "PRODUCER_FENCED"},
			{"done a t-0", "ok"},
			{"add a 31/8 v2 t-0", "ok"},
			{"end a 31/7 v2 commit", "PRODUCER_FENCED"}, // a late copy
			{"state a", "Ongoing 31/8 t-0"},
		}},
		{"nothing", nil, []step{
			{"end a 4000/0 v2 abort", "INVALID_PRODUCER_ID_MAPPING"},
			{"init a", "4000/0"},
			{"end a 4000/0 v2 commit", "INVALID_TXN_STATE"},
			{"end a 4000/0 v2 abort", "4000/1"},
			{"markers", "none"},
			{"end a 4000/1 v2 commit", "INVALID_TXN_STATE"},
			{"quiet end a 4000/0 v2 abort", "4000/1"}, // the answer was lost
			{"restart", "2"},
			{"end a 4000/0 v2 abort", "4000/1"},
		}},
		{"of an older epoch in Empty, which is no retry", nil, []step{
			{"init a", "4000/0"},
			{"init a expect 4000/0", "4000/1"},
			{"end a 4000/0 v2 abort", "PRODUCER_FENCED"},
			{"state a", "Empty 4000/1 last 4000/0"},
		}},
		{"InitProducerId after an EndTxn whose answer was lost", ongoing(3), []step{
			{"crash after write", ""},
			{"end a 31/3 v2 commit", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"init a expect 31/3", "CONCURRENT_TRANSACTIONS"},
			{"done a t-0", "ok"},
			{"init a expect 31/3", "31/4"},
			{"state a", "CompleteCommit 31/4 last 31/3"},
		}},
		{"InitProducerId after an EndTxn whose record was lost", ongoing(3), []step{
			{"crash before write", ""},
			{"end a 31/3 v2 commit", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"init a expect 31/3", "CONCURRENT_TRANSACTIONS"}, // aborts it
			{"markers", "a t-0 31/4 abort v2 c2"},
			{"done a t-0", "ok"},
			{"init a expect 31/3", "31/4"},
		}},
		{"32765", ongoing(32765), []step{
			{"end a 31/32765 v2 commit", "31/32766"},
			{"end a 31/32765 v2 commit", "31/32766"},
			{"restart", "2"},
			{"end a 31/32765 v2 commit", "31/32766"},
			{"done a t-0", "ok"},
			{"end a 31/32765 v2 commit", "31/32766"},
		}},
		{"32766 rotates the id, and its retries", ongoing(32766), []step{
			{"end a 31/32766 v2 commit", "4000/0"},
			{"state a", "PrepareCommit 31/32767 last 31/32766 next 4000/0 t-0"},
			{"markers", "a t-0 31/32767 commit v2 c1"},
			{"end a 31/32766 v2 commit", "4000/0"},
			{"add a 4000/0 v2 t-0", "CONCURRENT_TRANSACTIONS"}, // KAFKA-18660: not 49
			{"end a 4000/0 v2 abort", "CONCURRENT_TRANSACTIONS"},
			{"init a expect 4000/0", "CONCURRENT_TRANSACTIONS"},
			{"add a 31/32767 v2 t-0", "INVALID_PRODUCER_ID_MAPPING"},
			{"restart", "2"},
			{"end a 31/32766 v2 commit", "4000/0"},
			{"done a t-0", "ok"},
			{"state a", "CompleteCommit 4000/0 last 31/32766"},
			{"end a 31/32766 v2 commit", "4000/0"},
			{"end a 31/32766 v2 abort", "INVALID_TXN_STATE"},
			{"init a expect 31/32766", "4000/0"},
			{"restart", "3"},
			{"end a 31/32766 v2 commit", "4000/0"},
			{"add a 4000/0 v2 t-0", "ok"},
			{"state a", "Ongoing 4000/0 t-0"},
		}},
		{"an empty abort at 32766 rotates the id", []record{held("a", Empty, Producer{31, 32766}, 0)}, []step{
			{"end a 31/32766 v2 abort", "4000/0"},
			{"end a 31/32766 v2 abort", "4000/0"},
			{"state a", "CompleteAbort 4000/0 last 31/32766"},
		}},
		{"32767, to which a client was driven (KAFKA-20090)", ongoing(32767), []step{
			{"end a 31/32767 v2 abort", "4000/0"},
			{"markers", "a t-0 31/32767 abort v2 c1"}, // an equal epoch, as the partitions accept
			{"done a t-0", "ok"},
			{"init a", "4000/1"},
		}},
		{"after a fence of version 1, no client gets 32767", []record{held("a", Ongoing, Producer{31, 32766}, 1, Partition{"t", 0})}, []step{
			{"clock 1m", ""},
			{"expire", "ok"},
			{"end a 31/32766 v2 abort", "PRODUCER_FENCED"},
		}},
	})
}

func TestFencing(t *testing.T) {
	ongoing := func(epoch int16, version int8) []record {
		return []record{held("a", Ongoing, Producer{31, epoch}, version, Partition{"t", 0})}
	}
	runScenarios(t, []scenario{
		{"version 1, by another one", ongoing(5, 1), []step{
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"state a", "PrepareAbort 31/6 t-0"},
			{"markers", "a t-0 31/6 abort v1 c1"},
			{"add a 31/5 v1 t-1", "PRODUCER_FENCED"},
			{"end a 31/5 v1 commit", "PRODUCER_FENCED"},
			{"init a expect 31/5", "PRODUCER_FENCED"},
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"done a t-0", "ok"},
			{"init a expect 31/5", "PRODUCER_FENCED"},
			{"init a", "31/7"},
		}},
		{"version 2, by another one, raises it once (KAFKA-19367)", ongoing(5, 2), []step{
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"state a", "PrepareAbort 31/6 t-0"},
			{"markers", "a t-0 31/6 abort v2 c1"},
			{"end a 31/5 v2 abort", "PRODUCER_FENCED"},
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"done a t-0", "ok"},
			{"state a", "CompleteAbort 31/6"},
			{"init a", "31/7"},
		}},
		{"version 1, by the one that is named, which comes back", ongoing(5, 1), []step{
			{"init a expect 31/5", "CONCURRENT_TRANSACTIONS"},
			{"restart", "2"},
			{"done a t-0", "ok"},
			{"state a", "CompleteAbort 31/6 last 31/5"},
			{"init a expect 31/5", "31/6"},
			{"add a 31/6 v1 t-0", "ok"},
		}},
		{"a transactional id that is named by a fenced producer", ongoing(5, 1), []step{
			{"init a expect 31/4", "PRODUCER_FENCED"},
			{"init a expect 30/5", "PRODUCER_FENCED"},
			{"state a", "Ongoing 31/5 t-0"},
		}},
		{"version 1 at 32765", ongoing(32765, 1), []step{
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"markers", "a t-0 31/32766 abort v1 c1"},
			{"done a t-0", "ok"},
			{"init a", "4000/0"},
		}},
		{"version 1 at 32766", ongoing(32766, 1), []step{
			{"init a expect 31/32766", "CONCURRENT_TRANSACTIONS"},
			{"markers", "a t-0 31/32767 abort v1 c1"},
			{"done a t-0", "ok"},
			{"state a", "CompleteAbort 31/32767 last 31/32766"},
			{"init a expect 31/32766", "4000/0"}, // 32767 is not for clients
			{"init a expect 31/32766", "4000/0"},
			{"restart", "2"},
			{"init a expect 31/32766", "4000/0"},
		}},
		{"version 1 at 32767, to which a client was driven (KAFKA-20090)", ongoing(32767, 1), []step{
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"markers", "a t-0 31/32767 abort v1 c1"},
			{"done a t-0", "ok"},
			{"init a", "4000/0"},
		}},
		{"version 2 at 32766 rotates (KAFKA-19367, KAFKA-20090)", ongoing(32766, 2), []step{
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"state a", "PrepareAbort 31/32767 next 4000/0 t-0"},
			{"markers", "a t-0 31/32767 abort v2 c1"},
			{"end a 31/32766 v2 abort", "INVALID_PRODUCER_ID_MAPPING"}, // the late one of the fenced producer
			{"restart", "2"},
			{"done a t-0", "ok"},
			{"state a", "CompleteAbort 4000/0"},
			{"init a", "4000/1"},
		}},
		{"version 2 at 32766, timed out, and the late EndTxn (KAFKA-20090)", ongoing(32766, 2), []step{
			{"clock 1m", ""},
			{"expire", "ok"},
			{"state a", "PrepareAbort 31/32767 last 31/32766 next 4000/0 t-0"},
			{"end a 31/32766 v2 abort", "4000/0"},
			{"done a t-0", "ok"},
			{"end a 31/32766 v2 abort", "4000/0"},
			{"end a 31/32766 v2 commit", "INVALID_TXN_STATE"},
			{"add a 4000/0 v2 t-0", "ok"},
		}},
		{"version 2 at 32767 (KAFKA-20090)", ongoing(32767, 2), []step{
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"markers", "a t-0 31/32767 abort v2 c1"},
			{"done a t-0", "ok"},
			{"init a", "4000/1"},
		}},
		{"a fence that cannot be written is remembered, and raises once (KAFKA-9666)", ongoing(5, 1), []step{
			{"write fails", ""},
			{"init a", "COORDINATOR_NOT_AVAILABLE"},
			{"write fails", ""},
			{"init a", "COORDINATOR_NOT_AVAILABLE"},
			{"state a", "Ongoing 31/5 t-0"},
			{"markers", "none"},
			{"add a 31/5 v1 t-1", "PRODUCER_FENCED"},
			{"stage a 31/5 v2 g t-0=1", "PRODUCER_FENCED"},
			{"verify a 31/5 t-0", "PRODUCER_FENCED"},
			{"end a 31/5 v1 commit", "PRODUCER_FENCED"},
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"state a", "PrepareAbort 31/6 t-0"},
			{"done a t-0", "ok"},
			{"init a", "31/7"},
			{"add a 31/7 v1 t-0", "ok"}, // not fenced any more
			{"add a 31/7 v1 t-1", "ok"},
		}},
		{"a fence of version 2 that cannot be written", ongoing(32765, 2), []step{
			{"write fails", ""},
			{"init a", "COORDINATOR_NOT_AVAILABLE"},
			{"end a 31/32765 v2 commit", "PRODUCER_FENCED"},
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"state a", "PrepareAbort 31/32766 t-0"},
		}},
		{"a fence that cannot be written, and a time-out", ongoing(5, 2), []step{
			{"write fails", ""},
			{"init a", "COORDINATOR_NOT_AVAILABLE"},
			{"clock 1m", ""},
			{"expire", "ok"},
			{"state a", "PrepareAbort 31/6 last 31/5 t-0"},
		}},
		{"a fence that cannot be written, and a restart", ongoing(5, 1), []step{
			{"crash before write", ""},
			{"init a", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"add a 31/5 v1 t-1", "ok"},
		}},
		{"an EndTxn that cannot be written does not fence", ongoing(5, 2), []step{
			{"write fails", ""},
			{"end a 31/5 v2 abort", "COORDINATOR_NOT_AVAILABLE"},
			{"end a 31/5 v2 abort", "31/6"},
		}},
		{"with the same transactional id fenced in mid-transaction, the first one's batch is late", ongoing(0, 2), []step{
			{"init a", "CONCURRENT_TRANSACTIONS"},
			{"add a 31/0 v2 t-0", "PRODUCER_FENCED"}, // the late batch
			{"done a t-0", "ok"},
			{"init a", "31/2"},
			{"add a 31/0 v2 t-0", "PRODUCER_FENCED"},
		}},
	})
}

func TestMarkers(t *testing.T) {
	three := []record{held("a", Ongoing, Producer{31, 0}, 2, Partition{"t", 0}, Partition{"t", 1}, Partition{"u", 0})}
	runScenarios(t, []scenario{
		// Case TXN-MARKER-RETRY: the same marker, with the same epoch.
		{"failed ones are sent again, refused ones dropped", three, []step{
			{"end a 31/0 v2 commit", "31/1"},
			{"done a t-0 UNKNOWN_TOPIC_OR_PARTITION", "ok"},
			{"done a t-0 NOT_LEADER_FOR_PARTITION", "ok"},
			{"done a t-0 REQUEST_TIMED_OUT", "ok"},
			{"done a t-0 NOT_ENOUGH_REPLICAS", "ok"},
			{"done a t-0 NOT_ENOUGH_REPLICAS_AFTER_APPEND", "ok"},
			{"done a t-0 KAFKA_STORAGE_ERROR", "ok"},
			{"done a t-0 UNKNOWN_SERVER_ERROR", "ok"},
			{"markers", "a t-0 31/1 commit v2 c1, a t-1 31/1 commit v2 c1, a u-0 31/1 commit v2 c1"},
			{"done a t-0 INVALID_PRODUCER_EPOCH", "ok"},
			{"done a t-1 TRANSACTION_COORDINATOR_FENCED", "ok"},
			{"markers", "a u-0 31/1 commit v2 c1"},
			{"done a u-0", "ok"},
			{"state a", "CompleteCommit 31/1 last 31/0"},
		}},
		{"after a restart all are sent again, by the new coordinator", three, []step{
			{"end a 31/0 v2 abort", "31/1"},
			{"done a t-0", "ok"},
			{"restart", "2"},
			{"markers", "a t-0 31/1 abort v2 c2, a t-1 31/1 abort v2 c2, a u-0 31/1 abort v2 c2"},
		}},
		{"the completion cannot be written", three, []step{
			{"end a 31/0 v2 commit", "31/1"},
			{"done a t-0", "ok"},
			{"done a t-1", "ok"},
			{"write fails", ""},
			{"done a u-0", "COORDINATOR_NOT_AVAILABLE"},
			{"markers", "none"},
			{"add a 31/1 v2 t-0", "CONCURRENT_TRANSACTIONS"},
			{"expire", "ok"},
			{"state a", "CompleteCommit 31/1 last 31/0"},
		}},
		{"the run ends before the completion", three, []step{
			{"end a 31/0 v2 commit", "31/1"},
			{"done a t-0", "ok"},
			{"done a t-1", "ok"},
			{"crash before write", ""},
			{"done a u-0", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"markers", "a t-0 31/1 commit v2 c2, a t-1 31/1 commit v2 c2, a u-0 31/1 commit v2 c2"},
		}},
		{"the run ends behind the completion", three, []step{
			{"end a 31/0 v2 commit", "31/1"},
			{"done a t-0", "ok"},
			{"done a t-1", "ok"},
			{"crash after write", ""},
			{"done a u-0", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"markers", "none"},
			{"state a", "CompleteCommit 31/1 last 31/0"},
		}},
		{"of several transactional ids", []record{
			held("b", Ongoing, Producer{32, 0}, 1, Partition{"t", 0}),
			held("a", Ongoing, Producer{31, 0}, 1, Partition{"t", 0}),
		}, []step{
			{"end b 32/0 v1 abort", "32/0"},
			{"end a 31/0 v1 commit", "31/0"},
			{"markers", "a t-0 31/0 commit v1 c1, b t-0 32/0 abort v1 c1"},
			{"done b t-0", "ok"},
			{"markers", "a t-0 31/0 commit v1 c1"},
		}},
	})
}

// A late report of an earlier transaction's marker ends nothing.
func TestMarkerDoneOfAnotherTransaction(t *testing.T) {
	w := newWorld(t)
	w.run([]step{
		{"init a", "4000/0"},
		{"add a 4000/0 v1 t-0", "ok"},
		{"end a 4000/0 v1 commit", "4000/0"},
	})
	old := w.c.Markers()[0]
	w.run([]step{
		{"done a t-0", "ok"},
		{"add a 4000/0 v1 t-0", "ok"},
		{"end a 4000/0 v1 abort", "4000/0"},
	})
	for _, m := range []Marker{
		old,
		{},
		{TransactionalID: "b", Partition: Partition{"t", 0}},
	} {
		if err := w.c.MarkerDone(w.now, m, nil); err != nil {
			t.Errorf("MarkerDone(%v): %v", m, err)
		}
	}
	now := w.c.Markers()[0]
	for _, change := range []func(*Marker){
		func(m *Marker) { m.Partition.Partition++ },
		func(m *Marker) { m.ProducerID++ },
		func(m *Marker) { m.Epoch++ },
		func(m *Marker) { m.CoordinatorEpoch-- },
	} {
		m := now
		change(&m)
		if err := w.c.MarkerDone(w.now, m, nil); err != nil {
			t.Errorf("MarkerDone(%v): %v", m, err)
		}
	}
	w.run([]step{{"state a", "PrepareAbort 4000/0 t-0"}})
}

func TestExpire(t *testing.T) {
	runScenarios(t, []scenario{
		{"version 1", nil, []step{
			{"init a timeout 10s", "4000/0"},
			{"clock 1h", ""},
			{"expire", "ok"}, // nothing is open
			{"add a 4000/0 v1 t-0", "ok"},
			{"clock 9999ms", ""},
			{"add a 4000/0 v1 t-1", "ok"}, // does not start it again
			{"expire", "ok"},
			{"state a", "Ongoing 4000/0 t-0 t-1"},
			{"clock 1ms", ""},
			{"expire", "ok"},
			{"state a", "PrepareAbort 4000/1 last 4000/0 t-0 t-1"},
			{"markers", "a t-0 4000/1 abort v1 c1, a t-1 4000/1 abort v1 c1"},
			{"end a 4000/0 v1 commit", "PRODUCER_FENCED"},
			{"done a t-0", "ok"},
			{"done a t-1", "ok"},
			{"end a 4000/0 v1 abort", "PRODUCER_FENCED"},
			{"init a expect 4000/0", "4000/1"}, // the client comes back
			{"add a 4000/1 v1 t-0", "ok"},
		}},
		{"version 2", nil, []step{
			{"init a timeout 10s", "4000/0"},
			{"add a 4000/0 v2 t-0", "ok"},
			{"clock 10s", ""},
			{"expire", "ok"},
			{"state a", "PrepareAbort 4000/1 last 4000/0 t-0"},
			{"expire", "ok"},
			{"state a", "PrepareAbort 4000/1 last 4000/0 t-0"},
			{"end a 4000/0 v2 commit", "INVALID_TXN_STATE"},
			{"end a 4000/0 v2 abort", "4000/1"},
			{"done a t-0", "ok"},
			{"add a 4000/1 v2 t-0", "ok"},
		}},
		{"the time-out goes on through a restart", nil, []step{
			{"init a timeout 10s", "4000/0"},
			{"add a 4000/0 v2 t-0", "ok"},
			{"clock 6s", ""},
			{"restart", "2"},
			{"clock 4s", ""},
			{"expire", "ok"},
			{"state a", "PrepareAbort 4000/1 last 4000/0 t-0"},
		}},
		{"the clock goes back", nil, []step{
			{"init a timeout 10s", "4000/0"},
			{"add a 4000/0 v2 t-0", "ok"},
			{"clock -1h", ""},
			{"expire", "ok"},
			{"state a", "Ongoing 4000/0 t-0"},
		}},
		{"the abort cannot be written", nil, []step{
			{"init a timeout 10s", "4000/0"},
			{"init b timeout 10s", "4001/0"},
			{"add a 4000/0 v2 t-0", "ok"},
			{"add b 4001/0 v2 t-0", "ok"},
			{"clock 10s", ""},
			{"write fails", ""},
			{"expire", "COORDINATOR_NOT_AVAILABLE"},
			{"state a", "Ongoing 4000/0 t-0"},
			{"state b", "PrepareAbort 4001/1 last 4001/0 t-0"},
			{"expire", "ok"},
			{"state a", "PrepareAbort 4000/1 last 4000/0 t-0"},
		}},
		{"idle for seven days", nil, []step{
			{"init empty", "4000/0"},
			{"init done timeout 10s", "4001/0"},
			{"init open timeout 15m", "4002/0"},
			{"init ending", "4003/0"},
			{"add done 4001/0 v2 t-0", "ok"},
			{"add ending 4003/0 v2 t-0", "ok"},
			{"end done 4001/0 v2 commit", "4001/1"},
			{"end ending 4003/0 v2 commit", "4003/1"},
			{"done done t-0", "ok"},
			{"clock 167h59m59s", ""},
			{"expire", "ok"},
			{"add open 4002/0 v2 t-0", "ok"},
			{"state empty", "Empty 4000/0"},
			{"clock 1s", ""},
			{"expire", "ok"},
			{"state empty", "unknown"},
			{"state done", "unknown"},
			{"state open", "Ongoing 4002/0 t-0"},
			{"state ending", "PrepareCommit 4003/1 last 4003/0 t-0"},
			{"restart", "2"},
			{"state empty", "unknown"},
			{"add empty 4000/0 v1 t-0", "INVALID_PRODUCER_ID_MAPPING"},
			{"init empty expect 4000/0", "PRODUCER_FENCED"},
			{"init empty", "5000/0"},
		}},
		{"forgetting cannot be written", nil, []step{
			{"init a", "4000/0"},
			{"clock 168h", ""},
			{"write fails", ""},
			{"expire", "COORDINATOR_NOT_AVAILABLE"},
			{"state a", "Empty 4000/0"},
			{"expire", "ok"},
			{"state a", "unknown"},
		}},
	})
}

func TestOffsetsInATransaction(t *testing.T) {
	runScenarios(t, []scenario{
		{"commit, the last one counts", nil, []step{
			{"init a", "4000/0"},
			{"commit g t-0=3 t-1=3", "ok"},
			{"group a 4000/0 g", "ok"},
			{"quiet group a 4000/0 g", "ok"}, // the answer was lost
			{"fetch g stable t-0", "t-0=3"},
			{"stage a 4000/0 v1 g t-0=5 t-0=6", "ok"},
			{"stage a 4000/0 v1 g t-0=7", "ok"},
			{"quiet stage a 4000/0 v1 g t-0=7", "ok"}, // the answer was lost
			{"fetch g t-0 t-1 t-2", "t-0=3 t-1=3 t-2=-1"},
			{"fetch g stable t-0 t-1 t-2", "t-0=UNSTABLE_OFFSET_COMMIT t-1=3 t-2=-1"},
			{"fetch h stable t-0", "t-0=-1"},
			{"end a 4000/0 v1 commit", "4000/0"},
			{"fetch g stable", "t-0=7 t-1=3"},
			{"state a", "CompleteCommit 4000/0"},
			{"restart", "2"},
			{"fetch g stable", "t-0=7 t-1=3"},
		}},
		{"abort", nil, []step{
			{"init a", "4000/0"},
			{"stage a 4000/0 v2 g t-0=5", "ok"},
			{"fetch g", "t-0=-1"},
			{"fetch g stable", "t-0=UNSTABLE_OFFSET_COMMIT"},
			{"end a 4000/0 v2 abort", "4000/1"},
			{"fetch g stable", "none"},
			{"fetch g stable t-0", "t-0=-1"},
			{"stage a 4000/1 v2 g t-1=5", "ok"},
			{"end a 4000/1 v2 commit", "4000/2"},
			{"fetch g", "t-1=5"},
		}},
		{"with partitions, they count from the decision on", nil, []step{
			{"init a", "4000/0"},
			{"add a 4000/0 v2 out-0", "ok"},
			{"stage a 4000/0 v2 g in-0=5", "ok"},
			{"restart", "2"},
			{"fetch g stable in-0", "in-0=UNSTABLE_OFFSET_COMMIT"},
			{"end a 4000/0 v2 commit", "4000/1"},
			{"fetch g stable in-0", "in-0=5"},
			{"commit g in-0=9", "ok"},
			{"restart", "3"},
			{"fetch g stable in-0", "in-0=9"}, // the decision is not applied twice
			{"done a out-0", "ok"},
			{"fetch g stable in-0", "in-0=9"},
		}},
		{"a time-out drops them", nil, []step{
			{"init a timeout 10s", "4000/0"},
			{"stage a 4000/0 v2 g t-0=5", "ok"},
			{"clock 10s", ""},
			{"expire", "ok"},
			{"fetch g stable t-0", "t-0=-1"},
			{"stage a 4000/0 v2 g t-0=5", "PRODUCER_FENCED"},
		}},
		{"two producers, two groups", nil, []step{
			{"init a", "4000/0"},
			{"init b", "4001/0"},
			{"stage a 4000/0 v2 g t-0=5", "ok"},
			{"stage a 4000/0 v2 h t-2=6", "ok"},
			{"fetch g", "t-0=-1"},
			{"fetch h", "t-2=-1"},
			{"stage b 4001/0 v2 g t-0=7 t-1=7", "ok"},
			{"state a", "Ongoing 4000/0 g h"},
			{"end a 4000/0 v2 commit", "4000/1"},
			{"fetch g stable", "t-0=UNSTABLE_OFFSET_COMMIT t-1=UNSTABLE_OFFSET_COMMIT"},
			{"fetch g", "t-0=5 t-1=-1"},
			{"fetch h stable", "t-2=6"},
			{"end b 4001/0 v2 commit", "4001/1"},
			{"fetch g stable", "t-0=7 t-1=7"},
		}},
		{"version 1 needs the group", nil, []step{
			{"init a", "4000/0"},
			{"stage a 4000/0 v1 g t-0=5", "INVALID_TXN_STATE"},
			{"group a 4000/0 h", "ok"},
			{"stage a 4000/0 v1 g t-0=5", "INVALID_TXN_STATE"},
			{"stage a 4000/0 v1 h t-0=5", "ok"},
			{"end a 4000/0 v1 commit", "4000/0"},
			{"stage a 4000/0 v1 h t-0=5", "INVALID_TXN_STATE"},
		}},
		{"of another producer", nil, []step{
			{"group a 4000/0 g", "INVALID_PRODUCER_ID_MAPPING"},
			{"stage a 4000/0 v1 g t-0=5", "INVALID_PRODUCER_ID_MAPPING"},
			{"stage a 4000/0 v2 g t-0=5", "INVALID_PRODUCER_ID_MAPPING"},
			{"init a", "4000/0"},
			{"init a", "4000/1"},
			{"group a 4000/0 g", "PRODUCER_FENCED"},
			{"stage a 4000/0 v1 g t-0=5", "PRODUCER_FENCED"},
			{"stage a 4000/0 v2 g t-0=5", "PRODUCER_FENCED"},
			{"add a 4000/1 v1 t-0", "ok"},
			{"end a 4000/1 v1 commit", "4000/1"},
			{"group a 4000/1 g", "CONCURRENT_TRANSACTIONS"},
			{"stage a 4000/1 v1 g t-0=5", "CONCURRENT_TRANSACTIONS"},
			{"stage a 4000/1 v2 g t-0=5", "CONCURRENT_TRANSACTIONS"},
		}},
		{"the answer of the staging is lost with the run", nil, []step{
			{"init a", "4000/0"},
			{"crash after write", ""},
			{"stage a 4000/0 v2 g t-0=5", "COORDINATOR_NOT_AVAILABLE"},
			{"fetch g stable t-0", "t-0=-1"},
			{"restart", "2"},
			{"fetch g stable t-0", "t-0=UNSTABLE_OFFSET_COMMIT"},
			{"stage a 4000/0 v2 g t-0=5", "ok"},
			{"crash after write", ""},
			{"end a 4000/0 v2 commit", "COORDINATOR_NOT_AVAILABLE"},
			{"fetch g stable t-0", "t-0=UNSTABLE_OFFSET_COMMIT"},
			{"restart", "3"},
			{"fetch g stable t-0", "t-0=5"},
			{"end a 4000/0 v2 commit", "4000/1"},
		}},
		{"the decision is lost with the run", nil, []step{
			{"init a", "4000/0"},
			{"stage a 4000/0 v2 g t-0=5", "ok"},
			{"crash before write", ""},
			{"end a 4000/0 v2 commit", "COORDINATOR_NOT_AVAILABLE"},
			{"restart", "2"},
			{"fetch g stable t-0", "t-0=UNSTABLE_OFFSET_COMMIT"},
			{"end a 4000/0 v2 abort", "4000/1"},
			{"fetch g stable t-0", "t-0=-1"},
		}},
	})
}

func TestOffsetCommit(t *testing.T) {
	runScenarios(t, []scenario{
		{"plain", nil, []step{
			{"fetch g", "none"},
			{"commit g u-1=2 t-0=1 t-0=3", "ok"},
			{"fetch g", "t-0=3 u-1=2"},
			{"commit g t-0=1", "ok"}, // back
			{"restart", "2"},
			{"fetch g u-1 t-0", "u-1=2 t-0=1"},
			{"commit g", "ok"},
			{"fetch g stable", "t-0=1 u-1=2"},
		}},
		{"not written", nil, []step{
			{"write fails", ""},
			{"commit g t-0=1", "COORDINATOR_NOT_AVAILABLE"},
			{"fetch g t-0", "t-0=-1"},
		}},
		{"refused", nil, []step{
			{"commit g t-0=-1", "INVALID_REQUEST"},
			{"commit g -0=1", "INVALID_REQUEST"},
			{"commit g t--1=1", "INVALID_REQUEST"},
		}},
	})
}

// Of two commits of one offset that are written together, the one behind the
// other in the log counts, whichever is applied first.
func TestTheLogDecidesWhichOffsetCounts(t *testing.T) {
	w := newWorld(t)
	first := true
	w.log.waiting = func(record) {
		if first {
			first = false
			w.run([]step{{"commit g t-0=2", "ok"}})
		}
	}
	w.run([]step{
		{"commit g t-0=1", "ok"},
		{"fetch g t-0", "t-0=2"},
		{"restart", "2"},
		{"fetch g t-0", "t-0=2"},
	})
}

// What is not durable has no effect that anything could see.
func TestNothingShowsBeforeItIsDurable(t *testing.T) {
	w := newWorld(t)
	waits := 0
	look := func(steps ...step) {
		w.log.waiting = func(r record) {
			if _, block := r.(blockRecord); !block {
				waits++
				w.run(steps)
			}
		}
	}
	look(step{"state a", "unknown"})
	w.run([]step{{"init a", "4000/0"}})
	look(step{"state a", "Empty 4000/0"}, step{"verify a 4000/0 t-0", "INVALID_TXN_STATE"})
	w.run([]step{{"add a 4000/0 v2 t-0", "ok"}})
	look(step{"fetch g stable t-0", "t-0=-1"})
	w.run([]step{{"stage a 4000/0 v2 g t-0=5", "ok"}})
	look(step{"markers", "none"}, step{"fetch g stable t-0", "t-0=UNSTABLE_OFFSET_COMMIT"}, step{"state a", "Ongoing 4000/0 t-0 g"})
	w.run([]step{{"end a 4000/0 v2 commit", "4000/1"}})
	look(step{"state a", "PrepareCommit 4000/1 last 4000/0 t-0 g"}, step{"epoch", "1"})
	w.run([]step{{"done a t-0", "ok"}})
	look(step{"fetch g t-0", "t-0=5"})
	w.run([]step{{"commit g t-0=6", "ok"}})
	if waits != 6 {
		t.Errorf("looked %d times, want 6", waits)
	}
}

func TestProducerIDs(t *testing.T) {
	runScenarios(t, []scenario{
		{"shared by both kinds of producers, blocks are not reused", nil, []step{
			{"newid", "4000"},
			{"init a", "4001/0"},
			{"newid", "4002"},
			{"restart", "2"},
			{"newid", "5000"},
		}},
	})

	t.Run("the next block is durable before its first id", func(t *testing.T) {
		w := newWorld(t)
		blocks := 0
		w.log.waiting = func(r record) {
			if b, ok := r.(blockRecord); ok {
				blocks++
				if want := int64(firstID + 1000*blocks); b.end != want {
					t.Errorf("block up to %d, want %d", b.end, want)
				}
			}
		}
		for i := range 2001 {
			id, err := w.c.NewProducerID()
			if err != nil || id != int64(firstID+i) {
				t.Fatalf("id %d, %v, want %d", id, err, firstID+i)
			}
			if want := i/1000 + 1; blocks != want {
				t.Fatalf("%d blocks before id %d, want %d", blocks, id, want)
			}
		}
	})

	t.Run("no block, no id", func(t *testing.T) {
		w := newWorld(t)
		w.log.dead = true
		if id, err := w.c.NewProducerID(); !errors.Is(err, kerr.CoordinatorNotAvailable) || !errors.Is(err, errDisk) {
			t.Errorf("id %d, %v", id, err)
		}
		if got := w.do("init a"); got != "COORDINATOR_NOT_AVAILABLE" {
			t.Errorf("init: %s", got)
		}
		w.log.dead = false
		w.run([]step{{"newid", "4000"}, {"init a", "4001/0"}})
	})

	// Case PID-COLLISION: the logs know ids that were never reserved here.
	t.Run("above the highest id in the logs", func(t *testing.T) {
		w := newWorld(t)
		w.run([]step{{"newid", "4000"}})
		w.cfg.FirstProducerID = 9000
		w.run([]step{{"restart", "2"}, {"newid", "9000"}})
		w.cfg.FirstProducerID = 0 // they were deleted
		w.run([]step{{"restart", "3"}, {"newid", "10000"}})
	})

	t.Run("ids in use are passed over", func(t *testing.T) {
		w := newWorld(t)
		w.c.cfg.InUse = func(id int64) bool { return id%2 == 0 || id < 5100 }
		w.run([]step{{"newid", "5101"}, {"init a", "5103/0"}, {"restart", "2"}, {"newid", "6000"}})
	})

	t.Run("the last ones", func(t *testing.T) {
		w := newWorld(t, held("a", Ongoing, Producer{31, 32766}, 2, Partition{"t", 0}))
		w.cfg.FirstProducerID = math.MaxInt64 - 1000
		w.restart()
		for i := range 1000 {
			if id, err := w.c.NewProducerID(); err != nil || id != math.MaxInt64-1000+int64(i) {
				t.Fatalf("id %d, %v", id, err)
			}
		}
		w.run([]step{
			{"newid", "COORDINATOR_NOT_AVAILABLE"},
			{"init b", "COORDINATOR_NOT_AVAILABLE"},
			{"init a", "COORDINATOR_NOT_AVAILABLE"}, // would rotate
			{"end a 31/32766 v2 commit", "COORDINATOR_NOT_AVAILABLE"},
			{"state a", "Ongoing 31/32766 t-0"},
			{"end a 31/32766 v1 commit", "31/32766"},
			{"done a t-0", "ok"},
			{"init a", "COORDINATOR_NOT_AVAILABLE"},
		})
	})
}

func TestNames(t *testing.T) {
	w := newWorld(t)
	long := string(make([]byte, 32768))
	p, one := Producer{4000, 0}, []Partition{{"t", 0}}
	for _, id := range []string{"", long} {
		if _, err := w.c.InitProducerID(w.now, id, NoProducer, time.Minute); err != kerr.InvalidRequest {
			t.Errorf("InitProducerID: %v", err)
		}
		if err := w.c.AddPartitionsToTxn(w.now, id, p, 1, one); err != kerr.InvalidRequest {
			t.Errorf("AddPartitionsToTxn: %v", err)
		}
		if err := w.c.AddOffsetsToTxn(w.now, id, p, "g"); err != kerr.InvalidRequest {
			t.Errorf("AddOffsetsToTxn: %v", err)
		}
		if err := w.c.TxnOffsetCommit(w.now, id, p, 1, "g", nil); err != kerr.InvalidRequest {
			t.Errorf("TxnOffsetCommit: %v", err)
		}
		if _, err := w.c.EndTxn(w.now, id, p, 1, true); err != kerr.InvalidRequest {
			t.Errorf("EndTxn: %v", err)
		}
		if err := w.c.AddOffsetsToTxn(w.now, "a", p, id); err != kerr.InvalidGroupID {
			t.Errorf("AddOffsetsToTxn, group: %v", err)
		}
		if err := w.c.OffsetCommit(id, nil); err != kerr.InvalidGroupID {
			t.Errorf("OffsetCommit: %v", err)
		}
	}
	for size, want := range map[int]error{4096: nil, 4097: kerr.OffsetMetadataTooLarge} {
		o := Offset{Partition: one[0], LeaderEpoch: -1, Metadata: long[:size]}
		if err := w.c.OffsetCommit("g", []Offset{o}); err != want {
			t.Errorf("OffsetCommit, %d bytes of metadata: %v, want %v", size, err, want)
		}
	}
	w.run([]step{{"restart", "2"}})
	if got := w.c.OffsetFetch("g", nil, true); len(got) != 1 || len(got[0].Committed.Metadata) != 4096 {
		t.Errorf("OffsetFetch after the restart: %d answers", len(got))
	}
}

func TestDescribe(t *testing.T) {
	w := newWorld(t)
	w.run([]step{
		{"init b timeout 10s", "4000/0"},
		{"init a", "4001/0"},
		{"clock 1s", ""},
		{"add b 4000/0 v2 t-1 t-0", "ok"},
		{"clock 1s", ""},
		{"stage b 4000/0 v2 g t-0=1", "ok"},
	})
	all := w.c.List()
	if len(all) != 2 || all[0].TransactionalID != "a" || all[1].TransactionalID != "b" {
		t.Fatalf("List: %+v", all)
	}
	if all[0].State != Empty || !all[0].Start.IsZero() {
		t.Errorf("a: %+v", all[0])
	}
	b := all[1]
	if b.State != Ongoing || b.Timeout != 10*time.Second || !b.Start.Equal(w.now.Add(-time.Second)) || !b.LastUpdate.Equal(w.now) {
		t.Errorf("b: %+v", b)
	}
	b.Partitions[0] = Partition{"scribbled", 9}
	b.Groups[0] = "scribbled"
	w.run([]step{{"state b", "Ongoing 4000/0 t-0 t-1 g"}})
	if s := State(6).String(); s != "State(6)" {
		t.Errorf("State(6) is %q", s)
	}
}
