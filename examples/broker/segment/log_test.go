package segment_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

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

// Damage that no crash leaves is an error, and the file stays as it is: what
// comes after the damage may have been acknowledged, and the bad batch too.
func TestDamageIsNoTornTail(t *testing.T) {
	for _, tt := range []struct {
		name    string
		clean   bool
		segment int64
		damage  func(p []byte) []byte
	}{
		{"last byte after a clean stop", true, 3, func(p []byte) []byte { p[len(p)-1] ^= 1; return p }},
		{"payload in the middle after a clean stop", true, 3, func(p []byte) []byte { p[62] ^= 1; return p }},
		{"magic in the middle after a clean stop", true, 3, func(p []byte) []byte { p[16] ^= 1; return p }},
		{"cut short after a clean stop", true, 3, func(p []byte) []byte { return p[:len(p)-1] }},
		{"an older segment cut short", false, 0, func(p []byte) []byte { return p[:len(p)-1] }},
		{"an older segment's header", false, 0, func(p []byte) []byte { p[16] ^= 1; return p }},
		{"an older segment's payload", false, 0, func(p []byte) []byte { p[len(p)-1] ^= 1; return p }},
		{"an older segment's base offset", false, 0, func(p []byte) []byte { p[7] = 9; return p }},
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

		l, err = segment.Open(dir, segment.Options{Clean: tt.clean})
		if err == nil {
			err = errors.Join(l.Replay(0, idempotence.New(idempotence.Config{}).ReplayLog), l.Close())
		}
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

// After an unclean stop the newest segment is cut at its first bad batch, with
// whatever comes behind it, and the log says what was cut. (B7)
func TestB7_NewestSegmentIsCutAtFirstBadBatch(t *testing.T) {
	for _, tt := range []struct {
		name   string
		damage func(p []byte) []byte
		end    int64 // of the log, which has batches at 0 1 | 3 6 10
		at     int64 // where the segment is cut
		reason error
	}{
		{"nothing", func(p []byte) []byte { return p }, 15, 0, nil},
		{"first batch", func(p []byte) []byte { p[62] ^= 1; return p }, 3, 0, idempotence.ErrCorruptLog},
		{"second batch", func(p []byte) []byte { p[sizes[0]+62] ^= 1; return p }, 6, int64(sizes[0]), idempotence.ErrCorruptLog},
		{"second batch, zeroed", func(p []byte) []byte { clear(p[sizes[0] : sizes[0]+sizes[1]]); return p }, 6, int64(sizes[0]), idempotence.ErrCorruptLog},
		{"base offset of the second batch", func(p []byte) []byte { p[sizes[0]+7] = 0; return p }, 6, int64(sizes[0]), idempotence.ErrCorruptLog},
		{"base offset of the first batch", func(p []byte) []byte { p[7] = 0; return p }, 3, 0, idempotence.ErrCorruptLog},
		{"last batch cut short", func(p []byte) []byte { return p[:len(p)-1] }, 10, int64(sizes[0] + sizes[1]), idempotence.ErrTornTail},
		{"last batch, zeroed to the end", func(p []byte) []byte { clear(p[sizes[0]+sizes[1]+30:]); return p }, 10, int64(sizes[0] + sizes[1]), nil},
		{"zeros behind the last batch", func(p []byte) []byte { return append(p, make([]byte, 512)...) }, 15, int64(sizes[0] + sizes[1] + sizes[2]), idempotence.ErrTornTail},
	} {
		dir := t.TempDir()
		l, _ := open(t, dir)
		fill(t, l, 2, 5)
		wantEqual(t, "error", l.Roll(), nil)
		for n := 3; n < 6; n++ {
			appendBatch(t, l, segmenttest.Batch(7, 0, int32(l.End()), make([]string, n)...))
		}
		l.Close()
		name := filepath.Join(dir, fmt.Sprintf("%020d.log", 3))
		p, err := os.ReadFile(name)
		wantEqual(t, "error", err, nil)
		p = tt.damage(p)
		wantEqual(t, "error", os.WriteFile(name, p, 0o644), nil)

		for _, readOnly := range []bool{true, false} {
			l, err := segment.Open(dir, segment.Options{ReadOnly: readOnly})
			if err != nil {
				t.Errorf("%s: Open: %v", tt.name, err)
				continue
			}
			wantEqual(t, tt.name+": end", l.End(), tt.end)
			cut := l.Cut()
			switch {
			case tt.name == "nothing":
				if cut != nil {
					t.Errorf("%s: cut %v", tt.name, cut)
				}
			case cut == nil:
				t.Errorf("%s: the log does not say that it was cut", tt.name)
			default:
				wantEqual(t, tt.name+": what was cut", fmt.Sprint(cut.File, cut.Position, cut.Offset, cut.Bytes),
					fmt.Sprint(name, tt.at, tt.end, int64(len(p))-tt.at))
				if tt.reason != nil && !errors.Is(cut.Err, tt.reason) {
					t.Errorf("%s: cut because of %v, want %v", tt.name, cut.Err, tt.reason)
				}
			}
			if info, err := os.Stat(name); err != nil || readOnly && info.Size() != int64(len(p)) {
				t.Errorf("%s: opened to be read, and the file changed: %v, %v", tt.name, info.Size(), err)
			}
			wantEqual(t, "error", l.Close(), nil)
		}
		l, _ = open(t, dir)
		if l.Cut() != nil {
			t.Errorf("%s: cut twice: %v", tt.name, l.Cut())
		}
		wantEqual(t, "next batch", appendBatch(t, l, segmenttest.Batch(7, 0, int32(tt.end), "x")), tt.end)
	}
}

// sizes are those of batches with three, four and five empty records.
var sizes = []int{
	len(segmenttest.Batch(7, 0, 0, make([]string, 3)...)),
	len(segmenttest.Batch(7, 0, 0, make([]string, 4)...)),
	len(segmenttest.Batch(7, 0, 0, make([]string, 5)...)),
}

// The removal of a failed append is synced, and nothing is written before that:
// two appends at one place could get mixed up in a power cut. (B5)
func TestB5_FailedAppendIsRemovedForGood(t *testing.T) {
	var did []segmenttest.Op
	fail := make(map[segmenttest.Op]int) // how often, from now on
	disk := &segmenttest.Disk{Before: func(op segmenttest.Op) error {
		did = append(did, op)
		if fail[op]--; fail[op] >= 0 {
			return errors.New("disk failure")
		}
		return nil
	}}
	l, err := segment.Open(t.TempDir(), segment.Options{OpenFile: disk.OpenFile})
	wantEqual(t, "error", err, nil)
	defer l.Close()
	for _, step := range []struct {
		name          string
		writes, syncs int // that fail
		did           string
		fails         bool
	}{
		{"good", 0, 0, "[write sync]", false},
		{"failed write", 1, 0, "[write truncate sync]", true},
		{"good", 0, 0, "[write sync]", false},
		{"failed sync", 0, 1, "[write sync truncate sync]", true},
		{"good", 0, 0, "[write sync]", false},
		{"failed write, failed sync of its removal", 1, 1, "[write truncate sync]", true},
		{"removal still not synced", 0, 1, "[sync]", true},
		{"removal synced first", 0, 0, "[sync write sync]", false},
		{"failed sync, failed sync of its removal", 0, 2, "[write sync truncate sync]", true},
	} {
		did = nil
		fail[segmenttest.Write], fail[segmenttest.Sync] = step.writes, step.syncs
		p := segmenttest.Batch(7, 0, 0, "x")
		err := l.Append([]*segment.Batch{{Header: header(t, p), Bytes: p}})
		wantEqual(t, step.name+": operations", fmt.Sprint(did), step.did)
		wantEqual(t, step.name+": failed", err != nil, step.fails)
	}
	did = nil
	wantEqual(t, "error", l.Roll(), nil)
	wantEqual(t, "operations of a roll", fmt.Sprint(did), "[sync]")
	wantEqual(t, "end", l.End(), 4)
}

// A gap between two segments, or inside one, is nothing that a power cut leaves.
func TestGapIsNoTornTail(t *testing.T) {
	dir := t.TempDir()
	l, _ := open(t, dir)
	fill(t, l, 3, 2)
	l.Close()
	name := filepath.Join(dir, fmt.Sprintf("%020d.log", 3))
	p, err := os.ReadFile(name)
	wantEqual(t, "error", err, nil)
	p[7] = 4
	wantEqual(t, "error", os.WriteFile(name, p, 0o644), nil)
	if _, err := segment.Open(dir, segment.Options{}); !errors.Is(err, segment.ErrMissing) {
		t.Errorf("Open: %v, want ErrMissing", err)
	}
	wantEqual(t, "error", os.Rename(name, filepath.Join(dir, fmt.Sprintf("%020d.log", 2))), nil)
	if _, err := segment.Open(dir, segment.Options{}); err == nil {
		t.Error("a segment that begins inside another one was opened")
	}
	if after, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("%020d.log", 2))); err != nil || !bytes.Equal(after, p) {
		t.Errorf("Open changed the file, or %v", err)
	}
}

