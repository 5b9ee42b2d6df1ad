package idempotence

import (
	"cmp"
	"math/bits"
	"slices"
)

// This file sorts rows: by producer id for a reader, by newest offset for a snapshot. A
// million of them are sorted several times as fast by digits as by comparing.

// ranked is a row and the key it is sorted by.
type ranked struct {
	key uint64
	row uint32
}

// compare orders by key, and by producer id if the keys are equal.
func (f *frozen) compare(a, b ranked) int {
	if a.key != b.key {
		return cmp.Compare(a.key, b.key)
	}
	return cmp.Compare(f.at(a.row).id, f.at(b.row).id)
}

// sort sorts ranks in the order of compare.
func (f *frozen) sort(ranks []ranked) {
	if !slices.IsSortedFunc(ranks, f.compare) {
		f.sortWith(ranks, make([]ranked, len(ranks)))
	}
}

// sortWith is sort with memory for as many ranks.
func (f *frozen) sortWith(ranks, spare []ranked) {
	least, most := ranks[0].key, ranks[0].key
	for _, r := range ranks {
		least, most = min(least, r.key), max(most, r.key)
	}
	if len(ranks) < 256 || least == most {
		slices.SortFunc(ranks, f.compare)
		return
	}
	// Sort by the leading four digits, the lowest one first, and then each group that
	// agrees in them.
	high := bits.Len64(most - least)
	low := max(high-32, 0)
	for shift := low; shift < high; shift += 8 {
		deal(spare, ranks, least, shift)
		ranks, spare = spare, ranks
	}
	if (high-low+7)/8%2 == 1 {
		copy(spare, ranks)
		ranks, spare = spare, ranks
	}
	for len(ranks) > 0 {
		n := 1
		for n < len(ranks) && (ranks[n].key-least)>>low == (ranks[0].key-least)>>low {
			n++
		}
		if n > 1 {
			f.sortWith(ranks[:n], spare[:n])
		}
		ranks = ranks[n:]
	}
}

// deal copies src to dst in the order of the 8 bits at shift of key-least.
func deal(dst, src []ranked, least uint64, shift int) {
	var next [256]uint32 // the place of each digit's next rank
	for _, r := range src {
		next[uint8((r.key-least)>>shift)]++
	}
	sum := uint32(0)
	for digit, n := range next {
		next[digit], sum = sum, sum+n
	}
	for _, r := range src {
		digit := uint8((r.key - least) >> shift)
		dst[next[digit]] = r
		next[digit]++
	}
}
