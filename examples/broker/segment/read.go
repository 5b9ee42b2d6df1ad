package segment

// This file finds batches by offset and by time.

import (
	"fmt"
	"sort"

	"github.com/idempotence-go/idempotence"
)

// Read returns whole batches, the first of which holds offset, from one
// segment: at most maxBytes of them, but always one if there is any. At the
// end of the log it returns nothing, and no error.
func (l *Log) Read(offset int64, maxBytes int) ([]byte, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if offset < l.segments[0].base || offset > l.end {
		return nil, fmt.Errorf("%w: %d, the log holds %d to %d",
			ErrOffsetOutOfRange, offset, l.segments[0].base, l.end)
	}
	if offset == l.end {
		return nil, nil
	}
	s := l.segments[l.segmentOf(offset)]
	first, at, err := s.holding(offset)
	if err != nil {
		return nil, err
	}
	p := make([]byte, min(int64(max(maxBytes, first.Size)), s.size-at))
	if _, err := s.file.ReadAt(p, at); err != nil {
		return nil, err
	}
	return wholeBatches(p), nil
}

// Pending returns about how many bytes lie at offset and after it, which is
// none exactly when the log ends there. It errs by less than an interval of
// the index and a batch, and on the high side.
func (l *Log) Pending(offset int64) int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if offset < l.segments[0].base || offset >= l.end {
		return 0
	}
	i := l.segmentOf(offset)
	pending := -l.segments[i].seek(offset)
	for _, s := range l.segments[i:] {
		pending += s.size
	}
	return pending
}

// OffsetOfTime returns the base offset and the highest timestamp of the first
// batch that has a record as late as timestamp (milliseconds), or -1 and -1.
// Since records are not looked into, the record meant may lie some way into
// that batch.
func (l *Log) OffsetOfTime(timestamp int64) (offset, found int64, err error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, s := range l.segments {
		if s.size == 0 || s.maxTimestamp < timestamp {
			continue
		}
		h, _, err := s.find(0, func(h idempotence.BatchHeader) bool { return h.MaxTimestamp >= timestamp })
		return h.BaseOffset, h.MaxTimestamp, err
	}
	return -1, -1, nil
}

// segmentOf returns the index of the segment that holds offset, which is not
// below the first one.
func (l *Log) segmentOf(offset int64) int {
	return sort.Search(len(l.segments), func(i int) bool { return l.segments[i].base > offset }) - 1
}

// positionOf returns where in a segment the batch begins that holds offset: its
// beginning for an earlier one, its end if the log ends there.
func (l *Log) positionOf(s *segment, offset int64) (int64, error) {
	switch {
	case offset <= s.base:
		return 0, nil
	case offset >= l.end:
		return s.size, nil
	}
	_, at, err := s.holding(offset)
	return at, err
}

// holding returns the batch that holds offset, which the caller knows to exist.
func (s *segment) holding(offset int64) (idempotence.BatchHeader, int64, error) {
	return s.find(s.seek(offset), func(h idempotence.BatchHeader) bool { return h.LastOffset() >= offset })
}

// seek returns where to begin looking for offset.
func (s *segment) seek(offset int64) int64 {
	i := sort.Search(len(s.index), func(i int) bool { return s.index[i].offset > offset })
	return s.index[i-1].at
}

// find walks from the batch at a position to the first one that is wanted,
// which the caller knows to exist.
func (s *segment) find(at int64, wanted func(idempotence.BatchHeader) bool) (idempotence.BatchHeader, int64, error) {
	for {
		h, err := s.headerAt(at)
		if err != nil || wanted(h) {
			return h, at, err
		}
		at += int64(h.Size)
	}
}

// headerAt reads the header of the batch at a position.
func (s *segment) headerAt(at int64) (idempotence.BatchHeader, error) {
	var p [idempotence.BatchHeaderSize]byte
	if _, err := s.file.ReadAt(p[:], at); err != nil {
		return idempotence.BatchHeader{}, err
	}
	_, h, err := idempotence.ParseBatch(p[:])
	return h, err
}

// wholeBatches returns p without the batch that its end cuts through.
func wholeBatches(p []byte) []byte {
	n := 0
	for {
		_, h, err := idempotence.ParseBatch(p[n:])
		if err != nil || h.Size > len(p)-n {
			return p[:n]
		}
		n += h.Size
	}
}
