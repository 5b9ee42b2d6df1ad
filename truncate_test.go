package idempotence

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// This file tests what is taken back when the log is cut or deleted. In the
// transcripts a cut that is not exact is followed by a rebuild from the log, as
// an embedder must do it, so what comes after shows the state rebuilt.

// TestTruncateAgainstChronicle: whatever has happened, with epochs that change,
// sequences that wrap, windows that rolled over, transactions, producers
// forgotten and batches replayed twice, a Truncate that says exact leaves what
// there would be if the log had never been longer; it says so whenever its
// comment promises it; and where it does not, nothing that was cut off is
// remembered, not even if the broker ignores the answer and goes on.
func TestTruncateAgainstChronicle(t *testing.T) {
	checkHistories(t, someConfig, commits, replays, markers, coordinators, overlaps, clocks, truncations, truncations)
}

// TestTruncatePlainLogs: the same without what makes most cuts inexact, so that
// more of them are.
func TestTruncatePlainLogs(t *testing.T) {
	never := func(chooser) Config { return Config{Expiration: -1, UnknownProducer: AcceptAny} }
	checkHistories(t, never, commits, replays, truncations)
}

// TestHistoriesReachEverything: the histories do come to exact cuts and to
// others, to producers forgotten and to everything that is in the lists.
func TestHistoriesReachEverything(t *testing.T) {
	met, evicted, maxPlainCount, mayRepeat := map[string]int{}, 0, 0, 0
	c := seeded{rand.New(rand.NewPCG(1, 2))}
	for range 300 {
		s := newSurvivor(t, c, someConfig(c))
		for range 3 {
			for _, deeds := range [][]deed{commits, replays, markers, coordinators, overlaps, clocks, commits, truncations} {
				s.run(deeds, 3)
			}
		}
		for name, n := range s.met {
			met[name] += n
		}
		evicted += int(s.m.Stats().Evicted)
		for row := range s.m.table.rows {
			if s.m.table.at(row).window.mayRepeat {
				mayRepeat++
			} else {
				maxPlainCount++
			}
		}
	}
	met["evicted"], met["wide"], met["narrow"] = evicted, mayRepeat, maxPlainCount
	met["inexact cut"] = met["cut"] - met["exact cut"]
	for _, deeds := range [][]deed{commits, replays, markers, coordinators, overlaps, clocks, truncations} {
		for _, d := range deeds {
			met[d.name] += 0
		}
	}
	for what, n := range met {
		if n < 50 {
			t.Errorf("%s: met %d times", what, n)
		}
	}
}

