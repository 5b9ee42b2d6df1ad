// Package segment keeps the log of one partition on disk the way Apache Kafka
// does: files of record batches (magic 2) back to back, each file named after
// the offset it begins with. Batches stay as their producers made them but for
// the base offset and the leader epoch; payloads are never looked into.
//
// It deduplicates nothing: what it is told to append, it appends. Of package
// idempotence it uses what reads record batches.
package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/durable"
)

// ErrMissing is returned by [Open] for a log that lacks a piece in the middle.
var ErrMissing = errors.New("segment: offsets missing from the log")

// ErrOffsetOutOfRange is returned by [Log.Read] for an offset below the log's
// start or beyond its end.
var ErrOffsetOutOfRange = errors.New("segment: offset out of range")

// indexInterval is how many bytes of a segment lie between two entries of its
// index: the most that a read has to walk to find an offset.
const indexInterval = 4096

// A Log is the log of one partition. Reads may run concurrently with each
// other and with an append; appends, rolls and Close take turns by themselves,
// but a caller for whom the order of appends matters holds a lock of its own.
type Log struct {
	dir string

	writing sync.Mutex // held through an append or a roll
	broken  error      // set when the file may differ from what is published

	mu       sync.RWMutex // guards what readers see, all below
	segments []*segment   // by base offset; the last one is appended to
	end      int64        // the offset the next record will get
}

// A segment is one file of the log.
type segment struct {
	file         *os.File
	base         int64
	size         int64
	maxTimestamp int64
	index        []position
}

// A position says where in its segment the batch with a given offset begins.
type position struct{ offset, at int64 }

// A ReplayFunc reads one segment through and says where it stops being good,
// as [idempotence.ProducerStateManager.ReplayLog] does.
type ReplayFunc func(io.Reader) (idempotence.ReplayResult, error)

// Open opens the log in dir, making it if need be, and has each of its segments
// replayed, in order. The tail that a crash tore off the last one is cut away;
// any other damage is an error.
func Open(dir string, replay ReplayFunc) (*Log, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	bases, err := segmentBases(dir)
	if err != nil {
		return nil, err
	}
	l := &Log{dir: dir}
	for i, base := range bases {
		if err := l.load(base, i == len(bases)-1, replay); err != nil {
			return nil, errors.Join(err, l.closeFiles())
		}
	}
	if len(bases) == 0 {
		return l, l.Roll()
	}
	return l, nil
}

// segmentBases returns the base offsets of the segments in dir, sorted.
func segmentBases(dir string) ([]int64, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil {
		return nil, err
	}
	var bases []int64
	for _, name := range names {
		var base int64
		stem := strings.TrimSuffix(filepath.Base(name), ".log")
		if _, err := fmt.Sscanf(stem, "%d", &base); err != nil || fileName(base) != stem+".log" {
			return nil, fmt.Errorf("segment: %s is not named after an offset", name)
		}
		bases = append(bases, base)
	}
	sort.Slice(bases, func(i, j int) bool { return bases[i] < bases[j] })
	return bases, nil
}

func fileName(base int64) string { return fmt.Sprintf("%020d.log", base) }

