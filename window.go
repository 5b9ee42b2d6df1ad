package idempotence

// This file is the window: what is remembered of the batches of one producer.
// It is a plain value with no lock and no errors, and it knows nothing of
// producer ids or epochs: the manager clears it when the epoch changes.

// WindowSize is how many accepted batches of each producer are remembered. A
// retry of any of them is recognised. It is five because a Java client has at
// most five requests in flight to a partition when idempotence is on
// (max.in.flight.requests.per.connection, KAFKA-5494), and Kafka's
// ProducerStateEntry keeps as many.
const WindowSize = 5

// BatchMetadata is one remembered batch.
type BatchMetadata struct {
	// FirstSequence and LastSequence are the sequences of the batch's first
	// and last record, each in 0..2147483647. LastSequence is the smaller of
	// the two where the batch spans the wrap.
	FirstSequence, LastSequence int32
	// BaseOffset is the offset the log gave to the batch's first record.
	BaseOffset int64
}

// window is a ring of the newest batches of one epoch of one producer, and the
// sequence that comes next. The zero window is empty and starts at 0.
//
// Invariants, which interior code may rely on (audited in the tests):
//  1. 0 <= start < WindowSize and 0 <= count <= WindowSize.
//  2. The entries in use are ring[(start+i)%WindowSize] for 0 <= i < count,
//     oldest first; every other entry is zero.
//  3. Base offsets rise strictly from oldest to newest.
//  4. next is one after the newest last sequence, and 0 where count is 0.
//  5. Unless wide, each first sequence is one after the last one before it, and
//     no batch covers more than narrow sequences.
//
// A ring and not a slice that shifts: the entry to overwrite is known without
// moving the other four, and the value has no pointer in it, so a million of
// them are nothing to the garbage collector.
type window struct {
	next  int32
	start uint8
	count uint8
	// wide is set once a batch left a gap behind the one before it (only the
	// log may do that) or covered more than narrow sequences. Without it, the
	// whole window spans less than the sequence space, so nothing remembered
	// starts at next, and a batch that does need not be searched for. It only
	// saves that search; find is right in any case.
	mayRepeat bool
	// rolled is set once the window has dropped a batch, or may lack one that
	// the log has.
	evicted bool
	ring    [WindowSize]entry
}

// entry is a remembered batch as the ring holds it.
type entry struct {
	span       span
	baseOffset int64
}

// end returns one past the last offset of the batch.
func (e *entry) end() int64 { return e.baseOffset + int64(e.span.count()) }

// narrow is the most sequences a batch may cover in a window that is not wide:
// WindowSize of them and one more stay below the modulus.
const maxPlainCount = sequenceMask / (WindowSize + 1)

// follows reports whether a batch that starts at first is the next one and
// certainly not a remembered one.
func (w *window) follows(first int32) bool {
	return first == w.next && !w.mayRepeat
}

// ringSlot maps position i, counted from the oldest, to its place in a ring of
// WindowSize that begins at start. It requires i <= WindowSize.
func ringSlot(start, i uint8) uint8 {
	s := uint(start) + uint(i)
	t := s - WindowSize
	if s >= WindowSize {
		s = t
	}
	return uint8(s)
}

func (w *window) slot(i uint8) uint8 { return ringSlot(w.start, i) }

// newest returns the batch pushed last. It requires count > 0.
func (w *window) newest() *entry {
	return &w.ring[w.slot(w.count-1)]
}

// find returns the remembered batch that covers exactly s, or nil. An overlap,
// a split or a merger is not the same batch: those records are stored in
// another grouping, and no single offset answers for them.
//
// It compares all five whichever matches, without a branch for each: where in
// the ring a retry finds its first copy cannot be predicted, and a wrong guess
// of the processor costs more than the five comparisons.
func (w *window) find(s span) *entry {
	if w.mayRepeat {
		return w.findOldest(s)
	}
	r := &w.ring
	i := WindowSize
	if r[0].span == s {
		i = 0
	}
	if r[1].span == s {
		i = 1
	}
	if r[2].span == s {
		i = 2
	}
	if r[3].span == s {
		i = 3
	}
	if r[4].span == s {
		i = 4
	}
	if i == WindowSize {
		return nil
	}
	return &r[i]
}

// findOldest is find for a window that may hold a range twice, as a log may. A
// retry is answered with the first copy, as Kafka does
// (ProducerStateEntry.findDuplicateBatch).
func (w *window) findOldest(s span) *entry {
	for i := range w.count {
		if e := &w.ring[w.slot(i)]; e.span == s {
			return e
		}
	}
	return nil
}

// push remembers a batch as the newest, in place of the oldest where the window
// is full. It requires baseOffset to be above the newest one's.
func (w *window) push(s span, baseOffset int64) {
	w.noteRepeat(s)
	w.ring[w.slot(w.count)] = entry{s, baseOffset}
	w.next = nextSequence(s.last())
	if w.count < WindowSize {
		w.count++
		return
	}
	w.start = w.slot(1)
	w.evicted = true
}

// widen makes the window wide if a batch that is about to be pushed does so.
func (w *window) noteRepeat(s span) {
	if s.count() > maxPlainCount || (s.first() != w.next && w.count > 0) {
		w.mayRepeat = true
	}
}

// refill is push for a window that was just made and is not full: the oldest
// batch is the first of the ring.
func (w *window) refill(s span, baseOffset int64) {
	w.noteRepeat(s)
	w.ring[w.count] = entry{s, baseOffset}
	w.next = nextSequence(s.last())
	w.count++
}

// pop forgets the newest batch. It requires count > 0. What comes next is then
// what came after the batch before, or 0.
func (w *window) pop() {
	*w.newest() = entry{}
	w.count--
	w.next = 0
	if w.count > 0 {
		w.next = nextSequence(w.newest().span.last())
	}
}

// clear forgets every batch.
func (w *window) clear() {
	*w = window{}
}

// appendTo appends the remembered batches to dst, oldest first.
func (w *window) appendTo(dst []BatchMetadata) []BatchMetadata {
	for i := range w.count {
		e := w.ring[w.slot(i)]
		dst = append(dst, BatchMetadata{e.span.first(), e.span.last(), e.baseOffset})
	}
	return dst
}
