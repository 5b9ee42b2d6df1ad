package server_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// What does not fit a transaction is refused with the code that says why, and is not
// in the log.
func TestBadTransactionalRequests(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	s := c.newSession("x")
	other := c.newSession("y")
	batch := func(pid int64, epoch int16, attributes int16) []byte {
		return segmenttest.Edit(segmenttest.Batch(pid, epoch, 0, "v"),
			func(b *kmsg.RecordBatch) { b.Attributes |= attributes })
	}
	const transactional, control = 1 << 4, 1 << 5
	produce := func(version int16, id *string, batch []byte) int16 {
		t.Helper()
		req := produceRequest("t", 0, batch)
		req.Version, req.TransactionID = version, id
		return c.produce(req).Code
	}
	wantCode(t, "a transactional batch, without a transaction", produce(9, &s.id, batch(s.producer, s.epoch, transactional)), kerr.InvalidTxnState)
	wantCode(t, "of another producer", produce(12, &s.id, batch(other.producer, s.epoch, transactional)), kerr.InvalidProducerIDMapping)
	wantCode(t, "of another epoch", produce(12, &s.id, batch(s.producer, s.epoch+1, transactional)), kerr.InvalidProducerEpoch)
	nobody := "nobody"
	wantCode(t, "of an unknown transactional id", produce(12, &nobody, batch(s.producer, s.epoch, transactional)), kerr.InvalidProducerIDMapping)
	for name, code := range map[string]int16{
		"a transactional batch in a request without an id": produce(12, nil, batch(s.producer, s.epoch, transactional)),
		"a marker from a client":                           produce(12, &s.id, batch(s.producer, s.epoch, transactional|control)),
	} {
		if code <= 0 {
			t.Errorf("%s: code %d", name, code)
		}
	}
	if end := c.end(); end != 0 {
		t.Errorf("log end offset %d after refusals, want 0", end)
	}

	wantCode(t, "EndTxn of nothing, version 2", s.endTxn(5, true).ErrorCode, kerr.InvalidTxnState)
	wantCode(t, "begin", s.addPartition(3), nil)
	wrong := *s
	wrong.epoch++
	wantCode(t, "EndTxn of another epoch", wrong.endTxn(5, true).ErrorCode, kerr.ProducerFenced)
	wantCode(t, "EndTxn of another epoch, before PRODUCER_FENCED", wrong.endTxn(1, true).ErrorCode, kerr.InvalidProducerEpoch)
	wantCode(t, "AddPartitionsToTxn of another epoch", wrong.addPartition(3), kerr.ProducerFenced)
	wantCode(t, "AddPartitionsToTxn of another epoch, before PRODUCER_FENCED", wrong.addPartition(1), kerr.InvalidProducerEpoch)
	wrong.producer, wrong.epoch = other.producer, s.epoch
	wantCode(t, "EndTxn of another producer", wrong.endTxn(5, true).ErrorCode, kerr.InvalidProducerIDMapping)

	req := kmsg.NewPtrAddPartitionsToTxnRequest()
	req.Version, req.TransactionalID, req.ProducerID, req.ProducerEpoch = 3, s.id, s.producer, s.epoch
	req.Topics = []kmsg.AddPartitionsToTxnRequestTopic{{Topic: "t", Partitions: []int32{1, 77}}}
	partitions := ask[*kmsg.AddPartitionsToTxnResponse](c, req).Topics[0].Partitions
	wantCode(t, "a partition beside one that does not exist", partitions[0].ErrorCode, kerr.OperationNotAttempted)
	wantCode(t, "a partition that does not exist", partitions[1].ErrorCode, kerr.UnknownTopicOrPartition)

	init := kmsg.NewPtrInitProducerIDRequest()
	init.Version, init.TransactionalID = 4, &nobody
	for timeout, want := range map[int32]*kerr.Error{
		0: kerr.InvalidTransactionTimeout, -1: kerr.InvalidTransactionTimeout, 1<<31 - 1: kerr.InvalidTransactionTimeout,
	} {
		init.TransactionTimeoutMillis = timeout
		wantCode(t, "an impossible time-out", ask[*kmsg.InitProducerIDResponse](c, init).ErrorCode, want)
	}
	empty := ""
	init.TransactionalID, init.TransactionTimeoutMillis = &empty, 1000
	wantCode(t, "an empty transactional id", ask[*kmsg.InitProducerIDResponse](c, init).ErrorCode, kerr.InvalidRequest)

	wantCode(t, "the transaction goes on", s.txnBatch(0, 1).Code, nil)
	wantCode(t, "and ends", s.endTxn(5, true).ErrorCode, nil)
	if end := c.awaitStable(); end != 2 {
		t.Errorf("log end offset %d, want 2: a record and its marker", end)
	}
}

// A transactions.log that a crash has left behind is read as far as it was synced.
// One that is damaged is not: the broker says where, and does not start.
func TestDamagedTransactionsLog(t *testing.T) {
	dir := t.TempDir()
	b := start(t, server.Config{Dir: dir})
	c := b.dial()
	c.create("t")
	for _, id := range []string{"one", "two", "three"} {
		s := c.newSession(id)
		wantCode(t, "begin", s.addPartition(3), nil)
		wantCode(t, "end", s.endTxn(4, true).ErrorCode, nil)
		c.awaitStable()
	}
	open := c.newSession("open")
	wantCode(t, "begin", open.addPartition(3), nil)
	b.kill()
	path := filepath.Join(dir, server.TxnLogName)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// The log begins with the record of the start; its length stands first.
	size := int(good[3]) + 4
	for name, damaged := range map[string]struct {
		log    []byte
		refuse bool
	}{
		"whole":             {log: good},
		"torn tail":         {log: append(bytes.Clone(good), good[:size-1]...)},
		"zeros at the end":  {log: append(bytes.Clone(good), make([]byte, 100)...)},
		"a record twice":    {log: append(bytes.Clone(good), good[:size]...)},
		"a flipped byte":    {log: flip(good, len(good)/2), refuse: true},
		"nothing but zeros": {log: make([]byte, len(good))},
		"the middle is cut": {log: append(bytes.Clone(good[:len(good)/2]), good[len(good)/2+7:]...), refuse: true},
	} {
		if err := os.WriteFile(path, damaged.log, 0o644); err != nil {
			t.Fatal(err)
		}
		s, err := server.Open(server.Config{Dir: dir})
		if damaged.refuse {
			if err == nil || !strings.Contains(err.Error(), server.TxnLogName) {
				t.Errorf("%s: Open: %v, want an error that names the file", name, err)
			}
			if now, _ := os.ReadFile(path); !bytes.Equal(now, damaged.log) {
				t.Errorf("%s: Open has changed the log that it refuses", name)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		s.Shutdown(t.Context())
	}
}

func flip(p []byte, at int) []byte {
	p = bytes.Clone(p)
	p[at] ^= 0x10
	return p
}
