package idempotence

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// This file tests how headers and markers are read and stamped. It has the
// builder of record batches that the tests of the segment reader use too.

// testBatch is a record batch as a test describes it. The encoder below shares
// no code with the reader: it appends field after field in the order of the
// format's description, and the reader reads at positions.
type testBatch struct {
	base      int64
	delta     int32 // last offset delta
	pid       int64
	epoch     int16
	seq       int32
	attrs     int16
	leader    int32
	records   int32  // what the record count says
	payload   []byte // everything after it
	timestamp int64
}

func (b testBatch) encode() []byte {
	be := binary.BigEndian
	var body []byte
	body = be.AppendUint16(body, uint16(b.attrs))
	body = be.AppendUint32(body, uint32(b.delta))
	body = be.AppendUint64(body, uint64(b.timestamp))
	body = be.AppendUint64(body, uint64(b.timestamp))
	body = be.AppendUint64(body, uint64(b.pid))
	body = be.AppendUint16(body, uint16(b.epoch))
	body = be.AppendUint32(body, uint32(b.seq))
	body = be.AppendUint32(body, uint32(b.records))
	body = append(body, b.payload...)

	var out []byte
	out = be.AppendUint64(out, uint64(b.base))
	out = be.AppendUint32(out, uint32(4+1+4+len(body)))
	out = be.AppendUint32(out, uint32(b.leader))
	out = append(out, 2)
	out = be.AppendUint32(out, crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)))
	return append(out, body...)
}

// dataBatch is a batch of n records of a producer, uncompressed.
func dataBatch(base, pid int64, epoch int16, seq, n int32) testBatch {
	var payload []byte
	for i := range n {
		payload = append(payload, testRecord(int64(i), []byte{'k'}, []byte("value"))...)
	}
	return testBatch{base: base, delta: n - 1, pid: pid, epoch: epoch, seq: seq, records: n,
		payload: payload, timestamp: 1_700_000_000_000}
}

// controlBatch is a batch with one control record, in a transaction.
func controlBatch(base, pid int64, epoch int16, key, value []byte) testBatch {
	return testBatch{base: base, pid: pid, epoch: epoch, seq: -1, records: 1, attrs: 0x30,
		payload: testRecord(0, key, value), timestamp: 1_700_000_000_000}
}

// markerBatch is an end-transaction marker.
func markerBatch(base, pid int64, epoch int16, coordinatorEpoch int32, commit bool) testBatch {
	key := []byte{0, 0, 0, 0}
	if commit {
		key[3] = 1
	}
	value := binary.BigEndian.AppendUint32([]byte{0, 0}, uint32(coordinatorEpoch))
	return controlBatch(base, pid, epoch, key, value)
}

// testRecord is one record of format v2 without headers.
func testRecord(offsetDelta int64, key, value []byte) []byte {
	body := []byte{0} // attributes
	body = append(body, zigzag(0)...)
	body = append(body, zigzag(offsetDelta)...)
	body = append(body, zigzag(int64(len(key)))...)
	body = append(body, key...)
	body = append(body, zigzag(int64(len(value)))...)
	body = append(body, value...)
	body = append(body, zigzag(0)...)
	return append(zigzag(int64(len(body))), body...)
}

// zigzag is a signed number as Protocol Buffers write it, low 7 bits first.
func zigzag(v int64) []byte {
	u := uint64(v) * 2
	if v < 0 {
		u = uint64(-v)*2 - 1
	}
	var out []byte
	for ; u >= 128; u /= 128 {
		out = append(out, byte(u%128+128))
	}
	return append(out, byte(u))
}

func unhex(s string) []byte {
	p, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return p
}

