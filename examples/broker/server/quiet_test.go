package server

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

// A lineBuffer keeps what is logged.
type lineBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lineBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// lines returns the lines with a message.
func (l *lineBuffer) lines(message string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.b.String()) {
		if strings.Contains(line, fmt.Sprintf("msg=%q", message)) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// Of one message the log gets a few, and at the end of the interval how many
// more there were. Other messages are counted on their own. (B10)
func TestB10_RepeatedMessagesAreCounted(t *testing.T) {
	var out lineBuffer
	h := newQuietHandler(slog.NewTextHandler(&out, nil), time.Hour)
	log := slog.New(h)
	for i := range 1000 {
		log.With("log", "t-0").Error("append failed", "batches", i)
	}
	log.Warn("too many connections")
	if n := len(out.lines("append failed")); n != quietBurst {
		t.Errorf("%d lines of a message, want %d", n, quietBurst)
	}
	if n := len(out.lines("too many connections")); n != 1 {
		t.Errorf("%d lines of another message, want 1", n)
	}
	for range 2 { // the second time there is nothing left to say
		h.flush()
		lines := out.lines("append failed")
		if n := len(lines); n != quietBurst+1 {
			t.Fatalf("%d lines of a message at the end, want %d", n, quietBurst+1)
		}
		last := lines[quietBurst]
		if !strings.Contains(last, fmt.Sprintf("more=%d", 1000-quietBurst)) || !strings.Contains(last, "level=ERROR") {
			t.Errorf("the last line is %q, want the number of the others", last)
		}
		if n := len(out.lines("too many connections")); n != 1 {
			t.Errorf("%d lines of another message at the end, want 1", n)
		}
	}
	log.Error("append failed")
	if n := len(out.lines("append failed")); n != quietBurst+2 {
		t.Errorf("%d lines of a message in the next interval, want %d", n, quietBurst+2)
	}
	h.flush()
}

// An interval ends by itself.
func TestQuietIntervalEnds(t *testing.T) {
	var out lineBuffer
	log := slog.New(newQuietHandler(slog.NewTextHandler(&out, nil), time.Millisecond))
	for deadline := time.Now().Add(10 * time.Second); ; {
		for range 2 * quietBurst {
			log.Error("append failed")
		}
		for _, line := range out.lines("append failed") {
			if strings.Contains(line, "more=") {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("the others were never counted")
		}
	}
}

// A full disk and a flood of connections leave a few lines each, and their
// number. (B10)
func TestB10_FloodsLeaveFewLines(t *testing.T) {
	var out lineBuffer
	disk := &segmenttest.Disk{Before: func(op segmenttest.Op) error {
		if op == segmenttest.Write {
			return errors.New("no space left on device")
		}
		return nil
	}}
	s, err := Open(Config{
		Dir: t.TempDir(), MaxConnections: 1, NoSync: true, OpenFile: disk.OpenFile,
		Log: slog.New(slog.NewTextHandler(&out, nil)),
	})
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
	const times = 200
	for range times {
		produceTo(t, p, 31, 0, 0, 1)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(ln)
	for range times {
		nc, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
	}
	for deadline := time.Now().Add(10 * time.Second); len(out.lines("too many connections")) < quietBurst; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no connection was refused")
		}
	}
	if err := s.Shutdown(alreadyEnded()); err != nil {
		t.Fatal(err)
	}
	for _, message := range []string{"append failed", "too many connections"} {
		lines := out.lines(message)
		if len(lines) != quietBurst+1 || !strings.Contains(lines[quietBurst], "more=") {
			t.Errorf("%d lines %q, want %d and the number of the others: %q", len(lines), message, quietBurst, lines)
		}
	}
	if want := fmt.Sprintf("more=%d", times-quietBurst); !strings.Contains(out.lines("append failed")[quietBurst], want) {
		t.Errorf("failed appends: %q, want %s", out.lines("append failed")[quietBurst], want)
	}
}