// TestTruncate is what a cut takes back, one case a transcript.
func TestTruncate(t *testing.T) {
	for _, tt := range []struct {
		reason     string
		transcript string
	}{
		{"at or past the end nothing is cut", `
			batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
			truncate to=3 -> exact
			truncate to=9 -> exact
			end -> 3
			window pid=31 -> epoch=0 0..2@0
		`},
		{"a batch that the cut goes through is gone, since a log does not cut a batch in half", `
			batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
			batch pid=31 epoch=0 seq=3 n=3 -> OK base=3
			truncate to=5 -> exact
			end -> 5
			window pid=31 -> epoch=0 0..2@0
			commit pid=31 epoch=0 seq=3 n=3 base=5 -> OK
			window pid=31 -> epoch=0 0..2@0 3..5@5
		`},
		{"a batch that ends where the cut is stays", `
			batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
			batch pid=31 epoch=0 seq=3 n=3 -> OK base=3
			truncate to=3 -> exact
			window pid=31 -> epoch=0 0..2@0
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
		`},
		{"what was cut off is no duplicate, and what stays is one", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			truncate to=1 -> exact
			batch pid=31 epoch=0 seq=2 n=1 -> OUT_OF_ORDER expected=1
			batch pid=31 epoch=0 seq=0 n=1 -> DUP base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
		`},
		{"a full window that has not rolled over is exact in every part", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
			truncate to=4 -> exact
			truncate to=1 -> exact
			window pid=31 -> epoch=0 0..0@0
		`},
		{"a new producer that loses all is unknown", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=32 epoch=7 seq=0 n=1 -> OK base=1
			batch pid=32 epoch=7 seq=1 n=1 -> OK base=2
			truncate to=1 -> exact
			window pid=32 -> none
			producers -> 1
			highest-pid -> 32
			batch pid=32 epoch=3 seq=0 n=1 -> OK base=1
		`},
		{"a window that has rolled over, of which nothing is cut", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=6
			truncate to=6 -> exact
			window pid=31 -> epoch=0 1..1@1 2..2@2 3..3@3 4..4@4 5..5@5
		`},
		{"a window that has rolled over would have to grow at the other end", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
			truncate to=5 -> inexact
			window pid=31 -> epoch=0 0..0@0 1..1@1 2..2@2 3..3@3 4..4@4
		`},
		{"a window that has rolled over begins anew with an epoch", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=6
			batch pid=31 epoch=1 seq=1 n=1 -> OK base=7
			truncate to=7 -> exact
			window pid=31 -> epoch=1 0..0@6
		`},
		{"a whole epoch is cut off: which one is current again is not known", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=1
			batch pid=31 epoch=2 seq=0 n=1 -> OK base=2
			truncate to=2 -> inexact
			window pid=31 -> epoch=1 0..0@1
		`},
		{"an epoch is cut away, and the older one is current again", `
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=2
			truncate to=2 -> inexact
			window pid=31 -> epoch=0 0..1@0
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
		`},
		{"an epoch that keeps a batch stays", `
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=0
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=2
			batch pid=31 epoch=1 seq=1 n=1 -> OK base=3
			truncate to=3 -> exact
			window pid=31 -> epoch=1 0..0@2
		`},
		{"a producer whose transaction is cut off can be forgotten again, although its turn had come before", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=1
			expire now=0 -> 0
			expire now=100 -> 0
			truncate to=1 -> exact
			activity pid=31 -> since the last Expire
			expire now=101 -> 0
			expire now=200 -> 0
			expire now=201 -> 1
		`},
		{"a marker is cut off: the transaction is open again", `
			batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
			replay-marker pid=31 epoch=0 coord=1 commit base=1
			truncate to=1 -> inexact
			txn pid=31 -> open@0 coord=none
		`},
		{"a marker that stays does not matter", `
			replay-marker pid=31 epoch=2 coord=1 commit base=0
			batch pid=31 epoch=2 seq=0 n=1 -> OK base=1
			batch pid=31 epoch=2 seq=1 n=1 -> OK base=2
			truncate to=2 -> exact
			window pid=31 -> epoch=2 0..0@1
			truncate to=1 -> exact
			window pid=31 -> epoch=2
			txn pid=31 -> none coord=1
			batch pid=31 epoch=1 seq=0 n=1 -> STALE_EPOCH
		`},
		{"a transaction that began behind the cut is not open", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=3 txn -> OK base=1
			batch pid=31 epoch=0 seq=4 n=1 txn -> OK base=4
			truncate to=4 -> exact
			txn pid=31 -> open@1 coord=none
			truncate to=3 -> exact
			txn pid=31 -> none coord=none
		`},
		{"a coordinator's batch that the cut goes through is gone", `
			replay pid=31 epoch=0 seq=-1 n=3 txn base=0
			truncate to=2 -> inexact
			window pid=31 -> none
		`},
		{"a sequence that wrapped comes back too", `
			mode=accept
			batch pid=31 epoch=0 seq=2147483646 n=2 -> OK base=0
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=2
			truncate to=3 -> exact
			batch pid=31 epoch=0 seq=0 n=2 -> OK base=3
			truncate to=1 -> exact
			window pid=31 -> none
		`},
		{"a gap in the sequences comes back too", `
			replay pid=31 epoch=0 seq=0 n=1 base=0
			replay pid=31 epoch=0 seq=7 n=2 base=9
			replay pid=31 epoch=0 seq=3 n=1 base=12
			truncate to=12 -> exact
			window pid=31 -> epoch=0 0..0@0 7..8@9
			truncate to=10 -> exact
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=10
		`},
		{"a producer was forgotten behind the cut", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
			expire now=0 -> 0
			batch pid=32 epoch=0 seq=1 n=1 -> OK base=2
			expire now=100 -> 1
			batch pid=32 epoch=0 seq=2 n=1 -> OK base=3
			truncate to=3 -> exact
			window pid=31 -> none
			truncate to=2 -> inexact
			window pid=31 -> epoch=0 0..0@0
		`},
		{"a producer was evicted by what is cut off", `
			cap=1
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
			truncate to=1 -> inexact
			window pid=31 -> epoch=0 0..0@0
		`},
		{"of an empty log everything is known, whatever was", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=0 -> 0
			expire now=100 -> 1
			batch pid=31 epoch=1 seq=0 n=1 -> OK base=1
			replay-marker pid=31 epoch=2 coord=1 commit base=2
			truncate to=0 -> exact
			producers -> 0
			end -> 0
			highest-pid -> 31
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			truncate to=0 -> exact
		`},
		{"below 0 is 0", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			truncate to=-5 -> exact
			producers -> 0
			end -> 0
		`},
		{"records without a producer go with the end offset", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			advance to=9
			truncate to=4 -> exact
			end -> 4
			window pid=31 -> epoch=0 0..0@0
		`},
		{"deleted and created again, the log has no producers and no records", `
			mode=new-log-strict
			batch pid=31 epoch=3 seq=0 n=3 -> OK base=0
			replay-marker pid=31 epoch=4 coord=9 commit base=3
			reset
			producers -> 0
			end -> 0
			highest-pid -> 31
			stats -> accepted=1 duplicate=0 out-of-order=0 unknown=0 fenced=0 invalid=0
			batch pid=31 epoch=0 seq=1 n=1 -> OUT_OF_ORDER
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			txn pid=31 -> none coord=none
			truncate to=0 -> exact
		`},
	} {
		t.Run(tt.reason, func(t *testing.T) { play(t, tt.transcript) })
	}
}

// TestTruncateGoneOn: a broker that goes on after a cut that was not exact is
// told so at every cut until the state is rebuilt, since the windows are still
// too short. Until then nothing that was cut off is a duplicate.
func TestTruncateGoneOn(t *testing.T) {
	m := New(Config{})
	commit := func(seq int32, base int64) {
		t.Helper()
		if err := m.Commit(31, 0, seq, 1, base); err != nil {
			t.Fatal(err)
		}
	}
	for seq := range int32(9) {
		commit(seq, int64(seq))
	}
	if m.Truncate(6) {
		t.Fatal("a window that rolled over was cut, and it is said to be exact")
	}
	audit(t, m)
	for seq := int32(6); seq < 9; seq++ {
		if res, err := m.Check(31, 0, seq, 1); res.Verdict == Duplicate {
			t.Errorf("sequence %d was cut off and is answered with %+v, %v", seq, res, err)
		}
	}
	commit(6, 6)
	if m.Truncate(7) || m.Truncate(100) {
		t.Error("the window is still too short, and it is said to be exact")
	}

	m.Reset()
	for seq := range int32(7) {
		if err := m.Replay(Batch{ProducerID: 31, BaseSequence: seq, Count: 1}, int64(seq)); err != nil {
			t.Fatal(err)
		}
	}
	m.Advance(9)
	if !m.Truncate(7) {
		t.Error("rebuilt from the log, and a cut that takes nothing is said not to be exact")
	}
}

// TestTruncateAfterRevival: a replay that overlaps what is known brings back a
// producer that was forgotten, with less than the log has of it. No cut is exact
// then.
func TestTruncateAfterRevival(t *testing.T) {
	m := New(Config{MaxProducers: 1})
	entries := []logged{
		{batch: Batch{ProducerID: 31, Count: 1}, base: 0},
		{batch: Batch{ProducerID: 31, BaseSequence: 1, Count: 1}, base: 1},
		{batch: Batch{ProducerID: 32, Count: 1}, base: 2},
	}
	for _, l := range entries {
		if err := apply(m, l); err != nil {
			t.Fatal(err)
		}
	}
	if !m.Truncate(3) {
		t.Error("nothing was cut, and it is said not to be exact")
	}
	if err := apply(m, entries[1]); err != nil {
		t.Fatal(err)
	}
	if p, _ := m.Producer(31); describe(p) != "epoch=0 1..1@1" {
		t.Errorf("it came back as %s", describe(p))
	}
	if m.Truncate(3) {
		t.Error("half a window came back, and it is said to be exact")
	}
}

// TestResetKeeps: what Reset leaves is a new manager, but for what its comment
// says that it keeps; and a walk that has begun still sees what was.
func TestResetKeeps(t *testing.T) {
	p := play(t, `
		ttl=100
		cap=9
		batch pid=31 epoch=3 seq=0 n=3 -> OK base=0
		batch pid=32 epoch=0 seq=0 n=3 txn -> OK base=3
		replay-marker pid=31 epoch=4 coord=9 commit base=6
		expire now=1000 -> 0
		expire now=2000 -> 1
	`)
	want := p.m.Stats()
	want.OpenTransactions = 0
	seen := 0
	for range p.m.Producers() {
		p.m.Reset()
		seen++
	}
	if seen != 1 {
		t.Errorf("a walk that had begun saw %d producers, want 1", seen)
	}
	audit(t, p.m)
	if diff := cmp.Diff(observed{MaxProducerID: 32}, stateOf(p.m)); diff != "" {
		t.Errorf("the state (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, p.m.Stats()); diff != "" {
		t.Errorf("the counts (-want +got):\n%s", diff)
	}
	if p.m.Len() != 0 {
		t.Errorf("%d producers are left", p.m.Len())
	}
}

// TestReset: the log is created again, so nothing is known of it; the highest
// producer id and the counts are not the log's.
func TestReset(t *testing.T) {
	play(t, `
		mode=new-log-strict
		batch pid=31 epoch=3 seq=0 n=1 txn -> OK base=0
		batch pid=31 epoch=3 seq=1 n=1 txn -> OK base=1
		reset
		producers -> 0
		end -> 0
		highest-pid -> 31
		batch pid=31 epoch=3 seq=2 n=1 -> OUT_OF_ORDER
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		stats -> accepted=3 duplicate=0 out-of-order=1 unknown=0 fenced=0 invalid=0
	`)
}

// TestTruncate_ExactAgainAfterRestore: what cannot be known after a cut is known
// again when a snapshot has been restored and the log replayed from there. A
// snapshot of what was not known says so.
func TestTruncate_ExactAgainAfterRestore(t *testing.T) {
	m := New(Config{})
	var good, doubtful bytes.Buffer
	commit := func(seq int32) {
		t.Helper()
		if err := m.Commit(31, 0, seq, 1, int64(seq)); err != nil {
			t.Fatal(err)
		}
	}
	save := func(b *bytes.Buffer) {
		t.Helper()
		if _, err := m.Snapshot().WriteTo(b); err != nil {
			t.Fatal(err)
		}
	}
	truncate := func(to int64, want bool) {
		t.Helper()
		if got := m.Truncate(to); got != want {
			t.Fatalf("cut to %d: exact is %t, want %t", to, got, want)
		}
	}
	for seq := range int32(3) {
		commit(seq)
	}
	save(&good)
	for seq := int32(3); seq < 8; seq++ {
		commit(seq)
	}
	truncate(5, false)
	save(&doubtful)
	if err := m.Restore(&good); err != nil {
		t.Fatal(err)
	}
	commit(3)
	commit(4)
	truncate(5, true)
	truncate(4, true)
	if err := m.Restore(&doubtful); err != nil {
		t.Fatal(err)
	}
	truncate(4, false)
}

// TestTruncate_BelowRestoredLogEnd: a snapshot was taken with a batch in flight, so it
// remembers batches past its end offset, and the log was cut below what it reached
// then. From the cut on the log continues: a snapshot says that it ends there, a
// reservation may lie there, and in a log without holes the next batch must.
//
//	offset  0   1   2   3   4   5
//	log     32  ?   32  32  32      31 is in flight at 1, the snapshot reaches 5
//	        32  31  32              cut to 3
func TestTruncate_BelowRestoredLogEnd(t *testing.T) {
	cfg := Config{Contiguous: true}
	m := New(cfg)
	settled(t, m.Commit(32, 0, 0, 1, 0))
	r, _, err := m.Reserve(Batch{ProducerID: 31, Count: 1})
	settled(t, err)
	for seq := range int32(3) {
		later, _, err := m.Reserve(Batch{ProducerID: 32, BaseSequence: 1 + seq, Count: 1})
		settled(t, err, later.Commit(2+int64(seq)))
	}
	s := m.Snapshot()
	if s.EndOffset() != 1 || s.LogEndOffset() != 5 {
		t.Fatalf("the snapshot ends at %d of %d, want 1 of 5", s.EndOffset(), s.LogEndOffset())
	}
	settled(t, r.Commit(1))

	n := restored(t, cfg, written(t, s))
	if err := n.Commit(33, 0, 0, 1, 3); err == nil {
		t.Error("before the replay has come to the end, a batch is committed at 3")
	}
	n.Truncate(3)
	audit(t, n)
	for _, l := range []logged{
		{batch: Batch{ProducerID: 31, Count: 1}, base: 1},
		{batch: Batch{ProducerID: 32, BaseSequence: 1, Count: 1}, base: 2},
	} {
		settled(t, apply(n, l))
	}
	if s := n.Snapshot(); s.EndOffset() != 3 || s.LogEndOffset() != 3 {
		t.Errorf("after the cut a snapshot ends at %d of %d, want 3 of 3", s.EndOffset(), s.LogEndOffset())
	}
	if _, _, err := n.Reserve(Batch{ProducerID: 34, Count: 1}); err != nil {
		t.Fatal(err)
	}
	if end := n.Snapshot().EndOffset(); end != 3 {
		t.Errorf("a batch may lie at 3, and a snapshot ends at %d", end)
	}
	n.AbandonReservations()
	settled(t, n.Commit(33, 0, 0, 1, 3))
	audit(t, n)
}

// A snapshot that was taken with something in flight ends before what it holds.
// What lies past its end and cannot be taken back makes a Truncate to there
// inexact, after a restore as before.
func TestSnapshotPastWhichTruncateIsInexact(t *testing.T) {
	steps := []struct {
		name string
		do   func(m *ProducerStateManager)
	}{
		{"a marker", func(m *ProducerStateManager) {
			m.ReplayMarker(Marker{ProducerID: 2, Epoch: 1}, 60)
		}},
		{"a batch without sequences", func(m *ProducerStateManager) {
			m.Replay(Batch{ProducerID: 2, Epoch: 1, BaseSequence: -1, Count: 1}, 60)
		}},
		{"a producer forgotten", func(m *ProducerStateManager) {
			m.Advance(60)
			m.Expire(time.Unix(1, 0))
			m.Expire(time.Unix(1, 0).Add(DefaultExpiration))
		}},
	}
	for _, step := range steps {
		t.Run(step.name, func(t *testing.T) {
			m := New(Config{})
			if err := m.Commit(2, 0, 0, 1, 40); err != nil {
				t.Fatal(err)
			}
			m.Advance(50)
			if _, _, err := m.Reserve(Batch{ProducerID: 1, Count: 1}); err != nil {
				t.Fatal(err)
			}
			step.do(m)
			n := restored(t, Config{}, encoded(t, m))
			if end := n.EndOffset(); end != 50 {
				t.Fatalf("end offset %d, want 50", end)
			}
			if got, want := n.Truncate(50), m.Truncate(50); got || want {
				t.Errorf("Truncate to 50 is exact: %t after a restore, %t without", got, want)
			}
		})
	}
}
