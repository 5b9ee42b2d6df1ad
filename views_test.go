package idempotence

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// This file tests the views: they are copies, of one moment, in the order of producer
// ids.

// TestMaxProducerID: the highest id accepted, whatever the order, and nothing
// that was refused.
func TestMaxProducerID(t *testing.T) {
	play(t, `
		batch pid=7 epoch=0 seq=0 n=1 -> OK base=0
		highest-pid -> 7
		batch pid=3 epoch=0 seq=0 n=1 -> OK base=1
		highest-pid -> 7
		batch pid=9 epoch=0 seq=1 n=1 -> UNKNOWN_PRODUCER
		check pid=9 epoch=0 seq=0 n=1 -> OK
		highest-pid -> 7
		batch pid=9 epoch=0 seq=0 n=1 -> OK base=2
		highest-pid -> 9
	`)
}

// TestViewsAreCopies: writing to what a look gave changes nothing.
func TestViewsAreCopies(t *testing.T) {
	part := play(t, `
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
	`)
	before := stateOf(part.m)
	scribble := func(p ProducerState) {
		for i := range p.Window {
			p.Window[i] = BatchMetadata{9, 9, 9}
		}
		_ = append(p.Window, BatchMetadata{8, 8, 8})
	}
	p, _ := part.m.Producer(31)
	scribble(p)
	for p := range part.m.Producers() {
		scribble(p)
	}
	if diff := cmp.Diff(before, stateOf(part.m)); diff != "" {
		t.Errorf("the state changed with the view (-before +after):\n%s", diff)
	}
	if _, err := part.m.Check(31, 0, 2, 1); err != nil {
		t.Errorf("the next batch: %v", err)
	}
}

// TestViewKeepsItsMoment: a view does not follow what is committed after it.
func TestViewKeepsItsMoment(t *testing.T) {
	part := play(t, `batch pid=31 epoch=0 seq=0 n=1 -> OK base=0`)
	before, _ := part.m.Producer(31)
	if err := part.m.Commit(31, 1, 0, 1, 1); err != nil {
		t.Fatal(err)
	}
	want := ProducerState{ProducerID: 31, Window: []BatchMetadata{{0, 0, 0}}, CurrentTxnFirstOffset: -1, CoordinatorEpoch: -1}
	if diff := cmp.Diff(want, before); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if p, ok := part.m.Producer(32); ok {
		t.Errorf("producer 32 is known as %+v", p)
	}
}

// TestProducersInOrder: Producers goes by id, whatever the order of arrival,
// and across pages.
func TestProducersInOrder(t *testing.T) {
	const n = 3*pageRows + 5
	m := New(Config{})
	for i := range int64(n) {
		pid := i * 7919 % n // n and 7919 have no common factor: every id once
		if err := m.Commit(pid, 0, 0, 1, i); err != nil {
			t.Fatal(err)
		}
	}
	var ids, want []int64
	for p := range m.Producers() {
		ids = append(ids, p.ProducerID)
	}
	for pid := range int64(n) {
		want = append(want, pid)
	}
	if diff := cmp.Diff(want, ids); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if m.Len() != n {
		t.Errorf("Len is %d, want %d", m.Len(), n)
	}
}

// TestProducersKeepTheirMoment: a walk sees the state of the moment it begins,
// although its own body commits new batches and new producers; a second walk
// over the same sequence sees the state anew, and a walk may be left.
func TestProducersKeepTheirMoment(t *testing.T) {
	m := New(Config{})
	const n = 2*pageRows + 3
	for pid := range int64(n) {
		if err := m.Commit(pid, 0, 0, 1, pid); err != nil {
			t.Fatal(err)
		}
	}
	all := m.Producers()
	seen := int64(0)
	for p := range all {
		want := ProducerState{ProducerID: seen, Window: []BatchMetadata{{0, 0, seen}}, CurrentTxnFirstOffset: -1, CoordinatorEpoch: -1}
		if diff := cmp.Diff(want, p); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
		for pid := int64(n) - 1; pid > p.ProducerID; pid -= pageRows {
			if err := m.Commit(pid, int16(seen)+1, 0, 1, m.EndOffset()); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Commit(n+seen, 0, 0, 1, m.EndOffset()); err != nil {
			t.Fatal(err)
		}
		seen++
		audit(t, m)
	}
	if seen != n {
		t.Errorf("the walk saw %d producers, want the %d of its beginning", seen, n)
	}
	if again := len(slices.Collect(all)); again != 2*n {
		t.Errorf("the second walk saw %d producers, want %d", again, 2*n)
	}
	for range all {
		break
	}
	if m.Len() != 2*n {
		t.Errorf("Len is %d, want %d", m.Len(), 2*n)
	}
}

// TestReserve_StateSaysInFlight: what is in flight can be looked at.
func TestReserve_StateSaysInFlight(t *testing.T) {
	m := New(Config{})
	settled(t, m.Commit(31, 0, 0, 1, 0))
	settled(t, m.Commit(32, 0, 0, 1, 1))
	a, b := reserved(t, m, 1, 1), reserved(t, m, 2, 1)
	settled(t, b.Commit(3))
	want := map[int64]int{31: 2, 32: 0}
	for p := range m.Producers() {
		if p.InFlight != want[p.ProducerID] {
			t.Errorf("producer %d has %d in flight, want %d", p.ProducerID, p.InFlight, want[p.ProducerID])
		}
	}
	if p, _ := m.Producer(31); p.InFlight != 2 {
		t.Errorf("producer 31 has %d in flight, want 2", p.InFlight)
	}
	settled(t, a.Commit(2))
	if p, _ := m.Producer(31); p.InFlight != 0 {
		t.Errorf("producer 31 has %d in flight after all landed", p.InFlight)
	}
}

// TestForgettingIsCounted tells the two ways to be forgotten apart.
func TestForgettingIsCounted(t *testing.T) {
	m := New(Config{Expiration: time.Second, MaxProducers: 2})
	for pid := range int64(5) {
		if err := m.Commit(pid, 0, 0, 1, pid); err != nil {
			t.Fatal(err)
		}
	}
	m.Expire(time.Unix(0, 0))
	m.Expire(time.Unix(1, 0))
	want := Stats{Accepted: 5, Evicted: 3, Expired: 2}
	if diff := cmp.Diff(want, m.Stats()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := m.MaxProducerID(); got != 4 {
		t.Errorf("MaxProducerID is %d after all are forgotten, want 4", got)
	}
}
