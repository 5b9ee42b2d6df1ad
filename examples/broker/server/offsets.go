package server

// This file is the requests about the offsets of consumer groups. Package txn keeps
// them. Groups have no members here: a consumer assigns itself its partitions, and
// commits without a generation.

import (
	"errors"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// noGeneration is the generation of a commit by a consumer that is no member of
// its group.
const noGeneration = -1

func checkMembership(generation int32, member string) error {
	if generation != noGeneration || member != "" {
		return kerr.UnknownMemberID
	}
	return nil
}

// addOffsetsToTxn adds a group to a transaction.
func (s *Server) addOffsetsToTxn(req *kmsg.AddOffsetsToTxnRequest) *kmsg.AddOffsetsToTxnResponse {
	err := s.coordinator.AddOffsetsToTxn(time.Now(), req.TransactionalID,
		txn.Producer{ID: req.ProducerID, Epoch: req.ProducerEpoch}, req.Group)
	resp := kmsg.NewPtrAddOffsetsToTxnResponse()
	resp.ErrorCode = fencedCode(err, req.Version, 2)
	return resp
}

// offsetOf returns an offset as it was requested. Metadata that is null is kept as
// none.
func offsetOf(topic string, partition int32, offset int64, leaderEpoch int32, metadata *string) txn.Offset {
	o := txn.Offset{
		Partition:   txn.Partition{Topic: topic, Partition: partition},
		Offset:      offset,
		LeaderEpoch: leaderEpoch,
	}
	if metadata != nil {
		o.Metadata = *metadata
	}
	return o
}

// commitOffsets commits the offsets whose partitions exist, and returns the code of
// each offset.
func (s *Server) commitOffsets(offsets []txn.Offset, commit func([]txn.Offset) error) []int16 {
	codes := make([]int16, len(offsets))
	var existing []txn.Offset
	for i, o := range offsets {
		if _, err := s.topics.partition(o.Partition.Topic, o.Partition.Partition); err != nil {
			codes[i] = errorCode(err)
		} else {
			existing = append(existing, o)
		}
	}
	code := errorCode(commit(existing))
	for i := range codes {
		if codes[i] == 0 {
			codes[i] = code
		}
	}
	return codes
}

// txnOffsetCommit stages the offsets of the partitions that exist.
func (s *Server) txnOffsetCommit(req *kmsg.TxnOffsetCommitRequest) *kmsg.TxnOffsetCommitResponse {
	var offsets []txn.Offset
	for _, t := range req.Topics {
		for _, p := range t.Partitions {
			offsets = append(offsets, offsetOf(t.Topic, p.Partition, p.Offset, p.LeaderEpoch, p.Metadata))
		}
	}
	codes := s.commitOffsets(offsets, func(existing []txn.Offset) error { return s.stageOffsets(req, existing) })
	resp := kmsg.NewPtrTxnOffsetCommitResponse()
	for _, t := range req.Topics {
		topic := kmsg.NewTxnOffsetCommitResponseTopic()
		topic.Topic = t.Topic
		for _, p := range t.Partitions {
			answer := kmsg.NewTxnOffsetCommitResponseTopicPartition()
			answer.Partition, answer.ErrorCode = p.Partition, codes[0]
			codes = codes[1:]
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp
}

func (s *Server) stageOffsets(req *kmsg.TxnOffsetCommitRequest, offsets []txn.Offset) error {
	if err := checkMembership(req.Generation, req.MemberID); err != nil {
		return err
	}
	version := int8(1)
	if req.Version >= implicitTxnOffsetCommit {
		version = 2
	}
	err := s.coordinator.TxnOffsetCommit(time.Now(), req.TransactionalID,
		txn.Producer{ID: req.ProducerID, Epoch: req.ProducerEpoch}, version, req.Group, offsets)
	if errors.Is(err, kerr.ProducerFenced) {
		return kerr.InvalidProducerEpoch // as from the log of Kafka's group coordinator
	}
	return err
}

// offsetCommit commits the offsets of the partitions that exist.
func (s *Server) offsetCommit(req *kmsg.OffsetCommitRequest) *kmsg.OffsetCommitResponse {
	var offsets []txn.Offset
	for _, t := range req.Topics {
		for _, p := range t.Partitions {
			offsets = append(offsets, offsetOf(t.Topic, p.Partition, p.Offset, p.LeaderEpoch, p.Metadata))
		}
	}
	codes := s.commitOffsets(offsets, func(existing []txn.Offset) error {
		if err := checkMembership(req.Generation, req.MemberID); err != nil {
			return err
		}
		return s.coordinator.OffsetCommit(req.Group, existing)
	})
	resp := kmsg.NewPtrOffsetCommitResponse()
	for _, t := range req.Topics {
		topic := kmsg.NewOffsetCommitResponseTopic()
		topic.Topic = t.Topic
		for _, p := range t.Partitions {
			answer := kmsg.NewOffsetCommitResponseTopicPartition()
			answer.Partition, answer.ErrorCode = p.Partition, codes[0]
			codes = codes[1:]
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	return resp
}

// offsetFetch answers for one group, or from version 8 on for several. The first
// form is answered as the second with one group. Each group is answered once, and
// each partition of it, however often they are named.
func (s *Server) offsetFetch(req *kmsg.OffsetFetchRequest) *kmsg.OffsetFetchResponse {
	groups := req.Groups
	if req.Version < manyGroupsOffsetFetch {
		g := kmsg.NewOffsetFetchRequestGroup()
		g.Group = req.Group
		if req.Topics != nil {
			g.Topics = []kmsg.OffsetFetchRequestGroupTopic{} // null asks for all
		}
		for _, t := range req.Topics {
			topic := kmsg.NewOffsetFetchRequestGroupTopic()
			topic.Topic, topic.Partitions = t.Topic, t.Partitions
			g.Topics = append(g.Topics, topic)
		}
		groups = []kmsg.OffsetFetchRequestGroup{g}
	}
	resp := kmsg.NewPtrOffsetFetchResponse()
	answered := make(map[string]bool)
	for _, g := range groups {
		if answered[g.Group] {
			continue
		}
		answered[g.Group] = true
		resp.Groups = append(resp.Groups, s.fetchOffsets(g, req.RequireStable))
	}
	if req.Version >= manyGroupsOffsetFetch {
		return resp
	}
	for _, t := range resp.Groups[0].Topics {
		topic := kmsg.NewOffsetFetchResponseTopic()
		topic.Topic = t.Topic
		for _, p := range t.Partitions {
			answer := kmsg.NewOffsetFetchResponseTopicPartition()
			answer.Partition, answer.Offset, answer.LeaderEpoch = p.Partition, p.Offset, p.LeaderEpoch
			answer.Metadata, answer.ErrorCode = p.Metadata, p.ErrorCode
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	resp.Groups = nil
	return resp
}

// fetchOffsets answers for the partitions that a request names, in its order, or
// for all partitions of the group, by topic.
func (s *Server) fetchOffsets(g kmsg.OffsetFetchRequestGroup, stable bool) kmsg.OffsetFetchResponseGroup {
	var partitions []txn.Partition
	if g.Topics != nil {
		partitions = []txn.Partition{}
	}
	answered := make(map[txn.Partition]bool)
	for _, t := range g.Topics {
		for _, i := range t.Partitions {
			if asked := (txn.Partition{Topic: t.Topic, Partition: i}); !answered[asked] {
				answered[asked] = true
				partitions = append(partitions, asked)
			}
		}
	}
	resp := kmsg.NewOffsetFetchResponseGroup()
	resp.Group = g.Group
	for _, found := range s.coordinator.OffsetFetch(g.Group, partitions, stable) {
		o := found.Committed
		if n := len(resp.Topics); n == 0 || resp.Topics[n-1].Topic != o.Partition.Topic {
			topic := kmsg.NewOffsetFetchResponseGroupTopic()
			topic.Topic = o.Partition.Topic
			resp.Topics = append(resp.Topics, topic)
		}
		answer := kmsg.NewOffsetFetchResponseGroupTopicPartition()
		answer.Partition, answer.Offset, answer.LeaderEpoch = o.Partition.Partition, o.Offset, o.LeaderEpoch
		answer.Metadata, answer.ErrorCode = &o.Metadata, errorCode(found.Err)
		topic := &resp.Topics[len(resp.Topics)-1]
		topic.Partitions = append(topic.Partitions, answer)
	}
	return resp
}
