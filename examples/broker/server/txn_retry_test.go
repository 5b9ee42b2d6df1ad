package server_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// A textLog is a transactions.log in memory.
type textLog []byte

func (l *textLog) Append(record []byte) func() error {
	*l = append(*l, record...)
	return func() error { return nil }
}

// atEpoch writes a transactions.log in which the transactional id "x" has reached an
// epoch, and returns its producer.
func atEpoch(t *testing.T, dir string, epoch int16) txn.Producer {
	t.Helper()
	logs, err := logsByEpoch()
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, server.TxnLogName), logs[epoch], 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	return txn.Producer{ID: 0, Epoch: epoch}
}

// logsByEpoch raises the epoch of "x", producer 0, from 0 to the last one of clients,
// and returns the log at each step.
var logsByEpoch = sync.OnceValues(func() (map[int16][]byte, error) {
	found, err := txn.Recover(nil)
	if err != nil {
		return nil, err
	}
	var log textLog
	c, err := txn.NewCoordinator(txn.Config{}, found, &log)
	if err != nil {
		return nil, err
	}
	logs := make(map[int16][]byte)
	for p := txn.NoProducer; p.Epoch < lastOfClients; {
		if p, err = c.InitProducerID(time.Now(), "x", txn.NoProducer, time.Minute); err != nil {
			return nil, err
		}
		logs[p.Epoch] = slices.Clip(log)
	}
	return logs, nil
})

// lastOfClients is the last epoch that a client gets.
const lastOfClients = math.MaxInt16 - 1

func (s *session) addPartition(version int16) int16 {
	s.t.Helper()
	req := kmsg.NewPtrAddPartitionsToTxnRequest()
	req.Version, req.TransactionalID, req.ProducerID, req.ProducerEpoch = version, s.id, s.producer, s.epoch
	req.Topics = []kmsg.AddPartitionsToTxnRequestTopic{{Topic: "t", Partitions: []int32{0}}}
	return ask[*kmsg.AddPartitionsToTxnResponse](s.client, req).Topics[0].Partitions[0].ErrorCode
}

// settled repeats a request while the markers of the last transaction are written.
func settled(t *testing.T, ask func() int16) int16 {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if code := ask(); code != kerr.ConcurrentTransactions.Code || time.Now().After(deadline) {
			return code
		}
	}
}

