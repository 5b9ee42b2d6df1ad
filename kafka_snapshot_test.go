package idempotence

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file tests that Kafka's snapshots are read as Kafka reads them, and written as
// Kafka writes them, against files that Kafka wrote.

// kafkaFiles are the good files, with the end offsets of their logs.
var kafkaFiles = map[string]int64{"empty": 5, "three": 10, "thousand": 78114}

func kafkaFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "kafka-snapshots", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// inKafka returns the bytes of a snapshot taken now, in Kafka's format.
func inKafka(t rapid.TB, m *ProducerStateManager) []byte {
	t.Helper()
	var buf bytes.Buffer
	n, err := m.Snapshot().WriteKafka(&buf)
	if err != nil || n != int64(buf.Len()) {
		t.Fatalf("WriteKafka returned %d for %d bytes, %v", n, buf.Len(), err)
	}
	return buf.Bytes()
}

func fromKafka(t rapid.TB, b []byte, endOffset int64) *ProducerStateManager {
	t.Helper()
	m := New(Config{})
	if err := m.RestoreKafka(bytes.NewReader(b), endOffset); err != nil {
		t.Fatal(err)
	}
	audit(t, m)
	return m
}

// kafkaEntry is a producer of a Kafka snapshot. It states the layout a second time.
type kafkaEntry struct {
	id           int64
	epoch        int16
	lastSequence int32
	lastOffset   int64
	delta        int32
	timestamp    int64
	coordinator  int32
	txnFirst     int64
}

// kafkaBytes returns a Kafka snapshot of some producers.
func kafkaBytes(entries ...kafkaEntry) []byte {
	var body bytes.Buffer
	write := func(v any) { binary.Write(&body, binary.BigEndian, v) }
	write(int32(len(entries)))
	for _, e := range entries {
		for _, v := range []any{e.id, e.epoch, e.lastSequence, e.lastOffset, e.delta, e.timestamp, e.coordinator, e.txnFirst} {
			write(v)
		}
	}
	return kafkaFramed(body.Bytes())
}

// kafkaFramed prepends the version and the checksum.
func kafkaFramed(body []byte) []byte {
	b := []byte{0, 1}
	b = binary.BigEndian.AppendUint32(b, crc32.Checksum(body, castagnoli))
	return append(b, body...)
}

// sortedKafka returns a Kafka snapshot with its producers in the order of ids.
func sortedKafka(b []byte) []byte {
	var entries [][]byte
	for rest := b[kafkaHeaderSize:]; len(rest) > 0; rest = rest[kafkaProducerSize:] {
		entries = append(entries, rest[:kafkaProducerSize])
	}
	slices.SortFunc(entries, bytes.Compare) // ids come first, and are not negative
	return kafkaFramed(slices.Concat(b[6:kafkaHeaderSize], slices.Concat(entries...)))
}

// TestKafkaFiles: files written by Kafka restore to what Kafka reads from them.
// Written again, they are equal but for the order of producers.
func TestKafkaFiles(t *testing.T) {
	for name, end := range kafkaFiles {
		t.Run(name, func(t *testing.T) {
			file := kafkaFile(t, name+".snapshot")
			m := fromKafka(t, file, end)
			if m.EndOffset() != end {
				t.Errorf("end offset %d, want %d", m.EndOffset(), end)
			}
			var want, got []string
			for _, line := range strings.Split(string(kafkaFile(t, name+".dump")), "\n") {
				if line == "END" {
					break
				}
				want = append(want, line)
			}
			open := 0
			for p := range m.Producers() {
				got = append(got, kafkaDump(p))
				if p.CurrentTxnFirstOffset >= 0 {
					open++
				}
			}
			if n := m.Stats().OpenTransactions; int(n) != open {
				t.Errorf("%d open transactions, want %d", n, open)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-Kafka +ours)\n%s", diff)
			}
			if again := inKafka(t, m); !bytes.Equal(sortedKafka(file), again) {
				t.Errorf("written again as\n%x, want\n%x", again, sortedKafka(file))
			}
		})
	}
}

