package segment

// This file opens a log after a clean stop or an unclean one.
//
// Older segments were synced when they were rolled, so damage in one of them is
// an error at any time. The newest segment may end in appends that were not
// synced. A power cut leaves any of their sectors on disk and none of the
// others, so a bad batch may come before a good one. All synced batches come
// before both. So after an unclean stop the segment is cut at its first bad
// batch, which loses nothing that was acknowledged.

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/durable"
)

// ErrMissing is returned by [Open] for a log that lacks a piece in the middle.
var ErrMissing = errors.New("segment: offsets missing from the log")

// A Cut is the part of the newest segment that [Open] has removed. With
// [Options.ReadOnly] it is the part that Open would have removed.
type Cut struct {
	File     string
	Position int64 // in bytes: what is left of the file
	Offset   int64 // the log end offset, behind the last good batch
	Bytes    int64 // removed
	Err      error // what is wrong at Position
}

func (c *Cut) String() string {
	return fmt.Sprintf("%d bytes from byte %d of %s on, offset %d: %v", c.Bytes, c.Position, c.File, c.Offset, c.Err)
}

// Open opens the log in dir. It creates the directory and the first segment if
// there are none. It reads the newest segment through and, after an unclean
// stop, cuts it at the first bad batch. Any other damage that it finds is an
// error. Of older segments it reads only the batch headers; [Log.Replay]
// verifies what it reads.
func Open(dir string, opts Options) (*Log, error) {
	if opts.OpenFile == nil {
		opts.OpenFile = openFile
	}
	if !opts.ReadOnly {
		if err := durable.MkdirAll(dir); err != nil {
			return nil, err
		}
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

// Exists reports whether there is a log in dir.
func Exists(dir string) bool {
	entries, _ := os.ReadDir(dir)
	return slices.ContainsFunc(entries, func(e os.DirEntry) bool {
		return strings.HasSuffix(e.Name(), suffix)
	})
}

// Cut returns what Open has removed, or nil.
func (l *Log) Cut() *Cut { return l.cut }

const suffix = ".log"

func fileName(base int64) string { return fmt.Sprintf("%020d%s", base, suffix) }

// segmentBases returns the base offsets of the segments in dir, in order.
func segmentBases(dir string) ([]int64, error) {
	entries, err := os.ReadDir(dir) // not filepath.Glob: the name of dir is no pattern
	if err != nil {
		return nil, err
	}
	var bases []int64
	for _, e := range entries {
		stem, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok {
			continue
		}
		base, err := strconv.ParseInt(stem, 10, 64)
		if err != nil || fileName(base) != e.Name() {
			return nil, fmt.Errorf("segment: %s is not named after an offset", filepath.Join(dir, e.Name()))
		}
		bases = append(bases, base)
	}
	slices.Sort(bases)
	return bases, nil
}

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
	s := &segment{file: f, base: base, end: base, maxTimestamp: -1}
	l.segments = append(l.segments, s)

	err = l.scan(s, newest)
	if newest && isDamage(err) && !l.opts.Clean {
		err = l.cutAt(s, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	return nil
}

// scan indexes a segment up to its end or its first bad batch. It verifies the
// checksums of the newest segment.
func (l *Log) scan(s *segment, verify bool) error {
	switch {
	case s.base > l.end:
		return missing(l.end, s.base)
	case s.base < l.end:
		return fmt.Errorf("segment: begins at %d, and the one before it ends at %d", s.base, l.end)
	}
	info, err := s.file.Stat()
	if err != nil {
		return err
	}
	if !verify {
		return l.index(s, info.Size())
	}
	good, bad := idempotence.VerifyLog(io.NewSectionReader(s.file, 0, math.MaxInt64))
	if err := l.index(s, good.Bytes); err != nil {
		return err
	}
	return bad
}

// index reads the batch headers in the first size bytes of a segment.
func (l *Log) index(s *segment, size int64) error {
	for s.size < size {
		h, err := s.headerAt(s.size)
		switch {
		case err != nil:
		case s.size+int64(h.Size) > size:
			err = idempotence.ErrTornTail
		case h.BaseOffset < l.end:
			err = fmt.Errorf("%w: base offset %d, want %d", idempotence.ErrCorruptLog, h.BaseOffset, l.end)
		case h.BaseOffset > l.end:
			err = missing(l.end, h.BaseOffset)
		}
		if err != nil {
			return &idempotence.LogError{Position: s.size, Offset: l.end, Err: err}
		}
		s.add(h)
		l.end = h.LastOffset() + 1
	}
	return nil
}

func missing(from, to int64) error {
	return fmt.Errorf("%w: %d to %d", ErrMissing, from, to-1)
}

// isDamage reports whether the error is what a power cut can do to a segment,
// and not, for instance, a failing read.
func isDamage(err error) bool {
	return errors.Is(err, idempotence.ErrTornTail) || errors.Is(err, idempotence.ErrCorruptLog)
}

// cutAt cuts the newest segment behind its last good batch.
func (l *Log) cutAt(s *segment, reason error) error {
	info, err := s.file.Stat()
	if err != nil {
		return err
	}
	l.cut = &Cut{File: s.file.Name(), Position: s.size, Offset: l.end, Bytes: info.Size() - s.size, Err: reason}
	if l.opts.ReadOnly {
		return nil
	}
	return errors.Join(s.file.Truncate(s.size), s.file.Sync())
}
