package idempotence

import (
	"math/bits"
	"math/rand/v2"
)

// This file is the index: it finds the row of a producer id. It is an extendible
// hash table. A directory of 2^depth entries, addressed by the top bits of the hash,
// points to buckets of at most maxGroups groups. A full bucket is split in two. Only
// the directory, a small array of pointers, ever doubles, so no Commit pauses for a
// rehash of everything.
//
// Three measured reasons for it in place of a built-in map (BenchmarkIndexAgainstMap):
//  1. It shrinks. After a mass expiry of 99 in 100 it keeps 3 to 5 % of its memory;
//     a map keeps all of it.
//  2. It takes 7 to 11 bytes a producer, a map 24 to 38: five bytes a slot in place
//     of sixteen, since the row holds the id and is read next anyway.
//  3. A look-up is as fast at 1 million producers, where memory decides, and below
//     that a map takes 1.2 to 1.7 times as long.

const (
	groupSlots = 8
	maxGroups  = 64 // of a bucket, which then takes 2.5 KiB
)

// group holds eight slots. A tag is eight bits of the hash with the lowest one set;
// zero marks a free slot. The tags of a group share one word, so one comparison
// finds the candidates among the eight. This saves more than instructions: a loop
// over the slots ends at one that the processor cannot predict, so it would wait
// for memory at every look-up instead of running ahead.
type group struct {
	tags uint64
	rows [groupSlots]uint32
}

const (
	eachByte = 0x0101010101010101
	topBits  = 0x8080808080808080
)

// matches returns a word with the top bit of each byte set whose tag is tag. It may
// also mark the byte above such a one, so the caller compares the producer id in the
// row.
func (g *group) matches(tag uint8) uint64 {
	return zeroBytes(g.tags ^ eachByte*uint64(tag))
}

// free returns a word whose lowest bit marks the first free slot, or zero if no slot
// is free.
func (g *group) free() uint64 { return zeroBytes(g.tags) }

// zeroBytes marks every zero byte of x. It may also mark a byte 1 above a zero byte,
// so only the lowest mark is certain.
func zeroBytes(x uint64) uint64 { return (x - eachByte) &^ x & topBits }

// lowest returns the slot of the lowest mark.
func lowest(marks uint64) int { return bits.TrailingZeros64(marks) / 8 }

func (g *group) tag(i int) uint8 { return uint8(g.tags >> (8 * i)) }

// set fills slot i, or frees it with tag 0 and row 0.
func (g *group) set(i int, tag uint8, row uint32) {
	g.tags = g.tags&^(0xff<<(8*i)) | uint64(tag)<<(8*i)
	g.rows[i] = row
}

// tagOf returns the tag of a hash. Its bits lie below those that choose the bucket
// and above those that choose the group.
func tagOf(hash uint64) uint8 { return uint8(hash>>36) | 1 }

// bucket is a small open-addressing table of groups. An entry takes the first free
// slot from its home group on.
//
// Invariants (audited in the tests):
//  1. len(groups) is a power of two in 1..maxGroups.
//  2. used counts the slots in use and is at most 7/8 of all.
//  3. Every group from an entry's home to just before its own is full.
//  4. The top depth bits of every hash in the bucket are the same.
//  5. A free slot has row 0.
type bucket struct {
	groups []group
	used   int
	depth  uint8
}

func newBucket(groups int, depth uint8) *bucket {
	return &bucket{groups: make([]group, groups), depth: depth}
}

// homeOf returns the group at which the search for a hash begins.
func homeOf(groups []group, hash uint64) int { return int(hash>>30) & (len(groups) - 1) }

// groupAfter returns the group that the search visits after group i.
func groupAfter(groups []group, i int) int { return (i + 1) & (len(groups) - 1) }

func (b *bucket) home(hash uint64) int { return homeOf(b.groups, hash) }
func (b *bucket) after(i int) int      { return groupAfter(b.groups, i) }

// distance returns the number of groups that the search passes on its way from one
// group to another.
func (b *bucket) distance(from, to int) int { return (to - from) & (len(b.groups) - 1) }

func (b *bucket) full() bool { return b.used >= len(b.groups)*(groupSlots-1) }

// put adds an entry. It requires a bucket that is not full.
func (b *bucket) put(hash uint64, row uint32) {
	i := b.home(hash)
	for b.groups[i].free() == 0 {
		i = b.after(i)
	}
	g := &b.groups[i]
	g.set(lowest(g.free()), tagOf(hash), row)
	b.used++
}

