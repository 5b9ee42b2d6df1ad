// Package page lets people look inside a running broker with a browser: a live
// page at /, metrics for Prometheus at /metrics, and what is remembered of
// producers as JSON at /debug/producers.
//
// Nothing that a reader does changes the broker, and readers cost it next to
// nothing, however many there are and whatever they do. What is shown live is
// collected once for all of them, about twice a second. What is computed for
// one of them goes through a gate, which lets all together have a tenth of one
// core. Whoever reads too slowly is disconnected.
package page

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"

	"github.com/idempotence-go/idempotence/examples/broker/page/lesson"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

//go:embed static
var static embed.FS

// Limits of the HTTP server.
const (
	maxConnections = 300
	maxSubscribers = 256
	maxHeaderBytes = 8 << 10
	headerTimeout  = 5 * time.Second
	answerTimeout  = 10 * time.Second
	idleTimeout    = time.Minute

	// gateTimeout is how long a request waits for the gate.
	gateTimeout = 5 * time.Second
)

// A Page shows one broker. Its methods may be called concurrently.
type Page struct {
	host    string // see New
	broker  atomic.Pointer[server.Server]
	answers answers
	hub     *hub
	gate    gate // for all but the live page
	handler http.Handler
}

// New returns a page that may be asked for by the name host, beside localhost and
// all addresses. It shows nothing yet: see [Page.Attach].
func New(host string) *Page {
	p := &Page{host: host, gate: newGate()}
	p.hub = newHub(p)
	files, err := fs.Sub(static, "static")
	if err != nil {
		panic(err) // the directory is embedded above
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.HandleFunc("GET /events", p.serveEvents)
	mux.HandleFunc("GET /lesson", p.serveLesson)
	mux.HandleFunc("GET /debug/producers", p.serveProducers)
	mux.Handle("GET /metrics", p.metricsHandler())
	p.handler = p.guard(mux)
	return p
}

// Watch returns cfg with what the page needs added, so that it shows the broker
// that is opened with it. What cfg observed before it still observes. The page
// notes an answer in well under a microsecond, and never waits for a reader.
func (p *Page) Watch(cfg server.Config) server.Config {
	observe, opened := cfg.Observe, cfg.Opened
	cfg.Observe = func(e server.Event) {
		p.answers.add(e, time.Now())
		if observe != nil {
			observe(e)
		}
	}
	cfg.Opened = func(s *server.Server) {
		p.broker.Store(s)
		if opened != nil {
			opened(s)
		}
	}
	return cfg
}

// Handler returns the handler of all requests.
func (p *Page) Handler() http.Handler { return p.handler }

// Serve answers requests until ctx ends, and then returns nil.
func (p *Page) Serve(ctx context.Context, ln net.Listener, logger *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &http.Server{
		Handler:           p.handler,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout,
		WriteTimeout:      answerTimeout, // the live page has its own, for each message
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          quietLog(logger),
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	err := s.Serve(netutil.LimitListener(ln, maxConnections))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// quietLog gets what a broken or hostile reader makes net/http complain of.
func quietLog(logger *slog.Logger) *log.Logger {
	return slog.NewLogLogger(logger.Handler(), slog.LevelDebug)
}

// guard refuses requests under a foreign name, and keeps browsers from letting
// other sites at the page.
//
// A site whose name is made to point to 127.0.0.1 (DNS rebinding) could otherwise
// read what the page shows. It has a name, so addresses are harmless.
func (p *Page) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !p.knownHost(r.Host) {
			http.Error(w, "Ask for this page by its address, as localhost, or by the name given with -http.", http.StatusMisdirectedRequest)
			return
		}
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "+
			"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		r.Body = http.MaxBytesReader(w, r.Body, 0)
		next.ServeHTTP(w, r)
	})
}

func (p *Page) knownHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	return strings.EqualFold(host, "localhost") || p.host != "" && strings.EqualFold(host, p.host)
}

// serveLesson plays a lesson. Its steps are in the query.
func (p *Page) serveLesson(w http.ResponseWriter, r *http.Request) {
	var steps []string
	if text := r.FormValue("steps"); text != "" {
		steps = strings.Split(text, ",")
	}
	var shown []lesson.Shown
	var failed error
	if !p.gate.pass(w, r, func() { shown, failed = lesson.Play(steps) }) {
		return
	}
	if failed != nil {
		http.Error(w, failed.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, struct {
		Trace []string       `json:"trace"`
		Max   int            `json:"max"`
		Shown []lesson.Shown `json:"shown"`
	}{lesson.WorkedTrace, lesson.MaxSteps, shown})
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v) // fails only if the reader has gone
}

// A gate lets one piece of work through at a time. After it, it stays closed for
// nine times as long as that took. So all work behind it together takes a tenth
// of one core, however often it is asked for.
type gate chan struct{}

func newGate() gate {
	g := make(gate, 1)
	g <- struct{}{}
	return g
}

// do does the work, or returns an error if ctx ends before its turn. The work
// must not wait for a reader.
func (g gate) do(ctx context.Context, work func()) error {
	select {
	case <-g:
	case <-ctx.Done():
		return ctx.Err()
	}
	begun := time.Now()
	defer func() { time.AfterFunc(9*time.Since(begun), func() { g <- struct{}{} }) }()
	work()
	return nil
}

// pass does work for a request. If there is too much of it, it answers the
// request and returns false.
func (g gate) pass(w http.ResponseWriter, r *http.Request, work func()) bool {
	ctx, cancel := context.WithTimeout(r.Context(), gateTimeout)
	defer cancel()
	if err := g.do(ctx, work); err != nil {
		w.Header().Set("Retry-After", "5")
		http.Error(w, "Too many requests for now.", http.StatusServiceUnavailable)
		return false
	}
	return true
}
