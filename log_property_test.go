package idempotence

import (
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

// This file is the manager against the model of the log (model_log_test.go), over random
// histories.

// survivor is a manager and its chronicle, side by side. Like rig, it prints the
// transcript of what led to a failure.
type survivor struct {
	*generator
	t     rapid.TB
	pick  func(n int) int
	m     *ProducerStateManager
	c     *chronicle
	clock time.Time
	// loose: the manager was told of a cut that it could not take back, and went
	// on all the same. What it remembers is not compared until it is rebuilt.
	loose   bool
	history []string
	met     map[string]int
}

func newSurvivor(t rapid.TB, c chooser, cfg Config) *survivor {
	s := &survivor{
		t: t, pick: c.pick, m: New(cfg), c: newChronicle(cfg), clock: time.UnixMilli(1000).UTC(), met: map[string]int{},
	}
	s.generator = &generator{
		c: c, policy: cfg.UnknownProducer, pids: []int64{31, 32, 33, 34},
		known: func(pid int64) outlook { return s.c.outlook(pid) }, // the chronicle is replaced now and then
		txn:   func(o outlook) bool { return s.pick(4) == 3 || o.open && s.pick(8) > 0 },
	}
	s.count = s.wideCount
	return s
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

func (s *survivor) base() int64 { return s.c.end + []int64{0, 0, 0, 1, 2}[s.pick(5)] }

// near returns an epoch about the current one.
func (s *survivor) near(pid int64) int16 {
	epoch := int16(0)
	if p := s.c.known[pid]; p != nil {
		epoch = p.epoch
	}
	return max(0, epoch+[]int16{0, 0, 0, 1, 2, -1}[s.pick(6)])
}

// commit commits a batch, which the rules mostly allow. A manager gone loose may refuse
// anything.
func (s *survivor) commit(b Batch) {
	l := logged{batch: b, base: s.base()}
	s.note("commit %s txn=%t base=%d", words(b), b.Transactional, l.base)
	res, want := judge(s.c.cfg.UnknownProducer, s.c.end, s.c.outlook(b.ProducerID), b)
	if res.Verdict == Duplicate {
		want = ErrDuplicateSequence
	}
	err := s.m.CommitBatch(b, l.base)
	if !s.loose && !sameReason(want, err) {
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
		{"commit without a producer id", func(s *survivor) {
			s.commit(s.withoutID())
		}},
		{"a newcomer", func(s *survivor) {
			s.pids = append(s.pids, int64(100+len(s.pids)))
			s.commit(s.next(s.pids[len(s.pids)-1]))
		}},
	}
	replays = []deed{
		{"replay the next", func(s *survivor) { s.take(logged{batch: s.next(s.pid()), base: s.base()}) }},
		{"replay", func(s *survivor) { s.take(logged{batch: s.stray(s.pid()), base: s.base()}) }},
		{"replay a batch without a producer id", func(s *survivor) {
			s.take(logged{batch: Batch{ProducerID: NoProducerID, Count: s.count(0)}, base: s.base()})
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
		b := Batch{ProducerID: pid, Epoch: s.near(pid), BaseSequence: -1, Count: s.count(0), Transactional: s.pick(3) > 0}
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
