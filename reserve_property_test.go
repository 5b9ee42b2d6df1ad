package idempotence

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

// This file is pipelined appends against the model of model_inflight_test.go,
// over random operations, together with the log that they are about. Batches
// are handed to the log in the order in which they are reserved; they settle in
// any order, or fail, or their outcome is never reported. After every operation
//
//  1. the manager has given the answer of the model, and is in its state;
//  2. a snapshot would end at or before every batch that is or may come to be
//     in the log and is not remembered, and at the end if there is none;
//  3. every invariant that is written beside the state holds.
//
// And at the end, when all have settled,
//
//  4. the log holds each acknowledged batch once, where it was said to be, and
//     the batches of each producer in order and without a gap;
//  5. the state is that of a rebuild from the log.

// pipeline is a manager, its model and its log.
type pipeline struct {
	*generator
	t     rapid.TB
	cfg   Config
	m     *ProducerStateManager
	model *queueModel

	log   []logged // in the order of offsets
	end   int64    // of the log, with what was handed over to it
	open  []*appending
	ended []*appending
	saved []*saved
	acked map[Batch]int64

	// forgot is set once a model that was replaced has forgotten a producer, which
	// may then have begun anew in the log.
	forgot bool
	// unread is set while the manager may take more of the log for unknown than it must.
	unread  bool
	history []string
	met     map[string]int
}

// saved is a snapshot, and the model of that moment.
type saved struct {
	bytes  []byte
	end    int64 // of the snapshot
	logEnd int64 // of the log when it was taken
	model  *queueModel
}

const pipelineTTL = 100

func newPipeline(t rapid.TB, c chooser, cfg Config) *pipeline {
	p := &pipeline{
		t: t, cfg: cfg, m: New(cfg), model: newQueueModel(cfg), acked: map[Batch]int64{}, met: map[string]int{},
	}
	p.generator = &generator{
		c: c, policy: cfg.UnknownProducer, pids: []int64{31, 32, 0, math.MaxInt64},
		known: func(pid int64) outlook { return p.model.outlook(pid) }, // the model is replaced now and then
		sent:  func(pid int64) []Batch { return p.model.sent(pid) },
	}
	p.count = p.smallCount
	return p
}

// pipelineAction is something that can happen.
type pipelineAction struct {
	name string
	do   func(*pipeline)
}

// pipelineActions is everything that can happen, the frequent things more than
// once.
var pipelineActions = []pipelineAction{
	{"next", func(p *pipeline) { p.reserve(p.next(p.pid())) }},
	{"next of all", func(p *pipeline) {
		for _, pid := range p.pids[:3] {
			p.reserve(p.next(pid))
		}
	}},
	{"many of one", func(p *pipeline) {
		for pid := p.pid(); p.c.pick(5) > 0; {
			p.reserve(p.next(pid))
		}
	}},
	{"retry", func(p *pipeline) { p.reserve(p.retry()) }},
	{"almost a retry", func(p *pipeline) { p.reserve(p.bent()) }},
	{"gap", func(p *pipeline) { p.reserve(p.gap()) }},
	{"newer epoch", func(p *pipeline) { p.reserve(p.newerEpoch()) }},
	{"older epoch", func(p *pipeline) { p.reserve(p.olderEpoch()) }},
	{"malformed", func(p *pipeline) { p.reserve(p.malformed()) }},
	{"no producer id", func(p *pipeline) {
		p.reserve(p.withoutID())
	}},
	{"commit without a reservation", (*pipeline).commitPlain},
	{"commit", (*pipeline).commit},
	{"commit many", func(p *pipeline) {
		for range p.c.pick(6) {
			p.commit()
		}
	}},
	{"commit where there is no room", (*pipeline).commitWrong},
	{"abort", (*pipeline).abort},
	{"a call too many", (*pipeline).late},
	{"abandon", (*pipeline).abandon},
	{"truncate", (*pipeline).truncate},
	{"replay", (*pipeline).replay},
	{"expire", (*pipeline).expire},
	{"snapshot", (*pipeline).snapshot},
	{"restore", (*pipeline).restore},
}

// verify is what must hold after every operation.
func (p *pipeline) verify() {
	audit(p.t, p.m)
	p.compare(p.model.state(), stateOf(p.m), "the state (-model +manager)")
	if want, got := p.model.allStats(), p.m.Stats(); want != got {
		p.fail("the counts (-model +manager):\n%s", cmp.Diff(want, got))
	}
	p.verifySnapshotEnd()
}

