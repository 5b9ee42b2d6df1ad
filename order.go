package idempotence

import (
	"cmp"
	"slices"
)

// This file puts rows in order: by producer id for a reader, by last activity
// for a snapshot. Both mean a million small keys, which are nearly always in
// order already or nearly all different. So it looks first, and then sorts digit
// by digit, which takes a third of the time of comparing.

// ranked is a row and what it is sorted by: time first, then key.
type ranked struct {
	key  uint64
	row  uint32
	time uint32
}

// sortRanked sorts rows by time and key. Those that agree in both stay in the
// order they are in. The result may be another slice.
func sortRanked(rows []ranked) []ranked {
	if slices.IsSortedFunc(rows, compareRanked) {
		return rows
	}
	spare := make([]ranked, len(rows))
	rows, spare = sortDigits(rows, spare, func(r *ranked) uint64 { return r.key })
	rows, _ = sortDigits(rows, spare, func(r *ranked) uint64 { return uint64(r.time) })
	return rows
}

func compareRanked(a, b ranked) int {
	if a.time != b.time {
		return cmp.Compare(a.time, b.time)
	}
	return cmp.Compare(a.key, b.key)
}

const (
	digitBits = 8
	digits    = 1 << digitBits
)

// sortDigits sorts rows by a key, one digit after the other from the lowest up,
// and passes over the digits in which all keys agree. It returns the sorted rows
// and the slice that is free.
func sortDigits(rows, spare []ranked, key func(*ranked) uint64) (sorted, free []ranked) {
	var differ uint64
	for i := range rows {
		differ |= key(&rows[i]) ^ key(&rows[0])
	}
	for shift := 0; differ>>shift != 0; shift += digitBits {
		if differ>>shift%digits != 0 {
			sortDigit(spare, rows, func(r *ranked) uint64 { return key(r) >> shift % digits })
			rows, spare = spare, rows
		}
	}
	return rows, spare
}

// sortDigit puts src into dst in the order of one digit, and keeps the order
// within it.
func sortDigit(dst, src []ranked, digit func(*ranked) uint64) {
	var place [digits]uint32
	for i := range src {
		place[digit(&src[i])]++
	}
	sum := uint32(0)
	for d, n := range place {
		place[d] = sum
		sum += n
	}
	for i := range src {
		d := digit(&src[i])
		dst[place[d]] = src[i]
		place[d]++
	}
}
