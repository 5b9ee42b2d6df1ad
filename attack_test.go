package idempotence

import (
	"math/rand/v2"
	"testing"
)

// This file holds what an attack on the package brought to light: one test for
// each defect that was found, named after what it defends.

// A free slot is row 0 to whoever looks for candidates only by their tags. The
// producer in row 0 must not be taken for a second one because of that, or an
// intact snapshot is refused as corrupt, with some seeds and not with others.
// The seed is searched for which puts both producers' tags at 1, next to that
// of a free slot, and the producer of row 0 behind the other one.
func TestIntactSnapshotIsNotRefusedForAnySeed(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for {
		table := table{index: index{seed: [2]uint64{rng.Uint64(), rng.Uint64() | 1}}}
		table.add().id = 7
		table.add().id = 8
		first, second := table.hashOf(0), table.hashOf(1)
		if tagOf(first) != 1 || tagOf(second) != 1 || second>>56 >= first>>56 {
			continue
		}
		if twice := table.indexAll(); twice != nil {
			t.Errorf("seed %#x: producer %d is there twice among 7 and 8", table.index.seed, twice.id)
		}
		return
	}
}
