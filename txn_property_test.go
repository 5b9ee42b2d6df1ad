package idempotence

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

// This file is transactions against the model of model_txn_test.go, over random
// operations on a partition: its manager, its log, and what becomes of both. After
// every operation
//
//  1. the manager has given the model's answer, and remembers what the model does;
//  2. the open transactions, the aborted ones and the last stable offset are those
//     of their definitions;
//  3. a reader that goes as far as LastStableOffset, and leaves out what
//     AbortedTransactions tells, has seen the batches of committed transactions and of
//     no transaction, and no others; what lies in the log and was not reported yet
//     counts;
//  4. the last stable offset has not fallen, unless the log was cut, the memory was
//     lost or the high watermark has fallen;
//  5. every invariant that is written beside the state holds.

// txnWorld is a partition at play.
type txnWorld struct {
	*generator
	t     rapid.TB
	cfg   Config
	m     *ProducerStateManager
	model *txnModel

	log   []logged // all that lies in it, by offset, also below its start
	end   int64
	hw    int64
	lost  []*txnAppend // abandoned, and the log not read again since
	saved []txnSaved
	now   time.Time

	stable  int64 // the last answer
	known   int64 // the end offset when an overlapping replay began, else 0
	history []string
	met     map[string]int
}

// txnSaved is a snapshot, and the model of that moment.
type txnSaved struct {
	bytes       []byte
	end, logEnd int64
	model       *txnModel
}

var txnPIDs = []int64{31, 0, math.MaxInt64, 32}

const txnTTL = time.Minute

func newTxnWorld(t rapid.TB, c chooser, cfg Config) *txnWorld {
	w := &txnWorld{t: t, cfg: cfg, m: New(cfg), model: newTxnModel(cfg), now: time.Unix(1000, 0), met: map[string]int{}}
	w.generator = &generator{
		c: c, policy: cfg.UnknownProducer, pids: txnPIDs, sent: w.sentBy,
		known: func(pid int64) outlook { return w.model.outlook(pid) }, // the model is replaced now and then
		txn: func(o outlook) bool {
			n := len(o.queue)
			return o.open || n > 0 && o.queue[n-1].Transactional || c.pick(3) > 0
		},
	}
	w.count = w.smallCount
	return w
}

// txnAction is something that can happen.
type txnAction struct {
	name string
	do   func(*txnWorld)
}

// txnActions is everything that can happen, the frequent things more than once.
var txnActions = []txnAction{
	{"next", func(w *txnWorld) { w.offer(w.next(w.pid())) }},
	{"next again", func(w *txnWorld) { w.offer(w.next(w.pid())) }},
	{"next of all", func(w *txnWorld) {
		for _, pid := range txnPIDs {
			w.offer(w.next(pid))
		}
	}},
	{"no producer id", func(w *txnWorld) {
		w.offer(w.withoutID())
	}},
	{"retry", func(w *txnWorld) { w.offer(w.flipped(w.retry())) }},
	{"bent", func(w *txnWorld) { w.offer(w.otherThanNext()) }},
	{"marker", func(w *txnWorld) { w.offerMarker(w.marker(w.pid())) }},
	{"marker again", func(w *txnWorld) { w.offerMarker(w.marker(w.pid())) }},
	{"bent marker", func(w *txnWorld) { w.offerMarker(w.bentMarker(w.pid())) }},
	{"land", (*txnWorld).land},
	{"land again", (*txnWorld).land},
	{"commit", (*txnWorld).commit},
	{"settle", func(w *txnWorld) {
		for range w.c.pick(6) {
			w.land()
			w.commit()
		}
	}},
	{"abort", (*txnWorld).abort},
	{"abandon", sometimes((*txnWorld).abandon)},
	{"read what is unknown", (*txnWorld).readUnknown},
	{"high watermark", func(w *txnWorld) { w.moveTo(w.hw + int64(w.c.pick(int(w.end-w.hw)+1))) }},
	{"high watermark to the end", func(w *txnWorld) { w.moveTo(w.end) }},
	{"high watermark back", func(w *txnWorld) { w.moveTo(w.hw - int64(w.c.pick(int(w.hw-w.model.start)+1))) }},
	{"ask for aborted", (*txnWorld).askAborted},
	{"delete", sometimes((*txnWorld).deleteFront)},
	{"truncate", sometimes((*txnWorld).truncate)},
	{"expire", sometimes((*txnWorld).expire)},
	{"snapshot", (*txnWorld).snapshot},
	{"crash", sometimes((*txnWorld).crash)},
	{"follow", (*txnWorld).follow},
	{"overlap", (*txnWorld).overlap},
}

