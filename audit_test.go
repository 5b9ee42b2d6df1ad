package idempotence

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"pgregory.net/rapid"
)

// This file is the structural audit: every invariant that is written beside
// the state, checked from outside. Every randomised test calls it after every
// step, so a broken invariant is met at the step that broke it and not where
// it first shows. The numbers in the messages are those of the comments beside
// the state.
//
// The audit reads rows directly. It must not go through find or freeze, which
// leave a mark (the producer found last, the era): a test that audits after
// each step would otherwise never run the paths that depend on them.

// audits is every check of a whole manager. A new part of the state adds its
// own here.
var audits = []func(*ProducerStateManager) error{
	auditManager,
	auditProducers,
	func(m *ProducerStateManager) error { return auditTable(&m.table) },
	auditRecency,
	auditInFlight,
}

// audit fails the test where the manager breaks an invariant of its own.
func audit(t rapid.TB, m *ProducerStateManager) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, check := range audits {
		if err := check(m); err != nil {
			t.Fatalf("the state is unsound: %v", err)
		}
	}
}

// auditManager holds the fields of the manager against its producers.
func auditManager(m *ProducerStateManager) error {
	if m.endOffset < 0 || m.restoredLogEnd < 0 || m.contiguous != m.cfg.Contiguous {
		return fmt.Errorf("end of the log %+v", m.logEnd)
	}
	end := m.knownEnd()
	if m.lastMarker < noOffset || m.lastMarker >= max(end, 1) || m.lastForgetEnd > end {
		return fmt.Errorf("last marker at %d, forgot at %d, end offset %d", m.lastMarker, m.lastForgetEnd, m.endOffset)
	}
	if m.maxProducerID < NoProducerID {
		return fmt.Errorf("highest producer id is %d", m.maxProducerID)
	}
	for row := range m.table.rows {
		p := m.table.at(row)
		if p.id > m.maxProducerID {
			return fmt.Errorf("producer %d is above the highest producer id %d", p.id, m.maxProducerID)
		}
		if p.txnFirst >= end && p.txnFirst != noTxn {
			return fmt.Errorf("producer %d has a transaction from %d, past end offset %d", p.id, p.txnFirst, m.endOffset)
		}
		if p.window.count == 0 {
			continue
		}
		if e := p.window.newest(); e.end() > end {
			return fmt.Errorf("producer %d remembers %d records from offset %d, past end offset %d",
				p.id, e.span.count(), e.baseOffset, m.endOffset)
		}
	}
	return nil
}

// auditProducers checks each row. That a window holds only batches of the
// current epoch (producer 2) cannot be seen from outside, since a batch does
// not keep its epoch; the model knows it.
func auditProducers(m *ProducerStateManager) error {
	for row := range m.table.rows {
		p := m.table.at(row)
		if p.id < 0 || p.epoch < 0 {
			return fmt.Errorf("producer 1: row %d has id %d, epoch %d", row, p.id, p.epoch)
		}
		if p.txnFirst < noTxn || p.coordinatorEpoch < noCoordinator {
			return fmt.Errorf("producer 3: producer %d has a transaction from %d, coordinator epoch %d",
				p.id, p.txnFirst, p.coordinatorEpoch)
		}
		if err := auditWindow(&p.window); err != nil {
			return fmt.Errorf("producer %d: %w", p.id, err)
		}
	}
	return nil
}

func auditWindow(w *window) error {
	if w.start >= WindowSize || w.count > WindowSize {
		return fmt.Errorf("window 1: start %d, count %d", w.start, w.count)
	}
	for i := w.count; i < WindowSize; i++ {
		if e := w.ring[(w.start+i)%WindowSize]; e != (entry{}) {
			return fmt.Errorf("window 2: unused entry %d from the oldest is %+v", i, e)
		}
	}
	for i := range w.count {
		e := w.ring[(w.start+i)%WindowSize]
		if e.span.first() < 0 || e.span.count() < 1 || e.baseOffset < 0 {
			return fmt.Errorf("window 2: entry %d from the oldest is %+v", i, e)
		}
		if i == 0 {
			continue
		}
		older := w.ring[(w.start+i-1)%WindowSize]
		if e.baseOffset <= older.baseOffset {
			return fmt.Errorf("window 3: offset %d comes after %d", e.baseOffset, older.baseOffset)
		}
		if !w.mayRepeat && e.span.first() != after(older.span) {
			return fmt.Errorf("window 5: sequence %d follows a batch that ends before %d, and mayRepeat is not set",
				e.span.first(), after(older.span))
		}
	}
	return errors.Join(auditNext(w), auditNarrow(w))
}