// realLog is what the franz-go client (v1.22.3) sent for six produce calls, as
// the partition held it afterwards, with the markers of two transactions.
var realLog = []string{
	// Three records of an idempotent producer, then one more.
	`0000000000000000 00000060 00000000 02 65b91c48 0000 00000002 0000018bcfe56800 0000018bcfe56800
	 040f1ba8f9f14599 0000 00000000 00000003
	 1c000000026b066f6e6502026802781c000002026b0674776f020268027820000004026b0a74687265650202680278`,
	`0000000000000003 00000041 00000000 02 6ccfc301 0000 00000000 0000018bcfe56800 0000018bcfe56800
	 040f1ba8f9f14599 0000 00000003 00000001
	 1e000000026b08666f75720202680278`,
	// Two records of another one, compressed with zstd.
	`0000000000000004 00000060 00000000 02 30424569 0004 00000001 0000018bcfe56800 0000018bcfe56800
	 336bdc3fbb971e5e 0000 00000000 00000002
	 28b52ffd040015010092c1050cd00501ed9ea3e5901d269dfb75167a0b7516806e1b010200b22213988e0bef7cb597`,
	// One record of a producer that is not idempotent.
	`0000000000000006 00000042 00000000 02 07ff33ff 0000 00000000 0000018bcfe56800 0000018bcfe56800
	 ffffffffffffffff ffff 00000000 00000001
	 20000000026b0a706c61696e0202680278`,
	// A transaction that commits, then one under the next epoch that aborts.
	`0000000000000007 00000040 00000000 02 c12e500c 0010 00000000 0000018bcfe56800 0000018bcfe56800
	 2f63bd4c8601b7a7 0000 00000000 00000001
	 1c000000026b0674786e0202680278`,
	`0000000000000008 00000042 00000000 02 02932b3f 0030 00000000 000001a22b76dcb8 000001a22b76dcb8
	 2f63bd4c8601b7a7 0000 ffffffff 00000001
	 2000000008000000010c00000000000000`,
	`0000000000000009 00000040 00000000 02 7b619282 0010 00000000 0000018bcfe56800 0000018bcfe56800
	 2f63bd4c8601b7a7 0001 00000000 00000001
	 1c000000026b0674786e0202680278`,
	`000000000000000a 00000042 00000000 02 889ee6fb 0030 00000000 000001a22b76dcb9 000001a22b76dcb9
	 2f63bd4c8601b7a7 0001 ffffffff 00000001
	 2000000008000000000c00000000000000`,
}

// TestParseBatchReal reads headers that a client wrote.
func TestParseBatchReal(t *testing.T) {
	type answer struct {
		Batch  Batch
		Header BatchHeader
	}
	const sent = 1_700_000_000_000
	tests := []struct {
		entry int
		want  answer
	}{
		{0, answer{
			Batch{ProducerID: 292482913364166041, Count: 3},
			BatchHeader{LastOffsetDelta: 2, Size: 108, CRC: 0x65b91c48, BaseTimestamp: sent, MaxTimestamp: sent, Records: 3},
		}},
		{1, answer{
			Batch{ProducerID: 292482913364166041, BaseSequence: 3, Count: 1},
			BatchHeader{BaseOffset: 3, Size: 77, CRC: 0x6ccfc301, BaseTimestamp: sent, MaxTimestamp: sent, Records: 1},
		}},
		{2, answer{
			Batch{ProducerID: 3705297284730658398, Count: 2},
			BatchHeader{BaseOffset: 4, LastOffsetDelta: 1, Size: 108, CRC: 0x30424569, Attributes: 4,
				BaseTimestamp: sent, MaxTimestamp: sent, Records: 2},
		}},
		{3, answer{
			Batch{ProducerID: NoProducerID, Epoch: -1, Count: 1},
			BatchHeader{BaseOffset: 6, Size: 78, CRC: 0x07ff33ff, BaseTimestamp: sent, MaxTimestamp: sent, Records: 1},
		}},
		{6, answer{
			Batch{ProducerID: 3414781078840391591, Epoch: 1, Count: 1, Transactional: true},
			BatchHeader{BaseOffset: 9, Size: 76, CRC: 0x7b619282, Attributes: 0x10,
				BaseTimestamp: sent, MaxTimestamp: sent, Records: 1},
		}},
	}
	for _, tt := range tests {
		p := unhex(realLog[tt.entry])
		b, h, err := ParseBatch(p)
		if err != nil {
			t.Fatalf("entry %d: %v", tt.entry, err)
		}
		if diff := cmp.Diff(tt.want, answer{b, h}); diff != "" {
			t.Errorf("entry %d (-want +got):\n%s", tt.entry, diff)
		}
		if err := h.VerifyCRC(append(p, "the next batch"...)); err != nil {
			t.Errorf("entry %d: %v", tt.entry, err)
		}
	}
}

