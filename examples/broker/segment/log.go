// Package segment keeps the log of one partition on disk the way Apache Kafka
// does: files of record batches (magic 2), one after the other, each file named
// by its first offset. Batches are stored as their producers made them, except
// for the base offset and the leader epoch. The records in them are not read.
//
// The package does no deduplication. It appends what it is given. It uses
// package idempotence to read record batches.
package segment

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/durable"
)

// ErrOffsetOutOfRange is returned by [Log.Read] for an offset below the log's
// start or beyond its end.
var ErrOffsetOutOfRange = errors.New("segment: offset out of range")

// indexInterval is the distance in bytes between two entries of a segment's
// index. A read walks at most that far to find an offset.
const indexInterval = 4096

// A Log is the log of one partition. Its methods may be called concurrently.
// Appends take turns; a caller that needs them in a certain order makes one call
// at a time.
//
// Two mutexes guard it. Append, Roll, Sync and Close lock writing for their
// whole duration, including the disk; mu is locked inside it, only to publish
// the result. Readers lock only mu.
type Log struct {
	dir  string
	opts Options
	cut  *Cut

	writing  sync.Mutex
	broken   error  // why no more appends are possible
	unsynced bool   // the newest segment has changes that may not be on disk
	uncut    bool   // one of them is the removal of a failed append
	group    []byte // buffer for the append in progress

	mu       sync.RWMutex
	segments []*segment // in offset order; the last one is appended to
	end      int64      // the offset of the next record
}

// Options say how a log uses its files. The zero value is a log that syncs every
// append, opened after an unclean stop.
type Options struct {
	// NoSync leaves it to the operating system when an append reaches the disk.
	// What was appended survives the process, but may not survive a power cut.
	// Otherwise every append is synced before it counts.
	NoSync bool

	// Clean says that the log was closed by [Log.Sync] and [Log.Close]. Then
	// damage in the newest segment is an error. Otherwise Open cuts the newest
	// segment at the first bad batch: see [Log.Cut].
	Clean bool

	// ReadOnly opens a log that another process may be appending to. Open
	// creates nothing and changes nothing. What it would cut off is left out.
	ReadOnly bool

	// OpenFile opens or creates a segment; the default is os.OpenFile. Tests
	// replace it with one whose files fail.
	OpenFile func(name string, flag int, perm os.FileMode) (File, error)
}

// A File is the part of *os.File that a log uses.
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
	base, end    int64 // its first offset, and the one behind its last
	size         int64 // in bytes
	maxTimestamp int64
	index        []position
}

// A position is where in its segment the batch at an offset begins.
type position struct{ offset, at int64 }

// A ReplayFunc reads one segment and reports where it stops being good, as
// [idempotence.ProducerStateManager.ReplayLog] does.
type ReplayFunc func(io.Reader) (idempotence.ReplayResult, error)

// Replay passes the log to replay, one segment after the other, from the batch
// that holds the offset from: the end offset of a snapshot, or 0 for the whole
// log. It does not begin earlier, since that would bring back producers that the
// snapshot has forgotten.
func (l *Log) Replay(from int64, replay ReplayFunc) error {
	for _, s := range l.view() {
		at, err := s.positionOf(from)
		if err == nil && at < s.size {
			_, err = replay(io.NewSectionReader(s.file, at, s.size-at))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", s.file.Name(), err)
		}
	}
	return nil
}

// positionOf returns where in the segment the batch begins that holds offset:
// at its beginning if that comes before it, at its end if that comes after it.
func (s *segment) positionOf(offset int64) (int64, error) {
	switch {
	case offset <= s.base:
		return 0, nil
	case offset >= s.end:
		return s.size, nil
	}
	_, at, err := s.holding(offset)
	return at, err
}

// add accounts for a batch written at the segment's end.
func (s *segment) add(h idempotence.BatchHeader) {
	if n := len(s.index); n == 0 || s.size-s.index[n-1].at >= indexInterval {
		s.index = append(s.index, position{h.BaseOffset, s.size})
	}
	s.size += int64(h.Size)
	s.end = h.LastOffset() + 1
	s.maxTimestamp = max(s.maxTimestamp, h.MaxTimestamp)
}