// sometimes makes an action that takes much away a rarer one.
func sometimes(do func(*txnWorld)) func(*txnWorld) {
	return func(w *txnWorld) {
		if w.c.pick(4) == 0 {
			do(w)
		}
	}
}

func (w *txnWorld) note(format string, args ...any) {
	w.history = append(w.history, fmt.Sprintf(format, args...))
}

func (w *txnWorld) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("%s\n%s", strings.Join(w.history, "\n"), fmt.Sprintf(format, args...))
}

// judging reports whether the partition may judge: the log holds nothing that the
// manager may not know.
func (w *txnWorld) judging() bool { return len(w.lost) == 0 }

// verify is what must hold after every operation.
func (w *txnWorld) verify() {
	w.t.Helper()
	if err := auditError(w.m); err != nil {
		w.fail("the state is unsound: %v", err)
	}
	w.compareProducers()
	w.compareTransactions()
	if w.model.asked {
		w.compareStable()
	}
	w.compareSnapshot()
}

// compareProducers holds what is remembered against the model.
func (w *txnWorld) compareProducers() {
	for _, pid := range txnPIDs {
		want := w.model.producer(pid)
		got, known := w.m.Producer(pid)
		if known != want.known {
			w.fail("producer %d is known: %t, in the model %t", pid, known, want.known)
		}
		if !known {
			continue
		}
		state := ProducerState{
			ProducerID: pid, Epoch: want.epoch, CoordinatorEpoch: want.coordinator,
			CurrentTxnFirstOffset: w.model.openOf(pid), InFlight: len(w.model.queue(pid)),
		}
		for _, b := range want.window() {
			state.Window = append(state.Window, BatchMetadata{int32(b.first), int32(b.last()), b.base})
		}
		if diff := cmp.Diff(state, got, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(ProducerState{}, "LastActivity")); diff != "" {
			w.fail("producer %d (-model +manager):\n%s", pid, diff)
		}
	}
	if got := w.m.EndOffset(); got != w.model.end {
		w.fail("end offset %d, in the model %d", got, w.model.end)
	}
}

// compareTransactions holds the open and aborted transactions against the model.
func (w *txnWorld) compareTransactions() {
	_, open := transactionsIn(w.model.log)
	oldest := int64(-1)
	if len(open) > 0 {
		oldest = open[0].first
	}
	if got := oldestTransaction(w.m); got != oldest {
		w.fail("the oldest transaction begins at %d, in the model at %d", got, oldest)
	}
	want := w.model.aborted()
	got, err := w.m.AbortedTransactions(w.model.start, math.MaxInt64)
	if err != nil || !slices.Equal(got, want) || (got == nil) != (len(want) == 0) {
		w.fail("aborted: %v, %v\nin the model %v", got, err, want)
	}
	s := w.m.Stats()
	if s.OpenTransactions != len(open) || s.AbortedRanges != len(want) || s.OpenReservations != len(w.model.inFlight) || s.Markers != w.model.markers {
		w.fail("%+v\n%d open, %d aborted, %d in flight, %d markers", s, len(open), len(want), len(w.model.inFlight), w.model.markers)
	}
}

// compareStable asks for the last stable offset and reads up to there. What was
// abandoned holds it back until the log has been read.
func (w *txnWorld) compareStable() {
	before := w.stable
	want := w.model.stable(w.hw)
	w.stable = w.m.LastStableOffset(w.hw)
	if len(w.lost) == 0 && w.stable != want || w.stable > want {
		w.fail("last stable offset %d at high watermark %d, in the model %d", w.stable, w.hw, want)
	}
	for _, a := range w.lost {
		if a.marker == nil && a.batch.Transactional {
			want = min(want, max(a.floor, w.model.start))
		}
	}
	if w.stable < want {
		w.fail("last stable offset %d at high watermark %d, want at least %d", w.stable, w.hw, want)
	}
	if w.stable < before {
		w.fail("last stable offset %d, and it was %d", w.stable, before)
	}
	w.read(w.model.start, w.stable)
}

