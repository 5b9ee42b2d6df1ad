package idempotence

import (
	"math/rand/v2"

	"pgregory.net/rapid"
)

// This file makes the choices of the randomised tests.

// chooser makes the random choices: pick returns one of 0..n-1.
type chooser interface {
	pick(n int) int
}

// drawn chooses by rapid.
type drawn struct{ t *rapid.T }

func (d drawn) pick(n int) int { return rapid.IntRange(0, n-1).Draw(d.t, "pick") }

// seeded chooses by a generator of the standard library.
type seeded struct{ *rand.Rand }

func (s seeded) pick(n int) int { return s.IntN(n) }

var policies = []UnknownProducerPolicy{StartAtZero, AcceptAny, StartAtZeroOnNewLog}

// fromBytes makes the choices that a string of bytes spells: one byte a choice,
// or as many as it takes to reach n. When the bytes run out it always chooses
// the first.
type fromBytes struct{ rest []byte }

func (f *fromBytes) pick(n int) int {
	v := 0
	for reach := 1; reach < n && len(f.rest) > 0; reach <<= 8 {
		v = v<<8 | int(f.rest[0])
		f.rest = f.rest[1:]
	}
	return v % n
}
