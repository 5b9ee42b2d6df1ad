// Package lesson shows how a broker judges batches, step by step, with a manager
// of its own.
//
// A lesson is the list of its steps. Nothing is kept between two calls of [Play]:
// it plays all steps from the beginning, since a manager that is given the same
// calls comes to the same state. So there is no limit on readers, nothing to
// clean up, and a lesson can be bookmarked.
package lesson

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/idempotence-go/idempotence"
)

// MaxSteps is how many steps a lesson may have.
const MaxSteps = 100

// Producer is the id of the producer in a lesson.
const Producer = 31

// The steps, beside those of the form EPOCH.SEQUENCE.COUNT, which send that
// batch.
const (
	NextBatch = "next"      // the producer sends its next batch
	Same      = "same"      // it sends its last batch again
	Gap       = "gap"       // a batch before this one is missing
	NewEpoch  = "new-epoch" // a new instance of the producer takes over
	OldEpoch  = "old-epoch" // the instance before it sends its next batch
	Wrap      = "wrap"      // a batch over the end of the sequence numbers
	Cut       = "cut"       // the connection is cut before the answer
	Hold      = "hold"      // the append takes long
	Finish    = "finish"    // the appends that take long end
	Restart   = "restart"   // the broker restarts, with a snapshot
	Expire    = "expire"    // the producer is idle for a day
)

// WorkedTrace is a short lesson that meets most of the rules.
var WorkedTrace = []string{"0.0.3", "0.3.2", "0.3.2", "0.7.1", "1.7.1", "1.0.1", "0.5.1"}

// Shown is what one step has shown.
type Shown struct {
	Step    string   `json:"step"`
	Title   string   `json:"title"`
	Answer  *Answer  `json:"answer"` // nil if no batch was sent
	Rule    *Rule    `json:"rule"`   // by which the batch was judged, or nil
	Words   string   `json:"words"`  // what happened besides
	Changed []string `json:"changed"`
	State   State    `json:"state"` // after it
}

// State is what the broker remembers of the lesson's producer.
type State struct {
	Known    bool        `json:"known"`
	Epoch    int16       `json:"epoch"`
	Window   []BatchSlot `json:"window"` // oldest first
	Next     int32       `json:"next"`   // sequence expected of the current epoch, but for what is in flight
	InFlight int         `json:"inFlight"`
	End      int64       `json:"end"`
	CanOld   bool        `json:"canOld"` // there was an instance before the current one
}

// A BatchSlot is one remembered batch.
type BatchSlot struct {
	First int32 `json:"first"`
	Last  int32 `json:"last"`
	Base  int64 `json:"base"`
}

// WindowOf returns the window of a producer for the page, and the sequence that
// follows it.
func WindowOf(p idempotence.ProducerState) (slots []BatchSlot, next int32) {
	slots = make([]BatchSlot, len(p.Window)) // not null
	for i, b := range p.Window {
		slots[i] = BatchSlot{b.FirstSequence, b.LastSequence, b.BaseOffset}
		next = Next(b.LastSequence)
	}
	return slots, next
}

// Play plays the steps from the beginning and returns what each has shown. An
// error is of a step that there is not, or of one that cannot be played now.
func Play(steps []string) ([]Shown, error) {
	if len(steps) > MaxSteps {
		return nil, fmt.Errorf("lesson: %d steps, at most %d", len(steps), MaxSteps)
	}
	p := newPlayer()
	shown := make([]Shown, 0, len(steps))
	for _, step := range steps {
		s, err := p.play(step)
		if err != nil {
			return nil, fmt.Errorf("lesson: %w", err)
		}
		shown = append(shown, s)
	}
	return shown, nil
}

// A player is a broker's partition and the producer that sends to it.
type player struct {
	producers *idempotence.ProducerStateManager
	logEnd    int64 // with what is in flight
	now       time.Time
	held      []heldAppend

	// The producer's side. old is the instance before the current one.
	current, old instance
	hasOld       bool
	lastSent     idempotence.Batch // with Count 0 before the first
}

// An instance is one run of the producer, with an epoch of its own.
type instance struct {
	epoch int16
	next  int32 // sequence
}

// A heldAppend is an append that takes long.
type heldAppend struct {
	batch       idempotence.Batch
	reservation *idempotence.Reservation
	offset      int64
}

func newPlayer() *player {
	return &player{
		producers: idempotence.New(managerConfig),
		now:       time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC),
	}
}

var managerConfig = idempotence.Config{Contiguous: true}

// play plays one step.
func (p *player) play(step string) (Shown, error) {
	before := p.state()
	s, err := p.act(step)
	if err != nil {
		return Shown{}, err
	}
	s.Step = step
	s.State = p.state()
	s.Changed = append(changes(before, s.State), s.Changed...)
	return s, nil
}

