package idempotence

import (
	"bytes"
	"testing"
)

// TestTruncate has what is taken back and what is exact. Where it is not, the
// partition of the transcripts rebuilds the memory from its log, as an embedder
// must, and the state after the line is that of the rebuild.
func TestTruncate(t *testing.T) {
	for _, tt := range []struct{ name, trace string }{
		{"at or past the end, nothing happens", `
			batch pid=31 epoch=0 seq=0 n=3 -> OK base=0
			truncate to=3 -> exact
			truncate to=9 -> exact
			window pid=31 -> epoch=0 0..2@0
			end -> 3
		`},
		{"the newest batches go, and their sequences are next again", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=2 -> OK base=1
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			truncate to=1 -> exact
			window pid=31 -> epoch=0 0..0@0
			end -> 1
			batch pid=31 epoch=0 seq=3 n=1 -> OUT_OF_ORDER expected=1
			batch pid=31 epoch=0 seq=1 n=2 -> OK base=1
		`},
		{"a batch across the cut goes whole", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=5 -> OK base=1
			truncate to=5 -> exact
			window pid=31 -> epoch=0 0..0@0
			end -> 5
		`},
		{"a producer of which nothing is left is unknown", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
			truncate to=1 -> exact
			window pid=32 -> none
			producers -> 1
			highest-pid -> 32
			batch pid=32 epoch=0 seq=1 n=1 -> UNKNOWN_PRODUCER
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
		`},
		{"a window that has dropped batches cannot be filled up again", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 -> OK base=1
			batch pid=31 epoch=0 seq=2 n=1 -> OK base=2
			batch pid=31 epoch=0 seq=3 n=1 -> OK base=3
			batch pid=31 epoch=0 seq=4 n=1 -> OK base=4
			batch pid=31 epoch=0 seq=5 n=1 -> OK base=5
			truncate to=5 -> inexact
			window pid=31 -> epoch=0 0..0@0 1..1@1 2..2@2 3..3@3 4..4@4
		`},
		{"but one that did not drop any can, and another's can be left alone", `
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
		{"a transaction that began past the cut is not open any more", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=1
			txn pid=31 -> open@1 coord=none
			truncate to=1 -> exact
			txn pid=31 -> none coord=none
		`},
		{"and its producer can be forgotten again, although its turn had come before", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=1
			expire now=0 -> 0
			expire now=100 -> 0
			truncate to=1 -> exact
			expire now=101 -> 1
		`},
		{"a marker that was cut off cannot be taken back", `
			batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
			replay-marker pid=31 epoch=0 coord=3 commit base=1
			truncate to=1 -> inexact
			txn pid=31 -> open@0 coord=none
		`},
		{"a marker that stays does no harm", `
			batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
			replay-marker pid=31 epoch=0 coord=3 commit base=1
			batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=2
			truncate to=2 -> exact
			txn pid=31 -> none coord=3
			window pid=31 -> epoch=0 0..0@0
		`},
		{"producers that were forgotten past the cut would be there in a rebuild", `
			ttl=100
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			expire now=0 -> 0
			batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
			expire now=100 -> 1
			truncate to=1 -> inexact
		`},
		{"to nothing, and below", `
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
			truncate to=-5 -> exact
			end -> 0
			producers -> 0
			highest-pid -> 31
			batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		`},
	} {
		t.Run(tt.name, func(t *testing.T) { play(t, tt.trace) })
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