// read reads committed records.
func (w *txnWorld) read(from, to int64) {
	if from >= to {
		return
	}
	aborted, err := w.m.AbortedTransactions(from, to)
	if err != nil {
		w.fail("aborted from %d to %d: %v", from, to, err)
	}
	var want []int64
	fate := fates(w.log)
	for _, l := range w.log {
		if l.end() <= from || l.base >= to || l.marker != nil {
			continue
		}
		switch fate[l.base] {
		case "open":
			w.fail("the batch at %d is of an open transaction, and the last stable offset is %d", l.base, to)
		case "", "committed":
			want = append(want, l.base)
		}
	}
	if got := readCommitted(w.log, from, to, aborted); !slices.Equal(got, want) {
		w.fail("a reader of [%d, %d) sees the batches at %v, want %v; aborted are %v", from, to, got, want, aborted)
	}
}

// compareSnapshot: a replay from a snapshot's end would meet all that the manager does
// not know.
func (w *txnWorld) compareSnapshot() {
	end := w.m.Snapshot().EndOffset()
	for _, a := range slices.Concat(w.model.inFlight, w.lost) {
		if a.base != noOffset && a.base < end {
			w.fail("a snapshot would end at %d, and %s is not known", end, a.text())
		}
	}
}

// sentBy returns the batches of a producer in the log, and those in flight.
func (w *txnWorld) sentBy(pid int64) (sent []Batch) {
	for _, l := range w.log {
		if l.marker == nil && l.pid() == pid {
			sent = append(sent, l.batch)
		}
	}
	for _, a := range w.model.queue(pid) {
		if a.marker == nil {
			sent = append(sent, a.batch)
		}
	}
	return sent
}

// flipped returns a batch, now and then with the other transactional bit.
func (w *txnWorld) flipped(b Batch) Batch {
	b.Transactional = b.Transactional != (w.c.pick(4) == 0)
	return b
}

// otherThanNext returns a batch that is not the next one.
func (w *txnWorld) otherThanNext() Batch {
	b := w.next(w.pid())
	switch w.c.pick(6) {
	case 0, 1:
		b.Transactional = !b.Transactional
	case 2: // a gap
		b.BaseSequence = moved(b.BaseSequence, int32(1+w.c.pick(3)))
	case 3:
		b.Epoch, b.BaseSequence = min(b.Epoch, math.MaxInt16-1)+1, int32(max(w.c.pick(4)-2, 0))
		b.Transactional = w.c.pick(4) > 0
	case 4:
		b.Epoch = b.Epoch - 1
	default:
		b.Count = 0
	}
	return b
}

// marker returns a marker that a coordinator should send.
func (w *txnWorld) marker(pid int64) Marker {
	p := w.model.producer(pid)
	k := Marker{ProducerID: pid, Epoch: p.epoch, CoordinatorEpoch: max(p.coordinator, 0) + int32(w.c.pick(2)), Commit: w.c.pick(2) == 0, Version: int8(w.c.pick(3))}
	if k.Version == 2 && p.epoch < math.MaxInt16 {
		k.Epoch++
	}
	return k
}

// bentMarker returns a marker that is stale, too new or malformed.
func (w *txnWorld) bentMarker(pid int64) Marker {
	k, p := w.marker(pid), w.model.producer(pid)
	switch w.c.pick(6) {
	case 0:
		k.Epoch = max(p.epoch-1, 0)
	case 1:
		k.Epoch = min(k.Epoch, math.MaxInt16-1) + 1
	case 2, 3:
		k.CoordinatorEpoch = max(p.coordinator-1, 0)
	case 4:
		k.CoordinatorEpoch++
	default:
		k.CoordinatorEpoch = -1
	}
	return k
}

// agree compares an answer.
func (w *txnWorld) agree(what string, want, got error) {
	w.t.Helper()
	if (want == nil) != (got == nil) || want != nil && !errors.Is(got, want) {
		w.fail("%s: %v, in the model %v", what, got, want)
	}
}

