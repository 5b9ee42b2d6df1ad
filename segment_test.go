package idempotence

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

// This file tests how a segment is taken apart and how its end is judged. A
// recorder stands in for the manager, so that what is seen here is only what
// the bytes say.

// recorder writes down what it is told, one line each.
type recorder struct {
	told  []string
	err   error // what to answer from now on
	after int   // but only after so many
}

func (r *recorder) note(format string, args ...any) error {
	if len(r.told) >= r.after && r.err != nil {
		return r.err
	}
	r.told = append(r.told, fmt.Sprintf(format, args...))
	return nil
}

func (r *recorder) replayBatch(b Batch, baseOffset int64) error {
	txn := ""
	if b.Transactional {
		txn = " txn"
	}
	return r.note("batch pid=%d epoch=%d seq=%d n=%d base=%d%s",
		b.ProducerID, b.Epoch, b.BaseSequence, b.Count, baseOffset, txn)
}

func (r *recorder) replayMarker(m Marker, offset, endOffset int64) error {
	to := ""
	if endOffset > offset+1 {
		to = fmt.Sprintf(" to=%d", endOffset)
	}
	return r.note("marker pid=%d epoch=%d coord=%d commit=%t base=%d%s",
		m.ProducerID, m.Epoch, m.CoordinatorEpoch, m.Commit, offset, to)
}

func (r *recorder) skip(_, endOffset int64) error { return r.note("skip to=%d", endOffset) }

// reading is everything that comes of reading a log.
type reading struct {
	Told   []string
	Result ReplayResult
	Err    string
}

// noEntries is the end offset that the recorder is said to know of.
const noEntries = -7

func readAll(r io.Reader) (reading, error) {
	var rec recorder
	res, err := readLog(r, noEntries, &rec)
	out := reading{Told: rec.told, Result: res}
	if err != nil {
		out.Err = err.Error()
	}
	return out, err
}

// legacyMessage is a message of format v0 or v1, which may be a compressed set.
func legacyMessage(offset int64, magic, attrs byte, value []byte) []byte {
	be := binary.BigEndian
	body := []byte{magic, attrs}
	if magic == 1 {
		body = be.AppendUint64(body, 1_500_000_000_000)
	}
	body = be.AppendUint32(body, math.MaxUint32) // no key
	body = be.AppendUint32(body, uint32(len(value)))
	body = append(body, value...)

	var out []byte
	out = be.AppendUint64(out, uint64(offset))
	out = be.AppendUint32(out, uint32(4+len(body)))
	out = be.AppendUint32(out, crc32.ChecksumIEEE(body))
	return append(out, body...)
}

