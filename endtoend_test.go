package idempotence

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// This file is the promise as a producer sees it. Model clients with five
// batches in flight talk to a model broker over a network that loses,
// duplicates, delays and reorders requests and replies; appends fail, the broker
// restarts, and a client that gives up on a batch starts a new epoch. Whatever
// happens, in the log
//
//  1. each record that was acknowledged is there exactly once,
//  2. at the offset that the client was told, the same one every time,
//  3. no record is there twice, acknowledged or not,
//  4. the records of a client are in the order in which it sent them,
//  5. and once the network is well again, every client gets on to its end.

// errAppendFailed is what the broker answers when its log has not taken a batch.
var errAppendFailed = errors.New("append failed")

// record is a client's n-th.
type record struct{ client, n int }

type request struct {
	client  int
	batch   Batch
	records []record
}

type reply struct {
	client     int
	batch      Batch
	baseOffset int64
	err        error
}

// world is the clients, the network and the broker.
type world struct {
	t        rapid.TB
	c        chooser
	clients  []*client
	requests []request // under way
	replies  []reply   // under way
	part     *partition
	log      []record
	told     map[Batch]int64 // the offset that each acknowledged batch was said to have
	met      map[string]int  // how often each thing has happened
}

// client is a producer as Kafka's clients are: a batch keeps its sequence until
// it is acknowledged, and none is sent that is five or more after the oldest
// unacknowledged one.
type client struct {
	id         int
	epoch      int16
	nextSeq    int32
	nextRecord int
	inFlight   []*outgoing // from the oldest unacknowledged one on
	acked      map[record]int64
}

// outgoing is a batch that was sent.
type outgoing struct {
	request request
	acked   bool
}

func newWorld(t rapid.TB, c chooser, clients int) *world {
	w := &world{t: t, c: c, part: newPartition(Config{}), told: map[Batch]int64{}, met: map[string]int{}}
	for id := range clients {
		w.clients = append(w.clients, &client{id: id, acked: map[record]int64{}})
	}
	return w
}

// happenings is what can happen, the frequent things more than once.
var happenings = []func(*world){
	(*world).sendNew, (*world).sendNew, (*world).sendNew,
	(*world).deliverRequest, (*world).deliverRequest, (*world).deliverRequest, (*world).deliverRequest,
	(*world).deliverReply, (*world).deliverReply, (*world).deliverReply,
	(*world).resend, (*world).resend,
	(*world).loseRequest, (*world).duplicateRequest,
	(*world).loseReply, (*world).duplicateReply,
	(*world).giveUp, (*world).restart,
}

// run lets things happen, then heals the network and reads the log.
func (w *world) run(steps int) {
	for range steps {
		happenings[w.c.pick(len(happenings))](w)
		audit(w.t, w.part.m)
	}
	w.heal()
	w.readLog()
}

func (w *world) sendNew() {
	c := w.clients[w.c.pick(len(w.clients))]
	if len(c.inFlight) == WindowSize {
		return
	}
	n := 1 + w.c.pick(3)
	r := request{client: c.id, batch: Batch{ProducerID: int64(c.id), Epoch: c.epoch, BaseSequence: c.nextSeq, Count: int32(n)}}
	for range n {
		r.records = append(r.records, record{c.id, c.nextRecord})
		c.nextRecord++
	}
	c.nextSeq += int32(n)
	c.inFlight = append(c.inFlight, &outgoing{request: r})
	w.requests = append(w.requests, r)
}

// resend sends an unacknowledged batch again, as after a timeout.
func (w *world) resend() {
	c := w.clients[w.c.pick(len(w.clients))]
	if len(c.inFlight) == 0 {
		return
	}
	if o := c.inFlight[w.c.pick(len(c.inFlight))]; !o.acked {
		w.requests = append(w.requests, o.request)
	}
}

// giveUp drops everything unacknowledged, whatever may have become of it, and
// goes on in a new epoch. Copies of it are still under way.
func (w *world) giveUp() {
	c := w.clients[w.c.pick(len(w.clients))]
	if len(c.inFlight) == 0 || w.c.pick(3) > 0 {
		return
	}
	w.met["given up"]++
	c.inFlight = nil
	c.epoch++
	c.nextSeq = 0
}

func (w *world) deliverRequest() {
	if r, ok := takeAny(w.c, &w.requests); ok {
		w.replies = append(w.replies, w.handle(r))
	}
}

func (w *world) deliverReply() {
	if r, ok := takeAny(w.c, &w.replies); ok {
		w.clients[r.client].receive(w, r)
	}
}

func (w *world) loseRequest() { takeAny(w.c, &w.requests) }
func (w *world) loseReply()   { takeAny(w.c, &w.replies) }

func (w *world) duplicateRequest() {
	if len(w.requests) > 0 {
		w.requests = append(w.requests, w.requests[w.c.pick(len(w.requests))])
	}
}

func (w *world) duplicateReply() {
	if len(w.replies) > 0 {
		w.replies = append(w.replies, w.replies[w.c.pick(len(w.replies))])
	}
}

