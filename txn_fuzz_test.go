package idempotence

import "testing"

// FuzzTransactions lets the fuzzer choose the operations on a partition with
// transactions (the first byte is the Config, and then each operation takes as many as it
// asks for). The invariants, after every operation, are those at the top of
// txn_property_test.go.
func FuzzTransactions(f *testing.F) {
	names := map[string]byte{}
	for i, a := range txnActions {
		names[a.name] = byte(i)
	}
	next, marker, land, commit := names["next"], names["marker"], names["land"], names["commit"]
	hw := names["high watermark to the end"]
	f.Add([]byte{0})
	// A transaction of two batches, in flight one behind the other, and its marker.
	f.Add([]byte{0, next, 0, 1, 1, 1, next, 0, 1, 1, land, 0, land, 0, hw, commit, 1, commit, 0, hw, marker, 0, 1, 0, 0, 1, hw})
	// An abandoned one, read again.
	f.Add([]byte{1, next, 0, 1, 1, 1, land, 0, 0, names["abandon"], 0, hw, names["read what is unknown"], marker, 0, 1, 1, 2, hw})
	// A snapshot with something in flight, an end behind it, and a crash.
	f.Add([]byte{0, next, 0, 0, 1, 0, next, 1, 0, 0, 1, marker, 0, 1, 0, 0, 0, names["snapshot"], names["expire"], 0, land, 0, names["crash"], 0, 0, 1, hw})
	// Everything in turn, with bytes that differ.
	var all []byte
	for i := range 64 * byte(3) {
		all = append(all, i*37)
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, choices []byte) {
		c := &fromBytes{rest: choices}
		w := newTxnWorld(t, c, txnConfigs[c.pick(len(txnConfigs))].cfg)
		for steps := 0; len(c.rest) > 0 && steps < 200; steps++ {
			txnActions[c.pick(len(txnActions))].do(w)
			w.verify()
		}
		w.finish()
	})
}
