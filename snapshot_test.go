package idempotence

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file tests that the state survives: a restored manager answers as the former
// one did; equal states give equal bytes, in every release; and nothing but an intact
// snapshot is restored.

// update rewrites the golden files: go test -run TestGolden -update. Do so only with
// a new version of the format.
var update = flag.Bool("update", false, "rewrite the golden snapshots in testdata")

// written returns the bytes of a snapshot.
func written(t rapid.TB, s *Snapshot) []byte {
	t.Helper()
	var buf bytes.Buffer
	n, err := s.WriteTo(&buf)
	if err != nil || n != int64(buf.Len()) {
		t.Fatalf("WriteTo returned %d for %d bytes, %v", n, buf.Len(), err)
	}
	return buf.Bytes()
}

// encoded returns the bytes of a snapshot taken now.
func encoded(t rapid.TB, m *ProducerStateManager) []byte {
	t.Helper()
	return written(t, m.Snapshot())
}

// restored returns a new manager with the state of a snapshot.
func restored(t rapid.TB, cfg Config, snapshot []byte) *ProducerStateManager {
	t.Helper()
	m := New(cfg)
	if err := m.Restore(bytes.NewReader(snapshot)); err != nil {
		t.Fatal(err)
	}
	audit(t, m)
	return m
}

// withChecksum replaces the checksum of a snapshot by the right one.
func withChecksum(snapshot []byte) []byte {
	body := snapshot[:len(snapshot)-checksumSize]
	return binary.LittleEndian.AppendUint32(bytes.Clone(body), crc32.Checksum(body, castagnoli))
}

// TestRoundTrip: a restored state is equal to the former one and has equal bytes,
// whatever the number of producers and their rows.
func TestRoundTrip(t *testing.T) {
	for _, n := range []int{0, 1, 2, 63, 64, 65, 500, 5000} {
		for name, m := range map[string]*ProducerStateManager{"in order": firstOf(full(n)), "scattered": scattered(n)} {
			m.Expire(time.Unix(1000, 7))
			snapshot := encoded(t, m)
			again := restored(t, Config{}, snapshot)
			if diff := cmp.Diff(stateOf(m), stateOf(again)); diff != "" {
				t.Fatalf("%d producers %s: (-want +got)\n%s", n, name, diff)
			}
			if !bytes.Equal(snapshot, encoded(t, again)) {
				t.Fatalf("%d producers %s: the restored state has other bytes", n, name)
			}
			if frame := headerSize + timeSize + 3*8 + checksumSize; len(snapshot) > frame+100*n {
				t.Fatalf("%d producers take %d bytes", n, len(snapshot)-frame)
			}
		}
	}
}

func firstOf[A, B any](a A, _ B) A { return a }

// crashes restores a snapshot in the middle of a history, which goes on with the
// restored manager.
var crashes = []deed{{"restart", func(s *survivor) {
	s.note("restart")
	snapshot := encoded(s.t, s.m)
	again := restored(s.t, s.c.cfg, snapshot)
	if !bytes.Equal(snapshot, encoded(s.t, again)) {
		s.fail("the restored state has other bytes")
	}
	s.m = again
}}}

// TestRestartAgainstChronicle: a restored manager behaves as if there had been no
// restart: what it remembers, which producer it forgets next, and whether a
// truncation is exact.
func TestRestartAgainstChronicle(t *testing.T) {
	checkHistories(t, someConfig, commits, replays, markers, coordinators, overlaps, clocks, truncations, crashes)
}

// slowLog is a partition with slow appends: batches are reserved, enter the log in
// that order, and are committed in any order. Snapshots are taken meanwhile and kept.
type slowLog struct {
	t         *rapid.T
	m         *ProducerStateManager
	next      map[int64]int32
	epoch     map[int64]int16
	txn       map[int64]bool      // has reserved a transactional batch
	reserved  map[int64][]pending // not in the log yet
	appended  []pending
	log       []logged
	end       int64
	snapshots []*Snapshot
}

type pending struct {
	r *Reservation
	l logged
}

func newSlowLog(t *rapid.T) *slowLog {
	return &slowLog{
		t: t, m: New(Config{}), next: map[int64]int32{}, epoch: map[int64]int16{}, txn: map[int64]bool{}, reserved: map[int64][]pending{},
	}
}

// run performs random steps, and takes a snapshot in the end.
func (p *slowLog) run() {
	deeds := []func(){p.reserve, p.reserve, p.applyHead, p.applyHead, p.settle, p.settle, p.fail, p.newEpoch, p.snapshot}
	for range 1 + p.pick(80) {
		deeds[p.pick(len(deeds))]()
	}
	p.snapshot()
}

func (p *slowLog) pick(n int) int { return rapid.IntRange(0, n-1).Draw(p.t, "pick") }

func (p *slowLog) reserve() {
	pid := int64(31 + p.pick(4))
	b := Batch{ProducerID: pid, Epoch: p.epoch[pid], BaseSequence: p.next[pid], Count: int32(1 + p.pick(3)), Transactional: p.pick(4) == 0 || p.txn[pid]}
	if r, _, err := p.m.Reserve(b); err == nil {
		p.txn[pid] = b.Transactional
		p.reserved[pid] = append(p.reserved[pid], pending{r, logged{batch: b}})
		p.next[pid] += b.Count
	} else if !errors.Is(err, ErrInFlight) {
		p.t.Fatal(err)
	}
}

// applyHead appends the oldest reserved batch of a producer to the log.
func (p *slowLog) applyHead() {
	pid := int64(31 + p.pick(4))
	if len(p.reserved[pid]) == 0 {
		return
	}
	a := p.reserved[pid][0]
	p.reserved[pid] = p.reserved[pid][1:]
	a.l.base = p.end
	p.end = a.l.end()
	p.log, p.appended = append(p.log, a.l), append(p.appended, a)
}

// fail aborts the oldest reserved batch of a producer, and so all later ones.
func (p *slowLog) fail() {
	pid := int64(31 + p.pick(4))
	if len(p.reserved[pid]) == 0 {
		return
	}
	a := p.reserved[pid][0]
	if err := a.r.Abort(); err != nil {
		p.t.Fatal(err)
	}
	p.reserved[pid], p.next[pid] = nil, a.l.batch.BaseSequence
}