// offer judges a batch. An accepted one is committed at once or takes its place.
func (w *txnWorld) offer(b Batch) {
	if !w.judging() {
		return
	}
	want, wantErr := w.model.judge(b)
	got, err := w.m.CheckBatch(b)
	w.note("batch %s txn=%t -> %v %v", words(b), b.Transactional, want, wantErr)
	w.agree("check", wantErr, err)
	if got != want {
		w.fail("check: %+v, in the model %+v", got, want)
	}
	w.met[fmt.Sprintf("%v %v", want.Verdict, wantErr)]++
	if len(w.model.queue(b.ProducerID)) == 0 && w.c.pick(2) == 0 {
		w.commitNow(b, want, wantErr)
		return
	}
	floor := w.model.end
	r, res, err := w.m.Reserve(b)
	w.agree("reserve", wantErr, err)
	if res != want || (r != nil) != (want.Verdict == Append) {
		w.fail("reserve: %+v, in the model %+v", res, want)
	}
	if r != nil {
		w.model.inFlight = append(w.model.inFlight, &txnAppend{logged: logged{batch: b, base: noOffset}, floor: floor, r: r})
	}
}

// commitNow appends and commits a batch, or has it refused again.
func (w *txnWorld) commitNow(b Batch, want Result, wantErr error) {
	if want.Verdict == Duplicate {
		wantErr = ErrDuplicateSequence
	}
	base := w.nextOffset()
	w.agree("commit", wantErr, w.m.CommitBatch(b, base))
	if wantErr == nil {
		w.note("  committed at %d", base)
		w.append(logged{batch: b, base: base})
		w.model.tell(logged{batch: b, base: base})
		w.noteForgotten()
	}
}

// nextOffset returns where the log continues. It may leave a hole.
func (w *txnWorld) nextOffset() int64 {
	if w.cfg.Contiguous {
		return w.end
	}
	return w.end + int64(max(w.c.pick(8)-5, 0))
}

func (w *txnWorld) append(l logged) {
	w.log = append(w.log, l)
	w.end = l.end()
}

// offerMarker judges a marker. An accepted one is committed at once or takes its place.
func (w *txnWorld) offerMarker(k Marker) {
	if !w.judging() {
		return
	}
	want := w.model.judgeMarker(k)
	w.note("%s -> %v", logged{marker: &k, base: -1}.text(), want)
	w.agree("check marker", want, w.m.CheckMarker(k))
	w.met[fmt.Sprintf("marker %v", want)]++
	floor := w.model.end
	if w.c.pick(2) == 0 {
		r, err := w.m.ReserveMarker(k)
		w.agree("reserve marker", want, err)
		if err == nil {
			w.model.inFlight = append(w.model.inFlight, &txnAppend{logged: logged{marker: &k, base: noOffset}, floor: floor, r: r})
		}
		return
	}
	base := w.nextOffset()
	w.agree("commit marker", want, w.m.CommitMarker(k, base))
	if want == nil {
		w.note("  committed at %d", base)
		w.append(logged{marker: &k, base: base})
		w.model.tell(logged{marker: &k, base: base})
		w.model.markers++
		w.noteForgotten()
	}
}

// land puts something that is in flight into the log. What a producer reserves lands in
// that order.
func (w *txnWorld) land() {
	if len(w.lost) > 0 {
		w.landOne(w.lost)
	} else {
		w.landOne(w.model.inFlight)
	}
}

func (w *txnWorld) landOne(all []*txnAppend) {
	var first []*txnAppend
	behind := map[int64]bool{}
	for _, a := range all {
		if a.base == noOffset && !behind[a.pid()] {
			first = append(first, a)
			behind[a.pid()] = true
		}
	}
	if len(first) == 0 {
		return
	}
	a := first[w.c.pick(len(first))]
	a.base = w.nextOffset()
	w.append(a.logged)
	w.note("landed: %s", a.text())
}

// commit reports that something in flight is in the log, in any order.
func (w *txnWorld) commit() {
	var landed []*txnAppend
	for _, a := range w.model.inFlight {
		if a.base != noOffset && !a.committed {
			landed = append(landed, a)
		}
	}
	if len(landed) == 0 {
		return
	}
	a := landed[w.c.pick(len(landed))]
	w.note("commit: %s", a.text())
	if err := a.r.Commit(a.base); err != nil {
		w.fail("commit: %v", err)
	}
	a.committed = true
	w.model.end = max(w.model.end, a.logged.end())
	if a.marker != nil {
		w.model.markers++
	}
	w.model.settle()
	w.noteForgotten()
}

