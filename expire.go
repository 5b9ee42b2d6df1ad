package idempotence

import (
	"math"
	"time"
)

// This file is forgetting: producers that have been idle for too long, and the
// ones too many. Both take from the same end of one list, in which producers
// stand in the order of their last activity, so that neither ever searches.
//
// Time enters only as the argument of Expire. A producer does not carry the
// time of its activity, since nobody knows it when a batch is committed; it
// carries the number of a mark, and all producers active between two calls of
// Expire share one. The later call gives the mark its time, and so a million
// producers theirs, in one step.

// DefaultExpiration is how long an idle producer is remembered where
// Config.Expiration is 0: 24 hours, as in Kafka (producer.id.expiration.ms).
const DefaultExpiration = 24 * time.Hour

// sweepStep is how many producers Expire looks at before it lets others have
// the lock, and how many a commit looks at to find one to evict.
const sweepStep = 128

// instant is a point in time that fits every timestamp of a Kafka snapshot,
// which a time.Duration since 1970 would not, and has no pointer in it.
type instant struct {
	ms int64 // since 1970
	ns int32 // within the millisecond, in 0..999999
}

const nsPerMilli = int64(time.Millisecond)

// longAgo are the milliseconds of an instant before every one that Expire is
// given, also by a clock of a test that starts in the year 1.
const longAgo = math.MinInt64

// instantOf returns the instant of t, or the first or last one there is: beyond
// them, 292 million years from now, milliseconds would wrap around.
func instantOf(t time.Time) instant {
	switch seconds := t.Unix(); {
	case seconds >= math.MaxInt64/1000:
		return instant{math.MaxInt64, int32(nsPerMilli - 1)}
	case seconds <= math.MinInt64/1000:
		return instant{ms: longAgo}
	}
	return instant{ms: t.UnixMilli(), ns: int32(int64(t.Nanosecond()) % nsPerMilli)}
}

func (i instant) time() time.Time {
	return time.UnixMilli(i.ms).Add(time.Duration(i.ns)).UTC()
}

func (i instant) before(j instant) bool {
	return i.ms < j.ms || i.ms == j.ms && i.ns < j.ns
}

// add returns the instant d later, or the last one there is. It requires
// d >= 0.
func (i instant) add(d time.Duration) instant {
	ns := int64(i.ns) + int64(d)%nsPerMilli
	ms := int64(d)/nsPerMilli + ns/nsPerMilli
	if i.ms > math.MaxInt64-ms {
		return instant{math.MaxInt64, int32(nsPerMilli - 1)}
	}
	return instant{i.ms + ms, int32(ns % nsPerMilli)}
}

// mark is the time that a number of producers were last active: an instant and
// that number, in two words.
type tick struct {
	ms        int64
	ns        int32
	producers uint32
}

func (k *tick) at() instant   { return instant{k.ms, k.ns} }
func (k *tick) set(i instant) { k.ms, k.ns = i.ms, i.ns }

// link is a row in a list, plus one, so that zero is none.
type link uint32

func linkTo(row uint32) link { return link(row + 1) }
func (l link) row() uint32   { return uint32(l) - 1 }

// list is a doubly linked list of rows; the links are in the producers.
type list struct {
	oldest, newest link
}

// activity is who was active when.
//
// Invariants (audited in the tests):
//  1. Every producer is in exactly one of idle and parked.
//  2. idle is in the order of the marks' times, those with the current mark
//     last; where a cap is set, and in the same mark, in the order of commits.
//  3. parked holds only producers that must not be forgotten now: with an open
//     transaction or an append in flight, and all that have parked set. (Not
//     all that are protected: one is parked when its turn to be forgotten has
//     come.)
//  4. marks[i].producers counts the producers with mark i. Those with none,
//     but for the current one, are in free, and only those.
type recency struct {
	idle, pinned list
	ticks        []tick
	free         []uint32
	current      uint32  // the mark of those active since the last Expire
	now          instant // of the last Expire, or that of longAgo
	ahead        bool    // marks may have a later time than now
}

// expiration returns how long to remember an idle producer, and whether there
// is a limit at all.
func (c *Config) expiration() (time.Duration, bool) {
	if c.Expiration == 0 {
		return DefaultExpiration, true
	}
	return c.Expiration, c.Expiration > 0
}

