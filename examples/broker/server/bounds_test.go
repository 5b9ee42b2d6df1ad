package server_test

import (
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// A producer that is idle for long enough is forgotten, and one that goes on is
// not. Refusals, by which the test finds out, are no activity. A restart does
// not bring back who was forgotten before: that is what a snapshot is for.
func TestExpiry(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir(), ExpireAfter: 500 * time.Millisecond}
	b := start(t, cfg)
	c := b.dial()
	c.create("t")
	begun := time.Now()
	wantAnswer(t, "idle", c.batch(31, 0, 0, 1), stored(0))
	seq := int32(0)
	for c.batch(31, 0, 7, 1) == refused(kerr.OutOfOrderSequenceNumber) {
		wantAnswer(t, "busy", c.batch(40, 0, seq, 1), stored(int64(1+seq)))
		seq++
		if time.Since(begun) > patience {
			t.Fatal("never expired")
		}
		time.Sleep(5 * time.Millisecond)
	}
	if idle := time.Since(begun); idle < cfg.ExpireAfter {
		t.Errorf("forgotten after %v, want %v or later", idle, cfg.ExpireAfter)
	}
	wantAnswer(t, "idle, forgotten", c.batch(31, 0, 7, 1), refused(kerr.UnknownProducerID))
	b.stop()

	cfg.ExpireAfter = -1
	c = start(t, cfg).dial()
	wantAnswer(t, "idle, after a restart", c.batch(31, 0, 7, 1), refused(kerr.UnknownProducerID))
	wantAnswer(t, "busy, after a restart", c.batch(40, 0, seq, 1), stored(int64(1+seq)))
}

// Of more producers than a partition remembers, the one that has committed the
// longest ago is forgotten, also in a recovery.
func TestMaxProducers(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir(), MaxProducers: 2}
	b := start(t, cfg)
	c := b.dial()
	c.create("t")
	wantAnswer(t, "first producer", c.batch(31, 0, 0, 1), stored(0))
	wantAnswer(t, "second producer", c.batch(32, 0, 0, 1), stored(1))
	wantAnswer(t, "third producer", c.batch(33, 0, 0, 1), stored(2))
	wantAnswer(t, "first producer, forgotten", c.batch(31, 0, 1, 1), refused(kerr.UnknownProducerID))
	wantAnswer(t, "second producer, a retry", c.batch(32, 0, 0, 1), stored(1))
	b.kill()
	c = start(t, cfg).dial()
	wantAnswer(t, "first producer after a restart", c.batch(31, 0, 1, 1), refused(kerr.UnknownProducerID))
	wantAnswer(t, "third producer after a restart", c.batch(33, 0, 1, 1), stored(3))
}

// An id that a log or a snapshot has seen is not handed out, wherever it came
// from; and one that leaves no others is no reason not to start.
func TestProducerIDsMovePastWhatWasSeen(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir()}
	b := start(t, cfg)
	c := b.dial()
	c.create("t")
	if id, _ := c.initProducerID(); id != 0 {
		t.Errorf("the first id is %d", id)
	}
	wantAnswer(t, "batch of an id from elsewhere", c.batch(50_000, 0, 0, 1), stored(0))
	b.stop()
	b = start(t, cfg)
	c = b.dial()
	if id, code := c.initProducerID(); id != 50_001 {
		t.Errorf("handed out id %d, code %d, want 50001", id, code)
	}
	wantAnswer(t, "batch of the last id there is", c.batch(1<<63-1, 0, 0, 1), stored(1))
	b.stop()
	c = start(t, cfg).dial()
	if id, code := c.initProducerID(); id != -1 || code != kerr.CoordinatorNotAvailable.Code {
		t.Errorf("handed out id %d, code %d after the last one was seen", id, code)
	}
	wantAnswer(t, "but everything else goes on", c.batch(50_000, 0, 1, 1), stored(2))
}
