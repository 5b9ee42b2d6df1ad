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

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// This file plays the traces of testdata/vectors and compares every answer with the
// one that Apache Kafka's own classes gave. The policy is AcceptAny, which is theirs.
// The README beside the traces says how to read them.
//
// Some lines cannot be compared, because this library decides otherwise on purpose.
// Which lines those are follows from the trace and Kafka's answers alone: the runner
// tracks what Kafka knows of each producer, and what this library must know after the
// same log. Each line that is left out is counted by its reason, with an exact number
// in vectorLines, and the library's own right answer is asserted instead.

// Why a line is left out.
const (
	// plainInTxn: Kafka refuses a replicated plain batch inside an open
	// transaction. A replay judges nothing here.
	plainInTxn = "a replicated plain batch inside an open transaction"
	// newerInTxn: Kafka adds a transactional batch of a newer epoch to the open
	// transaction of the older one. Here it is ErrConcurrentTransactions (rule T1),
	// and it is then replayed, since Kafka's log has it.
	newerInTxn = "a newer epoch inside an open transaction"
	// olderEpoch: a replicated batch of an older epoch is skipped here. Kafka adopts
	// the epoch and clears the window.
	olderEpoch = "a replicated batch of an older epoch"
	// ownClock: idle time is counted by the broker's clock here. Kafka counts from
	// the timestamp of the batch, and forgets a producer whose timestamps lie behind
	// the clock earlier.
	ownClock = "producers with timestamps behind the clock expire"
	// astray: for one of the reasons above, the two have known different things of
	// the producer since. What Kafka has in its log is replayed.
	astray = "a producer that went another way before"
	// endedUnknown: the runner forgets producers by way of a snapshot, which does not
	// hold ended transactions.
	endedUnknown = "the last stable offset after producers were forgotten"
)

// vectorLines is how many lines are compared of each operation, and how many are left
// out for each reason.
var vectorLines = map[string]int{
	"batch": 6039, "dump": 1012, "expire": 72, "hw": 86, "marker": 285,
	"reload": 45, "replicate": 338, "snapshot": 50, "truncate": 44,

	astray:       177,
	endedUnknown: 4,
	newerInTxn:   38,
	olderEpoch:   9,
	ownClock:     3,
	plainInTxn:   3,
}

// kafkaIdle is Kafka's idle limit in the traces, in milliseconds.
const kafkaIdle = 86400000

// vector is a trace at play.
type vector struct {
	t        *testing.T
	p        *partition // its manager never forgets by itself
	clock    int64
	kafka    tracked         // what Kafka knows, by its answers
	ours     tracked         // what this library must know after the same log
	logStamp map[int64]int64 // the timestamp of what is in the log at an offset
	saved    []savedSnapshot // oldest first
	restored bool            // since the last reload, to forget the idle
	lines    map[string]int  // by operation, or by the reason to leave it out
}

// tracked is producers by their ids.
type tracked map[int64]trackedProducer

// trackedProducer is what is known of a producer.
type trackedProducer struct {
	epoch  int64
	window []int64 // base offsets
	txn    int64   // first offset of the open transaction, or -1
	coord  int64   // coordinator epoch, or -1
	at     int64   // of the last activity: the batch's timestamp or the broker's clock
}

// same reports whether two know the same of a producer, apart from its activity.
func (p trackedProducer) same(o trackedProducer) bool {
	return p.epoch == o.epoch && p.txn == o.txn && p.coord == o.coord && slices.Equal(p.window, o.window)
}

// savedSnapshot is a snapshot in Kafka's format, as it would lie on disk, with what
// both know at that moment.
type savedSnapshot struct {
	end         int64
	bytes       []byte
	kafka, ours tracked
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
	lines := map[string]int{}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".trace"), func(t *testing.T) {
			for what, n := range playVector(t, file).lines {
				lines[what] += n
			}
		})
	}
	if diff := cmp.Diff(vectorLines, lines); diff != "" {
		t.Errorf("lines compared and left out (-want +got):\n%s", diff)
	}
}

