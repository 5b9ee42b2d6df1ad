package server_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

var errDisk = errors.New("disk failure")

// A slowDisk does nothing until the test lets it, and so lets a test stop the
// world in the middle of an append.
type slowDisk struct {
	t     *testing.T
	ops   chan segmenttest.Op
	done  chan error
	freed chan struct{}
	free  func() // lets all operations go from now on
}

func newSlowDisk(t *testing.T) *slowDisk {
	d := &slowDisk{
		t:     t,
		ops:   make(chan segmenttest.Op),
		done:  make(chan error),
		freed: make(chan struct{}),
	}
	d.free = sync.OnceFunc(func() { close(d.freed) })
	return d
}

func (d *slowDisk) before(op segmenttest.Op) error {
	select {
	case d.ops <- op:
		return <-d.done
	case <-d.freed:
		return nil
	}
}

// arrives waits for an operation to begin.
func (d *slowDisk) arrives(want segmenttest.Op) {
	d.t.Helper()
	select {
	case op := <-d.ops:
		if op != want {
			d.t.Fatalf("the log does a %s, want a %s", op, want)
		}
	case <-time.After(patience):
		d.t.Fatalf("the log does nothing, want a %s", want)
	}
}

// ends lets the operation go that has arrived.
func (d *slowDisk) ends(err error) { d.done <- err }

// does waits for an operation and lets it go.
func (d *slowDisk) does(op segmenttest.Op, err error) {
	d.t.Helper()
	d.arrives(op)
	d.ends(err)
}

// startSlow starts a broker on a slow disk, with topic "t" made.
func startSlow(t *testing.T, cfg server.Config) (*broker, *slowDisk) {
	t.Helper()
	d := newSlowDisk(t)
	cfg.OpenFile = (&segmenttest.Disk{Before: d.before}).OpenFile
	b := start(t, cfg)
	t.Cleanup(d.free) // before the broker is stopped, also when the test gives up
	b.dial().create("t")
	return b, d
}

// awaitInFlight waits until n appends to the partition are under way.
func (b *broker) awaitInFlight(n int) {
	b.t.Helper()
	for deadline := time.Now().Add(patience); b.s.InFlight("t", 0) != n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatalf("%d appends are under way, want %d", b.s.InFlight("t", 0), n)
		}
	}
}

func batchRequest(producerID int64, seq int32) *kmsg.ProduceRequest {
	return produceRequest("t", 0, segmenttest.Batch(producerID, 0, seq, "x"))
}

// wantAnswers reads the answers to as many Produce requests.
func (c *client) wantAnswers(want ...answer) {
	c.t.Helper()
	for i, want := range want {
		resp, err := c.receive(batchRequest(0, 0))
		if err != nil {
			c.t.Fatalf("answer %d: %v", i, err)
		}
		p := resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0]
		wantAnswer(c.t, fmt.Sprintf("answer %d", i), answer{p.ErrorCode, p.BaseOffset}, want)
	}
}

// silent reports whether nothing is answered for a little while.
func (c *client) silent() bool {
	c.nc.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	defer c.nc.SetReadDeadline(time.Now().Add(patience))
	_, err := c.nc.Read(make([]byte, 1))
	return err != nil
}

// Five requests of one producer, on one connection, are in flight while the disk
// is busy with the first, and the other four share the next sync. A sixth has to
// wait (rule 3 of reservations). Nothing is answered, nor shown to a consumer,
// before it is on disk; the answers come in the order of the requests.
func TestFiveInFlight(t *testing.T) {
	b, disk := startSlow(t, server.Config{})
	c := b.dial()
	c.send(batchRequest(31, 0))
	disk.arrives(segmenttest.Write)
	for seq := int32(1); seq < 6; seq++ {
		c.send(batchRequest(31, seq))
	}
	b.awaitInFlight(5)
	time.Sleep(10 * time.Millisecond) // for the sixth
	b.awaitInFlight(5)
	if !c.silent() {
		t.Error("answered before anything was written")
	}
	disk.ends(nil)
	disk.arrives(segmenttest.Sync)
	if !c.silent() || b.dial().end() != 0 {
		t.Error("answered, or shown to a consumer, before it was synced")
	}
	disk.ends(nil)
	c.wantAnswers(stored(0))
	disk.arrives(segmenttest.Write)
	b.awaitInFlight(5) // four, and the one that waited
	disk.ends(nil)
	disk.does(segmenttest.Sync, nil)
	c.wantAnswers(stored(1), stored(2), stored(3), stored(4))
	disk.free() // for the sixth, if it came too late for the others' group
	c.wantAnswers(stored(5))
}

