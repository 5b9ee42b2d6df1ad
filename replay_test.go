package idempotence

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file tests what a replay leaves in the manager. How a segment is taken
// apart is tested in segment_test.go.

// encodeEntry encodes an entry of a log as a record batch, without records, as
// compaction may leave it.
func encodeEntry(l logged) []byte {
	if k := l.marker; k != nil {
		b := markerBatch(l.base, k.ProducerID, k.Epoch, k.CoordinatorEpoch, k.Commit)
		if k.CoordinatorEpoch < 0 {
			b.records, b.payload = 0, nil
		}
		return b.encode()
	}
	b := testBatch{base: l.base, delta: l.batch.Count - 1, pid: l.batch.ProducerID, epoch: l.batch.Epoch, seq: l.batch.BaseSequence}
	if l.batch.Transactional {
		b.attrs = 0x10
	}
	return b.encode()
}

// encodeLog encodes a log, and returns where its entries begin.
func encodeLog(entries []logged) (log []byte, starts []int) {
	for _, l := range entries {
		starts = append(starts, len(log))
		log = append(log, encodeEntry(l)...)
	}
	return log, starts
}

// TestReplayLog replays one segment of everything there is, and looks at the
// producers after each entry.
func TestReplayLog(t *testing.T) {
	transactional := func(b testBatch) testBatch {
		b.attrs |= 0x10
		return b
	}
	compacted := dataBatch(20, 31, 0, 8, 1)
	compacted.delta = 5
	empty := dataBatch(26, 31, 0, 14, 0)
	empty.delta = 2
	leaderChange := controlBatch(40, NoProducerID, -1, []byte{0, 0, 0, 2}, []byte{7})
	emptyMarker := markerBatch(41, 33, 7, 1, true)
	emptyMarker.records, emptyMarker.payload = 0, nil
	alien := dataBatch(50, -9, 0, 0, 2)
	negative := dataBatch(52, 31, -2, 0, 2)
	badMarker := markerBatch(54, 31, -3, 1, true)
	severalMarkers := markerBatch(55, 34, 1, 4, true)
	severalMarkers.delta = 2

	m := New(Config{})
	var log []byte
	for _, tt := range []struct {
		reason string
		entry  []byte
		pid    int64
		want   string
		end    int64
	}{
		{"the older formats know no producers", legacyMessage(4, 1, 0, []byte("old")), 31, "none", 5},
		{"a first batch", dataBatch(5, 31, 0, 0, 3).encode(), 31, "epoch=0 0..2@5", 8},
		{"a batch without a producer", dataBatch(8, NoProducerID, -1, -1, 2).encode(), 31, "epoch=0 0..2@5", 10},
		{"compaction has left a gap in sequences and offsets", compacted.encode(), 31, "epoch=0 0..2@5 8..13@20", 26},
		{"an empty batch still has its sequences", empty.encode(), 31, "epoch=0 0..2@5 8..13@20 14..16@26", 29},
		{"a transaction", transactional(dataBatch(29, 32, 4, 0, 1)).encode(), 32, "epoch=4 0..0@29 open@29", 30},
		{"an abort with a newer epoch", markerBatch(30, 32, 5, 3, false).encode(), 32, "epoch=5 coord=3", 31},
		{"a batch of a coordinator opens one as well", transactional(dataBatch(31, 32, 5, -1, 2)).encode(), 32, "epoch=5 coord=3 open@31", 33},
		{"a commit of an older coordinator", markerBatch(33, 32, 5, 2, true).encode(), 32, "epoch=5 coord=3", 34},
		{"a control record that is no producer's", leaderChange.encode(), 31, "epoch=0 0..2@5 8..13@20 14..16@26", 41},
		{"a marker that compaction has emptied", emptyMarker.encode(), 33, "epoch=7", 42},
		{"an older epoch after a newer", dataBatch(42, 32, 4, 1, 2).encode(), 32, "epoch=5 coord=3", 44},
		{"a newer epoch, in the middle of its sequences", dataBatch(44, 31, 2, 9, 1).encode(), 31, "epoch=2 9..9@44", 45},
		{"an impossible producer id", alien.encode(), -9, "none", 52},
		{"a negative epoch", negative.encode(), 31, "epoch=2 9..9@44", 54},
		{"a marker of a negative epoch", badMarker.encode(), 31, "epoch=2 9..9@44", 55},
		{"a control batch of three offsets takes up all of them (F10)", severalMarkers.encode(), 34, "epoch=1 coord=4", 58},
		{"a marker of a leap in offsets", markerBatch(math.MaxInt64-1, 31, 2, 0, true).encode(), 31, "epoch=2 9..9@44 coord=0", math.MaxInt64},
	} {
		log = append(log, tt.entry...)
		res, err := m.ReplayLog(bytes.NewReader(tt.entry))
		audit(t, m)
		if err != nil || res.Bytes != int64(len(tt.entry)) || res.EndOffset != tt.end || m.EndOffset() != tt.end {
			t.Fatalf("%s: %+v, %v, and EndOffset %d, want %d", tt.reason, res, err, m.EndOffset(), tt.end)
		}
		got := "none"
		if p, ok := m.Producer(tt.pid); ok {
			got = describeAll(p)
		}
		if got != tt.want {
			t.Fatalf("%s:\n got %s\nwant %s", tt.reason, got, tt.want)
		}
	}
	whole := New(Config{})
	res, err := whole.ReplayLog(bytes.NewReader(log))
	if err != nil {
		t.Error(err)
	}
	wantResult := ReplayResult{Bytes: int64(len(log)), EndOffset: math.MaxInt64, Batches: 10, Markers: 6, Skipped: 2}
	if diff := cmp.Diff(wantResult, res); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(stateOf(m), stateOf(whole)); diff != "" {
		t.Errorf("entry by entry, and as a whole (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(Stats{AbortedRanges: 1}, whole.Stats()); diff != "" {
		t.Errorf("a replay is no answer (-want +got):\n%s", diff)
	}
}

// describeAll is describe with the transaction.
func describeAll(p ProducerState) string {
	s := describe(p)
	if p.CoordinatorEpoch >= 0 {
		s += fmt.Sprintf(" coord=%d", p.CoordinatorEpoch)
	}
	if p.CurrentTxnFirstOffset >= 0 {
		s += fmt.Sprintf(" open@%d", p.CurrentTxnFirstOffset)
	}
	return s
}

// TestReplayLogEnds: of a log that is cut, or damaged, at any byte, what comes
// before is applied and nothing of the rest, and the error says where that is.
// VerifyLog says the same.
func TestReplayLogEnds(t *testing.T) {
	log, ends := smallLog()
	states := map[int]observed{}
	for _, end := range append([]int{0}, ends...) {
		m := New(Config{})
		if _, err := m.ReplayLog(bytes.NewReader(log[:end])); err != nil {
			t.Fatal(err)
		}
		states[end] = stateOf(m)
	}
	try := func(p []byte, good int, reason error) {
		t.Helper()
		m := New(Config{})
		res, err := m.ReplayLog(bytes.NewReader(p))
		audit(t, m)
		if diff := cmp.Diff(states[good], stateOf(m)); diff != "" {
			t.Fatalf("good up to %d of %d (-want +got):\n%s", good, len(p), diff)
		}
		verified, verifyErr := VerifyLog(bytes.NewReader(p))
		if verified != res || fmt.Sprint(verifyErr) != fmt.Sprint(err) {
			t.Fatalf("VerifyLog: %+v, %v, ReplayLog: %+v, %v", verified, verifyErr, res, err)
		}
		if int(res.Bytes) != good || res.EndOffset != states[good].EndOffset {
			t.Fatalf("good up to %d, offset %d: %+v", good, states[good].EndOffset, res)
		}
		var e *LogError
		if !errors.Is(err, reason) || reason != nil && (!errors.As(err, &e) || e.Position != res.Bytes || e.Offset != res.EndOffset) {
			t.Fatalf("good up to %d: %v, want %v there", good, err, reason)
		}
	}
	for cut := range log {
		reason := ErrTornTail
		if slices.Contains(ends, cut) || cut == 0 {
			reason = nil
		}
		try(log[:cut], lastEnd(ends, cut), reason)
	}
	for at := range log {
		start := lastEnd(ends, at)
		field := at - start
		if field < 8 || log[start+16] == 2 && field >= 12 && field < 16 {
			continue // offset and leader epoch, which no checksum covers
		}
		reason := ErrCorruptLog
		if start == ends[len(ends)-2] && field > 16 {
			reason = ErrTornTail // the last batch, with a wrong checksum
		}
		p := slices.Clone(log)
		p[at] ^= 0x40
		try(p, start, reason)
	}
	try(append(slices.Clone(log), make([]byte, 300)...), len(log), ErrTornTail)

	m := New(Config{})
	disk := errors.New("disk on fire")
	_, err := m.ReplayLog(io.MultiReader(bytes.NewReader(log[:ends[2]]), iotest.ErrReader(disk)))
	if diff := cmp.Diff(states[ends[2]], stateOf(m)); diff != "" || !errors.Is(err, disk) {
		t.Errorf("a failing read: %v (-want +got):\n%s", err, diff)
	}
}

// TestReplayLogEmpty: a log without anything leaves everything as it was.
func TestReplayLogEmpty(t *testing.T) {
	m := New(Config{})
	m.Advance(7)
	res, err := m.ReplayLog(bytes.NewReader(nil))
	if err != nil || res != (ReplayResult{EndOffset: 7}) || m.EndOffset() != 7 {
		t.Errorf("%+v, %v, and EndOffset %d", res, err, m.EndOffset())
	}
}

// TestF10_MarkerBatchOfSeveralOffsets: a Truncate into a control batch cuts the
// marker off, wherever in the batch it cuts.
func TestF10_MarkerBatchOfSeveralOffsets(t *testing.T) {
	several := markerBatch(10, 31, 1, 4, true)
	several.delta = 2
	for to, want := range map[int64]bool{10: false, 11: false, 12: false, 13: true} {
		m := New(Config{})
		if _, err := m.ReplayLog(bytes.NewReader(several.encode())); err != nil {
			t.Fatal(err)
		}
		if got := m.Truncate(to); got != want || m.EndOffset() != to {
			t.Errorf("Truncate(%d) is exact: %t, and EndOffset %d, want %t", to, got, m.EndOffset(), want)
		}
	}
}

// TestReplayLogBeginsBehind: what lies before the first entry of a log stays
// unknown, also if that entry says nothing about producers. What lies before later
// entries does not.
func TestReplayLogBeginsBehind(t *testing.T) {
	leaderChange := func(base int64) []byte {
		return controlBatch(base, NoProducerID, -1, []byte{0, 0, 0, 2}, []byte{7}).encode()
	}
	for _, tt := range []struct {
		reason string
		log    [][]byte
		want   int64
	}{
		{"from where something was in flight", [][]byte{leaderChange(1)}, 2},
		{"from there, over a gap", [][]byte{leaderChange(1), leaderChange(5)}, 6},
		{"from behind it", [][]byte{leaderChange(5)}, 1},
		{"from behind it, to a batch", [][]byte{leaderChange(5), dataBatch(6, 32, 0, 0, 1).encode()}, 1},
	} {
		m := New(Config{})
		if err := m.Commit(31, 0, 0, 1, 0); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Reserve(Batch{ProducerID: 31, BaseSequence: 1, Count: 1}); err != nil {
			t.Fatal(err)
		}
		m.AbandonReservations()
		if _, err := m.ReplayLog(bytes.NewReader(bytes.Join(tt.log, nil))); err != nil {
			t.Fatal(err)
		}
		if got := m.Snapshot().EndOffset(); got != tt.want {
			t.Errorf("%s: a snapshot ends at %d, want %d", tt.reason, got, tt.want)
		}
	}
}

// TestReplayIsRight: a log of anything, replayed batch by batch, gives what the
// chronicle has of it.
func TestReplayIsRight(t *testing.T) {
	checkHistories(t, someConfig, replays, markers, coordinators)
}

// TestReplayTwice: a replay that overlaps what is known does no harm. A log read
// twice is as a log read once, and so is one read again from any entry, by
// Replay or as a segment. (Nobody is forgotten here: a producer that was would
// come back.)
func TestReplayTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawn{t}
		s := newSurvivor(t, c, Config{Expiration: -1, UnknownProducer: AcceptAny})
		s.run(slices.Concat(commits, replays, markers, coordinators), 1+c.pick(40))
		want := s.c.state()
		entries := s.c.entries()
		log, starts := encodeLog(entries)
		fresh := New(s.c.cfg)
		if res, err := fresh.ReplayLog(bytes.NewReader(log)); err != nil || len(entries) > 0 && res.EndOffset != s.c.end {
			s.fail("%+v, %v", res, err)
		}
		if diff := cmp.Diff(want, stateOf(fresh)); diff != "" {
			s.fail("a replay of the segment (-want +got):\n%s", diff)
		}
		for i, start := range starts {
			if _, err := s.m.ReplayLog(bytes.NewReader(log[start:])); err != nil {
				s.fail("from entry %d: %v", i, err)
			}
			if diff := cmp.Diff(want, stateOf(s.m)); diff != "" {
				s.fail("replayed again from entry %d on (-want +got):\n%s", i, diff)
			}
		}
		audit(t, s.m)
	})
}

