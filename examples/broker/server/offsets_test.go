package server_test

import (
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// A session is a raw client with a transactional id.
type session struct {
	*client
	id       string
	producer int64
	epoch    int16
}

// newSession has a producer id handed out, as often as it takes for the transaction
// of the last holder to be aborted.
func (c *client) newSession(id string) *session {
	c.t.Helper()
	s := &session{client: c, id: id}
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		resp := c.initTransactional(id, -1, -1)
		s.producer, s.epoch = resp.ProducerID, resp.ProducerEpoch
		if resp.ErrorCode == 0 {
			return s
		}
		if resp.ErrorCode != kerr.ConcurrentTransactions.Code || time.Now().After(deadline) {
			c.t.Fatalf("InitProducerId of %q: code %d", id, resp.ErrorCode)
		}
	}
}

// initTransactional asks once, and expects the producer to be (pid, epoch).
func (c *client) initTransactional(id string, pid int64, epoch int16) *kmsg.InitProducerIDResponse {
	c.t.Helper()
	req := kmsg.NewPtrInitProducerIDRequest()
	req.Version, req.TransactionalID, req.TransactionTimeoutMillis = 4, &id, 60_000
	req.ProducerID, req.ProducerEpoch = pid, epoch
	return ask[*kmsg.InitProducerIDResponse](c, req)
}

// end ends the transaction by the rules of version 1 (request 4) or 2 (request 5).
func (s *session) endTxn(version int16, commit bool) *kmsg.EndTxnResponse {
	s.t.Helper()
	req := kmsg.NewPtrEndTxnRequest()
	req.Version, req.TransactionalID, req.Commit = version, s.id, commit
	req.ProducerID, req.ProducerEpoch = s.producer, s.epoch
	return ask[*kmsg.EndTxnResponse](s.client, req)
}

func (s *session) addOffsets(group string) int16 {
	s.t.Helper()
	req := kmsg.NewPtrAddOffsetsToTxnRequest()
	req.Version, req.TransactionalID, req.Group = 3, s.id, group
	req.ProducerID, req.ProducerEpoch = s.producer, s.epoch
	return ask[*kmsg.AddOffsetsToTxnResponse](s.client, req).ErrorCode
}

// stage commits an offset of partition 0 of topic in the transaction.
func (s *session) stage(version int16, group, topic string, offset int64) int16 {
	s.t.Helper()
	req := kmsg.NewPtrTxnOffsetCommitRequest()
	req.Version, req.TransactionalID, req.Group = version, s.id, group
	req.ProducerID, req.ProducerEpoch = s.producer, s.epoch
	p := kmsg.NewTxnOffsetCommitRequestTopicPartition()
	p.Offset = offset
	req.Topics = []kmsg.TxnOffsetCommitRequestTopic{{Topic: topic, Partitions: []kmsg.TxnOffsetCommitRequestTopicPartition{p}}}
	return ask[*kmsg.TxnOffsetCommitResponse](s.client, req).Topics[0].Partitions[0].ErrorCode
}

func (c *client) commitOffset(group, topic string, offset int64, generation int32) int16 {
	c.t.Helper()
	req := kmsg.NewPtrOffsetCommitRequest()
	req.Version, req.Group, req.Generation = 8, group, generation
	p := kmsg.NewOffsetCommitRequestTopicPartition()
	p.Offset = offset
	req.Topics = []kmsg.OffsetCommitRequestTopic{{Topic: topic, Partitions: []kmsg.OffsetCommitRequestTopicPartition{p}}}
	return ask[*kmsg.OffsetCommitResponse](c, req).Topics[0].Partitions[0].ErrorCode
}

// committed is the offset of partition 0 of topic "t", or -1, and the code.
func (c *client) committed(version int16, group string, stable bool) (int64, int16) {
	c.t.Helper()
	req := kmsg.NewPtrOffsetFetchRequest()
	req.Version, req.Group, req.RequireStable = version, group, stable
	req.Topics = []kmsg.OffsetFetchRequestTopic{{Topic: "t", Partitions: []int32{0}}}
	g := kmsg.NewOffsetFetchRequestGroup()
	g.Group, g.Topics = group, []kmsg.OffsetFetchRequestGroupTopic{{Topic: "t", Partitions: []int32{0}}}
	req.Groups = []kmsg.OffsetFetchRequestGroup{g}
	resp := ask[*kmsg.OffsetFetchResponse](c, req)
	if version < 8 {
		p := resp.Topics[0].Partitions[0]
		return p.Offset, p.ErrorCode
	}
	p := resp.Groups[0].Topics[0].Partitions[0]
	return p.Offset, p.ErrorCode
}

func wantCode(t *testing.T, what string, got int16, want *kerr.Error) {
	t.Helper()
	code := int16(0)
	if want != nil {
		code = want.Code
	}
	if got != code {
		t.Errorf("%s: code %d, want %d", what, got, code)
	}
}

// Offsets of a group are committed with a transaction, or dropped with it, and
// survive a restart.
func TestOffsetsInTransactions(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir()}
	b := start(t, cfg)
	c := b.dial()
	c.create("t")
	want := func(when string, offset int64) {
		t.Helper()
		for version := int16(1); version <= 8; version++ {
			if got, code := c.committed(version, "g", false); got != offset || code != 0 {
				t.Errorf("%s, OffsetFetch %d: offset %d, code %d, want %d", when, version, got, code, offset)
			}
		}
	}
	want("at first", -1)
	wantCode(t, "OffsetCommit", c.commitOffset("g", "t", 5, -1), nil)
	want("committed", 5)
	wantCode(t, "OffsetCommit of a member", c.commitOffset("g", "t", 6, 1), kerr.UnknownMemberID)
	wantCode(t, "OffsetCommit of an unknown topic", c.commitOffset("g", "nowhere", 6, -1), kerr.UnknownTopicOrPartition)
	want("after refusals", 5)

	s := c.newSession("x")
	wantCode(t, "TxnOffsetCommit without AddOffsetsToTxn, version 1", s.stage(4, "g", "t", 7), kerr.InvalidTxnState)
	wantCode(t, "AddOffsetsToTxn", s.addOffsets("g"), nil)
	wantCode(t, "TxnOffsetCommit", s.stage(4, "g", "t", 7), nil)
	wantCode(t, "TxnOffsetCommit of an unknown topic", s.stage(4, "g", "nowhere", 7), kerr.UnknownTopicOrPartition)
	want("staged", 5)
	if _, code := c.committed(7, "g", true); code != kerr.UnstableOffsetCommit.Code {
		t.Errorf("stable offset while one is staged: code %d, want 88", code)
	}
	s.epoch++
	wantCode(t, "TxnOffsetCommit of another epoch", s.stage(4, "g", "t", 8), kerr.InvalidProducerEpoch)
	wantCode(t, "AddOffsetsToTxn of another epoch", s.addOffsets("g"), kerr.ProducerFenced)
	s.epoch--
	wantCode(t, "EndTxn", s.endTxn(4, false).ErrorCode, nil)
	want("aborted", 5)

	wantCode(t, "TxnOffsetCommit, version 2", s.stage(5, "g", "t", 7), nil)
	wantCode(t, "the last one counts", s.stage(5, "g", "t", 9), nil)
	wantCode(t, "EndTxn", s.endTxn(5, true).ErrorCode, nil)
	want("committed in a transaction", 9)
	if offset, code := c.committed(8, "g", true); offset != 9 || code != 0 {
		t.Errorf("stable offset: %d, code %d", offset, code)
	}
	b.kill()
	c = start(t, cfg).dial()
	want("after a restart", 9)
}