func (p *player) act(step string) (Shown, error) {
	switch step {
	case NextBatch:
		return p.send("The next batch", p.nextBatch(), false)
	case Same:
		if p.lastSent.Count == 0 {
			return Shown{}, fmt.Errorf("no batch was sent yet")
		}
		return p.send("The same batch again", p.lastSent, false)
	case Gap:
		b := p.nextBatch()
		b.BaseSequence, b.Count = Next(Next(b.BaseSequence)), 1
		return p.send("A batch after a gap", b, false)
	case NewEpoch:
		b := idempotence.Batch{ProducerID: Producer, Epoch: p.current.epoch + 1, Count: 1}
		return p.send("The first batch of a new instance", b, false)
	case OldEpoch:
		if !p.hasOld {
			return Shown{}, fmt.Errorf("no instance was replaced yet")
		}
		b := idempotence.Batch{ProducerID: Producer, Epoch: p.old.epoch, BaseSequence: p.old.next, Count: 1}
		return p.send("A batch of the instance that was replaced", b, false)
	case Wrap:
		return p.wrap()
	case Cut:
		return p.cut()
	case Hold:
		return p.send("A batch whose append takes long", p.nextBatch(), true)
	case Finish:
		return p.finish()
	case Restart:
		return p.restart()
	case Expire:
		return p.expire(), nil
	}
	b, err := parseBatch(step)
	if err != nil {
		return Shown{}, err
	}
	return p.send(p.titleOf(b), b, false)
}

// parseBatch reads a step of the form EPOCH.SEQUENCE.COUNT.
func parseBatch(step string) (idempotence.Batch, error) {
	b := idempotence.Batch{ProducerID: Producer}
	fields := strings.Split(step, ".")
	if len(fields) != 3 {
		return b, fmt.Errorf("no step %q", step)
	}
	var n [3]int64
	for i, bits := range []int{16, 32, 16} {
		var err error
		if n[i], err = strconv.ParseInt(fields[i], 10, bits); err != nil || n[i] < 0 {
			return b, fmt.Errorf("no step %q", step)
		}
	}
	b.Epoch, b.BaseSequence, b.Count = int16(n[0]), int32(n[1]), int32(n[2])
	return b, nil
}

func (p *player) titleOf(b idempotence.Batch) string {
	switch {
	case b == p.lastSent:
		return "The same batch again"
	case b.Epoch > p.current.epoch:
		return "A batch of a new instance"
	case b.Epoch < p.current.epoch:
		return "A batch of the instance that was replaced"
	case b.BaseSequence == p.current.next:
		return "The next batch"
	}
	return "A batch that is not the next one"
}

func (p *player) nextBatch() idempotence.Batch {
	return idempotence.Batch{ProducerID: Producer, Epoch: p.current.epoch, BaseSequence: p.current.next, Count: 2}
}

// send sends a batch. With hold its append does not end yet, and nor does that of
// a batch behind one that has not ended.
func (p *player) send(title string, b idempotence.Batch, hold bool) (Shown, error) {
	p.lastSent = b
	before, known := p.committedOrInFlight()
	reservation, res, err := p.producers.Reserve(b)
	if reservation != nil {
		res.BaseOffset = p.logEnd
		p.sent(b)
		p.held = append(p.held, heldAppend{b, reservation, p.logEnd})
		p.logEnd += int64(b.Count)
	}
	s := Shown{Title: title, Rule: ruleOf(b, res, err, before, known)}
	answer := Explain(b, res, err, idempotence.KafkaErrorCode(err))
	s.Answer = &answer
	switch {
	case reservation == nil:
	case hold || len(p.held) > 1:
		s.Answer.Words = fmt.Sprintf("Judged, and given its place at offset %d. The append has not ended, so there is no answer yet.", res.BaseOffset)
		s.Answer.Label = "Append begun"
	default:
		return s, p.commitHeld()
	}
	return s, nil
}

// sent moves the producer's side on by a batch that was not refused.
func (p *player) sent(b idempotence.Batch) {
	if b.Epoch > p.current.epoch {
		p.old, p.hasOld = p.current, true
		p.current.epoch = b.Epoch
	}
	p.current.next = Next(lastOf(b))
}

// committedOrInFlight returns the epoch by which the next batch is judged, and
// whether the producer is known at all.
func (p *player) committedOrInFlight() (epoch int16, known bool) {
	if n := len(p.held); n > 0 {
		return p.held[n-1].batch.Epoch, true
	}
	state, known := p.producers.Producer(Producer)
	return state.Epoch, known
}

func (p *player) commitHeld() error {
	for _, h := range p.held {
		if err := h.reservation.Commit(h.offset); err != nil {
			return err
		}
	}
	p.held = nil
	return nil
}

func (p *player) finish() (Shown, error) {
	s := Shown{Title: "The append ends", Words: "Nothing was in flight."}
	if n := len(p.held); n > 0 {
		s.Words = fmt.Sprintf("%s committed and answered. From now on a copy is a duplicate.",
			isAre(int32(n), "1 batch is", fmt.Sprint(n, " batches are")))
	}
	return s, p.commitHeld()
}

