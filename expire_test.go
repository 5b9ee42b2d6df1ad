package idempotence

import (
	"bytes"
	"fmt"
	"math"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file tests forgetting: by the clock and by the cap. The transcripts are
// read as in transcript_test.go; a time there is in milliseconds, and enters by
// expire and nothing else.

// TestExpire is the rules of the idle limit, one a transcript.
func TestExpire(t *testing.T) {
	for _, tt := range []struct {
		reason     string
		transcript string
	}{
		{"an idle producer is forgotten at the limit, which is inclusive, and not before", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			activity pid=31 -> since the last Expire
			expire now=1000 -> 0
			activity pid=31 -> 1000
			expire now=1099 -> 0
			producers -> 1
			expire now=1100 -> 1
			producers -> 0
			expire now=1100 -> 0
		`},
		{"when in an interval a batch was committed is not known, so it counts as its end: never early, at most one interval late", `
			ttl=100
			expire now=1000 -> 0
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=1050 -> 0
			expire now=1149 -> 0
			expire now=1150 -> 1
		`},
		{"each further batch is activity", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=1000 -> 0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			expire now=1099 -> 0
			expire now=1100 -> 0
			activity pid=31 -> 1099
			expire now=1198 -> 0
			expire now=1199 -> 1
		`},
		{"duplicates, refusals and a Check that leads to nothing are not", `
			ttl=100
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=0
			expire now=1000 -> 0
			batch pid=31 epoch=1 seq=0 n=1 -> DUP base=0
			batch pid=31 epoch=1 seq=7 n=1 -> OUT_OF_ORDER
			batch pid=31 epoch=0 seq=0 n=1 -> STALE_EPOCH
			batch pid=31 epoch=1 seq=1 n=0 -> INVALID
			commit pid=31 epoch=1 seq=0 n=1 base=1 -> REFUSED DUPLICATE_SEQUENCE
			commit pid=31 epoch=1 seq=1 n=1 base=0 -> REFUSED OFFSET_ORDER
			check pid=31 epoch=1 seq=1 n=1 -> OK #A
			append-failed #A
			activity pid=31 -> 1000
			expire now=1100 -> 1
		`},
		{"neither is a batch without a producer", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=1000 -> 0
			batch pid=-1 epoch=-1 seq=-1 n=1 -> OK base=1
			advance to=5
			expire now=1100 -> 1
		`},
		{"a replayed batch is activity, also one that a coordinator wrote", `
			ttl=100
			replay pid=31 epoch=0 seq=0 n=1 base=0
			replay pid=32 epoch=0 seq=-1 n=1 base=1
			expire now=1000 -> 0
			replay pid=31 epoch=0 seq=1 n=1 base=2
			expire now=1050 -> 0
			expire now=1100 -> 1
			producers -> 1
			expire now=1150 -> 1
		`},
		{"a replayed batch that is skipped is none, whether it is known already or of an older epoch", `
			ttl=100
			replay pid=31 epoch=1 seq=0 n=1 base=4
			expire now=1000 -> 0
			replay pid=31 epoch=1 seq=0 n=1 base=4
			replay pid=31 epoch=0 seq=7 n=1 base=5
			replay-marker pid=31 epoch=0 coord=1 abort base=6
			activity pid=31 -> 1000
			expire now=1100 -> 1
		`},
		{"a marker is activity (KAFKA-9144)", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=1000 -> 0
			replay-marker pid=31 epoch=0 coord=1 commit base=1
			expire now=1090 -> 0
			expire now=1189 -> 0
			expire now=1190 -> 1
		`},
		{"a producer known only by a marker is forgotten like others", `
			ttl=100
			replay-marker pid=31 epoch=2 coord=1 commit base=0
			expire now=1000 -> 0
			batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
			expire now=1100 -> 1
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=1
		`},
		{"an open transaction is never forgotten; the marker that ends it begins the idle time", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
			expire now=1000 -> 0
			expire now=1100 -> 0
			expire now=9000 -> 0
			activity pid=31 -> 1000
			batch pid=31 epoch=0 seq=0 n=1 txn -> DUP base=0
			replay-marker pid=31 epoch=0 coord=1 abort base=1
			expire now=9010 -> 0
			expire now=9109 -> 0
			expire now=9110 -> 1
		`},
		{"nor does it stand in the way of those behind it", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
			expire now=1000 -> 0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
			expire now=1001 -> 0
			batch pid=33 epoch=0 seq=0 n=1 txn -> OK base=2
			batch pid=34 epoch=0 seq=0 n=1 -> OK base=3
			expire now=1002 -> 0
			expire now=1101 -> 1
			expire now=1102 -> 1
			window pid=31 -> epoch=0 0..0@0
			window pid=33 -> epoch=0 0..0@2
		`},
		{"a batch of a transaction that was passed over is activity too", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
			expire now=1000 -> 0
			expire now=1200 -> 0
			batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=1
			expire now=1300 -> 0
			activity pid=31 -> 1300
			replay-marker pid=31 epoch=0 coord=1 commit base=2
			expire now=1350 -> 0
			expire now=1450 -> 1
		`},
		{"a transaction whose end is a newer epoch's marker ends all the same", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
			expire now=1000 -> 0
			expire now=1200 -> 0
			replay-marker pid=31 epoch=1 coord=1 abort base=1
			expire now=1201 -> 0
			expire now=1301 -> 1
		`},
		{"a transaction that was cut off the log protects no longer, and the idle time begins anew", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=1
			expire now=1000 -> 0
			expire now=1200 -> 0
			truncate to=1 -> exact
			activity pid=31 -> since the last Expire
			expire now=1200 -> 0
			expire now=1299 -> 0
			expire now=1300 -> 1
		`},
		{"the clock of two calls in one does not matter, only their order", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=1000 -> 0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
			expire now=1000 -> 0
			expire now=1100 -> 2
		`},
		{"a clock that is set back by less than the limit stands still until it has caught up", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=1000 -> 0
			expire now=901 -> 0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
			expire now=950 -> 0
			activity pid=32 -> 1000
			expire now=1099 -> 0
			expire now=1100 -> 2
		`},
		{"a clock that is set back by the limit or more goes back, and every producer is active then", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=990 -> 0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
			expire now=1000 -> 0
			batch pid=33 epoch=0 seq=0 n=1 -> OK base=2
			expire now=900 -> 0
			activity pid=31 -> 900
			activity pid=32 -> 900
			activity pid=33 -> 900
			batch pid=32 epoch=0 seq=1 n=1 -> OK base=3
			expire now=910 -> 0
			activity pid=32 -> 910
			expire now=999 -> 0
			expire now=1000 -> 2
			expire now=1009 -> 0
			expire now=1010 -> 1
		`},
		{"the first to be idle is the first to be forgotten, whatever its id", `
			ttl=100
			batch pid=33 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=1
			expire now=1000 -> 0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=2
			expire now=1010 -> 0
			batch pid=33 epoch=0 seq=1 n=1 -> OK base=3
			expire now=1020 -> 0
			expire now=1100 -> 1
			window pid=31 -> none
			expire now=1110 -> 1
			window pid=32 -> none
			expire now=1120 -> 1
		`},
		{"a forgotten producer is unknown: mode=strict", `
			ttl=100
			batch pid=31 epoch=5 seq=0 n=3 -> OK base=0
			expire now=0 -> 0
			expire now=100 -> 1
			batch pid=31 epoch=5 seq=3 n=1 -> UNKNOWN_PRODUCER expected=0
			batch pid=31 epoch=4 seq=0 n=1 -> OK base=3
		`},
		{"a forgotten producer is unknown: mode=accept", `
			mode=accept
			ttl=100
			batch pid=31 epoch=5 seq=0 n=3 -> OK base=0
			expire now=0 -> 0
			expire now=100 -> 1
			batch pid=31 epoch=5 seq=3 n=1 -> OK base=3
			batch pid=31 epoch=5 seq=0 n=3 -> OUT_OF_ORDER
		`},
		{"the log stays as old as it was when all are forgotten: mode=new-log-strict", `
			mode=new-log-strict
			ttl=100
			batch pid=31 epoch=5 seq=0 n=3 -> OK base=0
			expire now=0 -> 0
			expire now=100 -> 1
			batch pid=31 epoch=5 seq=3 n=1 -> OK base=3
		`},
		{"none to forget", `
			ttl=100
			expire now=1000 -> 0
			expire now=9000 -> 0
			producers -> 0
		`},
		{"the time of the last call outlives the log", `
			ttl=100
			expire now=1000 -> 0
			reset
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=901 -> 0
			activity pid=31 -> 1000
		`},
	} {
		t.Run(tt.reason, func(t *testing.T) { play(t, tt.transcript) })
	}
}

// TestExpiration: what the idle limits of a Config mean.
func TestExpiration(t *testing.T) {
	const never = time.Duration(math.MaxInt64)
	start := time.Date(2026, 2, 14, 12, 0, 0, 999_999_999, time.UTC)
	for _, tt := range []struct {
		expiration time.Duration
		kept       time.Duration // the longest idle time that is not forgotten
	}{
		{0, 24*time.Hour - 1},
		{1, 0},
		{time.Millisecond - 1, time.Millisecond - 2},
		{1500 * time.Microsecond, 1500*time.Microsecond - 1},
		{time.Hour, time.Hour - 1},
		{never, never - 1},
		{-1, never},
		{math.MinInt64, never},
	} {
		m := New(Config{Expiration: tt.expiration})
		if err := m.Commit(31, 0, 0, 1, 0); err != nil {
			t.Fatal(err)
		}
		for _, step := range []struct {
			idle time.Duration
			want int
		}{{0, 0}, {tt.kept / 2, 0}, {tt.kept, 0}, {tt.kept + min(1, never-tt.kept), 1}} {
			want := step.want
			if tt.kept == never {
				want = 0
			}
			if got := m.Expire(start.Add(step.idle)); got != want {
				t.Errorf("Expiration %d: idle for %d, %d were forgotten, want %d", tt.expiration, step.idle, got, want)
			}
			audit(t, m)
		}
	}
}

// TestExpireAgainstChronicle: commits, replays, transactions and clocks that go
// forth and back, with an idle limit or without, and with a cap or without. The
// chronicle says after each step who is remembered, and since when it is idle.
func TestExpireAgainstChronicle(t *testing.T) {
	checkHistories(t, someConfig, commits, replays, markers, coordinators, clocks, clocks)
}

// TestEvictAgainstChronicle: the cap takes exactly the least recently active
// producer that has no transaction open. The chronicle looks for it among all.
func TestEvictAgainstChronicle(t *testing.T) {
	capped := func(c chooser) Config {
		return Config{MaxProducers: 1 + c.pick(5), UnknownProducer: AcceptAny, Expiration: 100 * time.Millisecond}
	}
	checkHistories(t, capped, commits, replays, markers, clocks[:1])
}

// TestReplicasForgetTheSame: a follower replays what its leader has committed,
// and is told of the same times. It never sees a duplicate or a refusal. At every
// call both forget the same producers.
func TestReplicasForgetTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := someConfig(drawn{t})
		cfg.Expiration = 100 * time.Millisecond
		leader := newSurvivor(t, drawn{t}, cfg)
		follower := New(cfg)
		sent := 0
		for range 40 {
			groups := [][]deed{commits, markers}
			deeds := groups[leader.pick(2)]
			deeds[leader.pick(len(deeds))].do(leader)
			for _, p := range leader.c.state().Producers {
				if n := len(p.Window); n > 0 {
					leader.m.Check(p.ProducerID, p.Epoch, p.Window[0].FirstSequence, 1) // some are duplicates, some refused
				}
			}
			for entries := leader.c.entries(); sent < len(entries); sent++ {
				if err := apply(follower, entries[sent]); err != nil {
					t.Fatal(err)
				}
			}
			if leader.pick(3) == 0 {
				now := leader.clock.Add(time.Duration(leader.pick(120)-10) * time.Millisecond)
				leader.clock = now
				leader.expire(now)
				follower.Expire(now)
			}
			audit(t, follower)
			if diff := cmp.Diff(stateOf(leader.m), stateOf(follower)); diff != "" {
				leader.fail("the follower differs (-leader +follower):\n%s", diff)
			}
		}
	})
}