// TestReplayEqualsLive: what a leader has committed, and what a replay of its
// log gives, is the same in every field, the hidden ones that decide about a
// later Truncate included.
func TestReplayEqualsLive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawn{t}
		cfg := Config{MaxProducers: c.pick(4), UnknownProducer: AcceptAny}
		live := newSurvivor(t, c, cfg)
		live.run(slices.Concat(commits, markers), 1+c.pick(40))
		log, _ := encodeLog(live.c.entries())
		replayed := New(cfg)
		if _, err := replayed.ReplayLog(bytes.NewReader(log)); err != nil {
			live.fail("%v", err)
		}
		if diff := cmp.Diff(stateOf(live.m), stateOf(replayed)); diff != "" {
			live.fail("(-live +replayed):\n%s", diff)
		}
		to := live.c.end - int64(c.pick(8))
		if a, b := live.m.Truncate(to), replayed.Truncate(to); a != b {
			live.fail("truncate to=%d is exact live: %t, replayed: %t", to, a, b)
		}
		if diff := cmp.Diff(stateOf(live.m), stateOf(replayed)); diff != "" {
			live.fail("cut to %d (-live +replayed):\n%s", to, diff)
		}
	})
}

// TestReplayRefuses: what cannot stand in a log is refused, with the facts, and
// changes nothing.
func TestReplayRefuses(t *testing.T) {
	m := New(Config{})
	if err := m.Replay(Batch{ProducerID: 31, Epoch: 3, Count: 2}, 5); err != nil {
		t.Fatal(err)
	}
	before := stateOf(m)
	good := Batch{ProducerID: 31, Epoch: 3, BaseSequence: 2, Count: 2}
	with := func(change func(*Batch)) Batch {
		b := good
		change(&b)
		return b
	}
	for _, tt := range []struct {
		reason string
		batch  Batch
		base   int64
		want   error
	}{
		{"a producer id below -1", with(func(b *Batch) { b.ProducerID = -2 }), 7, ErrInvalidBatch},
		{"a negative epoch", with(func(b *Batch) { b.Epoch = -1 }), 7, ErrInvalidBatch},
		{"a sequence below the one of a coordinator", with(func(b *Batch) { b.BaseSequence = -2 }), 7, ErrInvalidBatch},
		{"no records", with(func(b *Batch) { b.Count = 0 }), 7, ErrInvalidBatch},
		{"a negative offset", good, -1, ErrOffsetOrder},
		{"no room for the end offset", good, math.MaxInt64 - 1, ErrOffsetOrder},
		{"a negative offset, without a producer", Batch{ProducerID: NoProducerID, Count: 1}, -1, ErrOffsetOrder},
	} {
		err := m.Replay(tt.batch, tt.base)
		var e *BatchError
		if !errors.Is(err, tt.want) || !errors.As(err, &e) || e.Batch != tt.batch || e.BaseOffset != tt.base {
			t.Errorf("%s: %#v, want %v", tt.reason, err, tt.want)
		}
	}
	for _, tt := range []struct {
		reason string
		marker Marker
		offset int64
		want   error
	}{
		{"a marker without a producer", Marker{ProducerID: NoProducerID}, 7, ErrInvalidBatch},
		{"a marker of a negative epoch", Marker{ProducerID: 31, Epoch: -1}, 7, ErrInvalidBatch},
		{"a marker at a negative offset", Marker{ProducerID: 31, Epoch: 4}, -1, ErrOffsetOrder},
		{"a marker at the largest offset", Marker{ProducerID: 31, Epoch: 4}, math.MaxInt64, ErrOffsetOrder},
	} {
		err := m.ReplayMarker(tt.marker, tt.offset)
		var e *MarkerError
		if !errors.Is(err, tt.want) || !errors.As(err, &e) || e.Offset != tt.offset || e.Marker != tt.marker {
			t.Errorf("%s: %#v, want %v", tt.reason, err, tt.want)
		}
	}
	if diff := cmp.Diff(before, stateOf(m)); diff != "" {
		t.Errorf("a refusal changed the state (-before +after):\n%s", diff)
	}
	if err := m.Replay(good, math.MaxInt64-2); err != nil || m.EndOffset() != math.MaxInt64 {
		t.Errorf("a batch that just fits: %v, EndOffset %d", err, m.EndOffset())
	}
	audit(t, m)
}