func (p *slowLog) settle() {
	if len(p.appended) == 0 {
		return
	}
	i := p.pick(len(p.appended))
	a := p.appended[i]
	p.appended = slices.Delete(p.appended, i, i+1)
	if err := a.r.Commit(a.l.base); err != nil {
		p.t.Fatal(err)
	}
}

func (p *slowLog) snapshot() { p.snapshots = append(p.snapshots, p.m.Snapshot()) }

// newEpoch gives a producer that has nothing in flight the next epoch, with a
// marker or, outside a transaction, without.
func (p *slowLog) newEpoch() {
	pid := int64(31 + p.pick(4))
	ofProducer := func(a pending) bool { return a.l.batch.ProducerID == pid }
	if len(p.reserved[pid]) > 0 || slices.ContainsFunc(p.appended, ofProducer) {
		return
	}
	p.epoch[pid], p.next[pid] = p.epoch[pid]+1, 0
	if !p.txn[pid] && p.pick(2) == 0 {
		return
	}
	p.txn[pid] = false
	k := logged{marker: &Marker{ProducerID: pid, Epoch: p.epoch[pid], CoordinatorEpoch: int32(p.pick(9))}, base: p.end}
	p.end, p.log = k.end(), append(p.log, k)
	if err := apply(p.m, k); err != nil {
		p.t.Fatal(err)
	}
}

// rebuilt replays the log from the end offset of m, and returns m.
func (p *slowLog) rebuilt(m *ProducerStateManager) *ProducerStateManager {
	from := m.EndOffset()
	for _, l := range p.log {
		if l.end() > from {
			if err := apply(m, l); err != nil {
				p.t.Fatal(err)
			}
		}
	}
	m.Advance(p.end)
	return m
}

// TestSnapshotOfPipeline: whatever is in flight when a snapshot is taken, in the log
// or not, a restore and a replay from its end offset give the state of a replay of
// the whole log.
func TestSnapshotOfPipeline(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newSlowLog(t)
		p.run()
		want := withoutActivity(stateOf(p.rebuilt(New(Config{}))))
		for _, s := range p.snapshots {
			m := restored(t, Config{}, written(t, s))
			if m.EndOffset() != s.EndOffset() {
				t.Fatalf("end offset %d, restored as %d", s.EndOffset(), m.EndOffset())
			}
			if got := withoutActivity(stateOf(p.rebuilt(m))); !cmp.Equal(want, got) {
				t.Fatalf("log %+v, snapshot at %d (-log +snapshot and log):\n%s", p.log, s.EndOffset(), cmp.Diff(want, got))
			}
		}
	})
}

// TestF3_EpochBehindBatchInFlight: while a batch of one producer is in flight,
// another producer opens a transaction and continues in a newer epoch. A replay from
// the snapshot's end offset still knows the transaction.
func TestF3_EpochBehindBatchInFlight(t *testing.T) {
	play(t, `
		reserve pid=31 epoch=0 seq=0 n=1 -> OK #A
		commit pid=32 epoch=0 seq=0 n=1 txn base=1 -> OK
		replay pid=32 epoch=1 seq=0 n=1 base=2
		snapshot S -> 0
		commit #A base=0 -> OK
		txn pid=32 -> open@1 coord=none
		restart S
		window pid=31 -> epoch=0 0..0@0
		window pid=32 -> epoch=1 0..0@2
		txn pid=32 -> open@1 coord=none
	`)
}

// TestEqualStatesAreEqualBytes: the bytes of a snapshot do not depend on the order in
// which producers became known, the seed of the hash, the number of ticks, forgotten
// producers, or refusals.
func TestEqualStatesAreEqualBytes(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	commit := func(m *ProducerStateManager, pid, base int64) {
		for i := range int64(7) { // the window turns
			if err := m.Commit(pid, 0, int32(i), 1, base+i*100); err != nil {
				t.Fatal(err)
			}
		}
	}
	plain, devious := New(Config{}), New(Config{})
	for pid := range int64(5) {
		commit(plain, pid, pid)
	}
	plain.Expire(at(10))
	commit(plain, 9, 50)
	plain.Expire(at(20))

	for i := range 20 {
		devious.Expire(at(int64(i - 100000))) // ticks come and go
		devious.Replay(Batch{ProducerID: 9, Epoch: 0, BaseSequence: 0, Count: 1}, 0)
	}
	devious.Reset()
	for _, pid := range []int64{3, 1, 4, 0, 2} {
		commit(devious, pid, pid)
		devious.Commit(pid, 0, 99, 1, 5)
	}
	devious.Expire(at(3))
	for _, pid := range []int64{4, 3, 2, 1, 0} { // nothing new, but active again
		devious.ReplayMarker(Marker{ProducerID: pid, CoordinatorEpoch: -1}, 700)
	}
	devious.Expire(at(10))
	devious.Expire(at(10))
	commit(devious, 9, 50)
	devious.Expire(at(20))
	// The markers are a difference. Remove it.
	for pid := range int64(5) {
		plain.ReplayMarker(Marker{ProducerID: pid, CoordinatorEpoch: -1}, 700)
		devious.ReplayMarker(Marker{ProducerID: pid, CoordinatorEpoch: -1}, 700)
	}
	plain.Expire(at(30))
	devious.Expire(at(30))
	a, b := encoded(t, plain), encoded(t, devious)
	if diff := cmp.Diff(stateOf(plain), stateOf(devious)); diff != "" {
		t.Fatalf("the states are not equal:\n%s", diff)
	}
	if !bytes.Equal(a, b) {
		t.Fatalf("equal states, and the bytes differ:\n%x\n%x", a, b)
	}
}