// TestForgettingIsBounded: neither a step of Expire nor a commit under the cap
// looks at more than sweepStep producers under the lock, whether they can be
// forgotten or not, and some more steps finish the work. If all are idle, one step
// forgets them without looking at any.
func TestForgettingIsBounded(t *testing.T) {
	const many = 10 * sweepStep
	filled := func(cfg Config, reserve bool) *ProducerStateManager {
		m := New(cfg)
		for pid := range int64(many) {
			if err := m.Commit(pid, 0, 0, 1, pid); err != nil {
				t.Fatal(err)
			}
			if !reserve {
				continue
			}
			if _, _, err := m.Reserve(Batch{ProducerID: pid, BaseSequence: 1, Count: 1}); err != nil {
				t.Fatal(err)
			}
		}
		m.startTick(instantOf(time.Unix(0, 0)))
		m.startTick(instantOf(time.Unix(1000, 0)))
		return m
	}
	pinned := func(m *ProducerStateManager) (n int) {
		for l := m.recency.pinned.oldest; l != 0; l = m.table.at(l.row()).newer {
			n++
		}
		return n
	}

	m := filled(Config{}, false)
	if n, more := m.sweep(time.Second); n != many || more || m.Len() != 0 {
		t.Errorf("all were idle, and a step forgot %d (more to do: %t) of %d", n, more, many)
	}
	audit(t, m)

	m = filled(Config{}, false)
	settled(t, m.Commit(many, 0, 0, 1, many))
	for left := many; left > 0; left -= sweepStep {
		if n, more := m.sweep(time.Second); n != sweepStep || !more || m.Len() != left-sweepStep+1 {
			t.Fatalf("a step forgot %d (more to do: %t), and %d of %d are left", n, more, m.Len(), left)
		}
	}
	if n, more := m.sweep(time.Second); n != 0 || more {
		t.Errorf("the last step forgot %d, more to do: %t", n, more)
	}

	m = filled(Config{}, true)
	for done := 0; done < many; done += sweepStep {
		if n, more := m.sweep(time.Second); n != 0 || !more || pinned(m) != done+sweepStep {
			t.Fatalf("a step forgot %d (more to do: %t) and passed over %d, want %d", n, more, pinned(m), done+sweepStep)
		}
	}

	m = filled(Config{MaxProducers: many}, true)
	for i := range int64(20) {
		if err := m.Commit(many+i, 0, 0, 1, many+i); err != nil {
			t.Fatal(err)
		}
		if got, most := pinned(m), int(i+1)*sweepStep; got > most {
			t.Fatalf("%d commits passed over %d producers, want at most %d", i+1, got, most)
		}
		audit(t, m)
	}
	if got := m.Len(); got != many+1 {
		t.Errorf("%d producers with %d of them protected and a cap of %d, want one more", got, many, many)
	}
}

