package idempotence

import (
	"errors"
	"testing"
)

// TestReservationsSettleInOrder follows one producer through rules 1, 3, 5 and 6
// of pipelined appends.
func TestReservationsSettleInOrder(t *testing.T) {
	m := New(Config{})
	b := func(seq, n int32) Batch { return Batch{ProducerID: 31, BaseSequence: seq, Count: n} }
	a, _, err := m.Reserve(b(0, 1))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := m.Reserve(b(0, 1)); !errors.Is(err, ErrInFlight) {
		t.Fatalf("copy of a reserved batch: %v", err)
	}
	c, _, err := m.Reserve(b(1, 2))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Commit(0); !errors.Is(err, ErrOffsetOrder) {
		t.Fatalf("no room for the first: %v", err)
	}
	if err := c.Commit(1); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Check(31, 0, 1, 2); !errors.Is(err, ErrInFlight) {
		t.Fatalf("held: %v", err)
	}
	if err := a.Commit(0); err != nil {
		t.Fatal(err)
	}
	if res, err := m.Check(31, 0, 1, 2); err != nil || res.Verdict != Duplicate || res.BaseOffset != 1 {
		t.Fatal(res, err)
	}
	if err := a.Commit(0); !errors.Is(err, ErrSettled) {
		t.Fatal(err)
	}
}