func playVector(t *testing.T, file string) *vector {
	v := &vector{
		t: t, p: newPartition(Config{UnknownProducer: AcceptAny, Expiration: -1}), clock: 1000,
		kafka: tracked{}, ours: tracked{}, logStamp: map[int64]int64{}, lines: map[string]int{},
	}
	v.p.m.LastStableOffset(0) // so that it knows of every transaction that ends
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
		v.verify()
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
		v.highWatermark(op, want)
	case "expire":
		v.clock = max(v.clock, op.nums[0])
		v.forget(op.nums[0])
		v.producers(op, want)
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

// verify compares what the library knows with what it must know, of producers that
// went astray too.
func (v *vector) verify() {
	v.t.Helper()
	got := tracked{}
	for p := range v.p.m.Producers() {
		o := trackedProducer{
			epoch: int64(p.Epoch), txn: p.CurrentTxnFirstOffset, coord: int64(p.CoordinatorEpoch), at: p.LastActivity.UnixMilli(),
		}
		for _, b := range p.Window {
			o.window = append(o.window, b.BaseOffset)
		}
		got[p.ProducerID] = o
	}
	if !maps.EqualFunc(v.ours, got, func(a, b trackedProducer) bool { return a.same(b) && a.at == b.at }) {
		diff := cmp.Diff(v.ours, got, cmp.AllowUnexported(trackedProducer{}), cmpopts.EquateEmpty())
		v.t.Errorf("what is known (-want +got):\n%s", diff)
	}
}

// astray reports whether the two know different things of a producer.
func (v *vector) astray(pid int64) bool {
	k, kafkas := v.kafka[pid]
	o, ours := v.ours[pid]
	return kafkas != ours || !k.same(o)
}

// anyAstray reports whether they do of any producer.
func (v *vector) anyAstray() bool {
	for pid := range v.kafka {
		if v.astray(pid) {
			return true
		}
	}
	return len(v.kafka) != len(v.ours)
}

// equal compares an answer.
func (v *vector) equal(op vectorOp, got string, want answer) {
	v.t.Helper()
	if w := strings.Join(want.words, " "); got != w {
		v.t.Errorf("%s is answered %s, and by Kafka %s", op.verb, got, w)
	}
	v.lines[op.verb]++
}

// leave leaves a line out. What it put into Kafka's log is replayed.
func (v *vector) leave(l logged, op vectorOp, want answer, why string) {
	v.lines[why]++
	base, ok := want.base()
	if !ok {
		return
	}
	if l.base = base; base != v.p.end {
		v.t.Errorf("%s lies at %d, and the log ends at %d", op.verb, base, v.p.end)
	}
	if err := v.p.replay(l); err != nil {
		v.t.Errorf("replay of a %s: %v", op.verb, err)
	}
	v.appended(op)
}

// appended notes what the newest entry of the log does, and passes its time.
func (v *vector) appended(op vectorOp) {
	l := v.p.log[len(v.p.log)-1]
	v.logStamp[l.base] = op.ts
	v.track(l)
	v.p.expire(v.clock)
}

// track notes what an entry of the log does to its producer.
func (v *vector) track(l logged) {
	v.kafka.apply(l, v.logStamp[l.base])
	if p, known := v.ours[l.pid()]; known && int64(l.epoch()) < p.epoch {
		v.ours.applyOlder(l, v.clock)
	} else {
		v.ours.apply(l, v.clock)
	}
}

// apply applies an entry whatever its epoch.
func (t tracked) apply(l logged, at int64) {
	p, known := t[l.pid()]
	if epoch := int64(l.epoch()); !known {
		p = trackedProducer{epoch: epoch, txn: -1, coord: -1}
	} else if epoch != p.epoch {
		p.epoch, p.window = epoch, nil
	}
	p.at = at
	switch {
	case l.marker != nil:
		p.txn, p.coord = -1, int64(l.marker.CoordinatorEpoch)
	default:
		p.window = append(slices.Clone(p.window), l.base)
		p.window = p.window[max(0, len(p.window)-5):]
		if l.batch.Transactional && p.txn < 0 {
			p.txn = l.base
		}
	}
	t[l.pid()] = p
}

// applyOlder applies an entry of an older epoch than is known: its place in the log
// says what it does to a transaction, and nothing else changes.
func (t tracked) applyOlder(l logged, at int64) {
	p := t[l.pid()]
	switch was := p.txn; {
	case l.marker != nil:
		p.txn, p.coord = -1, max(p.coord, int64(l.marker.CoordinatorEpoch))
		if was >= 0 {
			p.at = at
		}
	case l.batch.Transactional && was < 0:
		p.txn, p.at = l.base, at
	}
	t[l.pid()] = p
}

// expire forgets who is idle.
func (t tracked) expire(now int64) {
	maps.DeleteFunc(t, func(_ int64, p trackedProducer) bool { return p.txn < 0 && now-p.at >= kafkaIdle })
}

// saved returns what Kafka's format keeps: of each window the last batch.
func (t tracked) saved() tracked {
	s := maps.Clone(t)
	for pid, p := range s {
		p.window = p.window[max(0, len(p.window)-1):]
		s[pid] = p
	}
	return s
}

func (v *vector) batch(op vectorOp, want answer) {
	b := op.batch()
	_, appended := want.base()
	k, known := v.kafka[b.ProducerID]
	newer := known && appended && k.txn >= 0 && op.nums[1] > k.epoch
	switch {
	case v.astray(b.ProducerID):
		v.leave(logged{batch: b}, op, want, astray)
		return
	case newer:
		if _, err := v.p.check(b); !errors.Is(err, ErrConcurrentTransactions) {
			v.t.Errorf("%+v inside a transaction of epoch %d: %v, want ErrConcurrentTransactions", b, k.epoch, err)
		}
		v.leave(logged{batch: b}, op, want, newerInTxn)
		return
	}
	res, err := v.p.produce(b)
	got := ""
	switch {
	case err != nil:
		got = kafkaRefusals.Replace(refusalName(err))
	case res.Verdict == Duplicate:
		got = fmt.Sprintf("DUP %d", res.BaseOffset)
	default:
		got = fmt.Sprintf("OK %d", res.BaseOffset)
		v.appended(op)
	}
	v.equal(op, got, want)
}

// kafkaRefusals makes Kafka's names of the transcripts' ones.
var kafkaRefusals = strings.NewReplacer(
	"STALE_EPOCH", "FENCED", "INVALID_TXN", "INVALID_TXN_STATE", "STALE_COORD", "COORDINATOR_FENCED")

func (v *vector) replicate(op vectorOp, want answer) {
	l := logged{batch: op.batch(), base: v.p.end}
	k, known := v.kafka[l.pid()]
	switch {
	case v.astray(l.pid()):
		v.leave(l, op, want, astray)
		return
	case want.words[0] == "INVALID_TXN_STATE":
		if k.txn < 0 || l.batch.Transactional {
			v.t.Errorf("%+v is refused, and Kafka knows %+v", l.batch, k)
		}
		v.lines[plainInTxn]++
		return
	case known && op.nums[1] < k.epoch:
		v.leave(l, op, want, olderEpoch)
		return
	}
	if err := v.p.replay(l); err != nil {
		v.t.Errorf("replicate: %v", err)
	}
	v.appended(op)
	v.equal(op, fmt.Sprintf("OK %d", l.base), want)
}

// marker judges a marker, and commits it if it is accepted.
func (v *vector) marker(op vectorOp, want answer) {
	k := Marker{ProducerID: op.nums[0], Epoch: int16(op.nums[1]), CoordinatorEpoch: int32(op.nums[2]), Commit: op.word == "commit"}
	l := logged{marker: &k, base: v.p.end}
	if v.astray(k.ProducerID) {
		v.leave(l, op, want, astray)
		return
	}
	got := fmt.Sprintf("OK %d", l.base)
	err := v.p.m.CheckMarker(k)
	if err == nil {
		err = v.p.m.CommitMarker(k, l.base)
	}
	if err != nil {
		got = kafkaRefusals.Replace(refusalName(err))
	} else {
		v.p.append(l)
		v.appended(op)
	}
	v.equal(op, got, answer{words: want.words[:min(2, len(want.words))]})
}

// highWatermark compares the last stable offset, which never lies past the high
// watermark here.
func (v *vector) highWatermark(op vectorOp, want answer) {
	if v.restored {
		v.lines[endedUnknown]++
		return
	}
	lso, err := strconv.ParseInt(strings.TrimPrefix(want.words[1], "lso="), 10, 64)
	if err != nil {
		v.t.Fatal(err)
	}
	if got := v.p.m.LastStableOffset(op.nums[0]); got != min(lso, op.nums[0]) {
		v.t.Errorf("the last stable offset at %d is %d, and Kafka's %d", op.nums[0], got, lso)
	}
	v.lines["hw"]++
}

// forget forgets the idle producers of both, and notes those that only one of them
// forgets.
func (v *vector) forget(now int64) {
	known, before := v.anyAstray(), len(v.ours)
	v.kafka.expire(now)
	v.ours.expire(v.clock)
	if len(v.ours) < before {
		v.expireIdle()
	}
	if !known && v.anyAstray() {
		v.lines[ownClock]++
	}
}

// expireIdle forgets the idle producers of the library, by way of a manager that has
// an idle limit.
func (v *vector) expireIdle() {
	cfg := v.p.cfg
	cfg.Expiration = kafkaIdle * time.Millisecond
	m := restored(v.t, cfg, encoded(v.t, v.p.m))
	m.Expire(time.UnixMilli(v.clock))
	v.p.m = restored(v.t, v.p.cfg, encoded(v.t, m))
	v.restored = true
}

// producers compares how many producers Kafka knows with its answers so far, and with
// the library if no producer went astray.
func (v *vector) producers(op vectorOp, want answer) {
	got := fmt.Sprintf("OK producers=%d", len(v.kafka))
	if v.anyAstray() {
		if w := strings.Join(want.words, " "); got != w {
			v.t.Errorf("%s: by its answers Kafka knows %s, and it says %s", op.verb, got, w)
		}
		v.lines[astray]++
		return
	}
	v.equal(op, fmt.Sprintf("OK producers=%d", v.p.m.Len()), want)
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
	v.saved = append(v.saved, savedSnapshot{s.EndOffset(), file.Bytes(), v.kafka.saved(), v.ours.saved()})
	v.equal(op, fmt.Sprintf("OK snapshot=%d", s.EndOffset()), want)
}

// newest returns the newest snapshot, or one of the empty log.
func (v *vector) newest() savedSnapshot {
	if len(v.saved) == 0 {
		return savedSnapshot{}
	}
	return v.saved[len(v.saved)-1]
}

// reload loses the memory, reads the newest snapshot, forgets who is idle in it, and
// replays the rest of the log.
func (v *vector) reload(op vectorOp, want answer) {
	s := v.newest()
	v.p.m = New(v.p.cfg)
	v.kafka, v.ours = tracked{}, tracked{}
	if s.bytes != nil {
		if err := v.p.m.RestoreKafka(bytes.NewReader(s.bytes), s.end); err != nil {
			v.t.Fatalf("RestoreKafka: %v", err)
		}
		v.kafka, v.ours = maps.Clone(s.kafka), maps.Clone(s.ours)
	}
	v.forget(v.clock)
	v.p.m.LastStableOffset(0)
	v.restored = false
	for _, l := range v.p.log {
		if l.base < s.end {
			continue
		}
		if err := apply(v.p.m, l); err != nil {
			v.t.Fatalf("replay of %+v: %v", l, err)
		}
		v.track(l)
	}
	v.p.m.Advance(v.p.end)
	v.p.expire(v.clock)
	v.producers(op, want)
}

// truncate cuts the log. Without a snapshot, what Truncate leaves where it says that
// it is exact must be what Kafka makes of the rest of the log; in all other cases
// Kafka and an embedder do the same, and reload.
func (v *vector) truncate(op vectorOp, want answer) {
	to := op.nums[0]
	v.saved = slices.DeleteFunc(v.saved, func(s savedSnapshot) bool { return s.end > to })
	if exact := v.p.truncate(v.t, to); !exact || len(v.saved) > 0 {
		v.reload(op, want)
		return
	}
	before := v.ours
	v.kafka, v.ours = tracked{}, tracked{}
	for _, l := range v.p.log {
		v.track(l)
	}
	for pid, o := range v.ours {
		was, known := before[pid]
		switch {
		case !known:
			delete(v.ours, pid)
		case was.txn < 0 || o.txn >= 0: // else it is released, and active now
			o.at = was.at
			v.ours[pid] = o
		}
	}
	v.p.expire(v.clock)
	v.producers(op, want)
}

// dump compares everything that is remembered, producer by producer.
func (v *vector) dump(want answer) {
	var got []string
	for p := range v.p.m.Producers() {
		if !v.astray(p.ProducerID) {
			got = append(got, v.describe(p))
		}
	}
	var kept []string
	for _, line := range want.dump {
		fields := strings.Fields(line)
		pid, err := strconv.ParseInt(fields[0], 10, 64)
		if err != nil {
			v.t.Fatalf("dump: %v", err)
		}
		k := v.kafka[pid]
		if by := fmt.Sprintf("%d %d %d", k.epoch, k.txn, k.at); by != fmt.Sprintf("%s %s %s", fields[1], fields[6], fields[4]) {
			v.t.Errorf("by its answers Kafka knows epoch, transaction and timestamp as %s, and it says %s", by, line)
		}
		if v.astray(pid) {
			v.lines[astray]++
			continue
		}
		fields[4] = fmt.Sprint(v.ours[pid].at) // by the broker's clock
		kept = append(kept, strings.Join(fields, " "))
	}
	v.lines["dump"] += len(kept)
	if g, w := strings.Join(got, "\n"), strings.Join(kept, "\n"); g != w {
		v.t.Errorf("the dump is\n%s\nand Kafka's\n%s", g, w)
	}
}

// describe writes down a producer as Kafka's dump does.
func (v *vector) describe(p ProducerState) string {
	lastSeq, lastOffset := int32(-1), int64(-1)
	var window []string
	for _, b := range p.Window {
		n := (int64(b.LastSequence) - int64(b.FirstSequence) + modulus) % modulus
		lastSeq, lastOffset = b.LastSequence, b.BaseOffset+n
		window = append(window, fmt.Sprintf("%d-%d@%d", b.FirstSequence, b.LastSequence, b.BaseOffset))
	}
	return fmt.Sprintf("%d %d %d %d %d %d %d window=[%s]", p.ProducerID, p.Epoch, lastSeq, lastOffset,
		p.LastActivity.UnixMilli(), p.CoordinatorEpoch, p.CurrentTxnFirstOffset, strings.Join(window, ","))
}