// abort reports that something in flight has failed, and with it all behind it.
func (w *txnWorld) abort() {
	var failed []*txnAppend
	for _, a := range w.model.inFlight {
		if a.base == noOffset {
			failed = append(failed, a)
		}
	}
	if len(failed) == 0 {
		return
	}
	a := failed[w.c.pick(len(failed))]
	w.note("abort: %s", a.text())
	if err := a.r.Abort(); err != nil {
		w.fail("abort: %v", err)
	}
	later := false
	w.model.inFlight = slices.DeleteFunc(w.model.inFlight, func(b *txnAppend) bool {
		later = later || b == a
		if !later || b != a && (b.pid() != a.pid() || a.pid() == NoProducerID) {
			return false
		}
		if err := b.r.Commit(w.end); b != a && !errors.Is(err, ErrAbandoned) {
			w.fail("commit behind an abort: %v", err)
		}
		return true
	})
}

// abandon gives up leadership. What is in flight may be in the log, or get there.
func (w *txnWorld) abandon() {
	w.note("abandon")
	w.m.AbandonReservations()
	w.lost = append(w.lost, w.model.inFlight...)
	w.model.inFlight = nil
	if len(w.lost) == 0 {
		return
	}
	w.met["abandoned"]++
}

// readUnknown reads the log again from where a snapshot would end.
func (w *txnWorld) readUnknown() {
	if len(w.lost) == 0 {
		return
	}
	from := w.m.Snapshot().EndOffset()
	w.note("read the log from %d", from)
	w.lost = nil
	w.model.readFrom, w.known = from, w.model.end
	w.replay(from)
	w.model.readFrom, w.known = math.MaxInt64, 0
	w.m.ReplayedTo(w.end)
	w.model.end = max(w.model.end, w.end)
}

// replay tells the manager of the log from an offset on.
func (w *txnWorld) replay(from int64) {
	for _, l := range w.log {
		if l.end() <= from {
			continue
		}
		w.note("  replay %s", l.text())
		if err := apply(w.m, l); err != nil {
			w.fail("replay of %s: %v", l.text(), err)
		}
		w.model.tell(l)
		w.noteForgotten()
		if l.base < w.known && w.model.asked && !w.everForgot() {
			w.compareFall()
		}
	}
}

// compareFall: to be told again of what is known does not take the last stable offset
// back, not even in between. (A producer that was forgotten, and is met again, may.)
func (w *txnWorld) compareFall() {
	if got := w.m.LastStableOffset(w.hw); got < w.stable {
		w.fail("last stable offset %d, and it was %d", got, w.stable)
	}
}

func (w *txnWorld) everForgot() bool {
	return slices.ContainsFunc(w.model.told, func(e txnEvent) bool { return e.forgot })
}

func (w *txnWorld) moveTo(hw int64) {
	w.note("hw %d", hw)
	if hw < w.hw {
		w.stable = 0
	}
	w.hw = hw
	w.compareStable()
}

// askAborted asks for a part of the log.
func (w *txnWorld) askAborted() {
	from := int64(w.c.pick(int(w.end) + 2))
	to := from + int64(w.c.pick(int(w.end)+2))
	got, err := w.m.AbortedTransactions(from, to)
	if from < w.model.start {
		if !errors.Is(err, ErrAbortedUnknown) || got != nil {
			w.fail("aborted from %d to %d, below the start %d: %v, %v", from, to, w.model.start, got, err)
		}
		return
	}
	want := abortedIn(w.model.log, from, to)
	if err != nil || !slices.Equal(got, want) || (got == nil) != (len(want) == 0) {
		w.fail("aborted from %d to %d: %v, %v\nin the model %v", from, to, got, err, want)
	}
	if w.model.asked && from < w.stable {
		w.read(from, min(to, w.stable))
	}
}

// deleteFront deletes records up to the high watermark.
func (w *txnWorld) deleteFront() {
	start := int64(w.c.pick(int(w.hw) + 1))
	w.note("delete up to %d", start)
	w.m.AdvanceStart(start)
	w.model.start, w.model.end = max(w.model.start, start), max(w.model.end, start)
}

