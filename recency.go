package idempotence

import (
	"math"
	"time"
)

// This file is the roster: the producers, and when each was active. Producers are in
// a list in the order of their last activity, so that forgetting takes from one end
// and never searches.
//
// The time of an activity is not known when a batch is committed, since time
// enters only as the argument of Expire. So a producer carries the number of a
// tick, the interval between two calls of Expire, and the later call gives the
// tick its time.

// instant is a point in time. It holds every timestamp of a Kafka snapshot, which
// a time.Duration since 1970 would not, and it has no pointer.
type instant struct {
	ms int64 // since 1970
	ns int32 // within the millisecond, in 0..999999
}

const nsPerMilli = int64(time.Millisecond)

// longAgo is the milliseconds of an instant before every one that Expire is given.
const longAgo = math.MinInt64

// instantOf returns the instant of t. Beyond 292 million years from 1970, where
// milliseconds would wrap around, it returns the first or last instant.
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

// add returns the instant d later, or the last one there is. It requires d >= 0.
func (i instant) add(d time.Duration) instant {
	ns := int64(i.ns) + int64(d)%nsPerMilli
	ms := int64(d)/nsPerMilli + ns/nsPerMilli
	if i.ms > math.MaxInt64-ms {
		return instant{math.MaxInt64, int32(nsPerMilli - 1)}
	}
	return instant{i.ms + ms, int32(ns % nsPerMilli)}
}

// tick is an interval between two calls of Expire: the time of the later call and
// how many producers were last active in it. It spells out the fields of an instant,
// which keeps it in two words.
type tick struct {
	ms        int64
	ns        int32
	producers uint32
}

func (k *tick) at() instant   { return instant{k.ms, k.ns} }
func (k *tick) set(i instant) { k.ms, k.ns = i.ms, i.ns }

// link is a row in a list plus one, so that zero means none.
type link uint32

func linkTo(row uint32) link { return link(row + 1) }
func (l link) row() uint32   { return uint32(l) - 1 }

// list is a doubly linked list of rows. The links are in the producers.
type list struct {
	oldest, newest link
}

// recency orders the producers by their last activity.
//
// Invariants (audited in the tests):
//  1. Every producer is in pinned if its pinned field is set, and in idle
//     otherwise.
//  2. Each list is in the order of the ticks' times, with the current tick last.
//     If a cap is set, it is in the order of activity within a tick too.
//  3. pinned holds every producer with an open transaction. Everything else in
//     it has a batch or a marker in flight.
//  4. ticks[i].producers counts the producers with tick i. The unused ticks other
//     than the current one are zero, and free holds exactly those.
type recency struct {
	idle    list   // may be forgotten, unless something of theirs is in flight
	pinned  list   // must not be forgotten now
	ticks   []tick // by number
	free    []uint32
	now     instant // of the last Expire, or that of longAgo
	current uint32  // the tick since the last Expire
	ahead   bool    // a tick may have a later time than now
	capped  bool    // the order within a tick matters
}

// roster is the producers and the order of their last activity.
type roster struct {
	table   table
	recency recency
}

// clear forgets all activity.
func (r *recency) clear() { *r = recency{now: r.now, capped: r.capped} }

// startTick gives the current tick its time and starts a new one.
func (r *recency) startTick(now instant) {
	if r.now.before(now) {
		r.now = now
	}
	if r.ahead {
		r.ahead = false
		r.pullBack(func(k *tick) bool { return r.now.before(k.at()) })
	}
	if len(r.ticks) == 0 || r.ticks[r.current].producers == 0 {
		return
	}
	r.ticks[r.current].set(r.now)
	r.current = r.newTick()
}

// pullBack sets the ticks for which when is true to the time of the last Expire.
func (r *recency) pullBack(when func(*tick) bool) {
	for i := range r.ticks {
		if k := &r.ticks[i]; k.producers > 0 && uint32(i) != r.current && when(k) {
			k.set(r.now)
		}
	}
}

