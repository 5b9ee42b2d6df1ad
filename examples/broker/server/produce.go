package server

// This file is the Produce request: what a batch must be like before the
// partition is asked, and what its producer is told afterwards.

import (
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
)

// errUnacknowledged closes the connection of a producer that asked for no
// answers and had a batch refused, since there is no other way to tell it.
var errUnacknowledged = errors.New("server: refused a batch sent with acks=0")

// produce appends one batch for each partition of the request, and answers for
// each on its own.
func (c *conn) produce(req *kmsg.ProduceRequest) (kmsg.Response, error) {
	resp := kmsg.NewPtrProduceResponse()
	refused := false
	for _, t := range req.Topics {
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic = t.Topic
		for _, p := range t.Partitions {
			answer := c.produceBatch(req, t.Topic, p)
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

func (c *conn) produceBatch(req *kmsg.ProduceRequest, topic string, sent kmsg.ProduceRequestTopicPartition) kmsg.ProduceResponseTopicPartition {
	resp := kmsg.NewProduceResponseTopicPartition()
	resp.Partition = sent.Partition
	resp.BaseOffset = -1

	// Everything about the batch itself comes before the question of whether
	// it was here before: a damaged retry is a damaged batch.
	batch, h, err := c.validate(req, sent.Records)
	if err != nil {
		return refuse(resp, err)
	}
	p, err := c.topics.partition(topic, sent.Partition)
	if err != nil {
		return refuse(resp, err)
	}
	result, err := p.append(batch, h, sent.Records)
	c.cfg.Observe(Event{topic, sent.Partition, batch, result, err})
	if err != nil {
		return refuse(resp, err)
	}
	resp.BaseOffset = result.BaseOffset
	resp.LogStartOffset = p.log.Start()
	return resp
}

func refuse(resp kmsg.ProduceResponseTopicPartition, err error) kmsg.ProduceResponseTopicPartition {
	resp.ErrorCode = errorCode(err)
	resp.ErrorMessage = kmsg.StringPtr(err.Error())
	return resp
}

// errorCode is the Kafka code for an error: one of kerr, perhaps explained,
// where the broker itself refuses, and one of package idempotence otherwise.
func errorCode(err error) int16 {
	if own := new(kerr.Error); errors.As(err, &own) {
		return own.Code
	}
	return idempotence.KafkaErrorCode(err)
}

// validate holds a batch to what Kafka demands of the batches that producers
// send. It does not look at the records, which may be compressed.
func (c *conn) validate(req *kmsg.ProduceRequest, p []byte) (b idempotence.Batch, h idempotence.BatchHeader, err error) {
	switch {
	case req.Acks < -1 || req.Acks > 1:
		return b, h, fmt.Errorf("%w: acks %d", kerr.InvalidRequiredAcks, req.Acks)
	case len(p) == 0:
		return b, h, fmt.Errorf("%w: no batch", kerr.InvalidRecord)
	case len(p) > c.cfg.MaxBatchBytes:
		return b, h, fmt.Errorf("%w: %d bytes, at most %d", kerr.MessageTooLarge, len(p), c.cfg.MaxBatchBytes)
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
	case h.Attributes.Transactional():
		return fmt.Errorf("%w: this broker has no transactions", kerr.InvalidTxnState)
	case codec > zstd || codec == zstd && req.Version < 7:
		return fmt.Errorf("%w: codec %d", kerr.UnsupportedCompressionType, codec)
	}
	return nil
}

// zstd is the last codec there is, and may not be used before version 7 of the
// Produce request (KIP-110).
const zstd = 4