// truncate cuts the log, mostly near its end. What was in flight and is not in the log
// never gets there.
func (w *txnWorld) truncate() {
	to := w.end - int64(w.c.pick(int(min(w.end-w.model.start, 12))+1))
	for _, l := range w.log {
		if w.cfg.Contiguous && l.base < to && to < l.end() {
			to = max(l.base, w.model.start)
		}
	}
	if slices.ContainsFunc(w.log, func(l logged) bool { return w.cfg.Contiguous && l.base < to && to < l.end() }) {
		return
	}
	w.note("truncate %d", to)
	marker := slices.ContainsFunc(w.model.log, func(l logged) bool { return l.marker != nil && l.base >= to })
	w.cutLog(to)
	exact := w.m.Truncate(to)
	unknown := false
	for _, a := range slices.Concat(w.model.inFlight, w.lost) {
		unknown = unknown || a.base != noOffset && a.logged.end() <= to
	}
	w.lost, w.model.inFlight = nil, nil
	w.stable = 0
	w.met[fmt.Sprintf("truncate exact=%t", exact)]++
	switch {
	case exact && to > 0 && (marker || unknown):
		w.fail("the truncation is called exact: marker cut off %t, something unknown in the log %t", marker, unknown)
	case exact && to > 0 && w.model.toldAgain():
		w.m.Reset()
		w.rebuild(w.m)
	case exact:
		w.model.cut(to)
		if to == 0 {
			w.model.told, w.model.end, w.model.start = nil, 0, 0
		}
	case w.c.pick(2) == 0 && len(w.saved) > 0:
		w.restore()
	case w.c.pick(2) == 0:
		w.rebuild(New(w.cfg))
	default:
		w.m.Reset()
		w.rebuild(w.m)
	}
}

// cutLog cuts the log alone.
func (w *txnWorld) cutLog(to int64) {
	w.log = slices.DeleteFunc(w.log, func(l logged) bool { return l.end() > to })
	w.end, w.hw = to, min(w.hw, to)
	w.saved = slices.DeleteFunc(w.saved, func(s txnSaved) bool { return s.logEnd > to })
}

// rebuild reads the whole log into an empty manager: another one, or the same.
func (w *txnWorld) rebuild(m *ProducerStateManager) {
	w.note("rebuild")
	n := newTxnModel(w.cfg)
	if m == w.m {
		n.asked, n.markers = w.model.asked, w.model.markers
	}
	start := w.model.start
	w.m, w.model = m, n
	w.replay(0)
	w.finishRecovery(start)
	w.met["rebuilt"]++
}

// restore takes a snapshot and reads the log from its end, or from below.
func (w *txnWorld) restore() {
	s := w.saved[w.c.pick(len(w.saved))]
	start := w.model.start
	w.m, w.model = restored(w.t, w.cfg, s.bytes), s.model.copy()
	from := max(0, s.end-int64(w.c.pick(3))*3)
	w.note("restore from %d, end %d, and read from %d", s.end, s.logEnd, from)
	for _, l := range w.log {
		if w.cfg.Contiguous && l.base < from && from < l.end() {
			from = l.base
		}
	}
	w.model.readFrom = s.end
	w.replay(from)
	w.model.readFrom = math.MaxInt64
	w.finishRecovery(start)
	w.met["restored"]++
}

func (w *txnWorld) finishRecovery(start int64) {
	w.m.Advance(w.end)
	w.m.AdvanceStart(start)
	w.model.start = max(w.model.start, start)
	w.model.end = w.end
	w.lost, w.stable = nil, 0
}

func (w *txnWorld) expire() {
	if w.cfg.Expiration < 0 {
		return
	}
	w.note("expire the idle")
	var idle []int64
	for _, pid := range txnPIDs {
		if w.model.producer(pid).known && w.model.openOf(pid) < 0 && len(w.model.queue(pid)) == 0 {
			idle = append(idle, pid)
		}
	}
	expired := 0
	for range 2 {
		w.now = w.now.Add(txnTTL)
		expired += w.m.Expire(w.now)
	}
	if expired != len(idle) {
		w.fail("%d expired, in the model %v", expired, idle)
	}
	for _, pid := range idle {
		w.model.forget(pid)
	}
	w.met["expired"] += expired
}

// noteForgotten notes whom the cap has forgotten. It must not be a producer with an open
// transaction, or with something in flight.
func (w *txnWorld) noteForgotten() {
	if w.cfg.MaxProducers == 0 {
		return
	}
	for _, pid := range txnPIDs {
		if _, ok := w.m.Producer(pid); ok || !w.model.producer(pid).known {
			continue
		}
		if w.model.openOf(pid) >= 0 || len(w.model.queue(pid)) > 0 {
			w.fail("producer %d was forgotten, with a transaction open from %d and %d in flight", pid, w.model.openOf(pid), len(w.model.queue(pid)))
		}
		w.model.forget(pid)
		w.met["evicted"]++
	}
}

