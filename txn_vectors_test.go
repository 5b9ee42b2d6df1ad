package idempotence

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
)

// This file plays the traces of testdata/txn-vectors, which hold what Apache Kafka's
// own log answered to random transactional operations, through the public API alone.
// The README beside them says how to read them.
//
// Two managers play. The leader judges, and is restored from snapshots in Kafka's
// format as Kafka is. The follower judges nothing and is rebuilt from the log. Both
// must know the same transactions as Kafka after every line.
//
// A line that is left out of the comparison is named by its reason, in txn_ledger_test.go,
// and is held against the rules of this library instead.

// txnVector is a trace at play.
type txnVector struct {
	t                *testing.T
	l                *ledger
	leader, follower *ProducerStateManager
	released         map[int64]bool // markers that no longer hold the follower's last stable offset back
	blind            int64          // the leader knows nothing of transactions that ended below it
	compared         map[string]int // lines, by operation
	leftOut          map[string]int // lines, by reason
}

// txnOp is one line of a trace.
type txnOp struct {
	verb  string
	nums  []int64
	words []string
	args  map[string]string
}

// pid returns the producer id of a line that begins with one.
func (op txnOp) pid() int64 { return op.nums[0] }

// has reports whether the line has a word.
func (op txnOp) has(word string) bool { return slices.Contains(op.words, word) }

// arg returns a numeric argument, or def where the line does not have it.
func (op txnOp) arg(name string, def int64) int64 {
	if n, err := strconv.ParseInt(op.args[name], 10, 64); err == nil {
		return n
	}
	return def
}

func parseTxnOp(line string) txnOp {
	fields := strings.Fields(line)
	op := txnOp{verb: fields[0], args: map[string]string{}}
	for _, f := range fields[1:] {
		if name, value, ok := strings.Cut(f, "="); ok {
			op.args[name] = value
		} else if n, err := strconv.ParseInt(f, 10, 64); err == nil {
			op.nums = append(op.nums, n)
		} else {
			op.words = append(op.words, f)
		}
	}
	return op
}

// batch returns the batch of a batch, coordbatch, replicate or plain line.
func (op txnOp) batch() Batch {
	b := Batch{ProducerID: NoProducerID, Transactional: op.has("txn")}
	switch op.verb {
	case "plain":
		b.Count = int32(op.nums[0])
	case "coordbatch":
		b.ProducerID, b.Epoch, b.Count = op.pid(), int16(op.nums[1]), int32(op.nums[2])
	default:
		b.ProducerID, b.Epoch, b.BaseSequence, b.Count = op.pid(), int16(op.nums[1]), int32(op.nums[2]), int32(op.nums[3])
	}
	return b
}

// marker returns the marker of a marker or replicate-marker line.
func (op txnOp) marker() Marker {
	return Marker{
		ProducerID: op.pid(), Epoch: int16(op.nums[1]), CoordinatorEpoch: int32(op.nums[2]),
		Commit: op.has("commit"), Version: int8(op.arg("tv", 0)),
	}
}

// txnAnswer is Kafka's answer to a line.
type txnAnswer struct {
	text string // without the tail
	tail map[string]string
	dump []string
}

// word returns the first word.
func (a txnAnswer) word() string {
	word, _, _ := strings.Cut(a.text, " ")
	return word
}

// figure returns a number of the tail, or -1 where it says none.
func (a txnAnswer) figure(name string) int64 {
	if n, err := strconv.ParseInt(a.tail[name], 10, 64); err == nil {
		return n
	}
	return -1
}

func parseTxnAnswer(line string) txnAnswer {
	text, tail, _ := strings.Cut(line, " | ")
	a := txnAnswer{text: text}
	for _, f := range strings.Fields(tail) {
		name, value, _ := strings.Cut(f, "=")
		if a.tail == nil {
			a.tail = map[string]string{}
		}
		a.tail[name] = value
	}
	return a
}

// txnVectorCompared is how many lines are compared, by operation, and how many of their
// tails have an ideal.
var txnVectorCompared = map[string]int{
	"aborted": 122, "batch": 1805, "config": 30, "delete-records": 47, "delete-segments": 26, "dump": 113, "expire": 54,
	"hw": 462, "late": 28, "marker": 1058, "ongoing": 42, "plain": 27, "reload": 56, "replicate": 54,
	"replicate-marker": 46, "roll": 75, "snapshot": 57, "truncate": 50, idealStable: 77, releasedStable: 253,
}

