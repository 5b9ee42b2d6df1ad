package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
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
	m := idempotence.New(idempotence.Config{LogID: server.LogID("t", 0)})
	add := func(pid int64, epoch int16, seq int32, n int) {
		t.Helper()
		appendAndCommit(t, log, m, pid, epoch, seq, n)
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

	const header = "  producer  epoch  last activity         transaction  coordinator epoch  window: sequences@offset, oldest first\n"
	newest := filepath.Join(partition, "00000000000000000006.log")
	recovered := partition + ": snapshot at offset 6, then the log; end offset 9, 3 producers\n" + header +
		"  7         2      2026-01-02T03:04:05Z  -            -                  0-0@3\n" +
		"  31        0      -                     -            -                  0-2@0 3-4@4 5-5@6\n" +
		"  40        0      -                     -            -                  0-1@7\n" +
		"  to be cut off: 70 bytes from byte 143 of " + newest + " on, offset 9: "
	snapshot := filepath.Join(partition, "00000000000000000006.idps")
	kafka := filepath.Join("..", "..", "testdata", "kafka-snapshots", "three.snapshot")
	for _, tt := range []struct{ path, want string }{
		{dir, recovered},
		{partition, recovered},
		{snapshot, snapshot + ": snapshot; end offset 6, 2 producers\n" + header +
			"  7         2      2026-01-02T03:04:05Z  -            -                  0-0@3\n" +
			"  31        0      2026-01-02T03:04:05Z  -            -                  0-2@0 3-4@4\n"},
		{newest, newest + ": segment of 2 batches and 0 markers, torn after byte 143; end offset 9, 2 producers\n" +
			"  producer  epoch  last activity  transaction  coordinator epoch  window: sequences@offset, oldest first\n" +
			"  31        0      -              -            -                  5-5@6\n" +
			"  40        0      -              -            -                  0-1@7\n"},
		{kafka, kafka + ": Kafka snapshot; end offset unknown, 3 producers\n" +
			"  producer    epoch  last activity         transaction  coordinator epoch  window: sequences@offset, oldest first\n" +
			"  5           2      2023-11-14T22:13:20Z  -            9                  -\n" +
			"  31          0      2023-11-14T22:13:20Z  -            -                  3-4@3\n" +
			"  4000000001  7      2023-11-14T22:13:20Z  from 5       -                  0-3@5\n" +
			"  last stable offset 5, 1 open transactions, 0 aborted\n"},
	} {
		var out bytes.Buffer
		if err := inspect(&out, []string{tt.path}); err != nil {
			t.Errorf("%s: %v", tt.path, err)
		}
		if got := out.String(); !strings.HasPrefix(got, tt.want) || strings.Count(got, "\n") > strings.Count(tt.want, "\n")+1 {
			t.Errorf("%s: got\n%swant\n%s", tt.path, got, tt.want)
		}
	}
	if after := contents(t, dir); after != before {
		t.Errorf("inspecting changed the directory from\n%sto\n%s", before, after)
	}
}

