package page

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// Only a page that was asked for by an address or a known name is served: another
// name may be that of a site that wants to read it through somebody's browser.
func TestForeignHost(t *testing.T) {
	for _, tt := range []struct {
		name, host string // given with -http, asked for
		want       int
	}{
		{"", "127.0.0.1:8080", 200},
		{"", "localhost:8080", 200},
		{"", "localhost", 200},
		{"", "[::1]:8080", 200},
		{"", "192.0.2.7", 200},
		{"", "attacker.example:8080", 421},
		{"", "", 421},
		{"", "localhost.attacker.example", 421},
		{"broker.example", "broker.example:8080", 200},
		{"broker.example", "BROKER.example", 200},
		{"broker.example", "attacker.example", 421},
	} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Host = tt.host
		w := httptest.NewRecorder()
		New(tt.name).Handler().ServeHTTP(w, r)
		if w.Code != tt.want {
			t.Errorf("-http %q, Host %q: %d, want %d", tt.name, tt.host, w.Code, tt.want)
		}
	}
}

// Nothing can be sent to the page, and it tells the browser to let no other site
// at it.
func TestReadOnly(t *testing.T) {
	h := New("").Handler()
	for _, path := range []string{"/", "/lesson", "/events", "/metrics", "/debug/producers"} {
		for _, method := range []string{"POST", "PUT", "DELETE", "PATCH"} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(method, "http://localhost"+path, strings.NewReader("steps=next")))
			if w.Code != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d, want 405", method, path, w.Code)
			}
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "http://localhost/lesson", nil))
	for name, want := range map[string]string{
		"Content-Security-Policy":      "default-src 'none'",
		"Cross-Origin-Resource-Policy": "same-origin",
		"X-Content-Type-Options":       "nosniff",
		"Access-Control-Allow-Origin":  "",
	} {
		if got := w.Header().Get(name); !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestBadRequests(t *testing.T) {
	r := start(t, server.Config{Partitions: 1})
	for path, want := range map[string]int{
		"/nothing":                           404,
		"/events?topic=t&partition=x":        400,
		"/events?topic=t&producer=x":         400,
		"/lesson?steps=dance":                400,
		"/lesson?steps=0.0.0.0":              400,
		"/lesson?steps=0.-1.1":               400,
		"/lesson?steps=same":                 400,
		"/lesson?steps=" + many("next", 101): 400,
		"/lesson?steps=" + many("next", 100): 200,
		"/../page.go":                        404,
	} {
		if code, body := r.get(path); code != want {
			t.Errorf("%.60s: %d %.100s, want %d", path, code, body, want)
		}
	}
	resp, err := http.Get(r.url + "/lesson?steps=" + many("next", 10_000)) // a header beyond the limit
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("a request line of 50 kB: %s", resp.Status)
	}
}

func many(step string, n int) string { return strings.TrimSuffix(strings.Repeat(step+",", n), ",") }

// The gate lets work through for a tenth of the time, and gives up on a request
// that has waited long enough.
func TestGate(t *testing.T) {
	g := newGate()
	const work = 5 * time.Millisecond
	begun := time.Now()
	var inside sync.Mutex
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			g.do(t.Context(), func() {
				if !inside.TryLock() {
					t.Error("two at a time")
				}
				time.Sleep(work)
				inside.Unlock()
			})
		})
	}
	wg.Wait()
	if took := time.Since(begun); took < 3*10*work+work {
		t.Errorf("four pieces of work of %v took %v, less than a tenth of the time allows", work, took)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w := httptest.NewRecorder()
	closed := make(gate)
	if closed.pass(w, httptest.NewRequest("GET", "/", nil).WithContext(ctx), func() {}) || w.Code != http.StatusServiceUnavailable {
		t.Errorf("a closed gate: %d, want 503", w.Code)
	}
}

// readers opens n subscriptions that are read as fast as they can be.
func readers(t testing.TB, r *rig, n int, query func(i int) string) (stop func(), messages func() int) {
	t.Helper()
	var mu sync.Mutex
	got := make([]int, n)
	var wg sync.WaitGroup
	var bodies []io.Closer
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 0, DisableKeepAlives: true}}
	for i := range n {
		resp, err := client.Get(r.url + "/events" + query(i))
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != 200 {
			t.Fatalf("subscriber %d: %s", i, resp.Status)
		}
		bodies = append(bodies, resp.Body)
		wg.Go(func() {
			lines := bufio.NewScanner(resp.Body)
			lines.Buffer(nil, 1<<20)
			for lines.Scan() {
				if strings.HasPrefix(lines.Text(), "data: ") {
					mu.Lock()
					got[i]++
					mu.Unlock()
				}
			}
		})
	}
	stop = func() {
		for _, b := range bodies {
			b.Close()
		}
		wg.Wait()
	}
	messages = func() int { // of the reader that got fewest
		mu.Lock()
		defer mu.Unlock()
		fewest := got[0]
		for _, n := range got {
			fewest = min(fewest, n)
		}
		return fewest
	}
	return stop, messages
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so after %v: %s", patience, what)
		}
	}
}

func (h *hub) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.subscribers)
}

