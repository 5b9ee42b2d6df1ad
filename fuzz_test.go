package idempotence

import "testing"

// fromBytes makes the choices that a string of bytes spells: one byte a choice,
// or as many as it takes to reach n. When the bytes run out it always chooses
// the first.
type fromBytes struct{ rest []byte }

func (f *fromBytes) pick(n int) int {
	v := 0
	for restoredLogEnd := 1; restoredLogEnd < n && len(f.rest) > 0; restoredLogEnd <<= 8 {
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
