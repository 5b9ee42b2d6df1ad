// Package statemachine is the replicated part of a broker: the logs of all
// partitions and what is remembered of their producers, changed by nothing but
// the commands of a raft log, which every replica applies in the same order.
//
// Whether a batch is new or a retry is decided when its command is applied, on
// each replica alike. So the raft log holds all copies of a batch that clients
// have sent, and the log of the partition holds one. When the leader changes,
// there is nothing to hand over: whatever leader a copy came through, it is
// judged in its place in the raft log.
//
// This needs two things of whoever changes the package. First, what is done
// with a command depends on the command and on the state alone: not on a clock,
// the order of a map, or a setting that may differ between replicas. Second,
// where the state on disk cannot follow what was decided, the process stops: a
// panic. Other replicas have applied the command, so there is nothing to undo
// and no error to return; a restart builds the state again, from the newest
// snapshot and the raft log.
package statemachine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// A Machine is the state of one replica. ApplyBatch, Apply, Snapshot and
// Restore are for raft, which calls one at a time. All other methods may be
// called concurrently with these and with each other.
type Machine struct {
	dir  string // of all generations; see state
	made int    // generations so far

	mu      sync.RWMutex
	state   *state        // replaced by Restore
	reached uint64        // nothing up to this index is left to be applied
	changed chan struct{} // closed and replaced whenever there is something new
}

// A state is what a snapshot has, and the files of the logs. Each Restore makes
// a new one, with a directory of its own. The fields belong to the goroutine
// that applies; for others to read the clock and the topics, Machine.mu has to
// be held.
type state struct {
	dir  string
	uses atomic.Int32 // by the machine and by snapshots; at 0 the directory is removed

	applied        uint64 // the raft index applied last
	clock          int64  // the time of the last expire command, or 0
	nextProducerID int64
	topics         []*Topic // in the order of their creation
	byName         map[string]*Topic
	partitions     []*Partition // by number
}

// A Topic is a name and its partitions.
type Topic struct {
	Name       string
	Config     TopicConfig
	Partitions []*Partition
	id         uint64 // the raft index at which it was created
}

// A Partition is a log and what is remembered of its producers.
type Partition struct {
	// Number is unique among the partitions of all topics.
	Number uint32

	// Log is read only to all but the machine. Everything in it is committed.
	Log *segment.Log

	producers     *idempotence.ProducerStateManager
	deduplication Deduplication
	stable        atomic.Int64 // the last stable offset

	// Of the goroutine that applies:
	end   int64            // the offset of the next record
	bytes int64            // in the log, with what is in group
	group []*segment.Batch // appended when all commands at hand have been applied
}

// An Answer is what became of a command.
type Answer struct {
	// Result is the answer to a batch, with its base offset also for Append.
	Result idempotence.Result

	// ProducerID is the first one of the block that was handed out.
	ProducerID int64

	// Err is the refusal of the command: an error of package idempotence or one
	// of this package.
	Err error
}

// New returns an empty machine that keeps its logs below dir. What is there
// already is removed: raft restores a snapshot, and then applies the rest of its
// log.
func New(dir string) (*Machine, error) {
	m := &Machine{dir: dir, changed: make(chan struct{})}
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	var err error
	m.state, err = m.newState()
	return m, err
}

func (m *Machine) newState() (*state, error) {
	m.made++
	s := &state{dir: filepath.Join(m.dir, strconv.Itoa(m.made)), byName: make(map[string]*Topic)}
	s.uses.Store(1)
	return s, os.MkdirAll(s.dir, 0o755)
}