// unseen ignores what the models do not keep.
var unseen = cmp.Options{cmpopts.IgnoreFields(ProducerState{}, "LastActivity"), cmpopts.EquateEmpty()}

func (p *pipeline) compare(want, got observed, what string) {
	p.t.Helper()
	got.InFlight = slices.DeleteFunc(got.InFlight, func(l queueState) bool { return l.ProducerID == NoProducerID })
	if len(got.InFlight) == 0 {
		got.InFlight = nil
	}
	for i := range got.Producers {
		got.Producers[i].LastActivity = time.Time{}
	}
	if reflect.DeepEqual(want, got) {
		return // nearly always, and a diff takes much longer
	}
	if diff := cmp.Diff(want, got, unseen); diff != "" {
		p.fail("%s:\n%s", what, diff)
	}
}

// verifySnapshotEnd holds the end of a snapshot against everything that is in
// the log, or on its way there.
func (p *pipeline) verifySnapshotEnd() {
	end := p.m.Snapshot().EndOffset()
	lowest := p.model.endOffset
	for _, h := range p.open {
		if h.gone == nil {
			lowest = min(lowest, h.base)
		}
	}
	if end > lowest {
		p.fail("a snapshot ends at %d, and there may be a batch in the log at %d", end, lowest)
	}
	for _, l := range p.log {
		if l.base >= end || p.remembers(l) {
			continue
		}
		p.fail("a snapshot ends at %d, and %s is in the log at %d and not remembered", end, words(l.batch), l.base)
	}
	if len(p.open) == 0 && !p.unread && end != p.model.endOffset {
		p.fail("a snapshot ends at %d, nothing is in flight, and the end is %d", end, p.model.endOffset)
	}
}

// remembers reports whether the model has an entry of the log, or has forgotten
// it on purpose.
func (p *pipeline) remembers(l logged) bool {
	all := p.model.accepted[l.batch.ProducerID]
	return l.batch.ProducerID == NoProducerID || p.everForgot() ||
		slices.ContainsFunc(all, func(b modelBatch) bool { return b.base == l.base })
}

func (p *pipeline) note(format string, args ...any) {
	p.history = append(p.history, fmt.Sprintf(format, args...))
}

func (p *pipeline) fail(format string, args ...any) {
	p.t.Helper()
	p.t.Fatalf("%s\n%s", strings.Join(p.history, "\n"), fmt.Sprintf(format, args...))
}

// reserve checks and reserves a batch, and hands it to the log.
func (p *pipeline) reserve(b Batch) {
	p.note("reserve %s", words(b))
	want, wantErr := p.model.check(b)
	checked, checkErr := p.m.CheckBatch(b)
	p.agree(want, checked, wantErr, checkErr)
	p.model.check(b)
	r, got, err := p.m.Reserve(b)
	p.agree(want, got, wantErr, err)
	if (r != nil) != (got.Verdict == Append) {
		p.fail("%+v comes with reservation %v", got, r)
	}
	if r == nil {
		return
	}
	h := &appending{r: r, batch: b, base: p.end}
	p.note("  handed over at %d", h.base)
	p.end = h.end()
	p.open = append(p.open, h)
	p.model.reserve(h)
}

// agree holds an answer against the model's.
func (p *pipeline) agree(want, got Result, wantErr, err error) {
	p.t.Helper()
	p.met[nameOf(wantErr, want)]++
	if want != got || !sameReason(wantErr, err) {
		p.fail("the manager answers %+v, %v, and the model %+v, %v", got, err, want, wantErr)
	}
}

func nameOf(err error, res Result) string {
	if err != nil {
		return refusalName(err)
	}
	return res.Verdict.String()
}

// sameReason reports whether an error is the sentinel, and no narrower one.
func sameReason(want, got error) bool {
	if want == nil || got == nil {
		return want == nil && got == nil
	}
	return errors.Is(got, want) && refusalName(got) == refusalName(want)
}

func (p *pipeline) commitPlain() {
	b := p.next(p.pid())
	if p.c.pick(3) == 0 {
		b = p.retry()
	}
	if res, err := p.model.judge(b); err == nil && res.Verdict == Duplicate {
		return
	}
	p.note("commit %s base=%d, without a reservation", words(b), p.end)
	want, got := p.model.commitPlain(b, p.end), p.m.CommitBatch(b, p.end)
	p.agree(Result{}, Result{}, want, got)
	if got == nil {
		p.append(b, p.end)
		p.end += int64(b.Count)
	}
}

