package idempotence

import (
	"math/bits"
	"runtime"
	"slices"
)

// This file is the table: the memory of the producers. It knows where a producer is,
// and not what its fields mean.
//
// Producers are rows in pages of pageRows. Rows are dense: removing one moves the last
// row into its place, so memory follows the number of producers up and down. A page
// has no pointers, so to the garbage collector pageRows producers are one object that
// it does not scan.
//
// Pages make a copy of the table cheap. freeze shares all pages with the copy, and a
// shared page is replaced by a copy before a row in it changes. So an operation copies
// at most the pages that it writes to.

// pageRows is the number of producers in a page. A full page takes 8 KiB, an exact size
// class of the allocator.
const (
	pageShift = 6
	pageRows  = 1 << pageShift
)

// table holds the producers of one manager. A pointer that it returns is valid until
// the next edit, insert, remove or freeze. One from find is for reading only.
//
// Invariants (audited in the tests):
//  1. Rows 0..rows-1 are in use, and no two have the same id.
//  2. Every page but the last is full, and no page is empty.
//  3. The index holds exactly one entry for each row.
type table struct {
	pages []page
	rows  uint32
	// last is the producer found last, in row lastRow; nil if there is none or it
	// may have moved. Check and Commit look for the same producer, and last makes
	// the second look-up a comparison.
	last    *producer
	lastRow uint32
	index   index
	// era counts the freezes. A page of an earlier era is shared with a copy and must
	// not be written to.
	era uint64
}

type page struct {
	producers []producer
	era       uint64
}

func newTable() table {
	return table{index: newIndex()}
}

// at returns the producer in a row.
func (t *table) at(row uint32) *producer {
	return &t.pages[row>>pageShift].producers[row%pageRows]
}

// find returns the producer with an id, or nil if there is none.
func (t *table) find(pid int64) *producer {
	if p := t.last; p != nil && p.id == pid {
		return p
	}
	return t.probe(pid)
}

// probe is find by the index.
func (t *table) probe(pid int64) *producer {
	if t.rows == 0 {
		return nil
	}
	hash := t.index.hash(pid)
	groups := t.index.groupsFor(hash)
	for i := homeOf(groups, hash); ; i = groupAfter(groups, i) {
		g := &groups[i]
		for found := g.matches(tagOf(hash)); found != 0; found &= found - 1 {
			row := g.rows[lowest(found)]
			if p := t.at(row); p.id == pid {
				t.last, t.lastRow = p, row
				return p
			}
		}
		if g.free() != 0 {
			return nil
		}
	}
}

// hashOf returns the hash of the producer in a row.
func (t *table) hashOf(row uint32) uint64 {
	return t.index.hash(t.at(row).id)
}

// lastOwned returns the producer found last and its row, for writing. It returns
// nil if there is none or a copy shares its page.
func (t *table) lastOwned() (*producer, uint32) {
	if t.last == nil || t.pages[t.lastRow>>pageShift].era != t.era {
		return nil, 0
	}
	return t.last, t.lastRow
}

// edit returns the producer with an id and its row, for writing. It requires that
// there is one.
func (t *table) edit(pid int64) (*producer, uint32) {
	t.find(pid)
	if p, _ := t.lastOwned(); p == nil {
		t.last = t.own(t.lastRow)
	}
	return t.last, t.lastRow
}

// own returns the producer in a row, for writing.
func (t *table) own(row uint32) *producer {
	p := t.ownPage(row >> pageShift)
	return &p.producers[row%pageRows]
}

// ownPage returns page i, for writing: it copies the page if it is shared.
func (t *table) ownPage(i uint32) *page {
	p := &t.pages[i]
	if p.era != t.era {
		private := make([]producer, len(p.producers), cap(p.producers))
		copy(private, p.producers)
		p.producers, p.era = private, t.era
		if t.lastRow>>pageShift == i {
			t.last = nil
		}
	}
	return p
}

// insert adds a row for a producer that has none. It returns the producer, zero but
// for the id, and its row.
func (t *table) insert(pid int64) (*producer, uint32) {
	if t.index.seed[1] == 0 {
		t.index = newIndex() // the manager was not created with New; without a seed all ids collide
	}
	row := t.rows
	if row%pageRows == 0 {
		t.pages = append(t.pages, t.newPage(row))
	}
	last := t.ownPage(row >> pageShift)
	last.producers = append(last.producers, producer{id: pid})
	t.index.put(t.index.hash(pid), row, t.hashOf)
	t.rows++
	t.last, t.lastRow = t.at(row), row
	return t.last, row
}

// hashesAhead is how many groups are read ahead of being put into, so that their
// cache misses overlap.
const hashesAhead = 32

// filler fills an empty table with rows, of which the index knows nothing until
// done is called. Nothing may be looked up before.
type filler struct {
	t *table
	// left is how many rows will be added. It may be wrong, and then only takes
	// or lacks a little memory.
	left uint32
	page []producer // what is free of the last page
	slab []producer // and behind that
	// hashes are those of the rows, so many at a time: they are read once more,
	// and the rows, sixteen times as large, are not.
	hashes [][]uint64
}

