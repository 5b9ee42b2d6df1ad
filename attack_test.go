package idempotence

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// This file holds what an attack on the package brought to light: one test for
// each defect that was found, named after what it defends.

// A free slot is row 0 to whoever looks for candidates only by their tags. The
// producer in row 0 must not be taken for a second one because of that, or an
// intact snapshot is refused as corrupt, with some seeds and not with others.
// The seed is searched for which puts both producers' tags at 1, next to that
// of a free slot, and the producer of row 0 behind the other one.
func TestIntactSnapshotIsNotRefusedForAnySeed(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for {
		table := table{index: index{seed: [2]uint64{rng.Uint64(), rng.Uint64() | 1}}}
		table.append(7)
		table.append(8)
		first, second := table.hashOf(0), table.hashOf(1)
		if tagOf(first) != 1 || tagOf(second) != 1 || second>>56 >= first>>56 {
			continue
		}
		if twice := table.reindex(); twice != nil {
			t.Errorf("seed %#x: producer %d is there twice among 7 and 8", table.index.seed, twice.id)
		}
		return
	}
}

// A snapshot with end offset 0 holds what was committed behind a batch in flight,
// and a replay of the whole log on top of it gives what the log gives.
func TestSnapshotFromStartOfLogHoldsWhatFollows(t *testing.T) {
	m := New(Config{})
	if _, _, err := m.Reserve(Batch{ProducerID: 1, Count: 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.ReplayMarker(Marker{ProducerID: 2, Epoch: 3}, 5); err != nil {
		t.Fatal(err)
	}
	n := restored(t, Config{}, encoded(t, m))
	if end := n.EndOffset(); end != 0 {
		t.Fatalf("end offset %d, want 0: a batch is in flight that may lie there", end)
	}
	rebuilt := New(Config{})
	for _, m := range []*ProducerStateManager{n, rebuilt} {
		settled(t, m.Replay(Batch{ProducerID: 1, Count: 1}, 2), m.ReplayMarker(Marker{ProducerID: 2, Epoch: 3}, 5))
	}
	if diff := cmp.Diff(stateOf(rebuilt), stateOf(n)); diff != "" {
		t.Errorf("(-rebuilt +restored and replayed)\n%s", diff)
	}
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

// A first batch that failed is owed. Once the log was cut to nothing, the policy
// that asks for 0 on a new log and a debt of another sequence must not shut the
// producer out between them.
func TestOwedDoesNotShutOutOfNewLog(t *testing.T) {
	m := New(Config{UnknownProducer: StartAtZeroOnNewLog})
	m.Advance(100)
	r, _, err := m.Reserve(Batch{ProducerID: 1, BaseSequence: 7, Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Abort(); err != nil {
		t.Fatal(err)
	}
	if !m.Truncate(0) {
		t.Fatal("Truncate to 0 is not exact")
	}
	var facts *BatchError
	if _, err := m.Check(1, 0, 7, 1); !errors.As(err, &facts) || facts.Expected != 0 {
		t.Errorf("sequence 7 on a new log: %v, want it refused and 0 expected", err)
	}
	if res, err := m.Check(1, 0, 0, 1); err != nil || res.Verdict != Append {
		t.Errorf("sequence 0 on a new log: %v, %v, want Append", res.Verdict, err)
	}
}

// A copy of a Reservation is the same place in the log: once it is committed,
// no other handle moves it or takes it back.
func TestCommittedReservationOfCopiedHandle(t *testing.T) {
	m := New(Config{})
	first, second := reserved(t, m, 0, 1), reserved(t, m, 1, 1)
	again := *second
	settled(t, second.Commit(10))
	if err := again.Commit(20); !errors.Is(err, ErrSettled) {
		t.Errorf("second commit, by a copy: %v, want ErrSettled", err)
	}
	if err := again.Abort(); !errors.Is(err, ErrSettled) {
		t.Errorf("abort after the commit, by a copy: %v, want ErrSettled", err)
	}
	settled(t, first.Commit(5))
	want := Result{Verdict: Duplicate, BaseOffset: 10}
	if res, err := m.Check(31, 0, 1, 1); res != want || err != nil {
		t.Errorf("retry of the second batch: %+v, %v, want %+v", res, err, want)
	}
}

// A replay from the end offset of a snapshot on settles what was in doubt after
// AbandonReservations, whatever stands there first: here a control record that
// is no producer's, as a new leader writes it. Otherwise every later snapshot
// would end at that offset.
func TestReplayFromControlRecordSettlesDoubt(t *testing.T) {
	m := New(Config{})
	m.Advance(55)
	if _, _, err := m.Reserve(Batch{ProducerID: 1, Count: 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.Commit(2, 0, 0, 1, 56); err != nil {
		t.Fatal(err)
	}
	m.AbandonReservations()
	if end := m.Snapshot().EndOffset(); end != 55 {
		t.Fatalf("a batch may lie at 55, but a snapshot ends at %d", end)
	}
	log := controlBatch(55, NoProducerID, -1, []byte{0, 0, 0, 2}, []byte{7}).encode()
	log = append(log, dataBatch(56, 2, 0, 0, 1).encode()...)
	if _, err := m.ReplayLog(bytes.NewReader(log)); err != nil {
		t.Fatal(err)
	}
	if end := m.Snapshot().EndOffset(); end != 57 {
		t.Errorf("the log is replayed to 57, but a snapshot ends at %d", end)
	}
}

// Other files in the directory are left alone, also such as end like those of a
// Save that was cut off.
func TestLoadLeavesOtherFilesAlone(t *testing.T) {
	path := t.TempDir()
	others := filepath.Join(path, "backup"+temporarySuffix)
	own := filepath.Join(path, "00000000000000000100"+temporarySuffix)
	settled(t, os.WriteFile(others, nil, 0o644), os.WriteFile(own, nil, 0o644))
	dir, err := OpenSnapshotDir(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if _, err := dir.Load(New(Config{}), 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(others); err != nil {
		t.Errorf("a file that no Save has made: %v", err)
	}
	if _, err := os.Stat(own); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that a Save has left: %v, want it removed", err)
	}
}

// A time so far away that its milliseconds do not fit an int64 is still past or
// future, and not the other one.
func TestExpireAtTimesBeyondMilliseconds(t *testing.T) {
	for _, tt := range []struct {
		now  time.Time
		want int
	}{
		{time.UnixMilli(math.MinInt64).Add(-time.Hour), 0},
		{time.Unix(-1<<62, 0), 0},
		{time.UnixMilli(math.MaxInt64).Add(time.Hour), 1},
		{time.Unix(1<<62, 0), 1},
	} {
		m := New(Config{})
		settled(t, m.Commit(31, 0, 0, 1, 0))
		m.Expire(time.Unix(1e9, 0))
		if got := m.Expire(tt.now); got != tt.want {
			t.Errorf("Expire at %v forgets %d, want %d", tt.now, got, tt.want)
		}
	}
}

// The zero ProducerStateManager is not to be used, but it must not hang: without
// a seed every producer id has the same hash, and no bucket could be split.
func TestZeroManagerDoesNotHang(t *testing.T) {
	var m ProducerStateManager
	for pid := range int64(2000) {
		if err := m.Commit(pid, 0, 0, 1, pid); err != nil {
			t.Fatal(err)
		}
	}
	if m.Len() != 2000 {
		t.Errorf("%d producers", m.Len())
	}
}

// A producer with an open transaction may be parked by a restore although it has
// been active since the last Expire. Its next activity must take it back among
// those that can be forgotten.
func TestParkedByRestoreComesBack(t *testing.T) {
	m := New(Config{Expiration: time.Minute})
	if err := m.CommitBatch(Batch{ProducerID: 31, Count: 1, Transactional: true}, 0); err != nil {
		t.Fatal(err)
	}
	n := restored(t, Config{Expiration: time.Minute}, encoded(t, m))
	if err := n.CommitBatch(Batch{ProducerID: 31, BaseSequence: 1, Count: 1, Transactional: true}, 1); err != nil {
		t.Fatal(err)
	}
	if err := n.ReplayMarker(Marker{ProducerID: 31, Commit: true}, 2); err != nil {
		t.Fatal(err)
	}
	audit(t, n)
	n.Expire(time.Unix(1000, 0))
	if got := n.Expire(time.Unix(2000, 0)); got != 1 {
		t.Errorf("%d expired, want the one whose transaction has ended", got)
	}
}
