package idempotence

import (
	"cmp"
	"slices"
	"time"
)

// This file is the second model: what is remembered as the log and the clock go
// on, where model_rules_test.go is how a batch is judged. It keeps the whole log and
// the id of each forgotten producer, and so it can say at any time what
// a rebuild would give, which is what Replay, Expire, the cap and Truncate are
// measured by.

// chronicle is a log, and what follows from it.
type chronicle struct {
	cfg    Config
	log    []happening
	end    int64
	maxID  int64
	known  map[int64]*acquaintance
	turn   int // counts activities
	now    time.Time
	ticked bool
	// revived: a forgotten producer came back by a replay of what was known
	// already, with a part only of what the log has.
	revived bool
}

// happening is an entry of the log, or a producer that was forgotten while the log
// ended at an offset.
type happening struct {
	logged
	forgot int64 // a producer id where isForgetting
	at     int64
	isForgetting,
	saysMore bool // more of a producer than its window shows
}

// acquaintance is a producer that is remembered.
type acquaintance struct {
	epoch   int16
	epochs  int // that it has had since it became known
	batches []BatchMetadata
	ends    []int64 // of the batches
	txn     int64
	coord   int32
	turn    int // of the last activity
	fresh   bool
	recency time.Time
}

func newChronicle(cfg Config) *chronicle {
	return &chronicle{cfg: cfg, maxID: NoProducerID, known: map[int64]*acquaintance{}}
}

func (l logged) pid() int64 {
	if l.marker != nil {
		return l.marker.ProducerID
	}
	return l.batch.ProducerID
}

func (l logged) epoch() int16 {
	if l.marker != nil {
		return l.marker.Epoch
	}
	return l.batch.Epoch
}

func (p *acquaintance) newest() int64 {
	if len(p.batches) == 0 {
		return -1
	}
	return p.batches[len(p.batches)-1].BaseOffset
}

// write appends an entry to the log and applies it.
func (c *chronicle) write(l logged) {
	c.end = max(c.end, l.end())
	saysMore := c.apply(l, true)
	c.log = append(c.log, happening{logged: l, saysMore: saysMore})
}

// apply does what an entry of the log does to what is remembered. It returns
// whether the entry says more of its producer than its window shows.
func (c *chronicle) apply(l logged, untold bool) (saysMore bool) {
	if l.pid() == NoProducerID {
		return false
	}
	plain := l.marker == nil && l.batch.BaseSequence >= 0
	p := c.known[l.pid()]
	if p != nil && (l.epoch() < p.epoch || l.base < p.newest() || l.marker == nil && l.base == p.newest()) {
		return c.applyStale(p, l, untold)
	}
	if p == nil {
		c.evict()
		p = &acquaintance{epoch: l.epoch(), epochs: 1, txn: -1, coord: -1}
		c.known[l.pid()] = p
		c.maxID = max(c.maxID, l.pid())
	}
	c.turn++
	p.turn, p.fresh, p.recency = c.turn, true, time.Time{}
	if l.epoch() != p.epoch {
		p.epoch, p.batches, p.ends = l.epoch(), nil, nil
		p.epochs++
	}
	switch {
	case l.marker != nil:
		p.end(l, true)
	case plain:
		first := int64(l.batch.BaseSequence)
		last := (first + int64(l.batch.Count) - 1) % modulus
		p.batches = append(p.batches, BatchMetadata{int32(first), int32(last), l.base})
		p.ends = append(p.ends, l.end())
	}
	if l.marker == nil && l.batch.Transactional && p.txn < 0 {
		p.txn = l.base
	}
	return !plain
}

// applyStale applies an entry that is older than what is remembered of its producer.
// A transaction is opened and ended by the place in the log.
func (c *chronicle) applyStale(p *acquaintance, l logged, untold bool) (saysMore bool) {
	was := p.txn
	if l.marker != nil {
		p.end(l, untold)
	} else if l.batch.Transactional && untold && p.txn < 0 {
		p.txn = l.base
	}
	if p.txn != was {
		c.turn++
		p.turn, p.fresh, p.recency = c.turn, true, time.Time{}
	}
	return l.marker != nil || p.txn != was
}

// end applies a marker to the transaction that began before it.
func (p *acquaintance) end(l logged, untold bool) {
	if l.marker.CoordinatorEpoch >= 0 && p.txn < l.base {
		p.txn = -1
	}
	if untold {
		p.coord = max(p.coord, l.marker.CoordinatorEpoch)
	}
}

// again applies an entry that was applied before.
func (c *chronicle) again(l logged) {
	p := c.known[l.pid()]
	wasForgotten := func(h happening) bool { return h.isForgetting && h.at > l.base }
	if l.pid() != NoProducerID && (p == nil || len(p.batches) == 0) && slices.ContainsFunc(c.log, wasForgotten) {
		c.revived = true
	}
	c.apply(l, false)
}

func (c *chronicle) forget(pid int64) {
	delete(c.known, pid)
	c.log = append(c.log, happening{isForgetting: true, forgot: pid, at: c.end})
}