// append adds an entry to the log, in its place.
func (p *pipeline) append(b Batch, base int64) {
	i := len(p.log)
	for i > 0 && p.log[i-1].base > base {
		i--
	}
	p.log = slices.Insert(p.log, i, logged{batch: b, base: base})
}

// unsettled returns what may be committed or aborted.
func (p *pipeline) unsettled() []*appending {
	var all []*appending
	for _, h := range p.open {
		if !h.committed {
			all = append(all, h)
		}
	}
	return all
}

// tidy moves what has ended, or has landed, out of the way, and acknowledges
// what has landed.
func (p *pipeline) tidy() {
	p.open = slices.DeleteFunc(p.open, func(h *appending) bool {
		if h.gone == nil {
			return false
		}
		p.ended = append(p.ended, h)
		if h.committed && p.model.endOffset > h.base && p.visible(h) {
			p.acked[h.batch] = h.base
		}
		return true
	})
}

func (p *pipeline) visible(h *appending) bool {
	all := p.model.accepted[h.batch.ProducerID]
	return slices.ContainsFunc(all, func(b modelBatch) bool { return b.base == h.base })
}

func (p *pipeline) commit() {
	all := p.unsettled()
	if len(all) == 0 {
		return
	}
	h := all[p.c.pick(len(all))]
	p.note("commit of %s base=%d", words(h.batch), h.base)
	want, got := p.model.commit(h, h.base), h.r.Commit(h.base)
	p.agree(Result{}, Result{}, want, got)
	if got != nil {
		p.fail("the log's own offset is refused: %v", got)
	}
	p.append(h.batch, h.base)
	p.tidy()
}

// commitWrong commits a batch at an offset at which it cannot be.
func (p *pipeline) commitWrong() {
	all := p.unsettled()
	if len(all) == 0 {
		return
	}
	h := all[p.c.pick(len(all))]
	base := h.base + int64(p.c.pick(9)) - 4
	if p.c.pick(4) == 0 {
		base = math.MaxInt64 - int64(p.c.pick(3))
	}
	if base >= 0 && base <= math.MaxInt64-int64(h.batch.Count) && p.model.fits(h, base) {
		return
	}
	p.note("commit of %s base=%d, which is wrong", words(h.batch), base)
	p.model.stats.OutOfOrder++
	p.agree(Result{}, Result{}, ErrOffsetOrder, h.r.Commit(base))
}

// abort fails an append. What was reserved behind it of the same producer never
// gets into the log; what is there already must go.
func (p *pipeline) abort() {
	all := p.unsettled()
	holes := p.c.pick(3) == 0
	all = slices.DeleteFunc(all, func(h *appending) bool { return p.committedBehind(h) != holes })
	if len(all) == 0 {
		return
	}
	h := all[p.c.pick(len(all))]
	p.note("append of %s failed", words(h.batch))
	hole, want := p.model.abort(h)
	got := h.r.Abort()
	p.agree(Result{}, Result{}, want, got)
	p.tidy()
	if want == nil {
		return
	}
	var e *BatchError
	if !errors.As(got, &e) || e.NextOffset != hole {
		p.fail("the hole is before %d, and the manager says %v", hole, got)
	}
	p.cutLog(hole)
}

func (p *pipeline) committedBehind(h *appending) bool {
	return slices.ContainsFunc(p.model.queues[h.batch.ProducerID], func(o *appending) bool { return o.committed && o.base > h.base })
}

// late calls what has ended.
func (p *pipeline) late() {
	all := slices.Clone(p.ended)
	for _, h := range p.open {
		if h.committed {
			all = append(all, h)
		}
	}
	if len(all) == 0 {
		return
	}
	h := all[p.c.pick(len(all))]
	if p.c.pick(2) == 0 {
		p.note("a second commit of %s", words(h.batch))
		p.agree(Result{}, Result{}, p.model.commit(h, h.base), h.r.Commit(h.base))
		return
	}
	p.note("a late abort of %s", words(h.batch))
	_, want := p.model.abort(h)
	p.agree(Result{}, Result{}, want, h.r.Abort())
}

