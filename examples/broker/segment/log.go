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
	"math"
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
// but a caller for whom the order of appends matters has to see to that.
type Log struct {
	dir  string
	opts Options

	writing sync.Mutex // held through an append or a roll
	broken  error      // set when the file may differ from what is published
	group   []byte     // of the append under way; kept for the next one

	mu       sync.RWMutex // guards what readers see, all below
	segments []*segment   // by base offset; the last one is appended to
	end      int64        // the offset the next record will get
}

// Options say how a log treats its files.
type Options struct {
	// NoSync leaves it to the operating system when appends get to disk: they
	// outlive the process, but perhaps not a loss of power. Otherwise every
	// append is synced before it counts.
	NoSync bool

	// ReadOnly opens the log of another process, or of none: nothing is created
	// or cut, and what there is of a torn tail is left out.
	ReadOnly bool

	// OpenFile opens or creates a segment; the default is os.OpenFile. Tests
	// open files with it that fail.
	OpenFile func(name string, flag int, perm os.FileMode) (File, error)
}

// A File is what a log needs of an *os.File.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Name() string
	Stat() (os.FileInfo, error)
	Sync() error
	Truncate(size int64) error
}

func openFile(name string, flag int, perm os.FileMode) (File, error) {
	return os.OpenFile(name, flag, perm)
}