func auditNext(w *window) error {
	want := int32(0)
	if w.count > 0 {
		want = after(w.newest().span)
	}
	if w.next != want {
		return fmt.Errorf("window 4: next is %d, the newest batch ends before %d", w.next, want)
	}
	return nil
}

func auditNarrow(w *window) error {
	for _, e := range w.ring {
		if !w.mayRepeat && e.span.count() > maxPlainCount {
			return fmt.Errorf("window 5: a batch covers %d sequences, and mayRepeat is not set", e.span.count())
		}
	}
	return nil
}

// after returns the sequence that follows a batch. It shares no arithmetic with
// the code under test.
func after(s span) int32 {
	return int32((int64(s.first()) + int64(s.count())) % (1 << 31))
}

// auditRecency walks both lists. In which order those of one tick have committed
// (recency 2) cannot be seen any more where the log was cut or a marker
// replayed; the chronicle knows it.
func auditRecency(m *ProducerStateManager) error {
	a := &m.recency
	idle, err := auditList(m, "idle", a.idle)
	if err != nil {
		return err
	}
	pinned, err := auditList(m, "pinned", a.pinned)
	if err != nil {
		return err
	}
	if n := len(idle) + len(pinned); n != int(m.table.rows) {
		return fmt.Errorf("recency 1: %d rows in the lists, %d in the table", n, m.table.rows)
	}
	for i := 1; i < len(idle); i++ {
		older, newer := m.table.at(idle[i-1]).tick, m.table.at(idle[i]).tick
		if older == newer || newer == a.current {
			continue
		}
		if older == a.current || a.ticks[newer].at().before(a.ticks[older].at()) {
			return fmt.Errorf("recency 2: tick %d (%+v) stands before tick %d (%+v), and %d is current",
				older, a.ticks[older], newer, a.ticks[newer], a.current)
		}
	}
	for _, row := range idle {
		if p := m.table.at(row); p.pinned || p.inTransaction() {
			return fmt.Errorf("recency 3: row %d is idle, with pinned %t, in transaction %t", row, p.pinned, p.inTransaction())
		}
	}
	for _, row := range pinned {
		if p := m.table.at(row); !p.pinned || !p.busy() {
			return fmt.Errorf("recency 3: row %d is pinned, with pinned %t, busy %t", row, p.pinned, p.busy())
		}
	}
	return auditTicks(m)
}

// auditList returns the rows of a list, oldest first.
func auditList(m *ProducerStateManager, name string, l list) ([]uint32, error) {
	var rows []uint32
	last := link(0)
	for at := l.oldest; at != 0; last, at = at, m.table.at(at.row()).newer {
		if at.row() >= m.table.rows || len(rows) > int(m.table.rows) {
			return nil, fmt.Errorf("recency 1: %s leads to row %d of %d, or in a circle", name, at.row(), m.table.rows)
		}
		if back := m.table.at(at.row()).older; back != last {
			return nil, fmt.Errorf("recency 1: %s comes to row %d from link %d, and the link back is %d", name, at.row(), last, back)
		}
		rows = append(rows, at.row())
	}
	if l.newest != last {
		return nil, fmt.Errorf("recency 1: %s ends at link %d, and its newest is %d", name, last, l.newest)
	}
	return rows, nil
}

