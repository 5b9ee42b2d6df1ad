// Package segment keeps the log of one partition on disk the way Apache Kafka
// does: files of record batches (magic 2) back to back, each file named after
// the offset it begins with. Batches stay as their producers made them but for
// the base offset and the leader epoch; payloads are never looked into.
//
// It knows nothing of deduplication. What it appends, it was told to append.
package segment

import (
	"bufio"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"

	"github.com/idempotence-go/idempotence/examples/broker/durable"
)

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

// Open opens the log in dir, making it if need be, and calls replay with the
// header of each batch it holds, in order. Every checksum is checked. A last
// batch that is incomplete or damaged, which is what a crash leaves, is cut
// off; damage anywhere before it is an error.
func Open(dir string, replay func(Header) error) (*Log, error) {
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

// load opens the segment that begins at base and reads it through.
func (l *Log) load(base int64, last bool, replay func(Header) error) error {
	if len(l.segments) > 0 && base != l.end {
		return fmt.Errorf("%w: segment %s where offset %d was due", ErrCorrupt, fileName(base), l.end)
	}
	f, err := os.OpenFile(filepath.Join(l.dir, fileName(base)), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	s := &segment{file: f, base: base, maxTimestamp: -1}
	l.segments, l.end = append(l.segments, s), base

	info, err := f.Stat()
	if err != nil {
		return err
	}
	in := bufio.NewReaderSize(f, 1<<18)
	for s.size < info.Size() {
		h, err := l.scan(in, info.Size()-s.size)
		torn := errors.As(err, new(tornError))
		if torn && last {
			return cut(f, s.size)
		}
		if err != nil {
			return fmt.Errorf("%s at byte %d, offset %d: %w", f.Name(), s.size, l.end, err)
		}
		if err := replay(h); err != nil {
			return err
		}
		s.add(h)
		l.end = h.NextOffset()
	}
	return nil
}

// A tornError is damage that reaches to the end of the file.
type tornError struct{ error }

func (e tornError) Unwrap() error { return e.error }

// scan reads the next batch, whose payload it only sums up. remaining is how
// many bytes the file still has.
func (l *Log) scan(in *bufio.Reader, remaining int64) (Header, error) {
	if remaining < headerSize {
		return Header{}, tornError{fmt.Errorf("%w: %d bytes left", ErrCorrupt, remaining)}
	}
	p, err := in.Peek(headerSize)
	if err != nil {
		return Header{}, err
	}
	h, err := ParseHeader(p)
	if err != nil {
		return Header{}, err
	}
	if int64(h.Size) > remaining {
		return Header{}, tornError{fmt.Errorf("%w: %d bytes left of %d", ErrCorrupt, remaining, h.Size)}
	}
	if h.BaseOffset != l.end {
		return Header{}, fmt.Errorf("%w: base offset %d where %d was due", ErrCorrupt, h.BaseOffset, l.end)
	}
	sum := crc32.New(castagnoli)
	if _, err := in.Discard(crcEnd); err != nil {
		return Header{}, err
	}
	if _, err := io.CopyN(sum, in, int64(h.Size-crcEnd)); err != nil {
		return Header{}, err
	}
	if sum.Sum32() != h.CRC {
		err := fmt.Errorf("%w: checksum %08x where it says %08x", ErrCorrupt, sum.Sum32(), h.CRC)
		if int64(h.Size) == remaining {
			return Header{}, tornError{err}
		}
		return Header{}, err
	}
	return h, nil
}

// cut shortens the file to size bytes, durably.
func cut(f *os.File, size int64) error {
	if err := f.Truncate(size); err != nil {
		return err
	}
	return f.Sync()
}

// add accounts for a batch that was written at the segment's end.
func (s *segment) add(h Header) {
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
// got, which it also fills into p. The caller has verified p against h. When
// it fails, nothing was appended, and a later append may be tried; only when
// the remains of a failed write could not be removed does the log take no more.
//
// The write is left to the operating system to bring to disk: it outlives the
// process, but not a loss of power. See [Log.Sync].
func (l *Log) Append(p []byte, h Header) (int64, error) {
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
	l.end = h.NextOffset()
	return end, nil
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