// Expire forgets the producers that have been idle for Config.Expiration or
// longer at now, and returns how many. A producer of which a batch was
// committed, or a batch or marker replayed, since the previous call counts as
// active at this one; a duplicate or a refusal is not activity. So a producer
// is never forgotten early, and at most one interval between two calls late;
// and the same calls on two replicas forget the same producers. A now before
// the previous one counts as the previous one.
//
// A producer with an open transaction or a reservation is never forgotten. A
// forgotten one is unknown: its next batch is judged by Config.UnknownProducer.
// Remember longer than any producer retries, which is delivery.timeout.ms for a
// Java client, or a retry may be stored twice.
//
// Call it on a ticker, every minute or so. It costs nothing for a producer that
// stays, and gives up the lock again and again while it forgets, so that no
// Check waits for more than a few of them. Safe for concurrent use.
//
// (Kafka counts from the timestamp of the producer's last batch, which a client
// may set to anything: ProducerStateManager.removeExpiredProducers.)
func (m *ProducerStateManager) Expire(now time.Time) int {
	m.mu.Lock()
	m.startTick(instantOf(now))
	m.mu.Unlock()
	limit, ok := m.cfg.expiration()
	expired := 0
	for more := ok; more; {
		m.mu.Lock()
		var n int
		n, more = m.sweep(limit)
		m.stats.Expired += uint64(n)
		m.mu.Unlock()
		expired += n
	}
	return expired
}

// tick gives the current mark its time and opens a new one.
func (m *state) startTick(now instant) {
	a := &m.recency
	if a.now.before(now) {
		a.now = now
	}
	m.rotateFailedFirst()
	a.pullBack()
	if len(a.ticks) == 0 || a.ticks[a.current].producers == 0 {
		return
	}
	a.ticks[a.current].set(a.now)
	a.current = a.newTick()
}

// pullBack gives marks of a later time the time of the last Expire. Only a
// restored state has them: Kafka's snapshots carry timestamps that clients set,
// and a producer that is ahead of the clock would keep all behind it from being
// forgotten.
func (a *recency) pullBack() {
	if !a.ahead {
		return
	}
	a.ahead = false
	for i := range a.ticks {
		if k := &a.ticks[i]; a.now.before(k.at()) {
			k.set(a.now)
		}
	}
}

// rotateOwed lets go of failed first batches as old as a forgotten producer.
func (m *state) rotateFailedFirst() {
	if m.inFlight == nil {
		return
	}
	limit, ok := m.cfg.expiration()
	if o := &m.inFlight.failedFirst; ok && !m.recency.now.before(o.since.add(limit)) {
		o.rotate(m.recency.now)
	}
}

// newMark returns an unused mark.
func (a *recency) newTick() uint32 {
	if n := len(a.free); n > 0 {
		i := a.free[n-1]
		a.free = a.free[:n-1]
		return i
	}
	a.ticks = append(a.ticks, tick{})
	return uint32(len(a.ticks) - 1)
}

// carry makes a producer carry a mark.
func (a *recency) carry(p *producer, i uint32) {
	p.tick = i
	a.ticks[i].producers++
}

// drop takes a producer's mark from it.
func (a *recency) drop(p *producer) {
	k := &a.ticks[p.tick]
	if k.producers--; k.producers == 0 && p.tick != a.current {
		*k = tick{}
		a.free = append(a.free, p.tick)
	}
}

// sweep forgets idle producers, at most sweepStep, and reports whether there
// may be more.
func (m *state) sweep(limit time.Duration) (expired int, more bool) {
	a := &m.recency
	for range sweepStep {
		oldest := a.idle.oldest
		if oldest == 0 {
			return expired, false
		}
		p := m.table.at(oldest.row())
		if p.tick == a.current || a.now.before(a.ticks[p.tick].at().add(limit)) {
			return expired, false
		}
		if m.forgetOrPin(oldest.row()) {
			expired++
		}
	}
	return expired, true
}

// evict forgets the least recently committed producers until there is room for
// one more below the cap, or none is left that may be forgotten. Where it meets
// too many that must be kept, it leaves the rest of the way to the next commit of
// a newcomer, so that no commit takes long.
func (m *state) evict() {
	limit := m.cfg.MaxProducers
	for looks := sweepStep; limit > 0 && looks > 0 && int(m.table.rows) >= limit && m.recency.idle.oldest != 0; looks-- {
		if m.forgetOrPin(m.recency.idle.oldest.row()) {
			m.stats.Evicted++
		}
	}
}

// forgetOrPark forgets the producer in a row, or, if it must be kept, moves it
// out of the way of those after it.
func (m *state) forgetOrPin(row uint32) bool {
	if m.table.at(row).busy() {
		m.unlink(row)
		m.pushNewest(&m.recency.pinned, row)
		m.table.own(row).pinned = true
		return false
	}
	m.forget(row)
	m.lastForgetEnd = m.logEndOffset()
	return true
}

// parkOldest moves those that must be kept out of the way of the first that may
// be forgotten.
func (m *state) pinOldest() {
	a := &m.recency
	for a.idle.oldest != 0 && m.table.at(a.idle.oldest.row()).busy() {
		m.forgetOrPin(a.idle.oldest.row())
	}
}

// protected reports whether the producer must not be forgotten now.
func (p *producer) busy() bool {
	return p.txnFirst != noTxn || p.queue != 0
}