// place returns the group and slot of an entry, which must be there.
func (b *bucket) place(hash uint64, row uint32) (int, int) {
	for i := b.home(hash); ; i = b.after(i) {
		g := &b.groups[i]
		for found := g.matches(tagOf(hash)); found != 0; found &= found - 1 {
			if s := lowest(found); g.rows[s] == row && g.tag(s) != 0 {
				return i, s
			}
		}
	}
}

// remove removes an entry. If its group was full, entries that had to pass it may
// lie further on. One of them fills the free slot, and so on, so that no tombstone
// slows later searches.
func (b *bucket) remove(hash uint64, row uint32, hashOf func(uint32) uint64) {
	i, s := b.place(hash, row)
	b.used--
	for {
		wasFull := b.groups[i].free() == 0
		b.groups[i].set(s, 0, 0)
		if !wasFull {
			return
		}
		j, t, ok := b.passed(i, hashOf)
		if !ok {
			return
		}
		from := &b.groups[j]
		b.groups[i].set(s, from.tag(t), from.rows[t])
		i, s = j, t
	}
}

// passed returns the place of an entry whose search passes group i.
func (b *bucket) passed(i int, hashOf func(uint32) uint64) (group, slot int, ok bool) {
	for j := b.after(i); j != i; j = b.after(j) {
		g := &b.groups[j]
		for s := range groupSlots {
			if g.tag(s) != 0 && b.distance(b.home(hashOf(g.rows[s])), j) >= b.distance(i, j) {
				return j, s, true
			}
		}
		if g.free() != 0 {
			break
		}
	}
	return 0, 0, false
}

// pour adds each entry of src to the bucket that pick returns for its hash.
func (src *bucket) pour(hashOf func(uint32) uint64, pick func(hash uint64) *bucket) {
	for i := range src.groups {
		g := &src.groups[i]
		for s := range groupSlots {
			if g.tag(s) != 0 {
				hash := hashOf(g.rows[s])
				pick(hash).put(hash, g.rows[s])
			}
		}
	}
}

// index maps hashes to rows. The zero index has no seed; create one with newIndex.
// The hashOf argument of its methods returns the hash of a row, which splitting and
// joining buckets needs.
//
// Invariants (audited in the tests):
//  1. dir is empty, or has 2^depth entries.
//  2. Exactly 2^(depth-d) neighbouring entries point to a bucket of depth d: those
//     whose top d bits are the bucket's.
//  3. groups[i] is dir[i].groups.
type index struct {
	dir []*bucket
	// groups[i] is dir[i].groups, which saves look-ups a pointer.
	groups [][]group
	depth  uint8
	// seed keeps the hash secret. Producer ids come from clients: with a known hash
	// a client could choose ids that all fall into one bucket.
	seed [2]uint64
}

func newIndex() index {
	return index{seed: [2]uint64{rand.Uint64(), rand.Uint64() | 1}}
}

// hash mixes a producer id with the seed. Only the upper half of the result is well
// mixed. One multiplication is not enough: ids are often consecutive, and then the
// bits that choose the bucket and those that choose the group depend on each other.
func (x *index) hash(pid int64) uint64 {
	h := (uint64(pid) ^ x.seed[0]) * x.seed[1]
	return (h ^ h>>32) * 0x9e3779b97f4a7c15 // 2^64 / golden ratio
}

// entry returns the directory entry for a hash.
func (x *index) entry(hash uint64) uint64 { return hash >> (64 - x.depth) }

// bucket returns the bucket of a hash. It requires a non-empty directory.
func (x *index) bucket(hash uint64) *bucket { return x.dir[x.entry(hash)] }

// groupsFor returns the groups of that bucket.
func (x *index) groupsFor(hash uint64) []group { return x.groups[x.entry(hash)] }

// reserve makes room for n entries in an empty index, so that putting them splits no
// buckets.
func (x *index) reserve(n int) {
	const fill = maxGroups * groupSlots * 5 / 8 // slots used on average; at most 7/8 can be
	if n == 0 {
		return
	}
	groups := 1
	for groups < maxGroups && groups*groupSlots*5/8 < n {
		groups *= 2
	}
	for n > fill<<x.depth {
		x.depth++
	}
	dir := make([]*bucket, 1<<x.depth)
	for i := range dir {
		dir[i] = newBucket(groups, x.depth)
	}
	x.setDir(dir)
}