// TestReplayDoesNotAllocate for a producer that is known.
func TestReplayDoesNotAllocate(t *testing.T) {
	m := New(Config{})
	b := Batch{ProducerID: 31, Count: 1}
	offset := int64(0)
	replay := func() {
		if err := m.Replay(b, offset); err != nil {
			t.Fatal(err)
		}
		b.BaseSequence, offset = nextSequence(b.BaseSequence), offset+1
	}
	replay()
	if n := testing.AllocsPerRun(100, replay); n != 0 {
		t.Errorf("%v allocations a batch", n)
	}
}

// segmentOf returns a segment of batches of 1 KiB each, of the given number of
// producers in turn.
func segmentOf(batches, producers int) []byte {
	var log []byte
	for i := range batches {
		b := testBatch{base: int64(i) * 10, delta: 9, records: 10, pid: int64(i % producers), seq: int32(i / producers * 10)}
		b.payload = bytes.Repeat([]byte{byte(i), byte(i >> 8), 31}, 321)
		log = append(log, b.encode()...)
	}
	return log
}

// BenchmarkReplayLog reports as x-of-crc how fast a segment of batches of 1 KiB
// is replayed, as a part of the speed of nothing but a CRC-32C over the same
// bytes, measured in turn with it.
func BenchmarkReplayLog(b *testing.B) {
	log := segmentOf(32<<10, 1000)
	b.ReportAllocs()
	b.ResetTimer()
	var replay, crc time.Duration
	for range b.N {
		start := time.Now()
		if _, err := New(Config{}).ReplayLog(bytes.NewReader(log)); err != nil {
			b.Fatal(err)
		}
		replay += time.Since(start)
		start = time.Now()
		crc32.Checksum(log, castagnoli)
		crc += time.Since(start)
	}
	b.ReportMetric(crc.Seconds()/replay.Seconds(), "x-of-crc")
}