// TestParseBatchCount: the sequences that a batch takes up are told by its
// last offset delta, since compaction changes the number of records only.
func TestParseBatchCount(t *testing.T) {
	for _, tt := range []struct {
		reason         string
		delta, records int32
		want           int32
	}{
		{"as produced", 9, 10, 10},
		{"compacted", 9, 4, 10},
		{"emptied by compaction", 9, 0, 10},
		{"the largest", math.MaxInt32 - 1, 1, math.MaxInt32},
	} {
		b, h, err := ParseBatch(testBatch{base: 100, delta: tt.delta, records: tt.records}.encode())
		if err != nil {
			t.Fatalf("%s: %v", tt.reason, err)
		}
		if b.Count != tt.want || h.Records != tt.records || h.LastOffset() != 100+int64(tt.delta) {
			t.Errorf("%s: count %d records %d last offset %d, want %d, %d, %d",
				tt.reason, b.Count, h.Records, h.LastOffset(), tt.want, tt.records, 100+int64(tt.delta))
		}
	}
}

func TestBatchAttributes(t *testing.T) {
	type bits struct {
		Compression                                          int
		LogAppendTime, Transactional, Control, DeleteHorizon bool
	}
	for attrs, want := range map[BatchAttributes]bits{
		0x00:   {},
		0x04:   {Compression: 4},
		0x08:   {LogAppendTime: true},
		0x10:   {Transactional: true},
		0x20:   {Control: true},
		0x40:   {DeleteHorizon: true},
		0x7b:   {3, true, true, true, true},
		-0x80:  {}, // bits 7 to 15 are not assigned
		0x0180: {},
	} {
		got := bits{attrs.Compression(), attrs.LogAppendTime(), attrs.Transactional(), attrs.Control(), attrs.DeleteHorizon()}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("attributes %#x (-want +got):\n%s", attrs, diff)
		}
	}
}

// TestParseBatchRefuses: what cannot be a header is refused for what it is.
func TestParseBatchRefuses(t *testing.T) {
	good := dataBatch(5, 31, 0, 0, 2).encode()
	set := func(at int, bytes ...byte) []byte {
		p := append([]byte(nil), good...)
		copy(p[at:], bytes)
		return p
	}
	for _, tt := range []struct {
		reason string
		p      []byte
		want   error
		code   int16
	}{
		{"nothing", nil, ErrCorruptBatch, 2},
		{"cut in front of the magic", good[:16], ErrCorruptBatch, 2},
		{"cut behind the magic", good[:17], ErrCorruptBatch, 2},
		{"one byte short", good[:60], ErrCorruptBatch, 2},
		{"format v0", set(16, 0), ErrUnsupportedMagic, 87},
		{"format v1, shorter than a v2 header", set(16, 1)[:34], ErrUnsupportedMagic, 87},
		{"a format to come", set(16, 3), ErrUnsupportedMagic, 87},
		{"negative magic", set(16, 0xff), ErrUnsupportedMagic, 87},
		{"batch length 0", set(8, 0, 0, 0, 0), ErrCorruptBatch, 2},
		{"batch length one too small", set(8, 0, 0, 0, 48), ErrCorruptBatch, 2},
		{"negative batch length", set(8, 0xff, 0xff, 0xff, 0xff), ErrCorruptBatch, 2},
		{"size above an int32", set(8, 0x7f, 0xff, 0xff, 0xf4), ErrCorruptBatch, 2},
		{"negative last offset delta", set(23, 0xff, 0xff, 0xff, 0xff), ErrCorruptBatch, 2},
		{"count above an int32", set(23, 0x7f, 0xff, 0xff, 0xff), ErrCorruptBatch, 2},
		{"negative record count", set(57, 0x80, 0, 0, 0), ErrCorruptBatch, 2},
		{"negative base offset", set(0, 0x80), ErrCorruptBatch, 2},
		{"no offset after the last", set(0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe), ErrCorruptBatch, 2},
	} {
		b, h, err := ParseBatch(tt.p)
		if !errors.Is(err, tt.want) || KafkaErrorCode(err) != tt.code {
			t.Errorf("%s: error %v with code %d, want %v with %d", tt.reason, err, KafkaErrorCode(err), tt.want, tt.code)
		}
		if b != (Batch{ProducerID: NoProducerID}) || h != (BatchHeader{}) {
			t.Errorf("%s: %+v %+v beside the error", tt.reason, b, h)
		}
		k, h, err := ParseMarker(tt.p)
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: error %v of ParseMarker, want %v", tt.reason, err, tt.want)
		}
		if k != (Marker{ProducerID: NoProducerID}) || h != (BatchHeader{}) {
			t.Errorf("%s: %+v %+v of ParseMarker beside the error", tt.reason, k, h)
		}
	}
}

