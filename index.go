package idempotence

import (
	"math/bits"
	"math/rand/v2"
)

// This file is the index: which row of the table holds a producer id. It is an
// extendible hash table. A directory of 2^depth entries, addressed by the top
// bits of the hash, points to buckets of at most maxSlots slots; a bucket that
// fills is split in two, and only the directory, a small array of pointers,
// ever doubles.
//
// Why not a built-in map: three measured reasons.
//  1. Memory that follows the number of producers down as well as up. A map
//     never gives back what it grew to, and a mass expiry is the very moment
//     it should.
//  2. Eight bytes a slot instead of sixteen. The id itself is in the row,
//     which is read next in any case.
//  3. No step of it costs more than one bucket, so no Commit pauses for a
//     rehash of a million entries.

const (
	minSlots = 8   // of a bucket that is alone in the index
	maxSlots = 512 // a bucket of 4 KiB is split when it would pass this
)

// slot is one entry of a bucket: the hash in the upper half and the row plus
// one in the lower, so that zero means empty.
type slot uint64

func makeSlot(hash, row uint32) slot { return slot(hash)<<32 | slot(row+1) }
func (s slot) hash() uint32          { return uint32(s >> 32) }
func (s slot) row() uint32           { return uint32(s) - 1 }

// bucket is a small open-addressing table with linear probing.
//
// Invariants (audited in the tests):
//  1. len(slots) is a power of two in minSlots..maxSlots.
//  2. used counts the slots that are not zero and is at most 3/4 of len(slots).
//  3. Walking from hash&(len-1) to where an entry lies meets no empty slot.
//  4. The top depth bits of every hash in the bucket are the same.
type bucket struct {
	slots []slot
	used  uint32
	depth uint8
}

func newBucket(slots int, depth uint8) *bucket {
	return &bucket{slots: make([]slot, slots), depth: depth}
}

func (b *bucket) mask() uint32 { return uint32(len(b.slots) - 1) }
func (b *bucket) full() bool   { return int(b.used)*4 >= len(b.slots)*3 }

// put adds an entry. It requires that the bucket is not full.
func (b *bucket) put(e slot) {
	i := e.hash() & b.mask()
	for b.slots[i] != 0 {
		i = (i + 1) & b.mask()
	}
	b.slots[i] = e
	b.used++
}

// place returns where entry e lies. It requires that e is in the bucket.
func (b *bucket) place(e slot) uint32 {
	i := e.hash() & b.mask()
	for b.slots[i] != e {
		i = (i + 1) & b.mask()
	}
	return i
}

// remove takes entry e out and moves later entries of the same run back, so
// that no tombstone is left to slow the probes that come after.
func (b *bucket) remove(e slot) {
	hole := b.place(e)
	for i := (hole + 1) & b.mask(); b.slots[i] != 0; i = (i + 1) & b.mask() {
		home := b.slots[i].hash() & b.mask()
		if (i-home)&b.mask() >= (i-hole)&b.mask() {
			b.slots[hole] = b.slots[i]
			hole = i
		}
	}
	b.slots[hole] = 0
	b.used--
}

// pour adds every entry of src that keep accepts.
func (b *bucket) pour(src *bucket, keep func(slot) bool) {
	for _, e := range src.slots {
		if e != 0 && keep(e) {
			b.put(e)
		}
	}
}

func all(slot) bool { return true }

// index maps hashes to rows. The zero index is empty but has no seed: make one
// with newIndex.
//
// Invariants (audited in the tests):
//  1. dir is empty, or has 2^depth entries.
//  2. A bucket of depth d stands in exactly 2^(depth-d) neighbouring entries,
//     those whose top d bits are the bucket's.
type index struct {
	dir   []*bucket
	depth uint8
	// seed keeps the hash secret. Producer ids come from clients, and with a
	// known hash somebody could choose ids that all fall into one bucket.
	seed [2]uint64
}

func newIndex() index {
	return index{seed: [2]uint64{rand.Uint64(), rand.Uint64() | 1}}
}