// load opens the segment that begins at base.
func (l *Log) load(base int64, last bool, replay ReplayFunc) error {
	f, err := os.OpenFile(filepath.Join(l.dir, fileName(base)), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if len(l.segments) == 0 {
		l.end = base
	}
	s := &segment{file: f, base: base, maxTimestamp: -1}
	l.segments = append(l.segments, s)

	found, err := replay(f)
	if last && errors.Is(err, idempotence.ErrTornTail) {
		err = cut(f, found.Bytes)
	}
	if err == nil {
		err = l.index(s, found.Bytes)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	return nil
}

// index goes over the headers of a segment that is known to be good for size
// bytes.
func (l *Log) index(s *segment, size int64) error {
	for s.size < size {
		h, err := s.headerAt(s.size)
		if err != nil {
			return err
		}
		if h.BaseOffset != l.end {
			return fmt.Errorf("%w: %d to %d", ErrMissing, l.end, h.BaseOffset-1)
		}
		s.add(h)
		l.end = h.LastOffset() + 1
	}
	return nil
}

// cut shortens the file to size bytes, durably.
func cut(f *os.File, size int64) error {
	if err := f.Truncate(size); err != nil {
		return err
	}
	return f.Sync()
}

// add accounts for a batch that was written at the segment's end.
func (s *segment) add(h idempotence.BatchHeader) {
	if n := len(s.index); n == 0 || s.size-s.index[n-1].at >= indexInterval {
		s.index = append(s.index, position{h.BaseOffset, s.size})
	}
	s.size += int64(h.Size)
	s.maxTimestamp = max(s.maxTimestamp, h.MaxTimestamp)
}

// Start returns the offset of the first record.
func (l *Log) Start() int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.segments[0].base
}

// End returns the offset that the next record will get.
func (l *Log) End() int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.end
}

// ActiveSize returns how many bytes the segment holds that is appended to.
func (l *Log) ActiveSize() int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.segments[len(l.segments)-1].size
}

// Append writes one batch at the end of the log and returns the base offset it
// got, which it also fills into p. The caller has verified that p is the one
// batch whose header h is. When it fails, nothing was appended, and a later append may be tried; only when
// the remains of a failed write could not be removed does the log take no more.
//
// The write is left to the operating system to bring to disk: it outlives the
// process, but not a loss of power. See [Log.Sync].
func (l *Log) Append(p []byte, h idempotence.BatchHeader) (int64, error) {
	l.writing.Lock()
	defer l.writing.Unlock()
	if l.broken != nil {
		return 0, l.broken
	}
	// Nobody else moves these while the writing lock is held.
	s, end := l.segments[len(l.segments)-1], l.end

	place(p, end)
	if _, err := s.file.WriteAt(p, s.size); err != nil {
		if cutErr := s.file.Truncate(s.size); cutErr != nil {
			l.broken = fmt.Errorf("segment: log closed to appends: %w", cutErr)
		}
		return 0, err
	}
	h.BaseOffset = end
	l.mu.Lock()
	defer l.mu.Unlock()
	s.add(h)
	l.end = h.LastOffset() + 1
	return end, nil
}

// place fills in what a broker decides about a batch, where it lives: its base
// offset, and the epoch of the leader, which is always 0 here. Both lie before
// what the checksum covers, so the batch keeps the one its producer gave it.
func place(p []byte, baseOffset int64) {
	binary.BigEndian.PutUint64(p[0:], uint64(baseOffset))
	binary.BigEndian.PutUint32(p[12:], 0)
}

// Roll syncs the segment that is appended to and begins a new one at the
// log's end. It does nothing when that segment is still empty.
func (l *Log) Roll() error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if n := len(l.segments); n > 0 {
		if l.segments[n-1].size == 0 {
			return nil
		}
		if err := l.segments[n-1].file.Sync(); err != nil {
			return err
		}
	}
	name := filepath.Join(l.dir, fileName(l.end))
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	if err := durable.SyncDir(l.dir); err != nil {
		return errors.Join(err, f.Close())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.segments = append(l.segments, &segment{file: f, base: l.end, maxTimestamp: -1})
	return nil
}

// Sync returns once everything appended so far is on disk.
func (l *Log) Sync() error {
	l.writing.Lock()
	defer l.writing.Unlock()
	return l.segments[len(l.segments)-1].file.Sync()
}

// Close closes the files, without syncing them.
func (l *Log) Close() error {
	l.writing.Lock()
	defer l.writing.Unlock()
	l.broken = os.ErrClosed
	return l.closeFiles()
}

func (l *Log) closeFiles() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, s := range l.segments {
		errs = append(errs, s.file.Close())
	}
	return errors.Join(errs...)
}
