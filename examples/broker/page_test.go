package main

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// A startLog keeps what the program logs.
type startLog struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *startLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *startLog) find(pattern *regexp.Regexp) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m := pattern.FindStringSubmatch(l.b.String()); m != nil {
		return m[1]
	}
	return ""
}

// With -http the program serves the page, on loopback if the address has no host,
// and stops with the broker.
func TestPageOfTheProgram(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var log startLog
	cfg := server.Config{
		Dir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil)),
		Partitions: 1, SegmentBytes: 1 << 20, ExpireAfter: time.Hour, MaxConnections: 10, MaxRequestBytes: 8 << 20, RequestMemory: 64 << 20,
	}
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, "127.0.0.1:0", ":0", cfg, nil) }()

	page := ""
	for end := time.Now().Add(10 * time.Second); page == "" && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		page = log.find(regexp.MustCompile(`page=(http://127\.0\.0\.1:\d+)`))
	}
	resp, err := http.Get(page + "/")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || !strings.Contains(string(body), "<h1>Look inside</h1>") {
		t.Errorf("%v %.100s", err, body)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := run(t.Context(), "127.0.0.1:0", "nonsense", cfg, nil); err == nil || !strings.Contains(err.Error(), "-http") {
		t.Errorf("-http nonsense: %v, want an error that names the flag", err)
	}
}
