package statemachine

// This file writes the state and reads it. All integers are big-endian:
//
//	magic "idemrepl", version uint32
//	applied uint64, clock int64, next producer id int64, number of topics uint32
//	for each topic, in the order of creation:
//	    id uint64, TopicConfig, length of the name uint8, name
//	    for each partition:
//	        length uint64, the snapshot of its producers
//	        length uint64, the batches of its log
//
// Equal states give equal bytes. There is no checksum of the whole: raft has
// one, and so do the producers and every batch.

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/hashicorp/raft"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

const (
	snapshotMagic   = "idemrepl"
	snapshotVersion = 1

	// snapshotChunk is about how much of a log is read or written at a time.
	snapshotChunk = 1 << 20
)

// ErrSnapshot is returned by Restore for what is not a snapshot of this version,
// or not as it was written.
var ErrSnapshot = errors.New("statemachine: bad snapshot")

// A snapshot is the state at one index. It is taken quickly: the producers can
// be copied so, and of a log, which only grows, the length is enough.
type snapshot struct {
	state      *state // for its files, and what never changes
	head       []byte
	topics     []*Topic
	partitions []partitionSnapshot
}

type partitionSnapshot struct {
	producers *idempotence.Snapshot
	bytes     int64
}

// Snapshot returns the state as it is after the last entry that was applied.
func (m *Machine) Snapshot() (raft.FSMSnapshot, error) {
	s := m.state
	s.uses.Add(1)
	x := &snapshot{state: s, head: s.head(), topics: s.topics[:len(s.topics):len(s.topics)]}
	for _, p := range s.partitions {
		x.partitions = append(x.partitions, partitionSnapshot{p.producers.Snapshot(), p.bytes})
	}
	return x, nil
}

func (s *state) head() []byte {
	b := binary.BigEndian.AppendUint32([]byte(snapshotMagic), snapshotVersion)
	b = binary.BigEndian.AppendUint64(b, s.applied)
	b = binary.BigEndian.AppendUint64(b, uint64(s.clock))
	b = binary.BigEndian.AppendUint64(b, uint64(s.nextProducerID))
	return binary.BigEndian.AppendUint32(b, uint32(len(s.topics)))
}

// Persist writes the snapshot, beside commands that are being applied.
func (x *snapshot) Persist(sink raft.SnapshotSink) error {
	if err := x.write(sink); err != nil {
		return errors.Join(err, sink.Cancel())
	}
	return sink.Close()
}

func (x *snapshot) write(w io.Writer) error {
	out := bufio.NewWriter(w) // remembers its first error, which Flush returns
	out.Write(x.head)
	partitions := x.partitions
	for _, t := range x.topics {
		out.Write(t.head())
		for _, p := range t.Partitions {
			if err := partitions[0].write(out, p.Log); err != nil {
				return err
			}
			partitions = partitions[1:]
		}
	}
	return out.Flush()
}

func (t *Topic) head() []byte {
	b := binary.BigEndian.AppendUint64(nil, t.id)
	b = t.Config.append(b)
	b = append(b, byte(len(t.Name)))
	return append(b, t.Name...)
}

func (x partitionSnapshot) write(out *bufio.Writer, log *segment.Log) error {
	var producers bytes.Buffer // their length comes first
	if _, err := x.producers.WriteTo(&producers); err != nil {
		return err
	}
	out.Write(binary.BigEndian.AppendUint64(nil, uint64(producers.Len())))
	out.Write(producers.Bytes())
	out.Write(binary.BigEndian.AppendUint64(nil, uint64(x.bytes)))
	offset := log.Start()
	for left := x.bytes; left > 0; {
		batches, err := log.Read(offset, snapshotChunk)
		if err != nil {
			return err
		}
		batches = batches[:min(int64(len(batches)), left)] // without what came later
		if offset, err = endOf(batches); err != nil {
			return err
		}
		if _, err := out.Write(batches); err != nil {
			return err
		}
		left -= int64(len(batches))
	}
	return nil
}

// endOf returns the offset that follows the last of the batches.
func endOf(batches []byte) (int64, error) {
	end := int64(-1)
	for len(batches) > 0 {
		_, h, err := idempotence.ParseBatch(batches)
		if err != nil {
			return end, err
		}
		end, batches = h.LastOffset()+1, batches[h.Size:]
	}
	return end, nil
}

// Release lets the files go.
func (x *snapshot) Release() { x.state.release() } // of temporary files, which New removes too

// Restore replaces the state by that of a snapshot. On an error the state is
// untouched.
func (m *Machine) Restore(r io.ReadCloser) error {
	s, err := m.newState()
	if err == nil {
		err = s.read(&reader{in: bufio.NewReader(r)})
	}
	if err != nil {
		return errors.Join(err, s.release())
	}
	m.mu.Lock()
	former := m.state
	m.state = s
	m.mu.Unlock()
	m.Reached(s.applied)
	return former.release()
}

