package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

// makePartition fills a partition's directory: two producers with a snapshot
// of them, then more of one of them and a third, in a second segment, and a torn
// tail.
func makePartition(t *testing.T, dir string) {
	t.Helper()
	log, err := segment.Open(dir, segment.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	m := idempotence.New(idempotence.Config{})
	add := func(pid int64, epoch int16, seq int32, n int) {
		p := segmenttest.Batch(pid, epoch, seq, make([]string, n)...)
		b, h, err := idempotence.ParseBatch(p)
		if err != nil {
			t.Fatal(err)
		}
		s := &segment.Batch{Header: h, Bytes: p}
		if err := log.Append([]*segment.Batch{s}); err != nil {
			t.Fatal(err)
		}
		if err := m.CommitBatch(b, s.Header.BaseOffset); err != nil {
			t.Fatal(err)
		}
	}
	add(31, 0, 0, 3)
	add(7, 2, 0, 1)
	add(31, 0, 3, 2)
	m.Expire(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	snapshots, err := idempotence.OpenSnapshotDir(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer snapshots.Close()
	if err := snapshots.Save(m.Snapshot()); err != nil {
		t.Fatal(err)
	}
	if err := log.Roll(); err != nil {
		t.Fatal(err)
	}
	add(31, 0, 5, 1)
	add(40, 0, 0, 2)
	f, err := os.OpenFile(filepath.Join(dir, "00000000000000000006.log"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	torn := segmenttest.Batch(31, 0, 6, "never acknowledged")
	binary.BigEndian.PutUint64(torn, uint64(log.End()))
	if _, err := f.Write(torn[:70]); err != nil {
		t.Fatal(err)
	}
}

// What is shown is what a broker would recover, whatever kind of file it is
// read from, and nothing on disk changes.
func TestInspect(t *testing.T) {
	dir := t.TempDir()
	partition := filepath.Join(dir, "t-0")
	makePartition(t, partition)
	before := contents(t, dir)

	const header = "  producer  epoch  last activity         transaction  window: sequences@offset, oldest first\n"
	recovered := partition + ": snapshot at offset 6, then the log; end offset 9, 3 producers\n" + header +
		"  7         2      2026-01-02T03:04:05Z  -            0-0@3\n" +
		"  31        0      -                     -            0-2@0 3-4@4 5-5@6\n" +
		"  40        0      -                     -            0-1@7\n"
	snapshot := filepath.Join(partition, "00000000000000000006.idps")
	newest := filepath.Join(partition, "00000000000000000006.log")
	kafka := filepath.Join("..", "..", "testdata", "kafka-snapshots", "three.snapshot")
	for _, tt := range []struct{ path, want string }{
		{dir, recovered},
		{partition, recovered},
		{snapshot, snapshot + ": snapshot; end offset 6, 2 producers\n" + header +
			"  7         2      2026-01-02T03:04:05Z  -            0-0@3\n" +
			"  31        0      2026-01-02T03:04:05Z  -            0-2@0 3-4@4\n"},
		{newest, newest + ": segment of 2 batches and 0 markers, torn after byte 143; end offset 9, 2 producers\n" +
			"  producer  epoch  last activity  transaction  window: sequences@offset, oldest first\n" +
			"  31        0      -              -            5-5@6\n" +
			"  40        0      -              -            0-1@7\n"},
		{kafka, kafka + ": Kafka snapshot; end offset unknown, 3 producers\n" +
			"  producer    epoch  last activity         transaction  window: sequences@offset, oldest first\n" +
			"  5           2      2023-11-14T22:13:20Z  -            -\n" +
			"  31          0      2023-11-14T22:13:20Z  -            3-4@3\n" +
			"  4000000001  7      2023-11-14T22:13:20Z  from 5       0-3@5\n"},
	} {
		var out bytes.Buffer
		if err := inspect(&out, []string{tt.path}); err != nil {
			t.Errorf("%s: %v", tt.path, err)
		}
		if got := out.String(); got != tt.want {
			t.Errorf("%s: got\n%swant\n%s", tt.path, got, tt.want)
		}
	}
	if after := contents(t, dir); after != before {
		t.Errorf("inspecting changed the directory from\n%sto\n%s", before, after)
	}

	// A snapshot that is damaged is passed over, and so is one of records that
	// the log does not have.
	if err := os.WriteFile(snapshot, []byte("damaged"), 0o644); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := inspect(&out, []string{dir}); err != nil || !strings.Contains(out.String(), "31        0      -              -            0-2@0 3-4@4 5-5@6\n") {
		t.Errorf("with a damaged snapshot: %v\n%s", err, out.String())
	}
}

// contents lists the files under a directory with their bytes.
func contents(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		p, err := os.ReadFile(path)
		fmt.Fprintf(&b, "%s: %x\n", path, p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// What cannot be shown is said, not left out.
func TestInspectRefuses(t *testing.T) {
	dir := t.TempDir()
	damaged := filepath.Join(dir, "00000000000000000000.log")
	p := segmenttest.Batch(31, 0, 0, "x")
	p[len(p)-1] ^= 1
	for name, p := range map[string][]byte{
		damaged:                               p,
		filepath.Join(dir, "a.idps"):          []byte("idps"),
		filepath.Join(dir, "a.snapshot"):      {0, 1, 0},
		filepath.Join(dir, "meta.properties"): nil,
	} {
		if err := os.WriteFile(name, p, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := inspect(new(bytes.Buffer), []string{name}); err == nil {
			t.Errorf("%s was shown", name)
		}
	}
	for _, path := range []string{dir, t.TempDir(), filepath.Join(dir, "nothing")} {
		if err := inspect(new(bytes.Buffer), []string{path}); err == nil {
			t.Errorf("%s was shown", path)
		}
	}
}
