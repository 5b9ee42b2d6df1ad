// Package history shows that a manager is linearizable: that each of its
// methods, called by many goroutines at once, takes effect in one instant
// between call and return.
//
// It has tests only. They let a few goroutines call everything there is about
// appends of one producer, with and without reservations, write down each call
// and its answer with the time of both, and ask the checker of
// [github.com/anishathalye/porcupine] for an order of the calls, one that agrees
// with the clock, in which a sequential specification gives the same answers.
// The specification is package spec: the rules once more, for one producer, one
// call after the other, with nothing shared.
//
// It is a module of its own so that the library need not depend on the checker.
package history