func (w *txnWorld) snapshot() {
	s := w.m.Snapshot()
	w.note("snapshot end=%d log end=%d", s.EndOffset(), s.LogEndOffset())
	w.saved = append(w.saved, txnSaved{written(w.t, s), s.EndOffset(), s.LogEndOffset(), w.model.copy()})
}

// crash loses the memory, what is not in the log yet, and perhaps the log's tail above
// the high watermark.
func (w *txnWorld) crash() {
	if tail := int(w.end - w.hw); tail > 0 && w.c.pick(2) == 0 {
		to := w.end - int64(w.c.pick(tail+1))
		for _, l := range w.log {
			if l.base < to && to < l.end() {
				to = l.base
				if to < w.hw {
					to = l.end()
				}
				break
			}
		}
		w.note("crash, and the log ends at %d", to)
		w.cutLog(to)
	} else {
		w.note("crash")
	}
	w.model.inFlight = nil
	if len(w.saved) > 0 && w.c.pick(3) > 0 {
		w.restore()
	} else {
		w.rebuild(New(w.cfg))
	}
}

// follow takes an entry over from another leader, who may have had any epoch.
func (w *txnWorld) follow() {
	if !w.judging() || len(w.model.inFlight) > 0 {
		return
	}
	l := logged{base: w.nextOffset()}
	if w.c.pick(3) == 0 {
		k := w.bentMarker(w.pid())
		l.marker = &k
	} else {
		l.batch = w.next(w.pid())
		l.batch.Epoch = max(0, min(l.batch.Epoch, math.MaxInt16-1)+int16(w.c.pick(3))-1)
		l.batch.BaseSequence = moved(l.batch.BaseSequence, int32(w.c.pick(2)))
		l.batch.Transactional = w.c.pick(3) > 0
	}
	w.note("follow %s", l.text())
	if err := apply(w.m, l); err != nil {
		w.fail("replay of %s: %v", l.text(), err)
	}
	w.append(l)
	w.model.tell(l)
	w.noteForgotten()
}

// overlap replays what is known.
func (w *txnWorld) overlap() {
	if !w.judging() || len(w.model.inFlight) > 0 {
		return
	}
	from := w.end - int64(w.c.pick(int(w.end)+1))
	w.note("overlap from %d", from)
	w.known = w.model.end
	w.replay(from)
	w.known = 0
}

// finish settles everything.
func (w *txnWorld) finish() {
	w.readUnknown()
	for len(w.model.inFlight) > 0 {
		w.landOne(w.model.inFlight)
		w.commit()
		w.verify()
	}
	w.moveTo(w.end)
	w.verify()
}

// txnConfigs are holes or none in the log, and producers that are forgotten.
var txnConfigs = []struct {
	name string
	cfg  Config
}{
	{"contiguous", Config{Contiguous: true, Expiration: txnTTL}},
	{"with holes", Config{Expiration: txnTTL}},
	{"capped", Config{Contiguous: true, Expiration: -1, MaxProducers: 2}},
}

// TestTransactionsAgainstModel: whatever happens, and in whatever order.
func TestTransactionsAgainstModel(t *testing.T) {
	for _, c := range txnConfigs {
		t.Run(c.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				w := newTxnWorld(t, drawn{t}, c.cfg)
				steps := map[string]func(*rapid.T){"": func(*rapid.T) { w.verify() }}
				for _, a := range txnActions {
					steps[a.name] = func(*rapid.T) { a.do(w) }
				}
				t.Repeat(steps)
				w.finish()
			})
		})
	}
}

