package idempotence

import (
	"cmp"
	"math"
	"slices"
)

// This file is the aborted transactions of a partition, which a reader of committed
// records must know to leave their records out. It knows nothing of producers or of the
// manager.

// AbortedTransaction is the range of a transaction that was aborted. Every record of
// the producer in it belongs to the transaction.
type AbortedTransaction struct {
	ProducerID  int64 // 0 or above
	FirstOffset int64 // of its first batch on this partition
	LastOffset  int64 // of its abort marker
}

// abortedRanges holds aborted transactions in the order of their markers. A tree of
// minima over their first offsets lets a search skip those that begin too late, even
// if one that stayed open for long is among them.
//
// Invariants (audited in the tests):
//  1. Last offsets rise strictly, and each is above its first offset.
//  2. minima[0][i] is the lowest first offset of ranges[i*fanout:][:fanout], and
//     minima[l][i] is the lowest of minima[l-1][i*fanout:][:fanout].
//  3. The topmost level has one entry, unless there are no ranges.
type abortedRanges struct {
	ranges []AbortedTransaction
	head   int // ranges before it are forgotten
	minima [][]int64
	shared bool // a snapshot shares the memory of ranges
}

const fanout = 8

// len returns how many ranges are kept.
func (a *abortedRanges) len() int { return len(a.ranges) - a.head }

// search returns the first range whose marker lies at or past offset.
func (a *abortedRanges) search(offset int64) int {
	i, _ := slices.BinarySearchFunc(a.ranges[a.head:], offset, func(r AbortedTransaction, offset int64) int {
		return cmp.Compare(r.LastOffset, offset)
	})
	return a.head + i
}

// add adds a range, unless there is one with the same marker.
func (a *abortedRanges) add(r AbortedTransaction) {
	n := len(a.ranges)
	if n == a.head || a.ranges[n-1].LastOffset < r.LastOffset {
		a.ranges = append(a.ranges, r)
		a.lower(n, r.FirstOffset)
		return
	}
	i := a.search(r.LastOffset)
	if a.ranges[i].LastOffset == r.LastOffset {
		return
	}
	a.own()
	a.ranges = slices.Insert(a.ranges, i, r)
	a.reindex(i)
}

// own makes sure that no snapshot shares the memory of ranges.
func (a *abortedRanges) own() {
	if a.shared {
		a.ranges, a.shared = slices.Clone(a.ranges), false
	}
}

// share returns the ranges for a snapshot. Appending does not change them; anything
// that would calls own first.
func (a *abortedRanges) share() []AbortedTransaction {
	a.shared = a.len() > 0
	return slices.Clip(a.ranges[a.head:])
}

// lower enters the first offset of the range that was added last, range i.
func (a *abortedRanges) lower(i int, first int64) {
	for l, at := 0, i/fanout; l < len(a.minima); l, at = l+1, at/fanout {
		if at == len(a.minima[l]) {
			a.reindex(i)
			return
		}
		a.minima[l][at] = min(a.minima[l][at], first)
	}
	if len(a.minima) == 0 {
		a.reindex(i)
	}
}

// reindex computes the minima again, from range i on.
func (a *abortedRanges) reindex(i int) {
	for l := 0; ; l++ {
		if l == len(a.minima) {
			a.minima = append(a.minima, nil)
			i = 0
		}
		i = min(i/fanout, len(a.minima[l]))
		level, n := a.minima[l][:i], a.width(l)
		for from := i * fanout; from < n; from += fanout {
			lowest := int64(math.MaxInt64)
			for j := from; j < min(from+fanout, n); j++ {
				lowest = min(lowest, a.below(l, j))
			}
			level = append(level, lowest)
		}
		a.minima[l] = level
		if len(level) <= 1 {
			a.minima = a.minima[:l+1]
			return
		}
	}
}

// width returns how many entries lie below level l.
func (a *abortedRanges) width(l int) int {
	if l == 0 {
		return len(a.ranges)
	}
	return len(a.minima[l-1])
}

// below returns entry j below level l.
func (a *abortedRanges) below(l, j int) int64 {
	if l == 0 {
		return a.ranges[j].FirstOffset
	}
	return a.minima[l-1][j]
}

// next returns the first range from i on that begins before to, or the number of
// ranges.
func (a *abortedRanges) next(i int, to int64) int {
	for i < len(a.ranges) {
		if skip := a.skip(i, to); skip > 0 {
			i += skip
		} else if a.ranges[i].FirstOffset < to {
			break
		} else {
			i++
		}
	}
	return min(i, len(a.ranges))
}

// skip returns the size of the largest block that begins at range i and in which
// nothing begins before to, or 0.
func (a *abortedRanges) skip(i int, to int64) (skip int) {
	for l, size := 0, fanout; l < len(a.minima) && i%size == 0 && a.minima[l][i/size] >= to; l, size = l+1, size*fanout {
		skip = size
	}
	return skip
}

// between returns the ranges that a reader of [from, to) must know, in the order of
// their markers.
func (a *abortedRanges) between(from, to int64) (found []AbortedTransaction) {
	for i := a.next(a.search(from), to); i < len(a.ranges); i = a.next(i+1, to) {
		found = append(found, a.ranges[i])
	}
	return found
}

// forgetBelow forgets the ranges whose marker lies below logStart.
func (a *abortedRanges) forgetBelow(logStart int64) {
	a.head = a.search(logStart)
	if a.head > 1024 && a.head > len(a.ranges)/2 || a.head == len(a.ranges) {
		*a = abortedRanges{ranges: slices.Clone(a.ranges[a.head:])}
		a.reindex(0)
	}
}

// truncate forgets the ranges whose marker lies at or past to.
func (a *abortedRanges) truncate(to int64) {
	if i := a.search(to); i < len(a.ranges) {
		a.ranges = a.ranges[:i:i] // what a snapshot shares must not be overwritten
		a.reindex(i)
	}
}
