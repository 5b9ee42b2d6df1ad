package idempotence

import (
	"cmp"
	"math/bits"
	"slices"
)

// This file puts rows in order: by producer id for a reader, by last activity
// for a snapshot. There may be a million of them, mostly in order already, and
// otherwise with keys that nearly always fit in one word with their rows. So it
// looks first, and then sorts words digit by digit, which takes a fraction of
// the time that comparing does.

// ranked is a row and what it is sorted by: time, then key, and where these
// agree the producer id.
type ranked struct {
	key  uint64
	row  uint32
	time uint32
}

// compareRanks puts one before the other by all of that.
func (f *frozen) compareRanks(a, b ranked) int {
	switch {
	case a.time != b.time:
		return cmp.Compare(a.time, b.time)
	case a.key != b.key:
		return cmp.Compare(a.key, b.key)
	}
	return cmp.Compare(f.at(a.row).id, f.at(b.row).id)
}

// inOrder returns the rows of ranks in order. It requires that they come in the
// order of their rows.
func (f *frozen) inOrder(ranks []ranked) []uint32 {
	rows := make([]uint32, len(ranks))
	if f.areInOrder(ranks) {
		for i := range ranks {
			rows[i] = ranks[i].row
		}
		return rows
	}
	p := packingOf(ranks)
	words := p.pack(ranks)
	sortWords(words, p.row, p.total())
	for i, w := range words {
		rows[i] = uint32(w & (1<<p.row - 1))
	}
	for from := 0; from < len(words); {
		to := from + 1
		for to < len(words) && words[to]>>p.row == words[from]>>p.row {
			to++
		}
		f.settle(rows[from:to], ranks)
		from = to
	}
	return rows
}

func (f *frozen) areInOrder(ranks []ranked) bool {
	for i := 1; i < len(ranks); i++ {
		a, b := &ranks[i-1], &ranks[i]
		if a.time == b.time && a.key < b.key {
			continue
		}
		if f.compareRanks(*a, *b) > 0 {
			return false
		}
	}
	return true
}

// settle sorts rows of which the words do not say the order.
func (f *frozen) settle(rows []uint32, ranks []ranked) {
	if len(rows) == 1 {
		return
	}
	tied := make([]ranked, len(rows))
	for i, row := range rows {
		at, _ := slices.BinarySearchFunc(ranks, row, func(r ranked, row uint32) int { return cmp.Compare(r.row, row) })
		tied[i] = ranks[at]
	}
	slices.SortFunc(tied, f.compareRanks)
	for i, r := range tied {
		rows[i] = r.row
	}
}

// packing is how ranks are put into words: the time on top, the key below it,
// and the row at the bottom, each in no more bits than it needs. Where they need
// more than a word has, the lowest bits of the key are left out.
type packing struct {
	least          ranked // time and key count from here
	time, key, row int    // bits
	dropped        int    // of the key's
}

func packingOf(ranks []ranked) packing {
	least, most := ranks[0], ranks[0]
	for _, r := range ranks {
		least.time, most.time = min(least.time, r.time), max(most.time, r.time)
		least.key, most.key = min(least.key, r.key), max(most.key, r.key)
	}
	p := packing{
		least: least,
		time:  bits.Len32(most.time - least.time),
		key:   bits.Len64(most.key - least.key),
		row:   bits.Len32(ranks[len(ranks)-1].row),
	}
	p.dropped = max(0, p.time+p.key+p.row-64)
	p.key -= p.dropped
	return p
}

func (p *packing) total() int { return p.time + p.key + p.row }

func (p *packing) pack(ranks []ranked) []uint64 {
	words := make([]uint64, len(ranks))
	for i, r := range ranks {
		words[i] = (uint64(r.time-p.least.time)<<p.key|(r.key-p.least.key)>>p.dropped)<<p.row | uint64(r.row)
	}
	return words
}

const digitBits = 8

// sortWords sorts words by their bits low to high-1. Words that agree in them
// stay in the order they are in.
func sortWords(words []uint64, low, high int) {
	from, to := words, make([]uint64, len(words))
	for shift := low; shift < high; shift += digitBits {
		sortDigit(to, from, shift)
		from, to = to, from
	}
	copy(words, from)
}

// sortDigit puts src into dst in the order of the digit at shift.
func sortDigit(dst, src []uint64, shift int) {
	var place [1 << digitBits]uint32
	for _, w := range src {
		place[uint8(w>>shift)]++
	}
	sum := uint32(0)
	for digit, n := range place {
		place[digit] = sum
		sum += n
	}
	for _, w := range src {
		digit := uint8(w >> shift)
		dst[place[digit]] = w
		place[digit]++
	}
}
