package txn

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"os"
	"reflect"
	"strings"
	"testing"
)

// everyRecord has each kind of record, with every field set.
func everyRecord() []record {
	open := held("a", Ongoing, Producer{31, 7}, 2, Partition{"t", 1}, Partition{"u", 0})
	open.groups = []string{"g", "h"}
	open.offsets = []stagedOffset{
		{"g", Offset{Partition{"in", 2}, 41, 3, "note"}},
		{"h", Offset{Partition{"in", 0}, 0, -1, ""}},
	}
	rotating := held("b", PrepareCommit, Producer{32, 32767}, 2, Partition{"t", 0})
	rotating.lastEpoch, rotating.nextID = 32766, 1001
	rotated := held("c", CompleteAbort, Producer{1000, 0}, 2)
	rotated.lastEpoch, rotated.previousID = 32766, 33
	return []record{
		startRecord{1},
		blockRecord{2000},
		held("d", Empty, Producer{34, 0}, 0),
		open,
		rotating,
		rotated,
		forgottenRecord{"d"},
		offsetsRecord{"g", []Offset{{Partition{"in", 1}, 9, 2, "note"}}},
		stopRecord{},
	}
}

func encodeAll(records []record) []byte {
	var log []byte
	for i, r := range records {
		log = frame{int64(i + 1), int64(i), r}.appendTo(log)
	}
	return log
}