// A producer gives up on a connection and sends again while its first copy is
// still on its way: the retry is neither stored nor acknowledged before the
// first copy is, and is told to come again when it has waited long enough.
func TestRetryMeetsItsFirstCopy(t *testing.T) {
	b, disk := startSlow(t, server.Config{})
	first, retry, hasty := b.dial(), b.dial(), b.dial()
	first.send(batchRequest(31, 0))
	disk.arrives(segmenttest.Write)
	retry.send(batchRequest(31, 0))
	req := batchRequest(31, 0)
	req.TimeoutMillis = 1
	wantAnswer(t, "retry that does not wait", hasty.produce(req), refused(kerr.RequestTimedOut))
	if !retry.silent() {
		t.Error("the retry was answered before its first copy was written")
	}
	disk.ends(nil)
	disk.does(segmenttest.Sync, nil)
	first.wantAnswers(stored(0))
	retry.wantAnswers(stored(0))
	disk.free()
	if end := first.end(); end != 1 {
		t.Errorf("the log ends at %d, want 1", end)
	}
}

// The first copy fails: the retry that waited for it becomes its owner.
func TestRetryOutlivesItsFirstCopy(t *testing.T) {
	b, disk := startSlow(t, server.Config{})
	first, retry := b.dial(), b.dial()
	first.send(batchRequest(31, 0))
	disk.arrives(segmenttest.Write)
	retry.send(batchRequest(31, 0))
	if !retry.silent() {
		t.Error("the retry was answered before its first copy was written")
	}
	disk.ends(errDisk)
	disk.does(segmenttest.Truncate, nil)
	disk.does(segmenttest.Sync, nil)
	first.wantAnswers(refused(kerr.KafkaStorageError))
	disk.does(segmenttest.Write, nil)
	disk.does(segmenttest.Sync, nil)
	retry.wantAnswers(stored(0))
	disk.free()
	if end := first.end(); end != 1 {
		t.Errorf("the log ends at %d, want 1", end)
	}
}

// When an append fails, what is behind it of the same producer must not get
// into the log, and what is there of others must. Everybody affected is told to
// try again, and then it all gets there, in order, without a gap.
func TestFailedAppendTakesItsProducerAlong(t *testing.T) {
	for _, failing := range []segmenttest.Op{segmenttest.Write, segmenttest.Sync} {
		t.Run(string(failing), func(t *testing.T) {
			cfg := server.Config{Dir: t.TempDir()}
			b, disk := startSlow(t, cfg)
			a, other, plain := b.dial(), b.dial(), b.dial()
			a.send(batchRequest(31, 0))
			disk.does(segmenttest.Write, nil)
			disk.does(segmenttest.Sync, nil)
			a.wantAnswers(stored(0))

			a.send(batchRequest(31, 1))
			disk.arrives(segmenttest.Write)
			a.send(batchRequest(31, 2))
			a.send(batchRequest(31, 3))
			other.send(batchRequest(40, 0))
			plain.send(batchRequest(-1, -1))
			b.awaitInFlight(5)
			if failing == segmenttest.Sync {
				disk.ends(nil)
				disk.arrives(segmenttest.Sync)
			}
			disk.ends(errDisk)
			disk.does(segmenttest.Truncate, nil)
			disk.does(segmenttest.Sync, nil)
			a.wantAnswers(refused(kerr.KafkaStorageError), refused(kerr.NotLeaderForPartition), refused(kerr.NotLeaderForPartition))

			disk.arrives(segmenttest.Write)
			b.awaitInFlight(2)
			disk.ends(nil)
			disk.does(segmenttest.Sync, nil)
			answers := map[answer]bool{other.answer(): true, plain.answer(): true}
			if !answers[stored(1)] || !answers[stored(2)] {
				t.Errorf("the others were answered %v, want offsets 1 and 2", answers)
			}
			disk.free()
			wantAnswer(t, "gap", a.batch(31, 0, 2, 1), refused(kerr.OutOfOrderSequenceNumber))
			for seq := range int32(4) {
				wantAnswer(t, fmt.Sprintf("sequence %d again", seq), a.batch(31, 0, seq, 1), stored([]int64{0, 3, 4, 5}[seq]))
			}
			b.stop()

			cfg.OpenFile = nil
			c := start(t, cfg).dial()
			if end := c.end(); end != 6 {
				t.Errorf("the log ends at %d, want 6", end)
			}
			wantAnswer(t, "retry after a restart", c.batch(31, 0, 3, 1), stored(5))
		})
	}
}