// The power is cut after some groups of batches were appended, or failed, and
// while another one is being synced, or removed after its sync has failed.
// Whichever sectors of it survive: the log opens, and holds everything that was
// synced and, behind it, nothing but intact batches of the last group. (B7)
func TestB7_PowerCut(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	const trials = 300
	damaged, torn := 0, 0
	for trial := range trials {
		dir := t.TempDir()
		synced, unsynced := cutPower(t, rng, []int{512, 4096}[trial%2], dir)
		l, err := segment.Open(dir, segment.Options{})
		if err != nil {
			t.Fatalf("trial %d: %v", trial, err)
		}
		if cut := l.Cut(); cut != nil && errors.Is(cut.Err, idempotence.ErrCorruptLog) {
			damaged++
		} else if cut != nil {
			torn++
		}
		got := contents(t, l)
		if !bytes.HasPrefix(got, synced) || !bytes.HasPrefix(slices.Concat(synced, unsynced), got) {
			t.Fatalf("trial %d: the log has %d bytes, want %d that were synced and perhaps more of %d that were not",
				trial, len(got), len(synced), len(unsynced))
		}
		wantEqual(t, "error", l.Close(), nil)
	}
	t.Logf("%d of %d logs were damaged, %d torn", damaged, trials, torn)
	if damaged < trials/30 || torn == 0 {
		t.Errorf("%d of %d logs were damaged and %d torn, want more", damaged, trials, torn)
	}
}

