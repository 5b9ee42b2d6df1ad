package node

// This file is the Produce request and the producer ids.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/wire"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

// maxProduceWait bounds the timeout that a client sets.
const maxProduceWait = 30 * time.Second

// producerIDBlock is how many producer ids the leader gets at a time. What is
// left of a block when the node stops is lost.
const producerIDBlock = 1000

// errUnacknowledged closes the connection of a producer that asked for no
// answers and had a batch refused, since there is no other way to tell it.
var errUnacknowledged = errors.New("node: refused a batch sent with acks=0")

// A submission is one batch of a request: answered at once, or proposed.
type submission struct {
	topic     string
	index     int32
	batch     idempotence.Batch
	partition *statemachine.Partition
	proposed  raft.ApplyFuture // or nil
	result    idempotence.Result
	err       error
}

// produce proposes the batches of a request, in their order. The answer is there
// when it is known what became of each, or when the time of the request is up.
func (n *Node) produce(req *kmsg.ProduceRequest) (answer func() (kmsg.Response, error)) {
	timeout := min(time.Duration(max(req.TimeoutMillis, 0))*time.Millisecond, maxProduceWait)
	ctx, cancel := context.WithTimeout(n.closing, timeout)
	var sent []submission
	for _, t := range req.Topics {
		for _, p := range t.Partitions {
			sent = append(sent, n.submit(req, t.Topic, p))
		}
	}
	return func() (kmsg.Response, error) {
		defer cancel()
		for i := range sent {
			n.settle(ctx, &sent[i])
		}
		return n.answerProduce(req, sent)
	}
}

// submit answers a batch at once or proposes it. It is called in the order in
// which the batches of a connection come, so they are in the raft log in that
// order, too.
func (n *Node) submit(req *kmsg.ProduceRequest, topic string, sent kmsg.ProduceRequestTopicPartition) submission {
	s := submission{topic: topic, index: sent.Partition}
	if !n.Ready() {
		s.err = kerr.NotLeaderForPartition
		return s
	}
	if s.batch, s.err = validate(req, sent.Records); s.err != nil {
		return s
	}
	if s.partition, s.err = n.machine.Partition(topic, sent.Partition); s.err != nil {
		return s
	}
	var final bool
	if s.result, final, s.err = s.partition.Check(s.batch); final {
		return s
	}
	s.proposed = n.raft.Apply(statemachine.Batch(s.partition.Number, sent.Records), enqueueTimeout)
	return s
}

// settle waits until it is known what became of a batch.
func (n *Node) settle(ctx context.Context, s *submission) {
	if s.proposed != nil {
		answer, err := wait(ctx, s.proposed)
		s.result, s.err = answer.Result, err
	}
	if s.batch.Count > 0 {
		n.cfg.Observe(Event{s.topic, s.index, s.batch, s.result, s.err})
	}
}

// wait returns what became of a proposal. When ctx ends first, it may still be
// applied; the retry of a batch finds out.
func wait(ctx context.Context, proposed raft.ApplyFuture) (statemachine.Answer, error) {
	if err := await(ctx, proposed); err != nil {
		return statemachine.Answer{}, err
	}
	answer := proposed.Response().(statemachine.Answer)
	return answer, answer.Err
}

// await waits for a future, which has no end of its own: raft forgets some of
// them when it is shut down.
func await(ctx context.Context, f raft.Future) error {
	done := make(chan error, 1)
	go func() { done <- f.Error() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return kerr.RequestTimedOut
	}
}