// TestOrderOfActivity: producers are in the order of their last activity. Within a
// tick they are in the order of activity if there is a cap; otherwise by newest
// offset, those without a batch first, and by id.
func TestOrderOfActivity(t *testing.T) {
	for _, tt := range []struct {
		cap  int
		want []int64
	}{{0, []int64{7, 8, 3, 2, 1, 4}}, {100, []int64{8, 7, 2, 3, 1, 4}}} {
		m := New(Config{MaxProducers: tt.cap})
		settled := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		settled(m.Commit(4, 0, 0, 1, 0))
		settled(m.ReplayMarker(Marker{ProducerID: 8}, 1))
		settled(m.ReplayMarker(Marker{ProducerID: 7}, 2))
		settled(m.Commit(2, 0, 0, 1, 4))
		settled(m.Commit(3, 0, 0, 1, 3))
		m.Expire(time.Unix(1, 0))
		settled(m.Commit(1, 0, 0, 1, 5))
		settled(m.Commit(4, 0, 1, 1, 6))
		if tt.cap == 0 {
			m.Expire(time.Unix(2, 0))
		}
		var got []int64
		s := m.Snapshot()
		_, ranks := s.contents()
		for _, r := range ranks {
			got = append(got, s.rows.at(r.row).id)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("cap %d: (-want +got)\n%s", tt.cap, diff)
		}
		small := restored(t, Config{MaxProducers: 2}, encoded(t, m))
		settled(small.Commit(9, 0, 0, 1, 7))
		if p, ok := small.Producer(4); !ok || p.ProducerID != 4 || small.Len() != 2 || small.Stats().Evicted != 5 {
			t.Errorf("cap %d: restored into a cap of 2, and a newcomer: %+v", tt.cap, stateOf(small))
		}
	}
}

// TestF4_RestoreEvictsNothing: a restore keeps every producer of the snapshot,
// also beyond the cap. The next newcomer evicts the excess, but no producer with an
// open transaction.
func TestF4_RestoreEvictsNothing(t *testing.T) {
	m := New(Config{})
	for pid := range int64(6) {
		if err := m.CommitBatch(Batch{ProducerID: pid, Count: 1, Transactional: pid%2 == 0}, pid); err != nil {
			t.Fatal(err)
		}
	}
	ours, kafkas := encoded(t, m), inKafka(t, m)
	for name, restore := range map[string]func(*ProducerStateManager) error{
		"Restore":      func(m *ProducerStateManager) error { return m.Restore(bytes.NewReader(ours)) },
		"RestoreKafka": func(m *ProducerStateManager) error { return m.RestoreKafka(bytes.NewReader(kafkas), 6) },
		"Load": func(n *ProducerStateManager) error {
			dir := openDisk(t, newDisk(), 1)
			if err := dir.Save(m.Snapshot()); err != nil {
				return err
			}
			_, err := dir.Load(n, 0, 6)
			return err
		},
	} {
		small := New(Config{MaxProducers: 2})
		if err := restore(small); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		audit(t, small)
		if small.Len() != 6 || small.Stats().Evicted != 0 {
			t.Errorf("%s: %d producers are left, %d evicted", name, small.Len(), small.Stats().Evicted)
		}
		if err := small.Commit(7, 0, 0, 1, 6); err != nil {
			t.Fatal(err)
		}
		audit(t, small)
		for pid := range int64(8) {
			if _, ok := small.Producer(pid); ok != (pid < 6 && pid%2 == 0 || pid == 7) {
				t.Errorf("%s, after a newcomer: producer %d is remembered: %t", name, pid, ok)
			}
		}
	}
}

// TestF4_RebuiltReplicaForgetsTheSame: two managers get equal calls, with more
// producers and open transactions than the cap. One is restored from its own snapshot
// now and then. They remember the same.
func TestF4_RebuiltReplicaForgetsTheSame(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(4, seed))
		cfg := Config{MaxProducers: 50, UnknownProducer: AcceptAny}
		one, other := New(cfg), New(cfg)
		both := func(do func(*ProducerStateManager) error) {
			if err := errors.Join(do(one), do(other)); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		next := make([]int32, 200)
		for offset := int64(0); offset < 3000; offset++ {
			pid := rng.IntN(len(next))
			if rng.IntN(4) == 0 {
				both(func(m *ProducerStateManager) error {
					return m.ReplayMarker(Marker{ProducerID: int64(pid), Commit: true}, offset)
				})
				continue
			}
			p, known := one.Producer(int64(pid))
			if len(p.Window) == 0 {
				next[pid] = 0 // a marker may have made it known without a batch
			}
			open := known && p.CurrentTxnFirstOffset >= 0
			b := Batch{ProducerID: int64(pid), BaseSequence: next[pid], Count: 1, Transactional: open || rng.IntN(3) == 0}
			next[pid]++
			both(func(m *ProducerStateManager) error { return m.CommitBatch(b, offset) })
			if rng.IntN(500) == 0 {
				both(func(m *ProducerStateManager) error { m.Expire(time.Unix(offset, 0)); return nil })
			}
			if rng.IntN(100) == 0 {
				if err := other.Restore(bytes.NewReader(encoded(t, other))); err != nil {
					t.Fatal(err)
				}
				audit(t, other)
			}
			if one.Stats() != other.Stats() {
				t.Fatalf("seed %d, offset %d: lived through %+v, rebuilt %+v", seed, offset, one.Stats(), other.Stats())
			}
			if offset%100 == 99 && !reflect.DeepEqual(stateOf(one), stateOf(other)) {
				t.Fatalf("seed %d, offset %d: (-lived through +rebuilt)\n%s", seed, offset, cmp.Diff(stateOf(one), stateOf(other)))
			}
		}
		if one.Stats().Evicted == 0 || one.Len() <= cfg.MaxProducers {
			t.Fatalf("seed %d: %d evicted, %d left: the cap was not exceeded", seed, one.Stats().Evicted, one.Len())
		}
	}
}

