package idempotence

import "testing"

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

// FuzzManager lets the fuzzer choose the operations on a manager (the first
// byte is the policy, and then each operation takes as many as it asks for).
// The invariants, after every operation:
//
//  1. Nothing panics, whatever the batch, the offset and the order of calls.
//  2. The manager gives the answer of the model, refusals included, and the
//     sequence that a refusal names as expected is accepted.
//  3. The manager is in the state of the model: producers, epochs, windows, end
//     offset, highest producer id, counts. So a refusal, a duplicate and a Check
//     have changed nothing.
//  4. Every invariant that is written beside the state holds (audit).
func FuzzManager(f *testing.F) {
	names := map[string]byte{}
	for i, a := range actions {
		names[a.name] = byte(i)
	}
	next, retry, bent := names["next batch"], names["retry"], names["almost a retry"]
	f.Add([]byte{0})
	// Batches of one producer, then retries of each, then what was bent.
	f.Add([]byte{0, next, 0, 0, 0, 7, next, 0, 0, 1, 7, next, 0, 0, 2, 7, retry, 0, 0, 3, retry, 0, 1, 3, bent, 0, 1, 0, 0, 3})
	// A start about the wrap, and counts that end there.
	f.Add([]byte{1, next, 0, 1, 0, 5, 8, 2, 7, next, 0, 9, 0, 7, retry, 0, 1, 7, next, 0, 9, 1, 7, retry, 0, 2, 7})
	// Epochs up and down, with failed appends between.
	f.Add([]byte{2, next, 0, 0, 0, 7, names["newer epoch"], 0, 0, 0, 0, 0, 1, 0, names["newer epoch"], 0, 0, 0, 0, 0, 1, 7, names["older epoch"], 0, 0, 0, 7})
	// Everything in turn, with bytes that differ.
	var all []byte
	for i := range 64 * byte(3) {
		all = append(all, i*37)
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, choices []byte) {
		c := &fromBytes{rest: choices}
		r := newRig(t, c, Config{UnknownProducer: policies[c.pick(len(policies))]})
		for len(c.rest) > 0 {
			actions[c.pick(len(actions))].do(r)
			r.verify()
		}
	})
}
