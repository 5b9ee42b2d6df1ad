package server_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// Whatever way the broker went down, the next one knows its producers from the
// log: retries from before are recognised, gaps and old epochs refused.
func TestRestart(t *testing.T) {
	for name, down := range map[string]func(*broker){"stopped": (*broker).stop, "killed": (*broker).kill} {
		t.Run(name, func(t *testing.T) {
			cfg := server.Config{Dir: t.TempDir(), SegmentBytes: 300}
			b := start(t, cfg)
			c := b.dial()
			c.create("t")
			wantAnswer(t, "other producer", c.batch(40, 2, 0, 1), stored(0))
			wantAnswer(t, "not idempotent", c.batch(-1, -1, -1, 1), stored(1))
			for seq := range int32(8) {
				wantAnswer(t, fmt.Sprintf("sequence %d", seq), c.batch(31, 0, seq, 1), stored(int64(2+seq)))
			}
			down(b)

			c = start(t, cfg).dial()
			for seq := int32(3); seq < 8; seq++ {
				wantAnswer(t, fmt.Sprintf("retry of sequence %d", seq), c.batch(31, 0, seq, 1), stored(int64(2+seq)))
			}
			wantAnswer(t, "retry that left the window", c.batch(31, 0, 2, 1), refused(kerr.OutOfOrderSequenceNumber))
			wantAnswer(t, "gap", c.batch(31, 0, 9, 1), refused(kerr.OutOfOrderSequenceNumber))
			wantAnswer(t, "old epoch", c.batch(40, 1, 0, 1), refused(kerr.InvalidProducerEpoch))
			wantAnswer(t, "next", c.batch(31, 0, 8, 1), stored(10))
			wantAnswer(t, "next of the other", c.batch(40, 2, 1, 1), stored(11))
		})
	}
}

// The last batch was torn by a crash, so its producer was never answered: it is
// gone from the log and from memory, and its retry is stored.
func TestRestartWithTornTail(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir()}
	b := start(t, cfg)
	c := b.dial()
	c.create("t")
	wantAnswer(t, "first", c.batch(31, 0, 0, 2), stored(0))
	wantAnswer(t, "second", c.batch(31, 0, 2, 2), stored(2))
	b.kill()

	log := filepath.Join(cfg.Dir, "t-0", fmt.Sprintf("%020d.log", 0))
	info, err := os.Stat(log)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(log, info.Size()-1); err != nil {
		t.Fatal(err)
	}
	c = start(t, cfg).dial()
	wantAnswer(t, "first, a retry", c.batch(31, 0, 0, 2), stored(0))
	wantAnswer(t, "third, before the second", c.batch(31, 0, 4, 1), refused(kerr.OutOfOrderSequenceNumber))
	wantAnswer(t, "second, again", c.batch(31, 0, 2, 2), stored(2))
}

// A log written without deduplication may hold anything; it is the truth all
// the same, and a broker that deduplicates goes on from it.
func TestRestartOverLogWithDuplicates(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir(), WithoutDeduplication: true}
	b := start(t, cfg)
	c := b.dial()
	c.create("t")
	for range 3 {
		c.batch(31, 0, 0, 2)
	}
	b.stop()
	cfg.WithoutDeduplication = false
	c = start(t, cfg).dial()
	if end := c.end(); end != 6 {
		t.Errorf("the log ends at %d, want 6", end)
	}
	wantAnswer(t, "next", c.batch(31, 0, 2, 1), stored(6))
}

// A crash while a topic is created leaves some of its partitions; which number
// it was to have is known from the last one, which is made first.
func TestRestartWithHalfATopic(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir(), Partitions: 4}
	makeLog(t, filepath.Join(cfg.Dir, "t-3"))
	cfg.Partitions = 2 // for topics to come
	c := start(t, cfg).dial()
	req := kmsg.NewPtrMetadataRequest()
	req.Version = 1
	topics := ask[*kmsg.MetadataResponse](c, req).Topics
	if len(topics) != 1 || len(topics[0].Partitions) != 4 {
		t.Errorf("topics %+v, want one with 4 partitions", topics)
	}
}