// TestF11_ForgottenError: a caller that ignores the error of ParseBatch
// judges a batch of no producer, and one that ignores the error of ParseMarker is
// refused. Neither touches producer 0.
func TestF11_ForgottenError(t *testing.T) {
	m := New(Config{})
	if err := m.Commit(0, 0, 0, 1, 0); err != nil {
		t.Fatal(err)
	}
	want := stateOf(m)
	b, h, _ := ParseBatch([]byte("no batch"))
	if _, err := m.CheckBatch(b); err != nil {
		t.Error(err)
	}
	if err := m.Replay(b, h.BaseOffset); err != nil {
		t.Error(err)
	}
	k, h, _ := ParseMarker([]byte("no batch"))
	if err := m.ReplayMarker(k, h.BaseOffset); !errors.Is(err, ErrInvalidBatch) {
		t.Errorf("ReplayMarker: %v, want %v", err, ErrInvalidBatch)
	}
	if diff := cmp.Diff(want, stateOf(m)); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}

// TestParseMarkerReal reads the markers that a broker wrote.
func TestParseMarkerReal(t *testing.T) {
	type answer struct {
		Marker Marker
		Header BatchHeader
	}
	for _, tt := range []struct {
		entry int
		want  answer
	}{
		{5, answer{
			Marker{ProducerID: 3414781078840391591, Commit: true},
			BatchHeader{BaseOffset: 8, Size: 78, CRC: 0x02932b3f, Attributes: 0x30,
				BaseTimestamp: 0x01a22b76dcb8, MaxTimestamp: 0x01a22b76dcb8, Records: 1},
		}},
		{7, answer{
			Marker{ProducerID: 3414781078840391591, Epoch: 1},
			BatchHeader{BaseOffset: 10, Size: 78, CRC: 0x889ee6fb, Attributes: 0x30,
				BaseTimestamp: 0x01a22b76dcb9, MaxTimestamp: 0x01a22b76dcb9, Records: 1},
		}},
	} {
		p := unhex(realLog[tt.entry])
		k, h, err := ParseMarker(append(p, "the next batch"...))
		if err != nil {
			t.Fatalf("entry %d: %v", tt.entry, err)
		}
		if diff := cmp.Diff(tt.want, answer{k, h}); diff != "" {
			t.Errorf("entry %d (-want +got):\n%s", tt.entry, diff)
		}
	}
}

// TestParseMarker: a marker, a batch that is none, and one that cannot be one are
// told apart.
func TestParseMarker(t *testing.T) {
	emptied := markerBatch(7, 31, 2, 5, true)
	emptied.records, emptied.payload = 0, nil
	compressed := markerBatch(7, 31, 2, 5, true)
	compressed.attrs |= 1
	several := markerBatch(7, 31, 2, 5, false)
	several.delta, several.records = 2, 3
	whole := markerBatch(7, 31, 2, 5, true).encode()
	for _, tt := range []struct {
		reason string
		p      []byte
		want   Marker
		err    error
	}{
		{"a commit", whole, Marker{ProducerID: 31, Epoch: 2, CoordinatorEpoch: 5, Commit: true}, nil},
		{"an abort", markerBatch(7, 31, 2, math.MaxInt32, false).encode(), Marker{ProducerID: 31, Epoch: 2, CoordinatorEpoch: math.MaxInt32}, nil},
		{"emptied by compaction", emptied.encode(), Marker{ProducerID: 31, Epoch: 2, CoordinatorEpoch: -1}, nil},
		{"of several records, the first counts", several.encode(), Marker{ProducerID: 31, Epoch: 2, CoordinatorEpoch: 5}, nil},
		{"later versions of key and value", controlBatch(7, 31, 2, []byte{0, 1, 0, 1, 9}, []byte{0, 1, 0, 0, 0, 5, 9}).encode(),
			Marker{ProducerID: 31, Epoch: 2, CoordinatorEpoch: 5, Commit: true}, nil},
		{"a negative epoch is passed on", markerBatch(7, 31, -2, 5, true).encode(), Marker{ProducerID: 31, Epoch: -2, CoordinatorEpoch: 5, Commit: true}, nil},

		{"data", dataBatch(7, 31, 2, 0, 1).encode(), Marker{}, ErrNotMarker},
		{"a leader change", controlBatch(7, NoProducerID, -1, []byte{0, 0, 0, 2}, []byte{7}).encode(), Marker{}, ErrNotMarker},
		{"another type in the name of a producer", controlBatch(7, 31, 2, []byte{0, 0, 0, 9}, nil).encode(), Marker{}, ErrNotMarker},

		{"cut in the value", whole[:len(whole)-4], Marker{}, ErrCorruptBatch},
		{"cut behind the header", whole[:BatchHeaderSize], Marker{}, ErrCorruptBatch},
		{"no key", controlBatch(7, 31, 2, nil, []byte{0, 0, 0, 0, 0, 5}).encode(), Marker{}, ErrCorruptBatch},
		{"a negative version of the key", controlBatch(7, 31, 2, []byte{0xff, 0xff, 0, 0}, []byte{0, 0, 0, 0, 0, 5}).encode(), Marker{}, ErrCorruptBatch},
		{"no coordinator epoch", controlBatch(7, 31, 2, []byte{0, 0, 0, 0}, []byte{0, 0}).encode(), Marker{}, ErrCorruptBatch},
		{"compressed", compressed.encode(), Marker{}, ErrCorruptBatch},
	} {
		k, h, err := ParseMarker(tt.p)
		if tt.err != nil {
			tt.want = Marker{ProducerID: NoProducerID}
		}
		if !errors.Is(err, tt.err) || k != tt.want {
			t.Errorf("%s: %+v, %v, want %+v, %v", tt.reason, k, err, tt.want, tt.err)
		}
		if (err == nil) != (h.BaseOffset == 7) || err != nil && h != (BatchHeader{}) {
			t.Errorf("%s: header %+v beside %v", tt.reason, h, err)
		}
	}
}

