package server

// This file is the consumer side: Fetch and ListOffsets.

import (
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
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
			answer := s.fetchPartition(t.Topic, p, &budget)
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp, nil
}

// fetchPartition reads from one partition if there is some budget left, and
// subtracts what it has read. The last batch may exceed the budget. Otherwise a
// consumer would never get past a batch larger than it asks for.
func (s *Server) fetchPartition(topic string, req kmsg.FetchRequestTopicPartition, budget *int) kmsg.FetchResponseTopicPartition {
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
	resp.HighWatermark = p.log.End() // one replica: what is appended is committed
	resp.LastStableOffset = resp.HighWatermark
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
	if records != nil {
		resp.RecordBatches = records
	}
	*budget -= len(records)
	return resp
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
				n += p.log.Pending(rp.FetchOffset)
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
				answer = s.listOffset(t.Topic, p)
			}
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp, nil
}

func (s *Server) listOffset(topic string, req kmsg.ListOffsetsRequestTopicPartition) kmsg.ListOffsetsResponseTopicPartition {
	resp := kmsg.NewListOffsetsResponseTopicPartition()
	resp.Partition = req.Partition
	p, err := s.topics.partition(topic, req.Partition)
	if err != nil {
		resp.ErrorCode = errorCode(err)
		return resp
	}
	switch req.Timestamp {
	case latestOffset:
		resp.Offset = p.log.End()
	case earliestOffset:
		resp.Offset = p.log.Start()
	default:
		resp.Offset, resp.Timestamp, err = p.log.OffsetOfTime(req.Timestamp)
	}
	if err != nil {
		resp.ErrorCode = kerr.KafkaStorageError.Code
	}
	return resp
}