func auditTicks(m *ProducerStateManager) error {
	a := &m.recency
	counts := make([]uint32, len(a.ticks))
	for row := range m.table.rows {
		tick := m.table.at(row).tick
		if int(tick) >= len(counts) {
			return fmt.Errorf("recency 4: row %d has tick %d of %d", row, tick, len(counts))
		}
		counts[tick]++
	}
	for i, k := range a.ticks {
		if k.producers != counts[i] {
			return fmt.Errorf("recency 4: tick %d counts %d producers, %d have it", i, k.producers, counts[i])
		}
		free := slices.Contains(a.free, uint32(i))
		if want := k.producers == 0 && uint32(i) != a.current; free != want {
			return fmt.Errorf("recency 4: tick %d of %d producers, in free: %t", i, k.producers, free)
		}
	}
	if once := slices.Compact(slices.Sorted(slices.Values(a.free))); len(once) != len(a.free) {
		return fmt.Errorf("recency 4: a tick is free twice: %v", a.free)
	}
	return nil
}

func auditTable(t *table) error {
	if err := auditPages(t); err != nil {
		return err
	}
	ids := make(map[int64]uint32, t.rows)
	for row := range t.rows {
		id := t.at(row).id
		if twin, ok := ids[id]; ok {
			return fmt.Errorf("table 1: rows %d and %d both have id %d", twin, row, id)
		}
		ids[id] = row
	}
	if t.last != nil && (t.lastRow >= t.rows || t.last != t.at(t.lastRow)) {
		return fmt.Errorf("table: the producer found last is not the one in row %d of %d", t.lastRow, t.rows)
	}
	return auditIndex(&t.index, t)
}

func auditPages(t *table) error {
	if want := (int(t.rows) + pageRows - 1) / pageRows; len(t.pages) != want {
		return fmt.Errorf("table 2: %d rows in %d pages, want %d", t.rows, len(t.pages), want)
	}
	left := int(t.rows)
	for i, p := range t.pages {
		if want := min(left, pageRows); len(p.producers) != want {
			return fmt.Errorf("table 2: page %d of %d holds %d rows, want %d", i, len(t.pages), len(p.producers), want)
		}
		if p.era > t.era {
			return fmt.Errorf("table: page %d is of era %d, and only %d began", i, p.era, t.era)
		}
		left -= len(p.producers)
	}
	return nil
}

// auditIndex walks the whole index, and holds it against the rows it is for.
func auditIndex(x *index, t *table) error {
	if len(x.dir) == 0 {
		if t.rows > 0 {
			return fmt.Errorf("table 3: %d rows, and the index is empty", t.rows)
		}
		return nil
	}
	if len(x.dir) != 1<<x.depth {
		return fmt.Errorf("index 1: %d directory entries at depth %d", len(x.dir), x.depth)
	}
	seen := make([]bool, t.rows)
	for i := 0; i < len(x.dir); {
		b := x.dir[i]
		if b.depth > x.depth {
			return fmt.Errorf("index 2: a bucket of depth %d in a directory of depth %d", b.depth, x.depth)
		}
		run := 1 << (x.depth - b.depth)
		if i%run != 0 {
			return fmt.Errorf("index 2: a bucket of depth %d begins at entry %d", b.depth, i)
		}
		for j := i; j < i+run; j++ {
			if x.dir[j] != b {
				return fmt.Errorf("index 2: entry %d is not the bucket of entry %d, of depth %d", j, i, b.depth)
			}
			if len(x.groups) != len(x.dir) || len(x.groups[j]) != len(b.groups) || &x.groups[j][0] != &b.groups[0] {
				return fmt.Errorf("index 3: entry %d has other groups than its bucket", j)
			}
		}
		if err := auditBucket(x, b, t, uint64(i)>>(x.depth-b.depth), seen); err != nil {
			return fmt.Errorf("bucket of entry %d: %w", i, err)
		}
		i += run
	}
	if row := slices.Index(seen, false); row >= 0 {
		return fmt.Errorf("table 3: row %d is not in the index", row)
	}
	return nil
}