// inspect does what a broker does at start: what is in flight when a snapshot is
// taken, and lost with a crash, is in neither; and a snapshot that cannot be
// loaded is named. (B2)
func TestB2_InspectShowsWhatWouldBeRecovered(t *testing.T) {
	dir := t.TempDir()
	partition := filepath.Join(dir, "t-0")
	log, err := segment.Open(partition, segment.Options{})
	if err != nil {
		t.Fatal(err)
	}
	// Producer 31 has 0 to 4 in the log. A batch of producer 77 is in flight from
	// offset 5 on, so the snapshot ends there, but knows 31 up to sequence 7.
	m := idempotence.New(idempotence.Config{LogID: server.LogID("t", 0)})
	for seq := range int32(5) {
		appendAndCommit(t, log, m, 31, 0, seq, 1)
	}
	inFlight := idempotence.Batch{ProducerID: 77, Count: 1}
	if _, _, err := m.Reserve(inFlight); err != nil {
		t.Fatal(err)
	}
	for seq := int32(5); seq < 8; seq++ {
		appendAndCommit(t, log, m, 31, 0, seq, 1)
	}
	snapshots, err := idempotence.OpenSnapshotDir(partition, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(snapshots.Save(m.Snapshot()), snapshots.Close(), log.Close()); err != nil {
		t.Fatal(err)
	}
	const snapshot = "00000000000000000005.idps"
	if _, err := os.Stat(filepath.Join(partition, snapshot)); err != nil {
		t.Fatal(err)
	}
	// The crash leaves six batches, all of one size.
	name := filepath.Join(partition, "00000000000000000000.log")
	info, err := os.Stat(name)
	if err == nil {
		err = os.Truncate(name, info.Size()/8*6)
	}
	if err != nil {
		t.Fatal(err)
	}
	show := func() string {
		t.Helper()
		var out bytes.Buffer
		if err := inspect(&out, []string{dir}); err != nil {
			t.Error(err)
		}
		return out.String()
	}
	const want = "1-1@1 2-2@2 3-3@3 4-4@4 5-5@5"
	if got := show(); !strings.Contains(got, "end offset 6, 1 producers") || !strings.Contains(got, " "+want+"\n") {
		t.Errorf("inspect shows\n%swant the window %s", got, want)
	}
	s, err := server.Open(server.Config{Dir: dir})
	if err == nil {
		err = s.Shutdown(context.Background())
	}
	if err != nil {
		t.Fatal(err)
	}
	if got := show(); !strings.Contains(got, " "+want+"\n") {
		t.Errorf("a broker has recovered\n%swant the window %s", got, want)
	}

	// What the broker has saved is damaged.
	const saved = "00000000000000000006.idps"
	if err := os.WriteFile(filepath.Join(partition, saved), []byte("damaged"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := show(); !strings.Contains(got, " "+want+"\n") || !strings.Contains(got, "snapshot not loaded: "+saved) {
		t.Errorf("with a damaged snapshot inspect shows\n%s", got)
	}
}

func appendAndCommit(t *testing.T, log *segment.Log, m *idempotence.ProducerStateManager, pid int64, epoch int16, seq int32, n int) {
	t.Helper()
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

// Of a partition with transactions, inspect shows what is open, up to where a
// committed reader gets and what was aborted; of transactions.log, who takes part.
func TestInspectTransactions(t *testing.T) {
	dir := t.TempDir()
	s, err := server.Open(server.Config{Dir: dir, Partitions: 1})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(ln) }()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	begin := func(id string) *kgo.Client {
		t.Helper()
		cl, err := newFranz(ln.Addr().String(), kgo.TransactionalID(id), kgo.AllowAutoTopicCreation())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(cl.Close)
		if err := cl.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		r := kgo.StringRecord(id)
		r.Topic = "t"
		if err := cl.ProduceSync(ctx, r).FirstErr(); err != nil {
			t.Fatal(err)
		}
		return cl
	}
	if err := begin("aborted").EndTransaction(ctx, kgo.TryAbort); err != nil {
		t.Fatal(err)
	}
	show := func(path string) string {
		t.Helper()
		var out bytes.Buffer
		if err := inspect(&out, []string{path}); err != nil {
			t.Error(err)
		}
		return out.String()
	}
	for !strings.Contains(show(dir), "CompleteAbort") { // and so its marker is written
		if ctx.Err() != nil {
			t.Fatalf("the transaction is not ended:\n%s", show(dir))
		}
		time.Sleep(time.Millisecond)
	}
	begin("open")
	before := contents(t, dir)
	for _, path := range []string{dir, filepath.Join(dir, "t-0")} {
		if got, want := show(path), "  last stable offset 2, 1 open transactions, 1 aborted\n"+
			"  aborted producer  first offset  marker\n"+
			"  0                 0             1\n"; !strings.Contains(got, want) {
			t.Errorf("%s: got\n%swant\n%s", path, got, want)
		}
	}
	for _, path := range []string{dir, filepath.Join(dir, server.TxnLogName)} {
		got := show(path)
		for _, want := range []string{
			server.TxnLogName + ": coordinator epoch 1, 2 transactional ids\n",
			"\n  transactional id  producer  epoch  state          since                 partitions  groups\n",
			"\n  \"aborted\"         0         1      CompleteAbort  ",
			"\n  \"open\"            1         0      Ongoing        ",
			"  t-0         -\n",
		} {
			if !strings.Contains(got, want) {
				t.Errorf("%s: got\n%swant in it\n%s", path, got, want)
			}
		}
	}
	if after := contents(t, dir); after != before {
		t.Error("inspecting changed the directory")
	}
	if err := errors.Join(s.Shutdown(ctx), <-served); err != nil {
		t.Fatal(err)
	}

	name := filepath.Join(dir, server.TxnLogName)
	log, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, append(bytes.Clone(log), 1, 2, 3), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := show(name); !strings.Contains(got, "to be cut off: ") {
		t.Errorf("with a torn tail: %s", got)
	}
	log[len(log)/2] ^= 1
	if err := os.WriteFile(name, log, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := inspect(new(bytes.Buffer), []string{dir}); err == nil || !strings.Contains(err.Error(), server.TxnLogName) {
		t.Errorf("with a byte flipped: %v", err)
	}
}

// What cannot be shown is named, and the rest is shown.
func TestInspectRefuses(t *testing.T) {
	dir := t.TempDir()
	damaged := filepath.Join(dir, "00000000000000000000.log")
	p := segmenttest.Batch(31, 0, 0, "x")
	p[len(p)-1] ^= 1
	for name, p := range map[string][]byte{
		damaged:                               append(p, segmenttest.Batch(31, 0, 1, "y")...),
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
	for _, path := range []string{t.TempDir(), filepath.Join(dir, "nothing")} {
		if err := inspect(new(bytes.Buffer), []string{path}); err == nil {
			t.Errorf("%s was shown", path)
		}
	}

	data := t.TempDir()
	makePartition(t, filepath.Join(data, "t-0"))
	makePartition(t, filepath.Join(data, "t-1"))
	if err := os.Remove(filepath.Join(data, "t-0", "00000000000000000006.log")); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(data, "t-0", "00000000000000000000.log"), 100); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(data, "clean-stop"), []byte("t-0\nt-1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err := inspect(&out, []string{data})
	if err == nil || !strings.Contains(err.Error(), "t-0: offline") || !strings.Contains(err.Error(), "t-1: offline") {
		t.Errorf("two partitions are damaged: %v", err)
	}
	if err := os.Remove(filepath.Join(data, "clean-stop")); err != nil {
		t.Fatal(err)
	}
	if err := inspect(&out, []string{data}); err != nil || strings.Count(out.String(), "to be cut off") != 2 {
		t.Errorf("after an unclean stop: %v\n%s", err, out.String())
	}
}
