package idempotence

import (
	"bytes"
	"encoding/binary"
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

func (r *recorder) replayMarker(m Marker, offset int64) error {
	return r.note("marker pid=%d epoch=%d coord=%d commit=%t base=%d",
		m.ProducerID, m.Epoch, m.CoordinatorEpoch, m.Commit, offset)
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
		{"only the first record of a control batch counts", twoRecords.encode(), "marker pid=32 epoch=6 coord=6 commit=false base=44"},
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
		Bytes: int64(len(log)), EndOffset: 46 + math.MaxInt32, Batches: 6, Markers: 5, Others: 4}}
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

// TestTornTail cuts a log at every byte, as a crash might. Cut at the end of an
// entry it is a shorter log; cut anywhere else it has a torn tail; and so it is
// if a preallocated segment has zeros where the rest should be, unless the
// rest was zeros anyway. The good part is that of the log cut at the end of the
// last whole entry. Where the zeros end with the entry, it is a whole entry
// with a wrong checksum: damage, since nothing shows that more was expected.
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
			switch {
			case len(p) == whole:
				wantErr = nil
			case slices.Contains(ends, len(p)) && cut >= whole+batchLengthEnd:
				wantErr = ErrCorruptLog
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

// TestFlippedBit flips every bit of a log. Where a checksum or the order of the
// offsets covers the bit it is damage, never a torn tail, and what comes before
// the entry is the good part. Two fields nothing covers: the leader epoch,
// which does not matter, and the base offset, which can only be seen to be
// wrong where the offsets then go back. There one entry too many has been
// told.
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
			if !errors.Is(err, ErrCorruptLog) || errors.Is(err, ErrTornTail) {
				t.Errorf("%s: %v, want %v", where, err, ErrCorruptLog)
			}
			if got.Result.Bytes != int64(start) || !slices.Equal(got.Told, good.Told[:entry]) {
				t.Errorf("%s: good up to %d, told %q; the entry begins at %d", where, got.Result.Bytes, got.Told, start)
			}
		}
	}
}

// TestCorruptLog: damage that flipped bits do not make.
func TestCorruptLog(t *testing.T) {
	good := dataBatch(0, 31, 0, 0, 2).encode()
	next := dataBatch(2, 31, 0, 2, 2).encode()
	patch := func(p []byte, at int, bytes ...byte) []byte {
		p = slices.Clone(p)
		copy(p[at:], bytes)
		return p
	}
	compressedMarker := markerBatch(2, 31, 0, 1, true)
	compressedMarker.attrs |= 1
	zeroTail := patch(next, len(next)-20, make([]byte, 20)...)
	big := dataBatch(2, 31, 0, 2, 2)
	big.payload = bytes.Repeat([]byte("payload."), 3*segmentBufferSize/8)

	for _, tt := range []struct {
		reason string
		tail   [][]byte
		want   error
	}{
		{"offsets that go back", [][]byte{good}, ErrCorruptLog},
		{"offsets that overlap by one", [][]byte{dataBatch(1, 31, 0, 2, 2).encode()}, ErrCorruptLog},
		{"an offset of an older format that repeats", [][]byte{legacyMessage(1, 1, 0, nil)}, ErrCorruptLog},
		{"garbage", [][]byte{bytes.Repeat([]byte("garbage "), 20)}, ErrCorruptLog},
		{"zeros in front of a batch", [][]byte{make([]byte, 100), next}, ErrCorruptLog},
		{"zeros in front of a batch, more than the buffer holds", [][]byte{make([]byte, 3*segmentBufferSize), next}, ErrCorruptLog},
		{"a wrong checksum at the very end", [][]byte{patch(next, 30, 0x55)}, ErrCorruptLog},
		{"zeros at the end of the last batch, and no more behind it", [][]byte{zeroTail}, ErrCorruptLog},
		{"zeros at the end of the last batch, and more behind it", [][]byte{zeroTail, {0}}, ErrTornTail},
		{"zeros at the end of a batch, and another batch behind it", [][]byte{zeroTail, dataBatch(4, 31, 0, 4, 1).encode()}, ErrCorruptLog},
		{"a length that swallows the batches behind it", [][]byte{patch(next, 8, 0, 0, 0xff, 0xff), dataBatch(4, 31, 0, 4, 1).encode()}, ErrCorruptLog},
		{"a length that swallows much more than the buffer holds", [][]byte{patch(next, 8, 0, 0xff, 0xff, 0xff), big.encode(), dataBatch(4, 31, 0, 4, 1).encode()}, ErrCorruptLog},
		{"a torn batch whose records look like an earlier batch", [][]byte{patch(next, 8, 0, 0, 0xff, 0xff), good}, ErrTornTail},
		{"a torn batch larger than the buffer", [][]byte{big.encode()[:2*segmentBufferSize+5]}, ErrTornTail},
		{"a marker without a key", [][]byte{controlBatch(2, 31, 0, nil, []byte{0, 0, 0, 0, 0, 1}).encode()}, ErrCorruptLog},
		{"a marker of negative version", [][]byte{controlBatch(2, 31, 0, []byte{0xff, 0xff, 0, 0}, []byte{0, 0, 0, 0, 0, 1}).encode()}, ErrCorruptLog},
		{"a marker without a coordinator epoch", [][]byte{controlBatch(2, 31, 0, []byte{0, 0, 0, 0}, []byte{0, 0}).encode()}, ErrCorruptLog},
		{"a marker without a record, which says it has one", [][]byte{testBatch{base: 2, pid: 31, records: 1, attrs: 0x30}.encode()}, ErrCorruptLog},
		{"a compressed marker", [][]byte{compressedMarker.encode()}, ErrCorruptLog},
	} {
		got, err := readAll(io.MultiReader(bytes.NewReader(good), bytes.NewReader(bytes.Join(tt.tail, nil))))
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.reason, err, tt.want)
		}
		wantResult := ReplayResult{Bytes: int64(len(good)), EndOffset: 2, Batches: 1}
		if diff := cmp.Diff(wantResult, got.Result); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.reason, diff)
		}
		var logErr *LogError
		if !errors.As(err, &logErr) || logErr.Position != int64(len(good)) || logErr.Offset != 2 {
			t.Errorf("%s: %#v, want a LogError at byte %d, offset 2", tt.reason, err, len(good))
		}
	}
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
		if sum := res.Batches + res.Markers + res.Others; sum != int64(n) {
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
		if n := got.Result.Batches + got.Result.Markers + got.Result.Others; n != int64(len(got.Told)) {
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