// read fills an empty state.
func (s *state) read(r *reader) error {
	if magic := string(r.bytes(len(snapshotMagic))); r.err == nil && magic != snapshotMagic {
		return fmt.Errorf("%w: it begins with %q", ErrSnapshot, magic)
	}
	if v := r.uint32(); r.err == nil && v != snapshotVersion {
		return fmt.Errorf("%w: version %d", ErrSnapshot, v)
	}
	s.applied, s.clock, s.nextProducerID = r.uint64(), int64(r.uint64()), int64(r.uint64())
	for n := r.uint32(); n > 0 && r.err == nil; n-- {
		if err := s.readTopic(r); err != nil {
			return err
		}
	}
	if _, err := r.in.ReadByte(); r.err == nil && err != io.EOF {
		return fmt.Errorf("%w: it goes on after its end", ErrSnapshot)
	}
	return r.err
}

func (s *state) readTopic(r *reader) error {
	id, config := r.uint64(), r.bytes(topicConfigSize)
	name := string(r.bytes(int(r.uint8())))
	if r.err != nil {
		return r.err
	}
	c, err := parseTopicConfig(config)
	if err == nil {
		err = validateTopicName(name)
	}
	if err != nil || s.byName[name] != nil || len(s.partitions)+c.Partitions > MaxPartitions {
		return fmt.Errorf("%w: topic %q: %v", ErrSnapshot, name, err)
	}
	t, err := s.addTopic(id, name, c)
	if err != nil {
		return err
	}
	for _, p := range t.Partitions {
		if err := p.read(r); err != nil {
			return fmt.Errorf("topic %s, partition %d: %w", name, p.Number, err)
		}
	}
	return nil
}

// read fills an empty partition.
func (p *Partition) read(r *reader) error {
	if err := p.producers.Restore(r.section()); err != nil {
		return errors.Join(err, r.err)
	}
	if err := p.readLog(r.section()); err != nil {
		return errors.Join(err, r.err)
	}
	if end := p.producers.EndOffset(); end != p.end {
		return fmt.Errorf("%w: the producers are at offset %d, the log ends at %d", ErrSnapshot, end, p.end)
	}
	return r.err
}

// readLog reads batches to the end of r, and writes them to the log in groups.
func (p *Partition) readLog(r io.Reader) error {
	group := 0
	for {
		h, batch, err := readBatch(r)
		if err == io.EOF {
			return p.write()
		}
		if err == nil && h.BaseOffset != p.end {
			err = fmt.Errorf("%w: a batch at offset %d, the log ends at %d", ErrSnapshot, h.BaseOffset, p.end)
		}
		if err == nil && group >= snapshotChunk {
			group, err = 0, p.write()
		}
		if err != nil {
			return err
		}
		p.append(h, batch)
		group += h.Size
	}
}

// readBatch reads one record batch, or returns io.EOF where there is none.
func readBatch(r io.Reader) (h idempotence.BatchHeader, batch []byte, err error) {
	batch = make([]byte, idempotence.BatchHeaderSize)
	if _, err := io.ReadFull(r, batch); err != nil {
		return h, nil, err
	}
	if _, h, err = idempotence.ParseBatch(batch); err != nil {
		return h, nil, err
	}
	if h.Size > MaxBatchBytes {
		return h, nil, fmt.Errorf("%w: a batch of %d bytes", ErrSnapshot, h.Size)
	}
	batch = append(batch, make([]byte, h.Size-len(batch))...)
	if _, err := io.ReadFull(r, batch[idempotence.BatchHeaderSize:]); err != nil {
		return h, nil, fmt.Errorf("%w: %w", ErrSnapshot, err)
	}
	return h, batch, h.VerifyCRC(batch)
}

// A reader reads values until the first error, and then zeros.
type reader struct {
	in  *bufio.Reader
	err error
}

func (r *reader) bytes(n int) []byte {
	p := make([]byte, n)
	if r.err == nil {
		if _, err := io.ReadFull(r.in, p); err != nil {
			r.err = fmt.Errorf("%w: %w", ErrSnapshot, err)
			clear(p)
		}
	}
	return p
}

func (r *reader) uint8() uint8   { return r.bytes(1)[0] }
func (r *reader) uint32() uint32 { return binary.BigEndian.Uint32(r.bytes(4)) }
func (r *reader) uint64() uint64 { return binary.BigEndian.Uint64(r.bytes(8)) }

// section reads a length and returns what is that long. The caller reads it to
// its end, which comes early where the snapshot is cut off.
func (r *reader) section() io.Reader {
	return io.LimitReader(r.in, int64(min(r.uint64(), math.MaxInt64)))
}
