// Package spec is the sequential specification of the appends of one producer:
// what each call does to the state of the producer under the policy StartAtZero,
// and what it answers. It is the rules once more, one call after the other, with
// nothing shared.
package spec

import (
	"fmt"

	"github.com/anishathalye/porcupine"
)

// Window is how many committed batches are remembered, and how many may be in
// flight.
const Window = 5

// A State is everything there is to know about the producer. It is a plain value,
// so that two of them are compared with ==.
type State struct {
	known    bool
	epoch    int16
	batches  [Window]Batch // committed, oldest first
	kept     int
	queue    [Window]flight // in flight, in the order of reservation
	waiting  int
	inFlight int16 // the epoch of those
	// Reservations that have ended, one bit for each: by their own handle, or by
	// somebody else.
	settled, abandoned uint64
}

// A Batch is one that was committed: its sequences and its base offset.
type Batch struct {
	First, Count int32
	Base         int64
}

type flight struct {
	Batch
	handle    int
	committed bool
}

// A Call is one call: what it was, and its arguments.
type Call struct {
	// Method is Check, Commit, Apply, Reserve, Reservation.Commit,
	// Reservation.Abort, AbandonReservations or Producer.
	Method       string
	Epoch        int16
	First, Count int32
	Base         int64 // for Commit, Apply and Reservation.Commit
	Handle       int   // of the reservation
}

// An Answer is what a call returned.
type Answer struct {
	Verdict string // "append", "duplicate" or none
	Base    int64  // of the first copy
	Handle  int    // of the reservation
	Refused string // the reason, or none
	Seen    View
}

// A View is what can be looked at.
type View struct {
	Known    bool
	Epoch    int16
	Batches  [Window]Batch
	Kept     int
	InFlight int
}

// Model is the specification for the checker. Inputs are Calls, outputs Answers.
func Model() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return State{} },
		Step: func(s, in, out any) (bool, any) {
			got := out.(Answer)
			next, want := s.(State).Step(in.(Call), got.Handle)
			return got == want, next
		},
	}
}

// String writes a call down with the arguments that it takes.
func (c Call) String() string {
	switch c.Method {
	case "Reservation.Commit":
		return fmt.Sprintf("%s #%d base=%d", c.Method, c.Handle, c.Base)
	case "Reservation.Abort":
		return fmt.Sprintf("%s #%d", c.Method, c.Handle)
	case "AbandonReservations", "Producer":
		return c.Method
	}
	return fmt.Sprintf("%s epoch=%d seq=%d n=%d base=%d", c.Method, c.Epoch, c.First, c.Count, c.Base)
}

func (a Answer) String() string {
	switch {
	case a.Refused != "":
		return a.Refused
	case a.Verdict == "append":
		return fmt.Sprintf("append #%d", a.Handle)
	case a.Verdict == "duplicate":
		return fmt.Sprintf("duplicate base=%d", a.Base)
	case a.Seen != View{}:
		return fmt.Sprintf("epoch=%d %v, %d in flight", a.Seen.Epoch, a.Seen.Batches[:a.Seen.Kept], a.Seen.InFlight)
	}
	return "ok"
}

// Step makes a call. A reservation that it makes gets the given number.
func (s State) Step(c Call, handle int) (State, Answer) {
	switch c.Method {
	case "Check":
		return s, s.judge(c)
	case "Commit":
		return s.commit(c)
	case "Apply":
		a := s.judge(c)
		if a.Verdict == "append" {
			var committed Answer
			s, committed = s.commit(c)
			if committed.Refused != "" {
				a = committed
			}
		}
		return s, a
	case "Reserve":
		a := s.judge(c)
		if a.Verdict == "append" {
			a.Handle = handle
			s.inFlight = c.Epoch
			s.queue[s.waiting] = flight{Batch: Batch{c.First, c.Count, 0}, handle: handle}
			s.waiting++
		}
		return s, a
	case "Reservation.Commit":
		return s.settle(c)
	case "Reservation.Abort":
		return s.abort(c)
	case "AbandonReservations":
		return s.drop(0), Answer{}
	case "Producer":
		v := View{Known: s.known, Epoch: s.epoch, Batches: s.batches, Kept: s.kept, InFlight: s.waiting}
		if !s.known {
			v = View{}
		}
		return s, Answer{Seen: v}
	}
	panic("no such method: " + c.Method)
}

