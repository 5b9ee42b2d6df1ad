package idempotence

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file is the second model: what is remembered as the log and the clock go
// on, where model_test.go is how a batch is judged. It keeps the whole log and
// the name of everybody who was forgotten, and so it can say at any time what
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
	// revived: somebody who had been forgotten came back by a replay of what
	// was known already, with a part only of what the log has.
	revived bool
}

// happening is an entry of the log, or somebody being forgotten while the log
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

// evict makes room for one more, at the cost of whoever was active the longest
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

// refusal returns why rule T1 refuses a batch that is otherwise the next one.
func (c *chronicle) refusal(b Batch) error {
	p := c.known[b.ProducerID]
	switch {
	case p == nil || p.txn < 0:
		return nil
	case !b.Transactional:
		return ErrInvalidTxnState
	case b.Epoch > p.epoch:
		return ErrConcurrentTransactions
	}
	return nil
}

// expire forgets whoever has been idle for too long, and returns how many.
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

// survivor is a manager and its chronicle, side by side. Like rig, it prints the
// transcript of what led to a failure.
type survivor struct {
	t     rapid.TB
	pick  func(n int) int
	m     *ProducerStateManager
	c     *chronicle
	pids  []int64
	clock time.Time
	// loose: the manager was told of a cut that it could not take back, and went
	// on all the same. What it remembers is not compared until it is rebuilt.
	loose   bool
	history []string
	met     map[string]int
}

func newSurvivor(t rapid.TB, c chooser, cfg Config) *survivor {
	return &survivor{t: t, pick: c.pick, m: New(cfg), c: newChronicle(cfg), pids: []int64{31, 32, 33, 34},
		clock: time.UnixMilli(1000).UTC(), met: map[string]int{}}
}

func (s *survivor) note(format string, args ...any) {
	s.history = append(s.history, fmt.Sprintf(format, args...))
}

func (s *survivor) fail(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf("%+v\n%s\n%s", s.c.cfg, strings.Join(s.history, "\n"), fmt.Sprintf(format, args...))
}

// verify audits the manager, holds it against the chronicle, and sees that
// nothing is remembered which the log does not have.
func (s *survivor) verify() {
	for _, check := range audits {
		if err := check(s.m); err != nil {
			s.fail("the state is unsound: %v", err)
		}
	}
	got := stateOf(s.m)
	if !s.loose {
		if diff := gocmp.Diff(s.c.state(), got); diff != "" {
			s.fail("the state (-chronicle +manager):\n%s", diff)
		}
	}
	inLog := map[BatchMetadata]int64{}
	for _, l := range s.c.entries() {
		if l.marker == nil {
			last := (int64(l.batch.BaseSequence) + int64(l.batch.Count) - 1) % modulus
			inLog[BatchMetadata{l.batch.BaseSequence, int32(last), l.base}] = l.pid()
		}
	}
	for _, p := range got.Producers {
		for _, b := range p.Window {
			if pid, ok := inLog[b]; !ok || pid != p.ProducerID {
				s.fail("producer %d remembers %+v, which is not in the log", p.ProducerID, b)
			}
		}
	}
}

func (s *survivor) pid() int64 { return s.pids[s.pick(len(s.pids))] }

// count returns a count: mostly small, now and then more than a narrow window
// takes.
func (s *survivor) count() int32 {
	if s.pick(12) == 11 {
		return []int32{maxPlainCount, maxPlainCount + 1, math.MaxInt32}[s.pick(3)]
	}
	return int32(1 + s.pick(3))
}

func (s *survivor) base() int64 { return s.c.end + []int64{0, 0, 0, 1, 2}[s.pick(5)] }

// near returns an epoch about the current one.
func (s *survivor) near(pid int64) int16 {
	epoch := int16(0)
	if p := s.c.known[pid]; p != nil {
		epoch = p.epoch
	}
	return max(0, epoch+[]int16{0, 0, 0, 1, 2, -1}[s.pick(6)])
}

// next returns the batch that a producer should send next.
func (s *survivor) next(pid int64) Batch {
	b := Batch{ProducerID: pid, Count: s.count(), Transactional: s.pick(4) == 3}
	if p := s.c.known[pid]; p != nil {
		b.Epoch = p.epoch
		b.Transactional = b.Transactional || p.txn >= 0 && s.pick(8) > 0
		if len(p.batches) > 0 {
			b.BaseSequence = int32((int64(p.batches[len(p.batches)-1].LastSequence) + 1) % modulus)
		}
	}
	return b
}