// makeLog makes an empty log.
func makeLog(t *testing.T, dir string) {
	t.Helper()
	l, err := segment.Open(dir, segment.Options{})
	if err == nil {
		err = l.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// No id is ever handed out twice: not to two who ask at once, not after a
// clean restart, not after a crash, and not when the file that reserves them
// is lost but the logs are not.
func TestProducerIDs(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir()}
	seen := make(map[int64]bool)
	var mu sync.Mutex
	take := func(b *broker, n int) {
		var wg sync.WaitGroup
		for range 4 {
			c := b.dial()
			wg.Add(1)
			go func() {
				defer wg.Done()
				for range n {
					id, code := c.initProducerID()
					mu.Lock()
					if code != 0 || id < 0 || seen[id] {
						t.Errorf("handed out id %d, code %d; known already: %t", id, code, seen[id])
					}
					seen[id] = true
					mu.Unlock()
				}
			}()
		}
		wg.Wait()
	}
	b := start(t, cfg)
	take(b, 300) // more than a block
	b.stop()
	b = start(t, cfg)
	take(b, 3)
	b.kill()
	b = start(t, cfg)
	take(b, 3)

	c := b.dial()
	c.create("t")
	wantAnswer(t, "batch of a high id", c.batch(50_000, 0, 0, 1), stored(0))
	b.stop()
	if err := os.Remove(filepath.Join(cfg.Dir, "transactions.log")); err != nil {
		t.Fatal(err)
	}
	if id, _ := start(t, cfg).dial().initProducerID(); id != 1_050_001 {
		t.Errorf("handed out id %d after one of 50000 was seen and the file was lost, want 1050001", id)
	}
}

// While ids cannot be reserved none is handed out, and the client is told to
// ask again.
func TestProducerIDsThatCannotBeReserved(t *testing.T) {
	var failing atomic.Bool
	disk := &segmenttest.Disk{Before: func(op segmenttest.Op) error {
		if failing.Load() && op == segmenttest.Write {
			return errDisk
		}
		return nil
	}}
	c := start(t, server.Config{OpenTxnLog: disk.OpenFile}).dial()
	failing.Store(true)
	if id, code := c.initProducerID(); id != -1 || code != kerr.CoordinatorNotAvailable.Code {
		t.Errorf("got id %d, code %d", id, code)
	}
	failing.Store(false)
	if id, code := c.initProducerID(); id != 0 || code != 0 {
		t.Errorf("got id %d, code %d, want the first one", id, code)
	}
}

// Two brokers over one directory would hand out the same offsets and ids.
func TestDirectoryHasOneBroker(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir()}
	b := start(t, cfg)
	if _, err := server.Open(cfg); err == nil {
		t.Fatal("a second broker opened the directory")
	}
	b.stop()
	start(t, cfg)
}

// A request that has arrived is answered before a clean shutdown is over, and
// its connection is closed then; nobody new gets in.
func TestShutdownAnswersWhatHasArrived(t *testing.T) {
	arrived, proceed := make(chan struct{}), make(chan struct{})
	b := start(t, server.Config{Observe: func(server.Event) { close(arrived); <-proceed }})
	c, idle := b.dial(), b.dial()
	c.create("t")
	idle.create("t")

	req := produceRequest("t", 0, segmenttest.Batch(31, 0, 0, "x"))
	c.send(req)
	<-arrived
	stopped := make(chan struct{})
	go func() { b.stop(); close(stopped) }()
	if !idle.closed() {
		t.Error("the idle connection stayed open")
	}
	if nc, err := net.Dial("tcp", b.addr); err == nil {
		nc.Close()
		t.Error("a new connection was accepted")
	}
	select {
	case <-stopped:
		t.Error("Shutdown did not wait for a request")
	case <-time.After(20 * time.Millisecond):
	}
	close(proceed)
	resp, err := c.receive(req)
	if err != nil || resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0].ErrorCode != 0 {
		t.Errorf("answered %+v, %v", resp, err)
	}
	if !c.closed() {
		t.Error("the connection stayed open")
	}
	<-stopped
}

// Shutdown does not wait for a client beyond its context: neither for one that
// takes its time to send nor for one that waits for records.
func TestShutdownInterrupts(t *testing.T) {
	b := start(t, server.Config{})
	c := b.dial()
	c.create("t")
	req := fetchRequest("t", 0, 0)
	req.MinBytes, req.MaxWaitMillis = 1, 30_000
	c.send(req)
	half := b.dial()
	half.nc.Write([]byte{0, 0, 1})

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	b.down = true
	if err := b.s.Shutdown(ctx); err != nil {
		t.Errorf("Shutdown: %v", err)
	}
}

// A client that makes up its producer id does no harm to the one that gets the
// same id from the broker: nobody does.
func TestMadeUpProducerID(t *testing.T) {
	c := start(t, server.Config{Dir: t.TempDir()}).dial()
	c.create("t")
	first, _ := c.initProducerID()
	for made := first + 1; made < first+4; made++ {
		wantAnswer(t, "made up", c.batch(made, 0, 0, 1), stored(made-first-1))
	}
	id, _ := c.initProducerID()
	if id <= first+3 {
		t.Errorf("id %d was handed out, and a producer up to %d made it up", id, first+3)
	}
	wantAnswer(t, "first of its own", c.batch(id, 0, 0, 2), stored(3))
}

// A lock that stays for a moment after the broker that had it keeps neither the
// next one from starting nor a partition offline.
func TestLockThatStaysForAMoment(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir(), Partitions: 1}
	b := start(t, cfg)
	b.dial().create("t")
	b.stop()
	snapshots, err := idempotence.OpenSnapshotDir(filepath.Join(cfg.Dir, "t-0"), 0)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(100*time.Millisecond, func() { snapshots.Close() })
	b = start(t, cfg)
	if offline := b.s.Offline(); len(offline) > 0 {
		t.Errorf("offline: %v", offline)
	}
	stopped := make(chan struct{})
	time.AfterFunc(100*time.Millisecond, func() { b.stop(); close(stopped) })
	start(t, cfg)
	<-stopped
}