// TestReadLog reads one log of everything there is, entry by entry.
func TestReadLog(t *testing.T) {
	compressed := dataBatch(10, 31, 0, 3, 4)
	compressed.attrs, compressed.payload = 4, []byte("\x28\xb5\x2f\xfd, and whatever zstd makes of it")
	compacted := dataBatch(14, 31, 0, 7, 1)
	compacted.delta = 5
	empty := dataBatch(20, 31, 0, 13, 0)
	empty.delta = 2
	txn := dataBatch(24, 32, 4, 0, 1)
	txn.attrs = 0x10
	emptyMarker := markerBatch(40, 33, 7, 1, true)
	emptyMarker.records, emptyMarker.payload = 0, nil
	// KIP-890's markers may carry more in key and value than is known here.
	laterVersion := controlBatch(43, 32, 6, []byte{0, 1, 0, 1, 9, 9}, []byte{0, 1, 0, 0, 0, 5, 0, 2})
	leaderChange := controlBatch(41, NoProducerID, -1, []byte{0, 0, 0, 2}, bytes.Repeat([]byte{7}, 5000))
	otherType := controlBatch(42, 32, 5, []byte{0, 0, 0, 9}, bytes.Repeat([]byte{7}, 5000))
	twoRecords := markerBatch(44, 32, 6, 6, false)
	twoRecords.delta, twoRecords.records = 1, 2
	twoRecords.payload = append(twoRecords.payload, twoRecords.payload...)

	steps := []struct {
		reason string
		entry  []byte
		want   string
	}{
		{"a message of format v0", legacyMessage(2, 0, 0, []byte("old")), "skip to=3"},
		{"a compressed set of v1 has the last offset of its messages", legacyMessage(6, 1, 2, []byte("wrapped")), "skip to=7"},
		{"a producer that is not idempotent", dataBatch(7, NoProducerID, -1, -1, 3).encode(), "batch pid=-1 epoch=-1 seq=-1 n=3 base=7"},
		{"records are not decoded", compressed.encode(), "batch pid=31 epoch=0 seq=3 n=4 base=10"},
		{"compaction keeps the range of sequences", compacted.encode(), "batch pid=31 epoch=0 seq=7 n=6 base=14"},
		{"of an empty batch too", empty.encode(), "batch pid=31 epoch=0 seq=13 n=3 base=20"},
		{"after a gap in the offsets", txn.encode(), "batch pid=32 epoch=4 seq=0 n=1 base=24 txn"},
		{"abort", markerBatch(25, 32, 5, 3, false).encode(), "marker pid=32 epoch=5 coord=3 commit=false base=25"},
		{"commit", markerBatch(26, 32, 5, math.MaxInt32, true).encode(), "marker pid=32 epoch=5 coord=2147483647 commit=true base=26"},
		{"a marker emptied by compaction still has its epoch", emptyMarker.encode(), "marker pid=33 epoch=7 coord=-1 commit=false base=40"},
		{"a control record that is no producer's", leaderChange.encode(), "skip to=42"},
		{"a control record of another type", otherType.encode(), "skip to=43"},
		{"a marker of a later version", laterVersion.encode(), "marker pid=32 epoch=6 coord=5 commit=true base=43"},
		{"only the first record of a control batch counts", twoRecords.encode(), "marker pid=32 epoch=6 coord=6 commit=false base=44 to=46"},
		{"a batch of the whole range of sequences", testBatch{base: 46, delta: math.MaxInt32 - 1, pid: 31, seq: 5}.encode(), "batch pid=31 epoch=0 seq=5 n=2147483647 base=46"},
	}
	var log []byte
	var want []string
	for _, s := range steps {
		log = append(log, s.entry...)
		want = append(want, s.want)
	}
	got, err := readAll(bytes.NewReader(log))
	if err != nil {
		t.Error(err)
	}
	for i, s := range steps {
		if i >= len(got.Told) || got.Told[i] != s.want {
			t.Fatalf("%s:\n got %q\nwant %q", s.reason, got.Told[min(i, len(got.Told)):], s.want)
		}
	}
	wantAll := reading{Told: want, Result: ReplayResult{
		Bytes: int64(len(log)), EndOffset: 46 + math.MaxInt32, Batches: 6, Markers: 5, Skipped: 4}}
	if diff := cmp.Diff(wantAll, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestReadLogReal reads what a client and a broker have written.
func TestReadLogReal(t *testing.T) {
	var log []byte
	for _, s := range realLog {
		log = append(log, unhex(s)...)
	}
	got, err := readAll(bytes.NewReader(log))
	if err != nil {
		t.Error(err)
	}
	want := reading{
		Told: []string{
			"batch pid=292482913364166041 epoch=0 seq=0 n=3 base=0",
			"batch pid=292482913364166041 epoch=0 seq=3 n=1 base=3",
			"batch pid=3705297284730658398 epoch=0 seq=0 n=2 base=4",
			"batch pid=-1 epoch=-1 seq=0 n=1 base=6",
			"batch pid=3414781078840391591 epoch=0 seq=0 n=1 base=7 txn",
			"marker pid=3414781078840391591 epoch=0 coord=0 commit=true base=8",
			"batch pid=3414781078840391591 epoch=1 seq=0 n=1 base=9 txn",
			"marker pid=3414781078840391591 epoch=1 coord=0 commit=false base=10",
		},
		Result: ReplayResult{Bytes: int64(len(log)), EndOffset: 11, Batches: 6, Markers: 2},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// smallLog is a log of every kind of entry that is short enough to try every
// byte of, and where its entries end.
func smallLog() (log []byte, ends []int) {
	txn := dataBatch(8, 32, 1, 0, 1)
	txn.attrs = 0x10
	for _, e := range [][]byte{
		legacyMessage(2, 0, 0, []byte("zero")),
		legacyMessage(5, 1, 0, []byte("one")),
		dataBatch(6, 31, 0, 0, 2).encode(),
		txn.encode(),
		markerBatch(9, 32, 1, 3, true).encode(),
		dataBatch(10, 31, 0, 2, 3).encode(),
	} {
		log = append(log, e...)
		ends = append(ends, len(log))
	}
	return log, ends
}

// lastEnd returns the last of ends at or below n, or 0.
func lastEnd(ends []int, n int) int {
	i, found := slices.BinarySearch(ends, n)
	switch {
	case found:
		return n
	case i == 0:
		return 0
	}
	return ends[i-1]
}

// TestTornTail cuts a log at every byte, as a crash might, and has zeros follow, as
// in a preallocated segment. Cut at the end of an entry it is a shorter log; cut
// anywhere else it has a torn tail, unless the zeros put back what was cut off.
// The good part is that of the log cut at the end of the last whole entry.
func TestTornTail(t *testing.T) {
	log, ends := smallLog()
	for cut := range log {
		for _, zeros := range []int{0, 1, 8, 12, 17, 61, 500} {
			p := append(slices.Clone(log[:cut]), make([]byte, zeros)...)
			whole := lastEnd(ends, commonPrefix(p, log))
			want, err := readAll(bytes.NewReader(log[:whole]))
			if err != nil {
				t.Fatal(err)
			}
			got, err := readAll(bytes.NewReader(p))
			where := fmt.Sprintf("cut at %d, then %d zeros", cut, zeros)
			wantErr := ErrTornTail
			if len(p) == whole {
				wantErr = nil
			}
			if !errors.Is(err, wantErr) {
				t.Errorf("%s: %v, want %v", where, err, wantErr)
			}
			got.Err = ""
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", where, diff)
			}
		}
	}
}

func commonPrefix(a, b []byte) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// TestFlippedBit flips every bit of a log. If a checksum covers the bit, it is a torn
// tail in the last entry and damage in every other. A wrong length or magic is
// damage, also in the last entry. What comes before the entry is the good part.
// Nothing covers two fields: the leader epoch, which does not matter, and the base
// offset, which can only be seen to be wrong if the offsets then go back, after one
// entry too many has been told.
func TestFlippedBit(t *testing.T) {
	log, ends := smallLog()
	good, _ := readAll(bytes.NewReader(log))
	for bit := range len(log) * 8 {
		p := slices.Clone(log)
		p[bit/8] ^= 1 << (bit % 8)
		got, err := readAll(bytes.NewReader(p))
		where := fmt.Sprintf("bit %d of byte %d", bit%8, bit/8)

		start := lastEnd(ends, bit/8)
		entry := slices.Index(append([]int{0}, ends...), start)
		field := bit/8 - start
		v2 := log[start+16] == 2
		switch {
		case field < 8: // base offset
			if err != nil && !errors.Is(err, ErrCorruptLog) {
				t.Errorf("%s, base offset: %v, want %v or nothing", where, err, ErrCorruptLog)
			}
			if len(got.Told) < entry || !slices.Equal(got.Told[:entry], good.Told[:entry]) {
				t.Errorf("%s, base offset: told %q", where, got.Told)
			}
		case v2 && field >= 12 && field < 16: // leader epoch
			if diff := cmp.Diff(good, got); diff != "" {
				t.Errorf("%s, leader epoch (-want +got):\n%s", where, diff)
			}
		default:
			wantErr := ErrCorruptLog
			if start == ends[len(ends)-2] && (field > magicAt || field == magicAt && p[bit/8] == 0) {
				wantErr = ErrTornTail // magic 0 gives the entry another checksum, and the same length
			}
			if !errors.Is(err, wantErr) {
				t.Errorf("%s: %v, want %v", where, err, wantErr)
			}
			if got.Result.Bytes != int64(start) || !slices.Equal(got.Told, good.Told[:entry]) {
				t.Errorf("%s: good up to %d, told %q; the entry begins at %d", where, got.Result.Bytes, got.Told, start)
			}
		}
	}
}

// TestF19_LogEnds: a good batch, and then what a crash, a power cut or damage may leave.
// A last batch with a wrong checksum is torn, since after a power cut the size of a file
// may be on the disk and a page not. Torn is what can have been the last append; damage is
// everything that something intact follows, and what no crash leaves.
func TestF19_LogEnds(t *testing.T) {
	good := dataBatch(0, 31, 0, 0, 2).encode()
	next := dataBatch(2, 31, 0, 2, 2).encode()
	third := dataBatch(4, 31, 0, 4, 1).encode()
	patch := func(p []byte, at int, bytes ...byte) []byte {
		p = slices.Clone(p)
		copy(p[at:], bytes)
		return p
	}
	compressedMarker := markerBatch(2, 31, 0, 1, true)
	compressedMarker.attrs |= 1
	bad, badThird := patch(next, 70, 0x55), patch(third, 70, 0x55)
	zeroTail := patch(next, len(next)-20, make([]byte, 20)...)
	zeros := make([]byte, 100)
	manyZeros := make([]byte, 3*segmentBufferSize)
	garbage := bytes.Repeat([]byte("garbage "), 20)
	long := func(base int64, size int) []byte {
		b := dataBatch(base, 31, 0, int32(base), 2)
		b.payload = bytes.Repeat([]byte("payload."), size/8)
		return b.encode()
	}
	lengthOf := func(p []byte, size int) []byte {
		return patch(p, 8, binary.BigEndian.AppendUint32(nil, uint32(size-12))...)
	}
	embedded := dataBatch(2, 31, 0, 2, 1)
	embedded.payload = testRecord(0, nil, third)
	old, oldNext := legacyMessage(2, 1, 0, []byte("a message of old")), legacyMessage(3, 0, 0, nil)
	seems := third[:BatchHeaderSize:BatchHeaderSize]
	seems = lengthOf(seems, 10_000)

	for _, tt := range []struct {
		reason string
		tail   [][]byte
		want   error
	}{
		{"a last batch with a wrong checksum", [][]byte{bad}, ErrTornTail},
		{"and zeros behind it", [][]byte{bad, zeros}, ErrTornTail},
		{"and half a batch behind it", [][]byte{bad, third[:len(third)-1]}, ErrTornTail},
		{"and half a header behind it", [][]byte{bad, third[:20]}, ErrTornTail},
		{"and garbage behind it", [][]byte{bad, garbage}, ErrTornTail},
		{"and an earlier batch behind it, in a file that was used before", [][]byte{bad, good}, ErrTornTail},
		{"and an intact batch behind it", [][]byte{bad, third}, ErrCorruptLog},
		{"and zeros and an intact batch behind it", [][]byte{bad, manyZeros, third}, ErrCorruptLog},
		{"and garbage and an intact batch behind it", [][]byte{bad, garbage, third, garbage}, ErrCorruptLog},
		{"and another one with a wrong checksum", [][]byte{bad, badThird}, ErrCorruptLog},
		{"and another one with a wrong checksum, and an intact batch", [][]byte{bad, badThird, dataBatch(5, 31, 0, 5, 1).encode()}, ErrCorruptLog},
		{"and an intact batch behind offsets that compaction has removed", [][]byte{bad, {0}, dataBatch(1<<39, 31, 0, 4, 1).encode()}, ErrCorruptLog},
		{"and an intact message of an older format", [][]byte{bad, oldNext}, ErrCorruptLog},

		{"a last batch whose end is zero", [][]byte{zeroTail}, ErrTornTail},
		{"and more zeros behind it", [][]byte{zeroTail, {0}}, ErrTornTail},
		{"and an intact batch behind it", [][]byte{zeroTail, third}, ErrCorruptLog},
		{"a last batch whose beginning is zero", [][]byte{patch(next, 0, make([]byte, 40)...)}, ErrTornTail},
		{"and an intact batch behind it", [][]byte{patch(next, 0, make([]byte, 40)...), third}, ErrCorruptLog},
		{"zeros", [][]byte{zeros}, ErrTornTail},
		{"zeros in front of a batch", [][]byte{zeros, next}, ErrCorruptLog},
		{"zeros in front of a batch, more than the buffer holds", [][]byte{manyZeros, next}, ErrCorruptLog},
		{"zeros in front of half a batch", [][]byte{zeros, next[:80]}, ErrTornTail},
		{"a long batch cut short", [][]byte{long(2, 3*segmentBufferSize)[:2*segmentBufferSize+5]}, ErrTornTail},
		{"a long last batch with a wrong checksum", [][]byte{patch(long(2, 3*segmentBufferSize), 200, 0x55)}, ErrTornTail},
		{"and a long intact one behind it", [][]byte{patch(long(2, 3*segmentBufferSize), 200, 0x55), long(4, 3*segmentBufferSize)}, ErrCorruptLog},

		{"a length that takes in the batch behind it", [][]byte{lengthOf(next, 0xffff), third}, ErrCorruptLog},
		{"a length that takes in the batch and the zeros behind it", [][]byte{lengthOf(next, 1000), third, manyZeros}, ErrCorruptLog},
		{"a length that takes in a long batch", [][]byte{lengthOf(next, 1<<30), long(4, 3*segmentBufferSize)}, ErrCorruptLog},
		{"a length that takes in a long batch that is torn", [][]byte{lengthOf(next, 1<<30), long(4, 3*segmentBufferSize)[:segmentBufferSize]}, ErrTornTail},
		{"a length that takes in a batch and half a long one", [][]byte{lengthOf(next, 1<<30), third, long(5, 3*segmentBufferSize)[:2*segmentBufferSize]}, ErrCorruptLog},
		{"a length that is too large for the last batch", [][]byte{lengthOf(next, len(next)+1)}, ErrCorruptLog},
		{"a length that is too small for the last batch", [][]byte{lengthOf(next, len(next)-1)}, ErrCorruptLog},
		{"a torn batch with a record that holds an earlier batch", [][]byte{lengthOf(next, 0xffff), good}, ErrTornTail},
		{"a torn batch with a record that holds a later batch cannot be told from damage", [][]byte{embedded.encode()[:len(embedded.encode())-1]}, ErrCorruptLog},
		{"so many batches seem to begin that there may be an intact one", [][]byte{bad, bytes.Repeat(seems, maxClaims+1)}, ErrCorruptLog},
		{"no more batches seem to begin than can be verified", [][]byte{bad, {0}, bytes.Repeat(seems, maxClaims)}, ErrTornTail},

		{"offsets that go back", [][]byte{good}, ErrCorruptLog},
		{"offsets that overlap by one", [][]byte{dataBatch(1, 31, 0, 2, 2).encode()}, ErrCorruptLog},
		{"an offset of an older format that repeats", [][]byte{legacyMessage(1, 1, 0, nil)}, ErrCorruptLog},
		{"garbage", [][]byte{garbage}, ErrCorruptLog},
		{"a field out of range, with the checksum right", [][]byte{testBatch{base: 2, delta: -1}.encode()}, ErrCorruptLog},
		{"a field out of range, with a wrong checksum", [][]byte{patch(next, lastOffsetDeltaAt, 0xff)}, ErrTornTail},
		{"a marker without a key", [][]byte{controlBatch(2, 31, 0, nil, []byte{0, 0, 0, 0, 0, 1}).encode()}, ErrCorruptLog},
		{"a marker of negative version", [][]byte{controlBatch(2, 31, 0, []byte{0xff, 0xff, 0, 0}, []byte{0, 0, 0, 0, 0, 1}).encode()}, ErrCorruptLog},
		{"a marker without a coordinator epoch", [][]byte{controlBatch(2, 31, 0, []byte{0, 0, 0, 0}, []byte{0, 0}).encode()}, ErrCorruptLog},
		{"a marker without a record, which says it has one", [][]byte{testBatch{base: 2, pid: 31, records: 1, attrs: 0x30}.encode()}, ErrCorruptLog},
		{"a compressed marker", [][]byte{compressedMarker.encode()}, ErrCorruptLog},
	} {
		requireEnd(t, tt.reason, good, bytes.Join(tt.tail, nil), tt.want)
	}

	// A log that has not come to format v2 yet.
	good = legacyMessage(1, 1, 0, []byte("good"))
	for _, tt := range []struct {
		reason string
		tail   [][]byte
		want   error
	}{
		{"an old message cut short", [][]byte{old[:len(old)-1]}, ErrTornTail},
		{"a last old message with a wrong checksum", [][]byte{patch(old, 30, 0x55)}, ErrTornTail},
		{"and an intact one behind it", [][]byte{patch(old, 30, 0x55), oldNext}, ErrCorruptLog},
		{"and garbage and an intact one behind it", [][]byte{patch(old, 30, 0x55), garbage, oldNext}, ErrCorruptLog},
		{"zeros in front of an intact one", [][]byte{zeros, oldNext}, ErrCorruptLog},
		{"a length that takes in the one behind it", [][]byte{lengthOf(old, 0xffff), oldNext}, ErrCorruptLog},
	} {
		requireEnd(t, "old: "+tt.reason, good, bytes.Join(tt.tail, nil), tt.want)
	}
}

// requireEnd reads a good entry, which ends at offset 2, and a tail.
func requireEnd(t *testing.T, reason string, good, tail []byte, want error) {
	t.Helper()
	got, err := readAll(io.MultiReader(bytes.NewReader(good), bytes.NewReader(tail)))
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", reason, err, want)
	}
	if got.Result.Bytes != int64(len(good)) || got.Result.EndOffset != 2 || len(got.Told) != 1 {
		t.Errorf("%s: %+v, want %d good bytes", reason, got, len(good))
	}
	var logErr *LogError
	if !errors.As(err, &logErr) || logErr.Position != int64(len(good)) || logErr.Offset != 2 {
		t.Errorf("%s: %#v, want a LogError at byte %d, offset 2", reason, err, len(good))
	}
}

// TestFirstEntryBad: where nothing good comes before, every offset and every
// format may follow.
func TestFirstEntryBad(t *testing.T) {
	const far = searchReach << 4
	batch := dataBatch(far, 31, 0, 0, 2).encode()
	bad := slices.Clone(batch)
	bad[70] ^= 1
	later := dataBatch(far+2, 31, 0, 2, 2).encode()
	random := make([]byte, 1<<20)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range random {
		random[i] = byte(rng.Uint32())
	}
	badOld := legacyMessage(far, 1, 0, []byte("old"))
	badOld[30] ^= 1
	for _, tt := range []struct {
		reason string
		log    [][]byte
		want   error
	}{
		{"a batch with a wrong checksum", [][]byte{bad}, ErrTornTail},
		{"and an intact one", [][]byte{bad, {0}, later}, ErrCorruptLog},
		{"zeros", [][]byte{make([]byte, 100)}, ErrTornTail},
		{"zeros and an intact batch", [][]byte{make([]byte, 100), later}, ErrCorruptLog},
		{"zeros and random bytes", [][]byte{make([]byte, 100), random}, ErrTornTail},
		{"an old message with a wrong checksum, and an intact one", [][]byte{badOld, {0}, legacyMessage(far+1, 0, 0, nil)}, ErrCorruptLog},
	} {
		got, err := readAll(bytes.NewReader(bytes.Join(tt.log, nil)))
		if !errors.Is(err, tt.want) || got.Result.Bytes != 0 {
			t.Errorf("%s: %v, good up to %d, want %v at 0", tt.reason, err, got.Result.Bytes, tt.want)
		}
	}
}

// TestIntactBatchAnywhere: wherever an intact batch begins behind a bad one, also
// across the end of the buffer, it is found.
func TestIntactBatchAnywhere(t *testing.T) {
	bad := dataBatch(0, 31, 0, 0, 1).encode()
	bad[70] ^= 1
	later := dataBatch(1, 31, 0, 1, 1).encode()
	for n := segmentBufferSize - 300; n < segmentBufferSize+10; n++ {
		p := slices.Concat(bad, make([]byte, n), later, make([]byte, 10))
		if _, err := VerifyLog(bytes.NewReader(p)); !errors.Is(err, ErrCorruptLog) {
			t.Fatalf("%d zeros and an intact batch behind a bad one: %v, want %v", n, err, ErrCorruptLog)
		}
	}
}

// TestLostSectors: after a power cut, any sectors of what was not synced may be
// missing, and are zero. Whatever is lost, a log is read up to the first batch that
// lacks something, and a torn tail means that no batch behind that is intact, by a
// search that reads the whole log anew for each position. On failure the seed
// repeats it.
func TestLostSectors(t *testing.T) {
	const seed = 20260301
	rng := rand.New(rand.NewPCG(seed, 1))
	torn, damaged := 0, 0
	for n := range 400 {
		var log []byte
		ends := []int{0}
		for offset := int64(0); len(ends) < 2+n%8; offset += 2 {
			b := dataBatch(offset, 31, 0, int32(offset), 2)
			b.payload = make([]byte, rng.IntN(300<<(n%10)))
			for i := range b.payload {
				b.payload[i] = byte(rng.Uint32())
			}
			log = append(log, b.encode()...)
			ends = append(ends, len(log))
		}
		whole := slices.Clone(log)
		sector := 512 << (n % 4)
		for range 1 + rng.IntN(2) {
			at := rng.IntN(len(log)) / sector * sector
			if n%2 == 0 {
				at = (len(log) - 1 - rng.IntN(min(len(log), 2*sector))) / sector * sector
			}
			clear(log[at:min(at+sector, len(log))])
		}
		good := lastEnd(ends, commonPrefix(log, whole))
		want := error(nil)
		switch {
		case good == len(log):
		case intactBehind(log, good, ends):
			want = ErrCorruptLog
			damaged++
		default:
			want = ErrTornTail
			torn++
		}
		got, err := readAll(bytes.NewReader(log))
		if !errors.Is(err, want) || got.Result.Bytes != int64(good) {
			t.Fatalf("seed %d, log %d: good up to %d, %v, want %d, %v", seed, n, got.Result.Bytes, err, good, want)
		}
	}
	if torn < 50 || damaged < 50 {
		t.Errorf("%d torn tails and %d damaged logs are too few to tell", torn, damaged)
	}
}

// intactBehind reports whether a log has an intact batch behind its good part, or a
// second bad one that is complete. The batches end at ends.
func intactBehind(log []byte, good int, ends []int) bool {
	for x := good + 1; x <= len(log)-BatchHeaderSize; x++ {
		if _, h, err := ParseBatch(log[x:]); err == nil && h.BaseOffset > 0 && h.VerifyCRC(log[x:]) == nil {
			return true
		}
	}
	be := binary.BigEndian
	i, _ := slices.BinarySearch(ends, good)
	if first := log[good:]; be.Uint32(first[8:]) == 0 || i+2 >= len(ends) {
		return false
	}
	if int(be.Uint32(log[good+8:]))+12 != ends[i+1]-good {
		return false // where the second one begins is not known
	}
	second := log[ends[i+1]:]
	_, h, err := ParseBatch(second)
	return err == nil && h.BaseOffset > 0 && h.Size <= len(second)
}

// TestReadError: a failing read is never taken for the end of the log, whatever
// the error is and wherever it comes, and what was read before it counts.
func TestReadError(t *testing.T) {
	log, ends := smallLog()
	padded := append(slices.Clone(log), make([]byte, 100)...)
	for _, failure := range []error{errors.New("disk on fire"), io.ErrUnexpectedEOF, fmt.Errorf("wrapped: %w", io.EOF)} {
		for cut := range len(padded) + 1 {
			r := io.MultiReader(bytes.NewReader(padded[:cut]), iotest.ErrReader(failure))
			got, err := readAll(r)
			if !errors.Is(err, failure) || errors.Is(err, ErrTornTail) || errors.Is(err, ErrCorruptLog) {
				t.Errorf("cut at %d: %v, want %v", cut, err, failure)
			}
			if want := int64(lastEnd(ends, cut)); got.Result.Bytes != want {
				t.Errorf("cut at %d: good up to %d, want %d", cut, got.Result.Bytes, want)
			}
		}
	}
}

// TestReadErrorInBatch: a read that fails inside a batch is no damage, whatever the
// records before it hold.
func TestReadErrorInBatch(t *testing.T) {
	embedded := dataBatch(2, 31, 0, 2, 1)
	embedded.payload = testRecord(0, nil, dataBatch(4, 31, 0, 4, 1).encode())
	p := embedded.encode()
	failure := errors.New("disk on fire")
	_, err := VerifyLog(io.MultiReader(bytes.NewReader(p[:len(p)-1]), iotest.ErrReader(failure)))
	if !errors.Is(err, failure) || errors.Is(err, ErrCorruptLog) {
		t.Errorf("%v, want %v", err, failure)
	}
}

// idleReader gives neither bytes nor an error.
type idleReader struct{}

func (idleReader) Read([]byte) (int, error) { return 0, nil }

func TestReaderWithoutProgress(t *testing.T) {
	log, _ := smallLog()
	got, err := readAll(io.MultiReader(bytes.NewReader(log), idleReader{}))
	if !errors.Is(err, io.ErrNoProgress) || got.Result.Bytes != int64(len(log)) {
		t.Errorf("%v after %d bytes, want %v after %d", err, got.Result.Bytes, io.ErrNoProgress, len(log))
	}
}

// TestSinkError: what the manager refuses is in front of the end of the good
// part, and is not counted.
func TestSinkError(t *testing.T) {
	log, ends := smallLog()
	refusal := errors.New("refused")
	for n := range ends {
		rec := recorder{err: refusal, after: n}
		res, err := readLog(bytes.NewReader(log), 0, &rec)
		if want := lastEnd(ends, append([]int{0}, ends...)[n]); !errors.Is(err, refusal) || res.Bytes != int64(want) {
			t.Errorf("refused after %d entries: %v at byte %d, want byte %d", n, err, res.Bytes, want)
		}
		if sum := res.Batches + res.Markers + res.Skipped; sum != int64(n) {
			t.Errorf("refused after %d entries: counted %d", n, sum)
		}
	}
}

// TestChunking: how the bytes come in makes no difference, for a log longer
// than the buffer, with entries longer than the buffer, whole, cut or damaged.
// On failure the seed repeats it.
func TestChunking(t *testing.T) {
	const seed = 20260214
	rng := rand.New(rand.NewPCG(seed, 1))
	var log []byte
	for offset := int64(0); len(log) < 4*segmentBufferSize; {
		b := dataBatch(offset, 31, 0, int32(offset), 1+rng.Int32N(40))
		if rng.IntN(20) == 0 {
			b.payload = make([]byte, rng.IntN(2*segmentBufferSize))
		}
		log = append(log, b.encode()...)
		offset += int64(b.delta) + 1
	}
	for n := range 12 {
		p := log[:len(log)-rng.IntN(n*3000+1)]
		if n%2 == 1 {
			p = slices.Clone(p)
			p[rng.IntN(len(p))] ^= 1 << rng.IntN(8)
		}
		want, _ := readAll(bytes.NewReader(p))
		for name, r := range chunked(p) {
			got, _ := readAll(r)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("seed %d, log %d, %s (-want +got):\n%s", seed, n, name, diff)
			}
		}
	}
}

func chunked(p []byte) map[string]io.Reader {
	return map[string]io.Reader{
		"one byte at a time":          iotest.OneByteReader(bytes.NewReader(p)),
		"half of what is asked for":   iotest.HalfReader(bytes.NewReader(p)),
		"the end with the last bytes": iotest.DataErrReader(bytes.NewReader(p)),
	}
}

// zeroReader gives zeros without end.
type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestReadLogMemory: neither the length of a batch nor that of the log nor what
// a length field claims takes memory.
func TestReadLogMemory(t *testing.T) {
	const payload = 64 << 20
	b := testBatch{pid: 31, delta: 9, records: 10}
	header := b.encode()
	binary.BigEndian.PutUint32(header[8:], 49+payload)
	sum := crc32.Checksum(header[21:], castagnoli)
	zeros := make([]byte, 1<<20)
	for range payload / len(zeros) {
		sum = crc32.Update(sum, castagnoli, zeros)
	}
	binary.BigEndian.PutUint32(header[17:], sum)
	claims := slices.Clone(header)
	binary.BigEndian.PutUint32(claims[8:], math.MaxInt32-12)

	for _, tt := range []struct {
		reason string
		log    io.Reader
		want   error
	}{
		{"a batch of 64 MiB", io.MultiReader(bytes.NewReader(header), io.LimitReader(zeroReader{}, payload)), nil},
		{"64 MiB of preallocated space", io.LimitReader(zeroReader{}, payload), ErrTornTail},
		{"a claim of 2 GiB", bytes.NewReader(claims), ErrTornTail},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := readAll(tt.log)
		runtime.ReadMemStats(&after)
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.reason, err, tt.want)
		}
		if got := after.TotalAlloc - before.TotalAlloc; got > segmentBufferSize+16<<10 {
			t.Errorf("%s: %d bytes allocated, want at most the buffer of %d and some", tt.reason, got, segmentBufferSize)
		}
	}
}