const (
	// slabPages is how many pages a filler takes at a time, which is twice as
	// fast as each by itself, and still small: as long as one of them is in use,
	// all are.
	slabPages = 4

	hashesAtOnce = 4096
)

// add adds a row for a producer, and returns it zero but for the id.
func (f *filler) add(pid int64) *producer {
	t := f.t
	if len(f.page) == 0 {
		f.page = f.newPage()
		t.pages = append(t.pages, page{producers: f.page})
	}
	if t.rows%hashesAtOnce == 0 {
		f.hashes = append(f.hashes, make([]uint64, 0, min(f.left, hashesAtOnce)))
	}
	chunk := &f.hashes[len(f.hashes)-1]
	*chunk = append(*chunk, t.index.hash(pid))
	p := &f.page[0]
	p.id = pid
	f.page = f.page[1:]
	f.left--
	t.rows++
	return p
}

// newPage returns the memory of a page. The only page of a few producers has no
// more room than one that has grown with them.
func (f *filler) newPage() []producer {
	if f.t.rows == 0 && f.left < pageRows {
		return make([]producer, 1<<bits.Len32(max(f.left, 1)-1))
	}
	if len(f.slab) == 0 {
		pages := min((f.left+pageRows-1)/pageRows, slabPages)
		f.slab = make([]producer, max(pages, 1)*pageRows)
	}
	p := f.slab[:pageRows:pageRows]
	f.slab = f.slab[pageRows:]
	return p
}

// done makes the index. It stops at a producer that is there twice, and returns
// it. It looks at a number of groups before it puts anything into them, since the
// processor then fetches them all at once, and not one after the other.
func (f *filler) done() (twice *producer) {
	t := f.t
	if len(t.pages) > 0 {
		last := &t.pages[len(t.pages)-1].producers
		*last = (*last)[:len(*last)-len(f.page)]
	}
	t.index.reserve(int(t.rows))
	row := uint32(0)
	for _, chunk := range f.hashes {
		for hashes := range slices.Chunk(chunk, hashesAhead) {
			t.index.look(hashes)
			for _, h := range hashes {
				if !t.enter(h, row) {
					return t.at(row)
				}
				row++
			}
		}
	}
	return nil
}

// enter puts a row into the index, unless that has one with the same producer.
func (t *table) enter(hash uint64, row uint32) bool {
	b := t.index.room(hash, t.hashOf)
	for i := b.home(hash); ; i = b.after(i) {
		g := &b.groups[i]
		for found := g.matches(tagOf(hash)); found != 0; found &= found - 1 {
			if other := g.rows[lowest(found)]; other != row && t.at(other).id == t.at(row).id {
				return false
			}
		}
		if free := g.free(); free != 0 {
			g.set(lowest(free), tagOf(hash), row)
			b.used++
			return true
		}
	}
}

// newPage returns an empty page for a row. The first page grows with its rows, since
// a broker has thousands of partitions and most of them know few producers.
func (t *table) newPage(row uint32) page {
	if row == 0 {
		return page{era: t.era}
	}
	return page{producers: make([]producer, 0, pageRows), era: t.era}
}

// remove removes a row and moves the last row into its place.
func (t *table) remove(row uint32) {
	t.last = nil
	last := t.rows - 1
	t.index.remove(t.hashOf(row), row, t.hashOf)
	if row != last {
		t.index.move(t.hashOf(last), last, row)
		*t.own(row) = *t.at(last)
	}
	t.dropLast()
}

// dropLast removes the last row, which the index no longer holds.
func (t *table) dropLast() {
	t.rows--
	end := uint32(len(t.pages) - 1)
	last := t.ownPage(end)
	keep := len(last.producers) - 1
	last.producers[keep] = producer{}
	last.producers = last.producers[:keep]
	if keep == 0 {
		t.pages[end] = page{}
		t.pages = t.pages[:end]
	}
}

// frozen is a copy of the rows of a table at one moment. It never changes, so it needs
// no lock.
type frozen struct {
	pages []page
	rows  uint32
}

// freeze returns a copy of the table. It copies the slice of pages and no row.
func (t *table) freeze() frozen {
	t.era++
	t.last = nil
	return frozen{pages: slices.Clone(t.pages), rows: t.rows}
}

func (f *frozen) at(row uint32) *producer {
	return &f.pages[row>>pageShift].producers[row%pageRows]
}

// byID returns the rows in the order of their producers' ids.
func (f *frozen) byID() []ranked {
	ranks := make([]ranked, f.rows)
	for row := range f.rows {
		ranks[row] = ranked{key: uint64(f.at(row).id), row: row}
	}
	f.sort(ranks)
	return ranks
}

// rowsAhead is how many rows in no order are read at a time.
const rowsAhead = 32

// look reads rows, so that they are in the cache: their cache misses overlap.
func (f *frozen) look(ranks []ranked) {
	var seen int64
	for _, r := range ranks {
		p := f.at(r.row)
		seen |= p.id | p.txnFirst // the first and the last cache line
	}
	runtime.KeepAlive(seen) // or the compiler would not look
}
