package server

// This file is the requests about transactions. Package txn has their rules.

import (
	"errors"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// Codes after which a coordinator drops a marker.
var (
	invalidProducerEpoch = kerr.InvalidProducerEpoch.Code
	coordinatorFenced    = kerr.TransactionCoordinatorFenced.Code
)

// fencedCode is errorCode for a request in which PRODUCER_FENCED may be used from
// version since on. Older clients know only INVALID_PRODUCER_EPOCH (KIP-588).
func fencedCode(err error, version, since int16) int16 {
	if errors.Is(err, kerr.ProducerFenced) && version < since {
		return invalidProducerEpoch
	}
	return errorCode(err)
}

// findCoordinator tells clients that this broker coordinates everything.
func (c *conn) findCoordinator(req *kmsg.FindCoordinatorRequest) (*kmsg.FindCoordinatorResponse, error) {
	broker, err := c.advertised()
	if err != nil {
		return nil, err
	}
	const group, transaction = 0, 1
	known := req.CoordinatorType == group || req.CoordinatorType == transaction
	resp := kmsg.NewPtrFindCoordinatorResponse()
	if resp.NodeID, resp.Host, resp.Port = nodeID, broker.Host, broker.Port; !known {
		resp.ErrorCode = kerr.InvalidRequest.Code
	}
	for _, key := range req.CoordinatorKeys {
		found := kmsg.NewFindCoordinatorResponseCoordinator()
		found.Key, found.NodeID, found.Host, found.Port = key, nodeID, broker.Host, broker.Port
		found.ErrorCode = resp.ErrorCode
		resp.Coordinators = append(resp.Coordinators, found)
	}
	return resp, nil
}

// initProducerID gives a producer without a transactional id a fresh producer id
// at epoch 0, as Kafka does, and makes another one the producer of its
// transactional id.
func (s *Server) initProducerID(req *kmsg.InitProducerIDRequest) *kmsg.InitProducerIDResponse {
	p, err := s.newProducer(req)
	resp := kmsg.NewPtrInitProducerIDResponse()
	resp.ErrorCode = fencedCode(err, req.Version, 4)
	resp.ProducerID, resp.ProducerEpoch = p.ID, p.Epoch
	return resp
}

func (s *Server) newProducer(req *kmsg.InitProducerIDRequest) (txn.Producer, error) {
	if req.TransactionalID == nil {
		id, err := s.coordinator.NewProducerID()
		if err != nil {
			s.cfg.repeated.Error("no producer id", "err", err)
			return txn.NoProducer, err
		}
		return txn.Producer{ID: id}, nil
	}
	defer s.coordinator.writeMarkers()
	return s.coordinator.InitProducerID(time.Now(), *req.TransactionalID,
		txn.Producer{ID: req.ProducerID, Epoch: req.ProducerEpoch},
		time.Duration(req.TransactionTimeoutMillis)*time.Millisecond)
}

// addPartitionsToTxn adds all partitions of a request, or none.
func (s *Server) addPartitionsToTxn(req *kmsg.AddPartitionsToTxnRequest) *kmsg.AddPartitionsToTxnResponse {
	resp := kmsg.NewPtrAddPartitionsToTxnResponse()
	var all []txn.Partition
	unknown := false
	for _, t := range req.Topics {
		topic := kmsg.NewAddPartitionsToTxnResponseTopic()
		topic.Topic = t.Topic
		for _, i := range t.Partitions {
			answer := kmsg.NewAddPartitionsToTxnResponseTopicPartition()
			answer.Partition = i
			_, err := s.topics.partition(t.Topic, i)
			answer.ErrorCode = errorCode(err)
			unknown = unknown || err != nil
			topic.Partitions = append(topic.Partitions, answer)
			all = append(all, txn.Partition{Topic: t.Topic, Partition: i})
		}
		resp.Topics = append(resp.Topics, topic)
	}
	code := kerr.OperationNotAttempted.Code
	if !unknown {
		err := s.coordinator.AddPartitionsToTxn(time.Now(), req.TransactionalID,
			txn.Producer{ID: req.ProducerID, Epoch: req.ProducerEpoch}, 1, all)
		code = fencedCode(err, req.Version, 2)
	}
	for _, t := range resp.Topics {
		for i := range t.Partitions {
			if p := &t.Partitions[i]; p.ErrorCode == 0 {
				p.ErrorCode = code
			}
		}
	}
	return resp
}

// admission returns the admit function of a transactional batch. From a client
// of version 2 it adds the partition to the transaction first.
func (s *Server) admission(req *kmsg.ProduceRequest, partition txn.Partition, b idempotence.Batch) func() error {
	id, p := *req.TransactionID, txn.Producer{ID: b.ProducerID, Epoch: b.Epoch}
	var notAdded error
	if req.Version >= implicitProduce {
		notAdded = s.coordinator.AddPartitionsToTxn(time.Now(), id, p, 2, []txn.Partition{partition})
	}
	return func() error {
		err := notAdded
		if err == nil {
			err = s.coordinator.VerifyPartition(id, p, partition)
		}
		if errors.Is(err, kerr.ProducerFenced) {
			return kerr.InvalidProducerEpoch // which producers know of Produce
		}
		return err
	}
}

// endTxn answers when the outcome is durable. The markers are written afterwards.
func (s *Server) endTxn(req *kmsg.EndTxnRequest) *kmsg.EndTxnResponse {
	version := int8(1)
	if req.Version >= raisingEndTxn {
		version = 2
	}
	p, err := s.coordinator.EndTxn(time.Now(), req.TransactionalID,
		txn.Producer{ID: req.ProducerID, Epoch: req.ProducerEpoch}, version, req.Commit)
	s.coordinator.writeMarkers()
	resp := kmsg.NewPtrEndTxnResponse()
	resp.ErrorCode = fencedCode(err, req.Version, 2)
	resp.ProducerID, resp.ProducerEpoch = p.ID, p.Epoch
	return resp
}
