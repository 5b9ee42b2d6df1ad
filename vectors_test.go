package idempotence

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// This file plays the traces of testdata/vectors, and holds every answer against
// the one that Apache Kafka's own classes gave. The policy is AcceptAny, which is
// theirs. What the traces say is in the README beside them.
//
// Not every line can be compared. Those left out are counted by reason, below,
// and two floors in TestVectors see to it that no fault in the player, and no
// change in the library, leaves out more without notice.

// Why a line is left out.
const (
	// plainInTxn: Kafka refuses a replicated plain batch inside an open
	// transaction. A replay judges nothing here.
	plainInTxn = "a replicated plain batch inside an open transaction"
	// newerInTxn: Kafka adds a transactional batch of a newer epoch to the open
	// transaction of the older one. Here it is refused with
	// ErrConcurrentTransactions (rule T1), and then replayed as Kafka has it.
	newerInTxn = "a newer epoch inside an open transaction"
	// olderEpoch: a leader's batch of an older epoch is skipped here. Kafka
	// adopts the epoch and clears the window.
	olderEpoch = "a replicated batch of an older epoch"
	// ownClock: idle time is counted by the broker's clock here. Kafka counts
	// from the batch's timestamp, and so forgets earlier a producer whose
	// timestamps lie behind.
	ownClock = "a producer with timestamps behind the clock expires"
	// astray: what is known of the producer is no longer the same, for one of
	// the reasons above.
	astray = "a producer that went another way before"
	// lastStable: nothing here says what the last stable offset is.
	lastStable = "last stable offset"
	// refusedMarker: markers are replayed here, not judged.
	refusedMarker = "a refused marker"
)

// vector is a trace at play.
type vector struct {
	t        *testing.T
	p        *partition
	clock    int64
	stamps   map[int64]int64  // of each producer, the timestamp that Kafka has
	skewed   map[int64]bool   // producers whose activity has another time in Kafka
	strays   map[int64]string // producers that went another way, and why
	logStamp map[int64]int64  // the timestamp of what is in the log at an offset
	saved    []savedSnapshot  // oldest first
	compared map[string]int   // lines, by operation
	leftOut  map[string]int   // lines, by reason
}

// savedSnapshot is a snapshot in Kafka's format, as it would lie on disk, with
// what else is known of the producers at that moment.
type savedSnapshot struct {
	end    int64
	bytes  []byte
	stamps map[int64]int64
	skewed map[int64]bool
}

// answer is what a line of the trace must be answered with.
type answer struct {
	words []string
	dump  []string
}

// base returns the offset of an answer that carries one.
func (a answer) base() (int64, bool) {
	if a.words[0] != "OK" || len(a.words) < 2 {
		return 0, false
	}
	n, err := strconv.ParseInt(a.words[1], 10, 64)
	return n, err == nil
}

// vectorOp is one line of a trace.
type vectorOp struct {
	verb string
	nums []int64
	ts   int64
	word string // txn, commit or abort
}

// TestVectors plays all of them.
func TestVectors(t *testing.T) {
	files, err := filepath.Glob("testdata/vectors/*.trace")
	if err != nil || len(files) != 30 {
		t.Fatalf("%d traces, %v", len(files), err)
	}
	compared, leftOut := map[string]int{}, map[string]int{}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".trace"), func(t *testing.T) {
			v := playVector(t, file)
			for verb, n := range v.compared {
				compared[verb] += n
			}
			for why, n := range v.leftOut {
				leftOut[why] += n
			}
		})
	}
	t.Logf("lines compared: %v", compared)
	t.Logf("lines left out: %v", leftOut)
	for verb, floor := range vectorFloors {
		if compared[verb] < floor {
			t.Errorf("%s: %d lines compared, want at least %d", verb, compared[verb], floor)
		}
	}
}

// vectorFloors is how many lines at least must be compared of each operation.
var vectorFloors = map[string]int{
	"batch": 5958, "dump": 994, "expire": 36, "marker": 227, "reload": 44, "replicate": 305, "snapshot": 50, "truncate": 44,
}