// takeAny takes one of a list, in any order.
func takeAny[T any](c chooser, list *[]T) (T, bool) {
	var none T
	if len(*list) == 0 {
		return none, false
	}
	i := c.pick(len(*list))
	taken := (*list)[i]
	*list = slices.Delete(*list, i, i+1)
	return taken, true
}

// restart crashes the broker. Its memory is rebuilt from the log.
func (w *world) restart() {
	if w.c.pick(4) > 0 {
		return
	}
	w.met["restarted"]++
	w.part.m = New(w.part.cfg)
	for _, l := range w.part.log {
		if err := apply(w.part.m, l); err != nil {
			w.t.Fatalf("replay of %+v: %v", l, err)
		}
	}
}

// handle is the broker: check, append, commit, answer.
func (w *world) handle(r request) reply {
	rep := reply{client: r.client, batch: r.batch}
	res, err := w.part.check(r.batch)
	switch {
	case err != nil:
		w.met[refusalName(err)]++
		rep.err = err
		return rep
	case res.Verdict == Duplicate:
		w.met["duplicate"]++
		rep.baseOffset = res.BaseOffset
	case w.c.pick(8) == 7:
		w.met["append failed"]++
		rep.err = errAppendFailed
		return rep
	default:
		rep.baseOffset = int64(len(w.log))
		w.log = append(w.log, r.records...)
		if err := w.part.commit(r.batch, rep.baseOffset); err != nil {
			w.t.Fatalf("Commit of what was checked under one lock: %v", err)
		}
	}
	if told, ok := w.told[r.batch]; ok && told != rep.baseOffset {
		w.t.Fatalf("%+v was said to be at %d, and now at %d", r.batch, told, rep.baseOffset)
	}
	w.told[r.batch] = rep.baseOffset
	return rep
}

// receive takes a reply. What is not of the current epoch, or was acknowledged
// before, is ignored; what was refused is sent again in time.
func (c *client) receive(w *world, r reply) {
	i := slices.IndexFunc(c.inFlight, func(o *outgoing) bool { return o.request.batch == r.batch && !o.acked })
	switch {
	case i < 0:
		w.met["late reply"]++
		return
	case errors.Is(r.err, ErrFenced):
		w.t.Fatalf("client %d is fenced in its own epoch %d: %v", c.id, c.epoch, r.err)
	case r.err != nil:
		return
	}
	o := c.inFlight[i]
	o.acked = true
	for n, rec := range o.request.records {
		c.acked[rec] = r.baseOffset + int64(n)
	}
	for len(c.inFlight) > 0 && c.inFlight[0].acked {
		c.inFlight = c.inFlight[1:]
	}
}

// heal delivers what is under way, and then lets every client resend what it
// has, in order and without faults. A client that is not done after two rounds
// will never be: the appends that fail are over as well.
func (w *world) heal() {
	for len(w.requests)+len(w.replies) > 0 {
		w.deliverRequest()
		w.deliverReply()
	}
	calm := chooser(first{})
	w.c = calm
	for range 2 {
		for _, c := range w.clients {
			for _, o := range slices.Clone(c.inFlight) {
				c.receive(w, w.handle(o.request))
			}
		}
	}
	for _, c := range w.clients {
		if len(c.inFlight) > 0 {
			w.t.Fatalf("client %d is stuck on %+v", c.id, c.inFlight[0].request.batch)
		}
	}
}

// first always chooses the first.
type first struct{}

func (first) pick(int) int { return 0 }

// readLog is the consumer.
func (w *world) readLog() {
	at := map[record]int64{}
	newest := map[int]int{}
	for offset, rec := range w.log {
		if earlier, twice := at[rec]; twice {
			w.t.Fatalf("record %+v is at %d and at %d", rec, earlier, offset)
		}
		at[rec] = int64(offset)
		if n, ok := newest[rec.client]; ok && rec.n <= n {
			w.t.Fatalf("record %+v at %d comes after record %d", rec, offset, n)
		}
		newest[rec.client] = rec.n
	}
	for _, c := range w.clients {
		for rec, told := range c.acked {
			if offset, ok := at[rec]; !ok || offset != told {
				w.t.Fatalf("record %+v was acknowledged at %d, and is at %d (in the log: %t)", rec, told, offset, ok)
			}
		}
		w.met["acknowledged"] += len(c.acked)
	}
}

// TestExactlyOnce is the promise.
func TestExactlyOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		newWorld(t, drawn{t}, 2).run(rapid.IntRange(0, 200).Draw(t, "steps"))
	})
}

// TestExactlyOnceLong is the promise over long runs, and sees to it that each
// kind of fault does happen and is met by the answer it should have.
func TestExactlyOnceLong(t *testing.T) {
	met := map[string]int{}
	for seed := range uint64(20) {
		w := newWorld(t, seeded{rand.New(rand.NewPCG(seed, 7))}, 3)
		w.run(2000)
		for what, n := range w.met {
			met[what] += n
		}
	}
	for _, what := range []string{
		"acknowledged", "duplicate", "OUT_OF_ORDER", "UNKNOWN_PRODUCER", "STALE_EPOCH",
		"append failed", "given up", "late reply", "restarted",
	} {
		if met[what] < 20 {
			t.Errorf("%s: happened %d times", what, met[what])
		}
	}
	t.Log(met)
}
