package statemachine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"
	"time"

	"github.com/idempotence-go/idempotence"
)

// The commands, by their first byte. All integers are big-endian.
//
//	1  batch         partition uint32, then the record batch as it came
//	2  expire        time in nanoseconds since 1970 int64
//	3  producer ids  count uint32
//	4  create topic  TopicConfig, then the name
//	5  marker        partition uint32, transaction version uint8, then the control
//	                 batch that ends a transaction, as the coordinator made it
const (
	batchCommand       = 1
	expireCommand      = 2
	producerIDsCommand = 3
	createTopicCommand = 4
	markerCommand      = 5
)

// Limits that a command is held to when it is applied. They are constants, so
// that they are the same on every replica.
const (
	// MaxBatchBytes is the size of the largest record batch, as in Kafka.
	MaxBatchBytes = 1<<20 + 12

	// MaxPartitions is the most partitions of all topics together.
	MaxPartitions = 3000
)

// Returned to the proposer of a command that was refused. The state is as it
// was.
var (
	// ErrCommand: the command does not parse, or asks for what cannot be.
	ErrCommand = errors.New("statemachine: bad command")

	// ErrBatchSize: the record batch is larger than MaxBatchBytes.
	ErrBatchSize = errors.New("statemachine: record batch too large")

	// ErrTopicName: the name of the topic is not one that Kafka allows.
	ErrTopicName = errors.New("statemachine: bad topic name")

	// ErrUnknownPartition: there is no such topic or partition.
	ErrUnknownPartition = errors.New("statemachine: unknown partition")

	// ErrTooManyPartitions: the topic would exceed MaxPartitions.
	ErrTooManyPartitions = errors.New("statemachine: too many partitions")

	// ErrNoProducerIDs: all producer ids have been handed out.
	ErrNoProducerIDs = errors.New("statemachine: no producer ids left")
)

// A TopicConfig is what a topic is created with. It is part of the replicated
// state, since the answers to batches depend on it.
type TopicConfig struct {
	// Partitions is the number of partitions, 1 to MaxPartitions.
	Partitions int

	// UnknownProducer, Expiration and MaxProducers are those of
	// [idempotence.Config]. MaxProducers is at most 2147483647.
	UnknownProducer idempotence.UnknownProducerPolicy
	Expiration      time.Duration
	MaxProducers    int

	// Deduplication says where duplicates are recognised.
	Deduplication Deduplication
}

// Deduplication says when a batch is judged. Only the zero value is right; the
// others are here to show what happens with them.
type Deduplication uint8

const (
	// WhenApplied: a batch is judged by every replica when it is applied.
	WhenApplied Deduplication = iota

	// WhenProposed: a batch is judged by the leader before it is proposed, and
	// appended when it is applied, whatever else has been applied by then.
	WhenProposed

	// Never: every batch is appended.
	Never
)

const topicConfigSize = 4 + 1 + 8 + 4 + 1

func (c TopicConfig) append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(c.Partitions))
	dst = append(dst, byte(c.UnknownProducer))
	dst = binary.BigEndian.AppendUint64(dst, uint64(c.Expiration))
	dst = binary.BigEndian.AppendUint32(dst, uint32(c.MaxProducers))
	return append(dst, byte(c.Deduplication))
}

// parseTopicConfig reads what append has written. It requires topicConfigSize
// bytes.
func parseTopicConfig(p []byte) (TopicConfig, error) {
	c := TopicConfig{
		Partitions:      int(binary.BigEndian.Uint32(p)),
		UnknownProducer: idempotence.UnknownProducerPolicy(p[4]),
		Expiration:      time.Duration(binary.BigEndian.Uint64(p[5:])),
		MaxProducers:    int(binary.BigEndian.Uint32(p[13:])),
		Deduplication:   Deduplication(p[17]),
	}
	return c, c.Check()
}

// Check returns an error unless the fields are in their ranges.
func (c TopicConfig) Check() error {
	switch {
	case c.Partitions < 1 || c.Partitions > MaxPartitions:
		return fmt.Errorf("%w: %d partitions", ErrCommand, c.Partitions)
	case c.UnknownProducer > idempotence.StartAtZeroOnNewLog:
		return fmt.Errorf("%w: policy %d", ErrCommand, c.UnknownProducer)
	case c.MaxProducers < 0 || c.MaxProducers > math.MaxInt32:
		return fmt.Errorf("%w: at most %d producers", ErrCommand, c.MaxProducers)
	case c.Deduplication > Never:
		return fmt.Errorf("%w: deduplication %d", ErrCommand, c.Deduplication)
	}
	return nil
}

// Batch returns the command to append a record batch, unless it is a duplicate
// or refused, to the partition with the given number. It copies the batch.
func Batch(partition uint32, batch []byte) []byte {
	command := make([]byte, 0, 1+4+len(batch))
	command = append(command, batchCommand)
	command = binary.BigEndian.AppendUint32(command, partition)
	return append(command, batch...)
}

// Marker returns the command to end a transaction in the partition with the given
// number. The batch is the control batch of the marker, which is copied, and the
// version that of [idempotence.Marker].
func Marker(partition uint32, version int8, batch []byte) []byte {
	command := binary.BigEndian.AppendUint32([]byte{markerCommand}, partition)
	command = append(command, byte(version))
	return append(command, batch...)
}

// Expire returns the command to forget the producers that have been idle for
// too long at the given time, in every partition.
func Expire(now time.Time) []byte {
	return binary.BigEndian.AppendUint64([]byte{expireCommand}, uint64(now.UnixNano()))
}

// ProducerIDs returns the command to hand out a block of producer ids.
func ProducerIDs(count uint32) []byte {
	return binary.BigEndian.AppendUint32([]byte{producerIDsCommand}, count)
}

// CreateTopic returns the command to create a topic. It does nothing where the
// topic exists.
func CreateTopic(name string, c TopicConfig) []byte {
	return append(c.append([]byte{createTopicCommand}), name...)
}

var validTopic = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

func validateTopicName(name string) error {
	if !validTopic.MatchString(name) || strings.Trim(name, ".") == "" {
		return fmt.Errorf("%w: %q", ErrTopicName, name)
	}
	return nil
}
