package segment_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

// open opens the log with a manager to replay it.
func open(t *testing.T, dir string) (*segment.Log, *idempotence.ProducerStateManager) {
	t.Helper()
	m := idempotence.New(idempotence.Config{})
	l, err := openAndReplay(dir, m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, m
}

func openAndReplay(dir string, m *idempotence.ProducerStateManager) (*segment.Log, error) {
	l, err := segment.Open(dir, segment.Options{})
	if err != nil {
		return nil, err
	}
	return l, l.Replay(0, m.ReplayLog)
}

// replayed returns the base offsets that m remembers of the producer of fill.
func replayed(m *idempotence.ProducerStateManager) (bases []int64) {
	p, _ := m.Producer(7)
	for _, b := range p.Window {
		bases = append(bases, b.BaseOffset)
	}
	return bases
}

func appendBatch(t *testing.T, l *segment.Log, p []byte) int64 {
	t.Helper()
	b := &segment.Batch{Header: header(t, p), Bytes: p}
	if err := l.Append([]*segment.Batch{b}); err != nil {
		t.Fatal(err)
	}
	return b.Header.BaseOffset
}

// fill appends batches of one, two, three, ... records, sequence numbers in
// step with offsets, and rolls after each segment of them.
func fill(t *testing.T, l *segment.Log, batches, perSegment int) {
	t.Helper()
	for i := range batches {
		if i > 0 && i%perSegment == 0 {
			if err := l.Roll(); err != nil {
				t.Fatal(err)
			}
		}
		values := make([]string, i+1)
		appendBatch(t, l, segmenttest.Batch(7, 0, int32(l.End()), values...))
	}
}

func header(t *testing.T, p []byte) idempotence.BatchHeader {
	t.Helper()
	_, h, err := idempotence.ParseBatch(p)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func wantEqual[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s = %v, want %v", what, got, want)
	}
}

// What the broker fills in must not break the producer's checksum, and nothing
// else may change.
func TestAppendFillsInOffsetOnly(t *testing.T) {
	l, _ := open(t, t.TempDir())
	appendBatch(t, l, segmenttest.Batch(7, 0, 0, "a", "b"))
	sent := segmenttest.Batch(7, 0, 2, "c")
	wantEqual(t, "base offset", appendBatch(t, l, bytes.Clone(sent)), 2)

	stored, err := l.Read(2, 1)
	if err != nil {
		t.Fatal(err)
	}
	h := header(t, stored)
	wantEqual(t, "stored base offset", h.BaseOffset, 2)
	if err := h.VerifyCRC(stored); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(stored[16:], sent[16:]) || !bytes.Equal(stored[8:12], sent[8:12]) {
		t.Error("the batch was changed beyond base offset and leader epoch")
	}
}

func TestReadAcrossSegments(t *testing.T) {
	l, _ := open(t, t.TempDir())
	fill(t, l, 9, 3) // batches begin at 0 1 3 | 6 10 15 | 21 28 36, the end is 45
	wantEqual(t, "end", l.End(), 45)

	for offset, first := range map[int64]int64{0: 0, 1: 1, 2: 1, 5: 3, 6: 6, 20: 15, 21: 21, 44: 36} {
		p, err := l.Read(offset, 1)
		if err != nil {
			t.Fatal(err)
		}
		h := header(t, p)
		wantEqual(t, fmt.Sprintf("first batch for offset %d", offset), h.BaseOffset, first)
		wantEqual(t, "bytes of the one batch", len(p), h.Size)
	}

	p, err := l.Read(6, 1<<20)
	wantEqual(t, "error", err, nil)
	wantEqual(t, "batches in a large read", batches(p), []int64{6, 10, 15})
	p, err = l.Read(6, len(p)-1)
	wantEqual(t, "error", err, nil)
	wantEqual(t, "batches when the last does not fit", batches(p), []int64{6, 10})

	p, err = l.Read(45, 1<<20)
	wantEqual(t, "at the end", fmt.Sprint(len(p), err), "0 <nil>")
	for _, offset := range []int64{-1, 46} {
		if _, err := l.Read(offset, 1); !errors.Is(err, segment.ErrOffsetOutOfRange) {
			t.Errorf("Read(%d): %v, want ErrOffsetOutOfRange", offset, err)
		}
	}
}

// batches returns the base offsets of the batches in p.
func batches(p []byte) (bases []int64) {
	for len(p) > 0 {
		_, h, err := idempotence.ParseBatch(p)
		if err != nil || h.Size > len(p) {
			return append(bases, -1)
		}
		bases = append(bases, h.BaseOffset)
		p = p[h.Size:]
	}
	return bases
}

func TestPending(t *testing.T) {
	l, _ := open(t, t.TempDir())
	wantEqual(t, "pending in an empty log", l.Pending(0), 0)
	fill(t, l, 6, 3)
	all, err := l.Read(l.Start(), 1<<20)
	wantEqual(t, "error", err, nil)
	if got := l.Pending(0); got < int64(2*len(all)) {
		t.Errorf("Pending(0) = %d for two segments, the smaller of %d bytes", got, len(all))
	}
	if l.Pending(l.End()-1) == 0 {
		t.Error("Pending = 0 with a record to come")
	}
	wantEqual(t, "pending at the end", l.Pending(l.End()), 0)
}

func TestOffsetOfTime(t *testing.T) {
	l, _ := open(t, t.TempDir())
	for i, millis := range []int64{100, 300, 200, 400} {
		if i == 2 {
			if err := l.Roll(); err != nil {
				t.Fatal(err)
			}
		}
		appendBatch(t, l, segmenttest.Edit(segmenttest.Batch(-1, -1, -1, "x", "y"), func(b *kmsg.RecordBatch) {
			b.FirstTimestamp, b.MaxTimestamp = millis, millis
		}))
	}
	for millis, want := range map[int64]int64{0: 0, 100: 0, 101: 2, 300: 2, 301: 6, 400: 6, 401: -1} {
		got, _, err := l.OffsetOfTime(millis)
		wantEqual(t, "error", err, nil)
		wantEqual(t, fmt.Sprintf("offset of time %d", millis), got, want)
	}
}

// A replay begins with the batch that holds the offset, and no earlier: what is
// before it is in the snapshot, or has been forgotten.
func TestReplayFrom(t *testing.T) {
	l, _ := open(t, t.TempDir())
	fill(t, l, 6, 3) // batches begin at 0 1 3 | 6 10 15, the end is 21
	for from, want := range map[int64][]int64{
		0: {1, 3, 6, 10, 15}, 2: {1, 3, 6, 10, 15}, 3: {3, 6, 10, 15}, 6: {6, 10, 15},
		9: {6, 10, 15}, 10: {10, 15}, 20: {15}, 21: nil,
	} {
		m := idempotence.New(idempotence.Config{})
		wantEqual(t, "error", l.Replay(from, m.ReplayLog), nil)
		wantEqual(t, fmt.Sprintf("replayed from %d", from), replayed(m), want)
	}
}

// A crash may cut the last write anywhere. Whatever is left of it must go, and
// nothing else.
func TestTornTailIsCutAtEveryByte(t *testing.T) {
	whole := t.TempDir()
	l, _ := open(t, whole)
	fill(t, l, 4, 2) // the second segment holds the batches at 3 and 6
	intact, err := l.Read(3, 1)
	wantEqual(t, "error", err, nil)
	name := fmt.Sprintf("%020d.log", 3)
	data, err := os.ReadFile(filepath.Join(whole, name))
	wantEqual(t, "error", err, nil)

	for size := len(intact); size < len(data); size++ {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(whole)); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(filepath.Join(dir, name), int64(size)); err != nil {
			t.Fatal(err)
		}
		l, m := open(t, dir)
		wantEqual(t, fmt.Sprintf("replayed with %d bytes left", size), replayed(m), []int64{0, 1, 3})
		wantEqual(t, "end", l.End(), 6)
		wantEqual(t, "next batch", appendBatch(t, l, segmenttest.Batch(7, 0, 6, "x")), 6)
		l.Close()
		_, m = open(t, dir)
		wantEqual(t, "replayed after the cut", replayed(m), []int64{0, 1, 3, 6})
	}
}

