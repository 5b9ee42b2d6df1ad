package main

// The nodes are processes of their own here, and are killed.

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/idempotence-go/idempotence/examples/broker/show/readback"
)

// beNode in the environment makes the test binary a node itself.
const beNode = "IDEMPOTENCE_TEST_BE_NODE"

func TestMain(m *testing.M) {
	if os.Getenv(beNode) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// processes are three nodes, each with a directory, which know no more of each
// other than their addresses.
type processes struct {
	*testing.T
	dirs    [clusterSize]string
	peers   string
	clients []string
	running [clusterSize]*exec.Cmd
}

func newProcesses(t *testing.T) *processes {
	t.Helper()
	ps := &processes{T: t}
	var peers []string
	for i := range clusterSize {
		client := freeAddress(t)
		ps.dirs[i] = t.TempDir()
		ps.clients = append(ps.clients, client)
		peers = append(peers, fmt.Sprintf("%d=%s/%s", i+1, freeAddress(t), client))
	}
	ps.peers = strings.Join(peers, ",")
	t.Cleanup(func() {
		for i := range clusterSize {
			ps.kill(i)
			said, _ := os.ReadFile(ps.said(i))
			if at := bytes.Index(said, []byte("panic")); at >= 0 {
				t.Errorf("node %d has ended by itself: %s", i+1, said[at:])
			}
		}
	})
	return ps
}

// freeAddress returns an address with a port that nothing listens on, from below
// the range that systems take those of outgoing connections from.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 100 {
		addr := fmt.Sprint("127.0.0.1:", 10_000+rand.IntN(10_000))
		if ln, err := net.Listen("tcp", addr); err == nil {
			ln.Close()
			return addr
		}
	}
	t.Fatal("no free port")
	return ""
}

func (ps *processes) start(i int) {
	ps.Helper()
	cmd := exec.Command(os.Args[0], "-node", fmt.Sprint(i+1), "-peers", ps.peers, "-data", ps.dirs[i],
		"-partitions", "2", "-election-timeout", "300ms", "-snapshot-threshold", "500", "-snapshot-interval", "500ms")
	cmd.Env = append(os.Environ(), beNode+"=1")
	said, err := os.OpenFile(ps.said(i), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		ps.Fatal(err)
	}
	defer said.Close()
	cmd.Stderr = said
	if err := cmd.Start(); err != nil {
		ps.Fatal(err)
	}
	ps.running[i] = cmd
}

// said is where a node writes its log.
func (ps *processes) said(i int) string { return filepath.Join(ps.dirs[i], "said") }

// kill ends a node without any notice, if it runs.
func (ps *processes) kill(i int) {
	if cmd := ps.running[i]; cmd != nil {
		cmd.Process.Kill()
		cmd.Wait()
		ps.running[i] = nil
	}
}

// terminate asks a node to end, as an operator does, and waits until it has.
func (ps *processes) terminate(i int) {
	ps.Helper()
	cmd := ps.running[i]
	ps.running[i] = nil
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		ps.Fatal(err)
	}
	patience := time.AfterFunc(30*time.Second, func() { cmd.Process.Kill() })
	defer patience.Stop()
	if err := cmd.Wait(); err != nil {
		ps.Errorf("node %d, asked to end, ends with %v", i+1, err)
	}
}

// TestKilled: nodes are killed at random moments under load, or asked to end,
// sometimes all of them, and started again. Nothing that was acknowledged is missing afterwards,
// nothing is stored twice, and the nodes have the same logs.
func TestKilled(t *testing.T) {
	t.Parallel() // beside TestNemesisNotices
	const kills = 8
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ps := newProcesses(t)
	for i := range clusterSize {
		ps.start(i)
	}

	var acks readback.Acks
	var sent atomic.Int64
	var producers errgroup.Group
	working, stop := context.WithCancel(ctx)
	defer stop()
	for i := range 3 {
		producers.Go(func() error {
			n, err := produce(ctx, working, ps.clients, fmt.Sprint("producer-", i), 2, 10*time.Millisecond, acks.Promise)
			sent.Add(int64(n))
			return err
		})
	}
	for range kills {
		time.Sleep(time.Duration(300+rng.IntN(1500)) * time.Millisecond)
		victims := []int{rng.IntN(clusterSize)}
		if rng.IntN(4) == 0 {
			victims = []int{0, 1, 2}
		}
		end := ps.kill
		if rng.IntN(3) == 0 {
			end = ps.terminate
		}
		for _, i := range victims {
			end(i)
		}
		time.Sleep(time.Duration(rng.IntN(1000)) * time.Millisecond)
		for _, i := range victims {
			ps.start(i)
		}
	}
	time.Sleep(time.Second)
	stop()
	if err := producers.Wait(); err != nil {
		t.Fatal(err)
	}
	places, err := acks.Places()
	if err != nil {
		t.Fatal(err)
	}
	logs, err := readback.Read(ctx, ps.clients[0], topic, 2)
	if err != nil {
		t.Fatal(err)
	}
	if c := readback.Count(logs, places); c != (readback.Counts{}) || len(places) != int(sent.Load()) {
		t.Errorf("%d records sent, %d acknowledged: %+v", sent.Load(), len(places), c)
	}
	ps.compareLogs(ctx)
	t.Logf("%d records", len(places))
}

// compareLogs waits until the logs of all nodes are the same.
func (ps *processes) compareLogs(ctx context.Context) {
	for partition := range 2 {
		var logs [clusterSize][]byte
		for {
			for i, dir := range ps.dirs {
				logs[i] = ps.log(dir, partition)
			}
			if len(logs[0]) > 0 && bytes.Equal(logs[0], logs[1]) && bytes.Equal(logs[0], logs[2]) {
				break
			}
			if ctx.Err() != nil {
				ps.Errorf("partition %d: the logs differ, of %d, %d and %d bytes", partition, len(logs[0]), len(logs[1]), len(logs[2]))
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
}

// log returns the log of a partition, from the newest directory that a node has
// made for it.
func (ps *processes) log(dir string, partition int) []byte {
	files, err := filepath.Glob(filepath.Join(dir, "partitions", "*", fmt.Sprint(partition), "*.log"))
	if err != nil || len(files) == 0 {
		return nil
	}
	log, err := os.ReadFile(slices.Max(files))
	if err != nil {
		return nil // it has just been replaced
	}
	return log
}

// TestTerminated: a node that is asked to end does so without complaint.
func TestTerminated(t *testing.T) {
	ps := newProcesses(t)
	ps.start(0)
	for {
		if conn, err := net.Dial("tcp", ps.clients[0]); err == nil {
			conn.Close()
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	ps.terminate(0)
}
