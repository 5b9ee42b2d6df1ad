package idempotence

import "time"

// This file is forgetting: Expire forgets producers that have been idle for too long,
// and Config.MaxProducers evicts those beyond a cap. Both take from the oldest end of
// the list that recency.go keeps.

// DefaultExpiration is how long an idle producer is remembered if
// Config.Expiration is 0: 24 hours, as in Kafka (producer.id.expiration.ms).
const DefaultExpiration = 24 * time.Hour

// sweepStep is how many producers Expire forgets before it releases the lock for a
// moment, and how many a commit looks at to find one to evict.
const sweepStep = 128

// expiration returns how long to remember an idle producer, and whether there is a
// limit.
func (c *Config) expiration() (time.Duration, bool) {
	if c.Expiration == 0 {
		return DefaultExpiration, true
	}
	return c.Expiration, c.Expiration > 0
}

// Expire forgets the producers that have been idle for Config.Expiration or longer
// at now, and returns how many. A producer counts as active at a call if, since the
// call before, a batch or marker of it was committed or replayed or a reservation
// of it ended; a duplicate or a refusal is not activity. So a producer is never
// forgotten early and at most one interval between calls late, and the same calls
// on two replicas forget the same producers.
//
// A now before the previous one counts as the previous one. A now that is earlier
// by Config.Expiration or more shows that the clock was wrong before: Expire goes
// back to it, and every producer counts as active at it. A clock that jumps ahead
// cannot be told from idleness, so call Expire only once the clock is set.
//
// A producer with an open transaction or a reservation is never forgotten. A
// forgotten one is unknown: its next batch is judged by Config.UnknownProducer.
// Remember producers longer than they retry, which is delivery.timeout.ms for a
// Java client, or a retry may be stored twice.
//
// Call it on a ticker, every minute or so. If appends use Check and Commit, hold
// the append lock: a producer must not be forgotten between the two. With Reserve
// no lock is needed. It takes no time for a producer that stays, and releases the
// manager's mutex after every few that it forgets. Safe for concurrent use.
//
// Kafka counts from the timestamp of the producer's last batch, which a client can
// set to anything (ProducerStateManager.removeExpiredProducers).
func (m *ProducerStateManager) Expire(now time.Time) int {
	m.mu.Lock()
	m.startTick(instantOf(now))
	limit, ok := m.cfg.expiration()
	m.mu.Unlock()
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

func (s *state) startTick(now instant) {
	limit, ok := s.cfg.expiration()
	if ok && !s.recency.now.before(now.add(limit)) {
		s.recency.setBack(now)
	}
	s.recency.startTick(now)
	if ok {
		s.inFlight.expireFailedFirst(s.recency.now, limit)
	}
}

// idleFor reports whether the producer at a link was last active limit or longer
// before the last Expire.
func (r *roster) idleFor(at link, limit time.Duration) bool {
	if at == 0 {
		return false
	}
	k := r.table.at(at.row()).tick
	return k != r.recency.current && !r.recency.now.before(r.recency.ticks[k].at().add(limit))
}

// sweep forgets idle producers, at most sweepStep unless all are idle, and reports
// whether there may be more.
func (s *state) sweep(limit time.Duration) (expired int, more bool) {
	if s.recency.pinned.oldest == 0 && s.inFlight.empty() && s.idleFor(s.recency.idle.newest, limit) {
		return s.forgetAll(), false
	}
	for range sweepStep {
		oldest := s.recency.idle.oldest
		if !s.idleFor(oldest, limit) {
			return expired, false
		}
		if s.forgetOrPin(oldest.row()) {
			expired++
		}
	}
	return expired, true
}

// evict forgets the least recently committed producers until there is room for one
// more below the cap, or only busy ones are left. It looks at sweepStep of them at
// most, so that no commit takes long; the next newcomer goes on.
func (s *state) evict() {
	if s.cfg.MaxProducers <= 0 {
		return
	}
	for range sweepStep {
		oldest := s.recency.idle.oldest
		if oldest == 0 || int(s.table.rows) < s.cfg.MaxProducers {
			return
		}
		if s.forgetOrPin(oldest.row()) {
			s.stats.Evicted++
		}
	}
}

// forgetOrPin forgets the producer in a row. A busy one it pins instead, and returns
// false.
func (s *state) forgetOrPin(row uint32) bool {
	if s.table.at(row).busy() {
		s.pin(s.table.own(row), row)
		return false
	}
	s.remove(row)
	s.lastForgetEnd = s.knownEnd()
	return true
}

// forgetAll forgets every producer. It requires that none is busy.
func (s *state) forgetAll() int {
	n := int(s.table.rows)
	s.table = newTable()
	s.recency.clear()
	s.lastForgetEnd = s.knownEnd()
	return n
}