// kafkaDump describes a producer as the dump files do.
func kafkaDump(p ProducerState) string {
	lastSequence, lastOffset, window := int32(-1), int64(-1), "[]"
	if len(p.Window) > 0 {
		b := p.Window[len(p.Window)-1]
		lastSequence, lastOffset = b.LastSequence, b.BaseOffset+(int64(b.LastSequence)-int64(b.FirstSequence)+1<<31)%(1<<31)
		window = fmt.Sprintf("[%d-%d@%d]", b.FirstSequence, b.LastSequence, b.BaseOffset)
	}
	return fmt.Sprintf("%d %d %d %d %d %d %d window=%s",
		p.ProducerID, p.Epoch, lastSequence, lastOffset, p.LastActivity.UnixMilli(), p.CoordinatorEpoch, p.CurrentTxnFirstOffset, window)
}

// TestKafkaDamage: every damaged file is refused, also those whose trailing bytes
// Kafka ignores. The state is unchanged.
func TestKafkaDamage(t *testing.T) {
	damaged, err := filepath.Glob(filepath.Join("testdata", "kafka-snapshots", "*.snapshot"))
	if err != nil || len(damaged) < 15 {
		t.Fatal(len(damaged), err)
	}
	m, untouched := occupied(t)
	refused := func(name string, b []byte) {
		t.Helper()
		if err := m.RestoreKafka(bytes.NewReader(b), 10); !errors.Is(err, ErrCorruptSnapshot) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, file := range damaged {
		name := filepath.Base(file)
		if _, good := kafkaFiles[strings.TrimSuffix(name, ".snapshot")]; !good {
			refused(name, kafkaFile(t, name))
		}
	}
	three := kafkaFile(t, "three.snapshot")
	for n := range three {
		refused(fmt.Sprintf("cut to %d", n), three[:n])
		bad := bytes.Clone(three)
		bad[n] ^= 0x10
		refused(fmt.Sprintf("byte %d flipped", n), bad)
	}
	for _, name := range []string{"wrong-version-0", "wrong-version-2"} {
		if err := m.RestoreKafka(bytes.NewReader(kafkaFile(t, name+".snapshot")), 10); !errors.Is(err, ErrSnapshotVersion) {
			t.Errorf("%s: %v", name, err)
		}
	}
	broken := errors.New("broken pipe")
	r := io.MultiReader(bytes.NewReader(three[:60]), iotest.ErrReader(broken))
	if err := m.RestoreKafka(r, 10); !errors.Is(err, broken) || errors.Is(err, ErrCorruptSnapshot) {
		t.Errorf("a reader that fails: %v", err)
	}
	untouched()
}

// TestKafkaImpossible: what no broker writes is refused, although Kafka would read
// it.
func TestKafkaImpossible(t *testing.T) {
	const end = 100
	good := kafkaEntry{id: 31, epoch: 2, lastSequence: 9, lastOffset: 50, delta: 4, timestamp: 1000, coordinator: 3, txnFirst: 40}
	with := func(change func(*kafkaEntry)) kafkaEntry {
		e := good
		change(&e)
		return e
	}
	marker := with(func(e *kafkaEntry) { e.lastSequence, e.lastOffset, e.delta = -1, -1, 0 })
	for reason, b := range map[string][]byte{
		"good":                         kafkaBytes(good),
		"good, of a marker":            kafkaBytes(marker),
		"a batch at the end":           kafkaBytes(with(func(e *kafkaEntry) { e.lastOffset = end - 1 })),
		"a batch from the start":       kafkaBytes(with(func(e *kafkaEntry) { e.lastOffset = 4 })),
		"a batch without sequences":    kafkaBytes(with(func(e *kafkaEntry) { e.lastSequence = -1 })),
		"as large as a batch gets":     kafkaBytes(with(func(e *kafkaEntry) { e.lastOffset, e.delta = math.MaxInt64-1, math.MaxInt32-1 })),
		"BAD negative id":              kafkaBytes(with(func(e *kafkaEntry) { e.id = -1 })),
		"BAD an id twice":              kafkaBytes(good, marker),
		"BAD negative epoch":           kafkaBytes(with(func(e *kafkaEntry) { e.epoch = -1 })),
		"BAD sequence below -1":        kafkaBytes(with(func(e *kafkaEntry) { e.lastSequence = -2 })),
		"BAD sequence without offset":  kafkaBytes(with(func(e *kafkaEntry) { e.lastOffset = -1 })),
		"BAD offset below -1":          kafkaBytes(with(func(e *kafkaEntry) { e.lastOffset = -2 })),
		"BAD offset at the end":        kafkaBytes(with(func(e *kafkaEntry) { e.lastOffset = end })),
		"BAD begins before the log":    kafkaBytes(with(func(e *kafkaEntry) { e.lastOffset = 3 })),
		"BAD negative size":            kafkaBytes(with(func(e *kafkaEntry) { e.delta = -1 })),
		"BAD larger than a batch gets": kafkaBytes(with(func(e *kafkaEntry) { e.lastOffset, e.delta = math.MaxInt64-1, math.MaxInt32 })),
		"BAD marker with a size":       kafkaBytes(with(func(e *kafkaEntry) { e.lastSequence, e.lastOffset = -1, -1 })),
		"BAD coordinator below -1":     kafkaBytes(with(func(e *kafkaEntry) { e.coordinator = -2 })),
		"BAD transaction below -1":     kafkaBytes(with(func(e *kafkaEntry) { e.txnFirst = -2 })),
		"BAD transaction at the end":   kafkaBytes(with(func(e *kafkaEntry) { e.txnFirst = end })),
		"BAD negative count":           kafkaFramed([]byte{0x80, 0, 0, 0}),
		"BAD no count":                 kafkaFramed(nil),
		"BAD a byte too many":          kafkaFramed([]byte{0, 0, 0, 0, 0}),
	} {
		m, untouched := occupied(t)
		limit := int64(end)
		if strings.HasSuffix(reason, "batch gets") {
			limit = math.MaxInt64
		}
		err := m.RestoreKafka(bytes.NewReader(b), limit)
		if !strings.HasPrefix(reason, "BAD") {
			if audit(t, m); err != nil {
				t.Errorf("%s: %v", reason, err)
			}
			continue
		}
		if untouched(); !errors.Is(err, ErrCorruptSnapshot) {
			t.Errorf("%s: %v", reason, err)
		}
	}
}

// TestKafkaSequences: the first sequence follows from the last one and the offset
// delta, over the wrap too.
func TestKafkaSequences(t *testing.T) {
	for _, tt := range []struct {
		last, delta int32
		first       int32
	}{{0, 0, 0}, {9, 4, 5}, {4, 4, 0}, {3, 4, math.MaxInt32}, {0, math.MaxInt32 - 1, 2}, {math.MaxInt32, 0, math.MaxInt32}} {
		b := kafkaBytes(kafkaEntry{id: 31, lastSequence: tt.last, lastOffset: 1 << 40, delta: tt.delta, timestamp: 5, coordinator: -1, txnFirst: -1})
		m := fromKafka(t, b, 1<<41)
		p, _ := m.Producer(31)
		want := []BatchMetadata{{tt.first, tt.last, 1<<40 - int64(tt.delta)}}
		if diff := cmp.Diff(want, p.Window); diff != "" {
			t.Errorf("%+v: (-want +got)\n%s", tt, diff)
		}
		if again := inKafka(t, m); !bytes.Equal(b, again) {
			t.Errorf("%+v: written again as %x", tt, again)
		}
	}
}

// TestKafkaTimestamps: any timestamp is restored, and decides which producers expire.
// An unknown one, and one ahead of the clock, count as active.
func TestKafkaTimestamps(t *testing.T) {
	var entries []kafkaEntry
	stamps := []int64{1000, -1, math.MinInt64, math.MaxInt64, 0, -2, 1000, 500_000}
	for i, at := range stamps {
		entries = append(entries, kafkaEntry{id: int64(i), lastSequence: 0, lastOffset: int64(20 - i), timestamp: at, coordinator: -1, txnFirst: -1})
	}
	file := kafkaBytes(entries...)
	m := New(Config{Expiration: 100 * time.Second})
	if err := m.RestoreKafka(bytes.NewReader(file), 30); err != nil {
		t.Fatal(err)
	}
	audit(t, m)
	if again := inKafka(t, m); !bytes.Equal(file, again) {
		t.Errorf("written again as\n%x, want\n%x", again, file)
	}
	if again := inKafka(t, restored(t, Config{}, encoded(t, m))); !bytes.Equal(file, again) {
		t.Errorf("and through our own format as\n%x, want\n%x", again, file)
	}
	ids := func() (ids []int64) {
		for p := range m.Producers() {
			ids = append(ids, p.ProducerID)
		}
		return ids
	}
	m.Expire(time.UnixMilli(100_500)) // forgets what is from 500 or before
	audit(t, m)
	if diff := cmp.Diff([]int64{0, 1, 3, 6, 7}, ids()); diff != "" {
		t.Errorf("at 100500: (-want +got)\n%s", diff)
	}
	m.Expire(time.UnixMilli(200_500)) // 1, 3 and 7 have been active at 100500
	audit(t, m)
	if diff := cmp.Diff([]int64(nil), ids()); diff != "" {
		t.Errorf("at 200500: (-want +got)\n%s", diff)
	}
}

// TestKafkaTimeOfTheActive: producers active since the last Expire are written with
// the time of that call, or without one if there was none.
func TestKafkaTimeOfTheActive(t *testing.T) {
	m := New(Config{})
	stamp := func() int64 { return int64(binary.BigEndian.Uint64(inKafka(t, m)[kafkaHeaderSize+26:])) }
	commit := func(seq int32) {
		t.Helper()
		if err := m.Commit(31, 0, seq, 1, int64(seq)); err != nil {
			t.Fatal(err)
		}
	}
	commit(0)
	if got := stamp(); got != -1 {
		t.Errorf("no Expire yet: %d", got)
	}
	m.Expire(time.UnixMilli(700).Add(999_999))
	if got := stamp(); got != 700 {
		t.Errorf("counted as active at 700: %d", got)
	}
	commit(1)
	if got := stamp(); got != 700 {
		t.Errorf("active since 700: %d", got)
	}
	m.Expire(time.UnixMilli(900))
	if got := stamp(); got != 900 {
		t.Errorf("counted as active at 900: %d", got)
	}
}

// TestKafkaOneBatch: retries of the batches that Kafka's format loses are refused,
// and a truncation into them is not exact.
func TestKafkaOneBatch(t *testing.T) {
	m := New(Config{})
	for seq := range int32(5) {
		if err := m.Commit(31, 0, seq, 1, int64(seq)); err != nil {
			t.Fatal(err)
		}
	}
	m = fromKafka(t, inKafka(t, m), 5)
	if res, err := m.Check(31, 0, 4, 1); err != nil || res != (Result{Duplicate, 4}) {
		t.Errorf("a retry of the newest: %v, %v", res, err)
	}
	if _, err := m.Check(31, 0, 3, 1); !errors.Is(err, ErrOutOfOrderSequence) {
		t.Errorf("a retry of the one before: %v", err)
	}
	for seq := range int32(3) {
		if err := m.Commit(31, 0, 5+seq, 1, int64(5+seq)); err != nil {
			t.Fatal(err)
		}
	}
	if !m.Truncate(8) {
		t.Error("nothing was cut")
	}
	if m.Truncate(7) {
		t.Error("exact, and a rebuild would have found four more batches")
	}
	if fromKafka(t, inKafka(t, m), 7).Truncate(6) {
		t.Error("exact below the end offset of the snapshot")
	}
}

// TestKafkaInFlight: Kafka refuses offsets at or past the end offset of a snapshot.
// What lies there because a batch was in flight is left out.
func TestKafkaInFlight(t *testing.T) {
	m := New(Config{})
	commit := func(b Batch, base int64) {
		t.Helper()
		if b.Count = 1; m.CommitBatch(b, base) != nil {
			t.Fatalf("%+v at %d", b, base)
		}
	}
	commit(Batch{ProducerID: 31, Transactional: true}, 0)
	commit(Batch{ProducerID: 32}, 1)
	if _, _, err := m.Reserve(Batch{ProducerID: 34, Count: 1}); err != nil {
		t.Fatal(err)
	}
	commit(Batch{ProducerID: 31, BaseSequence: 1, Transactional: true}, 3)
	commit(Batch{ProducerID: 32, Epoch: 1, Transactional: true}, 4)
	commit(Batch{ProducerID: 33}, 5)
	if s := m.Snapshot(); s.EndOffset() != 2 || s.LogEndOffset() != 6 {
		t.Fatalf("end offset %d, log end offset %d", s.EndOffset(), s.LogEndOffset())
	}
	want := kafkaBytes(
		kafkaEntry{id: 31, lastSequence: 0, lastOffset: 0, timestamp: -1, coordinator: -1, txnFirst: 0},
		kafkaEntry{id: 32, epoch: 1, lastSequence: -1, lastOffset: -1, timestamp: -1, coordinator: -1, txnFirst: -1})
	got := inKafka(t, m)
	if !bytes.Equal(want, got) {
		t.Errorf("written as\n%x, want\n%x", got, want)
	}
	if again := inKafka(t, restored(t, Config{}, encoded(t, m))); !bytes.Equal(want, again) {
		t.Errorf("after a restore written as\n%x, want\n%x", again, want)
	}
	fromKafka(t, got, 2)
}

// FuzzRestoreKafka holds for any bytes and any end offset:
//  1. It does not panic.
//  2. On an error, which is one of this package's, the state is untouched.
//  3. Otherwise the state is sound, and written again it is the same bytes, but
//     for the order of producers and batches without sequences.
func FuzzRestoreKafka(f *testing.F) {
	for name, end := range kafkaFiles {
		f.Add(kafkaFile(f, name+".snapshot")[6:], end)
	}
	f.Add(kafkaBytes(kafkaEntry{id: 31, lastSequence: -1, lastOffset: 9, delta: 3, timestamp: -1, coordinator: 0, txnFirst: -1})[6:], int64(10))
	f.Fuzz(func(t *testing.T, body []byte, end int64) {
		b := kafkaFramed(body)
		m := New(Config{})
		if err := m.Commit(31, 0, 0, 1, 0); err != nil {
			t.Fatal(err)
		}
		before := encoded(t, m)
		if err := m.RestoreKafka(bytes.NewReader(b), end); err != nil {
			audit(t, m)
			if !errors.Is(err, ErrCorruptSnapshot) || !bytes.Equal(before, encoded(t, m)) {
				t.Fatalf("%v, state\n%x, before\n%x", err, encoded(t, m), before)
			}
			return
		}
		audit(t, m)
		for at := kafkaHeaderSize; at < len(b); at += kafkaProducerSize {
			if int32(binary.BigEndian.Uint32(b[at+10:])) == -1 {
				copy(b[at+14:at+26], "\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00")
			}
		}
		if want, again := sortedKafka(b), inKafka(t, m); !bytes.Equal(want, again) {
			t.Fatalf("written again as\n%x, want\n%x", again, want)
		}
	})
}