// TestStamp: a broker writes base offset and leader epoch into a batch that it
// appends, and the checksum of the producer stays right.
func TestStamp(t *testing.T) {
	for _, tt := range []struct {
		base  int64
		epoch int32
	}{{0, 0}, {1, -1}, {0x0102030405060708, 0x0a0b0c0d}, {math.MaxInt64 - 2, math.MaxInt32}} {
		p := dataBatch(0, 31, 4, 7, 2).encode()
		want := dataBatch(tt.base, 31, 4, 7, 2)
		want.leader = tt.epoch
		SetBaseOffset(p, tt.base)
		SetPartitionLeaderEpoch(p, tt.epoch)
		if diff := cmp.Diff(want.encode(), p); diff != "" {
			t.Fatalf("base offset %d, leader epoch %d (-want +got):\n%s", tt.base, tt.epoch, diff)
		}
		b, h, err := ParseBatch(p)
		if err != nil || h.BaseOffset != tt.base || h.PartitionLeaderEpoch != tt.epoch || b.BaseSequence != 7 {
			t.Errorf("base offset %d, leader epoch %d: %+v, %+v, %v", tt.base, tt.epoch, b, h, err)
		}
		if err := h.VerifyCRC(p); err != nil {
			t.Error(err)
		}
	}
}

// TestStampPanics: stamping needs the bytes up to the end of the field.
func TestStampPanics(t *testing.T) {
	panics := func(f func()) (yes bool) {
		defer func() { yes = recover() != nil }()
		f()
		return false
	}
	for n := range 20 {
		if got := panics(func() { SetBaseOffset(make([]byte, n), 1) }); got != (n < 8) {
			t.Errorf("SetBaseOffset panics for %d bytes: %t", n, got)
		}
		if got := panics(func() { SetPartitionLeaderEpoch(make([]byte, n), 1) }); got != (n < 16) {
			t.Errorf("SetPartitionLeaderEpoch panics for %d bytes: %t", n, got)
		}
	}
}

// TestVerifyCRC: the checksum covers every bit from the attributes on, to the
// end of the batch and not beyond.
func TestVerifyCRC(t *testing.T) {
	p := dataBatch(5, 31, 0, 0, 2).encode()
	_, h, err := ParseBatch(p)
	if err != nil {
		t.Fatal(err)
	}
	for bit := 0; bit < len(p)*8; bit++ {
		p[bit/8] ^= 1 << (bit % 8)
		if err := h.VerifyCRC(p); (err == nil) != (bit < 21*8) {
			t.Errorf("bit %d of byte %d flipped: %v", bit%8, bit/8, err)
		}
		p[bit/8] ^= 1 << (bit % 8)
	}
	for n := range p {
		if err := h.VerifyCRC(p[:n]); !errors.Is(err, ErrCorruptBatch) {
			t.Errorf("cut to %d bytes: %v, want %v", n, err, ErrCorruptBatch)
		}
	}
	if err := (BatchHeader{}).VerifyCRC(p); !errors.Is(err, ErrCorruptBatch) {
		t.Errorf("the zero header: %v, want %v", err, ErrCorruptBatch)
	}
}