// TestLogErrorInJSON: the reason is kept with the facts.
func TestLogErrorInJSON(t *testing.T) {
	log, _ := smallLog()
	disk := errors.New("disk on fire")
	for want, r := range map[string]io.Reader{
		`{"Position":306,"Offset":10,"Err":"idempotence: torn tail of log: 2 of 61 bytes of an entry"}`: bytes.NewReader(log[:308]),
		`{"Position":306,"Offset":10,"Err":"idempotence: reading a log: disk on fire"}`:                 io.MultiReader(bytes.NewReader(log[:306]), iotest.ErrReader(disk)),
	} {
		_, err := VerifyLog(r)
		got, marshalErr := json.Marshal(err)
		if marshalErr != nil || string(got) != want {
			t.Errorf("%s, %v, want %s", got, marshalErr, want)
		}
	}
}

// FuzzReplayLog. Invariants:
//
//  1. No panic.
//  2. The good part is a row of whole entries, each with the checksum that its
//     format asks for, and offsets that rise; a splitter that knows nothing but
//     this finds the same number of them.
//  3. There is an error exactly if the good part is not everything, and then it
//     is either a torn tail or damage, and not both.
//  4. The good part alone reads to the same result, without an error.
//  5. Byte by byte it comes to the same.
//  6. If the source fails at the end, its failure is returned, unless there was
//     damage before it; and never a torn tail.
//
// If mend is set, the checksums of the input are put right first, so that what
// lies behind them is reached.
func FuzzReplayLog(f *testing.F) {
	log, ends := smallLog()
	f.Add(log, false)
	f.Add(log, true)
	f.Add(log[:ends[3]+20], false)
	f.Add(append(slices.Clone(log[:ends[2]]), make([]byte, 100)...), false)
	for _, s := range realLog {
		f.Add(unhex(s), true)
	}
	f.Fuzz(func(t *testing.T, p []byte, mend bool) {
		if mend {
			p = mendChecksums(p)
		}
		got, err := readAll(bytes.NewReader(p))
		bytesGood := got.Result.Bytes
		if n := splitLog(t, p[:bytesGood]); n != len(got.Told) {
			t.Fatalf("told %d entries, the splitter finds %d", len(got.Told), n)
		}
		if n := got.Result.Batches + got.Result.Markers + got.Result.Skipped; n != int64(len(got.Told)) {
			t.Fatalf("told %d entries, counted %d", len(got.Told), n)
		}
		torn, damaged := errors.Is(err, ErrTornTail), errors.Is(err, ErrCorruptLog)
		if whole := bytesGood == int64(len(p)); whole != (err == nil) || whole == (torn != damaged) {
			t.Fatalf("good up to %d of %d: %v", bytesGood, len(p), err)
		}
		again, err := readAll(bytes.NewReader(p[:bytesGood]))
		if err != nil {
			t.Fatalf("the good part alone: %v", err)
		}
		again.Err = got.Err
		if diff := cmp.Diff(got, again); diff != "" {
			t.Fatalf("the good part alone (-want +got):\n%s", diff)
		}
		slow, _ := readAll(iotest.OneByteReader(bytes.NewReader(p)))
		if diff := cmp.Diff(got, slow); diff != "" {
			t.Fatalf("byte by byte (-want +got):\n%s", diff)
		}
		failure := errors.New("disk on fire")
		failed, err := readAll(io.MultiReader(bytes.NewReader(p), iotest.ErrReader(failure)))
		if errors.Is(err, failure) == errors.Is(err, ErrCorruptLog) || errors.Is(err, ErrTornTail) {
			t.Fatalf("failing source: %v", err)
		}
		if diff := cmp.Diff(got.Told, failed.Told); diff != "" {
			t.Fatalf("failing source (-want +got):\n%s", diff)
		}
	})
}