// unpark puts a parked producer back among those that may be forgotten, where
// its last activity belongs. That is at the oldest end: it had come to its turn
// when it was parked, and only others that were put back since can be older.
func (m *state) unpin(p *producer, row uint32) {
	m.unlink(row)
	p.pinned = false
	at := m.recency.idle.oldest
	for at != 0 && m.olderThan(m.table.at(at.row()), p) {
		at = m.table.at(at.row()).newer
	}
	m.insertBefore(&m.recency.idle, at, row)
}

// unparkAll puts all parked producers back. The one parked last goes first, so
// that each finds its place at once, but for those before which others were put
// back by themselves.
func (m *state) unpinAll() {
	for newest := &m.recency.pinned.newest; *newest != 0; {
		row := newest.row()
		m.unpin(m.table.own(row), row)
	}
}

// olderThan reports whether p stands before q in the list: by the time of their
// marks, and where a cap makes the order within a mark matter, by what they
// committed.
func (m *state) olderThan(p, q *producer) bool {
	if p.tick == q.tick {
		return m.cfg.MaxProducers > 0 && p.newestOffset() < q.newestOffset()
	}
	return m.recency.earlier(p.tick, q.tick)
}

// earlier reports whether mark i stands for an earlier time than mark j.
func (a *recency) earlier(i, j uint32) bool {
	if i == j || i == a.current || j == a.current {
		return i != j && j == a.current
	}
	return a.ticks[i].at().before(a.ticks[j].at())
}

// forget takes the producer in a row out of everything.
func (m *state) forget(row uint32) {
	m.unlink(row)
	m.recency.drop(m.table.at(row))
	if last := m.table.rows - 1; row != last {
		m.relink(last, row)
	}
	m.table.remove(row)
}

// touch makes a producer the most recently active one. It requires that p is
// row's producer, for writing, and mu held.
func (m *state) touch(p *producer, row uint32) {
	if m.isNewest(p, row) {
		return
	}
	a := &m.recency
	a.drop(p)
	a.carry(p, a.current)
	m.unlink(row)
	m.pushNewest(&a.idle, row)
	p.pinned = false
}

// isNewest reports whether the list need not change for an activity of p. The
// order within a mark matters only to a cap.
func (m *state) isNewest(p *producer, row uint32) bool {
	a := &m.recency
	return p.tick == a.current && !p.pinned && (m.cfg.MaxProducers <= 0 || a.idle.newest == linkTo(row))
}

// enlist adds a new producer to the list.
func (m *state) pushActive(p *producer, row uint32) {
	a := &m.recency
	if len(a.ticks) == 0 {
		a.newTick()
	}
	a.carry(p, a.current)
	m.pushNewest(&a.idle, row)
}

// pushNewest adds a row that is in no list to the newest end of l. Requires mu
// held.
func (m *state) pushNewest(l *list, row uint32) {
	m.insertBefore(l, 0, row)
}

// insertBefore adds a row that is in no list to l, as the older neighbour of
// the row at newer, or at the newest end where that is none.
func (m *state) insertBefore(l *list, newer link, row uint32) {
	older := l.newest
	if newer != 0 {
		older = m.table.at(newer.row()).older
	}
	p := m.table.own(row)
	p.older, p.newer = older, newer
	if older != 0 {
		m.table.own(older.row()).newer = linkTo(row)
	} else {
		l.oldest = linkTo(row)
	}
	if newer != 0 {
		m.table.own(newer.row()).older = linkTo(row)
	} else {
		l.newest = linkTo(row)
	}
}

// unlink takes a row out of its list.
func (m *state) unlink(row uint32) {
	p := m.table.own(row)
	m.setNewer(p.older, linkTo(row), p.newer)
	m.setOlder(p.newer, linkTo(row), p.older)
	p.older, p.newer = 0, 0
}

// setNewer makes to the newer neighbour of the row at l; where l is none, self
// is the oldest of its list, and to becomes that.
func (m *state) setNewer(l, self, to link) {
	switch {
	case l != 0:
		m.table.own(l.row()).newer = to
	case m.recency.idle.oldest == self:
		m.recency.idle.oldest = to
	default:
		m.recency.pinned.oldest = to
	}
}

// setOlder is setNewer the other way round.
func (m *state) setOlder(l, self, to link) {
	switch {
	case l != 0:
		m.table.own(l.row()).older = to
	case m.recency.idle.newest == self:
		m.recency.idle.newest = to
	default:
		m.recency.pinned.newest = to
	}
}

// relink makes the neighbours of a row that is about to move point to its new
// place.
func (m *state) relink(from, to uint32) {
	p := m.table.at(from)
	m.setNewer(p.older, linkTo(from), linkTo(to))
	m.setOlder(p.newer, linkTo(from), linkTo(to))
}
