package idempotence

// This file is the producer: everything remembered of one, and how an appended
// batch or marker changes it. It knows nothing of the table a producer lies in,
// nor of other producers.

// producer is a row of the table. It is 128 bytes, two cache lines, and the first
// of them holds all that Check reads for the next batch. It has no pointer, so
// the garbage collector never looks inside.
//
// Invariants (audited in the tests):
//  1. id >= 0 and epoch >= 0.
//  2. The window holds only batches of this epoch.
//  3. txnFirst is noTxn or >= 0; coordinatorEpoch is noCoordinator or >= 0.
type producer struct {
	id      int64
	tick    uint32 // when it was last active (recency.go)
	epoch   int16
	history history // what Truncate cannot bring back (truncate.go)
	pinned  bool    // which list it is in (recency.go)
	queue   uint32  // number of its queue in flight, plus one; 0 for none (inflight.go)
	older   link    // neighbour in its list (recency.go)
	window  window

	txnFirst         int64 // first offset of the open transaction, or noTxn (txn.go)
	coordinatorEpoch int32 // highest one a marker carried, or noCoordinator (txn.go)
	newer            link  // neighbour in its list (recency.go)
}

// inTransaction reports whether a transaction is open.
func (p *producer) inTransaction() bool { return p.txnFirst != noTxn }

// busy reports whether the producer must not be forgotten now.
func (p *producer) busy() bool { return p.inTransaction() || p.queue != 0 }

// newestOffset returns the newest base offset remembered of p, which may be nil;
// noOffset if there is none.
func (p *producer) newestOffset() int64 {
	if p == nil || p.window.count == 0 {
		return noOffset
	}
	return p.window.newest().baseOffset
}

// newestEnd returns one past the last offset of the newest batch remembered of p,
// which may be nil; 0 if there is none.
func (p *producer) newestEnd() int64 {
	if p == nil || p.window.count == 0 {
		return 0
	}
	return p.window.newest().end()
}

// record makes an appended batch the newest remembered one. It requires an epoch
// that is not older than the producer's and an offset above the newest.
func (p *producer) record(b *Batch, baseOffset int64) {
	p.adopt(b.Epoch)
	p.window.push(b.span(), baseOffset)
}

// adopt makes epoch the current one, and forgets the batches of any other.
func (p *producer) adopt(epoch int16) {
	if epoch != p.epoch {
		p.window.clear()
		p.epoch = epoch
		p.history |= hadEpoch
	}
}