// txnVectorLeftOut is how many lines are left out, by reason. All follow from the traces
// and from Kafka's answers alone.
var txnVectorLeftOut = map[string]int{
	guards: 282, coordBatch: 28, newerEpochJoins: 8, plainReplica: 1, olderReplica: 37, expireTime: 16, deletedRange: 1, lostStart: 1,
}

// The tails with a last stable offset of Kafka's and an ideal.
const (
	idealStable    = "the ideal"
	releasedStable = "Kafka's, after a restart or a higher high watermark"
)

// TestTxnVectors plays all of them.
func TestTxnVectors(t *testing.T) {
	files, err := filepath.Glob("testdata/txn-vectors/*.trace")
	if err != nil || len(files) != 30 {
		t.Fatalf("%d traces, %v", len(files), err)
	}
	compared, leftOut := map[string]int{}, map[string]int{}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".trace"), func(t *testing.T) {
			v := newTxnVector(t)
			v.playAll(readLines(t, file), readLines(t, strings.TrimSuffix(file, ".trace")+".expected"))
			for verb, n := range v.compared {
				compared[verb] += n
			}
			for why, n := range v.leftOut {
				leftOut[why] += n
			}
		})
	}
	if diff := gocmp.Diff(txnVectorCompared, compared); diff != "" && !t.Failed() {
		t.Errorf("lines compared (-want +got):\n%s", diff)
	}
	if diff := gocmp.Diff(txnVectorLeftOut, leftOut); diff != "" && !t.Failed() {
		t.Errorf("lines left out (-want +got):\n%s", diff)
	}
}