// TestMemoryComesBack: what a mass of producers took is given back when they
// are forgotten, and those that stay are found as before.
func TestMemoryComesBack(t *testing.T) {
	const many = 100_000
	m := New(Config{Expiration: time.Second})
	for pid := range int64(many) {
		if err := m.Commit(pid, 0, 0, 1, pid); err != nil {
			t.Fatal(err)
		}
	}
	grown := heapNow()
	m.Expire(time.Unix(1000, 0))
	for pid := int64(0); pid < many; pid += 1000 {
		if err := m.Commit(pid, 0, 1, 1, m.EndOffset()); err != nil {
			t.Fatal(err)
		}
	}
	if n := m.Expire(time.Unix(1001, 0)); n != many-100 {
		t.Fatalf("%d were forgotten, want %d", n, many-100)
	}
	audit(t, m)
	for pid := int64(0); pid < many; pid += 1000 {
		if res, err := m.Check(pid, 0, 1, 1); err != nil || res.Verdict != Duplicate {
			t.Fatalf("producer %d: %+v, %v", pid, res, err)
		}
	}
	shrunk := heapNow()
	// 100 producers take 2 pages. The headers of the pages that were are kept,
	// half a byte for each producer there ever was.
	if given, least := int64(grown)-int64(shrunk), int64(many*128); given < least {
		t.Errorf("%d bytes came back of %d producers of at least 128, want %d", given, many, least)
	}
	if n := len(m.table.index.dir); n != 1 {
		t.Errorf("the index of 100 producers has %d buckets", n)
	}
	runtime.KeepAlive(m)
}