// settleUnheard decides what became of the appends whose outcome is never
// reported: those up to some place got into the log, and none behind it did.
// What was committed did in any case, and so what lies before it.
func (p *pipeline) settleUnheard() {
	landed := p.c.pick(len(p.open) + 1)
	for i, h := range p.open {
		if h.committed {
			landed = max(landed, i)
		}
	}
	for _, h := range p.open[:landed] {
		if !h.committed {
			p.note("  %s got there unheard", words(h.batch))
			p.append(h.batch, h.base)
		}
	}
}

// abandon is a loss of leadership that the broker gets over by itself: it reads
// what it does not know from its log.
func (p *pipeline) abandon() {
	p.note("abandon")
	p.settleUnheard()
	p.model.abandon()
	p.m.AbandonReservations()
	p.tidy()
	p.unread = true
	p.verify()
	p.read(p.m.Snapshot().EndOffset())
	p.endAtLog()
}

// read replays the log from an offset on. Where nothing lies there, the manager
// cannot tell from the next batch that what is between was read.
func (p *pipeline) read(from int64) {
	p.note("  read the log from %d", from)
	p.unread = true
	for _, l := range p.log {
		if l.end() <= from {
			continue
		}
		p.unread = p.unread && l.base > from
		p.model.replay(l.batch, l.base)
		if err := p.m.Replay(l.batch, l.base); err != nil {
			p.fail("replay of %s at %d: %v", words(l.batch), l.base, err)
		}
	}
}

// endAtLog tells the manager that there is no more of the log than it has read.
func (p *pipeline) endAtLog() {
	p.end = 0
	for _, l := range p.log {
		p.end = max(p.end, l.end())
	}
	p.model.endOffset = min(p.model.endOffset, p.end)
	p.dropSaved()
	p.unread = !p.m.Truncate(p.end)
}

func (p *pipeline) truncate() {
	p.cutLog(p.end - int64(p.c.pick(12)))
}

// cutLog cuts the log, and if the manager cannot say what is left then, restores
// it or rebuilds it. Appends in flight may have got into the log below the cut.
func (p *pipeline) cutLog(to int64) {
	to = max(to, 0)
	p.note("truncate to=%d", to)
	p.settleUnheard()
	p.model.abandon()
	p.tidy()
	p.log = slices.DeleteFunc(p.log, func(l logged) bool { return l.end() > to })
	for b, base := range p.acked {
		if base+int64(b.Count) > to {
			delete(p.acked, b)
		}
	}
	p.end = to
	p.dropSaved()
	p.model.cut(to)
	p.unread = false
	if p.m.Truncate(to) {
		p.met["exact"]++
		return
	}
	p.met["inexact"]++
	p.rebuild()
}

// dropSaved removes the snapshots of a longer log: they remember batches that
// are gone.
func (p *pipeline) dropSaved() {
	p.saved = slices.DeleteFunc(p.saved, func(s *saved) bool { return s.logEnd > p.end })
}

// rebuild starts from nothing, or from a snapshot, and reads the log.
func (p *pipeline) rebuild() {
	if len(p.saved) > 0 && p.c.pick(2) == 0 {
		p.restore()
		return
	}
	p.note("  rebuild")
	stats, maxID, now, cap := p.model.stats, p.model.maxID, p.model.now, p.model.cap
	p.replaceModel(newQueueModel(p.cfg))
	p.model.stats, p.model.maxID, p.model.now, p.model.cap = stats, maxID, now, cap
	p.m.Reset()
	p.read(0)
	p.endAtLog()
}

// replay takes a batch over from another leader. What its producer had in flight
// here is not in that leader's log.
func (p *pipeline) replay() {
	pid := p.pid()
	if slices.ContainsFunc(p.model.queues[pid], func(h *appending) bool { return h.committed }) {
		return
	}
	b := Batch{ProducerID: pid, Count: 1}
	if all := p.model.accepted[pid]; len(all) > 0 {
		newest := all[len(all)-1]
		b.Epoch, b.BaseSequence = newest.epoch, int32((newest.last()+1)%modulus)
	}
	if failedFirst, ok := p.model.failedFirst[pid]; ok {
		b = failedFirst
	}
	if q := p.model.queues[pid]; len(q) > 0 && len(p.model.accepted[pid]) == 0 {
		b = q[0].batch
	}
	p.note("replay %s base=%d", words(b), p.end)
	p.unread = true
	p.model.replay(b, p.end)
	if err := p.m.Replay(b, p.end); err != nil {
		p.fail("replay: %v", err)
	}
	p.append(b, p.end)
	p.end += int64(b.Count)
	p.tidy()
}