// TestParseBatchDoesNotAllocate: every append begins with it.
func TestParseBatchDoesNotAllocate(t *testing.T) {
	p, marker := unhex(realLog[0]), unhex(realLog[5])
	allocs := testing.AllocsPerRun(100, func() {
		_, h, err := ParseBatch(p)
		if err != nil || h.VerifyCRC(p) != nil {
			t.Fatal(err)
		}
		if _, _, err := ParseMarker(marker); err != nil {
			t.Fatal(err)
		}
	})
	if allocs != 0 {
		t.Errorf("%v allocations, want 0", allocs)
	}
}

// FuzzParseBatch. Invariants:
//
//  1. No panic.
//  2. The error is ErrUnsupportedMagic exactly for a magic other than 2, and
//     otherwise ErrCorruptBatch or none.
//  3. Without an error every field that counts something is in its range, and
//     the encoder makes the same 61 bytes of the answer again.
//  4. Bytes behind the header do not matter to ParseBatch.
//  5. VerifyCRC accepts exactly when the batch is whole and the checksum right.
//  6. ParseMarker has the error of ParseBatch, or one of its own; without an error
//     it agrees with ParseBatch on all that both read.
func FuzzParseBatch(f *testing.F) {
	for _, s := range realLog {
		f.Add(unhex(s))
	}
	f.Add(unhex(realLog[0])[:60])
	f.Add(testBatch{base: math.MaxInt64 - 1, delta: 0, records: 0}.encode())
	f.Add(make([]byte, BatchHeaderSize))
	f.Fuzz(func(t *testing.T, p []byte) {
		b, h, err := ParseBatch(p)
		if otherMagic := len(p) > 16 && p[16] != 2; errors.Is(err, ErrUnsupportedMagic) != otherMagic {
			t.Fatalf("error %v, other magic %t", err, otherMagic)
		}
		k, kh, kerr := ParseMarker(p)
		if err != nil {
			if !errors.Is(err, ErrUnsupportedMagic) && !errors.Is(err, ErrCorruptBatch) {
				t.Fatalf("error %v of another kind", err)
			}
			if kerr == nil || kerr.Error() != err.Error() {
				t.Fatalf("ParseMarker: %v, ParseBatch: %v", kerr, err)
			}
			return
		}
		switch {
		case kerr != nil && !errors.Is(kerr, ErrNotMarker) && !errors.Is(kerr, ErrCorruptBatch):
			t.Fatalf("ParseMarker: error %v of another kind", kerr)
		case kerr == nil && (kh != h || k.ProducerID != b.ProducerID || k.Epoch != b.Epoch || !h.Attributes.Control()):
			t.Fatalf("ParseMarker: %+v %+v, ParseBatch: %+v %+v", k, kh, b, h)
		}
		if b.Count < 1 || h.Size < BatchHeaderSize || h.Records < 0 || h.BaseOffset < 0 || h.LastOffset()+1 <= h.BaseOffset {
			t.Fatalf("out of range: %+v %+v", b, h)
		}
		if diff := cmp.Diff(p[:BatchHeaderSize], encodeHeader(b, h)); diff != "" {
			t.Fatalf("encoded again (-want +got):\n%s", diff)
		}
		if b2, h2, err := ParseBatch(p[:BatchHeaderSize]); b2 != b || h2 != h || err != nil {
			t.Fatalf("without what follows: %+v %+v %v, want %+v %+v", b2, h2, err, b, h)
		}
		right := len(p) >= h.Size && crc32.Checksum(p[21:h.Size], crc32.MakeTable(crc32.Castagnoli)) == h.CRC
		if err := h.VerifyCRC(p); (err == nil) != right {
			t.Fatalf("VerifyCRC: %v, right %t", err, right)
		}
	})
}

// encodeHeader makes the bytes of a header from what was read of it.
func encodeHeader(b Batch, h BatchHeader) []byte {
	p := testBatch{base: h.BaseOffset, delta: b.Count - 1, pid: b.ProducerID, epoch: b.Epoch, seq: b.BaseSequence,
		attrs: int16(h.Attributes), leader: h.PartitionLeaderEpoch, records: h.Records}.encode()
	binary.BigEndian.PutUint32(p[8:], uint32(h.Size-12))
	binary.BigEndian.PutUint32(p[17:], h.CRC)
	binary.BigEndian.PutUint64(p[27:], uint64(h.BaseTimestamp))
	binary.BigEndian.PutUint64(p[35:], uint64(h.MaxTimestamp))
	return p
}