// The bytes of version 1 as they were when it was settled. They are never
// changed; a new version adds a file.
func TestGoldenRecords(t *testing.T) {
	golden, err := os.ReadFile("testdata/records_v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(strings.Join(strings.Fields(string(golden)), ""))
	if err != nil {
		t.Fatal(err)
	}
	if got := encodeAll(everyRecord()); !bytes.Equal(got, want) {
		t.Errorf("encoded:\n%s", hex.Dump(got))
	}
	for i, r := range everyRecord() {
		f, size, err := decodeFrame(want)
		if err != nil {
			t.Fatalf("record %d: %v", i, err)
		}
		if f.number != int64(i+1) || f.durable != int64(i) || !reflect.DeepEqual(f.record, r) {
			t.Errorf("record %d: %+v, want %+v", i, f, r)
		}
		want = want[size:]
	}
	if len(want) > 0 {
		t.Errorf("%d bytes left", len(want))
	}
}

// A new field of a transaction must be thought about here: in the log, or not.
func TestEveryFieldIsRecorded(t *testing.T) {
	known := strings.Fields("id producer lastEpoch previousID nextID timeout state version start updated partitions groups offsets fenced")
	kind := reflect.TypeFor[transaction]()
	var have []string
	for f := range kind.NumField() {
		have = append(have, kind.Field(f).Name)
	}
	if !reflect.DeepEqual(have, known) {
		t.Errorf("fields %v, want %v", have, known)
	}
}

// What is decoded does not alias the log.
func TestDecodeCopies(t *testing.T) {
	log := encodeAll(everyRecord())
	var decoded []record
	for at := 0; at < len(log); {
		f, size, err := decodeFrame(log[at:])
		if err != nil {
			t.Fatal(err)
		}
		decoded = append(decoded, f.record)
		at += size
	}
	for i := range log {
		log[i] = 'x'
	}
	if !reflect.DeepEqual(decoded, everyRecord()) {
		t.Errorf("decoded records changed with the log: %+v", decoded)
	}
}

// Records that are intact and make no sense.
func TestDecodeRefuses(t *testing.T) {
	change := func(f func(*transaction)) record {
		x := held("a", Ongoing, Producer{31, 7}, 2, Partition{"t", 0}, Partition{"t", 1})
		x.groups = []string{"g", "h"}
		x.offsets = []stagedOffset{{"g", Offset{Partition{"in", 0}, 1, 1, ""}}}
		f(x)
		return x
	}
	for name, r := range map[string]record{
		"epoch 0 of a coordinator":     startRecord{0},
		"no block":                     blockRecord{0},
		"forgotten nothing":            forgottenRecord{""},
		"no group":                     offsetsRecord{"", nil},
		"negative offset":              offsetsRecord{"g", []Offset{{Partition{"t", 0}, -1, 0, ""}}},
		"negative leader epoch":        offsetsRecord{"g", []Offset{{Partition{"t", 0}, 0, -2, ""}}},
		"negative partition":           offsetsRecord{"g", []Offset{{Partition{"t", -1}, 0, 0, ""}}},
		"no topic":                     offsetsRecord{"g", []Offset{{Partition{"", 0}, 0, 0, ""}}},
		"offset twice":                 offsetsRecord{"g", []Offset{{Partition{"t", 0}, 0, 0, ""}, {Partition{"t", 0}, 0, 0, ""}}},
		"no id":                        change(func(x *transaction) { x.id = "" }),
		"negative producer id":         change(func(x *transaction) { x.producer.ID = -1 }),
		"negative epoch":               change(func(x *transaction) { x.producer.Epoch = -1 }),
		"negative last epoch":          change(func(x *transaction) { x.lastEpoch = -2 }),
		"negative previous id":         change(func(x *transaction) { x.previousID = -2 }),
		"previous id, no last epoch":   change(func(x *transaction) { x.previousID = 5 }),
		"negative next id":             change(func(x *transaction) { x.nextID = -2 }),
		"next id while ongoing":        change(func(x *transaction) { x.nextID = 5 }),
		"next id below epoch 32767":    change(func(x *transaction) { x.nextID, x.state, x.offsets = 5, PrepareAbort, nil }),
		"no time-out":                  change(func(x *transaction) { x.timeout = 0 }),
		"negative state":               change(func(x *transaction) { x.state = -1 }),
		"unknown state":                change(func(x *transaction) { x.state, x.partitions, x.groups, x.offsets = 6, nil, nil, nil }),
		"version 0":                    change(func(x *transaction) { x.version = 0 }),
		"version 3":                    change(func(x *transaction) { x.version = 3 }),
		"partitions in Empty":          change(func(x *transaction) { x.state, x.groups, x.offsets = Empty, nil, nil }),
		"no partitions in Prepare":     change(func(x *transaction) { x.state, x.partitions = PrepareCommit, nil }),
		"groups in Complete":           change(func(x *transaction) { x.state, x.partitions = CompleteCommit, nil }),
		"offsets in an abort":          change(func(x *transaction) { x.state = PrepareAbort }),
		"partitions that do not rise":  change(func(x *transaction) { x.partitions[0].Partition = 1 }),
		"groups that do not rise":      change(func(x *transaction) { x.groups[0] = "i" }),
		"an empty group":               change(func(x *transaction) { x.groups[0] = "" }),
		"an offset of an empty group":  change(func(x *transaction) { x.offsets[0].group = "" }),
		"a negative offset, staged":    change(func(x *transaction) { x.offsets[0].Offset.Offset = -1 }),
		"a negative partition of them": change(func(x *transaction) { x.partitions[0].Partition = -1 }),
	} {
		if f, _, err := decodeFrame(frame{1, 0, r}.appendTo(nil)); err == nil || isBroken(err) {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
	for name, f := range map[string]frame{
		"number 0":         {0, 0, stopRecord{}},
		"negative durable": {1, -1, stopRecord{}},
	} {
		if _, _, err := decodeFrame(f.appendTo(nil)); err == nil || isBroken(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := decodeFrame(frame{1, 0, change(func(*transaction) {})}.appendTo(nil)); err != nil {
		t.Errorf("the record they were made from: %v", err)
	}

	stop := frame{1, 0, stopRecord{}}.appendTo(nil)
	for name, test := range map[string]struct {
		body []byte
		want error
	}{
		"empty body":     {nil, nil},
		"version 0":      {withByte(stop[headerSize:], 0, 0), ErrVersion},
		"version 2":      {withByte(stop[headerSize:], 0, 2), ErrVersion},
		"kind 6":         {withByte(stop[headerSize:], 1, 6), nil},
		"kind -1":        {withByte(stop[headerSize:], 1, 255), nil},
		"a byte more":    {append(bytes.Clone(stop[headerSize:]), 0), nil},
		"a byte less":    {stop[headerSize : len(stop)-1], nil},
		"a list too big": {append(withByte(stop[headerSize:], 1, byte(kindOffsets)), 0, 1, 'g', 0x7f, 0xff, 0xff, 0xff), nil},
		"a list below 0": {append(withByte(stop[headerSize:], 1, byte(kindOffsets)), 0, 1, 'g', 0xff, 0xff, 0xff, 0xff), nil},
	} {
		f, _, err := decodeFrame(sealed(test.body))
		if err == nil || isBroken(err) || test.want != nil && !errors.Is(err, test.want) {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
}

func withByte(b []byte, at int, value byte) []byte {
	b = bytes.Clone(b)
	b[at] = value
	return b
}

// sealed puts a header with good checksums before a body.
func sealed(body []byte) []byte {
	header := make([]byte, headerSize)
	binary.BigEndian.PutUint32(header, uint32(len(body)))
	binary.BigEndian.PutUint32(header[4:], crc32.Checksum(header[:4], castagnoli))
	binary.BigEndian.PutUint32(header[8:], crc32.Checksum(body, castagnoli))
	return append(header, body...)
}

// FuzzRecords decodes anything, and sealed as the body of a record.
//
//   - Nothing panics.
//   - What is decoded encodes to the same bytes.
//   - Recover reads the longest prefix of records, and says so.
func FuzzRecords(f *testing.F) {
	log := encodeAll(everyRecord())
	f.Add(log)
	f.Add(log[:len(log)-3])
	f.Add([]byte(nil))
	f.Add(make([]byte, 64))
	for _, r := range everyRecord() {
		f.Add(frame{1, 0, r}.appendTo(nil)[headerSize:])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, log := range [][]byte{data, sealed(data)} {
			var again []byte
			for at := 0; at < len(log); {
				f, size, err := decodeFrame(log[at:])
				if err != nil {
					break
				}
				again = f.appendTo(again)
				at += size
			}
			if !bytes.HasPrefix(log, again) {
				t.Fatalf("decoded and encoded again:\n%x\n%x", log, again)
			}
			r, err := Recover(log)
			if err == nil && r.Size != int64(len(again)) {
				t.Fatalf("Recover: %d bytes, want %d", r.Size, len(again))
			}
			if err == nil && (r.Tail == nil) != (len(again) == len(log)) {
				t.Fatalf("Recover: tail %v with %d of %d bytes read", r.Tail, len(again), len(log))
			}
		}
	})
}