// TestCommitsDuringSnapshot: a snapshot taken while goroutines commit is consistent:
// it is the state of the log up to its end offset, for every producer, although it is
// written while commits go on.
func TestCommitsDuringSnapshot(t *testing.T) {
	const producers, batches = 8, 400
	m := New(Config{})
	var appending sync.Mutex // the append lock of the partition
	var log []logged
	var writers sync.WaitGroup
	for pid := range int64(producers) {
		writers.Add(1)
		go func() {
			defer writers.Done()
			for seq := range int32(batches) {
				b := Batch{ProducerID: pid, BaseSequence: seq, Count: 1}
				appending.Lock()
				base := int64(len(log))
				log = append(log, logged{batch: b, base: base})
				if err := m.CommitBatch(b, base); err != nil {
					t.Error(err)
				}
				appending.Unlock()
			}
		}()
	}
	var snapshots []*Snapshot
	var bodies [][]byte
	for range 20 {
		s := m.Snapshot()
		snapshots, bodies = append(snapshots, s), append(bodies, written(t, s))
	}
	writers.Wait()
	for i, s := range snapshots {
		want := New(Config{})
		for _, l := range log[:s.EndOffset()] {
			if err := apply(want, l); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(encoded(t, want), bodies[i]) || !bytes.Equal(written(t, s), bodies[i]) {
			t.Fatalf("the snapshot at %d is not the state of the log up to there", s.EndOffset())
		}
	}
}

// survival says how each field of the state survives. The test fails if a field is
// missing here.
var survival = map[string]string{
	"ProducerStateManager.state": "field by field",
	"ProducerStateManager.mu":    "not state",
	"state.cfg":                  "the embedder's; of it LogID is written",
	"state.roster":               "field by field",
	"recency.capped":             "follows from Config",
	"roster.table":               "written, row by row",
	"state.stats":                "counts since New; not written",
	"state.logEnd":               "field by field",
	"logEnd.endOffset":           "written",
	"logEnd.restoredLogEnd":      "written, where it is past the end offset",
	"logEnd.contiguous":          "follows from Config",
	"state.maxProducerID":        "written",
	"state.exactness":            "written",
	"exactness.lastMarker":       "written",
	"state.txns":                 "field by field",
	"transactions.open":          "in the rows of the producers",
	"transactions.ended":         "not kept: durable with the coordinator",
	"transactions.aborted":       "written",
	"transactions.watermark":     "not written",
	"transactions.logStart":      "written",
	"transactions.abortedFrom":   "written",
	"exactness.lastForgetEnd":    "written",
	"exactness.inexact":          "written",
	"roster.recency":             "written, field by field",
	"state.truncations":          "of this manager's snapshots; not written",
	"state.inFlight":             "not written: a replay from the end offset finds what of it is in the log",

	"recency.idle":    "written as the order of producers",
	"recency.pinned":  "written as the order of producers",
	"recency.ticks":   "written as times",
	"recency.free":    "follows from the ticks",
	"recency.current": "follows from the order",
	"recency.now":     "written",
	"recency.ahead":   "follows from now and the ticks",

	"tick.ms":        "written",
	"tick.ns":        "written",
	"tick.producers": "written",
	"instant.ms":     "written",
	"instant.ns":     "written",

	"producer.id":               "written",
	"producer.tick":             "follows from the order",
	"producer.epoch":            "written",
	"producer.history":          "written as flags",
	"producer.pinned":           "follows from the order",
	"producer.queue":            "not written, like what is in flight",
	"producer.older":            "follows from the order",
	"producer.newer":            "follows from the order",
	"producer.window":           "written, field by field",
	"producer.txnFirst":         "written",
	"producer.coordinatorEpoch": "written",

	"window.next":      "follows from the newest batch",
	"window.start":     "does not show: a window is written from its oldest batch on",
	"window.count":     "written",
	"window.mayRepeat": "follows from the batches, as far as it matters to them",
	"window.evicted":   "written as a flag",
	"window.ring":      "written",
	"entry.span":       "written",
	"entry.baseOffset": "written",
}

// TestFormatKnowsEveryField fails if the state has a field that survival does not
// list.
func TestFormatKnowsEveryField(t *testing.T) {
	var fields []string
	for _, v := range []any{&ProducerStateManager{}, &state{}, &roster{}, &logEnd{}, &exactness{}, &transactions{}, &recency{}, &tick{}, &instant{}, &producer{}, &window{}, &entry{}} {
		typ := reflect.TypeOf(v).Elem()
		for i := range typ.NumField() {
			if name := typ.Field(i).Name; name != "_" {
				fields = append(fields, typ.Name()+"."+name)
			}
		}
	}
	for _, f := range fields {
		if survival[f] == "" {
			t.Errorf("%s is new: does it survive in a snapshot?", f)
		}
	}
	for f := range survival {
		if !slices.Contains(fields, f) {
			t.Errorf("%s is no longer there", f)
		}
	}
	if got := history(hadEpoch | hadMarker); got != 3 {
		t.Errorf("history has %b: are all bits flags of the format?", got)
	}
}

// TestEveryWrittenFieldShows: a change of any written field changes the bytes, and a
// restore brings it back.
func TestEveryWrittenFieldShows(t *testing.T) {
	build := func() *ProducerStateManager {
		m := New(Config{})
		for seq := range int32(3) {
			if err := m.Commit(31, 3, seq, 1, int64(10+seq)); err != nil {
				t.Fatal(err)
			}
		}
		m.Expire(time.Unix(5, 5))
		m.Advance(100)
		return m
	}
	before := encoded(t, build())
	for name, change := range map[string]func(*ProducerStateManager, *producer){
		"endOffset":     func(m *ProducerStateManager, _ *producer) { m.endOffset++ },
		"maxProducerID": func(m *ProducerStateManager, _ *producer) { m.maxProducerID++ },
		"lastMarker":    func(m *ProducerStateManager, _ *producer) { m.lastMarker++ },
		"logStart":      func(m *ProducerStateManager, _ *producer) { m.setBounds(1, 0) },
		"abortedFrom":   func(m *ProducerStateManager, _ *producer) { m.setBounds(0, 1) },
		"aborted": func(m *ProducerStateManager, _ *producer) {
			m.transactions().aborted.add(AbortedTransaction{31, 8, 12})
		},
		"lastForgetEnd":    func(m *ProducerStateManager, _ *producer) { m.lastForgetEnd++ },
		"inexact":          func(m *ProducerStateManager, _ *producer) { m.inexact = true },
		"restoredLogEnd":   func(m *ProducerStateManager, _ *producer) { m.restoredLogEnd = 101 },
		"now.ms":           func(m *ProducerStateManager, _ *producer) { m.recency.now.ms++ },
		"now.ns":           func(m *ProducerStateManager, _ *producer) { m.recency.now.ns++ },
		"tick.ms":          func(m *ProducerStateManager, p *producer) { m.recency.ticks[p.tick].ms++ },
		"tick.ns":          func(m *ProducerStateManager, p *producer) { m.recency.ticks[p.tick].ns++ },
		"tick":             func(m *ProducerStateManager, p *producer) { m.touch(p, 0) },
		"id":               func(_ *ProducerStateManager, p *producer) { p.id-- },
		"epoch":            func(_ *ProducerStateManager, p *producer) { p.epoch++ },
		"hadEpoch":         func(_ *ProducerStateManager, p *producer) { p.history |= hadEpoch },
		"hadMarker":        func(_ *ProducerStateManager, p *producer) { p.history |= hadMarker },
		"txnFirst":         func(_ *ProducerStateManager, p *producer) { p.txnFirst = 10 },
		"coordinatorEpoch": func(_ *ProducerStateManager, p *producer) { p.coordinatorEpoch = 0 },
		"evicted":          func(_ *ProducerStateManager, p *producer) { p.window.evicted = true },
		"count":            func(_ *ProducerStateManager, p *producer) { p.window.pop() },
		"span":             func(_ *ProducerStateManager, p *producer) { p.window.ring[0].span = makeSpan(0, 2) },
		"baseOffset":       func(_ *ProducerStateManager, p *producer) { p.window.ring[0].baseOffset-- },
	} {
		m := build()
		p, _ := m.table.edit(31)
		change(m, p)
		after := encoded(t, m)
		if bytes.Equal(before, after) {
			t.Errorf("%s: the bytes do not show it", name)
		}
		if again := encoded(t, restored(t, Config{}, after)); !bytes.Equal(after, again) {
			t.Errorf("%s: it has not come back:\n%x\n%x", name, after, again)
		}
	}
}

// shapes are states of every kind, for golden files and fuzz seeds.
var shapes = []struct {
	name   string
	cfg    Config
	build  string // a transcript
	since2 bool   // not in version 1
}{
	{"empty", Config{}, `
		advance to=0`, false},
	{"one", Config{LogID: [16]byte{1, 2, 3, 15: 16}}, `
		batch pid=31 epoch=0 seq=0 n=3 -> OK base=0`, false},
	{"full-windows", Config{}, fullWindows(), false},
	{"wrapped", Config{}, `
		replay pid=31 epoch=0 seq=2147483640 n=7 base=0
		batch pid=31 epoch=0 seq=2147483647 n=1 -> OK base=7
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=8
		replay pid=32 epoch=0 seq=2147483647 n=2147483647 base=9`, false},
	{"marker-only", Config{}, `
		replay-marker pid=31 epoch=2 coord=9 abort base=0
		replay-marker pid=9223372036854775807 epoch=32767 coord=2147483647 commit base=1`, false},
	{"open-transaction", Config{}, `
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=31 epoch=0 seq=1 n=2 txn -> OK base=1
		replay-marker pid=32 epoch=1 coord=1 commit base=3
		replay pid=32 epoch=1 seq=-1 n=1 txn base=4`, false},
	{"times", Config{}, `
		ttl=1000
		batch pid=31 epoch=0 seq=0 n=1 t=100 -> OK base=0
		batch pid=32 epoch=3 seq=0 n=1 -> OK base=1
		batch pid=33 epoch=0 seq=0 n=1 t=200 -> OK base=2
		batch pid=31 epoch=1 seq=0 n=1 t=300 -> OK base=3
		expire now=1200 -> 2
		batch pid=34 epoch=0 seq=0 n=1 -> OK base=4`, false},
	{"in-flight", Config{}, `
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=31 epoch=1 seq=0 n=1 -> OK base=1
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=2
		reserve pid=33 epoch=0 seq=0 n=1 -> OK #A
		batch pid=31 epoch=2 seq=0 n=1 -> OK base=3`, false},
	{"aborted-transactions", Config{}, `
		batch pid=31 epoch=0 seq=0 n=1 txn -> OK base=0
		batch pid=32 epoch=0 seq=0 n=2 txn -> OK base=1
		replay-marker pid=31 epoch=0 coord=1 abort base=3
		batch pid=33 epoch=0 seq=0 n=1 txn -> OK base=4
		replay-marker pid=32 epoch=1 coord=1 abort base=5
		batch pid=31 epoch=0 seq=1 n=1 txn -> OK base=6
		replay-marker pid=31 epoch=0 coord=2 commit base=7`, true},
}

// trimmedShape is a file of the shape in-flight by an earlier writer, which left out
// what lay at or past the end offset.
const trimmedShape = "inexact"

func fullWindows() string {
	var steps strings.Builder
	for i := range 21 {
		fmt.Fprintf(&steps, "batch pid=%d epoch=0 seq=%d n=1 -> OK base=%d\n", 31+i%3, i/3, i)
	}
	return steps.String()
}

// shape returns a manager with the state of a shape.
func shape(t *testing.T, i int) *ProducerStateManager {
	return playWith(t, shapes[i].cfg, shapes[i].build).m
}

// TestGolden: each shape has the bytes of its file in testdata, which restores to its
// state. A different file is another version of the format.
func TestGolden(t *testing.T) {
	for i, tt := range shapes {
		t.Run(tt.name, func(t *testing.T) {
			m := shape(t, i)
			got := encoded(t, m)
			name := golden("v2", tt.name)
			if *update {
				if err := os.WriteFile(name, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(want, got) {
				t.Fatalf("the format has changed (-golden +now):\n-%x\n+%x", want, got)
			}
			again := restored(t, tt.cfg, want)
			if again.EndOffset() != m.Snapshot().EndOffset() || !bytes.Equal(want, encoded(t, again)) {
				t.Errorf("restored as %+v", stateOf(again))
			}
		})
	}
}

// golden returns the name of the file of a shape in a version of the format.
func golden(version, shape string) string {
	return filepath.Join("testdata", "snapshots", version, shape+snapshotSuffix)
}

// TestGoldenVersion1: the files of version 1 restore to the state of their shape.
// They do not hold aborted transactions, so those below the end offset are unknown
// once there was a marker.
func TestGoldenVersion1(t *testing.T) {
	for i, tt := range shapes {
		if tt.since2 {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			m := shape(t, i)
			file, err := os.ReadFile(golden("v1", tt.name))
			if err != nil {
				t.Fatal(err)
			}
			again := restored(t, tt.cfg, file)
			want, got := stateOf(m), stateOf(again)
			want.InFlight, want.EndOffset = nil, m.Snapshot().EndOffset()
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-shape +restored):\n%s", diff)
			}
			known := int64(0)
			if m.lastMarker != noOffset {
				known = again.EndOffset()
			}
			if _, err := again.AbortedTransactions(known, 1<<40); err != nil {
				t.Errorf("from %d: %v", known, err)
			}
			if _, err := again.AbortedTransactions(known-1, 1<<40); !errors.Is(err, ErrAbortedUnknown) {
				t.Errorf("from %d: %v", known-1, err)
			}
		})
	}
	t.Run(trimmedShape, func(t *testing.T) {
		file, err := os.ReadFile(golden("v1", trimmedShape))
		if err != nil {
			t.Fatal(err)
		}
		m := restored(t, Config{}, file)
		if s := m.Snapshot(); s.EndOffset() != 3 || s.LogEndOffset() != 4 || m.Len() != 2 {
			t.Errorf("restored as %+v", stateOf(m))
		}
	})
}

