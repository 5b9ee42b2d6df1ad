package node

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

// TestStartAgain: what a node finds in its directory it goes on with, or refuses
// by name.
func TestStartAgain(t *testing.T) {
	file := func(dir string, pattern string) string {
		files, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("no %s: %v", pattern, err)
		}
		return slices.Max(files)
	}
	for _, c := range []struct {
		what   string
		change func(*Config)
		want   string // of the error, or empty
	}{
		{"nothing", func(*Config) {}, ""},
		{"the partitions are gone", func(cfg *Config) { remove(t, file(cfg.Dir, "partitions")) }, ""},
		{"a file in their place", func(cfg *Config) { overwrite(t, file(cfg.Dir, "partitions"), "") }, ""},
		{"what a crash leaves of a snapshot", func(cfg *Config) {
			if err := os.Mkdir(file(cfg.Dir, "snapshots/*-*")+".tmp", 0o755); err != nil {
				t.Fatal(err)
			}
		}, ""},
		{"another id", func(cfg *Config) { cfg.ID, cfg.Peers[0].ID = 2, 2 }, "it is the directory of node 1"},
		{"another peer", func(cfg *Config) { cfg.Peers = append(cfg.Peers, Peer{2, "127.0.0.1:1", "127.0.0.1:2"}) },
			"the cluster has the nodes [1], and the peers are [1 2]"},
		{"snapshot damaged", func(cfg *Config) { flip(t, file(cfg.Dir, "snapshots/*/state.bin"), 50) }, "snapshot"},
		{"snapshot cut off", func(cfg *Config) { overwrite(t, file(cfg.Dir, "snapshots/*/state.bin"), "idemrepl") }, "snapshot"},
		{"no snapshot", func(cfg *Config) { remove(t, file(cfg.Dir, "snapshots")) }, "damaged: log not found"},
		{"not a raft log", func(cfg *Config) { flip(t, file(cfg.Dir, "raft/*.wal"), 0) }, "corrupt"},
		{"no stable store", func(cfg *Config) { overwrite(t, file(cfg.Dir, "raft/*.db"), "garbage") }, "invalid database"},
		{"the directory is a file", func(cfg *Config) { overwrite(t, cfg.Dir, "") }, "data directory"},
	} {
		t.Run(c.what, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "data")
			r := newRig(t, func(cfg *Config) { cfg.Dir, cfg.TrailingLogs = dir, 1 })
			for sequence := range int32(4) {
				r.produce("numbers", 0, segmenttest.Batch(7, 0, sequence, "a"))
				if sequence%2 == 0 {
					if err := r.node.raft.Snapshot().Error(); err != nil {
						t.Fatal(err)
					}
				}
			}
			r.stop()
			cfg := testConfig(t, dir)
			c.change(&cfg)
			var err error
			if r.node, err = Start(cfg); err != nil {
				if c.want == "" || !strings.Contains(err.Error(), c.want) {
					t.Errorf("error %v, want %q", err, c.want)
				}
				return
			}
			if c.want != "" {
				t.Fatalf("it starts, want %q", c.want)
			}
			if r.kgo, err = kgo.NewClient(kgo.SeedBrokers(cfg.Peers[0].Client)); err != nil {
				t.Fatal(err)
			}
			defer r.kgo.Close()
			awaitReady(t, r.node)
			for sequence := range int32(5) {
				if got := r.produce("numbers", 0, segmenttest.Batch(7, 0, sequence, "a")); got.BaseOffset != int64(sequence) {
					t.Errorf("sequence %d is answered with code %d and offset %d", sequence, got.ErrorCode, got.BaseOffset)
				}
			}
		})
	}
}

// TestOneProcessInADirectory: a node that is started by mistake in the directory
// of one that runs takes nothing away from that.
func TestOneProcessInADirectory(t *testing.T) {
	r := newRig(t, nil)
	r.produce("numbers", 0, segmenttest.Batch(7, 0, 0, "a"))
	if _, err := Start(testConfig(t, r.node.cfg.Dir)); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("error %v", err)
	}
	if got := r.produce("numbers", 0, segmenttest.Batch(7, 0, 1, "a")); got.BaseOffset != 1 {
		t.Errorf("code %d, offset %d", got.ErrorCode, got.BaseOffset)
	}
	if err := r.node.raft.Snapshot().Error(); err != nil { // reads the log
		t.Error(err)
	}
}

func TestPeers(t *testing.T) {
	peers := func(list string) func(*Config) {
		return func(cfg *Config) {
			var err error
			if cfg.Peers, err = ParsePeers(list); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		what   string
		change func(*Config)
		want   string
	}{
		{"no directory", func(cfg *Config) { cfg.Dir = "" }, "no data directory"},
		{"no peers", func(cfg *Config) { cfg.Peers = nil }, "node 1 is not among the peers"},
		{"only others", peers("2=a:1/b:2"), "node 1 is not among the peers"},
		{"an id twice", peers("1=a:1/b:2,1=c:1/d:2"), "1 is there twice"},
		{"an address twice", peers("1=a:1/b:2,2=c:1/b:2"), "b:2 is there twice"},
		{"an address for both", peers("1=a:1/a:1"), "a:1 is there twice"},
		{"no port", peers("1=a:1/b"), "missing port"},
		{"no port for nodes", peers("1=a/b:2"), "missing port"},
		{"not a port", peers("1=a:1/b:http"), "http"},
		{"id 0", peers("0=a:1/b:2,1=c:1/d:2"), "ids begin at 1"},
		{"too little memory", func(cfg *Config) { cfg.RequestMemory = 1 }, "request memory"},
		{"no memory for an answer", func(cfg *Config) { cfg.FetchMemory = 1 }, "fetch memory"},
		{"fewer than no producers", func(cfg *Config) { cfg.Topic.MaxProducers = -1 }, "at most -1 producers"},
		{"too many partitions", func(cfg *Config) { cfg.Topic = statemachine.TopicConfig{Partitions: statemachine.MaxPartitions + 1} }, "partitions"},
	} {
		cfg := testConfig(t, t.TempDir())
		c.change(&cfg)
		if n, err := Start(cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.what, err, c.want)
			if err == nil {
				n.Close()
			}
		}
		if conn, err := cfg.ClientListener.Accept(); err == nil {
			conn.Close()
			t.Errorf("%s: the listener is open", c.what)
		}
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

// overwrite replaces a file, or a directory, by a file.
func overwrite(t *testing.T, path, contents string) {
	t.Helper()
	remove(t, path)
	if err := os.WriteFile(path, []byte(contents), 0o644); err != nil {
		t.Fatal(err)
	}
}

// flip changes a byte of a file.
func flip(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0xff
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
}
