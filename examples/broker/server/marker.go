package server

// This file puts markers into the log of a partition: the control batches that
// end transactions.

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"time"

	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// writeMarker has a marker judged and appended, and returns when it is durable.
// What its producer has in flight settles first. If ctx ends before the marker
// was judged, nothing is appended.
func (p *partition) writeMarker(ctx context.Context, k idempotence.Marker) error {
	batch, err := markerBatch(k, time.Now())
	if err != nil {
		return err
	}
	a := &pendingAppend{
		Batch:    batch,
		producer: idempotence.Batch{ProducerID: k.ProducerID, Epoch: k.Epoch},
		marker:   &k,
		settled:  make(chan struct{}),
	}
	for inFlight := p.reserve(a); inFlight != nil; inFlight = p.reserve(a) {
		select {
		case <-inFlight.Done():
		case <-ctx.Done():
			return inFlight
		}
	}
	_, err = a.wait()
	return err
}

// Types of control records. Their keys are the version of the key and the type.
const (
	abortMarker  = 0
	commitMarker = 1
)

const (
	transactionalBit = 1 << 4
	controlBit       = 1 << 5
)

// markerBatch encodes a marker as a record batch.
func markerBatch(k idempotence.Marker, now time.Time) (segment.Batch, error) {
	kind := int16(abortMarker)
	if k.Commit {
		kind = commitMarker
	}
	r := kmsg.Record{
		Key:   kbin.AppendInt16(kbin.AppendInt16(nil, 0), kind),
		Value: kbin.AppendInt32(kbin.AppendInt16(nil, 0), k.CoordinatorEpoch),
	}
	r.Length = int32(len(r.AppendTo(nil)) - 1) // the length itself takes one byte
	b := kmsg.RecordBatch{
		Magic:          2,
		Attributes:     transactionalBit | controlBit,
		FirstTimestamp: now.UnixMilli(),
		MaxTimestamp:   now.UnixMilli(),
		ProducerID:     k.ProducerID,
		ProducerEpoch:  k.Epoch,
		FirstSequence:  -1,
		NumRecords:     1,
		Records:        r.AppendTo(nil),
	}
	bytes := b.AppendTo(nil)
	const lengthAt, lengthEnd, crcAt, crcEnd = 8, 12, 17, 21
	binary.BigEndian.PutUint32(bytes[lengthAt:], uint32(len(bytes)-lengthEnd))
	binary.BigEndian.PutUint32(bytes[crcAt:], crc32.Checksum(bytes[crcEnd:], crc32.MakeTable(crc32.Castagnoli)))
	_, h, err := idempotence.ParseBatch(bytes)
	return segment.Batch{Header: h, Bytes: bytes}, err
}