// commit commits a batch that the rules allow, apart from rule T1. After a full turn
// of the sequence it may all the same be the copy of a remembered one; and a manager
// gone loose may refuse anything.
func (s *survivor) commit(b Batch) {
	l := logged{batch: b, base: s.base()}
	s.note("commit %s txn=%t base=%d", words(b), b.Transactional, l.base)
	want, err := s.c.refusal(b), s.m.CommitBatch(b, l.base)
	if !s.loose && !errors.Is(err, want) && !errors.Is(err, ErrDuplicateSequence) {
		s.fail("refused: %v, want %v", err, want)
	}
	if err == nil {
		s.c.write(l)
	}
}

func (s *survivor) replay(l logged) {
	s.note("replay %s", l.words())
	if err := apply(s.m, l); err != nil {
		s.fail("refused: %v", err)
	}
}

func (l logged) words() string {
	if l.marker != nil {
		return fmt.Sprintf("marker %+v base=%d", *l.marker, l.base)
	}
	return fmt.Sprintf("%s txn=%t base=%d", words(l.batch), l.batch.Transactional, l.base)
}

// take replays the next entry of a leader's log.
func (s *survivor) take(l logged) {
	s.replay(l)
	s.c.write(l)
}

// stray returns a batch of any sequence, as a compacted log has it.
func (s *survivor) stray(pid int64) Batch {
	b := s.next(pid)
	b.Epoch = s.near(pid)
	switch s.pick(3) {
	case 0:
		b.BaseSequence = int32(s.pick(20))
	case 1:
		b.BaseSequence = math.MaxInt32 - int32(s.pick(5))
	}
	return b
}

// deed is something that can happen to a survivor.
type deed struct {
	name string
	do   func(*survivor)
}

var (
	commits = []deed{
		{"commit", func(s *survivor) { s.commit(s.next(s.pid())) }},
		{"commit several", func(s *survivor) {
			pid := s.pid()
			for range 2 + s.pick(6) {
				s.commit(s.next(pid))
			}
		}},
		{"commit in a new epoch", func(s *survivor) {
			b := s.next(s.pid())
			b.Epoch, b.BaseSequence = b.Epoch+int16(s.pick(2)), 0
			if p := s.c.known[b.ProducerID]; p == nil || p.epoch < b.Epoch {
				s.commit(b)
			}
		}},
		{"commit nobody's", func(s *survivor) {
			s.commit(Batch{ProducerID: NoProducerID, Epoch: -1, BaseSequence: -1, Count: s.count()})
		}},
		{"a newcomer", func(s *survivor) {
			s.pids = append(s.pids, int64(100+len(s.pids)))
			s.commit(s.next(s.pids[len(s.pids)-1]))
		}},
	}
	replays = []deed{
		{"replay the next", func(s *survivor) { s.take(logged{batch: s.next(s.pid()), base: s.base()}) }},
		{"replay", func(s *survivor) { s.take(logged{batch: s.stray(s.pid()), base: s.base()}) }},
		{"replay nobody's", func(s *survivor) {
			s.take(logged{batch: Batch{ProducerID: NoProducerID, Count: s.count()}, base: s.base()})
		}},
	}
	markers = []deed{
		{"replay a marker", func(s *survivor) {
			pid := s.pid()
			k := Marker{ProducerID: pid, Epoch: s.near(pid), CoordinatorEpoch: int32(s.pick(5)) - 1, Commit: s.pick(2) == 1}
			s.take(logged{marker: &k, base: s.base()})
		}},
		{"end a transaction", func(s *survivor) {
			for _, pid := range slices.Sorted(maps.Keys(s.c.known)) {
				if p := s.c.known[pid]; p.txn >= 0 && s.pick(2) == 0 {
					s.take(logged{marker: &Marker{ProducerID: pid, Epoch: p.epoch, CoordinatorEpoch: 1}, base: s.base()})
					return
				}
			}
		}},
	}
	coordinators = []deed{{"replay a coordinator's batch", func(s *survivor) {
		pid := s.pid()
		b := Batch{ProducerID: pid, Epoch: s.near(pid), BaseSequence: -1, Count: s.count(), Transactional: s.pick(3) > 0}
		s.take(logged{batch: b, base: s.base()})
	}}}
	overlaps = []deed{{"replay what is known already", func(s *survivor) {
		entries := s.c.entries()
		if len(entries) == 0 {
			return
		}
		for _, l := range entries[s.pick(len(entries)):] {
			s.replay(l)
			s.c.again(l)
		}
	}}}
	clocks = []deed{
		{"expire", func(s *survivor) {
			s.clock = s.clock.Add(time.Duration(s.pick(60)) * time.Millisecond)
			s.expire(s.clock)
		}},
		{"expire, the clock set back", func(s *survivor) {
			s.expire(s.clock.Add(-time.Duration(s.pick(500)) * time.Millisecond))
		}},
	}
	truncations = []deed{
		{"truncate", func(s *survivor) { s.truncate(int64(s.pick(int(min(s.c.end, 1<<30)) + 2))) }},
		{"truncate a little", func(s *survivor) { s.truncate(max(-1, s.c.end-int64(s.pick(8)))) }},
		{"reset", func(s *survivor) {
			if s.pick(8) > 0 {
				return
			}
			s.note("reset")
			s.m.Reset()
			maxID := s.c.maxID
			s.c.log, s.c.end, s.c.known, s.c.maxID, s.c.revived = nil, 0, map[int64]*acquaintance{}, maxID, false
			s.loose = false
		}},
		{"rebuild", func(s *survivor) {
			if s.loose {
				s.rebuild()
			}
		}},
	}
)