// hash mixes a producer id with the seed: a 64 by 64 bit multiplication, folded.
func (x *index) hash(pid int64) uint32 {
	hi, lo := bits.Mul64(uint64(pid)^x.seed[0], x.seed[1])
	return uint32((hi ^ lo) >> 32)
}

// bucket returns the bucket for a hash. It requires a non-empty directory.
func (x *index) bucket(hash uint32) *bucket {
	return x.dir[hash>>(32-x.depth)]
}

// put adds the entry for a row that is not in the index yet.
func (x *index) put(hash, row uint32) {
	if len(x.dir) == 0 {
		x.dir = []*bucket{newBucket(minSlots, 0)}
	}
	b := x.bucket(hash)
	for b.full() {
		x.grow(b, hash)
		b = x.bucket(hash)
	}
	b.put(makeSlot(hash, row))
}

// move changes the row of an entry.
func (x *index) move(hash, from, to uint32) {
	b := x.bucket(hash)
	b.slots[b.place(makeSlot(hash, from))] = makeSlot(hash, to)
}

// remove takes the entry for a row out, and joins its bucket with its
// neighbour where the two have become small.
func (x *index) remove(hash, row uint32) {
	b := x.bucket(hash)
	b.remove(makeSlot(hash, row))
	x.shrink(b, hash)
}

// grow makes room in the full bucket b, which holds hash: by doubling its
// slots, or by splitting it.
func (x *index) grow(b *bucket, hash uint32) {
	if len(b.slots) < maxSlots {
		bigger := newBucket(2*len(b.slots), b.depth)
		bigger.pour(b, all)
		x.set(bigger, hash)
		return
	}
	if b.depth == x.depth {
		x.double()
	}
	bit := uint32(1) << (31 - b.depth)
	zeros, ones := newBucket(maxSlots, b.depth+1), newBucket(maxSlots, b.depth+1)
	zeros.pour(b, func(e slot) bool { return e.hash()&bit == 0 })
	ones.pour(b, func(e slot) bool { return e.hash()&bit != 0 })
	x.set(zeros, hash&^bit)
	x.set(ones, hash|bit)
}

// shrink joins b with its buddy, the bucket that differs in the last of b's
// bits, when both together would fill an eighth: far below the split mark, so
// that a number of producers that goes to and fro does not split and join at
// every step. A bucket that is alone halves its slots at the same mark.
func (x *index) shrink(b *bucket, hash uint32) {
	if b.depth == 0 {
		x.halveSlots(b, hash)
		return
	}
	bit := uint32(1) << (32 - b.depth)
	buddy := x.bucket(hash ^ bit)
	if buddy.depth != b.depth || b.used+buddy.used > maxSlots/8 {
		return
	}
	joined := newBucket(maxSlots, b.depth-1)
	joined.pour(b, all)
	joined.pour(buddy, all)
	x.set(joined, hash)
	x.halveDirectory()
}

func (x *index) halveSlots(b *bucket, hash uint32) {
	if len(b.slots) == minSlots || int(b.used) > len(b.slots)/8 {
		return
	}
	smaller := newBucket(len(b.slots)/2, b.depth)
	smaller.pour(b, all)
	x.set(smaller, hash)
}

// set makes every directory entry that b's depth covers point to b. The hash
// is any one that belongs in b.
func (x *index) set(b *bucket, hash uint32) {
	span := uint32(1) << (x.depth - b.depth)
	first := hash >> (32 - x.depth) &^ (span - 1)
	for i := first; i < first+span; i++ {
		x.dir[i] = b
	}
}

func (x *index) double() {
	bigger := make([]*bucket, 2*len(x.dir))
	for i, b := range x.dir {
		bigger[2*i], bigger[2*i+1] = b, b
	}
	x.dir = bigger
	x.depth++
}

// halveDirectory drops the last bit of the directory for as long as no bucket
// uses it.
func (x *index) halveDirectory() {
	for x.depth > 0 {
		for i := 0; i < len(x.dir); i += 2 {
			if x.dir[i] != x.dir[i+1] {
				return
			}
		}
		smaller := make([]*bucket, len(x.dir)/2)
		for i := range smaller {
			smaller[i] = x.dir[2*i]
		}
		x.dir = smaller
		x.depth--
	}
}