// setDir replaces the directory.
func (x *index) setDir(dir []*bucket) {
	x.dir, x.groups = dir, make([][]group, len(dir))
	for i, b := range dir {
		x.groups[i] = b.groups
	}
}

// put adds an entry for a row, which must not have one.
func (x *index) put(hash uint64, row uint32, hashOf func(uint32) uint64) {
	if len(x.dir) == 0 {
		x.setDir([]*bucket{newBucket(1, 0)})
	}
	x.room(hash, hashOf).put(hash, row)
}

// room returns the bucket of a hash and makes sure that it is not full. It requires
// a non-empty directory.
func (x *index) room(hash uint64, hashOf func(uint32) uint64) *bucket {
	for x.bucket(hash).full() {
		x.grow(x.bucket(hash), hash, hashOf)
	}
	return x.bucket(hash)
}

// move changes the row of an entry.
func (x *index) move(hash uint64, from, to uint32) {
	b := x.bucket(hash)
	i, s := b.place(hash, from)
	b.groups[i].rows[s] = to
}

// remove removes the entry of a row, and joins its bucket with its neighbour if both
// have become small.
func (x *index) remove(hash uint64, row uint32, hashOf func(uint32) uint64) {
	b := x.bucket(hash)
	b.remove(hash, row, hashOf)
	x.shrink(b, hash, hashOf)
}

// grow makes room in the full bucket b, to which hash belongs, by doubling its groups
// or by splitting it.
func (x *index) grow(b *bucket, hash uint64, hashOf func(uint32) uint64) {
	if len(b.groups) < maxGroups {
		x.replace(b, newBucket(2*len(b.groups), b.depth), hash, hashOf)
		return
	}
	if b.depth == x.depth {
		x.double()
	}
	bit := uint64(1) << (63 - b.depth)
	zeros, ones := newBucket(maxGroups, b.depth+1), newBucket(maxGroups, b.depth+1)
	b.pour(hashOf, func(h uint64) *bucket {
		if h&bit == 0 {
			return zeros
		}
		return ones
	})
	x.set(zeros, hash&^bit)
	x.set(ones, hash|bit)
}

// shrink joins b with its buddy, the bucket that differs in the last of b's bits, once
// both together fill a quarter of a bucket. That is far below the mark for a split, so
// a number of producers that rises and falls does not split and join at every step.
// The only bucket of an index halves its groups at an eighth.
func (x *index) shrink(b *bucket, hash uint64, hashOf func(uint32) uint64) {
	if b.depth == 0 {
		if len(b.groups) > 1 && b.used <= len(b.groups) {
			x.replace(b, newBucket(len(b.groups)/2, 0), hash, hashOf)
		}
		return
	}
	bit := uint64(1) << (64 - b.depth)
	buddy := x.bucket(hash ^ bit)
	if buddy.depth != b.depth || b.used+buddy.used > maxGroups*groupSlots/4 {
		return
	}
	joined := newBucket(maxGroups, b.depth-1)
	buddy.pour(hashOf, func(uint64) *bucket { return joined })
	x.replace(b, joined, hash, hashOf)
	x.halve()
}

// replace moves the entries of b into other, and puts other in the place of b.
func (x *index) replace(b, other *bucket, hash uint64, hashOf func(uint32) uint64) {
	b.pour(hashOf, func(uint64) *bucket { return other })
	x.set(other, hash)
}

// set points every directory entry of b to b. The hash is any one that belongs to b.
func (x *index) set(b *bucket, hash uint64) {
	span := uint64(1) << (x.depth - b.depth)
	first := x.entry(hash) &^ (span - 1)
	for i := first; i < first+span; i++ {
		x.dir[i], x.groups[i] = b, b.groups
	}
}

// double adds a bit to the directory.
func (x *index) double() {
	bigger := make([]*bucket, 2*len(x.dir))
	for i, b := range x.dir {
		bigger[2*i], bigger[2*i+1] = b, b
	}
	x.setDir(bigger)
	x.depth++
}

// halve drops the last bit of the directory while no bucket uses it.
func (x *index) halve() {
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
		x.setDir(smaller)
		x.depth--
	}
}
