package segment

// This file finds batches by offset and by timestamp.

import (
	"fmt"
	"sort"

	"github.com/idempotence-go/idempotence"
)

// Read returns whole batches from one segment, the first of which holds offset:
// up to maxBytes of them, but at least one. At the end of the log it returns
// nothing and no error.
func (l *Log) Read(offset int64, maxBytes int) ([]byte, error) {
	s, end, err := l.segmentAt(offset)
	if err != nil || offset == end {
		return nil, err
	}
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

// segmentAt returns the segment that holds an offset of the log, and the end of
// the log. The segment is a copy as of now, so that it can be read while other
// batches are appended.
func (l *Log) segmentAt(offset int64) (s segment, end int64, err error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	start := l.segments[0].base
	if offset < start || offset > l.end {
		return s, l.end, fmt.Errorf("%w: %d, the log has %d to %d", ErrOffsetOutOfRange, offset, start, l.end)
	}
	return *l.segments[l.segmentOf(offset)], l.end, nil
}

// view returns copies of all segments as of now.
func (l *Log) view() (segments []segment) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, s := range l.segments {
		segments = append(segments, *s)
	}
	return segments
}

// Pending returns about how many bytes the log has from offset on: 0 only if it
// ends there, and too many by less than an interval of the index and a batch.
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
// batch with a record as late as timestamp (in milliseconds), or -1 and -1. The
// record may be any one of that batch: records are not read.
func (l *Log) OffsetOfTime(timestamp int64) (offset, found int64, err error) {
	for _, s := range l.view() {
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

// holding returns the batch that holds offset. It must exist.
func (s *segment) holding(offset int64) (idempotence.BatchHeader, int64, error) {
	return s.find(s.seek(offset), func(h idempotence.BatchHeader) bool { return h.LastOffset() >= offset })
}

// seek returns a position at or before the batch that holds offset.
func (s *segment) seek(offset int64) int64 {
	i := sort.Search(len(s.index), func(i int) bool { return s.index[i].offset > offset })
	return s.index[i-1].at
}

// find walks from the batch at a position to the first one that is wanted. It
// must exist.
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

// wholeBatches returns p without an incomplete batch at its end.
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