// cut has the next batch appended, and its answer lost.
func (p *player) cut() (Shown, error) {
	s, err := p.send("The connection is cut before the answer", p.nextBatch(), false)
	if err != nil || s.Answer.Kind != Append {
		return s, err
	}
	s.Words = "The batch was appended, but its producer does not hear of it. It cannot know whether the batch is in the log, " +
		"so it sends the same batch again. That is what the rules are for."
	return s, nil
}

// beforeWrap is the last sequence of the batch before the one over the wrap.
const beforeWrap = 2147483645

// wrap has the log hold a batch that ends at beforeWrap, and sends the next one,
// which crosses the end.
func (p *player) wrap() (Shown, error) {
	if err := p.commitHeld(); err != nil {
		return Shown{}, err
	}
	const count = 5
	epoch := p.current.epoch
	if state, known := p.producers.Producer(Producer); known {
		epoch = max(epoch, state.Epoch)
	}
	long := idempotence.Batch{ProducerID: Producer, Epoch: epoch, BaseSequence: beforeWrap - count + 1, Count: count}
	if end := int64(long.BaseSequence); p.logEnd < end {
		p.logEnd = end // all that the producer has sent until then
		p.producers.Advance(p.logEnd)
	}
	if err := p.producers.Replay(long, p.logEnd); err != nil {
		return Shown{}, err
	}
	p.logEnd += count
	p.current = instance{epoch, Next(beforeWrap)}
	b := p.nextBatch()
	b.Count = 4
	s, err := p.send("A batch over the wrap", b, false)
	s.Words = fmt.Sprintf("First the lesson skips ahead: the producer has sent everything up to sequence %d. "+
		"After 2147483647 comes 0, so this batch of %d records ends at sequence %d.", beforeWrap, b.Count, lastOf(b))
	return s, err
}

// restart has the broker load a snapshot of its state. What was in flight is not
// in the log, so the producer sends it again.
func (p *player) restart() (Shown, error) {
	snapshot := p.producers.Snapshot()
	var file bytes.Buffer
	if _, err := snapshot.WriteTo(&file); err != nil {
		return Shown{}, err
	}
	size := file.Len()
	restarted := idempotence.New(managerConfig)
	if err := restarted.Restore(&file); err != nil {
		return Shown{}, err
	}
	p.producers = restarted
	p.logEnd = restarted.EndOffset()
	s := Shown{Title: "The broker restarts"}
	s.Words = fmt.Sprintf("The state was saved as a snapshot of %d bytes. A new manager has loaded it, and goes on as the old one would have.", size)
	if len(p.held) > 0 {
		first := p.held[0].batch
		p.current = instance{first.Epoch, first.BaseSequence}
		p.lastSent = first
		p.held = nil
		s.Words += " What was in flight is not in the log. Its producer got no answer, and sends it again."
	}
	return s, nil
}

// expire lets more than a day pass.
func (p *player) expire() Shown {
	p.producers.Expire(p.now) // counts what was sent as activity of now
	p.now = p.now.Add(idempotence.DefaultExpiration + time.Hour)
	s := Shown{Title: "A day passes", Words: "No producer was idle for a day, so none is forgotten."}
	switch n := p.producers.Expire(p.now); {
	case n > 0:
		s.Words = "The producer was idle for more than 24 hours, so it is forgotten. Its records stay in the log."
	case len(p.held) > 0:
		s.Words = "A producer with an append in flight is not forgotten, however long it takes."
	case p.producers.Len() == 0:
		s.Words = "No producer is known, so none is forgotten."
	}
	return s
}

func (p *player) state() State {
	state, known := p.producers.Producer(Producer)
	window, next := WindowOf(state)
	inFlight := len(p.held)
	return State{Known: known, Epoch: state.Epoch, Window: window, Next: next, InFlight: inFlight,
		End: p.producers.EndOffset(), CanOld: p.hasOld}
}

// changes returns the differences between two states.
func changes(before, after State) []string {
	c := []string{} // not null
	change := func(format string, args ...any) { c = append(c, fmt.Sprintf(format, args...)) }
	switch {
	case !before.Known && after.Known:
		change("The producer is known, in epoch %d.", after.Epoch)
	case before.Known && !after.Known:
		change("The producer is unknown, and its window is gone.")
		return c
	case before.Epoch != after.Epoch:
		change("Epoch: %d, then %d. The batches of the older epoch are forgotten.", before.Epoch, after.Epoch)
	}
	for _, b := range after.Window {
		if !slices.Contains(before.Window, b) {
			change("Sequences %d to %d at offset %d enter the window.", b.First, b.Last, b.Base)
		}
	}
	if before.Epoch == after.Epoch {
		for _, b := range before.Window {
			if !slices.Contains(after.Window, b) {
				change("Sequences %d to %d, the oldest, leave it.", b.First, b.Last)
			}
		}
	}
	if before.End != after.End {
		change("End offset: %d, then %d.", before.End, after.End)
	}
	if before.InFlight != after.InFlight {
		change("In flight: %d, then %d.", before.InFlight, after.InFlight)
	}
	return c
}
