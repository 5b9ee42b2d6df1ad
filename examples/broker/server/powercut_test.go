package server

// Here the power fails, over and over again, on a disk that forgets what it was
// not told to sync.

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

// A sent is a batch of a producer on its way.
type sent struct {
	producer idempotence.Batch
	bytes    []byte
	append   *pendingAppend
}

// acknowledged reports whether the producer has been told that it is stored.
func (s *sent) acknowledged() bool {
	select {
	case <-s.append.settled:
		return s.append.err == nil
	default:
		return false
	}
}

// send hands a batch with up to size bytes of records to the partition.
func send(t *testing.T, rng *rand.Rand, p *partition, pid int64, seq int32, size int) *sent {
	t.Helper()
	value := make([]byte, rng.IntN(size))
	for i := range value {
		value[i] = byte(1 + rng.IntN(255)) // zeros would survive the loss of a sector
	}
	return resend(t, p, segmenttest.Batch(pid, 0, seq, string(value)))
}

func resend(t *testing.T, p *partition, records []byte) *sent {
	t.Helper()
	b, h, err := idempotence.ParseBatch(records)
	if err != nil {
		t.Fatal(err)
	}
	return &sent{b, bytes.Clone(records), p.begin(context.Background(), &pendingAppend{Batch: segment.Batch{Header: h, Bytes: records}, producer: b}, nil)}
}