// auditBucket checks a bucket whose hashes must begin with prefix, and ticks
// off the rows that it holds.
func auditBucket(x *index, b *bucket, t *table, prefix uint64, seen []bool) error {
	groups := len(b.groups)
	if groups < 1 || groups > maxGroups || groups&(groups-1) != 0 {
		return fmt.Errorf("bucket 1: %d groups", groups)
	}
	used := 0
	for i := range b.groups {
		g := &b.groups[i]
		for s := range groupSlots {
			if g.tag(s) == 0 {
				if g.rows[s] != 0 {
					return fmt.Errorf("bucket 5: a free slot of group %d has row %d", i, g.rows[s])
				}
				continue
			}
			used++
			if err := auditEntry(x, b, t, prefix, i, s, seen); err != nil {
				return err
			}
		}
	}
	if used != b.used || used > groups*(groupSlots-1) {
		return fmt.Errorf("bucket 2: %d of %d slots in use, %d counted", used, groups*groupSlots, b.used)
	}
	return nil
}

func auditEntry(x *index, b *bucket, t *table, prefix uint64, group, slot int, seen []bool) error {
	row := b.groups[group].rows[slot]
	if row >= t.rows || seen[row] {
		return fmt.Errorf("table 3: row %d of %d is there twice or does not exist", row, t.rows)
	}
	seen[row] = true
	hash := t.hashOf(row)
	if b.groups[group].tag(slot) != tagOf(hash) {
		return fmt.Errorf("table 3: row %d has another row's tag", row)
	}
	if hash>>(64-b.depth) != prefix {
		return fmt.Errorf("bucket 4: row %d belongs in the bucket of prefix %b, not %b", row, hash>>(64-b.depth), prefix)
	}
	for i := b.home(hash); i != group; i = b.after(i) {
		if b.groups[i].free() != 0 {
			return fmt.Errorf("bucket 3: row %d lies in group %d, past group %d which has room", row, group, i)
		}
	}
	return nil
}

// observed is everything that decides how a manager will answer, as plain values
// in producer-id order. Two managers of equal state cannot be told apart but
// by their Stats.
type observed struct {
	Producers     []ProducerState
	InFlight      []queueState
	EndOffset     int64
	MaxProducerID int64
}

// stateOf reads the state of a manager and leaves no mark in it.
func stateOf(m *ProducerStateManager) observed {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := observed{InFlight: queuesOf(m), EndOffset: m.endOffset, MaxProducerID: m.maxProducerID}
	counts := m.inFlight.counts()
	for row := range m.table.rows {
		p := m.table.at(row)
		view := p.view(m.recency.ticks, m.recency.current)
		view.InFlight = counts.of(p)
		s.Producers = append(s.Producers, view)
	}
	slices.SortFunc(s.Producers, func(a, b ProducerState) int { return cmp.Compare(a.ProducerID, b.ProducerID) })
	return s
}

// auditInFlight checks everything about reservations.
func auditInFlight(m *ProducerStateManager) error {
	set := m.inFlight
	if set == nil {
		return auditNoQueues(m)
	}
	return errors.Join(auditTail(m), auditOwners(m), auditQueues(m), auditCounts(set), auditFailedFirst(m))
}

func auditTail(m *ProducerStateManager) error {
	t := m.inFlight.tail
	if t.unknown && (t.from < 0 || t.from > m.knownEnd() || t.txnFrom != noOffset && t.txnFrom < t.from) {
		return fmt.Errorf("tail: unknown from %d, transactional from %d, end offset %d", t.from, t.txnFrom, m.endOffset)
	}
	return nil
}

// auditCounts counts again what the set has counted.
func auditCounts(set *inFlightSet) error {
	open, uncommitted, floors := 0, int64(0), map[int64]int64{}
	for n := range set.queues {
		q := &set.queues[n]
		for i := range q.count {
			f := q.at(i)
			open++
			if !f.committed {
				uncommitted += int64(f.span.count())
			}
			if f.transactional {
				floors[int64(f.ticket)] = f.floor
			}
		}
	}
	if open != set.open || uncommitted != set.uncommitted {
		return fmt.Errorf("inFlightSet 2: %d in flight for %d offsets, counted %d and %d", open, uncommitted, set.open, set.uncommitted)
	}
	return auditOffsets("inFlightSet 3", &set.txnFloors, floors)
}

