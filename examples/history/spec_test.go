package history

import (
	"fmt"

	"github.com/anishathalye/porcupine"
)

// This file is the sequential specification: what each call does to the state of
// one producer under the policy StartAtZero, and what it answers. States are
// plain values, so that two of them are compared with ==.

// window is how many committed batches are remembered, and how many may be in
// flight.
const window = 5

// state is everything there is to know about the producer.
type state struct {
	known    bool
	epoch    int16
	batches  [window]batch // committed, oldest first
	kept     int
	queue    [window]flight // in flight, in the order of reservation
	waiting  int
	inFlight int16 // the epoch of those
	// Reservations that have ended, one bit for each: by their own handle, or by
	// somebody else.
	settled, abandoned uint64
}

type batch struct {
	first, count int32
	base         int64
}

type flight struct {
	batch
	handle    int
	committed bool
}

// call is one call: what it was, and its arguments.
type call struct {
	method       string
	epoch        int16
	first, count int32
	base         int64
	handle       int
}

// answer is what a call returned.
type answer struct {
	verdict string // "append", "duplicate" or none
	base    int64
	handle  int    // of the reservation
	refused string // the reason, or none
	seen    view
}

// view is what can be looked at.
type view struct {
	known    bool
	epoch    int16
	batches  [window]batch
	kept     int
	inFlight int
}

func specification() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return state{} },
		Step: func(s, in, out any) (bool, any) {
			got := out.(answer)
			next, want := s.(state).step(in.(call), got.handle)
			return got == want, next
		},
	}
}

// String writes a call down with the arguments that it takes.
func (c call) String() string {
	switch c.method {
	case "Reservation.Commit":
		return fmt.Sprintf("%s #%d base=%d", c.method, c.handle, c.base)
	case "Reservation.Abort":
		return fmt.Sprintf("%s #%d", c.method, c.handle)
	case "AbandonReservations", "Producer":
		return c.method
	}
	return fmt.Sprintf("%s epoch=%d seq=%d n=%d base=%d", c.method, c.epoch, c.first, c.count, c.base)
}

func (a answer) String() string {
	switch {
	case a.refused != "":
		return a.refused
	case a.verdict == "append":
		return fmt.Sprintf("append #%d", a.handle)
	case a.verdict == "duplicate":
		return fmt.Sprintf("duplicate base=%d", a.base)
	case a.seen != view{}:
		return fmt.Sprintf("epoch=%d %v, %d in flight", a.seen.epoch, a.seen.batches[:a.seen.kept], a.seen.inFlight)
	}
	return "ok"
}

// step makes a call. A reservation that it makes gets the given number.
func (s state) step(c call, handle int) (state, answer) {
	switch c.method {
	case "Check":
		return s, s.judge(c)
	case "Commit":
		return s.commit(c)
	case "Reserve":
		a := s.judge(c)
		if a.verdict == "append" {
			a.handle = handle
			s.inFlight = c.epoch
			s.queue[s.waiting] = flight{batch: batch{c.first, c.count, 0}, handle: handle}
			s.waiting++
		}
		return s, a
	case "Reservation.Commit":
		return s.settle(c)
	case "Reservation.Abort":
		return s.abort(c)
	case "AbandonReservations":
		return s.drop(0), answer{}
	case "Producer":
		v := view{known: s.known, epoch: s.epoch, batches: s.batches, kept: s.kept, inFlight: s.waiting}
		if !s.known {
			v = view{}
		}
		return s, answer{seen: v}
	}
	panic("no such method: " + c.method)
}