// answer reads the answer to one Produce request.
func (c *client) answer() answer {
	c.t.Helper()
	resp, err := c.receive(batchRequest(0, 0))
	if err != nil {
		c.t.Fatal(err)
	}
	p := resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0]
	return answer{p.ErrorCode, p.BaseOffset}
}

// When the remains of a failed append cannot be removed either, the partition
// takes no more: nothing that is queued, and nothing that comes. Others go on,
// and a restart finds out what is in the log.
func TestPartitionGoesOffline(t *testing.T) {
	for _, failing := range []segmenttest.Op{segmenttest.Write, segmenttest.Sync} {
		t.Run(string(failing), func(t *testing.T) {
			cfg := server.Config{Dir: t.TempDir()}
			b, disk := startSlow(t, cfg)
			a, other := b.dial(), b.dial()
			a.send(batchRequest(31, 0))
			disk.arrives(segmenttest.Write)
			a.send(batchRequest(31, 1))
			other.send(batchRequest(40, 0))
			b.awaitInFlight(3)
			if failing == segmenttest.Sync {
				disk.ends(nil)
				disk.arrives(segmenttest.Sync)
			}
			disk.ends(errDisk)
			disk.does(segmenttest.Truncate, errDisk)
			a.wantAnswers(refused(kerr.KafkaStorageError), refused(kerr.NotLeaderForPartition))
			other.wantAnswers(refused(kerr.KafkaStorageError))
			disk.free()
			wantAnswer(t, "again", a.batch(31, 0, 0, 1), refused(kerr.KafkaStorageError))
			if end := a.end(); end != 0 {
				t.Errorf("a consumer sees up to %d", end)
			}
			wantAnswer(t, "other partition", a.produce(produceRequest("t", 1, segmenttest.Batch(31, 0, 0, "x"))), stored(0))
			b.stop()

			cfg.OpenFile = nil
			c := start(t, cfg).dial()
			wantAnswer(t, "after a restart", c.batch(31, 0, 0, 1), stored(0))
			wantAnswer(t, "the next", c.batch(31, 0, 1, 1), stored(1))
			wantAnswer(t, "the other", c.batch(40, 0, 0, 1), stored(2))
		})
	}
}

// However the broker ends, nothing is left waiting: not who sent what is in
// flight, not who waits for it to settle, and no goroutine.
func TestShutdownLeavesNobodyWaiting(t *testing.T) {
	for name, stop := range map[string]func(*broker){"stopped": (*broker).stop, "killed": (*broker).kill} {
		for _, fault := range []error{nil, errDisk} {
			t.Run(fmt.Sprintf("%s, disk error %v", name, fault), func(t *testing.T) {
				before := runtime.NumGoroutine()
				b, disk := startSlow(t, server.Config{})
				c, retry := b.dial(), b.dial()
				c.send(batchRequest(31, 0))
				disk.arrives(segmenttest.Write)
				for seq := int32(1); seq < 7; seq++ {
					c.send(batchRequest(31, seq))
				}
				retry.send(batchRequest(31, 0))
				b.awaitInFlight(5)
				stopped := make(chan struct{})
				go func() { stop(b); close(stopped) }()
				time.Sleep(5 * time.Millisecond)
				disk.ends(fault)
				disk.free()
				select {
				case <-stopped:
				case <-time.After(patience):
					t.Fatal("the broker does not end")
				}
				if !c.closedInTheEnd() || !retry.closedInTheEnd() {
					t.Error("a connection stayed open")
				}
				for deadline := time.Now().Add(patience); runtime.NumGoroutine() > before+2; time.Sleep(time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
					}
				}
			})
		}
	}
}

// closedInTheEnd reports whether the connection is closed after its answers.
func (c *client) closedInTheEnd() bool {
	for range 10 {
		if _, err := c.receive(batchRequest(0, 0)); err != nil {
			return c.closed()
		}
	}
	return false
}