// Four producers have batches in flight when the power fails, in the middle of a
// sync. Whatever sectors the disk kept, the broker starts and serves all
// partitions, and has what it has acknowledged, where it has said. The producers
// send the rest again, and in the end each batch is in the log once, in order.
// (B7)
func TestB7_PowerCut(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	const trials, producers, batches = 100, 4, 5
	cuts, kept := 0, 0
	for trial := range trials {
		dir, all := cutPowerOfBroker(t, rng, []int{512, 4096}[trial%2], producers, batches)
		var acknowledged []*sent
		for _, s := range all {
			if s.acknowledged() {
				acknowledged = append(acknowledged, s)
			}
		}
		s, err := Open(Config{Dir: dir, NoSync: true})
		if err != nil {
			t.Fatalf("trial %d: the broker does not start: %v", trial, err)
		}
		if offline := s.Offline(); len(offline) > 0 {
			t.Fatalf("trial %d: offline: %v", trial, offline)
		}
		p, err := s.topics.partition("t", 0)
		if err != nil {
			t.Fatal(err)
		}
		if p.log.Cut() != nil {
			cuts++
		}
		kept += len(acknowledged)
		for _, a := range acknowledged {
			base := a.append.result.BaseOffset
			records, err := p.log.Read(base, 1)
			if err != nil || !bytes.Equal(records[16:], a.bytes[16:]) {
				t.Fatalf("trial %d: batch %+v is not at %d, where it was acknowledged: %v", trial, a.producer, base, err)
			}
		}
		for _, a := range all {
			if result, err := resend(t, p, a.bytes).append.wait(); err != nil {
				t.Fatalf("trial %d: batch %+v, again: %+v, %v", trial, a.producer, result, err)
			}
		}
		if end := p.log.End(); end != producers*batches {
			t.Fatalf("trial %d: %d records in the log, want %d", trial, end, producers*batches)
		}
		if err := s.Shutdown(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d of %d logs were cut, %d batches had been acknowledged", cuts, trials, kept)
	if cuts < trials/20 || kept < trials {
		t.Errorf("%d of %d logs were cut and %d batches had been acknowledged, want more", cuts, trials, kept)
	}
}

// cutPowerOfBroker runs a broker until the power fails, and returns the directory
// that is left, and the batches that were on their way, with what their producers
// had been told by then.
func cutPowerOfBroker(t *testing.T, rng *rand.Rand, sector, producers, batches int) (dir string, all []*sent) {
	t.Helper()
	before, dir := t.TempDir(), filepath.Join(t.TempDir(), "after")
	var (
		mu      sync.Mutex // held while batches are sent
		syncs   = 1 + rng.IntN(3)
		settled []*sent
		disk    = &segmenttest.Disk{Volatile: true}
	)
	fail := func() {
		for _, s := range all {
			// The rest of the run is not what the producers have seen.
			seen := *s
			if !s.acknowledged() {
				seen.append = &pendingAppend{settled: make(chan struct{})}
			}
			settled = append(settled, &seen)
		}
		if err := disk.PowerCut(rng, sector, before, dir); err != nil {
			t.Error(err)
		}
	}
	disk.Before = func(op segmenttest.Op) error {
		if op != segmenttest.Sync {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		if syncs--; syncs > 0 {
			return nil
		}
		if syncs == 0 {
			fail()
		}
		return errors.New("no power")
	}
	s, err := Open(Config{Dir: before, Partitions: 1, SegmentBytes: int64(4 * sector), OpenFile: disk.OpenFile})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.topics.get("t", true); err != nil {
		t.Fatal(err)
	}
	p, err := s.topics.partition("t", 0)
	if err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	for seq := range batches {
		for pid := range producers {
			all = append(all, send(t, rng, p, int64(pid), int32(seq), sector))
		}
	}
	mu.Unlock()
	for _, s := range all {
		s.append.wait()
	}
	s.Shutdown(alreadyEnded()) // has errors: there is no power
	if settled == nil {
		fail() // a moment late
	}
	return dir, settled
}

// After a clean stop nothing is cut: damage in the newest segment takes the
// partition offline, as in an older one at any time. (B7)
func TestB7_DamageTakesOnePartitionOffline(t *testing.T) {
	for _, tt := range []struct {
		name    string
		clean   bool
		segment int // 0 is the oldest, -1 the newest
		damage  func(p []byte) []byte
	}{
		{"newest segment after a clean stop", true, -1, func(p []byte) []byte { p[len(p)-1] ^= 1; return p }},
		{"newest segment short after a clean stop", true, -1, func(p []byte) []byte { return p[:len(p)-1] }},
		{"older segment's header after an unclean stop", false, 0, func(p []byte) []byte { p[16] ^= 1; return p }},
		{"older segment short after an unclean stop", false, 0, func(p []byte) []byte { return p[:len(p)-1] }},
		{"older segment missing", true, 1, func([]byte) []byte { return nil }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			cfg := Config{Dir: dir, SegmentBytes: 200, Partitions: 2}
			s, err := Open(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.topics.get("t", true); err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(1, 1))
			for i := range int32(2) {
				p, err := s.topics.partition("t", i)
				if err != nil {
					t.Fatal(err)
				}
				for seq := range int32(12) {
					send(t, rng, p, 31, seq, 10).append.wait()
				}
			}
			ctx := alreadyEnded()
			if tt.clean {
				ctx = context.Background()
			}
			if err := s.Shutdown(ctx); err != nil {
				t.Fatal(err)
			}
			logs, _ := filepath.Glob(filepath.Join(dir, "t-0", "*.log"))
			name := logs[(tt.segment+len(logs))%len(logs)]
			p, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if p = tt.damage(p); p == nil {
				err = os.Remove(name)
			} else {
				err = os.WriteFile(name, p, 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}

			for _, ctx := range []context.Context{context.Background(), alreadyEnded(), context.Background()} { // it stays so
				if s, err = Open(cfg); err != nil {
					t.Fatalf("the broker does not start: %v", err)
				}
				offline := s.Offline()
				if len(offline) != 1 || offline[0].Topic != "t" || offline[0].Partition != 0 || offline[0].Err == nil {
					t.Errorf("offline: %v, want partition 0", offline)
				}
				if _, err := s.topics.partition("t", 0); errorCode(err) != 56 {
					t.Errorf("the damaged partition: %v, want KAFKA_STORAGE_ERROR", err)
				}
				whole, err := s.topics.partition("t", 1)
				if err != nil {
					t.Fatalf("the other partition: %v", err)
				}
				if result, err := send(t, rng, whole, 31, 12, 1).append.wait(); err != nil || result.BaseOffset != 12 {
					t.Errorf("the other partition: %+v, %v", result, err)
				}
				if err := s.Shutdown(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if after, _ := os.ReadFile(name); !bytes.Equal(after, p) {
				t.Error("the damaged file was changed")
			}
			if _, err := Inspect(filepath.Join(dir, "t-0")); err == nil {
				t.Error("the damaged partition can be inspected")
			}
		})
	}
}

// Each start after a kill begins where the one before has left a snapshot, and
// not at the beginning of the log. (B3)
func TestB3_RecoveryIsSaved(t *testing.T) {
	for name, segmentBytes := range map[string]int64{"small segments": 1000, "one segment": 1 << 20} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			log, err := segment.Open(filepath.Join(dir, "t-0"), segment.Options{NoSync: true})
			if err != nil {
				t.Fatal(err)
			}
			for seq := range int32(400) {
				records := segmenttest.Batch(31, 0, seq, "x")
				_, h, err := idempotence.ParseBatch(records)
				if err == nil {
					err = log.Append([]*segment.Batch{{Header: h, Bytes: records}})
				}
				if err == nil && log.ActiveSize() > segmentBytes {
					err = log.Roll()
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if err := log.Close(); err != nil {
				t.Fatal(err)
			}
			for start := range 3 {
				s, err := Open(Config{Dir: dir, SegmentBytes: segmentBytes})
				if err != nil {
					t.Fatal(err)
				}
				if err := s.Shutdown(alreadyEnded()); err != nil {
					t.Fatal(err)
				}
				found, err := Inspect(filepath.Join(dir, "t-0"))
				if err != nil || found.Snapshot != 400 {
					t.Errorf("after start %d there is a snapshot at %d, want one at 400; %v", start, found.Snapshot, err)
				}
			}
		})
	}
}

// A clean stop with many partitions, each of which has something to save, takes
// little longer than with one: the disk serves several at a time. One that has
// nothing to save is not waited for. (B10)
func TestB10_StopWithManyPartitions(t *testing.T) {
	const partitions, perSync = 100, 100 * time.Millisecond
	stopping := false
	disk := &segmenttest.Disk{Before: func(op segmenttest.Op) error {
		if op == segmenttest.Sync && stopping {
			time.Sleep(perSync)
		}
		return nil
	}}
	cfg := Config{Dir: t.TempDir(), Partitions: partitions, NoSync: true, OpenFile: disk.OpenFile}
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.topics.get("t", true); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range int32(partitions) {
		p, err := s.topics.partition("t", i)
		if err != nil {
			t.Fatal(err)
		}
		send(t, rng, p, 31, 0, 10).append.wait()
	}
	stopping = true
	begun := time.Now()
	if err := s.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	took := time.Since(begun)
	t.Logf("stopped with %d partitions in %v", partitions, took)
	if took > partitions*perSync/2 {
		t.Errorf("the stop took %v, one after the other would take %v", took, partitions*perSync)
	}
	snapshots := func() (files []string) {
		files, _ = filepath.Glob(filepath.Join(cfg.Dir, "*", "*.idps"))
		return files
	}
	if n := len(snapshots()); n != partitions {
		t.Errorf("%d snapshots, want %d", n, partitions)
	}
	for _, name := range snapshots() {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}

	// Another run saves each once more. The one after that has nothing to save.
	for run := range 2 {
		if s, err = Open(cfg); err != nil {
			t.Fatal(err)
		}
		if n := len(snapshots()); n != partitions {
			t.Errorf("run %d: recovered and saved %d snapshots, want %d", run, n, partitions)
		}
		for _, name := range snapshots() {
			if err := os.Chtimes(name, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Shutdown(context.Background()); err != nil {
			t.Fatal(err)
		}
		for _, name := range snapshots() {
			if info, err := os.Stat(name); err != nil || !info.ModTime().Equal(time.Unix(1, 0)) {
				t.Fatalf("run %d: %s was written again, or %v", run, name, err)
			}
		}
	}
}

// A stop that runs out of time does not count as clean, and neither does a
// broker that runs.
func TestUncleanStopIsNotTakenForAClean(t *testing.T) {
	cfg := Config{Dir: t.TempDir()}
	wasClosedCleanly := func() bool { return readCleanStop(cfg.Dir)["t-2"] }
	for i, ctx := range []context.Context{context.Background(), alreadyEnded(), context.Background(), context.Background()} {
		s, err := Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.topics.get("t", true); err != nil {
			t.Fatal(err)
		}
		if wasClosedCleanly() {
			t.Errorf("stop %d: the log is open, and said to be closed", i)
		}
		if err := s.Shutdown(ctx); err != nil {
			t.Fatal(err)
		}
		if got, want := wasClosedCleanly(), ctx.Err() == nil; got != want {
			t.Errorf("stop %d: closed cleanly %t, want %t", i, got, want)
		}
	}
}
