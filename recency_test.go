package idempotence

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// This file tests in which order producers are active, and the times of their
// activity.

// TestExpireTimes: any time will do, as the clocks of tests begin anywhere, and
// LastActivity gives back what it was.
func TestExpireTimes(t *testing.T) {
	for _, start := range []time.Time{
		{},
		time.Time{}.Add(12345 * time.Nanosecond),
		time.Unix(0, 0),
		time.Unix(0, -1),
		time.UnixMilli(-1),
		time.Date(1600, 1, 1, 0, 0, 0, 1, time.UTC),
		time.Date(2026, 2, 14, 12, 0, 0, 123_456_789, time.FixedZone("elsewhere", 3600)),
		time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC),
		time.Now(), // with a monotonic reading, which must not matter
	} {
		m := New(Config{Expiration: time.Microsecond})
		if err := m.Commit(31, 0, 0, 1, 0); err != nil {
			t.Fatal(err)
		}
		m.Expire(start)
		if p, _ := m.Producer(31); !p.LastActivity.Equal(start) || p.LastActivity.Location() != time.UTC {
			t.Errorf("LastActivity is %v, want %v", p.LastActivity, start.UTC())
		}
		if n := m.Expire(start.Add(999)); n != 0 {
			t.Errorf("from %v on: forgotten one nanosecond early", start)
		}
		if n := m.Expire(start.Add(1000)); n != 1 {
			t.Errorf("from %v on: not forgotten in time", start)
		}
	}
}

// TestInstants: a snapshot may hold any time at all, and adding to the last one
// stays there.
func TestInstants(t *testing.T) {
	last := instant{math.MaxInt64, 999_999}
	for _, tt := range []struct {
		from instant
		add  time.Duration
		want instant
	}{
		{instant{5, 999_999}, 1, instant{6, 0}},
		{instant{-1, 999_999}, 1, instant{0, 0}},
		{instant{-1, 0}, 2*time.Millisecond + 3, instant{1, 3}},
		{instant{math.MinInt64, 0}, 0, instant{math.MinInt64, 0}},
		{instant{math.MaxInt64, 0}, 999_999, last},
		{last, 1, last},
		{instant{math.MaxInt64 - 1, 0}, math.MaxInt64, last},
	} {
		if got := tt.from.add(tt.add); got != tt.want {
			t.Errorf("%+v and %d ns is %+v, want %+v", tt.from, tt.add, got, tt.want)
		}
	}
}

// TestTicksAreRecycled: the times of activity take room for as many as there
// are producers, however often Expire is called.
func TestTicksAreRecycled(t *testing.T) {
	const producers = 20
	m := New(Config{Expiration: 50 * time.Second})
	now := time.Unix(1000, 0)
	next := [producers]int32{}
	for i := range 100_000 {
		pid := int64(i) * int64(i) % producers // some often, some seldom, some never again
		if m.Commit(pid, 0, next[pid], 1, m.EndOffset()) != nil {
			next[pid] = 0
			if err := m.Commit(pid, 0, 0, 1, m.EndOffset()); err != nil {
				t.Fatal(err)
			}
		}
		next[pid]++
		now = now.Add(time.Second)
		m.Expire(now)
		if n := len(m.recency.ticks); n > producers+1 {
			t.Fatalf("%d ticks for %d producers after %d calls", n, producers, i+1)
		}
	}
	audit(t, m)
}

// TestReleasedInTheirOrder: a producer that was passed over, for what it had in
// flight, counts as active when its reservation ends. Several stand in the order in
// which theirs ended, and in that of their reservations if all end at once.
//
//	producer  1  2      active in this order, passed over in this order
//	idle      3  2  1   if the reservation of 2 ends before that of 1
func TestReleasedInTheirOrder(t *testing.T) {
	type settler struct {
		settle func(m *ProducerStateManager, first, second *Reservation) error
		want   []int64
	}
	for name, tt := range map[string]settler{
		"the older one first": {func(_ *ProducerStateManager, first, second *Reservation) error {
			return errors.Join(first.Abort(), second.Abort())
		}, []int64{3, 1, 2}},
		"the newer one first": {func(_ *ProducerStateManager, first, second *Reservation) error {
			return errors.Join(second.Abort(), first.Abort())
		}, []int64{3, 2, 1}},
		"the older one, then all": {func(m *ProducerStateManager, first, _ *Reservation) error {
			err := first.Abort()
			m.AbandonReservations()
			return err
		}, []int64{3, 1, 2}},
		"the newer one, then all": {func(m *ProducerStateManager, _, second *Reservation) error {
			err := second.Abort()
			m.AbandonReservations()
			return err
		}, []int64{3, 2, 1}},
		"all at once": {func(m *ProducerStateManager, _, _ *Reservation) error {
			m.AbandonReservations()
			return nil
		}, []int64{3, 1, 2}},
		"cut off": {func(m *ProducerStateManager, _, _ *Reservation) error {
			m.Truncate(m.EndOffset())
			return nil
		}, []int64{3, 1, 2}},
	} {
		for _, times := range []int{1, 2} {
			m := New(Config{MaxProducers: 2})
			commit := func(pid int64) {
				t.Helper()
				if err := m.Commit(pid, 0, 0, 1, m.EndOffset()); err != nil {
					t.Fatal(err)
				}
			}
			reserve := func(pid int64) *Reservation {
				t.Helper()
				r, _, err := m.Reserve(Batch{ProducerID: pid, BaseSequence: 1, Count: 1})
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			commit(1)
			if times == 2 {
				m.Expire(time.Unix(1000, 0))
			}
			commit(2)
			m.Expire(time.Unix(2000, 0))
			first, second := reserve(1), reserve(2)
			commit(3) // one too many: it passes over both
			if err := tt.settle(m, first, second); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			audit(t, m)
			rows, err := auditList(m, "idle", m.recency.idle)
			if err != nil {
				t.Fatal(err)
			}
			var idle []int64
			for _, row := range rows {
				idle = append(idle, m.table.at(row).id)
			}
			if diff := cmp.Diff(tt.want, idle); diff != "" {
				t.Errorf("%s, active at %d times (-want +got):\n%s", name, times, diff)
			}
		}
	}
}

// TestPinnedByRestoreComesBack: a restore pins a producer with an open transaction, also
// if it has been active since the last Expire. Once the transaction has ended, the
// producer can be forgotten again.
func TestPinnedByRestoreComesBack(t *testing.T) {
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
