package main

// The broker is a process of its own here, and is killed.

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/idempotence-go/idempotence/examples/broker/show/faults"
	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
)

// beBroker in the environment makes the test binary the broker itself.
const beBroker = "IDEMPOTENCE_TEST_BE_BROKER"

func TestMain(m *testing.M) {
	if at := os.Getenv(dieAt); at != "" {
		dieEnding(at)
	}
	if client, addr, ok := strings.Cut(os.Getenv(beTransformer), " "); ok {
		transformForever(client, addr)
	}
	if os.Getenv(beBroker) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A process is a broker that can be killed.
type process struct {
	cmd     *exec.Cmd
	stderr  io.ReadCloser
	addr    string         // where it listens
	reading sync.WaitGroup // of what it says
}

var servingAt = regexp.MustCompile(`msg=serving addr=(\S+)`)

// startProcess starts a broker, and returns at once.
func startProcess(t *testing.T, args ...string) *process {
	t.Helper()
	return startAs(t, beBroker+"=1", append([]string{"-listen", "127.0.0.1:0"}, args...)...)
}

// startAs starts the test binary, which becomes what the environment says.
func startAs(t *testing.T, env string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(os.Args[0], args...)}
	p.cmd.Env = append(os.Environ(), env)
	var err error
	if p.stderr, err = p.cmd.StderrPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.cmd.Process.Kill() }) // should the test give up
	return p
}

// serves waits until the broker listens, and reports whether it ever did. Each
// line that the broker says, until it ends, is passed on.
func (p *process) serves(said func(string)) bool {
	lines := bufio.NewScanner(p.stderr)
	for lines.Scan() {
		said(lines.Text())
		if m := servingAt.FindStringSubmatch(lines.Text()); m != nil {
			p.addr = m[1]
			p.reading.Go(func() {
				for lines.Scan() {
					said(lines.Text())
				}
			})
			return true
		}
	}
	return false
}

// end sends the broker a signal and returns how it ended.
func (p *process) end(signal os.Signal) error {
	if err := p.cmd.Process.Signal(signal); err != nil {
		return err
	}
	p.reading.Wait()
	return p.cmd.Wait()
}

// The broker is killed at random moments under load, while it recovers and
// while it writes a snapshot included, and started again over the same
// directory. Nothing that was acknowledged may be missing then, and nothing
// doubled: whether it was synced or only written, a process that dies takes
// nothing along.
func TestKilled(t *testing.T) {
	t.Parallel()
	const kills, producers, limit = 12, 3, 60 * time.Second
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))

	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	proxy, err := faults.New("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close()
	proxy.Close() // until there is a broker
	dir := t.TempDir()
	start := func() *process {
		args := []string{"-data", dir, "-advertise", proxy.Addr(), "-segment-bytes", "20000", "-expire-after", "1h", "-partitions", "1"}
		if rng.IntN(2) == 0 {
			args = append(args, "-no-sync")
		}
		return startProcess(t, args...)
	}
	var snapshots atomic.Int64 // recovered from
	said := func(line string) {
		if m := recoveredFrom.FindStringSubmatch(line); m != nil && m[1] != "0" {
			snapshots.Add(1)
		}
		if complaint.MatchString(line) && !torn.MatchString(line) { // a kill may tear a write
			t.Errorf("the broker complains: %s", line)
		}
	}

	load := newLoad(ctx, proxy.Addr(), producers)
	whileStarting := 0
	for range kills {
		p := start()
		if rng.IntN(6) == 0 {
			time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
			whileStarting++
		} else {
			if !p.serves(said) {
				t.Fatal("the broker did not start")
			}
			if err := proxy.MoveTo(p.addr); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(100+rng.IntN(900)) * time.Millisecond)
		}
		p.end(syscall.SIGKILL)
	}

	// To the end with one that ends the clean way, and count.
	p := start()
	if !p.serves(said) {
		t.Fatal("the broker did not start")
	}
	if err := proxy.MoveTo(p.addr); err != nil {
		t.Fatal(err)
	}
	acknowledged, produced, err := load.stop()
	if err != nil {
		t.Error(err)
	}
	log, err := readback.Read(ctx, proxy.Addr(), topic, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.end(syscall.SIGTERM); err != nil {
		t.Errorf("the broker ended with %v", err)
	}
	if c := readback.Count(log, acknowledged); c != (readback.Counts{}) {
		t.Errorf("not exactly once: %+v", c)
	}
	if len(acknowledged) != produced || len(log[0]) != produced {
		t.Errorf("%d records acknowledged and %d in the log, want %d", len(acknowledged), len(log[0]), produced)
	}
	if snapshots.Load() == 0 {
		t.Error("no start found a snapshot")
	}
	t.Logf("%d records; killed %d times, %d of them while starting; recovered from a snapshot %d times",
		produced, kills, whileStarting, snapshots.Load())
}