// judge answers a batch.
func (s state) judge(c call) answer {
	known, epoch, next := s.known, s.epoch, int32(0)
	if s.kept > 0 {
		next = s.batches[s.kept-1].first + s.batches[s.kept-1].count
	}
	if s.waiting > 0 {
		newest := s.queue[s.waiting-1]
		known, epoch, next = true, s.inFlight, newest.first+newest.count
	}
	switch {
	case !known && c.first != 0:
		return answer{refused: "unknown"}
	case !known:
		return answer{verdict: "append"}
	case c.epoch < epoch:
		return answer{refused: "fenced"}
	case c.epoch > epoch && c.first != 0:
		return answer{refused: "out of order"}
	case c.epoch > epoch && s.waiting > 0:
		return answer{refused: "in flight"}
	case c.epoch > epoch:
		return answer{verdict: "append"}
	}
	if c.epoch == s.epoch {
		for _, b := range s.batches[:s.kept] {
			if b.first == c.first && b.count == c.count {
				return answer{verdict: "duplicate", base: b.base}
			}
		}
	}
	for _, f := range s.queue[:s.waiting] {
		if f.first == c.first && f.count == c.count {
			return answer{refused: "in flight"}
		}
	}
	switch {
	case c.first != next:
		return answer{refused: "out of order"}
	case s.waiting == window:
		return answer{refused: "in flight"}
	}
	return answer{verdict: "append"}
}

// commit is Commit without a reservation.
func (s state) commit(c call) (state, answer) {
	switch a := s.judge(c); {
	case a.refused != "":
		return s, a
	case a.verdict == "duplicate":
		return s, answer{refused: "duplicate"}
	case s.waiting > 0:
		return s, answer{refused: "in flight"}
	case s.kept > 0 && c.base < s.batches[s.kept-1].base+int64(s.batches[s.kept-1].count):
		return s, answer{refused: "offset"}
	}
	return s.remember(c.epoch, batch{c.first, c.count, c.base}), answer{}
}

func (s state) remember(epoch int16, b batch) state {
	if !s.known || epoch != s.epoch {
		s.known, s.epoch, s.kept = true, epoch, 0
		s.batches = [window]batch{}
	}
	if s.kept == window {
		copy(s.batches[:], s.batches[1:])
		s.kept--
	}
	s.batches[s.kept] = b
	s.kept++
	return s
}

// place returns where a reservation is in the queue, or why it is not.
func (s state) place(handle int) (int, string) {
	bit := uint64(1) << handle
	switch {
	case s.settled&bit != 0:
		return 0, "settled"
	case s.abandoned&bit != 0:
		return 0, "abandoned"
	}
	for i, f := range s.queue[:s.waiting] {
		if f.handle == handle {
			return i, ""
		}
	}
	return 0, "nobody has it"
}

// settle is the Commit of a reservation.
func (s state) settle(c call) (state, answer) {
	i, refused := s.place(c.handle)
	if refused != "" {
		return s, answer{refused: refused}
	}
	if !s.fits(i, c.base) {
		return s, answer{refused: "offset"}
	}
	s.settled |= 1 << c.handle
	s.queue[i].committed, s.queue[i].base = true, c.base
	for s.waiting > 0 && s.queue[0].committed {
		s = s.remember(s.inFlight, s.queue[0].batch)
		copy(s.queue[:], s.queue[1:])
		s.waiting--
		s.queue[s.waiting] = flight{}
	}
	if s.waiting == 0 {
		s.inFlight = 0
	}
	return s, answer{}
}

// fits reports whether the batch in place i can lie at base, with room for all
// before it and behind it.
func (s state) fits(i int, base int64) bool {
	end := int64(0)
	if s.kept > 0 {
		end = s.batches[s.kept-1].base + int64(s.batches[s.kept-1].count)
	}
	for j, f := range s.queue[:s.waiting] {
		at := end
		switch {
		case j == i:
			at = base
		case f.committed:
			at = f.base
		}
		if at < end {
			return false
		}
		end = at + int64(f.count)
	}
	return true
}

func (s state) abort(c call) (state, answer) {
	i, refused := s.place(c.handle)
	if refused != "" {
		return s, answer{refused: refused}
	}
	a := answer{}
	for _, f := range s.queue[i:s.waiting] {
		if f.committed {
			a.refused = "gap"
		}
	}
	s.settled |= 1 << c.handle
	return s.drop(i), a
}

// drop ends everything in flight from place i on.
func (s state) drop(i int) state {
	for j := i; j < s.waiting; j++ {
		s.abandoned |= 1 << s.queue[j].handle
		s.queue[j] = flight{}
	}
	s.abandoned &^= s.settled
	if s.waiting = i; i == 0 {
		s.inFlight = 0
	}
	return s
}
