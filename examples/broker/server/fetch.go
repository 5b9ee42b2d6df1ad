package server

// This file is the consumer side: Fetch and ListOffsets.

import (
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
)

const (
	maxFetchBytes = 2 << 20 // of records in an answer, but for the last batch
	maxFetchWait  = 30 * time.Second
)

// fetchClaim returns how much memory an answer takes with that many bytes of
// records and one more batch: once as read and once as encoded.
func fetchClaim(bytes, maxBatchBytes int) int64 { return 2 * (int64(bytes) + int64(maxBatchBytes)) }

// fetch answers when there are as many bytes of records as the consumer wants, or
// when its time is up.
func (c *conn) fetch(req *kmsg.FetchRequest) (*kmsg.FetchResponse, error) {
	s := c.server
	s.awaitRecords(req)
	budget := int(min(s.pendingBytes(req), int64(req.MaxBytes), maxFetchBytes))
	if budget > 0 {
		if err := c.claimAnswer(fetchClaim(budget, s.cfg.MaxBatchBytes)); err != nil {
			return nil, err
		}
	}
	resp := kmsg.NewPtrFetchResponse() // without a session id: sessions are optional
	for _, t := range req.Topics {
		topic := kmsg.NewFetchResponseTopic()
		topic.Topic = t.Topic
		for _, p := range t.Partitions {
			answer := s.fetchPartition(t.Topic, p, req.IsolationLevel, &budget)
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp, nil
}

// fetchPartition reads from one partition if there is some budget left, and
// subtracts what it has read. The last batch may exceed the budget. Otherwise a
// consumer would never get past a batch larger than it asks for.
func (s *Server) fetchPartition(topic string, req kmsg.FetchRequestTopicPartition, isolation int8, budget *int) kmsg.FetchResponseTopicPartition {
	resp := kmsg.NewFetchResponseTopicPartition()
	resp.Partition = req.Partition
	resp.RecordBatches = []byte{} // not null
	p, err := s.topics.partition(topic, req.Partition)
	if err != nil {
		resp.ErrorCode = errorCode(err)
		resp.HighWatermark = -1
		return resp
	}
	resp.LogStartOffset = p.log.Start()
	resp.HighWatermark = p.log.End() // one replica: what is appended is replicated
	// The last stable offset first, then the records, then the transactions that
	// were aborted.
	resp.LastStableOffset = p.producers.LastStableOffset(resp.HighWatermark)
	if req.FetchOffset < resp.LogStartOffset || req.FetchOffset > resp.HighWatermark {
		resp.ErrorCode = kerr.OffsetOutOfRange.Code
		return resp
	}
	if *budget <= 0 {
		return resp
	}
	records, err := p.log.Read(req.FetchOffset, min(*budget, int(req.PartitionMaxBytes)))
	if err != nil {
		s.cfg.repeated.Error("read failed", "topic", topic, "partition", req.Partition, "err", err)
		resp.ErrorCode = kerr.KafkaStorageError.Code
		return resp
	}
	if isolation == readCommitted {
		records, resp.AbortedTransactions, err = p.committed(records, req.FetchOffset, resp.LastStableOffset)
		if err != nil {
			s.cfg.repeated.Error("aborted transactions unknown", "topic", topic, "partition", req.Partition, "err", err)
			resp.ErrorCode = errorCode(err)
			return resp
		}
	}
	if records != nil {
		resp.RecordBatches = records
	}
	*budget -= len(records)
	return resp
}

// readCommitted is the isolation level of consumers that read nothing of open and
// aborted transactions.
const readCommitted = 1

// committed returns the batches that lie below the last stable offset, and the
// aborted transactions that a consumer must know who reads them from an offset
// on.
func (p *partition) committed(records []byte, from, lastStable int64) ([]byte, []kmsg.FetchResponseTopicPartitionAbortedTransaction, error) {
	size, end := 0, from
	for size < len(records) {
		_, h, err := idempotence.ParseBatch(records[size:])
		if err != nil {
			return nil, nil, err
		}
		if h.BaseOffset >= lastStable {
			break
		}
		size += h.Size
		end = h.LastOffset() + 1
	}
	aborted, err := p.producers.AbortedTransactions(from, end)
	var list []kmsg.FetchResponseTopicPartitionAbortedTransaction
	for _, a := range aborted {
		t := kmsg.NewFetchResponseTopicPartitionAbortedTransaction()
		t.ProducerID, t.FirstOffset = a.ProducerID, a.FirstOffset
		list = append(list, t)
	}
	return records[:size], list, err
}

// end returns the offset up to which records may be read at an isolation level.
func (p *partition) end(isolation int8) int64 {
	end := p.log.End()
	if isolation == readCommitted {
		end = p.producers.LastStableOffset(end)
	}
	return end
}

// pending returns about how many bytes of records may be read from offset on.
func (p *partition) pending(offset int64, isolation int8) int64 {
	n := p.log.Pending(offset)
	if isolation != readCommitted {
		return n
	}
	end := p.end(isolation)
	if offset >= end {
		return 0
	}
	return max(n-p.log.Pending(end), min(n, 1))
}

// awaitRecords returns when the request can be answered: there are enough bytes,
// there is an error to report, its time is up, or the broker stops.
func (s *Server) awaitRecords(req *kmsg.FetchRequest) {
	wake := make(chan struct{}, 1)
	for _, t := range req.Topics {
		for _, rp := range t.Partitions {
			p, err := s.topics.partition(t.Topic, rp.Partition)
			if err != nil || rp.FetchOffset > p.log.End() || rp.FetchOffset < p.log.Start() {
				return
			}
			defer p.watch(wake)()
		}
	}
	timeout := time.NewTimer(min(time.Duration(req.MaxWaitMillis)*time.Millisecond, maxFetchWait))
	defer timeout.Stop()
	for s.pendingBytes(req) < int64(req.MinBytes) {
		select {
		case <-wake:
		case <-timeout.C:
			return
		case <-s.closing.Done():
			return
		}
	}
}

// pendingBytes returns about how many bytes of records there are for the request,
// apart from its limits.
func (s *Server) pendingBytes(req *kmsg.FetchRequest) int64 {
	var n int64
	for _, t := range req.Topics {
		for _, rp := range t.Partitions {
			if p, err := s.topics.partition(t.Topic, rp.Partition); err == nil {
				n += p.pending(rp.FetchOffset, req.IsolationLevel)
			}
		}
	}
	return n
}

// Timestamps that ask for an end of the log.
const (
	latestOffset   = -1
	earliestOffset = -2
)

// listOffsets tells where the logs begin and end, and from which offset on there
// are records as late as a timestamp.
//
// Each timestamp may take a walk through a segment, so a partition may be named
// only once, as in Kafka, and Shutdown does not wait for all of them.
func (s *Server) listOffsets(req *kmsg.ListOffsetsRequest) (*kmsg.ListOffsetsResponse, error) {
	resp := kmsg.NewPtrListOffsetsResponse()
	type name struct {
		topic string
		index int32
	}
	answered := make(map[name]bool)
	for _, t := range req.Topics {
		topic := kmsg.NewListOffsetsResponseTopic()
		topic.Topic = t.Topic
		for _, p := range t.Partitions {
			if err := s.closing.Err(); err != nil {
				return nil, err
			}
			answer := kmsg.NewListOffsetsResponseTopicPartition()
			answer.Partition = p.Partition
			answer.ErrorCode = kerr.InvalidRequest.Code
			if n := (name{t.Topic, p.Partition}); !answered[n] {
				answered[n] = true
				answer = s.listOffset(t.Topic, p, req.IsolationLevel)
			}
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp, nil
}

func (s *Server) listOffset(topic string, req kmsg.ListOffsetsRequestTopicPartition, isolation int8) kmsg.ListOffsetsResponseTopicPartition {
	resp := kmsg.NewListOffsetsResponseTopicPartition()
	resp.Partition = req.Partition
	p, err := s.topics.partition(topic, req.Partition)
	if err != nil {
		resp.ErrorCode = errorCode(err)
		return resp
	}
	switch req.Timestamp {
	case latestOffset:
		resp.Offset = p.end(isolation)
	case earliestOffset:
		resp.Offset = p.log.Start()
	default:
		resp.Offset, resp.Timestamp, err = p.log.OffsetOfTime(req.Timestamp)
		if resp.Offset >= p.end(isolation) {
			resp.Offset, resp.Timestamp = -1, -1 // as where there is none
		}
	}
	if err != nil {
		resp.ErrorCode = kerr.KafkaStorageError.Code
	}
	return resp
}
