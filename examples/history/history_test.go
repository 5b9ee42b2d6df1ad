package history

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/history/spec"
)

const (
	histories = 500
	clients   = 5
	calls     = 12 // of each client; a reservation has a bit in a word
	pid       = 31
	recordsOf = 1000 // offsets for each epoch
)

// recorder makes calls for one client and writes them down.
type recorder struct {
	client int
	rng    *rand.Rand
	m      *idempotence.ProducerStateManager
	shared *shared
	ops    []porcupine.Operation
}

// shared is what the clients know of each other.
type shared struct {
	start time.Time
	mu    sync.Mutex
	made  []reservation // all reservations, by number
}

type reservation struct {
	r     *idempotence.Reservation
	epoch int16
	first int32
}

// add gives a reservation its number.
func (s *shared) add(r reservation) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.made = append(s.made, r)
	return len(s.made) - 1
}

// pick returns one of the last reservations that were made.
func (s *shared) pick(rng *rand.Rand) (int, reservation, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.made)
	if n == 0 {
		return 0, reservation{}, false
	}
	i := n - 1 - rng.IntN(min(n, spec.Window+1))
	return i, s.made[i], true
}

// record makes a call and writes down when it was made and when it returned.
func (c *recorder) record(in spec.Call, do func() spec.Answer) {
	op := porcupine.Operation{ClientId: c.client, Input: in, Call: int64(time.Since(c.shared.start))}
	op.Output = do()
	op.Return = int64(time.Since(c.shared.start))
	c.ops = append(c.ops, op)
}

// next makes a call at random.
func (c *recorder) next() {
	switch n := c.rng.IntN(20); {
	case n < 8:
		c.reserve(n < 3)
	case n < 12:
		c.settle()
	case n < 14:
		c.abort()
	case n < 15:
		c.record(spec.Call{Method: "AbandonReservations"}, func() spec.Answer {
			c.m.AbandonReservations()
			return spec.Answer{}
		})
	case n < 17:
		c.look()
	case n < 18 && c.rng.IntN(2) == 0:
		c.commit()
	case n < 18:
		c.apply()
	default:
		b, in := c.batch("Check")
		c.record(in, func() spec.Answer { return answerOf(c.m.CheckBatch(b)) })
	}
}

// batch returns a batch about where the producer is.
func (c *recorder) batch(method string) (idempotence.Batch, spec.Call) {
	p, _ := c.m.Producer(pid)
	b := idempotence.Batch{ProducerID: pid, Epoch: p.Epoch, Count: int32(1 + c.rng.IntN(2))}
	if n := len(p.Window); n > 0 {
		b.BaseSequence = p.Window[n-1].LastSequence + 1
	}
	if _, r, ok := c.shared.pick(c.rng); ok && c.rng.IntN(3) > 0 {
		b.Epoch, b.BaseSequence = r.epoch, r.first+int32(c.rng.IntN(3))
	}
	if c.rng.IntN(10) == 0 {
		b.Epoch, b.BaseSequence = b.Epoch+1, 0
	}
	return b, spec.Call{Method: method, Epoch: b.Epoch, First: b.BaseSequence, Count: b.Count}
}

// baseOf is where the log has a batch. It leaves a gap between any two, and no
// two are in the same place.
func baseOf(epoch int16, first int32) int64 { return int64(epoch)*recordsOf + 2*int64(first) }

// reserve makes a reservation. One that waits is a reservation at the moment at
// which it stops waiting.
func (c *recorder) reserve(wait bool) {
	b, in := c.batch("Reserve")
	ask := c.m.Reserve
	if wait {
		ask = c.reserveWait
	}
	c.record(in, func() spec.Answer {
		r, res, err := ask(b)
		a := answerOf(res, err)
		if r != nil {
			a.Handle = c.shared.add(reservation{r, b.Epoch, b.BaseSequence})
		}
		return a
	})
}

func (c *recorder) reserveWait(b idempotence.Batch) (*idempotence.Reservation, idempotence.Result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	return c.m.ReserveWait(ctx, b)
}

func (c *recorder) settle() {
	handle, r, ok := c.shared.pick(c.rng)
	if !ok {
		return
	}
	base := baseOf(r.epoch, r.first)
	if c.rng.IntN(6) == 0 {
		base = max(0, base-4)
	}
	c.record(spec.Call{Method: "Reservation.Commit", Handle: handle, Base: base}, func() spec.Answer {
		return answerOf(idempotence.Result{}, r.r.Commit(base))
	})
}

func (c *recorder) abort() {
	if handle, r, ok := c.shared.pick(c.rng); ok {
		c.record(spec.Call{Method: "Reservation.Abort", Handle: handle}, func() spec.Answer {
			return answerOf(idempotence.Result{}, r.r.Abort())
		})
	}
}

func (c *recorder) commit() {
	b, in := c.batch("Commit")
	in.Base = baseOf(b.Epoch, b.BaseSequence)
	c.record(in, func() spec.Answer { return answerOf(idempotence.Result{}, c.m.CommitBatch(b, in.Base)) })
}