// heapNow returns how many bytes of the heap are in use.
func heapNow() uint64 {
	var s runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

// TestExpireConcurrently is for the race detector: two tickers, a writer and a
// reader.
func TestExpireConcurrently(t *testing.T) {
	m := New(Config{Expiration: 10 * time.Millisecond, MaxProducers: 50})
	done := make(chan int)
	for range 2 {
		go func() {
			n := 0
			for i := range int64(300) {
				n += m.Expire(time.UnixMilli(i))
			}
			done <- n
		}()
	}
	go func() {
		for range 100 {
			for p := range m.Producers() {
				_ = p.LastActivity
			}
		}
		done <- 0
	}()
	for i := range int64(5000) {
		if err := m.Commit(i, 0, 0, 1, i); err != nil {
			t.Fatal(err)
		}
	}
	expired := <-done + <-done + <-done
	audit(t, m)
	if s := m.Stats(); s.Expired != uint64(expired) || s.Expired+s.Evicted+uint64(m.Len()) != 5000 {
		t.Errorf("%d were said to be forgotten; the counts are %+v, and %d are left of 5000", expired, s, m.Len())
	}
}

// TestEvict is the rules of the cap, one a transcript.
func TestEvict(t *testing.T) {
	for _, tt := range []struct {
		reason     string
		transcript string
	}{
		{"the least recently committed one goes; a duplicate does not save it", `
			cap=2
			batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=2 epoch=0 seq=0 n=1 -> OK base=1
			batch pid=1 epoch=0 seq=0 n=1 -> DUP base=0
			batch pid=3 epoch=0 seq=0 n=1 -> OK base=2
			window pid=1 -> none
			batch pid=2 epoch=0 seq=1 n=1 -> OK base=3
			batch pid=4 epoch=0 seq=0 n=1 -> OK base=4
			window pid=3 -> none
			window pid=2 -> epoch=0 0..0@1 1..1@3
		`},
		{"a refused newcomer evicts none", `
			cap=1
			batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=2 epoch=0 seq=5 n=1 -> UNKNOWN_PRODUCER
			check pid=2 epoch=0 seq=0 n=1 -> OK #A
			append-failed #A
			window pid=1 -> epoch=0 0..0@0
		`},
		{"if none may be forgotten the cap is exceeded, and once one may it holds again", `
			cap=2
			batch pid=1 epoch=0 seq=0 n=1 txn -> OK base=0
			batch pid=2 epoch=0 seq=0 n=1 txn -> OK base=1
			batch pid=3 epoch=0 seq=0 n=1 txn -> OK base=2
			producers -> 3
			replay-marker pid=1 epoch=0 coord=1 commit base=3
			replay-marker pid=2 epoch=0 coord=1 commit base=4
			producers -> 3
			batch pid=4 epoch=0 seq=0 n=1 -> OK base=5
			producers -> 2
			window pid=3 -> epoch=0 0..0@2
			window pid=4 -> epoch=0 0..0@5
		`},
		{"a transaction that was passed over and then cut off is again the oldest", `
			cap=2
			batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=1 epoch=0 seq=1 n=1 txn -> OK base=1
			batch pid=2 epoch=0 seq=0 n=1 txn -> OK base=2
			batch pid=3 epoch=0 seq=0 n=1 -> OK base=3
			producers -> 3
			truncate to=1 -> exact
			producers -> 1
			batch pid=2 epoch=0 seq=0 n=1 -> OK base=1
			batch pid=3 epoch=0 seq=0 n=1 -> OK base=2
			window pid=1 -> none
		`},
		{"several such are in the order that they had", `
			cap=2
			batch pid=1 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=2 epoch=0 seq=0 n=1 -> OK base=1
			batch pid=1 epoch=0 seq=1 n=1 txn -> OK base=2
			batch pid=2 epoch=0 seq=1 n=1 txn -> OK base=3
			batch pid=3 epoch=0 seq=0 n=1 -> OK base=4
			producers -> 3
			truncate to=2 -> exact
			batch pid=4 epoch=0 seq=0 n=1 -> OK base=2
			window pid=1 -> none
			window pid=2 -> epoch=0 0..0@1
		`},
		{"replay keeps the cap as the leader did", `
			cap=2
			replay pid=1 epoch=0 seq=0 n=1 base=0
			replay pid=2 epoch=0 seq=0 n=1 base=1
			replay-marker pid=1 epoch=0 coord=1 commit base=2
			replay pid=3 epoch=0 seq=0 n=1 base=3
			window pid=2 -> none
			window pid=1 -> epoch=0 0..0@0
		`},
	} {
		t.Run(tt.reason, func(t *testing.T) { play(t, tt.transcript) })
	}
}

// BenchmarkStallExpire reports as max-ms the longest that a Check and Commit
// took while Expire ran over producers of which none expires, or all do, and as
// idle-max-ms the same over as long a time without an Expire: what the machine
// itself does to the measurement. Of several runs it is the median of their
// maxima, so that one interruption does not stand for all.
func BenchmarkStallExpire(b *testing.B) {
	for _, n := range []int{100_000, 1_000_000} {
		b.Run(fmt.Sprintf("expires=nothing/producers=%d", n), func(b *testing.B) { stallExpire(b, n, time.Second, 0) })
		b.Run(fmt.Sprintf("expires=everything/producers=%d", n), func(b *testing.B) { stallExpire(b, n, time.Hour, n) })
	}
}

// stallExpire measures one Expire over n producers that are idle for some time, of
// which it forgets as many as wanted.
func stallExpire(b *testing.B, n int, idle time.Duration, want int) {
	var during, quiet, took []time.Duration
	for range b.N {
		m, _ := full(n)
		m.cfg.Expiration = time.Minute
		m.Expire(time.Unix(1000, 0))
		runtime.GC()
		w := startWriter(m)
		start := time.Now()
		got := m.Expire(time.Unix(1000, 0).Add(idle))
		spent := time.Since(start)
		during, took = append(during, w.stop()), append(took, spent)
		if got != want {
			b.Fatalf("%d expired, want %d", got, want)
		}
		w = startWriter(m)
		time.Sleep(spent)
		quiet = append(quiet, w.stop())
	}
	b.ReportMetric(0, "ns/op") // mostly the making of the manager, which b.N follows
	b.ReportMetric(medianMillis(during), "max-ms")
	b.ReportMetric(medianMillis(quiet), "idle-max-ms")
	b.ReportMetric(medianMillis(took), "expire-ms")
}

// TestF17_BenchmarkEnds: everything that an iteration of BenchmarkStallExpire does
// is timed, so that it ends with the default benchtime, whose number of iterations
// follows the time measured.
func TestF17_BenchmarkEnds(t *testing.T) {
	began := time.Now()
	r := testing.Benchmark(func(b *testing.B) { stallExpire(b, 1000, time.Second, 0) })
	if took := time.Since(began); r.N == 0 || r.T < took/10 {
		t.Errorf("%d iterations took %v, of which %v were timed", r.N, took, r.T)
	}
}

// BenchmarkExpireStep reports as longest-step-ms for how long Expire ever holds
// the lock while it forgets all. Each step is timed in several runs and
// counts with its fastest, so that what the machine does besides is left out:
// what remains is what a Check can have to wait for.
func BenchmarkExpireStep(b *testing.B) {
	for _, n := range []int{100_000, 1_000_000} {
		b.Run(fmt.Sprintf("producers=%d", n), func(b *testing.B) {
			var fastest []time.Duration
			for range max(b.N, 3) {
				m, _ := full(n)
				m.startTick(instantOf(time.Unix(0, 0)))
				m.startTick(instantOf(time.Unix(1000, 0)))
				for i, more := 0, true; more; i++ {
					start := time.Now()
					_, more = m.sweep(time.Second)
					spent := time.Since(start)
					if i == len(fastest) {
						fastest = append(fastest, spent)
					}
					fastest[i] = min(fastest[i], spent)
				}
			}
			b.ReportMetric(slices.Max(fastest).Seconds()*1000, "longest-step-ms")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func medianMillis(d []time.Duration) float64 {
	slices.Sort(d)
	return d[len(d)/2].Seconds() * 1000
}

// writer commits batch after batch and notes the longest that one took.
type writer struct {
	quit chan struct{}
	most chan time.Duration
}

// startWriter starts a writer that is new to m and returns once it writes.
func startWriter(m *ProducerStateManager) writer {
	w := writer{make(chan struct{}), make(chan time.Duration)}
	ready := make(chan struct{})
	pid := m.MaxProducerID() + 1
	go func() {
		var most time.Duration
		for seq := int32(0); ; seq++ {
			select {
			case <-w.quit:
				w.most <- most
				return
			default:
			}
			start := time.Now()
			if _, err := m.Check(pid, 0, seq, 1); err != nil {
				panic(err)
			}
			if err := m.Commit(pid, 0, seq, 1, m.EndOffset()); err != nil {
				panic(err)
			}
			if spent := time.Since(start); seq > 0 {
				most = max(most, spent)
			}
			if seq == 100 {
				close(ready)
			}
		}
	}()
	<-ready
	return w
}

func (w writer) stop() time.Duration {
	close(w.quit)
	return <-w.most
}

// TestF6_OneClockReadingFarAhead: one reading that is ten years ahead must not
// stop forgetting for ten years, over a restart and Reset either.
func TestF6_OneClockReadingFarAhead(t *testing.T) {
	day := 24 * time.Hour
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for name, between := range map[string]func(m *ProducerStateManager) *ProducerStateManager{
		"nothing":   func(m *ProducerStateManager) *ProducerStateManager { return m },
		"a restart": func(m *ProducerStateManager) *ProducerStateManager { return restored(t, m.cfg, encoded(t, m)) },
		"a restore": func(m *ProducerStateManager) *ProducerStateManager {
			settled(t, m.Restore(bytes.NewReader(encoded(t, New(m.cfg)))))
			return m
		},
		"Reset": func(m *ProducerStateManager) *ProducerStateManager { m.Reset(); return m },
	} {
		m := New(Config{})
		commit := func(pid int64) { t.Helper(); settled(t, m.Commit(pid, 0, 0, 1, m.EndOffset())) }
		commit(1)
		m.Expire(now)
		m.Expire(now.AddDate(10, 0, 0))
		m = between(m)
		commit(2)
		if n := m.Expire(now.Add(day)); n != 0 {
			t.Errorf("%s: %d were forgotten at the right time, want none: all count as active", name, n)
		}
		if p, _ := m.Producer(2); !p.LastActivity.Equal(now.Add(day)) {
			t.Errorf("%s: producer 2 was active at %v, want %v", name, p.LastActivity, now.Add(day))
		}
		if n := m.Expire(now.Add(2*day - 1)); n != 0 {
			t.Errorf("%s: %d were forgotten too early", name, n)
		}
		m.Expire(now.Add(2 * day))
		if m.Len() != 0 {
			t.Errorf("%s: %d are remembered a day later", name, m.Len())
		}
		audit(t, m)
	}
}