// auditOffsets holds an offsetQueue against what should be in it.
func auditOffsets(name string, q *offsetQueue, want map[int64]int64) error {
	live := 0
	for i, e := range q.entries {
		if i > 0 && q.entries[i-1].key >= e.key {
			return fmt.Errorf("%s: offsetQueue 1: key %d comes after %d", name, e.key, q.entries[i-1].key)
		}
		if e.value == removed {
			continue
		}
		if i < q.head {
			return fmt.Errorf("%s: offsetQueue 2: entry %d is live, and the head is %d", name, i, q.head)
		}
		live++
		if v, ok := want[e.key]; !ok || v != e.value {
			return fmt.Errorf("%s: has %d at %d, want %d (%t)", name, e.value, e.key, v, ok)
		}
	}
	if q.head < len(q.entries) && q.entries[q.head].value == removed {
		return fmt.Errorf("%s: offsetQueue 2: the head is removed", name)
	}
	if live != q.live || live != len(want) || len(q.entries) > 2*live+33 {
		return fmt.Errorf("%s: offsetQueue 3: %d of %d entries are live, counted %d, want %d", name, live, len(q.entries), q.live, len(want))
	}
	return nil
}

func auditNoQueues(m *ProducerStateManager) error {
	for row := range m.table.rows {
		if p := m.table.at(row); p.queue != 0 {
			return fmt.Errorf("inFlightSet 1: producer %d has queue %d, and nothing was ever reserved", p.id, p.queue-1)
		}
	}
	return nil
}

// auditOwners counts the producers that name a queue. A queue of batches without a
// producer id has none.
func auditOwners(m *ProducerStateManager) error {
	pl := m.inFlight
	owners := make([]int, len(pl.queues))
	claim := func(who string, pid int64, n uint32) error {
		if int(n) >= len(owners) || pl.queues[n].pid != pid || pid == NoProducerID {
			return fmt.Errorf("inFlightSet 1: %s of producer %d names queue %d, which is not its own", who, pid, n)
		}
		owners[n]++
		return nil
	}
	for row := range m.table.rows {
		p := m.table.at(row)
		if p.queue == 0 {
			continue
		}
		if err := claim("the row", p.id, p.queue-1); err != nil {
			return err
		}
	}
	for pid, n := range pl.newcomers {
		if auditRow(m, pid) != nil {
			return fmt.Errorf("inFlightSet 1: producer %d has a row and is a newcomer", pid)
		}
		if err := claim("the newcomer", pid, n); err != nil {
			return err
		}
	}
	for n := range pl.queues {
		free := 0
		for _, f := range pl.free {
			if int(f) == n {
				free++
			}
		}
		used := owners[n]
		if l := &pl.queues[n]; l.pid == NoProducerID && l.count > 0 {
			used++
		}
		if free+used != 1 {
			return fmt.Errorf("inFlightSet 1: queue %d is %d times free and has %d owners", n, free, used)
		}
		if (free == 1) != (pl.queues[n].count == 0) {
			return fmt.Errorf("queue 1: queue %d is %d times free and holds %d batches", n, free, pl.queues[n].count)
		}
	}
	return nil
}

// auditRow returns the row of a producer, or nil, and leaves no mark.
func auditRow(m *ProducerStateManager, pid int64) *producer {
	for row := range m.table.rows {
		if p := m.table.at(row); p.id == pid {
			return p
		}
	}
	return nil
}

func auditQueues(m *ProducerStateManager) error {
	tickets := map[uint64]bool{}
	for n := range m.inFlight.queues {
		l := &m.inFlight.queues[n]
		if l.count > WindowSize || l.start >= WindowSize {
			return fmt.Errorf("queue 1: queue %d begins at %d and holds %d", n, l.start, l.count)
		}
		if l.count == 0 {
			continue
		}
		if err := auditQueue(l, auditRow(m, l.pid)); err != nil {
			return fmt.Errorf("producer %d: %w", l.pid, err)
		}
		for i := range l.count {
			f := l.at(i)
			if tickets[f.ticket] || f.ticket == 0 || f.ticket > m.inFlight.tickets {
				return fmt.Errorf("producer %d: ticket %d is not one of its own", l.pid, f.ticket)
			}
			tickets[f.ticket] = true
			if f.floor < 0 || f.floor > m.endOffset {
				return fmt.Errorf("producer %d: reserved at end offset %d, and it is %d", l.pid, f.floor, m.endOffset)
			}
		}
	}
	return nil
}