// occupied returns a manager with a state, and a check that the state is unchanged.
func occupied(t rapid.TB) (*ProducerStateManager, func()) {
	m, _ := full(70)
	m.Expire(time.Unix(9, 9))
	before := encoded(t, m)
	return m, func() {
		t.Helper()
		audit(t, m)
		if !bytes.Equal(before, encoded(t, m)) {
			t.Fatal("the state was touched")
		}
	}
}

// TestRestoreRefusesDamage: a snapshot cut at any length, with any byte changed, or
// with bytes appended is corrupt. The state is unchanged.
func TestRestoreRefusesDamage(t *testing.T) {
	m, untouched := occupied(t)
	refused := func(what string, snapshot []byte) {
		t.Helper()
		if err := m.Restore(bytes.NewReader(snapshot)); !errors.Is(err, ErrCorruptSnapshot) || errors.Is(err, ErrSnapshotLog) {
			t.Fatalf("%s: %v", what, err)
		}
	}
	for i, tt := range shapes {
		good := encoded(t, shape(t, i))
		for n := range good {
			refused(fmt.Sprintf("%s cut to %d", tt.name, n), good[:n])
			for _, flip := range []byte{1, 0x80, 0xff} {
				bad := bytes.Clone(good)
				bad[n] ^= flip
				refused(fmt.Sprintf("%s byte %d flipped by %x", tt.name, n, flip), bad)
			}
		}
		refused(tt.name+" with a byte too many", append(bytes.Clone(good), 0))
		refused(tt.name+" twice", append(bytes.Clone(good), good...))
	}
	untouched()
}