// Damage that no crash leaves must not silently cost what comes after it, nor
// the batch itself, which may have been acknowledged.
func TestDamageIsNoTornTail(t *testing.T) {
	for _, tt := range []struct {
		name    string
		segment int64
		damage  func(p []byte) []byte
	}{
		{"last byte of the log", 3, func(p []byte) []byte { p[len(p)-1] ^= 1; return p }},
		{"payload in the middle", 3, func(p []byte) []byte { p[62] ^= 1; return p }},
		{"magic in the middle", 3, func(p []byte) []byte { p[16] ^= 1; return p }},
		{"an older segment torn", 0, func(p []byte) []byte { return p[:len(p)-1] }},
	} {
		dir := t.TempDir()
		l, _ := open(t, dir)
		fill(t, l, 4, 2)
		l.Close()
		name := filepath.Join(dir, fmt.Sprintf("%020d.log", tt.segment))
		p, err := os.ReadFile(name)
		wantEqual(t, "error", err, nil)
		p = tt.damage(p)
		wantEqual(t, "error", os.WriteFile(name, p, 0o644), nil)

		_, err = openAndReplay(dir, idempotence.New(idempotence.Config{}))
		if le := new(idempotence.LogError); !errors.As(err, &le) {
			t.Errorf("%s: Open: %v, want a LogError", tt.name, err)
		}
		after, err := os.ReadFile(name)
		wantEqual(t, "error", err, nil)
		if !bytes.Equal(after, p) {
			t.Errorf("%s: Open changed the damaged file", tt.name)
		}
	}
}

func TestMissingSegmentIsNoticed(t *testing.T) {
	dir := t.TempDir()
	l, _ := open(t, dir)
	fill(t, l, 6, 2)
	l.Close()
	if err := os.Remove(filepath.Join(dir, fmt.Sprintf("%020d.log", 3))); err != nil {
		t.Fatal(err)
	}
	if _, err := openAndReplay(dir, idempotence.New(idempotence.Config{})); !errors.Is(err, segment.ErrMissing) {
		t.Errorf("Open: %v, want ErrMissing", err)
	}
}

// The name of a directory is a name, whatever it would mean as a pattern.
func TestDirectoryNamedLikeAPattern(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "[1]")
	l, _ := open(t, dir)
	fill(t, l, 3, 2)
	l.Close()
	again, _ := open(t, dir)
	if got, want := again.End(), l.End(); got != want {
		t.Errorf("reopened, the log ends at %d, want %d", got, want)
	}
}