// A segment is one file of the log.
type segment struct {
	file         File
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

// Open opens the log in dir, making it if need be. The newest segment is read
// through, and the tail that a crash tore off it is cut away; any other damage
// is an error. Older segments were whole when they were rolled: of those only
// the headers are read, and [Log.Replay] verifies the ones it goes over.
func Open(dir string, opts Options) (*Log, error) {
	if opts.OpenFile == nil {
		opts.OpenFile = openFile
	}
	if err := makeDir(dir, opts); err != nil {
		return nil, err
	}
	bases, err := segmentBases(dir)
	if err != nil {
		return nil, err
	}
	l := &Log{dir: dir, opts: opts}
	for i, base := range bases {
		if err := l.load(base, i == len(bases)-1); err != nil {
			return nil, errors.Join(err, l.closeFiles())
		}
	}
	switch {
	case len(bases) > 0:
		return l, nil
	case opts.ReadOnly:
		return nil, fmt.Errorf("segment: no log in %s", dir)
	}
	return l, l.Roll()
}

func makeDir(dir string, opts Options) error {
	if opts.ReadOnly {
		return nil
	}
	return os.MkdirAll(dir, 0o755)
}

// segmentBases returns the base offsets of the segments in dir, sorted.
func segmentBases(dir string) ([]int64, error) {
	entries, err := os.ReadDir(dir) // and no pattern: dir may hold its special characters
	if err != nil {
		return nil, err
	}
	var bases []int64
	for _, e := range entries {
		stem, ok := strings.CutSuffix(e.Name(), ".log")
		if !ok {
			continue
		}
		var base int64
		if _, err := fmt.Sscanf(stem, "%d", &base); err != nil || fileName(base) != e.Name() {
			return nil, fmt.Errorf("segment: %s is not named after an offset", filepath.Join(dir, e.Name()))
		}
		bases = append(bases, base)
	}
	sort.Slice(bases, func(i, j int) bool { return bases[i] < bases[j] })
	return bases, nil
}

func fileName(base int64) string { return fmt.Sprintf("%020d.log", base) }

// load opens the segment that begins at base.
func (l *Log) load(base int64, newest bool) error {
	flag := os.O_RDWR
	if l.opts.ReadOnly {
		flag = os.O_RDONLY
	}
	f, err := l.opts.OpenFile(filepath.Join(l.dir, fileName(base)), flag, 0)
	if err != nil {
		return err
	}
	if len(l.segments) == 0 {
		l.end = base
	}
	s := &segment{file: f, base: base, maxTimestamp: -1}
	l.segments = append(l.segments, s)

	size, err := sizeOf(f)
	if err == nil && newest {
		size, err = l.wholePart(f)
	}
	if err == nil {
		err = l.index(s, size)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	return nil
}

func sizeOf(f File) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// wholePart reads the newest segment through and returns how long it is without
// what a crash has left of an append, which it cuts off. What the producers
// were up to is of no interest here, only whether the batches are whole.
func (l *Log) wholePart(f File) (size int64, err error) {
	verify := idempotence.New(idempotence.Config{MaxProducers: 1}).ReplayLog
	found, err := verify(io.NewSectionReader(f, 0, math.MaxInt64))
	if errors.Is(err, idempotence.ErrTornTail) {
		err = nil
		if !l.opts.ReadOnly {
			err = errors.Join(f.Truncate(found.Bytes), f.Sync())
		}
	}
	return found.Bytes, err
}

// index goes over the headers of a segment of the given size.
func (l *Log) index(s *segment, size int64) error {
	for s.size < size {
		h, err := s.headerAt(s.size)
		if err == nil && s.size+int64(h.Size) > size {
			err = idempotence.ErrTornTail
		}
		if err != nil {
			return &idempotence.LogError{Position: s.size, Offset: l.end, Err: err}
		}
		if h.BaseOffset != l.end {
			return fmt.Errorf("%w: %d to %d", ErrMissing, l.end, h.BaseOffset-1)
		}
		s.add(h)
		l.end = h.LastOffset() + 1
	}
	return nil
}

// Replay has the log replayed from the batch on that holds the offset from:
// that of a snapshot, or 0 for all of it. It does not begin earlier, since that
// would bring back producers which the snapshot has forgotten.
func (l *Log) Replay(from int64, replay ReplayFunc) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, s := range l.segments[max(l.segmentOf(from), 0):] {
		at, err := l.positionOf(s, from)
		if err == nil {
			_, err = replay(io.NewSectionReader(s.file, at, s.size-at))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", s.file.Name(), err)
		}
	}
	return nil
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

// A Batch is a record batch to append, and its header. Whoever made it has
// verified that the bytes are the one batch with that header.
type Batch struct {
	Header idempotence.BatchHeader
	Bytes  []byte
}

// Append writes a group of batches at the end of the log, in one go and with
// one sync, and fills in the base offset that each gets, in its header and in
// its bytes. Nobody reads any of them before all are safe. When it fails none
// was appended, and a later append may be tried; only when the remains of the
// failed one could not be removed does the log take no more: see [Log.Broken].
func (l *Log) Append(group []*Batch) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if l.broken != nil {
		return l.broken
	}
	// Nobody else moves these while the writing lock is held.
	s, end := l.segments[len(l.segments)-1], l.end

	l.group = l.group[:0]
	for _, b := range group {
		place(b, end)
		end = b.Header.LastOffset() + 1
		l.group = append(l.group, b.Bytes...)
	}
	if err := l.write(s); err != nil {
		// Whether a failed sync has left something on disk cannot be known, so
		// it is removed like a write that came back half done.
		if cutErr := s.file.Truncate(s.size); cutErr != nil {
			l.broken = fmt.Errorf("segment: log closed to appends: %w", cutErr)
		}
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range group {
		s.add(b.Header)
	}
	l.end = end
	return nil
}

// write writes the group at the end of a segment.
func (l *Log) write(s *segment) error {
	if _, err := s.file.WriteAt(l.group, s.size); err != nil || l.opts.NoSync {
		return err
	}
	return s.file.Sync()
}

// Broken returns why the log takes no more appends, or nil.
func (l *Log) Broken() error {
	l.writing.Lock()
	defer l.writing.Unlock()
	return l.broken
}

// place fills in what a broker decides about a batch, where it lives: its base
// offset, and the epoch of the leader, which is always 0 here. Both lie before
// what the checksum covers, so the batch keeps the one its producer gave it.
func place(b *Batch, baseOffset int64) {
	b.Header.BaseOffset = baseOffset
	binary.BigEndian.PutUint64(b.Bytes[0:], uint64(baseOffset))
	binary.BigEndian.PutUint32(b.Bytes[12:], 0)
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
	f, err := l.opts.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	if err := durable.SyncDir(l.dir); err != nil {
		return errors.Join(err, f.Close(), os.Remove(name)) // or the next try finds it there
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