// A request whose answer was lost is sent again, and answered the same, at each
// epoch at which something changes, and when the broker was killed meanwhile.
func TestRetriesAtTheEdgesOfEpochs(t *testing.T) {
	for _, edge := range []struct {
		epoch int16
		next  int16 // the epoch after it; 0 has a new producer id
	}{{0, 1}, {lastOfClients - 1, lastOfClients}, {lastOfClients, 0}} {
		for _, version := range []int16{1, 2} {
			for _, restart := range []bool{false, true} {
				t.Run(fmt.Sprintf("epoch %d, version %d, restart %v", edge.epoch, version, restart), func(t *testing.T) {
					t.Parallel()
					cfg := server.Config{Dir: t.TempDir(), TransactionVersion: version}
					p := atEpoch(t, cfg.Dir, edge.epoch)
					b := start(t, cfg)
					s := &session{client: b.dial(), id: "x", producer: p.ID, epoch: p.Epoch}
					s.create("t")
					lose := func() { // the answer, and perhaps the broker
						t.Helper()
						if restart {
							b.kill()
							b = start(t, cfg)
							s.client = b.dial()
						}
					}
					follows := func(what string, id int64, epoch int16) {
						t.Helper()
						if epoch != edge.next || (id == p.ID) != (epoch > 0) {
							t.Errorf("%s: producer %d epoch %d, want epoch %d", what, id, epoch, edge.next)
						}
					}

					// AddPartitionsToTxn, or a Produce that adds the partition.
					begin := func() int16 {
						t.Helper()
						if version == 2 {
							return s.txnBatch(0, 1).Code
						}
						if code := s.addPartition(3); code != 0 {
							return code
						}
						return s.txnBatchAt(9, 0, 1).Code
					}
					wantCode(t, "begin", begin(), nil)
					lose()
					wantCode(t, "begin again", begin(), nil)
					if end := s.end(); end != 1 {
						t.Errorf("log end offset %d, want 1: the batch once", end)
					}

					endVersion := int16(4)
					if version == 2 {
						endVersion = 5
					}
					first := s.endTxn(endVersion, true)
					wantCode(t, "EndTxn", first.ErrorCode, nil)
					lose()
					again := s.endTxn(endVersion, true)
					wantCode(t, "EndTxn again", again.ErrorCode, nil)
					wantCode(t, "EndTxn with the other outcome", settled(t, func() int16 { return s.endTxn(endVersion, false).ErrorCode }), kerr.InvalidTxnState)
					if version == 2 {
						if again.ProducerID != first.ProducerID || again.ProducerEpoch != first.ProducerEpoch {
							t.Errorf("EndTxn answered %+v, and again %+v", first, again)
						}
						follows("EndTxn", first.ProducerID, first.ProducerEpoch)
						s.producer, s.epoch = first.ProducerID, first.ProducerEpoch
					}

					// InitProducerId, with the producer that the client has been.
					var initial *kmsg.InitProducerIDResponse
					wantCode(t, "InitProducerId", settled(t, func() int16 {
						initial = s.initTransactional("x", s.producer, s.epoch)
						return initial.ErrorCode
					}), nil)
					lose()
					repeated := s.initTransactional("x", s.producer, s.epoch)
					wantCode(t, "InitProducerId again", repeated.ErrorCode, nil)
					if repeated.ProducerID != initial.ProducerID || repeated.ProducerEpoch != initial.ProducerEpoch {
						t.Errorf("InitProducerId answered %+v, and again %+v", initial, repeated)
					}
					if version == 1 {
						follows("InitProducerId", initial.ProducerID, initial.ProducerEpoch)
					} else if rotated := s.epoch == lastOfClients; rotated != (initial.ProducerID != s.producer) ||
						rotated != (initial.ProducerEpoch == 0) || !rotated && initial.ProducerEpoch != s.epoch+1 {
						t.Errorf("InitProducerId: producer %d epoch %d after %d epoch %d",
							initial.ProducerID, initial.ProducerEpoch, s.producer, s.epoch)
					}
					wantCode(t, "InitProducerId of a producer that never was",
						s.initTransactional("x", s.producer+7, 3).ErrorCode, kerr.ProducerFenced)
				})
			}
		}
	}
}

// At the last epoch of clients a transaction is fenced with 32767, which no client
// gets: the next producer has a new id.
func TestFencedAtTheLastEpoch(t *testing.T) {
	for _, version := range []int16{1, 2} {
		cfg := server.Config{Dir: t.TempDir(), TransactionVersion: version}
		p := atEpoch(t, cfg.Dir, lastOfClients)
		b := start(t, cfg)
		old := &session{client: b.dial(), id: "x", producer: p.ID, epoch: p.Epoch}
		old.create("t")
		wantCode(t, "AddPartitionsToTxn", old.addPartition(3), nil)
		wantAnswer(t, "open", old.txnBatchAt(9, 0, 1), stored(0))
		wantCode(t, "InitProducerId", old.initTransactional("x", -1, -1).ErrorCode, kerr.ConcurrentTransactions)
		b.kill()
		b = start(t, cfg)
		old.client = b.dial()
		next := b.dial().newSession("x")
		if next.producer == p.ID || next.epoch != 0 {
			t.Errorf("version %d: the next producer is %d epoch %d, want a new id at epoch 0", version, next.producer, next.epoch)
		}
		if end := old.awaitStable(); end != 2 {
			t.Errorf("version %d: log end offset %d, want 2: the record and its marker", version, end)
		}
		if got := old.describeProducers("t").ActiveProducers[0].ProducerEpoch; got != math.MaxInt16 {
			t.Errorf("version %d: the marker has left epoch %d, want 32767", version, got)
		}
		code := old.txnBatchAt(9, 1, 1).Code
		if code != kerr.InvalidProducerEpoch.Code && code != kerr.InvalidProducerIDMapping.Code {
			t.Errorf("version %d: late batch: code %d, want 47 or 49", version, code)
		}
		if end := old.end(); end != 2 {
			t.Errorf("version %d: a late batch is in the log", version)
		}
	}
}
