package idempotence

import (
	"cmp"
	"slices"
)

// This file is a queue of offsets that gives the lowest and from which any can be
// removed. It holds the open transactions by their first offsets, and the
// transactional batches in flight by their floors.

// offsetQueue holds values in the order of their keys. Values are not negative.
// Nearly every key is added at the end, and any can be removed. Both take amortised
// constant time, and a binary search to remove any but the first. The zero value is
// empty.
//
// Invariants (audited in the tests):
//  1. From head on, keys never fall.
//  2. entries[head] is not removed, unless head is len(entries).
//  3. live counts the entries from head on that are not removed, and at least
//     about half of them are.
type offsetQueue struct {
	entries []offsetEntry
	head    int
	live    int
	near    int // behind the one removed last, where the next often is
}

type offsetEntry struct {
	key   int64
	value int64 // or removed
}

const removed int64 = -1

// add adds a value.
func (q *offsetQueue) add(key, value int64) {
	e := offsetEntry{key, value}
	if n := len(q.entries); n == q.head || q.entries[n-1].key <= key {
		q.entries = append(q.entries, e)
	} else {
		q.entries = slices.Insert(q.entries, q.search(key), e)
	}
	q.live++
}

// remove removes a value that is in the queue.
func (q *offsetQueue) remove(key, value int64) {
	i := q.near
	if i >= len(q.entries) || q.entries[i] != (offsetEntry{key, value}) {
		i = q.search(key)
		for q.entries[i].value != value {
			i++
		}
	}
	q.near = i + 1
	q.entries[i].value = removed
	q.live--
	for q.head < len(q.entries) && q.entries[q.head].value == removed {
		q.head++
	}
	if dead := len(q.entries) - q.live; dead > q.live+32 {
		live := slices.DeleteFunc(q.entries[q.head:], func(e offsetEntry) bool { return e.value == removed })
		q.entries, q.head = q.entries[:copy(q.entries, live)], 0
	}
}

// search returns the first place of a key, or where it would be added.
func (q *offsetQueue) search(key int64) int {
	if q.head < len(q.entries) && q.entries[q.head].key == key {
		return q.head
	}
	i, _ := slices.BinarySearchFunc(q.entries[q.head:], key, func(e offsetEntry, key int64) int { return cmp.Compare(e.key, key) })
	return q.head + i
}

// first returns the entry with the lowest key, and whether there is one.
func (q *offsetQueue) first() (offsetEntry, bool) {
	if q.live == 0 {
		return offsetEntry{}, false
	}
	return q.entries[q.head], true
}
