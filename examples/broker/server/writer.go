package server

// This file is the writer of a partition: one goroutine that appends the batches
// in the queue. Those that arrive while it waits for the disk make up the next
// group. So the slower the disk is, the more batches share one sync.

import "github.com/idempotence-go/idempotence/examples/broker/segment"

// maxGroupBytes is the size limit of a group of more than one batch.
const maxGroupBytes = 1 << 20

// enqueue hands a batch over to the writer. It requires order to be held.
func (p *partition) enqueue(a *pendingAppend) {
	p.saved = false
	p.queue = append(p.queue, a)
	if !p.writing {
		p.writing = true
		p.background.Go(p.write)
	}
}

// write appends until the queue is empty.
func (p *partition) write() {
	for group := p.take(); len(group) > 0; group = p.take() {
		if err := p.appendGroup(group); err != nil {
			p.cfg.repeated.Error("append failed", "log", p.dir, "batches", len(group), "err", err)
			p.fail(group, p.log.Broken())
		} else {
			p.commit(group)
		}
		// After a failure too: what it held back from readers of committed
		// records may be read now.
		p.wakeWatchers()
	}
}

// take takes a group off the queue, as many batches as fit into one segment.
func (p *partition) take() []*pendingAppend {
	p.order.Lock()
	defer p.order.Unlock()
	n := 0
	limit, size := int64(maxGroupBytes), int64(0)
	for n < len(p.queue) {
		size += int64(p.queue[n].Header.Size)
		if n == 0 && !p.mustRoll(size) {
			limit = min(limit, p.cfg.SegmentBytes-p.log.ActiveSize())
		}
		if n > 0 && size > limit {
			break
		}
		n++
	}
	group := p.queue[:n:n]
	p.queue = p.queue[n:]
	p.taken, p.writing = n, n > 0
	return group
}

// appendGroup appends the whole group or, with an error, nothing.
func (p *partition) appendGroup(group []*pendingAppend) error {
	if p.mustRoll(int64(group[0].Header.Size)) {
		if err := p.log.Roll(); err != nil {
			return err
		}
		p.saveInBackground()
	}
	batches := make([]*segment.Batch, len(group))
	for i, a := range group {
		batches[i] = &a.Batch
	}
	return p.log.Append(batches)
}

// mustRoll reports whether a batch of the given size goes into a new segment.
func (p *partition) mustRoll(size int64) bool {
	active := p.log.ActiveSize()
	return active > 0 && active+size > p.cfg.SegmentBytes
}
