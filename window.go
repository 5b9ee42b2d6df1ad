package idempotence

// This file is the window: the remembered batches of one producer. It is a plain
// value without a lock and without errors, and it knows neither producer ids nor
// epochs: a new epoch clears it.

// WindowSize is the number of accepted batches remembered of each producer. A retry
// of any of them is recognised. It is five because an idempotent Java client has at
// most five requests in flight to a partition
// (max.in.flight.requests.per.connection, KAFKA-5494). Kafka's ProducerStateEntry
// keeps as many.
const WindowSize = 5

// BatchMetadata is one remembered batch.
type BatchMetadata struct {
	// FirstSequence and LastSequence are the sequences of the first and the last
	// record, each in 0..2147483647. LastSequence is the smaller one if the batch
	// spans the wrap.
	FirstSequence, LastSequence int32
	// BaseOffset is the offset of the first record in the log.
	BaseOffset int64
}

// window holds the newest batches of one epoch of one producer in a ring, and the
// sequence that comes next. The zero window is empty and its next sequence is 0.
//
// A slice that shifts would move four entries for every new one. A ring moves none,
// and unlike a slice it has no pointer for the garbage collector to follow.
//
// Invariants (audited in the tests):
//  1. 0 <= start < WindowSize and 0 <= count <= WindowSize.
//  2. The entries in use are ring[(start+i)%WindowSize] for 0 <= i < count,
//     oldest first; every other entry is zero.
//  3. Base offsets rise strictly from oldest to newest.
//  4. next is one after the newest last sequence, and 0 if count is 0.
//  5. Unless mayRepeat, each first sequence is one after the last sequence before it,
//     and no batch covers more than maxPlainCount sequences.
type window struct {
	next  int32
	start uint8
	count uint8
	// mayRepeat is set once a batch did not follow the one before it, as only a
	// replay may give it, or covered more than maxPlainCount sequences. While it is
	// not set, the window spans less than all sequences, so no remembered batch
	// starts at next, and follows needs no search.
	mayRepeat bool
	// evicted is set once the window has dropped a batch, or may lack one that the
	// log has.
	evicted bool
	ring    [WindowSize]entry
}

// entry is a remembered batch in the ring.
type entry struct {
	span       span
	baseOffset int64
}

// end returns one past the last offset of the batch.
func (e *entry) end() int64 { return e.baseOffset + int64(e.span.count()) }

// maxPlainCount is the most sequences that a batch covers unless mayRepeat is set:
// WindowSize such batches and one more do not reach the modulus.
const maxPlainCount = sequenceMask / (WindowSize + 1)

// follows reports whether a batch that starts at first is the next one and cannot be
// a remembered one.
func (w *window) follows(first int32) bool {
	return first == w.next && !w.mayRepeat
}

// ringSlot returns the slot of the i-th oldest entry of a ring of WindowSize that
// begins at start. It requires i <= WindowSize.
func ringSlot(start, i uint8) uint8 {
	s := uint(start) + uint(i)
	t := s - WindowSize
	if s >= WindowSize {
		s = t
	}
	return uint8(s)
}

func (w *window) slot(i uint8) uint8 { return ringSlot(w.start, i) }

// newest returns the newest batch. It requires count > 0.
func (w *window) newest() *entry {
	return &w.ring[w.slot(w.count-1)]
}

// find returns the remembered batch that covers exactly s, or nil. An overlapping,
// split or merged batch is another one: its records are stored in other batches, and
// no single offset answers for them.
//
// It always compares all five and does not branch on each: the slot that matches a
// retry is unpredictable, and one mispredicted branch costs more than five
// comparisons.
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

// findOldest is find for a window that may hold a range twice, as a log may. It
// returns the first copy. (So does Kafka's ProducerStateEntry.findDuplicateBatch.)
func (w *window) findOldest(s span) *entry {
	for i := range w.count {
		if e := &w.ring[w.slot(i)]; e.span == s {
			return e
		}
	}
	return nil
}

// push adds a batch as the newest, and drops the oldest if the window is full. It
// requires a baseOffset above that of the newest one.
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

// noteRepeat sets mayRepeat if the batch to be pushed next calls for it.
func (w *window) noteRepeat(s span) {
	if s.count() > maxPlainCount || (s.first() != w.next && w.count > 0) {
		w.mayRepeat = true
	}
}

// refill is push for a window that is not full and whose oldest batch is in slot 0, as
// in one just made.
func (w *window) refill(s span, baseOffset int64) {
	w.noteRepeat(s)
	w.ring[w.count] = entry{s, baseOffset}
	w.next = nextSequence(s.last())
	w.count++
}

// pop removes the newest batch. It requires count > 0. The next sequence is then that
// after the batch before, or 0.
func (w *window) pop() {
	*w.newest() = entry{}
	w.count--
	w.next = 0
	if w.count > 0 {
		w.next = nextSequence(w.newest().span.last())
	}
}

// clear removes every batch.
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