func (s *survivor) expire(now time.Time) {
	s.note("expire now=%d", now.UnixMilli())
	got := s.m.Expire(now)
	if s.loose {
		s.c.startTick(now)
		return
	}
	if want := s.c.expire(now); got != want {
		s.fail("forgot %d, want %d", got, want)
	}
	s.met["expired"] += got
}

// truncate cuts the log. Where the manager says that it is exact, it must be;
// where it is not, the broker rebuilds, or goes on and leaves it at being safe.
func (s *survivor) truncate(to int64) {
	s.note("truncate to=%d", to)
	exact := s.m.Truncate(to)
	to = max(to, 0)
	want := s.c.rebuilt(to)
	if to == 0 {
		s.c.revived, s.loose = false, false // nothing is left to be wrong about
	}
	switch {
	case exact:
		s.met["exact"]++
		if diff := gocmp.Diff(withoutActivity(want.state()), withoutActivity(stateOf(s.m))); diff != "" {
			s.fail("exact, and yet (-rebuild +manager):\n%s", diff)
		}
	case !s.loose && s.c.exact(to):
		s.fail("it could have been exact")
	}
	if to >= s.c.end {
		return
	}
	s.met["cut"]++
	if exact {
		s.met["exact cut"]++
		s.c.truncate(to)
		return
	}
	s.c.log, s.c.end, s.c.known, s.loose = want.log, want.end, want.known, true
	if s.pick(2) == 0 {
		s.rebuild()
	}
}

// rebuild loses the memory and replays the log.
func (s *survivor) rebuild() {
	s.note("rebuild")
	entries, end := s.c.entries(), s.c.end
	s.m, s.c, s.loose = New(s.c.cfg), newChronicle(s.c.cfg), false
	for _, l := range entries {
		s.take(l)
	}
	s.c.end = max(s.c.end, end)
	s.m.Advance(end)
}

func (s *survivor) run(deeds []deed, steps int) {
	for range steps {
		d := deeds[s.pick(len(deeds))]
		s.met[d.name]++
		d.do(s)
		s.verify()
	}
}

// configs chooses a policy, an idle limit of 100 ms or none, and a cap or none.
func someConfig(c chooser) Config {
	cfg := Config{Expiration: -1, UnknownProducer: policies[c.pick(len(policies))]}
	if c.pick(2) == 0 {
		cfg.Expiration = 100 * time.Millisecond
	}
	if c.pick(2) == 0 {
		cfg.MaxProducers = 1 + c.pick(4)
	}
	return cfg
}

// checkHistories runs random histories of some deeds.
func checkHistories(t *testing.T, config func(chooser) Config, deeds ...[]deed) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawn{t}
		newSurvivor(t, c, config(c)).run(slices.Concat(deeds...), 1+c.pick(60))
	})
}