// evict makes room for one more: it forgets the producer that was active the longest
// time ago.
func (c *chronicle) evict() {
	for c.cfg.MaxProducers > 0 && len(c.known) >= c.cfg.MaxProducers {
		victim := NoProducerID
		for pid, p := range c.known {
			if p.txn < 0 && (victim == NoProducerID || p.turn < c.known[victim].turn) {
				victim = pid
			}
		}
		if victim == NoProducerID {
			return
		}
		c.forget(victim)
	}
}

// startTick passes a time. It goes back only by the idle limit or more, and then
// every producer is active at that time.
func (c *chronicle) startTick(now time.Time) {
	back := c.ticked && c.cfg.Expiration >= 0 && !c.now.Before(now.Add(c.cfg.Expiration))
	if !c.ticked || now.After(c.now) || back {
		c.now, c.ticked = now, true
	}
	for _, p := range c.known {
		p.fresh = p.fresh || back
	}
}

// outlook returns what is known of a producer.
func (c *chronicle) outlook(pid int64) outlook {
	p := c.known[pid]
	if p == nil {
		return outlook{}
	}
	o := outlook{known: true, epoch: p.epoch, open: p.txn >= 0}
	for i, b := range p.batches[max(0, len(p.batches)-5):] {
		count := p.ends[max(0, len(p.batches)-5)+i] - b.BaseOffset
		o.window = append(o.window, modelBatch{p.epoch, int64(b.FirstSequence), count, b.BaseOffset})
	}
	return o
}

// expire forgets the producers that have been idle for too long, and returns how many.
func (c *chronicle) expire(now time.Time) (n int) {
	c.startTick(now)
	for pid, p := range c.known {
		if p.fresh {
			p.fresh, p.recency = false, c.now
		}
		if p.txn < 0 && c.cfg.Expiration >= 0 && !c.now.Before(p.recency.Add(c.cfg.Expiration)) {
			c.forget(pid)
			n++
		}
	}
	return n
}

// kept returns what is left of the happenings where the log is cut to end at
// to.
func (c *chronicle) kept(to int64) []happening {
	var kept []happening
	for _, h := range c.log {
		if h.isForgetting && h.at <= to || !h.isForgetting && h.end() <= to {
			kept = append(kept, h)
		}
	}
	return kept
}

// rebuilt returns what would be remembered if the log had never gone beyond to.
func (c *chronicle) rebuilt(to int64) *chronicle {
	r := newChronicle(Config{})
	r.log, r.end, r.maxID = c.kept(to), min(to, c.end), c.maxID
	for _, h := range r.log {
		if h.isForgetting {
			delete(r.known, h.forgot)
		} else {
			r.apply(h.logged, true)
		}
	}
	return r
}

// exact says, from the rules as the comment on Truncate has them, whether a cut
// can be taken back.
func (c *chronicle) exact(to int64) bool {
	if to == 0 {
		return true
	}
	if c.revived {
		return false
	}
	for _, h := range c.log {
		if h.isForgetting && h.at > to || h.saysMore && h.end() > to {
			return false
		}
	}
	for _, p := range c.known {
		left := 0
		for _, end := range p.ends {
			if end <= to {
				left++
			}
		}
		lost := len(p.ends) - left
		if lost > 0 && (len(p.ends) > 5 || left == 0 && p.epochs > 1) {
			return false
		}
	}
	return true
}

// truncate takes a cut that left nothing unknown. It changes the last activity only
// of the producers whose open transaction was cut off: they are active now, in the
// order in which they were before.
func (c *chronicle) truncate(to int64) {
	r := c.rebuilt(to)
	var released []*acquaintance
	for pid, p := range r.known {
		was := c.known[pid]
		p.turn, p.fresh, p.recency = was.turn, was.fresh, was.recency
		if was.txn >= 0 && p.txn < 0 {
			released = append(released, p)
		}
	}
	slices.SortFunc(released, func(a, b *acquaintance) int { return cmp.Compare(a.turn, b.turn) })
	for _, p := range released {
		c.turn++
		p.turn, p.fresh, p.recency = c.turn, true, time.Time{}
	}
	c.log, c.end, c.known = r.log, r.end, r.known
}

func (c *chronicle) state() observed {
	s := observed{EndOffset: c.end, MaxProducerID: c.maxID}
	for pid, p := range c.known {
		v := ProducerState{ProducerID: pid, Epoch: p.epoch, Window: append([]BatchMetadata{}, p.batches[max(0, len(p.batches)-5):]...)}
		if !p.fresh {
			v.LastActivity = p.recency
		}
		v.CurrentTxnFirstOffset, v.CoordinatorEpoch = max(p.txn, -1), max(p.coord, -1)
		s.Producers = append(s.Producers, v)
	}
	slices.SortFunc(s.Producers, func(a, b ProducerState) int { return cmp.Compare(a.ProducerID, b.ProducerID) })
	return s
}

// entries returns the log without the forgetting.
func (c *chronicle) entries() []logged {
	var entries []logged
	for _, h := range c.log {
		if !h.isForgetting {
			entries = append(entries, h.logged)
		}
	}
	return entries
}

// withoutActivity returns a state without the times.
func withoutActivity(s observed) observed {
	s.Producers = slices.Clone(s.Producers)
	for i := range s.Producers {
		s.Producers[i].LastActivity = time.Time{}
	}
	return s
}
