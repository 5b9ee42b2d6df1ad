package idempotence

import (
	"slices"
	"testing"
	"time"
)

// This file is a partition for the tests: a manager, and the log that it
// judges for. It is the loop an embedder writes, on one page.

// partition is a manager and its log. It is not safe for concurrent use.
type partition struct {
	cfg Config
	m   *ProducerStateManager
	log []logged // from the log's start on
	end int64
}

// logged is a batch, or a marker, as the log keeps it.
type logged struct {
	batch  Batch
	marker *Marker
	base   int64
}

// end returns one past the last offset of an entry.
func (l logged) end() int64 {
	if l.marker != nil {
		return l.base + 1
	}
	return l.base + int64(l.batch.Count)
}

func newPartition(cfg Config) *partition {
	return &partition{cfg: cfg, m: New(cfg)}
}

// check judges a batch and appends nothing.
func (p *partition) check(b Batch) (Result, error) {
	return p.m.CheckBatch(b)
}

// produce judges a batch, and appends and commits it where it is new. The
// offset that the log gave it is in the result.
func (p *partition) produce(b Batch) (Result, error) {
	res, err := p.m.CheckBatch(b)
	if err != nil || res.Verdict != Append {
		return res, err
	}
	res.BaseOffset = p.end
	if err := p.commit(b, p.end); err != nil {
		return Result{}, err
	}
	return res, nil
}

// commit appends a batch at an offset and commits it. What the manager refuses
// is cut off the log again.
func (p *partition) commit(b Batch, base int64) error {
	if err := p.m.CommitBatch(b, base); err != nil {
		return err
	}
	p.append(logged{batch: b, base: base})
	return nil
}

// settle reports that the append of a reserved batch has succeeded.
func (p *partition) settle(r *Reservation, b Batch, base int64) error {
	if err := r.Commit(base); err != nil {
		return err
	}
	p.append(logged{batch: b, base: base})
	return nil
}

// append adds an entry. Those of one producer may be reported in any order; the
// log has them in the order of offsets.
func (p *partition) append(l logged) {
	i := len(p.log)
	for i > 0 && p.log[i-1].base > l.base {
		i--
	}
	p.log = slices.Insert(p.log, i, l)
	p.end = max(p.end, l.end())
}

// advance appends records that carry no producer id, up to an end offset.
func (p *partition) advance(to int64) {
	p.end = max(p.end, to)
	p.m.Advance(to)
}

// replay takes an entry over from the log of a leader.
func (p *partition) replay(l logged) error {
	if err := apply(p.m, l); err != nil {
		return err
	}
	p.append(l)
	return nil
}

// apply replays an entry of a log into a manager.
func apply(m *ProducerStateManager, l logged) error {
	if l.marker != nil {
		return m.ReplayMarker(*l.marker, l.base)
	}
	return m.Replay(l.batch, l.base)
}

// restart loses the memory and rebuilds it from the log.
func (p *partition) restart(t *testing.T) {
	t.Helper()
	p.m = New(p.cfg)
	for _, l := range p.log {
		if err := apply(p.m, l); err != nil {
			t.Fatalf("replay of %+v: %v", l, err)
		}
	}
	p.m.Advance(p.end)
}

// restore loses the memory, and restores a snapshot and what the log has after
// it.
func (p *partition) restore(t *testing.T, snapshot []byte) {
	t.Helper()
	p.m = restored(t, p.cfg, snapshot)
	for _, l := range p.log {
		if l.end() > p.m.EndOffset() {
			if err := apply(p.m, l); err != nil {
				t.Fatalf("replay of %+v: %v", l, err)
			}
		}
	}
	p.m.Advance(p.end)
}

// truncate cuts the log, and the memory with it. It rebuilds the memory where
// what is left of it is not exact, as an embedder must.
func (p *partition) truncate(t *testing.T, to int64) (exact bool) {
	t.Helper()
	p.log = slices.DeleteFunc(p.log, func(l logged) bool { return l.end() > to })
	p.end = min(p.end, max(to, 0))
	exact = p.m.Truncate(to)
	if !exact {
		p.restart(t)
	}
	return exact
}

// advanceStart deletes the log's records before an offset. The manager is not
// told: what it remembers of them stays true.
func (p *partition) advanceStart(to int64) {
	p.log = slices.DeleteFunc(p.log, func(l logged) bool { return l.end() <= to })
}

// reset deletes the log and creates it again.
func (p *partition) reset() {
	p.log, p.end = nil, 0
	p.m.Reset()
}

// expire passes a time in milliseconds.
func (p *partition) expire(now int64) int {
	return p.m.Expire(time.UnixMilli(now))
}