// mendChecksums returns a copy of p in which each entry has the right checksum,
// as far as its length fields lead.
func mendChecksums(p []byte) []byte {
	p = slices.Clone(p)
	be := binary.BigEndian
	for rest := p; len(rest) >= 26; {
		size := 12 + int64(int32(be.Uint32(rest[8:])))
		if size < 26 || size > int64(len(rest)) {
			break
		}
		if e := rest[:size]; e[16] == 2 {
			be.PutUint32(e[17:], crc32.Checksum(e[21:], crc32.MakeTable(crc32.Castagnoli)))
		} else {
			be.PutUint32(e[12:], crc32.ChecksumIEEE(e[16:]))
		}
		rest = rest[size:]
	}
	return p
}

// splitLog counts the entries of a log that has nothing but good ones.
func splitLog(t *testing.T, p []byte) (n int) {
	be := binary.BigEndian
	for least := uint64(0); len(p) > 0; n++ {
		first, last := be.Uint64(p), be.Uint64(p)
		size := 12 + int(be.Uint32(p[8:]))
		sum, want := crc32.ChecksumIEEE(p[16:size]), be.Uint32(p[12:])
		if p[16] == 2 {
			last += uint64(be.Uint32(p[23:]))
			sum, want = crc32.Checksum(p[21:size], crc32.MakeTable(crc32.Castagnoli)), be.Uint32(p[17:])
		}
		if sum != want {
			t.Fatalf("entry %d of the good part: checksum %08x, want %08x", n, sum, want)
		}
		if first < least || last > math.MaxInt64 {
			t.Fatalf("entry %d of the good part: offsets %d to %d, want %d or more", n, first, last, least)
		}
		least = last + 1
		p = p[size:]
	}
	return n
}
