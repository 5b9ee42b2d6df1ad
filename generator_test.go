package idempotence

import (
	"math"
	"math/rand/v2"

	"pgregory.net/rapid"
)

// This file makes the choices of the randomised tests, and the batches: the next one of a
// producer, a retry, and what is almost either.

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

// generator makes batches out of what a model knows of their producers. Each property
// embeds one.
type generator struct {
	c      chooser
	policy UnknownProducerPolicy
	pids   []int64
	known  func(pid int64) outlook
	sent   func(pid int64) []Batch // accepted or in flight, oldest first
	count  func(first int32) int32
	txn    func(o outlook) bool // nil: never
}

// upTo returns one of 1..n.
func (g *generator) upTo(n int) int { return 1 + g.c.pick(n) }

func (g *generator) pid() int64 { return g.pids[g.c.pick(len(g.pids))] }

// next returns the batch that a producer should send next.
func (g *generator) next(pid int64) Batch {
	o := g.known(pid)
	epoch, sequence := o.next()
	b := Batch{ProducerID: pid, Epoch: max(epoch, 0), BaseSequence: int32(sequence)}
	if epoch < 0 && o.failed != nil && g.c.pick(4) > 0 {
		b.Epoch, b.BaseSequence = o.failed.Epoch, o.failed.BaseSequence
	} else if epoch < 0 && g.policy == AcceptAny {
		b.BaseSequence = g.sequence()
	}
	b.Count = g.count(b.BaseSequence)
	b.Transactional = g.txn != nil && g.txn(o)
	return b
}

// withoutID returns a batch without a producer id.
func (g *generator) withoutID() Batch {
	return Batch{ProducerID: NoProducerID, Epoch: -1, BaseSequence: -1, Count: g.count(0)}
}

// retry returns a copy of a batch in flight or of one of the last seven accepted: two more
// than are remembered.
func (g *generator) retry() Batch {
	pid := g.pid()
	sent := g.sent(pid)
	if len(sent) == 0 {
		return g.next(pid)
	}
	return sent[len(sent)-g.upTo(min(7+len(g.known(pid).queue), len(sent)))]
}

// bent returns a retry that is split, merged, cut or moved a little.
func (g *generator) bent() Batch {
	b := g.retry()
	by := int32(g.upTo(3))
	switch g.c.pick(5) {
	case 0: // the first part
		b.Count = max(1, b.Count-by)
	case 1: // the last part
		b.BaseSequence = moved(b.BaseSequence, by)
		b.Count = max(1, b.Count-by)
	case 2: // more than it was
		if b.Count <= math.MaxInt32-by {
			b.Count += by
		}
	case 3: // moved forward
		b.BaseSequence = moved(b.BaseSequence, by)
	case 4: // moved back
		b.BaseSequence = moved(b.BaseSequence, -by)
	}
	return b
}

// moved returns the sequence by after s.
func moved(s, by int32) int32 {
	return int32((int64(s) + int64(by) + modulus) % modulus)
}

// gap returns a batch that starts a little too late, or at any sequence.
func (g *generator) gap() Batch {
	b := g.next(g.pid())
	if g.c.pick(2) == 0 {
		b.BaseSequence = moved(b.BaseSequence, int32(g.upTo(5)))
	} else {
		b.BaseSequence = g.sequence()
	}
	return b
}

// newerEpoch returns a batch of a newer epoch, which mostly starts at 0.
func (g *generator) newerEpoch() Batch {
	b := g.next(g.pid())
	b.Epoch = int16(min(math.MaxInt16, int(b.Epoch)+g.upTo(2)))
	if g.c.pick(50) == 49 {
		b.Epoch = math.MaxInt16
	}
	if g.c.pick(3) > 0 {
		b.BaseSequence = 0
	}
	return b
}

// olderEpoch returns a retry with an older epoch.
func (g *generator) olderEpoch() Batch {
	b := g.retry()
	b.Epoch = max(0, b.Epoch-int16(g.upTo(3)))
	return b
}

// malformed returns a batch with a field out of its range.
func (g *generator) malformed() Batch {
	b := g.next(g.pid())
	switch g.c.pick(4) {
	case 0:
		b.ProducerID = -2 - int64(g.c.pick(2))*math.MaxInt32
	case 1:
		b.Epoch = -1 - int16(g.c.pick(2))*math.MaxInt16
	case 2:
		b.BaseSequence = -1 - int32(g.c.pick(2))*math.MaxInt32
	case 3:
		b.Count = -int32(g.c.pick(2)) * math.MaxInt32
	}
	return b
}

// sequence returns a sequence: about 0, before the wrap, anything, or right before the wrap.
func (g *generator) sequence() int32 {
	switch g.c.pick(5) {
	case 0:
		return int32(g.c.pick(3))
	case 1:
		return math.MaxInt32 - int32(g.c.pick(300))
	case 2:
		return int32(g.c.pick(math.MaxInt32))
	case 3:
		return math.MaxInt32 - int32(g.c.pick(8))
	}
	return 0
}

// smallCount returns a count of 1 to 4.
func (g *generator) smallCount(int32) int32 { return int32(g.upTo(4)) }

// anyCount returns a count for a batch that starts at first: mostly small, now and then one
// that ends about the wrap, or the largest there is.
func (g *generator) anyCount(first int32) int32 {
	switch kind := g.c.pick(10); kind {
	case 9:
		return math.MaxInt32 - int32(g.c.pick(3))
	case 8:
		return max(1, math.MaxInt32-first-4+int32(g.c.pick(5)))
	case 7:
		return int32(g.upTo(1000))
	}
	return int32(g.upTo(4))
}

// wideCount returns a count: mostly small, now and then more than a window takes in which
// nothing can repeat.
func (g *generator) wideCount(int32) int32 {
	if g.c.pick(12) == 11 {
		return []int32{maxPlainCount, maxPlainCount + 1, math.MaxInt32}[g.c.pick(3)]
	}
	return int32(g.upTo(3))
}