func auditQueue(l *queue, p *producer) error {
	if p != nil && l.epoch < p.epoch {
		return fmt.Errorf("queue 2: epoch %d in flight, and %d is remembered", l.epoch, p.epoch)
	}
	if l.marker != nil {
		if l.count != 1 || l.at(0).transactional || l.at(0).committed {
			return fmt.Errorf("queue 5: a marker of %d in flight, the head is %+v", l.count, *l.at(0))
		}
		return nil
	}
	if p != nil && l.epoch == p.epoch && l.at(0).span.first() != p.window.next {
		return fmt.Errorf("queue 2: sequence %d is at the head, and %d is next", l.at(0).span.first(), p.window.next)
	}
	if l.at(0).committed {
		return fmt.Errorf("queue 3: the head is committed")
	}
	end := int64(0)
	for i := range l.count {
		f := l.at(i)
		if i > 0 && f.span.first() != after(l.at(i-1).span) {
			return fmt.Errorf("queue 2: sequence %d follows a batch that ends before %d", f.span.first(), after(l.at(i-1).span))
		}
		if f.committed && f.baseOffset < end {
			return fmt.Errorf("queue 4: batch %d lies at %d, and those before it need %d", i, f.baseOffset, end)
		}
		if f.committed {
			end = f.baseOffset
		}
		end += int64(f.span.count())
	}
	if l.pid != NoProducerID && l.next != after(l.at(l.count-1).span) {
		return fmt.Errorf("queue 2: next is %d, the newest batch ends before %d", l.next, after(l.at(l.count-1).span))
	}
	return nil
}

// auditFailedFirst: only unknown producers have a failed first batch.
func auditFailedFirst(m *ProducerStateManager) error {
	batches := m.inFlight.failedFirst.batches
	for pid := range batches {
		if auditRow(m, pid) != nil {
			return fmt.Errorf("failedFirst: producer %d is known", pid)
		}
	}
	if len(batches) > failedFirstLimit {
		return fmt.Errorf("failedFirst: %d of at most %d", len(batches), failedFirstLimit)
	}
	return nil
}

// queueState is what one producer has in flight, as plain values.
type queueState struct {
	ProducerID int64
	Epoch      int16
	Batches    []batchState
}

// batchState is one batch in flight. BaseOffset is -1 where it is not
// committed.
type batchState struct {
	FirstSequence, LastSequence int32
	BaseOffset                  int64
}

// queuesOf returns what is in flight, in the order of producer ids and, of those
// without one, of reservation.
func queuesOf(m *ProducerStateManager) []queueState {
	if m.inFlight == nil {
		return nil
	}
	var queues []*queue
	for n := range m.inFlight.queues {
		if l := &m.inFlight.queues[n]; l.count > 0 {
			queues = append(queues, l)
		}
	}
	slices.SortFunc(queues, func(a, b *queue) int {
		return cmp.Or(cmp.Compare(a.pid, b.pid), cmp.Compare(a.at(0).ticket, b.at(0).ticket))
	})
	var all []queueState
	for _, l := range queues {
		s := queueState{ProducerID: l.pid, Epoch: l.epoch}
		for i := range l.count {
			f := l.at(i)
			fs := batchState{FirstSequence: f.span.first(), LastSequence: f.span.last(), BaseOffset: noOffset}
			if f.committed {
				fs.BaseOffset = f.baseOffset
			}
			s.Batches = append(s.Batches, fs)
		}
		all = append(all, s)
	}
	return all
}

// words writes down the batches, oldest first.
func (l queueState) words() []string {
	var words []string
	for _, f := range l.Batches {
		w := fmt.Sprintf("%d..%d", f.FirstSequence, f.LastSequence)
		if f.BaseOffset != noOffset {
			w += fmt.Sprintf("@%d", f.BaseOffset)
		}
		words = append(words, w)
	}
	return words
}
