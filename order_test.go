package idempotence

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestSort sorts keys of every kind: few and many, narrow and wide, unequal by far, and
// equal, where producer ids decide.
func TestSort(t *testing.T) {
	const seed = 5
	rng := rand.New(rand.NewPCG(seed, 0))
	for name, key := range map[string]func(i int) uint64{
		"sorted":           func(i int) uint64 { return uint64(i) },
		"equal":            func(int) uint64 { return 7 },
		"a few equal":      func(i int) uint64 { return uint64(rng.IntN(1000)) },
		"one byte":         func(int) uint64 { return 1<<40 + uint64(rng.IntN(256)) },
		"three bytes":      func(int) uint64 { return 1<<40 + uint64(rng.IntN(1<<24)) },
		"any":              func(int) uint64 { return rng.Uint64() },
		"two narrow parts": func(i int) uint64 { return uint64(i&1)<<63 | uint64(rng.IntN(1<<20)) },
		"of any length":    func(int) uint64 { return rng.Uint64() >> rng.IntN(64) },
	} {
		for _, n := range []int{0, 1, 2, 255, 256, 257, 20_000} {
			table := newTable()
			ranks := make([]ranked, n)
			for i := range ranks {
				table.append(int64(bits.Reverse16(uint16(i))))
				ranks[i] = ranked{key(i), uint32(i)}
			}
			f := table.freeze()
			want := slices.Clone(ranks)
			slices.SortFunc(want, f.compare)
			if f.sort(ranks); !slices.Equal(want, ranks) {
				t.Errorf("seed %d: %d keys, %s: not in order", seed, n, name)
			}
		}
	}
}
