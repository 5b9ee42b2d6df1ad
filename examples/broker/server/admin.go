package server

// This file is what administrators ask: who produces to a partition, which
// transactions there are, and to end one that hangs.

import (
	"context"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// adminTimeout is how long the markers of a request may take to be judged, most of
// all because they wait for what their producers have in flight.
const adminTimeout = 10 * time.Second

// writeTxnMarkers puts the markers of an administrator into the log, one after the
// other. They are judged like those of the coordinator, which does not hear of
// them: one that it still wants written is written too, and changes nothing.
//
// Each marker takes a sync, and a request has room for very many. No more are begun
// once the time is up or the broker stops.
func (s *Server) writeTxnMarkers(req *kmsg.WriteTxnMarkersRequest) *kmsg.WriteTxnMarkersResponse {
	ctx, cancel := context.WithTimeout(s.closing, adminTimeout)
	defer cancel()
	resp := kmsg.NewPtrWriteTxnMarkersResponse()
	for _, m := range req.Markers {
		marker := idempotence.Marker{
			ProducerID:       m.ProducerID,
			Epoch:            m.ProducerEpoch,
			CoordinatorEpoch: m.CoordinatorEpoch,
			Commit:           m.Committed,
			Version:          m.TransactionVersion,
		}
		written := kmsg.NewWriteTxnMarkersResponseMarker()
		written.ProducerID = m.ProducerID
		for _, t := range m.Topics {
			topic := kmsg.NewWriteTxnMarkersResponseMarkerTopic()
			topic.Topic = t.Topic
			for _, i := range t.Partitions {
				answer := kmsg.NewWriteTxnMarkersResponseMarkerTopicPartition()
				answer.Partition = i
				p, err := s.topics.partition(t.Topic, i)
				switch {
				case err != nil:
				case ctx.Err() != nil:
					err = kerr.RequestTimedOut
				default:
					err = p.writeMarker(ctx, marker)
				}
				answer.ErrorCode = errorCode(err)
				topic.Partitions = append(topic.Partitions, answer)
			}
			written.Topics = append(written.Topics, topic)
		}
		resp.Markers = append(resp.Markers, written)
	}
	return resp
}

// producerBytes is about what the answer of DescribeProducers takes for a producer,
// in memory and on its way out.
const producerBytes = 128

// describeProducers lists the producers that partitions remember.
func (c *conn) describeProducers(req *kmsg.DescribeProducersRequest) (*kmsg.DescribeProducersResponse, error) {
	resp := kmsg.NewPtrDescribeProducersResponse()
	var found []*partition
	var bytes int64
	answered := make(map[txn.Partition]bool) // each once, however often it was asked for
	for _, t := range req.Topics {
		topic := kmsg.NewDescribeProducersResponseTopic()
		topic.Topic = t.Topic
		for _, i := range t.Partitions {
			asked := txn.Partition{Topic: t.Topic, Partition: i}
			if answered[asked] {
				continue
			}
			answered[asked] = true
			answer := kmsg.NewDescribeProducersResponseTopicPartition()
			answer.Partition = i
			p, err := c.server.topics.partition(t.Topic, i)
			if err == nil {
				bytes += producerBytes * int64(p.producers.Len())
			}
			answer.ErrorCode = errorCode(err)
			found = append(found, p)
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	if err := c.claimAnswer(min(bytes, c.server.cfg.FetchMemory)); err != nil {
		return nil, err
	}
	for i := range resp.Topics {
		for j := range resp.Topics[i].Partitions {
			if answer := &resp.Topics[i].Partitions[j]; answer.ErrorCode == 0 {
				answer.ActiveProducers = activeProducers(found[0].producers)
			}
			found = found[1:]
		}
	}
	return resp, nil
}

func activeProducers(m *idempotence.ProducerStateManager) []kmsg.DescribeProducersResponseTopicPartitionActiveProducer {
	var all []kmsg.DescribeProducersResponseTopicPartitionActiveProducer
	for p := range m.Producers() {
		a := kmsg.NewDescribeProducersResponseTopicPartitionActiveProducer()
		a.ProducerID, a.ProducerEpoch = p.ProducerID, int32(p.Epoch)
		a.CoordinatorEpoch, a.CurrentTxnStartOffset = p.CoordinatorEpoch, p.CurrentTxnFirstOffset
		a.LastSequence, a.LastTimestamp = -1, -1
		if n := len(p.Window); n > 0 {
			a.LastSequence = p.Window[n-1].LastSequence
		}
		if !p.LastActivity.IsZero() {
			a.LastTimestamp = p.LastActivity.UnixMilli()
		}
		all = append(all, a)
	}
	return all
}

// listTransactions lists the transactional ids that pass both filters.
func (s *Server) listTransactions(req *kmsg.ListTransactionsRequest) *kmsg.ListTransactionsResponse {
	resp := kmsg.NewPtrListTransactionsResponse()
	for _, state := range req.StateFilters {
		if !txn.IsState(state) {
			resp.UnknownStateFilters = append(resp.UnknownStateFilters, state)
		}
	}
	for _, t := range s.coordinator.List() {
		if len(req.StateFilters) > 0 && !slices.Contains(req.StateFilters, t.State.String()) ||
			len(req.ProducerIDFilters) > 0 && !slices.Contains(req.ProducerIDFilters, t.Producer.ID) {
			continue
		}
		state := kmsg.NewListTransactionsResponseTransactionState()
		state.TransactionalID, state.ProducerID, state.TransactionState = t.TransactionalID, t.Producer.ID, t.State.String()
		resp.TransactionStates = append(resp.TransactionStates, state)
	}
	return resp
}

// describeTransactions describes the transactional ids that a request names, each
// once, however often it is named.
func (s *Server) describeTransactions(req *kmsg.DescribeTransactionsRequest) *kmsg.DescribeTransactionsResponse {
	resp := kmsg.NewPtrDescribeTransactionsResponse()
	answered := make(map[string]bool)
	for _, id := range req.TransactionalIDs {
		if answered[id] {
			continue
		}
		answered[id] = true
		state := kmsg.NewDescribeTransactionsResponseTransactionState()
		state.TransactionalID = id
		t, ok := s.coordinator.Describe(id)
		if !ok {
			state.ErrorCode = kerr.TransactionalIDNotFound.Code
			resp.TransactionStates = append(resp.TransactionStates, state)
			continue
		}
		state.State, state.TimeoutMillis = t.State.String(), int32(t.Timeout.Milliseconds())
		state.ProducerID, state.ProducerEpoch = t.Producer.ID, t.Producer.Epoch
		state.StartTimestamp = -1
		if !t.Start.IsZero() {
			state.StartTimestamp = t.Start.UnixMilli()
		}
		for _, p := range t.Partitions { // sorted
			if n := len(state.Topics); n == 0 || state.Topics[n-1].Topic != p.Topic {
				topic := kmsg.NewDescribeTransactionsResponseTransactionStateTopic()
				topic.Topic = p.Topic
				state.Topics = append(state.Topics, topic)
			}
			topic := &state.Topics[len(state.Topics)-1]
			topic.Partitions = append(topic.Partitions, p.Partition)
		}
		resp.TransactionStates = append(resp.TransactionStates, state)
	}
	return resp
}