// startSlowPartition starts a broker with the log of one partition on a slow
// disk, and all others on a fast one.
func startSlowPartition(t *testing.T, cfg server.Config, partition string) (*broker, *slowDisk) {
	t.Helper()
	d := newSlowDisk(t)
	slow, fast := &segmenttest.Disk{Before: d.before}, &segmenttest.Disk{}
	cfg.OpenFile = func(name string, flag int, perm os.FileMode) (segment.File, error) {
		if filepath.Base(filepath.Dir(name)) == partition {
			return slow.OpenFile(name, flag, perm)
		}
		return fast.OpenFile(name, flag, perm)
	}
	b := start(t, cfg)
	t.Cleanup(d.free)
	b.dial().create("t")
	return b, d
}

// awaitEnd waits until a partition ends at an offset, and returns how long that
// took.
func (b *broker) awaitEnd(partition int32, end int64) time.Duration {
	b.t.Helper()
	c := b.dial()
	defer c.nc.Close()
	begun := time.Now()
	for c.fetch(fetchRequest("t", partition, 0)).HighWatermark != end {
		if time.Since(begun) > patience {
			b.t.Fatalf("partition %d does not get to offset %d", partition, end)
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(begun)
}

// A batch that waits for its first copy holds up no other partition: neither in
// its own request nor in the next one of its connection. What comes behind it
// for the same partition stays behind it. (B4)
func TestB4_WaitHoldsUpNoOtherPartition(t *testing.T) {
	b, disk := startSlowPartition(t, server.Config{}, "t-0")
	first, c := b.dial(), b.dial()
	first.send(batchRequest(31, 0))
	disk.arrives(segmenttest.Write)

	both := batchRequest(31, 0) // a copy of the one in flight
	both.TimeoutMillis = 30_000
	both.Topics[0].Partitions = append(both.Topics[0].Partitions,
		kmsg.ProduceRequestTopicPartition{Partition: 1, Records: segmenttest.Batch(31, 0, 0, "x")})
	c.send(both)
	if took := b.awaitEnd(1, 1); took > time.Second {
		t.Errorf("partition 1 of the same request waited for %v", took)
	}
	next := batchRequest(31, 1) // behind the copy
	next.Topics[0].Partitions = append(next.Topics[0].Partitions,
		kmsg.ProduceRequestTopicPartition{Partition: 2, Records: segmenttest.Batch(31, 0, 0, "x")})
	c.send(next)
	if took := b.awaitEnd(2, 1); took > time.Second {
		t.Errorf("partition 2 of the next request waited for %v", took)
	}
	if !c.silent() {
		t.Error("the copy was answered before its first copy was written")
	}
	disk.ends(nil)
	disk.free()
	first.wantAnswers(stored(0))
	c.wantAnswers(stored(0), stored(1))
	b.awaitEnd(0, 2)
}

// A batch that follows one that waits is judged after it: when the first copy
// fails, the one that waited for it is stored first. (B4)
func TestB4_OrderOfAConnectionIsKept(t *testing.T) {
	b, disk := startSlowPartition(t, server.Config{}, "t-0")
	first, c := b.dial(), b.dial()
	first.send(batchRequest(31, 0))
	disk.arrives(segmenttest.Write)
	for seq := range int32(4) { // a copy of the one in flight, and what follows it
		c.send(batchRequest(31, seq))
	}
	if !c.silent() {
		t.Error("the copy was answered before its first copy was written")
	}
	disk.ends(errDisk)
	disk.free()
	first.wantAnswers(refused(kerr.KafkaStorageError))
	c.wantAnswers(stored(0), stored(1), stored(2), stored(3))
}

// While the disk takes its time over a new topic, others are served. (B4)
func TestB4_CreatingATopicHoldsUpNoOther(t *testing.T) {
	var creating atomic.Bool
	arrived, proceed := make(chan struct{}), make(chan struct{})
	b := start(t, server.Config{OpenFile: func(name string, flag int, perm os.FileMode) (segment.File, error) {
		if creating.CompareAndSwap(true, false) {
			close(arrived)
			<-proceed
		}
		return os.OpenFile(name, flag, perm)
	}})
	c := b.dial()
	c.create("t")
	creating.Store(true)
	created := make(chan int16)
	go func() { created <- b.dial().create("slow") }()
	<-arrived
	begun := time.Now()
	wantAnswer(t, "another topic", c.batch(31, 0, 0, 1), stored(0))
	if took := time.Since(begun); took > time.Second {
		t.Errorf("another topic waited for %v", took)
	}
	close(proceed)
	if code := <-created; code != 0 {
		t.Errorf("creating the topic: code %d", code)
	}
}