// TestRestoreRefusesImpossible: a snapshot with the right checksum and an impossible
// field is corrupt. Each case changes one field of a good snapshot.
func TestRestoreRefusesImpossible(t *testing.T) {
	play := `
		batch pid=31 epoch=0 seq=0 n=1 txn t=100 -> OK base=0
		batch pid=31 epoch=0 seq=1 n=1 txn t=100 -> OK base=1
		batch pid=32 epoch=0 seq=0 n=1 t=200 -> OK base=2
		batch pid=33 epoch=0 seq=0 n=1 -> OK base=3`
	good := encoded(t, playWith(t, Config{}, play).m)
	const times, first = headerSize, headerSize + 2*timeSize
	const second = first + producerSize + txnSize + 2*entrySize
	le := binary.LittleEndian
	u16 := func(at int, v uint16) func([]byte) { return func(b []byte) { le.PutUint16(b[at:], v) } }
	u32 := func(at int, v uint32) func([]byte) { return func(b []byte) { le.PutUint32(b[at:], v) } }
	u64 := func(at int, v uint64) func([]byte) { return func(b []byte) { le.PutUint64(b[at:], v) } }
	const minus1, minus2 = math.MaxUint64, math.MaxUint64 - 1
	m, untouched := occupied(t)
	for reason, change := range map[string]func([]byte){
		"negative end offset":               u64(24, minus1),
		"log end offset below a batch":      func(b []byte) { le.PutUint64(b[24:], 3); le.PutUint64(b[32:], 3) },
		"log end offset below the end":      u64(32, 3),
		"highest id below -1":               u64(40, minus2),
		"highest id below an id":            u64(40, 32),
		"marker below -1":                   u64(48, minus2),
		"marker at the end":                 u64(48, 4),
		"forgot before the log":             u64(56, minus1),
		"forgot after its end":              u64(56, 5),
		"a million nanoseconds":             u32(72, 1e6),
		"negative nanoseconds":              u32(72, math.MaxUint32),
		"unknown flag":                      u32(76, 2),
		"more times than there are":         u32(80, 3),
		"fewer times":                       u32(80, 1),
		"more times than producers":         u32(80, math.MaxUint32),
		"more producers than there are":     u32(84, 4),
		"fewer producers":                   u32(84, 2),
		"as many producers as can be":       u32(84, math.MaxUint32),
		"times in disorder":                 u64(times, 300),
		"a time twice":                      u64(times, 200),
		"a million nanoseconds in a time":   u32(times+8, 1e6),
		"a time without producers":          u32(times+12, 0),
		"a time of more than all producers": u32(times+12, 4),
		"two times of more than all":        u32(times+12, 3),
		"negative id":                       u64(first, minus1),
		"an id twice":                       u64(first, 32),
		"coordinator epoch below -1":        u32(first+8, math.MaxUint32-1),
		"negative epoch":                    u16(first+12, math.MaxUint16),
		"unknown flag of a producer":        func(b []byte) { b[first+14] |= 0x10 },
		"more batches than a window":        func(b []byte) { b[first+15] = 6 },
		"fewer batches than there are":      func(b []byte) { b[first+15] = 1 },
		"negative transaction":              u64(first+16, minus1),
		"transaction at the end":            u64(first+16, 4),
		"no sequences":                      u32(first+24, 0),
		"negative number of sequences":      u32(first+24, math.MaxUint32),
		"negative sequence":                 u32(first+28, math.MaxUint32),
		"negative offset":                   u64(first+32, minus1),
		"offset as high as the next":        u64(first+32, 1),
		"an offset of no log":               u64(first+48, math.MaxInt64),
		"reaches past the end":              u32(second+16, 3),
	} {
		bad := bytes.Clone(good)
		change(bad)
		bad = withChecksum(bad)
		if bytes.Equal(good, bad) {
			t.Fatalf("%s: nothing was changed", reason)
		}
		if err := m.Restore(bytes.NewReader(bad)); !errors.Is(err, ErrCorruptSnapshot) {
			t.Errorf("%s: %v", reason, err)
		}
	}
	untouched()
	if err := m.Restore(bytes.NewReader(withChecksum(good))); err != nil {
		t.Errorf("nothing changed: %v", err)
	}
}