var (
	recoveredFrom = regexp.MustCompile(`msg=recovered .*snapshot=(\d+)`)
	complaint     = regexp.MustCompile(`level=(WARN|ERROR)`)
	torn          = regexp.MustCompile(`msg="log cut after an unclean stop" .*torn tail`)
)

// A load is producers that produce until they are stopped, each with a few
// records on the way.
type load struct {
	stopping chan struct{}
	wg       sync.WaitGroup

	mu           sync.Mutex
	acknowledged map[string]readback.Place
	produced     int
	err          error
}

func newLoad(ctx context.Context, addr string, producers int) *load {
	l := &load{stopping: make(chan struct{}), acknowledged: make(map[string]readback.Place)}
	for i := range producers {
		l.wg.Go(func() { l.produce(ctx, addr, fmt.Sprintf("producer-%d", i)) })
	}
	return l
}

// stop waits until all that was produced has been acknowledged, or given up.
func (l *load) stop() (acknowledged map[string]readback.Place, produced int, err error) {
	close(l.stopping)
	l.wg.Wait()
	return l.acknowledged, l.produced, l.err
}

func (l *load) produce(ctx context.Context, addr, name string) {
	var acks readback.Acks
	n, err := l.run(ctx, addr, name, &acks)
	places, failed := acks.Places()
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.Copy(l.acknowledged, places)
	l.produced += n
	for _, err := range []error{err, failed} {
		if l.err == nil {
			l.err = err
		}
	}
}

func (l *load) run(ctx context.Context, addr, name string, acks *readback.Acks) (n int, err error) {
	cl, err := newFranz(addr, kgo.MaxBufferedRecords(200))
	if err != nil {
		return 0, err
	}
	defer cl.Close()
	for ; ; n++ {
		select {
		case <-l.stopping:
			return n, cl.Flush(ctx)
		default:
			// A little at a time, or there is too much to read back.
			time.Sleep(200 * time.Microsecond)
			cl.Produce(ctx, kgo.StringRecord(record(name, n)), acks.Promise)
		}
	}
}

// The bounds on what is remembered can be set, and what is left can be looked at
// while the broker runs.
func TestFlags(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := startProcess(t, "-data", dir, "-partitions", "1", "-max-producers", "2", "-expire-after", "1s")
	if !p.serves(func(string) {}) {
		t.Fatal("the broker did not start")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for i := range 4 {
		if _, err := franz(ctx, p.addr, fmt.Sprintf("producer-%d", i), 1); err != nil {
			t.Fatal(err)
		}
	}
	if got := remembered(t, dir); got != "end offset 4, 4 producers" { // by the log, which knows no limit
		t.Errorf("while it runs: %s", got)
	}
	if err := p.end(syscall.SIGTERM); err != nil {
		t.Errorf("the broker ended with %v", err)
	}
	if got := remembered(t, dir); got != "end offset 4, 2 producers" {
		t.Errorf("with room for 2 producers: %s", got)
	}

	p = startProcess(t, "-data", dir, "-expire-after", "100ms")
	if !p.serves(func(string) {}) {
		t.Fatal("the broker did not start")
	}
	time.Sleep(time.Second)
	if err := p.end(syscall.SIGTERM); err != nil {
		t.Errorf("the broker ended with %v", err)
	}
	if got := remembered(t, dir); got != "end offset 4, 0 producers" {
		t.Errorf("after they were idle for long: %s", got)
	}
}

// remembered is what inspect says of the one partition in a data directory.
func remembered(t *testing.T, dir string) string {
	t.Helper()
	var out strings.Builder
	if err := inspect(&out, []string{dir}); err != nil {
		t.Fatal(err)
	}
	_, summary, _ := strings.Cut(out.String(), "; ")
	summary, _, _ = strings.Cut(summary, "\n")
	return summary
}