func playVector(t *testing.T, file string) *vector {
	v := &vector{
		t: t, p: newPartition(Config{UnknownProducer: AcceptAny, Expiration: 24 * time.Hour}), clock: 1000,
		stamps: map[int64]int64{}, skewed: map[int64]bool{}, strays: map[int64]string{}, logStamp: map[int64]int64{}, compared: map[string]int{}, leftOut: map[string]int{},
	}
	ops := readLines(t, file)
	answers := readLines(t, strings.TrimSuffix(file, ".trace")+".expected")
	for n, line := range ops {
		if strings.HasPrefix(line, "#") {
			continue
		}
		op := parseVectorOp(t, line)
		want := answer{words: strings.Fields(answers[0])}
		answers = answers[1:]
		if op.verb == "dump" {
			answers = append([]string{strings.Join(want.words, " ")}, answers...)
			end := slices.Index(answers, "END")
			want.dump, answers = answers[:end], answers[end+1:]
		}
		v.play(op, want)
		if v.t.Failed() {
			v.t.Fatalf("%s:%d: %s", file, n+1, line)
		}
		audit(t, v.p.m)
	}
	if len(answers) != 0 {
		t.Errorf("%d answers left over", len(answers))
	}
	return v
}

func readLines(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

func parseVectorOp(t *testing.T, line string) vectorOp {
	fields := strings.Fields(line)
	op := vectorOp{verb: fields[0], ts: -1}
	for _, f := range fields[1:] {
		if ts, ok := strings.CutPrefix(f, "ts="); ok {
			f = ts
		} else if n, err := strconv.ParseInt(f, 10, 64); err == nil {
			op.nums = append(op.nums, n)
			continue
		} else {
			op.word = f
			continue
		}
		ts, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		op.ts = ts
	}
	return op
}

func (op vectorOp) batch() Batch {
	return Batch{
		ProducerID: op.nums[0], Epoch: int16(op.nums[1]), BaseSequence: int32(op.nums[2]), Count: int32(op.nums[3]),
		Transactional: op.word == "txn",
	}
}

// play plays one line.
func (v *vector) play(op vectorOp, want answer) {
	if op.ts < 0 {
		op.ts = v.clock
	}
	v.clock = max(v.clock, op.ts)
	switch op.verb {
	case "batch":
		v.batch(op, want)
	case "replicate":
		v.replicate(op, want)
	case "marker":
		v.marker(op, want)
	case "hw":
		v.leftOut[lastStable]++
	case "expire":
		v.expire(op, want)
	case "snapshot":
		v.snapshot(op, want)
	case "reload":
		v.reload(op, want)
	case "truncate":
		v.truncate(op, want)
	case "dump":
		v.dump(want)
	default:
		v.t.Fatalf("no such operation: %s", op.verb)
	}
}

// equal compares an answer.
func (v *vector) equal(op vectorOp, got string, want answer) {
	v.t.Helper()
	if w := strings.Join(want.words, " "); got != w {
		v.t.Errorf("%s is answered %s, and by Kafka %s", op.verb, got, w)
	}
	v.compared[op.verb]++
}

// leave leaves out a line of a producer, of which Kafka and this library do not
// know the same from now on. The log grows as Kafka says.
func (v *vector) leave(op vectorOp, want answer, why string) {
	v.leftOut[why]++
	if v.strays[op.nums[0]] == "" {
		v.strays[op.nums[0]] = why
	}
	if base, ok := want.base(); ok {
		n := int64(1)
		if op.verb != "marker" {
			n = op.nums[3]
		}
		v.p.advance(base + n)
	}
}

// stamp passes the time of what was just appended. The clock moves and nothing
// is forgotten: Kafka does that only when it is told to.
func (v *vector) stamp(op vectorOp) {
	v.stamps[op.nums[0]] = op.ts
	v.skewed[op.nums[0]] = op.ts < v.clock
	v.logStamp[v.p.log[len(v.p.log)-1].base] = op.ts
	v.startTick()
}

func (v *vector) startTick() {
	v.p.m.mu.Lock()
	defer v.p.m.mu.Unlock()
	v.p.m.startTick(instantOf(time.UnixMilli(v.clock)))
}

func (v *vector) batch(op vectorOp, want answer) {
	if v.strays[op.nums[0]] != "" {
		v.leave(op, want, astray)
		return
	}
	b := op.batch()
	known, ok := v.p.m.Producer(b.ProducerID)
	newer := ok && known.CurrentTxnFirstOffset >= 0 && b.Transactional && b.Epoch > known.Epoch && b.BaseSequence == 0
	res, err := v.p.produce(b)
	got := ""
	switch {
	case newer != errors.Is(err, ErrConcurrentTransactions):
		v.t.Errorf("%+v after %+v: %v, want ErrConcurrentTransactions: %t", b, known, err, newer)
		return
	case newer:
		v.leftOut[newerInTxn]++
		if err := v.p.replay(logged{batch: b, base: v.p.end}); err != nil {
			v.t.Errorf("replay: %v", err)
		}
		v.stamp(op)
		return
	case err != nil:
		got = kafkaRefusals.Replace(refusalName(err))
	case res.Verdict == Duplicate:
		got = fmt.Sprintf("DUP %d", res.BaseOffset)
	default:
		got = fmt.Sprintf("OK %d", res.BaseOffset)
		v.stamp(op)
	}
	v.equal(op, got, want)
}

// kafkaRefusals makes Kafka's names of the transcripts' ones.
var kafkaRefusals = strings.NewReplacer("STALE_EPOCH", "FENCED", "INVALID_TXN", "INVALID_TXN_STATE")

func (v *vector) replicate(op vectorOp, want answer) {
	known, ok := v.p.m.Producer(op.nums[0])
	switch {
	case v.strays[op.nums[0]] != "":
		v.leave(op, want, astray)
		return
	case want.words[0] == "INVALID_TXN_STATE":
		v.leftOut[plainInTxn]++
		return
	case ok && int64(known.Epoch) > op.nums[1]:
		v.leave(op, want, olderEpoch)
		return
	}
	base := v.p.end
	if err := v.p.replay(logged{batch: op.batch(), base: base}); err != nil {
		v.t.Errorf("replicate: %v", err)
	}
	v.stamp(op)
	v.equal(op, fmt.Sprintf("OK %d", base), want)
}

// marker replays a marker that Kafka accepted.
func (v *vector) marker(op vectorOp, want answer) {
	switch {
	case v.strays[op.nums[0]] != "":
		v.leave(op, want, astray)
		return
	case want.words[0] != "OK":
		v.leftOut[refusedMarker]++
		return
	}
	base := v.p.end
	k := &Marker{ProducerID: op.nums[0], Epoch: int16(op.nums[1]), CoordinatorEpoch: int32(op.nums[2]), Commit: op.word == "commit"}
	if err := v.p.replay(logged{marker: k, base: base}); err != nil {
		v.t.Errorf("marker: %v", err)
	}
	v.stamp(op)
	v.equal(op, fmt.Sprintf("OK %d", base), answer{words: want.words[:2]})
}

// expire compares how many producers are left.
func (v *vector) expire(op vectorOp, want answer) {
	v.clock = max(v.clock, op.nums[0])
	v.forget(op.nums[0])
	v.producers(op, want)
}

// forget forgets the idle, and notes whom Kafka and this library disagree about.
func (v *vector) forget(now int64) {
	for p := range v.p.m.Producers() {
		idle := v.clock - p.LastActivity.UnixMilli()
		if stamped := now - v.stamps[p.ProducerID]; p.CurrentTxnFirstOffset < 0 && (idle >= 86400000) != (stamped >= 86400000) {
			v.strays[p.ProducerID] = ownClock
		}
	}
	v.p.expire(v.clock)
}

// producers compares how many producers there are, where all of them are known
// to both.
func (v *vector) producers(op vectorOp, want answer) {
	if len(v.strays) > 0 {
		v.leftOut[v.anyStray()]++
		return
	}
	v.equal(op, fmt.Sprintf("OK producers=%d", v.p.m.Len()), want)
}

// anyStray returns why one of the strays went astray.
func (v *vector) anyStray() string {
	pids := make([]int64, 0, len(v.strays))
	for pid := range v.strays {
		pids = append(pids, pid)
	}
	return v.strays[slices.Min(pids)]
}

// snapshot writes one in Kafka's format, unless nothing is new.
func (v *vector) snapshot(op vectorOp, want answer) {
	if v.newest().end == v.p.end {
		v.equal(op, "OK snapshot=none", want)
		return
	}
	var file bytes.Buffer
	s := v.p.m.Snapshot()
	if _, err := s.WriteKafka(&file); err != nil {
		v.t.Fatalf("WriteKafka: %v", err)
	}
	v.saved = append(v.saved, savedSnapshot{s.EndOffset(), file.Bytes(), maps.Clone(v.stamps), maps.Clone(v.skewed)})
	v.equal(op, fmt.Sprintf("OK snapshot=%d", s.EndOffset()), want)
}

// newest returns the newest snapshot, or one of the empty log.
func (v *vector) newest() savedSnapshot {
	if len(v.saved) == 0 {
		return savedSnapshot{}
	}
	return v.saved[len(v.saved)-1]
}

// reload loses the memory, reads the newest snapshot, forgets who is idle in it,
// and replays the rest of the log.
func (v *vector) reload(op vectorOp, want answer) {
	s := v.newest()
	v.p.m = New(v.p.cfg)
	v.stamps, v.skewed = map[int64]int64{}, map[int64]bool{}
	if s.bytes != nil {
		if err := v.p.m.RestoreKafka(bytes.NewReader(s.bytes), s.end); err != nil {
			v.t.Fatalf("RestoreKafka: %v", err)
		}
		v.stamps, v.skewed = maps.Clone(s.stamps), maps.Clone(s.skewed)
	}
	v.forget(v.clock)
	for _, l := range v.p.log {
		if l.base < s.end {
			continue
		}
		if err := apply(v.p.m, l); err != nil {
			v.t.Fatalf("replay of %+v: %v", l, err)
		}
		v.stamps[l.pid()], v.skewed[l.pid()] = v.logStamp[l.base], true
	}
	v.startTick()
	v.p.m.Advance(v.p.end)
	v.producers(op, want)
}

// truncate cuts the log. Without a snapshot, what Truncate leaves where it says
// that it is exact must be what Kafka makes of the rest of the log; in all other
// cases Kafka and an embedder do the same, and reload.
func (v *vector) truncate(op vectorOp, want answer) {
	to := op.nums[0]
	v.saved = slices.DeleteFunc(v.saved, func(s savedSnapshot) bool { return s.end > to })
	if exact := v.p.truncate(v.t, to); !exact || len(v.saved) > 0 {
		v.reload(op, want)
		return
	}
	for _, l := range v.p.log {
		v.stamps[l.pid()], v.skewed[l.pid()] = v.logStamp[l.base], true
	}
	v.producers(op, want)
}

// dump compares everything that is remembered, producer by producer.
func (v *vector) dump(want answer) {
	var got []string
	for p := range v.p.m.Producers() {
		if v.strays[p.ProducerID] == "" {
			got = append(got, v.describe(p))
		}
	}
	var kept []string
	for _, line := range want.dump {
		pid, err := strconv.ParseInt(strings.Fields(line)[0], 10, 64)
		if err != nil {
			v.t.Fatalf("dump: %v", err)
		}
		if v.strays[pid] != "" {
			v.leftOut[astray]++
			continue
		}
		if v.skewed[pid] {
			fields := strings.Fields(line)
			fields[4] = "skewed"
			line = strings.Join(fields, " ")
		}
		kept = append(kept, line)
	}
	v.compared["dump"] += len(kept)
	if g, w := strings.Join(got, "\n"), strings.Join(kept, "\n"); g != w {
		v.t.Errorf("the dump is\n%s\nand Kafka's\n%s", g, w)
	}
}

// describe writes down a producer as Kafka's dump does.
func (v *vector) describe(p ProducerState) string {
	lastSeq, lastOffset, txn, coord := int32(-1), int64(-1), int64(-1), int32(-1)
	var window []string
	for _, b := range p.Window {
		n := (int64(b.LastSequence) - int64(b.FirstSequence) + modulus) % modulus
		lastSeq, lastOffset = b.LastSequence, b.BaseOffset+n
		window = append(window, fmt.Sprintf("%d-%d@%d", b.FirstSequence, b.LastSequence, b.BaseOffset))
	}
	if p.CurrentTxnFirstOffset >= 0 {
		txn = p.CurrentTxnFirstOffset
	}
	if p.CoordinatorEpoch >= 0 {
		coord = p.CoordinatorEpoch
	}
	active := fmt.Sprint(p.LastActivity.UnixMilli())
	if v.skewed[p.ProducerID] {
		active = "skewed"
	}
	return fmt.Sprintf("%d %d %d %d %s %d %d window=[%s]",
		p.ProducerID, p.Epoch, lastSeq, lastOffset, active, coord, txn, strings.Join(window, ","))
}