// TestRestoreTakesWhatComes: a count of 2^32-1 with the right checksum does not make
// Restore allocate for it.
func TestRestoreTakesWhatComes(t *testing.T) {
	m, untouched := occupied(t)
	for name, at := range map[string]int{"times": 72, "producers": 76} {
		bad := encoded(t, shape(t, 1))
		binary.LittleEndian.PutUint32(bad[72:], 0)
		binary.LittleEndian.PutUint32(bad[76:], math.MaxUint32)
		binary.LittleEndian.PutUint32(bad[at:], math.MaxUint32)
		bad = withChecksum(bad)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := m.Restore(bytes.NewReader(bad))
		runtime.ReadMemStats(&after)
		if !errors.Is(err, ErrCorruptSnapshot) {
			t.Errorf("2^32-1 %s: %v", name, err)
		}
		if taken := after.TotalAlloc - before.TotalAlloc; taken > 256<<10 {
			t.Errorf("2^32-1 %s: took %d bytes for %d", name, taken, len(bad))
		}
	}
	untouched()
}

// TestRestoreErrors: each kind of failure has its own error, with both values in the
// text. Only the error of the reader is not one of this package.
func TestRestoreErrors(t *testing.T) {
	one := encoded(t, shape(t, 1))
	version := bytes.Clone(one)
	version[4] = 3
	broken := errors.New("broken pipe")
	m, untouched := occupied(t)
	m.cfg.LogID = [16]byte{9}
	for _, tt := range []struct {
		reason string
		r      io.Reader
		want   error
		also   error
		text   string
	}{
		{"not a snapshot", strings.NewReader("not a snapshot at all"), ErrCorruptSnapshot, nil,
			"idempotence: corrupt snapshot: invalid magic 6e6f7420"},
		{"a newer version", bytes.NewReader(version), ErrSnapshotVersion, ErrCorruptSnapshot,
			"idempotence: unknown version of snapshot: 3, want 1 to 2"},
		{"another log", bytes.NewReader(one), ErrSnapshotLog, nil,
			"idempotence: snapshot of another log: log 01020300000000000000000000000010, want 09000000000000000000000000000000"},
		{"nothing", strings.NewReader(""), ErrCorruptSnapshot, nil,
			"idempotence: corrupt snapshot: unexpected end: 0 bytes left, want 4"},
		{"a reader that fails", io.MultiReader(bytes.NewReader(one[:50]), iotest.ErrReader(broken)), broken, nil,
			"idempotence: reading a snapshot: broken pipe"},
		{"a reader that fails at the end", io.MultiReader(bytes.NewReader(one), iotest.ErrReader(broken)), broken, nil,
			"idempotence: reading a snapshot: broken pipe"},
		{"a reader that gives nothing", &sluggish{}, io.ErrNoProgress, nil,
			"idempotence: reading a snapshot: multiple Read calls return no data or error"},
	} {
		err := m.Restore(tt.r)
		if !errors.Is(err, tt.want) || tt.also != nil && !errors.Is(err, tt.also) || err.Error() != tt.text {
			t.Errorf("%s: %v", tt.reason, err)
		}
		if (tt.want == broken || tt.want == io.ErrNoProgress || tt.want == ErrSnapshotLog) && errors.Is(err, ErrCorruptSnapshot) {
			t.Errorf("%s: called corrupt: %v", tt.reason, err)
		}
	}
	m.cfg.LogID = [16]byte{}
	untouched()
}

// sluggish is a reader that never returns anything.
type sluggish struct{}

func (*sluggish) Read([]byte) (int, error) { return 0, nil }