// BenchmarkReplay reports how many batches a second are replayed from their
// headers alone, and as x-of-commit the cost of one as a multiple of the cost of
// a Commit, measured in turn with it on the same state.
func BenchmarkReplay(b *testing.B) {
	forCounts(b, func(b *testing.B, n int) {
		m, order := full(n)
		offset, seq := m.EndOffset(), int32(WindowSize)
		round := func(apply func(Batch, int64) error) time.Duration {
			start := time.Now()
			for done := 0; done < max(n, 1000); done += n {
				for _, pid := range order {
					if err := apply(Batch{ProducerID: pid, BaseSequence: seq, Count: 1}, offset); err != nil {
						b.Fatal(err)
					}
					offset++
				}
				seq = nextSequence(seq)
			}
			return time.Since(start)
		}
		var replay, commit time.Duration
		b.ResetTimer()
		for done := 0; done < b.N; done += max(n, 1000) {
			replay += round(m.Replay)
			b.StopTimer()
			commit += round(m.CommitBatch)
			b.StartTimer()
		}
		batches := (b.N + max(n, 1000) - 1) / max(n, 1000) * max(n, 1000)
		b.ReportMetric(float64(batches)/replay.Seconds(), "batches/s")
		b.ReportMetric(replay.Seconds()/commit.Seconds(), "x-of-commit")
	})
}

// A batch that begins inside the newest batch of its producer cannot be in the log too.
// Remembered, it would let an older batch reach past the end that Truncate leaves, and
// the snapshot would not restore.
func TestReplayInsideNewestBatch(t *testing.T) {
	m := New(Config{UnknownProducer: AcceptAny})
	for _, step := range []struct {
		b    Batch
		base int64
	}{
		{Batch{ProducerID: 31, BaseSequence: 0, Count: 10}, 1},
		{Batch{ProducerID: 31, BaseSequence: 10, Count: 2}, 4},
	} {
		if err := m.Replay(step.b, step.base); err != nil {
			t.Fatal(err)
		}
	}
	if p, _ := m.Producer(31); len(p.Window) != 1 || p.Window[0].BaseOffset != 1 {
		t.Errorf("the window is %+v, want the batch at 1", p.Window)
	}
	m.Truncate(8)
	var buf bytes.Buffer
	if _, err := m.Snapshot().WriteTo(&buf); err != nil {
		t.Fatal(err)
	}
	if err := New(Config{}).Restore(&buf); err != nil {
		t.Errorf("Restore of the snapshot: %v", err)
	}
}
