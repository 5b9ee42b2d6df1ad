package idempotence

import (
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
	p := t.append(pid)
	t.index.put(t.index.hash(pid), row, t.hashOf)
	t.last, t.lastRow = p, row
	return p, row
}

// append adds a row for a producer, and returns the producer, zero but for the id.
// It is not in the index.
func (t *table) append(pid int64) *producer {
	row := t.rows
	if row%pageRows == 0 {
		t.pages = append(t.pages, t.newPage(row))
	}
	last := t.ownPage(row >> pageShift)
	last.producers = append(last.producers, producer{id: pid})
	t.rows++
	return t.at(row)
}

// reindex puts all rows into the empty index. If two have the same id, it stops and
// returns one of them.
func (t *table) reindex() (twice *producer) {
	ranks, dealt := make([]ranked, t.rows), make([]ranked, t.rows)
	for row := range t.rows {
		ranks[row] = ranked{t.hashOf(row), row}
	}
	// The leading bits of the hash choose the bucket. In their order, the buckets
	// in use stay in the cache.
	deal(dealt, ranks, 0, 56)
	t.index.reserve(int(t.rows))
	for _, r := range dealt {
		if !t.enter(r.key, r.row) {
			return t.at(r.row)
		}
	}
	return nil
}

// enter puts a row into the index. It returns false if there is one with the same id.
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

// rowsAhead is the number of rows that are read ahead of being written.
const rowsAhead = 32

// look reads rows into the cache. Their cache misses overlap.
func (f *frozen) look(ranks []ranked) {
	var seen int64
	for _, r := range ranks {
		p := f.at(r.row)
		seen |= p.id | p.txnFirst // the first and the last cache line
	}
	runtime.KeepAlive(seen) // keeps the compiler from dropping the reads
}