// judge answers a batch.
func (s State) judge(c Call) Answer {
	known, epoch, next := s.known, s.epoch, int32(0)
	if s.kept > 0 {
		next = s.batches[s.kept-1].First + s.batches[s.kept-1].Count
	}
	if s.waiting > 0 {
		newest := s.queue[s.waiting-1]
		known, epoch, next = true, s.inFlight, newest.First+newest.Count
	}
	switch {
	case !known && c.First != 0:
		return Answer{Refused: "unknown"}
	case !known:
		return Answer{Verdict: "append"}
	case c.Epoch < epoch:
		return Answer{Refused: "fenced"}
	case c.Epoch > epoch && c.First != 0:
		return Answer{Refused: "out of order"}
	case c.Epoch > epoch && s.waiting > 0:
		return Answer{Refused: "in flight"}
	case c.Epoch > epoch:
		return Answer{Verdict: "append"}
	}
	if c.Epoch == s.epoch {
		for _, b := range s.batches[:s.kept] {
			if b.First == c.First && b.Count == c.Count {
				return Answer{Verdict: "duplicate", Base: b.Base}
			}
		}
	}
	for _, f := range s.queue[:s.waiting] {
		if f.First == c.First && f.Count == c.Count {
			return Answer{Refused: "in flight"}
		}
	}
	switch {
	case c.First != next:
		return Answer{Refused: "out of order"}
	case s.waiting == Window:
		return Answer{Refused: "in flight"}
	}
	return Answer{Verdict: "append"}
}

// commit is Commit without a reservation.
func (s State) commit(c Call) (State, Answer) {
	switch a := s.judge(c); {
	case a.Refused != "":
		return s, a
	case a.Verdict == "duplicate":
		return s, Answer{Refused: "duplicate"}
	case s.waiting > 0:
		return s, Answer{Refused: "in flight"}
	case s.kept > 0 && c.Base < s.batches[s.kept-1].Base+int64(s.batches[s.kept-1].Count):
		return s, Answer{Refused: "offset"}
	}
	return s.remember(c.Epoch, Batch{c.First, c.Count, c.Base}), Answer{}
}

func (s State) remember(epoch int16, b Batch) State {
	if !s.known || epoch != s.epoch {
		s.known, s.epoch, s.kept = true, epoch, 0
		s.batches = [Window]Batch{}
	}
	if s.kept == Window {
		copy(s.batches[:], s.batches[1:])
		s.kept--
	}
	s.batches[s.kept] = b
	s.kept++
	return s
}

// place returns where a reservation is in the queue, or why it is not.
func (s State) place(handle int) (int, string) {
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
func (s State) settle(c Call) (State, Answer) {
	i, refused := s.place(c.Handle)
	if refused != "" {
		return s, Answer{Refused: refused}
	}
	if !s.fits(i, c.Base) {
		return s, Answer{Refused: "offset"}
	}
	s.settled |= 1 << c.Handle
	s.queue[i].committed, s.queue[i].Base = true, c.Base
	for s.waiting > 0 && s.queue[0].committed {
		s = s.remember(s.inFlight, s.queue[0].Batch)
		copy(s.queue[:], s.queue[1:])
		s.waiting--
		s.queue[s.waiting] = flight{}
	}
	if s.waiting == 0 {
		s.inFlight = 0
	}
	return s, Answer{}
}

// fits reports whether the batch in place i can lie at base, with room for all
// before it and behind it.
func (s State) fits(i int, base int64) bool {
	end := int64(0)
	if s.kept > 0 {
		end = s.batches[s.kept-1].Base + int64(s.batches[s.kept-1].Count)
	}
	for j, f := range s.queue[:s.waiting] {
		at := end
		switch {
		case j == i:
			at = base
		case f.committed:
			at = f.Base
		}
		if at < end {
			return false
		}
		end = at + int64(f.Count)
	}
	return true
}

func (s State) abort(c Call) (State, Answer) {
	i, refused := s.place(c.Handle)
	if refused != "" {
		return s, Answer{Refused: refused}
	}
	a := Answer{}
	for _, f := range s.queue[i:s.waiting] {
		if f.committed {
			a.Refused = "gap"
		}
	}
	s.settled |= 1 << c.Handle
	return s.drop(i), a
}

// drop ends everything in flight from place i on.
func (s State) drop(i int) State {
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