// TestTxnSurprises plays the short traces in SURPRISES.md, each of which shows where
// Kafka's classes do what one would not expect.
func TestTxnSurprises(t *testing.T) {
	text, err := os.ReadFile("testdata/txn-vectors/SURPRISES.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := strings.Split(string(text), "\n## ")[1:]
	if len(sections) != 25 {
		t.Fatalf("%d sections", len(sections))
	}
	for _, section := range sections {
		name, _, _ := strings.Cut(section, "\n")
		t.Run(name, func(t *testing.T) {
			var ops, answers []string
			for _, line := range strings.Split(strings.Split(section, "```")[1], "\n") {
				op, answer, ok := strings.Cut(line, "->")
				switch {
				case ok:
					ops, answers = append(ops, strings.TrimSpace(op)), append(answers, strings.TrimSpace(answer))
				case line != "": // of a dump
					answers = append(answers, strings.TrimSpace(line))
				}
			}
			newTxnVector(t).playAll(ops, answers)
		})
	}
}

func newTxnVector(t *testing.T) *txnVector {
	return &txnVector{t: t, l: newLedger(), released: map[int64]bool{}, compared: map[string]int{}, leftOut: map[string]int{}}
}

func (v *txnVector) playAll(ops, answers []string) {
	for n, line := range ops {
		if strings.HasPrefix(line, "#") {
			continue
		}
		op := parseTxnOp(line)
		var want txnAnswer
		if op.verb == "dump" {
			end := slices.Index(answers, "END")
			want.dump, answers = answers[:end], answers[end+1:]
		} else {
			want, answers = parseTxnAnswer(answers[0]), answers[1:]
		}
		v.play(op, want)
		if v.t.Failed() {
			v.t.Fatalf("line %d: %s\nKafka answers %s %v", n+1, line, want.text, want.tail)
		}
		audit(v.t, v.leader)
		audit(v.t, v.follower)
	}
	if len(answers) != 0 {
		v.t.Errorf("%d answers left over", len(answers))
	}
}

// play plays one line.
func (v *txnVector) play(op txnOp, want txnAnswer) {
	v.l.clock = max(v.l.clock, op.arg("ts", 0))
	switch op.verb {
	case "config":
		v.configure(op, want)
	case "plain", "batch", "coordbatch", "replicate":
		v.batch(op, want)
	case "marker", "replicate-marker":
		v.marker(op, want)
	case "verify":
		v.verify(op, want)
	case "ongoing":
		v.ongoing(op, want)
	case "late":
		v.late(op, want)
	case "aborted":
		v.aborted(op, want)
	case "hw":
		v.l.hw = min(max(op.nums[0], v.l.start), v.l.end)
		v.equal(op, "OK", want)
	case "expire":
		v.l.clock = max(v.l.clock, op.nums[0])
		v.expire(op.nums[0])
		v.producers(op, want)
	case "snapshot":
		v.equal(op, v.snapshot(), want)
	case "roll":
		v.snapshot()
		v.l.roll()
		v.equal(op, fmt.Sprintf("OK base=%d", v.l.end), want)
	case "reload":
		v.reload(op, want)
	case "truncate":
		v.truncate(op, want)
	case "delete-records":
		v.deleteRecords(op, want)
	case "delete-segments":
		v.equal(op, fmt.Sprintf("OK deleted=%d", v.l.deleteSegments()), want)
	case "dump":
		v.dump(op, want)
	default:
		v.t.Fatalf("no such operation: %s", op.verb)
	}
	if want.tail != nil {
		v.tail(want)
	}
}

// equal compares an answer.
func (v *txnVector) equal(op txnOp, got string, want txnAnswer) {
	v.t.Helper()
	if got != want.text {
		v.t.Errorf("%s is answered %s, and by Kafka %s", op.verb, got, want.text)
	}
	v.compared[op.verb]++
}

func (v *txnVector) configure(op txnOp, want txnAnswer) {
	v.l.verification = op.args["verification"] == "on"
	v.l.expiration = op.arg("expiration", DefaultExpiration.Milliseconds())
	v.leader, v.follower = v.newLeader(), v.newFollower()
	v.equal(op, "OK", want)
}

func (v *txnVector) newLeader() *ProducerStateManager {
	expiration := time.Duration(v.l.expiration) * time.Millisecond
	return New(Config{UnknownProducer: AcceptAny, Expiration: expiration, Contiguous: true})
}

// newFollower returns a manager that forgets nothing.
func (v *txnVector) newFollower() *ProducerStateManager {
	return New(Config{UnknownProducer: AcceptAny, Expiration: -1, Contiguous: true})
}

// tail compares what is known of transactions with what Kafka says behind an answer.
func (v *txnVector) tail(want txnAnswer) {
	hw, start, end := want.figure("hw"), want.figure("start"), want.figure("end")
	if v.l.hw != hw || v.l.start != start || v.l.end != end {
		v.t.Fatalf("the log of the player is [%d, %d), with high watermark %d", v.l.start, v.l.end, v.l.hw)
	}
	stable := v.stable(want)
	for name, m := range map[string]*ProducerStateManager{"leader": v.leader, "follower": v.follower} {
		if got := m.EndOffset(); got != end {
			v.t.Errorf("the %s has end offset %d", name, got)
		}
		if got := oldestTransaction(m); got != want.figure("undecided") {
			v.t.Errorf("the %s has a transaction open from %d", name, got)
		}
		if got := m.LastStableOffset(hw); got != stable && (m == v.follower || v.blind <= hw) || got < stable {
			v.t.Errorf("the %s has last stable offset %d, want %d", name, got, stable)
		}
	}
}

// oldestTransaction returns the lowest first offset of an open transaction, or -1.
func oldestTransaction(m *ProducerStateManager) int64 {
	if p, ok := m.OldestTransaction(); ok {
		return p.CurrentTxnFirstOffset
	}
	return -1
}

// stable returns the last stable offset by its definition, and holds Kafka's against
// it. Kafka's own is a slip where it also gives the ideal, but for transactions that a
// restart or a higher high watermark has released.
func (v *txnVector) stable(want txnAnswer) int64 {
	ended, open := transactionsIn(v.l.entries())
	stable, ideal := v.l.hw, v.l.hw
	for _, txn := range open {
		stable, ideal = min(stable, txn.first), min(ideal, txn.first)
	}
	for _, txn := range ended {
		if txn.marker >= v.l.hw {
			ideal = min(ideal, txn.first)
		}
		v.released[txn.marker] = v.released[txn.marker] || txn.marker < v.l.hw
		if !v.released[txn.marker] {
			stable = min(stable, txn.first)
		}
	}
	stable, ideal = max(stable, v.l.start), max(ideal, v.l.start)
	kafka := want.figure("lso")
	if _, ok := want.tail["ideal-lso"]; ok {
		if got := want.figure("ideal-lso"); got != ideal {
			v.t.Errorf("the ideal is %d", ideal)
		}
		switch stable {
		case ideal:
			v.compared[idealStable]++
		case kafka:
			v.compared[releasedStable]++
		default:
			v.t.Errorf("the definition gives %d, which is neither Kafka's nor the ideal", stable)
		}
	} else if stable != kafka {
		v.t.Errorf("the definition gives %d", stable)
	}
	return stable
}

// append takes an entry into the log and to the follower, and to the leader unless it
// has committed it itself.
func (v *txnVector) append(l logged, committed bool, stamp int64) {
	v.l.append(ledgerEntry{l, stamp})
	v.l.end = l.end()
	v.apply(v.follower, l)
	if !committed {
		v.apply(v.leader, l)
	}
	v.tick()
}

func (v *txnVector) apply(m *ProducerStateManager, l logged) {
	v.t.Helper()
	if err := apply(m, l); err != nil {
		v.t.Errorf("replay of %+v: %v", l, err)
	}
}

// tick tells the leader the time, unless that would make it forget a producer.
func (v *txnVector) tick() {
	if v.l.mayTick() {
		v.leader.Expire(time.UnixMilli(v.l.clock))
		v.l.tick()
	}
}

// batch plays a batch. The leader's answer is held against the rules in any case.
func (v *txnVector) batch(op txnOp, want txnAnswer) {
	b := op.batch()
	got := v.judge(b)
	why := ""
	if op.verb != "plain" {
		why = v.l.whyBatch(op, want.word())
	}
	switch {
	case why != "":
		v.leave(op, why, got, want)
	case op.verb == "replicate":
		v.equal(op, fmt.Sprintf("OK %d", v.l.end), want)
	default:
		v.equal(op, got, want)
	}
	if want.word() == "OK" {
		entry := logged{batch: b, base: v.l.end}
		mayCommit := strings.HasPrefix(got, "OK") && op.verb != "replicate" && op.verb != "coordbatch"
		v.append(entry, mayCommit && v.commit(entry), op.arg("ts", v.l.clock))
	}
}

// judge returns the leader's answer to a batch, which must be that of the rules.
func (v *txnVector) judge(b Batch) string {
	res, err := v.leader.CheckBatch(b)
	got := v.describe(res, err)
	if want := v.ruling(b); got != want {
		v.t.Errorf("the leader answers %s to %+v, and the rules give %s", got, b, want)
	}
	return got
}

// describe writes down an answer as Kafka's are.
func (v *txnVector) describe(res Result, err error) string {
	switch {
	case err != nil:
		return kafkaNames.Replace(refusalName(err))
	case res.Verdict == Duplicate:
		return fmt.Sprintf("DUP %d", res.BaseOffset)
	}
	return fmt.Sprintf("OK %d", v.l.end)
}

var kafkaNames = strings.NewReplacer("STALE_EPOCH", "FENCED", "INVALID_TXN", "INVALID_TXN_STATE", "STALE_COORD", "COORDINATOR_FENCED")

// ruling answers a batch by the rules, from what the leader says it remembers.
func (v *txnVector) ruling(b Batch) string {
	p, ok := v.leader.Producer(b.ProducerID)
	if !ok {
		return fmt.Sprintf("OK %d", v.l.end)
	}
	next := int64(0)
	if b.Epoch == p.Epoch {
		for _, w := range p.Window {
			if w.FirstSequence == b.BaseSequence && int64(w.LastSequence) == (int64(b.BaseSequence)+int64(b.Count)-1)%modulus {
				return fmt.Sprintf("DUP %d", w.BaseOffset)
			}
			next = (int64(w.LastSequence) + 1) % modulus
		}
	}
	switch open := p.CurrentTxnFirstOffset >= 0; {
	case b.Epoch < p.Epoch:
		return "FENCED"
	case int64(b.BaseSequence) != next:
		return "OUT_OF_ORDER"
	case open && !b.Transactional:
		return "INVALID_TXN_STATE"
	case open && b.Epoch > p.Epoch:
		return "CONCURRENT_TXN"
	}
	return fmt.Sprintf("OK %d", v.l.end)
}

// leave leaves out a line, and asserts what can be said of it all the same.
func (v *txnVector) leave(op txnOp, why, got string, want txnAnswer) {
	v.leftOut[why]++
	allowed := true
	kafka := want.word()
	switch why {
	case newerEpochJoins:
		allowed = got == "CONCURRENT_TXN"
	case plainReplica:
		allowed = !strings.HasPrefix(got, "OK") // and so no leader has written it
	case guards: // they refuse, and change nothing in what they let pass
		allowed = kafka == "INVALID_TXN_STATE" || kafka == "OUT_OF_ORDER" || got == want.text || got == "CONCURRENT_TXN" && kafka == "OK"
	case coordBatch:
		p, known := v.leader.Producer(op.pid())
		fenced := known && op.nums[1] < int64(p.Epoch)
		outside := known && p.CurrentTxnFirstOffset >= 0 && !op.has("txn")
		allowed = fenced == (kafka == "FENCED") && (fenced || outside == (kafka == "INVALID_TXN_STATE"))
	}
	if !allowed {
		v.t.Errorf("left out for %s: it is answered %s, and by Kafka %s", why, got, want.text)
	}
}

// commit makes the leader record what it has accepted: half of it by Commit, and half
// of it by a reservation.
func (v *txnVector) commit(l logged) bool {
	var r *Reservation
	var err error
	reserved := len(v.l.log)%2 == 0
	switch {
	case l.marker == nil && reserved:
		r, _, err = v.leader.Reserve(l.batch)
	case l.marker == nil:
		err = v.leader.CommitBatch(l.batch, l.base)
	case reserved:
		r, err = v.leader.ReserveMarker(*l.marker)
	default:
		err = v.leader.CommitMarker(*l.marker, l.base)
	}
	if err == nil && reserved {
		err = r.Commit(l.base)
	}
	if err != nil {
		v.t.Errorf("commit of %+v: %v", l, err)
	}
	return true
}

// marker plays a marker.
func (v *txnVector) marker(op txnOp, want txnAnswer) {
	k := op.marker()
	got := v.judgeMarker(k)
	if op.verb == "replicate-marker" {
		v.equal(op, fmt.Sprintf("OK %d", v.l.end), want)
	} else if why := v.l.whyMarker(op); why != "" {
		v.leave(op, why, got, want)
	} else {
		v.equal(op, got, want)
	}
	if want.word() == "OK" {
		entry := logged{marker: &k, base: v.l.end}
		v.append(entry, op.verb == "marker" && strings.HasPrefix(got, "OK") && v.commit(entry), op.arg("ts", v.l.clock))
	}
}

// judgeMarker returns the leader's answer to a marker, which must be that of the rules.
func (v *txnVector) judgeMarker(k Marker) string {
	p, known := v.leader.Producer(k.ProducerID)
	open := p.CurrentTxnFirstOffset >= 0
	want := fmt.Sprintf("OK %d", v.l.end)
	switch {
	case !known:
	case k.Epoch < p.Epoch, k.Version == 2 && k.Epoch == p.Epoch && open && k.Epoch != 32767:
		want = "FENCED"
	case k.CoordinatorEpoch < p.CoordinatorEpoch:
		want = "COORDINATOR_FENCED"
	}
	got := v.describe(Result{}, v.leader.CheckMarker(k))
	if got != want {
		v.t.Errorf("the leader answers %s to %+v, and the rules give %s", got, k, want)
	}
	return got
}

// verify leaves out the asking for a guard, but compares the epoch and the transaction.
func (v *txnVector) verify(op txnOp, want txnAnswer) {
	v.leftOut[guards]++
	if a := v.l.producers[op.pid()]; a != nil && a.stray != "" {
		return
	}
	p, known := v.leader.Producer(op.pid())
	fenced := known && op.nums[1] < int64(p.Epoch)
	inside := known && op.nums[1] == int64(p.Epoch) && p.CurrentTxnFirstOffset >= 0
	if fenced != (want.text == "FENCED") || inside != (want.text == "OK guard=none") {
		v.t.Errorf("verify: fenced %t, inside the transaction %t", fenced, inside)
	}
}

func (v *txnVector) ongoing(op txnOp, want txnAnswer) {
	p, ok := v.leader.Producer(op.pid())
	v.equal(op, fmt.Sprintf("OK %t", ok && p.CurrentTxnFirstOffset >= 0 && int64(p.Epoch) == op.nums[1]), want)
}

// late compares whether the oldest open transaction hangs: the producer was idle for
// more than 20 minutes.
func (v *txnVector) late(op txnOp, want txnAnswer) {
	p, ok := v.leader.OldestTransaction()
	if a := v.l.producers[p.ProducerID]; ok && a.stamp != a.active {
		v.leftOut[expireTime]++
		return
	}
	hangs := ok && !p.LastActivity.Add(20*time.Minute).After(time.UnixMilli(op.nums[0]-1))
	v.equal(op, fmt.Sprintf("OK %t", hangs), want)
}

// expire lets both forget idle producers.
func (v *txnVector) expire(now int64) {
	v.leader.Expire(time.UnixMilli(v.l.clock))
	v.l.expire(now)
}

// producers compares how many producers are left, without those that Kafka has
// forgotten earlier.
func (v *txnVector) producers(op txnOp, want txnAnswer) {
	v.equal(op, fmt.Sprintf("OK producers=%d", v.leader.Len()-v.l.ownOnly()), want)
}

// snapshot writes one in Kafka's format, unless there is one of the log's end.
func (v *txnVector) snapshot() string {
	if v.l.newest().end == v.l.end && len(v.l.snapshots) > 0 {
		return "OK none"
	}
	v.tick()
	s := v.leader.Snapshot()
	var file bytes.Buffer
	if _, err := s.WriteKafka(&file); err != nil || s.EndOffset() != v.l.end {
		v.t.Fatalf("WriteKafka: %v, to %d", err, s.EndOffset())
	}
	v.l.snapshots = append(v.l.snapshots, ledgerSnapshot{v.l.end, v.l.producers.asWritten(v.l.ticked), file.Bytes()})
	return fmt.Sprintf("OK snapshot=%d", v.l.end)
}

// reload loses both memories. The leader comes back from a snapshot of the log's end in
// Kafka's format, the follower from its own snapshot or from the log.
func (v *txnVector) reload(op txnOp, want txnAnswer) {
	v.expire(v.l.clock)
	readFrom := slices.Max(v.l.segments)
	if op.has("clean") {
		v.snapshot()
		readFrom = v.l.end
	}
	v.l.dropStraySnapshots()
	v.l.dropSnapshots(readFrom)
	v.snapshot()
	v.leader = v.newLeader()
	v.restore(v.l.newest())
	follower := v.newFollower()
	if op.has("clean") {
		if err := follower.Restore(bytes.NewReader(written(v.t, v.follower.Snapshot()))); err != nil {
			v.t.Fatalf("Restore: %v", err)
		}
		v.follower = follower
	} else {
		v.follower = follower
		v.rebuildFollower()
	}
	ended, _ := transactionsIn(v.l.entries())
	for _, txn := range ended {
		v.released[txn.marker] = true
	}
	v.producers(op, want)
}

// restore restores the leader from a snapshot.
func (v *txnVector) restore(s ledgerSnapshot) {
	if s.bytes == nil {
		v.leader.Reset()
		v.leader.AdvanceStart(s.end)
	} else if err := v.leader.RestoreKafka(bytes.NewReader(s.bytes), s.end); err != nil {
		v.t.Fatalf("RestoreKafka: %v", err)
	}
	v.leader.AdvanceStart(v.l.start)
	v.blind = s.end
	v.l.producers = s.producers.clone()
	v.expire(v.l.clock)
}

// rebuildFollower replays the whole log, also what has been deleted since.
func (v *txnVector) rebuildFollower() {
	for _, e := range v.l.log {
		v.follower.Advance(e.base) // a batch across a cut leaves a hole
		v.apply(v.follower, e.logged)
	}
	v.follower.Advance(v.l.end)
	v.follower.AdvanceStart(v.l.start)
}

// truncate cuts the log. Kafka and the leader load the newest snapshot that is left
// and read the log behind it. The follower is rebuilt only where it must be.
func (v *txnVector) truncate(op txnOp, want txnAnswer) {
	to := op.nums[0]
	if to >= v.l.end {
		v.producers(op, want)
		return
	}
	empty := v.leader.Len() == v.l.ownOnly()
	cutsMarker := slices.ContainsFunc(v.l.log, func(e ledgerEntry) bool { return e.marker != nil && e.base >= to })
	v.l.cut(to)
	if exact := v.leader.Truncate(to); exact && cutsMarker {
		v.t.Error("the leader calls a truncation exact that has cut a marker off")
	}
	if exact := v.follower.Truncate(to); !exact {
		v.follower.Reset()
		v.rebuildFollower()
		clear(v.released)
	} else if cutsMarker {
		v.t.Error("the follower calls a truncation exact that has cut a marker off")
	}
	v.l.dropSnapshots(to)
	v.restore(v.l.newest())
	if !empty {
		v.reread()
	}
	v.leader.Advance(to)
	v.snapshot()
	v.tick()
	v.producers(op, want)
}

// reread reads the log behind the newest snapshot, and takes one at the beginning of
// each of the last two segments.
func (v *txnVector) reread() {
	from := v.l.newest().end
	end := v.l.end
	last := v.l.segments[max(0, len(v.l.segments)-2):]
	for _, e := range v.l.behind(from) {
		if slices.Contains(last, e.base) && e.base > from {
			v.l.end = e.base
			v.leader.Advance(e.base)
			v.snapshot()
		}
		v.leader.Advance(e.base)
		v.apply(v.leader, e.logged)
		v.l.producers.enter(e)
	}
	v.l.end = end
}

func (v *txnVector) deleteRecords(op txnOp, want txnAnswer) {
	got := "OK"
	if op.nums[0] > v.l.hw {
		got = "OUT_OF_RANGE"
	} else {
		v.l.start = max(v.l.start, op.nums[0])
		v.leader.AdvanceStart(v.l.start)
		v.follower.AdvanceStart(v.l.start)
	}
	v.equal(op, got, want)
}

// aborted compares what a reader must know. Kafka also tells of what lies below the
// log's start, until it deletes the segment. Where the leader was restored from Kafka's
// format, which has no aborted transactions, it must say that it does not know.
func (v *txnVector) aborted(op txnOp, want txnAnswer) {
	from, to := op.nums[0], op.nums[1]
	kafka := parseAborted(v.t, want.text)
	byDefinition := v.abortedIn(max(from, v.l.start), to)
	switch {
	case from < v.l.start:
		v.leftOut[deletedRange]++
		for _, m := range []*ProducerStateManager{v.leader, v.follower} {
			v.abortedUnknown(m, from, to)
		}
		from = v.l.start
		kafka = slices.DeleteFunc(kafka, func(a AbortedTransaction) bool { return a.LastOffset < from })
	case v.lostStarts(kafka, byDefinition):
		v.leftOut[lostStart]++
		kafka = byDefinition
	default:
		v.compared[op.verb]++
	}
	if !slices.Equal(kafka, byDefinition) {
		v.t.Errorf("Kafka tells of %v, and the definition gives %v", kafka, byDefinition)
	}
	if from < v.blind {
		v.abortedUnknown(v.leader, from, to)
	} else if got, err := v.leader.AbortedTransactions(from, to); err != nil || !slices.Equal(got, kafka) {
		v.t.Errorf("the leader tells of %v, %v", got, err)
	}
	if got, err := v.follower.AbortedTransactions(from, to); err != nil || !slices.Equal(got, kafka) {
		v.t.Errorf("the follower tells of %v, %v", got, err)
	}
}

// abortedUnknown asks for aborted transactions that are not known.
func (v *txnVector) abortedUnknown(m *ProducerStateManager, from, to int64) {
	v.t.Helper()
	if got, err := m.AbortedTransactions(from, to); !errors.Is(err, ErrAbortedUnknown) || got != nil {
		v.t.Errorf("aborted transactions that are not known: %v, %v", got, err)
	}
}

// abortedIn returns what a reader of [from, to) must know, by definition.
func (v *txnVector) abortedIn(from, to int64) (all []AbortedTransaction) {
	ended, _ := transactionsIn(v.l.entries())
	for _, txn := range ended {
		if !txn.commit && txn.marker >= from && txn.first < to {
			all = append(all, AbortedTransaction{txn.pid, txn.first, txn.marker})
		}
	}
	return all
}

// lostStarts reports whether Kafka tells of the same transactions, of which some began
// below the log's start, and takes a later batch for their first.
func (v *txnVector) lostStarts(kafka, byDefinition []AbortedTransaction) bool {
	lost := 0
	same := slices.EqualFunc(kafka, byDefinition, func(k, d AbortedTransaction) bool {
		if k.FirstOffset > d.FirstOffset && d.FirstOffset < v.l.start {
			lost++
			k.FirstOffset = d.FirstOffset
		}
		return k == d
	})
	return same && lost > 0
}

// parseAborted parses [PID:FIRST-MARKER@LSO,...]. The last stable offset is an aid to
// Kafka's search, and is not compared.
func parseAborted(t *testing.T, text string) (all []AbortedTransaction) {
	list := strings.TrimSuffix(strings.TrimPrefix(text, "OK ["), "]")
	for _, word := range strings.Split(list, ",") {
		if word == "" {
			continue
		}
		var a AbortedTransaction
		var stable int64
		if _, err := fmt.Sscanf(word, "%d:%d-%d@%d", &a.ProducerID, &a.FirstOffset, &a.LastOffset, &stable); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		all = append(all, a)
	}
	return all
}

// dump compares everything remembered, producer by producer.
func (v *txnVector) dump(op txnOp, want txnAnswer) {
	var got, kept []string
	for p := range v.leader.Producers() {
		if a := v.l.producers[p.ProducerID]; !a.gone {
			got = append(got, v.dumped(p.ProducerID, (&vector{}).describe(p)))
		}
	}
	for _, line := range want.dump {
		switch name, list, _ := strings.Cut(line, "="); name {
		case "open":
			v.open(list)
		case "snapshots":
			if got := v.snapshots(); got != list {
				v.t.Errorf("snapshots at %s, in Kafka at %s", got, list)
			}
		case "unreplicated", "verifying":
		default:
			pid, err := strconv.ParseInt(strings.Fields(line)[0], 10, 64)
			if err != nil {
				v.t.Fatalf("dump: %v", err)
			}
			kept = append(kept, v.dumped(pid, line))
		}
	}
	if g, w := strings.Join(got, "\n"), strings.Join(kept, "\n"); g != w {
		v.t.Errorf("the dump is\n%s\nand Kafka's\n%s", g, w)
	}
	v.compared[op.verb]++
}

// dumped leaves out of a line what is not the same here.
func (v *txnVector) dumped(pid int64, line string) string {
	f := strings.Fields(line)
	a := v.l.producers[pid]
	if a == nil {
		return line
	}
	if a.stamp != a.active {
		f[4] = expireTime
	}
	if a.coordinatorStray != "" {
		f[5] = a.coordinatorStray
	}
	if a.stray != "" {
		f[1], f[2], f[3], f[7] = a.stray, "", "", ""
	}
	return strings.Join(f, " ")
}

// open compares the open transactions of both.
func (v *txnVector) open(want string) {
	for name, m := range map[string]*ProducerStateManager{"leader": v.leader, "follower": v.follower} {
		var open []string
		states := slices.DeleteFunc(slices.Collect(m.Producers()), func(p ProducerState) bool { return p.CurrentTxnFirstOffset < 0 })
		slices.SortFunc(states, func(a, b ProducerState) int { return cmp.Compare(a.CurrentTxnFirstOffset, b.CurrentTxnFirstOffset) })
		for _, p := range states {
			open = append(open, fmt.Sprintf("%d@%d", p.ProducerID, p.CurrentTxnFirstOffset))
		}
		if got := "[" + strings.Join(open, ",") + "]"; got != want {
			v.t.Errorf("the %s has open %s, and Kafka %s", name, got, want)
		}
	}
}

func (v *txnVector) snapshots() string {
	var ends []string
	for _, s := range v.l.snapshots {
		ends = append(ends, fmt.Sprint(s.end))
	}
	return "[" + strings.Join(ends, ",") + "]"
}
