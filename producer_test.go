package idempotence

import (
	"slices"
	"testing"
)

// TestProducerRecord: what is remembered of a producer after each of its batches. A batch
// of another epoch replaces the window.
func TestProducerRecord(t *testing.T) {
	p := &producer{id: 31, window: window{}, txnFirst: noTxn, coordinatorEpoch: noCoordinator}
	for i, step := range []struct {
		b         Batch
		base      int64
		offsets   []int64 // base offsets in the window
		end       int64
		hadEpochs bool
	}{
		{Batch{ProducerID: 31, BaseSequence: 0, Count: 2}, 0, []int64{0}, 2, false},
		{Batch{ProducerID: 31, BaseSequence: 2, Count: 1}, 7, []int64{0, 7}, 8, false},
		{Batch{ProducerID: 31, BaseSequence: 3, Count: 1}, 8, []int64{0, 7, 8}, 9, false},
		{Batch{ProducerID: 31, BaseSequence: 4, Count: 1}, 9, []int64{0, 7, 8, 9}, 10, false},
		{Batch{ProducerID: 31, BaseSequence: 5, Count: 1}, 10, []int64{0, 7, 8, 9, 10}, 11, false},
		{Batch{ProducerID: 31, BaseSequence: 6, Count: 3}, 11, []int64{7, 8, 9, 10, 11}, 14, false},
		{Batch{ProducerID: 31, Epoch: 3, BaseSequence: 0, Count: 1}, 14, []int64{14}, 15, true},
		{Batch{ProducerID: 31, Epoch: 3, BaseSequence: 1, Count: 1}, 15, []int64{14, 15}, 16, true},
	} {
		p.record(&step.b, step.base)
		var offsets []int64
		for _, b := range p.view(nil, 0).Window {
			offsets = append(offsets, b.BaseOffset)
		}
		if !slices.Equal(offsets, step.offsets) || p.epoch != step.b.Epoch || p.newestOffset() != step.base || p.newestEnd() != step.end {
			t.Errorf("batch %d: epoch %d, window %v, newest %d to %d", i, p.epoch, offsets, p.newestOffset(), p.newestEnd())
		}
		if had := p.history&hadEpoch != 0; had != step.hadEpochs {
			t.Errorf("batch %d: had another epoch: %t", i, had)
		}
	}
	p.adopt(4)
	if p.epoch != 4 || p.newestOffset() != noOffset || p.newestEnd() != 0 {
		t.Errorf("an epoch without a batch: epoch %d, newest %d to %d", p.epoch, p.newestOffset(), p.newestEnd())
	}
	p = nil
	if p.newestOffset() != noOffset || p.newestEnd() != 0 {
		t.Errorf("no producer: newest %d to %d", p.newestOffset(), p.newestEnd())
	}
}

// TestProducerBusy: a producer with a transaction or a batch in flight must not be
// forgotten.
func TestProducerBusy(t *testing.T) {
	for _, tt := range []struct {
		p    producer
		want bool
	}{
		{producer{txnFirst: noTxn}, false},
		{producer{txnFirst: 0}, true},
		{producer{txnFirst: noTxn, queue: 1}, true},
	} {
		if got := tt.p.busy(); got != tt.want {
			t.Errorf("%+v: %t", tt.p, got)
		}
	}
}