func (p *pipeline) expire() {
	if p.cfg.Expiration < 0 {
		return
	}
	now := max(0, p.model.now) + int64(p.c.pick(2*pipelineTTL))
	p.note("expire now=%d", now)
	if want, got := p.model.expire(now, pipelineTTL), p.m.Expire(time.UnixMilli(now)); want != got {
		p.fail("%d expired, and %d in the model", got, want)
	}
}

func (p *pipeline) snapshot() {
	var b bytes.Buffer
	s := p.m.Snapshot()
	if _, err := s.WriteTo(&b); err != nil {
		p.fail("snapshot: %v", err)
	}
	p.note("snapshot at=%d", s.EndOffset())
	p.saved = append(p.saved, &saved{b.Bytes(), s.EndOffset(), s.LogEndOffset(), p.model.copyBelow(s.LogEndOffset())})
}

// restore goes back to a snapshot and reads the log from its end. Appends in
// flight may or may not have got there.
func (p *pipeline) restore() {
	if len(p.saved) == 0 {
		return
	}
	s := p.saved[p.c.pick(len(p.saved))]
	p.note("restore at=%d", s.end)
	p.settleUnheard()
	p.model.abandon()
	p.tidy()
	stats, maxID, now := p.model.stats, p.model.maxID, p.model.now
	if err := p.m.Restore(bytes.NewReader(s.bytes)); err != nil {
		p.fail("restore: %v", err)
	}
	p.replaceModel(s.model.copyBelow(s.logEnd))
	p.model.endOffset = s.end
	p.model.stats, p.model.now = stats, max(now, p.model.now)
	p.model.maxID = max(maxID, p.model.maxID)
	p.read(s.end)
	p.endAtLog()
	p.met["restored"]++
}

// finish settles what is in flight and reads the log.
func (p *pipeline) finish() {
	for len(p.unsettled()) > 0 {
		p.commit()
		p.verify()
	}
	p.readLog()
	if p.model.forgot || p.cfg.MaxProducers > 0 {
		return // a rebuild knows the producers that were forgotten, and nothing in flight
	}
	rebuilt := New(p.cfg)
	for _, l := range p.log {
		if err := rebuilt.Replay(l.batch, l.base); err != nil {
			p.fail("replay: %v", err)
		}
	}
	if rebuilt.Stats().Evicted > 0 {
		return // what was in flight has lived on above the cap, and nothing protects it in a rebuild
	}
	want, got := stateOf(rebuilt), stateOf(p.m)
	if got.EndOffset < want.EndOffset || got.EndOffset > p.end {
		p.fail("the end is %d, of a log that ends between %d and %d", got.EndOffset, want.EndOffset, p.end)
	}
	want.EndOffset = got.EndOffset         // nothing need lie there
	want.MaxProducerID = got.MaxProducerID // of batches that were cut off as well
	p.compare(want, got, "the state (-rebuilt +lived)")
}

// replaceModel takes another model for what is remembered now. The log stays.
func (p *pipeline) replaceModel(m *queueModel) {
	p.forgot = p.forgot || p.model.forgot
	p.model = m
}

// everForgot reports whether a producer was forgotten in the course of the log.
func (p *pipeline) everForgot() bool { return p.forgot || p.model.forgot }

// readLog is the consumer.
func (p *pipeline) readLog() {
	forgot := p.everForgot()
	at := map[Batch]int64{}
	newest := map[int64]Batch{}
	end := int64(0)
	for _, l := range p.log {
		if l.base < end {
			p.fail("%s at %d overlaps what ends at %d", words(l.batch), l.base, end)
		}
		end = l.end()
		if l.batch.ProducerID == NoProducerID {
			continue
		}
		if earlier, ok := at[l.batch]; ok && !forgot {
			p.fail("%s is in the log at %d and at %d", words(l.batch), earlier, l.base)
		}
		at[l.batch] = l.base
		before, ok := newest[l.batch.ProducerID]
		newest[l.batch.ProducerID] = l.batch
		if !ok || forgot {
			continue
		}
		inOrder := l.batch.Epoch == before.Epoch && l.batch.BaseSequence == nextAfter(before)
		if !inOrder && (l.batch.Epoch <= before.Epoch || l.batch.BaseSequence != 0) {
			p.fail("%s at %d comes after %s", words(l.batch), l.base, words(before))
		}
	}
	for b, base := range p.acked {
		if got, ok := at[b]; b.ProducerID != NoProducerID && !forgot && (!ok || got != base) {
			p.fail("%s was acknowledged at %d, and is at %d (in the log: %t)", words(b), base, got, ok)
		}
	}
}

