package server_test

import (
	"os"
	"path/filepath"
	"strings"
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
// from.
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
	b.stop()
}

// An id that was never handed out cannot end the supply, however high it is: not
// at once, not after a restart, and not when the file that reserves ids is lost.
// (B1)
func TestB1_NoProducerIDEndsTheSupply(t *testing.T) {
	for _, made := range []int64{1<<63 - 1, 9223372036854775307, 1<<63 - 1001, 1<<62 + 1, 1 << 62, 1<<62 - 1} {
		cfg := server.Config{Dir: t.TempDir()}
		b := start(t, cfg)
		seen := make(map[int64]bool)
		take := func(c *client, when string) {
			t.Helper()
			for range 3 {
				if id, code := c.initProducerID(); code != 0 || id < 0 || id == made || seen[id] {
					t.Errorf("%s: id %d, code %d, after %d was made up", when, id, code, made)
				} else {
					seen[id] = true
				}
			}
		}
		c := b.dial()
		c.create("t")
		take(c, "before")
		wantAnswer(t, "batch of an id that was made up", c.batch(made, 0, 0, 1), stored(0))
		take(c, "at once")
		for _, stop := range []func(*broker){(*broker).stop, (*broker).kill} {
			stop(b)
			b = start(t, cfg)
			take(b.dial(), "after a restart")
		}
		b.stop()
		if err := os.Remove(filepath.Join(cfg.Dir, "transactions.log")); err != nil {
			t.Fatal(err)
		}
		b = start(t, cfg)
		c = b.dial()
		take(c, "after the file was lost")
		wantAnswer(t, "next batch of the made-up id", c.batch(made, 0, 1, 1), stored(1))
		b.stop()
	}
}

// A file of reserved ids that is empty, or cannot be one, is no reason not to
// start, and no reason to hand out an id for the second time. (B5)
func TestB5_ProducerIDsFileDamaged(t *testing.T) {
	for _, text := range []string{"", "\n", "x", "-1", "9223372036854775808"} {
		cfg := server.Config{Dir: t.TempDir()}
		b := start(t, cfg)
		last, _ := b.dial().initProducerID() // which is in no log
		b.stop()
		if err := os.WriteFile(filepath.Join(cfg.Dir, "transactions.log"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		var log logBuffer
		cfg.Log = log.logger()
		b = start(t, cfg)
		if id, code := b.dial().initProducerID(); code != 0 || id <= last {
			t.Errorf("file %q: id %d, code %d, after %d was handed out", text, id, code, last)
		}
		b.stop()
		if !strings.Contains(log.String(), "producer ids lost") {
			t.Errorf("file %q: nothing is said of it:\n%s", text, log.String())
		}
	}
}