// release ends one use of the state.
func (s *state) release() error {
	if s.uses.Add(-1) > 0 {
		return nil
	}
	var errs []error
	for _, p := range s.partitions {
		errs = append(errs, p.Log.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

// Close closes the files and removes them, once no snapshot is being written
// any more. Raft must have been shut down.
func (m *Machine) Close() error { return m.state.release() }

// Apply is ApplyBatch for one entry.
func (m *Machine) Apply(entry *raft.Log) any { return m.ApplyBatch([]*raft.Log{entry})[0] }

// ApplyBatch applies entries of the raft log in their order, and returns an
// Answer for each that is a command. The state does not depend on how the
// entries are grouped.
func (m *Machine) ApplyBatch(entries []*raft.Log) []any {
	s := m.state
	answers := make([]any, len(entries))
	for i, e := range entries {
		if e.Index <= s.applied {
			continue
		}
		if e.Type == raft.LogCommand {
			answers[i] = m.apply(e)
		}
		s.applied = e.Index
	}
	for _, p := range s.partitions {
		if err := p.write(); err != nil {
			panic(fmt.Sprintf("partition %d, up to entry %d of the raft log: %v", p.Number, s.applied, err))
		}
	}
	m.Reached(s.applied)
	return answers
}

// apply applies one command.
func (m *Machine) apply(e *raft.Log) Answer {
	if len(e.Data) == 0 {
		return Answer{Err: fmt.Errorf("%w: empty", ErrCommand)}
	}
	kind, p := e.Data[0], e.Data[1:]
	switch {
	case kind == batchCommand && len(p) >= 4:
		return m.state.appendBatch(binary.BigEndian.Uint32(p), p[4:], e.Index)
	case kind == markerCommand && len(p) >= 5:
		return m.state.appendMarker(binary.BigEndian.Uint32(p), int8(p[4]), p[5:], e.Index)
	case kind == expireCommand && len(p) == 8:
		return m.expire(int64(binary.BigEndian.Uint64(p)))
	case kind == producerIDsCommand && len(p) == 4:
		return m.state.producerIDs(binary.BigEndian.Uint32(p))
	case kind == createTopicCommand && len(p) >= topicConfigSize:
		return Answer{Err: m.createTopic(e.Index, p)}
	}
	return Answer{Err: fmt.Errorf("%w: %d with %d bytes", ErrCommand, kind, len(p))}
}

// appendBatch has a batch judged and, if it is new, gives it its offset. This is
// where the library is used.
func (s *state) appendBatch(number uint32, records []byte, index uint64) Answer {
	if number >= uint32(len(s.partitions)) {
		return Answer{Err: ErrUnknownPartition}
	}
	p := s.partitions[number]
	b, h, err := idempotence.ParseBatch(records)
	if err = checkWhole(h, records, err, index); err != nil {
		return Answer{Err: err}
	}
	if h.Attributes.Control() {
		return Answer{Err: fmt.Errorf("%w: a control batch", ErrCommand)}
	}
	result, err := p.judge(b)
	if errors.Is(err, idempotence.ErrOffsetOrder) {
		panic(fmt.Sprintf("entry %d of the raft log, partition %d, at offset %d: %v", index, number, p.end, err))
	}
	if err != nil || result.Verdict == idempotence.Duplicate {
		return Answer{Result: result, Err: err}
	}
	result.BaseOffset = p.end // which the library has recorded
	p.append(h, records)
	return Answer{Result: result}
}

// judge judges a batch and, if it is to be appended, records it at the end of
// the log. In the wrong modes it is always appended.
func (p *Partition) judge(b idempotence.Batch) (idempotence.Result, error) {
	switch p.deduplication {
	case Never:
		b = idempotence.Batch{ProducerID: idempotence.NoProducerID, Count: b.Count}
	case WhenProposed:
		if p.producers.CommitBatch(b, p.end) != nil {
			p.producers.Advance(p.end + int64(b.Count))
		}
		return idempotence.Result{Verdict: idempotence.Append}, nil
	}
	return p.producers.Apply(b, p.end)
}

// appendMarker ends a transaction.
func (s *state) appendMarker(number uint32, version int8, records []byte, index uint64) Answer {
	if number >= uint32(len(s.partitions)) {
		return Answer{Err: ErrUnknownPartition}
	}
	p := s.partitions[number]
	k, h, err := idempotence.ParseMarker(records)
	if err = checkWhole(h, records, err, index); err != nil {
		return Answer{Err: err}
	}
	k.Version = version
	if err := p.producers.CheckMarker(k); err != nil {
		return Answer{Err: err}
	}
	base := p.end
	if err := p.producers.CommitMarker(k, base); err != nil {
		panic(fmt.Sprintf("entry %d of the raft log, partition %d, at offset %d: %v", index, number, base, err))
	}
	p.append(h, records)
	return Answer{Result: idempotence.Result{Verdict: idempotence.Append, BaseOffset: base}}
}

// checkWhole returns err, or an error unless p is the one batch with a header. A
// batch that is whole has been so when it was proposed, and is on the other
// replicas: if its checksum is wrong, this replica stops.
func checkWhole(h idempotence.BatchHeader, p []byte, err error, index uint64) error {
	switch {
	case len(p) > MaxBatchBytes:
		return fmt.Errorf("%w: %d bytes", ErrBatchSize, len(p))
	case err != nil:
		return err
	case h.Size != len(p):
		return fmt.Errorf("%w: a batch of %d bytes in %d", ErrCommand, h.Size, len(p))
	}
	if err := h.VerifyCRC(p); err != nil {
		panic(fmt.Sprintf("entry %d of the raft log has changed: %v", index, err))
	}
	return nil
}

// append adds a batch to the group, which is written later. Of the bytes, which
// are those of the raft log and which the leader may be sending to a follower at
// this moment, the log gets a copy to put the offset into.
func (p *Partition) append(h idempotence.BatchHeader, records []byte) {
	p.group = append(p.group, &segment.Batch{Header: h, Bytes: bytes.Clone(records)})
	p.end += int64(h.LastOffsetDelta) + 1
	p.bytes += int64(h.Size)
}

// write writes the group at the end of the log. It does not sync: the raft log
// is synced, and from that the log can be made again.
func (p *Partition) write() error {
	if len(p.group) == 0 {
		return nil
	}
	err := p.Log.Append(p.group)
	if end := p.Log.End(); err == nil && end != p.end {
		err = fmt.Errorf("the log ends at %d and not at %d", end, p.end)
	}
	p.group = nil
	p.stable.Store(p.producers.LastStableOffset(p.end))
	return err
}

// expire has every partition forget the producers that were idle for too long. A
// time before that of an earlier command is the library's to deal with: replicas
// disagree about the time, and take turns to lead.
func (m *Machine) expire(now int64) Answer {
	for _, p := range m.state.partitions {
		p.producers.Expire(time.Unix(0, now))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.clock = now
	return Answer{}
}

func (s *state) producerIDs(count uint32) Answer {
	if count == 0 {
		return Answer{Err: fmt.Errorf("%w: a block of no producer ids", ErrCommand)}
	}
	if s.nextProducerID > math.MaxInt64-int64(count) {
		return Answer{Err: ErrNoProducerIDs}
	}
	first := s.nextProducerID
	s.nextProducerID += int64(count)
	return Answer{ProducerID: first}
}

func (m *Machine) createTopic(index uint64, p []byte) error {
	c, err := parseTopicConfig(p)
	name := string(p[topicConfigSize:])
	if err == nil {
		err = validateTopicName(name)
	}
	if err != nil || m.state.byName[name] != nil {
		return err
	}
	if len(m.state.partitions)+c.Partitions > MaxPartitions {
		return ErrTooManyPartitions
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.state.addTopic(index, name, c); err != nil {
		panic(fmt.Sprintf("topic %s: %v", name, err))
	}
	return nil
}

// addTopic makes a topic with empty partitions.
func (s *state) addTopic(id uint64, name string, c TopicConfig) (*Topic, error) {
	t := &Topic{Name: name, Config: c, id: id}
	for i := range c.Partitions {
		number := uint32(len(s.partitions))
		log, err := segment.Open(filepath.Join(s.dir, strconv.Itoa(int(number))), segment.Options{NoSync: true})
		if err != nil {
			return nil, err
		}
		p := &Partition{
			Number: number,
			Log:    log,
			producers: idempotence.New(idempotence.Config{
				UnknownProducer: c.UnknownProducer,
				Expiration:      c.Expiration,
				MaxProducers:    c.MaxProducers,
				LogID:           logID(id, uint32(i)),
				Contiguous:      true,
			}),
			deduplication: c.Deduplication,
		}
		t.Partitions = append(t.Partitions, p)
		s.partitions = append(s.partitions, p)
	}
	s.topics = append(s.topics, t)
	s.byName[name] = t
	return t, nil
}

// logID is the topic id and the partition.
func logID(topic uint64, partition uint32) (id [16]byte) {
	binary.BigEndian.PutUint64(id[:], topic)
	binary.BigEndian.PutUint32(id[8:], partition)
	return id
}