// setBack sets the clock to an earlier time, at which every producer is active.
func (r *recency) setBack(now instant) {
	r.now = now
	r.pullBack(func(*tick) bool { return true })
}

// newTick returns an unused tick.
func (r *recency) newTick() uint32 {
	if n := len(r.free); n > 0 {
		i := r.free[n-1]
		r.free = r.free[:n-1]
		return i
	}
	r.ticks = append(r.ticks, tick{})
	return uint32(len(r.ticks) - 1)
}

// give puts a producer into the current tick.
func (r *recency) give(p *producer) {
	p.tick = r.current
	r.ticks[r.current].producers++
}

// take takes a producer out of its tick.
func (r *recency) take(p *producer) {
	k := &r.ticks[p.tick]
	if k.producers--; k.producers == 0 && p.tick != r.current {
		*k = tick{}
		r.free = append(r.free, p.tick)
	}
}

// listOf returns the list that a producer is in.
func (r *recency) listOf(p *producer) *list {
	if p.pinned {
		return &r.pinned
	}
	return &r.idle
}

// isFresh reports whether touch would change nothing. The order within a tick
// matters only to a cap.
func (r *roster) isFresh(p *producer, row uint32) bool {
	return p.tick == r.recency.current && (!r.recency.capped || r.recency.listOf(p).newest == linkTo(row))
}

// touch makes the producer in a row, which is p, the most recently active one. It
// requires p for writing.
func (r *roster) touch(p *producer, row uint32) {
	if p.pinned == p.inTransaction() && r.isFresh(p, row) {
		return
	}
	r.recency.take(p)
	r.recency.give(p)
	r.unlink(p, row)
	p.pinned = p.inTransaction()
	r.push(p, row)
}

// pushActive adds a new producer as the most recently active one.
func (r *roster) pushActive(p *producer, row uint32) {
	if len(r.recency.ticks) == 0 {
		r.recency.newTick()
	}
	r.recency.give(p)
	r.push(p, row)
}

// pin moves a producer out of the way of those that may be forgotten. It requires p
// for writing.
func (r *roster) pin(p *producer, row uint32) {
	r.unlink(p, row)
	p.pinned = true
	r.push(p, row)
}

// unpin moves the producers that are no longer busy back, as active now, in the
// order of their last activity.
func (r *roster) unpin() {
	for at := r.recency.pinned.oldest; at != 0; {
		row := at.row()
		at = r.table.at(row).newer
		if !r.table.at(row).busy() {
			r.touch(r.table.own(row), row)
		}
	}
}

// push adds a row that is in no list to the newest end of its own.
func (r *roster) push(p *producer, row uint32) {
	l := r.recency.listOf(p)
	p.older, p.newer = l.newest, 0
	if l.newest != 0 {
		r.table.own(l.newest.row()).newer = linkTo(row)
	} else {
		l.oldest = linkTo(row)
	}
	l.newest = linkTo(row)
}

// unlink takes a row out of its list.
func (r *roster) unlink(p *producer, row uint32) {
	r.relink(p, p.newer, p.older)
	p.older, p.newer = 0, 0
}

// relink makes the older neighbour of p point to newer, and the newer one to older.
// These are the neighbours themselves if p leaves the list, and the new row of p if it
// moves in the table.
func (r *roster) relink(p *producer, newer, older link) {
	l := r.recency.listOf(p)
	if p.older != 0 {
		r.table.own(p.older.row()).newer = newer
	} else {
		l.oldest = newer
	}
	if p.newer != 0 {
		r.table.own(p.newer.row()).older = older
	} else {
		l.newest = older
	}
}

// remove takes the producer in a row out of its list and out of the table, where
// the last row moves into its place.
func (r *roster) remove(row uint32) {
	p := r.table.own(row)
	r.recency.take(p)
	r.unlink(p, row)
	if last := r.table.rows - 1; row != last {
		r.relink(r.table.at(last), linkTo(row), linkTo(row))
	}
	r.table.remove(row)
}
