package idempotence

// This file is one producer: what is remembered of it, how a batch is judged
// against that (rules 3 to 7), and how a batch changes it. It knows nothing of
// the table it lies in, nor of other producers.

// producer is everything remembered of one producer: a row of the table. It is
// 128 bytes, two cache lines, and what Check reads of it for a batch that is the
// next one stands in the first. It has no pointer, so that a million of them are
// nothing to the garbage collector.
//
// Invariants (audited in the tests):
//  1. id >= 0 and epoch >= 0.
//  2. The window holds only batches of this epoch.
//  3. txnFirst is noTxn or >= 0; coordinatorEpoch is noCoordinator or >= 0.
type producer struct {
	id      int64
	tick    uint32 // of its last activity; see activity
	epoch   int16
	history history
	pinned  bool   // in activity.parked
	queue   uint32 // of its batches in flight, plus one; 0 where there are none
	older   link   // neighbours in activity
	window  window
	// txnFirst is the offset of the first batch of the open transaction.
	txnFirst         int64
	coordinatorEpoch int32
	newer            link
}

const (
	noTxn         int64 = -1
	noCoordinator int32 = -1
)

// past is what a producer has behind it that its other fields no longer show,
// and that Truncate cannot bring back.
type history uint8

const (
	hadEpoch  history = 1 << iota // it had another epoch before
	hadMarker                     // a marker of it was seen, or a batch without sequences
)

// newestOffset returns the newest base offset remembered, or noOffset.
func (p *producer) newestOffset() int64 {
	if p.window.count == 0 {
		return noOffset
	}
	return p.window.newest().baseOffset
}

// continuedBy reports whether a batch is this producer's next one, with nothing
// in flight: the case that nearly every batch is, told with a few comparisons.
// That the batch is well-formed follows from them, but for its count.
func (p *producer) continuedBy(b *Batch) bool {
	return p.id == b.ProducerID && p.epoch == b.Epoch && p.window.follows(b.BaseSequence) && p.queue == 0 && b.Count > 0
}

// record makes an appended batch the newest remembered one. It requires that
// the batch's epoch is not older than the producer's and that its offset is
// above the newest.
func (p *producer) record(b *Batch, baseOffset int64) {
	p.adopt(b.Epoch)
	p.window.push(b.span(), baseOffset)
	p.openTxn(b, baseOffset)
}

// adopt makes epoch the current one. The batches of another are forgotten.
func (p *producer) adopt(epoch int16) {
	if epoch != p.epoch {
		p.window.clear()
		p.epoch = epoch
		p.history |= hadEpoch
	}
}

// openTxn opens a transaction with its first batch.
func (p *producer) openTxn(b *Batch, baseOffset int64) {
	if b.Transactional && p.txnFirst == noTxn {
		p.txnFirst = baseOffset
	}
}