// TestTxnWorldReachesEverything: the random operations do come to every answer.
func TestTxnWorldReachesEverything(t *testing.T) {
	met := map[string]int{}
	for i, c := range txnConfigs {
		for seed := range uint64(8) {
			w := newTxnWorld(t, seeded{rand.New(rand.NewPCG(uint64(i), seed))}, c.cfg)
			for range 250 {
				txnActions[w.c.pick(len(txnActions))].do(w)
				w.verify()
			}
			w.finish()
			for what, n := range w.met {
				met[what] += n
			}
		}
	}
	for _, what := range []string{
		"Append <nil>", "Duplicate <nil>", "none " + ErrInFlight.Error(), "none " + ErrInvalidTxnState.Error(),
		"none " + ErrConcurrentTransactions.Error(), "none " + ErrFenced.Error(), "none " + ErrOutOfOrderSequence.Error(),
		"none " + ErrUnknownProducer.Error(), "none " + ErrInvalidBatch.Error(), "marker <nil>", "marker " + ErrInFlight.Error(),
		"marker " + ErrFenced.Error(), "marker " + ErrCoordinatorFenced.Error(), "marker " + ErrInvalidBatch.Error(),
		"abandoned", "evicted", "expired", "rebuilt", "restored", "truncate exact=true", "truncate exact=false",
	} {
		if met[what] < 5 {
			t.Errorf("%s: met %d times, of %v", what, met[what], met)
		}
	}
}

// FuzzTransactions lets the fuzzer choose the operations on a partition with
// transactions (the first byte is the Config, and then each operation takes as many as it
// asks for). The invariants, after every operation, are those at the top of
// txn_property_test.go.
func FuzzTransactions(f *testing.F) {
	names := map[string]byte{}
	for i, a := range txnActions {
		names[a.name] = byte(i)
	}
	next, marker, land, commit := names["next"], names["marker"], names["land"], names["commit"]
	hw := names["high watermark to the end"]
	f.Add([]byte{0})
	// A transaction of two batches, in flight one behind the other, and its marker.
	f.Add([]byte{0, next, 0, 1, 1, 1, next, 0, 1, 1, land, 0, land, 0, hw, commit, 1, commit, 0, hw, marker, 0, 1, 0, 0, 1, hw})
	// An abandoned one, read again.
	f.Add([]byte{1, next, 0, 1, 1, 1, land, 0, 0, names["abandon"], 0, hw, names["read what is unknown"], marker, 0, 1, 1, 2, hw})
	// A snapshot with something in flight, an end behind it, and a crash.
	f.Add([]byte{0, next, 0, 0, 1, 0, next, 1, 0, 0, 1, marker, 0, 1, 0, 0, 0, names["snapshot"], names["expire"], 0, land, 0, names["crash"], 0, 0, 1, hw})
	// Everything in turn, with bytes that differ.
	var all []byte
	for i := range 64 * byte(3) {
		all = append(all, i*37)
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, choices []byte) {
		c := &fromBytes{rest: choices}
		w := newTxnWorld(t, c, txnConfigs[c.pick(len(txnConfigs))].cfg)
		for steps := 0; len(c.rest) > 0 && steps < 200; steps++ {
			txnActions[c.pick(len(txnActions))].do(w)
			w.verify()
		}
		w.finish()
	})
}

// TestEndedQueueAgainstList: the lowest first offset of those whose marker the high
// watermark has not passed.
func TestEndedQueueAgainstList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q endedQueue
		var all []endedTxn
		hw := int64(0)
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				if err := auditEnded(&transactions{ended: q, watermark: hw}); err != nil {
					t.Fatal(err)
				}
				want := int64(math.MaxInt64)
				for _, e := range all {
					want = min(want, e.first)
				}
				if len(q) > 0 != (len(all) > 0) || len(q) > 0 && q[0].first != want {
					t.Fatalf("%+v, want %d of %+v", q, want, all)
				}
			},
			"add": func(t *rapid.T) {
				marker := hw + int64(rapid.IntRange(0, 20).Draw(t, "marker"))
				if marker == 0 {
					return
				}
				e := endedTxn{int64(rapid.IntRange(0, int(marker)-1).Draw(t, "first")), marker}
				q.add(e.first, e.marker)
				all = append(all, e)
			},
			"release": func(t *rapid.T) {
				hw += int64(rapid.IntRange(0, 6).Draw(t, "step"))
				q.release(hw)
				all = slices.DeleteFunc(all, func(e endedTxn) bool { return e.marker < hw })
			},
			"truncate": func(t *rapid.T) {
				to := hw + int64(rapid.IntRange(0, 20).Draw(t, "to"))
				q.truncate(to)
				for _, e := range q {
					if e.marker >= to || !slices.Contains(all, e) {
						t.Fatalf("%+v is left of a log that ends at %d", e, to)
					}
				}
				all = slices.Clone([]endedTxn(q)) // the rest comes back with a rebuild
			},
		})
	})
}
