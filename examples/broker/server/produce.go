package server

// This file is the Produce request: the checks that come before a partition
// judges a batch, and the answer.

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// maxProduceWait is the limit for the timeout that a client sets.
const maxProduceWait = 30 * time.Second

// errUnacknowledged closes the connection of a producer that wants no answers
// when one of its batches is refused: there is no other way to tell it.
var errUnacknowledged = errors.New("server: refused a batch sent with acks=0")

// A submission is one batch of a request. Either it was handed over to its
// partition, or there is a refusal.
type submission struct {
	topic     string
	index     int32 // of the partition
	batch     idempotence.Batch
	partition *partition
	append    *pendingAppend
	refusal   error
}

// produce hands the batches of a request over to their partitions. answer waits
// until all of them have settled.
func (c *conn) produce(req *kmsg.ProduceRequest) (answer func() (kmsg.Response, error)) {
	ctx, cancel := context.WithTimeout(c.server.closing, patience(req))
	var sent []submission
	for _, t := range req.Topics {
		for _, p := range t.Partitions {
			sent = append(sent, c.submit(ctx, req, t.Topic, p))
		}
	}
	return func() (kmsg.Response, error) {
		defer cancel()
		return c.answerProduce(req, sent)
	}
}

// patience returns how long a batch of the request may wait to be judged.
func patience(req *kmsg.ProduceRequest) time.Duration {
	return min(time.Duration(max(req.TimeoutMillis, 0))*time.Millisecond, maxProduceWait)
}

func (c *conn) submit(ctx context.Context, req *kmsg.ProduceRequest, topic string, sent kmsg.ProduceRequestTopicPartition) submission {
	s := submission{topic: topic, index: sent.Partition}
	// The batch itself is checked before it is judged: a damaged retry is a
	// damaged batch, not a duplicate.
	var h idempotence.BatchHeader
	if s.batch, h, s.refusal = c.server.validate(req, sent.Records); s.refusal != nil {
		return s
	}
	if s.partition, s.refusal = c.server.topics.partition(topic, sent.Partition); s.refusal != nil {
		return s
	}
	a := &pendingAppend{Batch: segment.Batch{Header: h, Bytes: sent.Records}, producer: s.batch}
	if s.batch.Transactional {
		a.admit = c.server.admission(req, txn.Partition{Topic: topic, Partition: sent.Partition}, s.batch)
	}
	s.append = s.partition.begin(ctx, a, c.waiting[s.partition])
	if s.append.isJudged() {
		delete(c.waiting, s.partition)
	} else {
		c.waiting[s.partition] = s.append
	}
	return s
}

func (c *conn) answerProduce(req *kmsg.ProduceRequest, sent []submission) (kmsg.Response, error) {
	resp := kmsg.NewPtrProduceResponse()
	refused := false
	for _, t := range req.Topics {
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic = t.Topic
		for range t.Partitions {
			answer := c.answerBatch(sent[0])
			if answer.ErrorCode == kerr.ConcurrentTransactions.Code && req.Version < implicitProduce {
				answer.ErrorCode = kerr.NotEnoughReplicas.Code // older clients do not retry the other one
			}
			sent = sent[1:]
			refused = refused || answer.ErrorCode != 0
			topic.Partitions = append(topic.Partitions, answer)
		}
		resp.Topics = append(resp.Topics, topic)
	}
	if req.Acks == 0 {
		if refused {
			return nil, errUnacknowledged
		}
		return nil, nil
	}
	return resp, nil
}

func (c *conn) answerBatch(s submission) kmsg.ProduceResponseTopicPartition {
	resp := kmsg.NewProduceResponseTopicPartition()
	resp.Partition = s.index
	resp.BaseOffset = -1
	if s.refusal != nil {
		return refuse(resp, s.refusal)
	}
	result, err := s.append.wait()
	c.server.cfg.Observe(Event{s.topic, s.index, s.batch, result, err})
	if err != nil {
		return refuse(resp, err)
	}
	resp.BaseOffset = result.BaseOffset
	resp.LogStartOffset = s.partition.log.Start()
	return resp
}

func refuse(resp kmsg.ProduceResponseTopicPartition, err error) kmsg.ProduceResponseTopicPartition {
	resp.ErrorCode = errorCode(err)
	resp.ErrorMessage = kmsg.StringPtr(err.Error())
	return resp
}

// errorCode returns the Kafka code for an error. Errors of the broker itself wrap
// one of package kerr. All others are of package idempotence.
func errorCode(err error) int16 {
	if own := new(kerr.Error); errors.As(err, &own) {
		return own.Code
	}
	return idempotence.KafkaErrorCode(err)
}

// validate checks what Kafka demands of a batch from a producer. It does not read
// the records, which may be compressed.
func (s *Server) validate(req *kmsg.ProduceRequest, p []byte) (b idempotence.Batch, h idempotence.BatchHeader, err error) {
	switch {
	case req.Acks < -1 || req.Acks > 1:
		return b, h, fmt.Errorf("%w: acks %d", kerr.InvalidRequiredAcks, req.Acks)
	case len(p) == 0:
		return b, h, fmt.Errorf("%w: no batch", kerr.InvalidRecord)
	case len(p) > s.cfg.MaxBatchBytes:
		return b, h, fmt.Errorf("%w: %d bytes, at most %d", kerr.MessageTooLarge, len(p), s.cfg.MaxBatchBytes)
	}
	if b, h, err = idempotence.ParseBatch(p); err != nil {
		return b, h, err
	}
	if h.Size < len(p) {
		return b, h, fmt.Errorf("%w: more than one batch for a partition", kerr.InvalidRecord)
	}
	if err := h.VerifyCRC(p); err != nil {
		return b, h, err
	}
	return b, h, validateHeader(req, b, h)
}

func validateHeader(req *kmsg.ProduceRequest, b idempotence.Batch, h idempotence.BatchHeader) error {
	codec := h.Attributes.Compression()
	switch {
	case h.Records != b.Count:
		return fmt.Errorf("%w: %d records over %d offsets", kerr.InvalidRecord, h.Records, b.Count)
	case h.Attributes.Control():
		return fmt.Errorf("%w: a producer sends no control batches", kerr.InvalidRecord)
	case h.Attributes.LogAppendTime():
		return fmt.Errorf("%w: a producer sends create times", kerr.InvalidTimestamp)
	case h.Attributes.Transactional() && req.TransactionID == nil:
		return fmt.Errorf("%w: a transactional batch without a transactional id", kerr.InvalidTxnState)
	case h.Attributes.Transactional() && b.ProducerID < 0:
		return fmt.Errorf("%w: a transactional batch without a producer id", kerr.InvalidRecord)
	case codec > zstd || codec == zstd && req.Version < 7:
		return fmt.Errorf("%w: codec %d", kerr.UnsupportedCompressionType, codec)
	}
	return nil
}

// zstd is the last codec. It needs version 7 of the Produce request (KIP-110).
const zstd = 4