// cutPower leaves in dir what a power cut leaves of a log, and returns the
// batches that had been synced, and those of the group that had not.
func cutPower(t *testing.T, rng *rand.Rand, sector int, dir string) (synced, unsynced []byte) {
	t.Helper()
	before := t.TempDir()
	failing := 0   // syncs
	cutAfter := -1 // that many failing syncs, the power is cut
	disk := &segmenttest.Disk{Volatile: true}
	disk.Before = func(op segmenttest.Op) error {
		if op != segmenttest.Sync || failing == 0 {
			return nil
		}
		failing--
		if cutAfter--; cutAfter == -1 {
			wantEqual(t, "error", disk.PowerCut(rng, sector, before, dir), nil)
		}
		return errors.New("no sync")
	}
	l, err := segment.Open(before, segment.Options{OpenFile: disk.OpenFile})
	wantEqual(t, "error", err, nil)
	defer l.Close()
	group := func() (p []byte, err error) {
		var group []*segment.Batch
		for range 1 + rng.IntN(5) {
			group = append(group, randomBatch(t, rng, 3*sector/2))
		}
		err = l.Append(group)
		for _, b := range group {
			p = append(p, b.Bytes...)
		}
		return p, err
	}
	for range rng.IntN(4) {
		if rng.IntN(4) == 0 {
			wantEqual(t, "error", l.Roll(), nil)
		}
		failing = max(rng.IntN(5)-2, 0) // of the append, and of its removal
		p, err := group()
		if err == nil {
			synced = append(synced, p...)
		}
		failing = 0
	}
	wantEqual(t, "error", l.Sync(), nil)
	failing, cutAfter = 2, rng.IntN(2)
	if unsynced, err = group(); err == nil {
		t.Fatal("a group was appended without a sync")
	}
	return synced, unsynced
}

// randomBatch returns a batch with up to size bytes of records.
func randomBatch(t *testing.T, rng *rand.Rand, size int) *segment.Batch {
	p := segmenttest.Batch(rng.Int64N(5), 0, 0, make([]string, 1+rng.IntN(3))...)
	p = segmenttest.Edit(p, func(b *kmsg.RecordBatch) {
		for range rng.IntN(size) {
			b.Records = append(b.Records, byte(1+rng.IntN(255))) // zeros would survive the loss of a sector
		}
	})
	return &segment.Batch{Header: header(t, p), Bytes: p}
}

// contents returns all batches of a log.
func contents(t *testing.T, l *segment.Log) (all []byte) {
	t.Helper()
	for offset := l.Start(); offset < l.End(); {
		p, err := l.Read(offset, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p...)
		for len(p) > 0 {
			h := header(t, p)
			offset, p = h.LastOffset()+1, p[h.Size:]
		}
	}
	return all
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