func (n *Node) answerProduce(req *kmsg.ProduceRequest, sent []submission) (kmsg.Response, error) {
	resp := kmsg.NewPtrProduceResponse()
	refused := false
	for _, t := range req.Topics {
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic = t.Topic
		for range t.Partitions {
			answer := n.answerBatch(sent[0])
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
	for _, p := range n.cfg.Peers {
		resp.Brokers = append(resp.Brokers, endpoint(p))
	}
	return resp, nil
}

func (n *Node) answerBatch(s submission) kmsg.ProduceResponseTopicPartition {
	resp := kmsg.NewProduceResponseTopicPartition()
	resp.Partition = s.index
	resp.BaseOffset = -1
	if s.err != nil {
		resp.ErrorCode = errorCode(s.err)
		resp.ErrorMessage = kmsg.StringPtr(s.err.Error())
		if resp.ErrorCode == kerr.NotLeaderForPartition.Code {
			resp.CurrentLeader.LeaderID, resp.CurrentLeader.LeaderEpoch = n.leader()
		}
		return resp
	}
	resp.BaseOffset = s.result.BaseOffset
	resp.LogStartOffset = s.partition.Log.Start()
	return resp
}

// errorCode is the Kafka code for an error: one of kerr, perhaps explained, one
// of package idempotence, or one of those below.
//
// Where raft gave up on a batch it may be in the log or come to be there, but
// whatever the reason was, the producer is to send it again to the node that
// leads. That goes for errors that raft passes on from a disk, too.
func errorCode(err error) int16 {
	if own := new(kerr.Error); errors.As(err, &own) {
		return own.Code
	}
	for _, e := range []struct {
		err  error
		code *kerr.Error
	}{
		{raft.ErrEnqueueTimeout, kerr.RequestTimedOut},
		{statemachine.ErrUnknownPartition, kerr.UnknownTopicOrPartition},
		{statemachine.ErrBatchSize, kerr.MessageTooLarge},
		{statemachine.ErrCommand, kerr.InvalidRecord},
		{statemachine.ErrTopicName, kerr.InvalidTopicException},
		{statemachine.ErrTooManyPartitions, kerr.PolicyViolation},
		{statemachine.ErrNoProducerIDs, kerr.UnknownServerError},
	} {
		if errors.Is(err, e.err) {
			return e.code.Code
		}
	}
	if code := idempotence.KafkaErrorCode(err); code != kerr.UnknownServerError.Code {
		return code
	}
	return kerr.NotLeaderForPartition.Code
}

// zstd is the last codec there is, and may not be used before version 7 of the
// Produce request (KIP-110).
const zstd = 4

// validate holds a batch to what Kafka demands of the batches that producers
// send. It does not look at the records, which may be compressed.
func validate(req *kmsg.ProduceRequest, p []byte) (idempotence.Batch, error) {
	none := idempotence.Batch{}
	switch {
	case req.Acks < -1 || req.Acks > 1:
		return none, fmt.Errorf("%w: acks %d", kerr.InvalidRequiredAcks, req.Acks)
	case len(p) == 0:
		return none, fmt.Errorf("%w: no batch", kerr.InvalidRecord)
	case len(p) > statemachine.MaxBatchBytes:
		return none, fmt.Errorf("%w: %d bytes, at most %d", kerr.MessageTooLarge, len(p), statemachine.MaxBatchBytes)
	}
	b, h, err := idempotence.ParseBatch(p)
	if err == nil {
		err = h.VerifyCRC(p)
	}
	codec := h.Attributes.Compression()
	switch {
	case err != nil:
	case h.Size < len(p):
		err = fmt.Errorf("%w: more than one batch for a partition", kerr.InvalidRecord)
	case h.Records != b.Count:
		err = fmt.Errorf("%w: %d records over %d offsets", kerr.InvalidRecord, h.Records, b.Count)
	case h.Attributes.Control():
		err = fmt.Errorf("%w: a producer sends no control batches", kerr.InvalidRecord)
	case h.Attributes.LogAppendTime():
		err = fmt.Errorf("%w: a producer sends create times", kerr.InvalidTimestamp)
	case h.Attributes.Transactional() || req.TransactionID != nil:
		err = fmt.Errorf("%w: this broker has no transactions", kerr.InvalidTxnState)
	case codec > zstd || codec == zstd && req.Version < 7:
		err = fmt.Errorf("%w: codec %d", kerr.UnsupportedCompressionType, codec)
	}
	return b, err
}

// producerIDs is what the node has of the block that was handed out to it last.
type producerIDs struct {
	mu        sync.Mutex
	next, end int64
}

// freshProducerID takes ids until it has one that no partition knows. Nothing
// keeps a client from producing under an id that was never handed out; the first
// batches of a producer that got it afterwards would be taken for retries of that
// client's.
func (n *Node) freshProducerID() (int64, error) {
	ids := &n.producerIDs
	ids.mu.Lock()
	defer ids.mu.Unlock()
	for {
		if ids.next == ids.end {
			answer, err := n.propose(statemachine.ProducerIDs(producerIDBlock))
			if err != nil {
				return 0, err
			}
			ids.next, ids.end = answer.ProducerID, answer.ProducerID+producerIDBlock
		}
		id := ids.next
		ids.next++
		if !n.machine.KnowsProducer(id) {
			return id, nil
		}
	}
}

// initProducerID gives a fresh id at epoch 0, as Kafka does for producers
// without a transactional id; one that names the id and epoch it has had gets a
// fresh one too. Any node has to be able to do so: clients ask any, and librdkafka
// keeps asking those that it has connections to. Only the leader has ids, and a
// node that does not lead asks it.
func (n *Node) initProducerID(h wire.Header, req *kmsg.InitProducerIDRequest) *kmsg.InitProducerIDResponse {
	resp := kmsg.NewPtrInitProducerIDResponse()
	resp.ProducerEpoch = -1
	if req.TransactionalID != nil {
		resp.ErrorCode = kerr.InvalidRequest.Code // no transactions here
		return resp
	}
	var err error
	switch {
	case n.Ready():
		resp.ProducerID, err = n.freshProducerID()
	case h.ClientID == forwardedClientID:
		err = kerr.NotLeaderForPartition
	default:
		resp.ProducerID, err = n.leadersProducerID()
	}
	if err != nil {
		n.cfg.Log.Warn("no producer id", "err", err)
		resp.ProducerID, resp.ErrorCode = -1, kerr.CoordinatorNotAvailable.Code
		return resp
	}
	resp.ProducerEpoch = 0
	return resp
}

// leadersProducerID asks the leader for a producer id.
func (n *Node) leadersProducerID() (int64, error) {
	resp, err := n.askLeader(kmsg.NewPtrInitProducerIDRequest())
	if err != nil {
		return 0, err
	}
	id := resp.(*kmsg.InitProducerIDResponse)
	return id.ProducerID, kerr.ErrorForCode(id.ErrorCode)
}
