package node

// This file is the consumer side: Fetch and ListOffsets.

import (
	"context"
	"errors"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

const (
	maxFetchBytes = 2 << 20
	maxFetchWait  = 30 * time.Second

	// linearizeTimeout is how long a read may wait until this node has applied
	// what was committed when the read began.
	linearizeTimeout = 5 * time.Second
)

// linearize returns when this node shows everything that was acknowledged before
// the call, by whatever node. It fails where the node does not lead.
//
// What was acknowledged then is below the commit index of the leader. Whether
// this node is the leader still is asked after that index was read. Raft's own
// AppliedIndex would not do for the wait: it is what was handed to the state
// machine, which may not be done with it.
func (n *Node) linearize() error {
	if !n.Ready() {
		return kerr.NotLeaderForPartition
	}
	ctx, cancel := context.WithTimeout(n.closing, linearizeTimeout)
	defer cancel()
	index := n.raft.CommitIndex()
	if err := await(ctx, n.raft.VerifyLeader()); err != nil {
		return kerr.NotLeaderForPartition
	}
	if err := n.machine.WaitReached(ctx, index); err != nil {
		return kerr.NotLeaderForPartition
	}
	return nil
}

// fetchBudget is how many bytes a Fetch is answered with, but for what the last
// batch has over.
func fetchBudget(req *kmsg.FetchRequest) int { return int(min(max(req.MaxBytes, 0), maxFetchBytes)) }

// fetchClaim is the most memory that the answer to a Fetch takes: the records,
// and a copy of them as they are sent.
func fetchClaim(req *kmsg.FetchRequest) int64 {
	return 2 * int64(fetchBudget(req)+statemachine.MaxBatchBytes)
}

// fetch answers with what there is. Any node may be asked: all that it has is
// committed.
func (n *Node) fetch(req *kmsg.FetchRequest) *kmsg.FetchResponse {
	budget := fetchBudget(req)
	resp := kmsg.NewPtrFetchResponse() // without a session id: sessions are optional
	for _, t := range req.Topics {
		topic := kmsg.NewFetchResponseTopic()
		topic.Topic = t.Topic
		for _, p := range t.Partitions {
			answer := n.fetchPartition(t.Topic, p, budget)
			budget -= len(answer.RecordBatches)
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp
}

// fetchPartition reads from one partition. The last batch may exceed the budget:
// a batch larger than the consumer asked for is sent all the same, or it would
// never get past it.
func (n *Node) fetchPartition(topic string, req kmsg.FetchRequestTopicPartition, budget int) kmsg.FetchResponseTopicPartition {
	resp := kmsg.NewFetchResponseTopicPartition()
	resp.Partition = req.Partition
	resp.RecordBatches = []byte{} // none is not null
	p, err := n.machine.Partition(topic, req.Partition)
	if err == nil && req.FetchOffset > p.Log.End() {
		// It may exist, and not be known here yet.
		err = n.linearize()
	}
	if err != nil {
		resp.ErrorCode = errorCode(err)
		resp.HighWatermark = -1
		return resp
	}
	resp.LogStartOffset = p.Log.Start()
	resp.HighWatermark = p.Log.End()
	resp.LastStableOffset = min(resp.HighWatermark, p.LastStableOffset())
	if budget <= 0 {
		return resp
	}
	records, err := p.Log.Read(req.FetchOffset, min(budget, int(req.PartitionMaxBytes)))
	switch {
	case errors.Is(err, segment.ErrOffsetOutOfRange):
		resp.ErrorCode = kerr.OffsetOutOfRange.Code
	case err != nil: // most likely the log was replaced by that of a snapshot
		n.cfg.Log.Warn("read failed", "topic", topic, "partition", req.Partition, "err", err)
		resp.ErrorCode = kerr.KafkaStorageError.Code
	case records != nil:
		resp.RecordBatches = records
	}
	return resp
}

// awaitRecords returns when a Fetch can be answered: there are as many bytes as the
// consumer wants, something is wrong with the request, its time is up, or the
// node stops.
func (n *Node) awaitRecords(req *kmsg.FetchRequest) {
	timeout := time.NewTimer(min(time.Duration(req.MaxWaitMillis)*time.Millisecond, maxFetchWait))
	defer timeout.Stop()
	for {
		changed := n.machine.Changed()
		pending, ok := n.pendingBytes(req)
		if !ok || pending >= int64(req.MinBytes) {
			return
		}
		select {
		case <-changed:
		case <-timeout.C:
			return
		case <-n.closing.Done():
			return
		}
	}
}

// pendingBytes is about how many bytes the request could be answered with if it
// set no limit. It reports false where it has to be answered with an error.
func (n *Node) pendingBytes(req *kmsg.FetchRequest) (bytes int64, ok bool) {
	for _, t := range req.Topics {
		for _, rp := range t.Partitions {
			p, err := n.machine.Partition(t.Topic, rp.Partition)
			if err != nil || rp.FetchOffset > p.Log.End() || rp.FetchOffset < p.Log.Start() {
				return 0, false
			}
			bytes += p.Log.Pending(rp.FetchOffset)
		}
	}
	return bytes, true
}

// The timestamps that ask for an end of the log rather than a point in time.
const (
	latestOffset   = -1
	earliestOffset = -2
)

// listOffsets tells where the log begins, where it ends, and where to start
// reading for records as late as a point in time. The leader alone does, and
// what it tells includes all that was acknowledged before the request.
func (n *Node) listOffsets(req *kmsg.ListOffsetsRequest) *kmsg.ListOffsetsResponse {
	err := n.linearize()
	resp := kmsg.NewPtrListOffsetsResponse()
	for _, t := range req.Topics {
		topic := kmsg.NewListOffsetsResponseTopic()
		topic.Topic = t.Topic
		for _, asked := range t.Partitions {
			topic.Partitions = append(topic.Partitions, n.listOffset(t.Topic, asked, err))
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp
}

func (n *Node) listOffset(topic string, req kmsg.ListOffsetsRequestTopicPartition, err error) kmsg.ListOffsetsResponseTopicPartition {
	resp := kmsg.NewListOffsetsResponseTopicPartition()
	resp.Partition = req.Partition
	var p *statemachine.Partition
	if err == nil {
		p, err = n.machine.Partition(topic, req.Partition)
	}
	if err != nil {
		resp.ErrorCode = errorCode(err)
		return resp
	}
	switch req.Timestamp {
	case latestOffset:
		resp.Offset = p.Log.End()
	case earliestOffset:
		resp.Offset = p.Log.Start()
	default:
		resp.Offset, resp.Timestamp, err = p.Log.OffsetOfTime(req.Timestamp)
	}
	if err != nil {
		resp.ErrorCode = kerr.KafkaStorageError.Code
	}
	return resp
}