// Start returns the offset of the first record.
func (l *Log) Start() int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.segments[0].base
}

// End returns the log end offset, which the next record will get.
func (l *Log) End() int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.end
}

// ActiveBase returns the base offset of the segment that is appended to.
func (l *Log) ActiveBase() int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.segments[len(l.segments)-1].base
}

// ActiveSize returns the size in bytes of the segment that is appended to.
func (l *Log) ActiveSize() int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.segments[len(l.segments)-1].size
}

// A Batch is a record batch to append, and its header. The caller has verified
// that the bytes are exactly one batch with that header.
type Batch struct {
	Header idempotence.BatchHeader
	Bytes  []byte
}

// Append writes a group of batches at the end of the log with one write and one
// sync. It sets the base offset of each batch, in its header and in its bytes.
// Readers see none of them before all are on disk. If it returns an error, none
// was appended, and a later append may succeed. Only if the remains of a failed
// append cannot be removed, all later ones fail: see [Log.Broken].
func (l *Log) Append(group []*Batch) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if err := l.ready(); err != nil {
		return err
	}
	// Only holders of writing change these.
	s, end := l.segments[len(l.segments)-1], l.end

	l.group = l.group[:0]
	for _, b := range group {
		place(b, end)
		end = b.Header.LastOffset() + 1
		l.group = append(l.group, b.Bytes...)
	}
	if err := l.write(s); err != nil {
		l.cutBack(s)
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

// ready returns nil if the newest segment ends where the log does, on disk too.
// If a failed append were still there, the next one could get mixed up with it
// in a power cut, and then no checksum would tell the two apart.
func (l *Log) ready() error {
	switch {
	case l.broken != nil:
		return l.broken
	case l.uncut:
		return l.sync()
	}
	return nil
}

// write writes the group at the end of a segment.
func (l *Log) write(s *segment) error {
	l.unsynced = true
	if _, err := s.file.WriteAt(l.group, s.size); err != nil || l.opts.NoSync {
		return err
	}
	return l.sync()
}

// cutBack removes what a failed append has written. A failed sync may have
// written anything too.
func (l *Log) cutBack(s *segment) {
	if err := s.file.Truncate(s.size); err != nil {
		l.broken = fmt.Errorf("segment: log closed to appends: %w", err)
		return
	}
	l.uncut = true
	l.sync() // if it fails, the next append tries again
}

func (l *Log) sync() error {
	if err := l.segments[len(l.segments)-1].file.Sync(); err != nil {
		return err
	}
	l.unsynced, l.uncut = false, false
	return nil
}

// Broken returns why the log takes no more appends, or nil.
func (l *Log) Broken() error {
	l.writing.Lock()
	defer l.writing.Unlock()
	return l.broken
}

// place writes the base offset and the leader epoch, which is always 0 here,
// into a batch. Both come before the part that the checksum covers, so the
// producer's checksum stays valid.
func place(b *Batch, baseOffset int64) {
	b.Header.BaseOffset = baseOffset
	idempotence.SetBaseOffset(b.Bytes, baseOffset)
	idempotence.SetPartitionLeaderEpoch(b.Bytes, 0)
}

// Roll syncs the newest segment and begins a new one at the log's end. It does
// nothing while the newest segment is empty.
func (l *Log) Roll() error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if n := len(l.segments); n > 0 {
		if l.segments[n-1].size == 0 {
			return nil
		}
		if err := l.sync(); err != nil {
			return err
		}
	}
	name := filepath.Join(l.dir, fileName(l.end))
	f, err := l.opts.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	if err := durable.SyncDir(l.dir); err != nil {
		return errors.Join(err, f.Close(), os.Remove(name)) // so that it can be tried again
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.segments = append(l.segments, &segment{file: f, base: l.end, end: l.end, maxTimestamp: -1})
	return nil
}

// Sync returns when everything appended so far is on disk.
func (l *Log) Sync() error {
	l.writing.Lock()
	defer l.writing.Unlock()
	if !l.unsynced {
		return nil
	}
	return l.sync()
}

// Close closes the files without syncing them. Later appends fail.
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
