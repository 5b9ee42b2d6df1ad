package idempotence

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// This file tests that a state survives: that what is restored is what was, down
// to what it will do next, and that nothing but a whole snapshot is restored.

// restored returns a new manager with the state of a snapshot.
func restored(t testing.TB, cfg Config, snapshot []byte) *ProducerStateManager {
	t.Helper()
	m := New(cfg)
	if err := m.Restore(bytes.NewReader(snapshot)); err != nil {
		t.Fatal(err)
	}
	return m
}

// TestRoundTrip: what is restored is what was, and gives the same bytes.
func TestRoundTrip(t *testing.T) {
	for _, n := range []int{1, 2, 63, 64, 65, 500, 5000} {
		for _, m := range []*ProducerStateManager{scattered(n)} {
			snapshot := encoded(t, m)
			again := restored(t, Config{}, snapshot)
			audit(t, again)
			if diff := cmp.Diff(stateOf(m), stateOf(again)); diff != "" {
				t.Fatalf("%d producers: mismatch (-want +got)\n%s", n, diff)
			}
			if !bytes.Equal(snapshot, encoded(t, again)) {
				t.Fatalf("%d producers: other bytes", n)
			}
		}
	}
}