// pipelineConfigs are the policies, and one that forgets. (How long a failed
// first batch is waited for has transcripts of its own, so the one that forgets
// is not one under which that shows.)
var pipelineConfigs = []struct {
	name string
	cfg  Config
}{
	{"StartAtZero", Config{Expiration: -1}},
	{"AcceptAny", Config{UnknownProducer: AcceptAny, Expiration: -1}},
	{"StartAtZeroOnNewLog", Config{UnknownProducer: StartAtZeroOnNewLog, Expiration: -1}},
	{"forgetful", Config{Expiration: pipelineTTL * time.Millisecond, MaxProducers: 2}},
}

// TestReservationsAgainstModel: whatever happens, and in whatever order.
func TestReservationsAgainstModel(t *testing.T) {
	for _, c := range pipelineConfigs {
		t.Run(c.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				p := newPipeline(t, drawn{t}, c.cfg)
				steps := map[string]func(*rapid.T){"": func(*rapid.T) { p.verify() }}
				for _, a := range pipelineActions {
					steps[a.name] = func(*rapid.T) { a.do(p) }
				}
				t.Repeat(steps)
				p.finish()
			})
		})
	}
}

// TestPipelineReachesEverything: the random operations do come to every answer
// and every fate. Without this, a rig that always did the same would be green.
func TestPipelineReachesEverything(t *testing.T) {
	met := map[string]int{}
	for i, c := range pipelineConfigs {
		for seed := range uint64(16) {
			p := newPipeline(t, seeded{rand.New(rand.NewPCG(uint64(i), seed))}, c.cfg)
			for range 300 {
				pipelineActions[p.c.pick(len(pipelineActions))].do(p)
				p.verify()
			}
			p.finish()
			for what, n := range p.met {
				met[what] += n
			}
			met["acknowledged"] += len(p.acked)
			met["expired"] += int(p.m.Stats().Expired)
			met["evicted"] += int(p.m.Stats().Evicted)
		}
	}
	for _, what := range []string{
		"Append", "Duplicate", "OUT_OF_ORDER", "UNKNOWN_PRODUCER", "STALE_EPOCH", "INVALID", "IN_FLIGHT",
		"OFFSET_ORDER", "ABANDONED", "SETTLED", "GAP", "exact", "inexact", "restored", "acknowledged", "expired", "evicted",
	} {
		if met[what] < 5 {
			t.Errorf("%s: met %d times", what, met[what])
		}
	}
	t.Log(met)
}

// FuzzReservations lets the fuzzer choose the operations on a manager with
// reservations and on its log (the first byte is the policy). The invariants
// are those at the top of reserve_property_test.go.
func FuzzReservations(f *testing.F) {
	names := map[string]byte{}
	for i, a := range pipelineActions {
		names[a.name] = byte(i)
	}
	next, retry, commit := names["next"], names["retry"], names["commit"]
	f.Add([]byte{0})
	// Three in flight, a retry of each, settled from the last to the first.
	f.Add([]byte{0, next, 0, 0, next, 0, 1, next, 0, 2, retry, 0, 0, retry, 0, 1, retry, 0, 2, commit, 2, commit, 1, commit, 0})
	// The second fails behind the first and before the third.
	f.Add([]byte{1, next, 0, 0, 0, next, 0, 0, next, 0, 0, names["abort"], 1, 1, commit, 0, names["a call too many"], 0, 0, names["a call too many"], 0, 1})
	// The last is in the log, the first fails.
	f.Add([]byte{0, next, 0, 0, next, 0, 0, commit, 1, names["abort"], 0, 0})
	// Abandoned with the first in the log, and read again.
	f.Add([]byte{0, next, 0, 0, next, 1, 0, names["abandon"], 1, names["snapshot"], next, 0, 0, names["restore"], 0, 1})
	// Everything in turn, with bytes that differ.
	var all []byte
	for i := range 64 * byte(3) {
		all = append(all, i*37)
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, choices []byte) {
		c := &fromBytes{rest: choices}
		p := newPipeline(t, c, pipelineConfigs[c.pick(len(pipelineConfigs))].cfg)
		for len(c.rest) > 0 {
			pipelineActions[c.pick(len(pipelineActions))].do(p)
			p.verify()
		}
		p.finish()
	})
}
