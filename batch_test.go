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

// This file has the record batches that the tests of the segment reader are
// made of, and the tests of the header.

// testBatch is a record batch as a test describes it. The encoder below shares
// no code with the reader: it appends field after field as the format's
// description has them, where the reader looks at positions.
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
		if b != (Batch{}) || h != (BatchHeader{}) {
			t.Errorf("%s: %+v %+v beside the error", tt.reason, b, h)
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

// TestParseBatchDoesNotAllocate: it stands in front of every append.
func TestParseBatchDoesNotAllocate(t *testing.T) {
	p := unhex(realLog[0])
	allocs := testing.AllocsPerRun(100, func() {
		_, h, err := ParseBatch(p)
		if err != nil || h.VerifyCRC(p) != nil {
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
		if err != nil {
			if !errors.Is(err, ErrUnsupportedMagic) && !errors.Is(err, ErrCorruptBatch) {
				t.Fatalf("error %v of another kind", err)
			}
			return
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
