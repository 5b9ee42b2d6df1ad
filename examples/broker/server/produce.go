package server

import (
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
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

func (c *conn) produceBatch(req *kmsg.ProduceRequest, topic string, batch kmsg.ProduceRequestTopicPartition) kmsg.ProduceResponseTopicPartition {
	resp := kmsg.NewProduceResponseTopicPartition()
	resp.Partition = batch.Partition
	resp.BaseOffset = -1

	// Everything about the batch itself comes before the question of whether
	// it was here before: a damaged retry is a damaged batch.
	h, err := c.validate(req, batch.Records)
	var p *partition
	if err == nil {
		p, err = c.topics.partition(topic, batch.Partition)
	}
	if err != nil {
		return refuse(resp, err)
	}

	result, err := p.append(batch.Records, h)
	c.cfg.Observe(Event{topic, batch.Partition, h.Batch(), result, err})
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

// errorCode is the Kafka code for an error of the broker's own, which are
// errors of kerr with or without a word of explanation, or for a refusal of
// package idempotence.
func errorCode(err error) int16 {
	if own := new(kerr.Error); errors.As(err, &own) {
		return own.Code
	}
	return idempotence.KafkaErrorCode(err)
}

// validate holds a batch to what Kafka demands of the batches that producers
// send. It does not look at the records, which may be compressed.
func (c *conn) validate(req *kmsg.ProduceRequest, p []byte) (segment.Header, error) {
	if req.Acks < -1 || req.Acks > 1 {
		return segment.Header{}, fmt.Errorf("%w: acks %d", kerr.InvalidRequiredAcks, req.Acks)
	}
	if len(p) > c.cfg.MaxBatchBytes {
		return segment.Header{}, fmt.Errorf("%w: %d bytes, at most %d", kerr.MessageTooLarge, len(p), c.cfg.MaxBatchBytes)
	}
	if len(p) == 0 {
		return segment.Header{}, fmt.Errorf("%w: no batch", kerr.InvalidRecord)
	}
	h, err := segment.ParseHeader(p)
	if errors.Is(err, segment.ErrMagic) {
		return h, fmt.Errorf("%w: %v", kerr.InvalidRecord, err)
	}
	if err != nil {
		return h, fmt.Errorf("%w: %v", kerr.CorruptMessage, err)
	}
	if h.Size < len(p) {
		return h, fmt.Errorf("%w: more than one batch for a partition", kerr.InvalidRecord)
	}
	if err := segment.Verify(h, p); err != nil {
		return h, fmt.Errorf("%w: %v", kerr.CorruptMessage, err)
	}
	return h, validateHeader(req, h)
}

func validateHeader(req *kmsg.ProduceRequest, h segment.Header) error {
	codec := h.Attributes & segment.CompressionMask
	switch {
	case int64(h.Records) != int64(h.LastOffsetDelta)+1:
		return fmt.Errorf("%w: %d records over %d offsets", kerr.InvalidRecord, h.Records, int64(h.LastOffsetDelta)+1)
	case h.Attributes&segment.Control != 0:
		return fmt.Errorf("%w: a producer sends no control batches", kerr.InvalidRecord)
	case h.Attributes&segment.LogAppendTime != 0:
		return fmt.Errorf("%w: a producer sends create times", kerr.InvalidTimestamp)
	case h.Attributes&segment.Transactional != 0:
		return fmt.Errorf("%w: this broker has no transactions", kerr.InvalidTxnState)
	case codec > 4 || codec == 4 && req.Version < 7: // 4 is zstd
		return fmt.Errorf("%w: codec %d", kerr.UnsupportedCompressionType, codec)
	}
	return nil
}
