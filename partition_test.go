package idempotence

// This file is a partition for the tests: a manager, and the log that it
// judges for. It is the loop an embedder writes, on one page.

// partition is a manager and its log. It is not safe for concurrent use.
type partition struct {
	m   *ProducerStateManager
	log []logged
	end int64
}

// logged is a batch as the log keeps it.
type logged struct {
	batch Batch
	base  int64
}

func newPartition(cfg Config) *partition {
	return &partition{m: New(cfg)}
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
	return res, p.commit(b, p.end)
}

// commit appends a batch at an offset and commits it. What the manager refuses
// is cut off the log again.
func (p *partition) commit(b Batch, base int64) error {
	if err := p.m.CommitBatch(b, base); err != nil {
		return err
	}
	p.log = append(p.log, logged{b, base})
	p.end = max(p.end, base+int64(b.Count))
	return nil
}

// advance appends records that carry no producer id, up to an end offset.
func (p *partition) advance(to int64) {
	p.end = max(p.end, to)
	p.m.Advance(to)
}