// Two hundred readers look at different producers while one produces. All get
// what happens, and when they have gone nothing of them is left.
func TestManyReaders(t *testing.T) {
	r := start(t, server.Config{Partitions: 1})
	r.page.hub.interval = 20 * time.Millisecond
	r.produce(1)
	before := runtime.NumGoroutine()
	stop, messages := readers(t, r, 200, func(i int) string {
		return fmt.Sprintf("?topic=orders&partition=0&producer=%d", i%20)
	})
	eventually(t, "200 subscribers", func() bool { return r.page.hub.count() == 200 })
	for want := 1; want <= 3; want++ {
		r.produce(1)
		eventually(t, "each reader has the change", func() bool { return messages() >= want })
	}
	stop()
	eventually(t, "no subscribers", func() bool { return r.page.hub.count() == 0 })
	r.page.answers.mu.Lock()
	followed := len(r.page.answers.followed)
	r.page.answers.mu.Unlock()
	if followed != 0 {
		t.Errorf("%d selections are still followed", followed)
	}
	eventually(t, "no goroutines of readers", func() bool { return runtime.NumGoroutine() <= before+5 })
}

// A reader too many is refused, and admitted when another one has gone.
func TestTooManyReaders(t *testing.T) {
	r := start(t, server.Config{})
	stop, _ := readers(t, r, maxSubscribers, func(int) string { return "" })
	if code, body := r.get("/events"); code != http.StatusServiceUnavailable {
		t.Errorf("%d %s", code, body)
	}
	stop()
	eventually(t, "room again", func() bool { return r.page.hub.count() < maxSubscribers })
	stop, _ = readers(t, r, 1, func(int) string { return "" })
	stop()
}

// Readers that never read are disconnected, while one that reads goes on, and the
// broker is not held up.
func TestSlowReadersAreDropped(t *testing.T) {
	r := start(t, server.Config{Partitions: 150}) // messages of some 30 kB
	r.page.hub.interval = time.Millisecond
	r.produce(1)
	const slow = 5
	var conns []net.Conn
	for range slow {
		nc, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		fmt.Fprintf(nc, "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
		conns = append(conns, nc)
	}
	stop, messages := readers(t, r, 1, func(int) string { return "" })
	defer stop()
	eventually(t, "all subscribers", func() bool { return r.page.hub.count() == slow+1 })
	cl := r.client()
	defer cl.Close()
	produce := func() {
		if err := cl.ProduceSync(t.Context(), kgo.StringRecord("record")).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "only the one that reads is left", func() bool {
		produce() // something changes, so there is a message
		return r.page.hub.count() == 1
	})
	got := messages()
	produce()
	eventually(t, "the one that reads goes on", func() bool { return messages() > got })
	var wg sync.WaitGroup
	for _, nc := range conns {
		wg.Go(func() {
			nc.SetReadDeadline(time.Now().Add(patience))
			if _, err := io.Copy(io.Discard, nc); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("a slow reader was not disconnected")
			}
		})
	}
	wg.Wait()
}

// The hub itself never waits for a subscriber, and drops it at the first message
// that does not fit.
func TestQueueIsBounded(t *testing.T) {
	p := New("")
	p.hub.running = true // by the test, not by its goroutine
	s, stop := p.hub.subscribe(selection{})
	defer stop()
	for i := range queuedMessages + 1 {
		if p.hub.count() != 1 {
			t.Fatalf("dropped after %d messages, want %d", i, queuedMessages)
		}
		p.hub.mu.Lock()
		p.hub.send(s, fmt.Appendf(nil, "%d", i))
		p.hub.mu.Unlock()
	}
	if n := p.hub.count(); n != 0 {
		t.Errorf("%d subscribers after a message too many", n)
	}
	for i := range queuedMessages {
		if m := string(<-s.messages); m != fmt.Sprint(i) {
			t.Errorf("message %d: %s", i, m)
		}
	}
	if _, open := <-s.messages; open {
		t.Error("the queue is still open")
	}
}

// Among busy producers the answers to a quiet one are kept for those who look at
// it, and only for them.
func TestLastAnswers(t *testing.T) {
	var a answers
	event := func(partition int32, producer int64, sequence int32) server.Event {
		return server.Event{Topic: topic, Partition: partition, Batch: idempotence.Batch{ProducerID: producer, BaseSequence: sequence, Count: 1},
			Result: idempotence.Result{Verdict: idempotence.Append}}
	}
	quiet := selection{topic, 0, 7}
	a.add(event(0, 7, 0), time.Time{})
	stop := a.follow(quiet)
	stopPartition := a.follow(selection{topic, 0, anyProducer})
	for i := range int32(10 * recentAnswers) {
		a.add(event(0, 1000+int64(i), 0), time.Time{})
		a.add(event(1, 7, 0), time.Time{}) // of another partition
	}
	a.add(event(0, 7, 1), time.Time{})
	var sequences []int32
	for _, s := range show(a.of(quiet)) {
		sequences = append(sequences, s.Batch.First)
	}
	if fmt.Sprint(sequences) != "[1 0]" {
		t.Errorf("answers to the quiet producer: sequences %v, want 1 and 0", sequences)
	}
	if all := a.of(selection{topic, 0, anyProducer}); len(all) != selectedAnswers || all[0].Batch.ProducerID != 7 || all[1].Batch.ProducerID != 1000+10*recentAnswers-1 {
		t.Errorf("answers of the partition: %v", all)
	}
	stop()
	stopPartition()
	if a.of(quiet) != nil || len(a.followed) != 0 || len(a.recent.a) != recentAnswers {
		t.Errorf("%d followed, %d recent; want 0 and %d", len(a.followed), len(a.recent.a), recentAnswers)
	}
}

// What the page costs the broker on the way of a batch.
func BenchmarkNoteAnswer(b *testing.B) {
	for _, followed := range []int{0, 200} {
		b.Run(fmt.Sprintf("followed=%d", followed), func(b *testing.B) {
			var a answers
			for i := range followed {
				defer a.follow(selection{topic, 0, int64(i)})()
			}
			e := server.Event{Topic: topic, Batch: idempotence.Batch{ProducerID: 1, Count: 1}}
			now := time.Now()
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					a.add(e, now)
				}
			})
		})
	}
}