func (c *recorder) look() {
	c.record(spec.Call{Method: "Producer"}, func() spec.Answer {
		p, known := c.m.Producer(pid)
		v := spec.View{Known: known, Epoch: p.Epoch, Kept: len(p.Window), InFlight: p.InFlight}
		for i, b := range p.Window {
			v.Batches[i] = spec.Batch{First: b.FirstSequence, Count: b.LastSequence - b.FirstSequence + 1, Base: b.BaseOffset}
		}
		return spec.Answer{Seen: v}
	})
}

func (c *recorder) apply() {
	b, in := c.batch("Apply")
	in.Base = baseOf(b.Epoch, b.BaseSequence)
	c.record(in, func() spec.Answer { return answerOf(c.m.Apply(b, in.Base)) })
}

// reasons names the refusals, narrower ones before the wider ones that they are
// cases of.
var reasons = []struct {
	err  error
	name string
}{
	{idempotence.ErrDuplicateSequence, "duplicate"},
	{idempotence.ErrUnknownProducer, "unknown"},
	{idempotence.ErrOutOfOrderSequence, "out of order"},
	{idempotence.ErrFenced, "fenced"},
	{idempotence.ErrInFlight, "in flight"},
	{idempotence.ErrOffsetOrder, "offset"},
	{idempotence.ErrAbandoned, "abandoned"},
	{idempotence.ErrSettled, "settled"},
	{idempotence.ErrGap, "gap"},
}

func answerOf(res idempotence.Result, err error) spec.Answer {
	if err != nil {
		for _, r := range reasons {
			if errors.Is(err, r.err) {
				return spec.Answer{Refused: r.name}
			}
		}
		return spec.Answer{Refused: err.Error()}
	}
	switch res.Verdict {
	case idempotence.Append:
		return spec.Answer{Verdict: "append"}
	case idempotence.Duplicate:
		return spec.Answer{Verdict: "duplicate", Base: res.BaseOffset}
	}
	return spec.Answer{}
}

// recordHistory lets the clients loose on a new manager.
func recordHistory(seed uint64) []porcupine.Operation {
	m := idempotence.New(idempotence.Config{})
	s := &shared{start: time.Now()}
	all := make([]*recorder, clients)
	var wg sync.WaitGroup
	for i := range all {
		all[i] = &recorder{client: i, rng: rand.New(rand.NewPCG(seed, uint64(i))), m: m, shared: s}
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range calls {
				all[i].next()
			}
		}()
	}
	wg.Wait()
	var ops []porcupine.Operation
	for _, c := range all {
		ops = append(ops, c.ops...)
	}
	return ops
}

// TestLinearizable: every history has an order of its calls in which the
// specification gives the same answers. (The seed is that of the calls; how they
// interleave is the scheduler's doing, so a failure prints the history.)
func TestLinearizable(t *testing.T) {
	met := map[string]int{}
	for seed := range uint64(histories) {
		ops := recordHistory(seed)
		switch porcupine.CheckOperationsTimeout(spec.Model(), ops, 10*time.Second) {
		case porcupine.Illegal:
			t.Fatalf("seed %d: no order of these calls has these answers:\n%s", seed, describe(ops))
		case porcupine.Unknown:
			t.Fatalf("seed %d: the checker did not come to an end", seed)
		}
		for _, op := range ops {
			a := op.Output.(spec.Answer)
			met[op.Input.(spec.Call).Method+" "+a.Verdict+a.Refused]++
		}
	}
	for _, what := range []string{
		"Reserve append", "Reserve duplicate", "Reserve in flight", "Reserve out of order", "Reserve fenced",
		"Check in flight", "Commit in flight", "Apply append", "Apply duplicate", "Apply in flight", "Reservation.Commit ", "Reservation.Commit settled",
		"Reservation.Commit abandoned", "Reservation.Commit offset", "Reservation.Abort ", "Reservation.Abort gap",
		"AbandonReservations ", "Producer ",
	} {
		if met[what] == 0 {
			t.Errorf("%s: never met", what)
		}
	}
	t.Log(met)
}

// TestCheckerNotices: one answer that is not true, and there is no such order.
// Without this, a specification that allows everything would be green.
func TestCheckerNotices(t *testing.T) {
	lies, noticed := 0, 0
	for seed := range uint64(20) {
		ops := recordHistory(seed)
		for i := range ops {
			a := ops[i].Output.(spec.Answer)
			if a.Verdict != "duplicate" {
				continue
			}
			lies++
			a.Base++
			ops[i].Output = a
			if porcupine.CheckOperationsTimeout(spec.Model(), ops, 10*time.Second) == porcupine.Illegal {
				noticed++
			}
			break
		}
	}
	if lies == 0 || noticed != lies {
		t.Errorf("%d answers were changed, and %d of that noticed", lies, noticed)
	}
}

func describe(ops []porcupine.Operation) string {
	var b strings.Builder
	for _, op := range ops {
		fmt.Fprintf(&b, "client %d, %8d to %8d: %v -> %v\n", op.ClientId, op.Call, op.Return, op.Input, op.Output)
	}
	return b.String()
}