// TestRestoreFromAnyReader: the sizes of reads do not matter.
func TestRestoreFromAnyReader(t *testing.T) {
	m := scattered(3000) // more than one chunk
	want := encoded(t, m)
	for name, r := range map[string]io.Reader{
		"byte by byte":        iotest.OneByteReader(bytes.NewReader(want)),
		"by halves":           iotest.HalfReader(bytes.NewReader(want)),
		"the end with data":   iotest.DataErrReader(bytes.NewReader(want)),
		"reads of no bytes":   &hesitant{r: bytes.NewReader(want)},
		"an odd size at once": iotest.DataErrReader(&limited{bytes.NewReader(want), 1000}),
	} {
		again := New(Config{})
		if err := again.Restore(r); err != nil || !bytes.Equal(want, encoded(t, again)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// hesitant returns nothing at every other read.
type hesitant struct {
	r    io.Reader
	turn bool
}

func (h *hesitant) Read(p []byte) (int, error) {
	if h.turn = !h.turn; h.turn {
		return 0, nil
	}
	return h.r.Read(p)
}

type limited struct {
	r io.Reader
	n int
}

func (l *limited) Read(p []byte) (int, error) { return l.r.Read(p[:min(len(p), l.n)]) }

// TestLogID: a snapshot of another log is refused. One without a log id, or for a
// manager without one, is restored.
func TestLogID(t *testing.T) {
	a, b, none := [16]byte{1}, [16]byte{2}, [16]byte{}
	for _, tt := range []struct {
		snapshot, manager [16]byte
		want              error
	}{{a, a, nil}, {a, b, ErrSnapshotLog}, {a, none, nil}, {none, b, nil}, {none, none, nil}} {
		m := New(Config{LogID: tt.snapshot})
		m.Advance(7)
		if m.Snapshot().LogID() != tt.snapshot {
			t.Errorf("LogID is %x, want %x", m.Snapshot().LogID(), tt.snapshot)
		}
		n := New(Config{LogID: tt.manager})
		if err := n.Restore(bytes.NewReader(encoded(t, m))); !errors.Is(err, tt.want) || err == nil && n.EndOffset() != 7 {
			t.Errorf("snapshot of %x into a manager of %x: %v", tt.snapshot, tt.manager, err)
		}
	}
}

// TestF5_SnapshotFreesManager: neither a Snapshot nor a SnapshotDir that
// saved one keeps the manager alive.
func TestF5_SnapshotFreesManager(t *testing.T) {
	dir := openDisk(t, newDisk(), 1)
	freed := make(chan struct{})
	s := func() *Snapshot {
		m := logOf(t, 1)
		runtime.SetFinalizer(m, func(*ProducerStateManager) { close(freed) })
		s := m.Snapshot()
		if err := dir.Save(s); err != nil {
			t.Fatal(err)
		}
		return s
	}()
	for range 1000 {
		runtime.GC()
		select {
		case <-freed:
			runtime.KeepAlive(dir)
			runtime.KeepAlive(s)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
	t.Error("the manager is still in use")
}

// TestRestoreOverState: what a restore replaces, and what it keeps.
func TestRestoreOverState(t *testing.T) {
	old := New(Config{})
	old.Expire(time.Unix(100, 0))
	if err := old.Commit(7, 0, 0, 1, 0); err != nil {
		t.Fatal(err)
	}
	snapshot := encoded(t, old)

	m := New(Config{})
	if err := m.Commit(99, 0, 0, 5, 10); err != nil {
		t.Fatal(err)
	}
	m.Expire(time.Unix(200, 0))
	r, _, err := m.Reserve(Batch{ProducerID: 99, BaseSequence: 5, Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Restore(bytes.NewReader(snapshot)); err != nil {
		t.Fatal(err)
	}
	audit(t, m)
	want := stateOf(old)
	want.MaxProducerID = 99
	if diff := cmp.Diff(want, stateOf(m)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if m.Stats().Accepted != 1 {
		t.Errorf("Stats were replaced: %+v", m.Stats())
	}
	if err := r.Commit(15); !errors.Is(err, ErrAbandoned) {
		t.Errorf("a reservation from before: %v", err)
	}
	m.Expire(time.Unix(150, 0)) // counts as 200, which it was before the restore
	if p, _ := m.Producer(7); !p.LastActivity.Equal(time.Unix(200, 0)) {
		t.Errorf("time went back to %v", p.LastActivity)
	}
}

// TestWriteToErrors: the writer's error is returned, with the number of bytes written
// before it.
func TestWriteToErrors(t *testing.T) {
	full, _ := full(5000)
	s := full.Snapshot()
	broken := errors.New("disk full")
	for name, write := range map[string]func(io.Writer) (int64, error){"WriteTo": s.WriteTo, "WriteKafka": s.WriteKafka} {
		for _, room := range []int{0, 1, snapshotChunk, snapshotChunk + 5} {
			w := &failing{room: room, err: broken}
			if n, err := write(w); n != int64(room) || !errors.Is(err, broken) {
				t.Errorf("%s with room for %d bytes returned %d, %v", name, room, n, err)
			}
			w = &failing{room: room}
			if n, err := write(w); n != int64(room) || !errors.Is(err, io.ErrShortWrite) {
				t.Errorf("%s to a writer that is short after %d bytes returned %d, %v", name, room, n, err)
			}
		}
	}
}

// failing accepts a number of bytes, and then returns err, or a short count without
// an error.
type failing struct {
	room int
	err  error
}

func (f *failing) Write(p []byte) (int, error) {
	n := min(len(p), f.room)
	f.room -= n
	if n < len(p) {
		return n, f.err
	}
	return n, nil
}

// FuzzRestore holds for any bytes:
//  1. It does not panic, and memory is taken in proportion to them.
//  2. On an error, which is one of this package's, the state is untouched.
//  3. Otherwise the state is sound, and written again, with the log's identity
//     and under a cap that keeps the order, it is the same bytes.
func FuzzRestore(f *testing.F) {
	for i := range shapes {
		good, err := os.ReadFile(golden("v2", shapes[i].name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(good, false)
		f.Add(good[:len(good)/2], false)
		f.Add(good, true)
	}
	f.Fuzz(func(t *testing.T, b []byte, mend bool) {
		if mend && len(b) >= checksumSize {
			b = withChecksum(b)
		}
		cfg := Config{MaxProducers: math.MaxInt}
		if len(b) > 24 {
			copy(cfg.LogID[:], b[8:24])
		}
		m := New(cfg)
		if err := m.Commit(31, 0, 0, 1, 0); err != nil {
			t.Fatal(err)
		}
		before := encoded(t, m)
		if err := m.Restore(bytes.NewReader(b)); err != nil {
			audit(t, m)
			if !errors.Is(err, ErrCorruptSnapshot) || !bytes.Equal(before, encoded(t, m)) {
				t.Fatalf("%v, state\n%x, before\n%x", err, encoded(t, m), before)
			}
			return
		}
		if again := encoded(t, restored(t, cfg, b)); !bytes.Equal(b, again) {
			t.Fatalf("\n%x is written again as\n%x", b, again)
		}
		audit(t, m)
	})
}

// TestSnapshotInFlight: a snapshot holds what is committed while a batch is in
// flight, and ends where that batch may be. The replay from there finds it, and skips
// the others.
func TestSnapshotInFlight(t *testing.T) {
	play(t, `
		batch pid=31 epoch=0 seq=0 n=1 -> OK base=0
		batch pid=32 epoch=0 seq=0 n=1 -> OK base=1
		reserve pid=31 epoch=0 seq=1 n=1 -> OK #A
		commit pid=32 epoch=0 seq=1 n=1 base=3 -> OK
		commit pid=32 epoch=1 seq=0 n=1 base=4 -> OK
		commit pid=33 epoch=0 seq=0 n=1 base=5 -> OK
		snapshot S -> 2
		commit #A base=2 -> OK
		restart S
		end -> 6
		window pid=31 -> epoch=0 0..0@0 1..1@2
		window pid=32 -> epoch=1 0..0@4
		window pid=33 -> epoch=0 0..0@5
		batch pid=33 epoch=0 seq=1 n=1 -> OK base=6
	`)
}

// A snapshot with end offset 0 holds what was committed behind a batch in flight,
// and a replay of the whole log on top of it gives what the log gives.
func TestSnapshotFromStartOfLogHoldsWhatFollows(t *testing.T) {
	m := New(Config{})
	if _, _, err := m.Reserve(Batch{ProducerID: 1, Count: 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.ReplayMarker(Marker{ProducerID: 2, Epoch: 3}, 5); err != nil {
		t.Fatal(err)
	}
	n := restored(t, Config{}, encoded(t, m))
	if end := n.EndOffset(); end != 0 {
		t.Fatalf("end offset %d, want 0: a batch is in flight that may lie there", end)
	}
	rebuilt := New(Config{})
	for _, m := range []*ProducerStateManager{n, rebuilt} {
		settled(t, m.Replay(Batch{ProducerID: 1, Count: 1}, 2), m.ReplayMarker(Marker{ProducerID: 2, Epoch: 3}, 5))
	}
	if diff := cmp.Diff(stateOf(rebuilt), stateOf(n)); diff != "" {
		t.Errorf("(-rebuilt +restored and replayed)\n%s", diff)
	}
}
