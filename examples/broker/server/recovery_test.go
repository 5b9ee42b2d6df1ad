package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

// openPartition opens partition 0 of topic "t".
func openPartition(cfg Config) (*partition, error) {
	p := newPartition(cfg, "t", 0)
	return p, p.open()
}

// produceTo appends a batch of n records to the partition, or has it refused.
func produceTo(t *testing.T, p *partition, pid int64, epoch int16, seq int32, n int) {
	t.Helper()
	records := segmenttest.Batch(pid, epoch, seq, make([]string, n)...)
	batch, h, err := idempotence.ParseBatch(records)
	if err != nil {
		t.Fatal(err)
	}
	p.begin(context.Background(), &pendingAppend{Batch: segment.Batch{Header: h, Bytes: records}, producer: batch}, nil).wait()
}

// Whatever moment the broker dies at, and whichever of its files is damaged in
// the way that dying damages files, what is recovered from snapshot and log is
// what the log alone tells.
func TestRecoveryEqualsRebuild(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	root := t.TempDir()
	cfg := Config{Dir: root, SegmentBytes: 1500, ExpireAfter: -1}.withDefaults()
	p, err := openPartition(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { p.close(false) }()

	type next struct {
		epoch int16
		seq   int32
	}
	producers := make([]next, 8)
	fromSnapshot := 0
	const crashes = 25
	for crash := range crashes {
		for range rng.IntN(40) {
			pid := rng.IntN(len(producers))
			n := 1 + rng.IntN(3)
			if rng.IntN(20) == 0 {
				producers[pid] = next{epoch: producers[pid].epoch + 1}
			}
			produceTo(t, p, int64(pid), producers[pid].epoch, producers[pid].seq, n)
			producers[pid].seq += int32(n)
		}
		if rng.IntN(8) == 0 { // a clean restart in between
			if err := p.close(true); err != nil {
				t.Fatal(err)
			}
			if p, err = openPartition(cfg); err != nil {
				t.Fatal(err)
			}
		}
		p.background.Wait()
		copied := cfg
		copied.Dir = filepath.Join(root, fmt.Sprintf("crash-%d", crash))
		if err := os.CopyFS(filepath.Join(copied.Dir, "t-0"), os.DirFS(p.dir)); err != nil {
			t.Fatal(err)
		}
		damage(t, rng, filepath.Join(copied.Dir, "t-0"))
		if recoversLikeRebuild(t, copied) {
			fromSnapshot++
		}
		if t.Failed() {
			t.Fatalf("at crash %d", crash)
		}
	}
	if fromSnapshot < crashes/4 {
		t.Errorf("%d of %d recoveries began with a snapshot", fromSnapshot, crashes)
	}
	t.Logf("%d of %d recoveries began with a snapshot", fromSnapshot, crashes)
}

// damage does to some of the files what a crash does.
func damage(t *testing.T, rng *rand.Rand, dir string) {
	t.Helper()
	cut := func(name string) {
		info, err := os.Stat(name)
		if err == nil {
			err = os.Truncate(name, rng.Int64N(info.Size()+1))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
	snapshots, _ := filepath.Glob(filepath.Join(dir, "*.idps"))
	if rng.IntN(2) == 0 {
		cut(logs[len(logs)-1])
	}
	if len(snapshots) > 0 && rng.IntN(4) == 0 {
		cut(snapshots[len(snapshots)-1])
	}
	if rng.IntN(4) == 0 {
		if err := os.WriteFile(filepath.Join(dir, "00000000000000000007.idps.tmp"), []byte("half"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// recoversLikeRebuild compares the two, and reports whether there was a snapshot
// to begin with.
func recoversLikeRebuild(t *testing.T, cfg Config) bool {
	t.Helper()
	p, err := openPartition(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close(false)
	rebuilt := idempotence.New(idempotence.Config{})
	if err := p.log.Replay(0, rebuilt.ReplayLog); err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintf("end %d, highest id %d, %v", p.producers.EndOffset(), p.producers.MaxProducerID(), slices.Collect(p.producers.Producers()))
	want := fmt.Sprintf("end %d, highest id %d, %v", rebuilt.EndOffset(), rebuilt.MaxProducerID(), slices.Collect(rebuilt.Producers()))
	if got != want {
		t.Errorf("recovered\n%s\nthe log tells\n%s", got, want)
	}
	if end := p.log.End(); p.producers.EndOffset() != end {
		t.Errorf("the state ends at %d, the log at %d", p.producers.EndOffset(), end)
	}
	left, err := p.snapshots.EndOffsets()
	if err != nil {
		t.Fatal(err)
	}
	if len(left) > 0 && left[0] > p.log.End() {
		t.Errorf("a snapshot at %d was left, past the end of the log at %d", left[0], p.log.End())
	}
	if names, _ := filepath.Glob(filepath.Join(p.dir, "*.tmp")); len(names) > 0 {
		t.Errorf("left over: %v", names)
	}
	return len(left) > 0
}

// A snapshot is written without anybody waiting for it: while one is being
// saved, which here takes forever, batches are appended and segments rolled.
// (LOCK-IO)
func TestSavingHoldsUpNobody(t *testing.T) {
	cfg := Config{Dir: t.TempDir(), SegmentBytes: 100}.withDefaults()
	p, err := openPartition(cfg)
	if err != nil {
		t.Fatal(err)
	}
	p.saving.Lock()
	for seq := range int32(20) {
		produceTo(t, p, 31, 0, seq, 1)
	}
	if p.log.End() != 20 {
		t.Errorf("the log ends at %d, want 20", p.log.End())
	}
	if saved, err := p.snapshots.EndOffsets(); err != nil || len(saved) != 0 {
		t.Errorf("saved %v, %v while another was being saved", saved, err)
	}
	p.saving.Unlock()
	produceTo(t, p, 31, 0, 20, 1)
	p.background.Wait()
	if saved, err := p.snapshots.EndOffsets(); err != nil || len(saved) != 1 || saved[0] != 20 {
		t.Errorf("saved %v, %v, want one at 20", saved, err)
	}
	if err := p.close(true); err != nil {
		t.Fatal(err)
	}
}

// Without deduplication the manager does not learn what is in the log, so it
// must not be saved as if it did.
func TestNoSnapshotWithoutDeduplication(t *testing.T) {
	cfg := Config{Dir: t.TempDir(), SegmentBytes: 100, WithoutDeduplication: true}.withDefaults()
	p, err := openPartition(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		produceTo(t, p, 31, 0, 0, 1)
	}
	if err := p.close(true); err != nil {
		t.Fatal(err)
	}
	if names, _ := filepath.Glob(filepath.Join(p.dir, "*.idps")); len(names) > 0 {
		t.Errorf("saved %v", names)
	}
}

// A log that does not begin at 0, empty or not, is recovered and goes on where it
// ends.
func TestLogThatBeginsLater(t *testing.T) {
	for _, batches := range []int32{0, 1, 3} {
		cfg := Config{Dir: t.TempDir()}.withDefaults()
		dir := filepath.Join(cfg.Dir, "t-0")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "00000000000000000500.log"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		seq := int32(0)
		for range 3 {
			p, err := openPartition(cfg)
			if err != nil {
				t.Fatal(err)
			}
			for range batches {
				produceTo(t, p, 31, 0, seq, 1)
				seq++
			}
			if got, want := p.log.End(), int64(500+seq); got != want || p.producers.EndOffset() != want {
				t.Errorf("%d batches a run: the log ends at %d, the state at %d, want %d", batches, got, p.producers.EndOffset(), want)
			}
			if err := p.close(false); err != nil {
				t.Fatal(err)
			}
		}
	}
}
