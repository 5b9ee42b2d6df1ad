package txn

// This file is the format of transactions.log.
//
// The log is a sequence of records. Integers are big-endian, strings are an
// int16 length and the bytes, lists an int32 count and the elements, sorted.
//
//	+----------------+----------------+----------------+------------------+
//	| length  uint32 | check   uint32 | body    uint32 | body             |
//	| of the body    | CRC-32C of     | CRC-32C of     | (length bytes)   |
//	|                | the length     | the body       |                  |
//	+----------------+----------------+----------------+------------------+
//
//	body: version int8 | kind int8 | number int64 | durable int64 | fields
//
// The length has a check of its own, so that a record which is not all there
// differs from one whose length is wrong. Numbers rise through the log, not
// necessarily by 1: a record whose number is not above those before it is a
// duplicate. Durable is the number of a record that was durable when this one
// was appended, or for the records of a rewritten log, the number of its last
// record: it tells a damaged record from one that was never synced.
//
// The kinds and their fields, as of version 1. A frozen format: a change of it
// is a new version.
//
//	0 start        coordinator epoch int32
//	1 block        first producer id that is not reserved int64
//	2 transaction  transactional id string, producer id int64, epoch int16,
//	               last epoch int16, previous id int64, next id int64,
//	               time-out int32 (ms), state int8, transaction version int8,
//	               start int64 (ms), updated int64 (ms),
//	               partitions: topic string, partition int32
//	               groups: group string
//	               offsets: group string, topic string, partition int32,
//	               offset int64, leader epoch int32, metadata string
//	3 forgotten    transactional id string
//	4 offsets      group string
//	               offsets: topic string, partition int32, offset int64,
//	               leader epoch int32, metadata string
//	5 stop         none

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"strings"

	"github.com/twmb/franz-go/pkg/kbin"
)

const (
	recordVersion = 1
	headerSize    = 12
)

type recordKind int8

const (
	kindStart recordKind = iota
	kindBlock
	kindTransaction
	kindForgotten
	kindOffsets
	kindStop
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A record is one line of the log. The types below and *transaction are records.
type record interface {
	kind() recordKind
	appendFields(dst []byte) []byte
}

type (
	// A startRecord begins a run of the coordinator.
	startRecord struct{ epoch int32 }

	// A blockRecord reserves all producer ids below end.
	blockRecord struct{ end int64 }

	// A forgottenRecord forgets a transactional id.
	forgottenRecord struct{ id string }

	// An offsetsRecord commits offsets outside of a transaction.
	offsetsRecord struct {
		group   string
		offsets []Offset
	}

	// A stopRecord ends a run. It proves that all before it was durable.
	stopRecord struct{}
)

func (startRecord) kind() recordKind     { return kindStart }
func (blockRecord) kind() recordKind     { return kindBlock }
func (*transaction) kind() recordKind    { return kindTransaction }
func (forgottenRecord) kind() recordKind { return kindForgotten }
func (offsetsRecord) kind() recordKind   { return kindOffsets }
func (stopRecord) kind() recordKind      { return kindStop }

func (r startRecord) appendFields(dst []byte) []byte { return kbin.AppendInt32(dst, r.epoch) }

func (r blockRecord) appendFields(dst []byte) []byte { return kbin.AppendInt64(dst, r.end) }

func (t *transaction) appendFields(dst []byte) []byte {
	dst = kbin.AppendString(dst, t.id)
	dst = kbin.AppendInt64(dst, t.producer.ID)
	dst = kbin.AppendInt16(dst, t.producer.Epoch)
	dst = kbin.AppendInt16(dst, t.lastEpoch)
	dst = kbin.AppendInt64(dst, t.previousID)
	dst = kbin.AppendInt64(dst, t.nextID)
	dst = kbin.AppendInt32(dst, t.timeout)
	dst = kbin.AppendInt8(dst, int8(t.state))
	dst = kbin.AppendInt8(dst, t.version)
	dst = kbin.AppendInt64(dst, t.start)
	dst = kbin.AppendInt64(dst, t.updated)
	dst = kbin.AppendArrayLen(dst, len(t.partitions))
	for _, p := range t.partitions {
		dst = appendPartition(dst, p)
	}
	dst = kbin.AppendArrayLen(dst, len(t.groups))
	for _, g := range t.groups {
		dst = kbin.AppendString(dst, g)
	}
	dst = kbin.AppendArrayLen(dst, len(t.offsets))
	for _, o := range t.offsets {
		dst = kbin.AppendString(dst, o.group)
		dst = appendOffset(dst, o.Offset)
	}
	return dst
}

func (r forgottenRecord) appendFields(dst []byte) []byte { return kbin.AppendString(dst, r.id) }

func (r offsetsRecord) appendFields(dst []byte) []byte {
	dst = kbin.AppendString(dst, r.group)
	dst = kbin.AppendArrayLen(dst, len(r.offsets))
	for _, o := range r.offsets {
		dst = appendOffset(dst, o)
	}
	return dst
}

func (stopRecord) appendFields(dst []byte) []byte { return dst }

func appendPartition(dst []byte, p Partition) []byte {
	return kbin.AppendInt32(kbin.AppendString(dst, p.Topic), p.Partition)
}

func appendOffset(dst []byte, o Offset) []byte {
	dst = appendPartition(dst, o.Partition)
	dst = kbin.AppendInt64(dst, o.Offset)
	dst = kbin.AppendInt32(dst, o.LeaderEpoch)
	return kbin.AppendString(dst, o.Metadata)
}

// A frame is a record with what the log adds to it.
type frame struct {
	number, durable int64
	record          record
}

// appendTo appends the frame as it stands in the log.
func (f frame) appendTo(dst []byte) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, headerSize)...)
	dst = kbin.AppendInt8(dst, recordVersion)
	dst = kbin.AppendInt8(dst, int8(f.record.kind()))
	dst = kbin.AppendInt64(dst, f.number)
	dst = kbin.AppendInt64(dst, f.durable)
	dst = f.record.appendFields(dst)
	header, body := dst[at:at+headerSize], dst[at+headerSize:]
	binary.BigEndian.PutUint32(header, uint32(len(body)))
	binary.BigEndian.PutUint32(header[4:], crc32.Checksum(header[:4], castagnoli))
	binary.BigEndian.PutUint32(header[8:], crc32.Checksum(body, castagnoli))
	return dst
}

// Reasons why the bytes at some place of the log are not a record.
var (
	errShort    = errors.New("the record is not all there")
	errLength   = errors.New("the check of the record's length is wrong")
	errChecksum = errors.New("the record's checksum is wrong")
)

// isBroken reports whether err is one of the above.
func isBroken(err error) bool { return err == errShort || err == errLength || err == errChecksum }

// decodeFrame decodes the first record in data. It returns the size of the
// record, len(data) if it is not all there, or 0 if the length is unknown. An
// error that is not one of the above is that of a record which is intact and
// makes no sense.
func decodeFrame(data []byte) (frame, int, error) {
	if len(data) < headerSize {
		return frame{}, len(data), errShort
	}
	if binary.BigEndian.Uint32(data[4:]) != crc32.Checksum(data[:4], castagnoli) {
		return frame{}, 0, errLength
	}
	length := binary.BigEndian.Uint32(data)
	if int64(length) > int64(len(data)-headerSize) {
		return frame{}, len(data), errShort
	}
	size := headerSize + int(length)
	body := data[headerSize:size]
	if binary.BigEndian.Uint32(data[8:]) != crc32.Checksum(body, castagnoli) {
		return frame{}, size, errChecksum
	}
	f, err := decodeBody(body)
	return f, size, err
}

func decodeBody(body []byte) (frame, error) {
	r := &reader{Reader: kbin.Reader{Src: body}}
	if version := r.Int8(); version != recordVersion {
		return frame{}, fmt.Errorf("%w %d", ErrVersion, version)
	}
	kind := recordKind(r.Int8())
	f := frame{number: r.Int64(), durable: r.Int64()}
	r.require(f.number > 0 && f.durable >= 0)
	switch kind {
	case kindStart:
		s := startRecord{r.Int32()}
		r.require(s.epoch > 0)
		f.record = s
	case kindBlock:
		b := blockRecord{r.Int64()}
		r.require(b.end > 0)
		f.record = b
	case kindTransaction:
		f.record = r.transaction()
	case kindForgotten:
		f.record = forgottenRecord{r.name()}
	case kindOffsets:
		o := offsetsRecord{group: r.name()}
		o.offsets = list(r, r.offset, compareOffsets)
		f.record = o
	case kindStop:
		f.record = stopRecord{}
	default:
		return frame{}, fmt.Errorf("kind %d is unknown", kind)
	}
	if err := r.Complete(); err != nil || r.invalid || len(r.Src) > 0 {
		return frame{}, fmt.Errorf("the fields of a record of kind %d, number %d, make no sense", kind, f.number)
	}
	return f, nil
}

// A reader reads fields. It remembers whether one of them was out of range.
type reader struct {
	kbin.Reader
	invalid bool
}

func (r *reader) require(ok bool) {
	if !ok {
		r.invalid = true
	}
}

// name reads a string that must not be empty.
func (r *reader) name() string {
	s := r.String()
	r.require(s != "")
	return s
}

// list reads a list of elements that must rise.
func list[E any](r *reader, element func() E, compare func(E, E) int) []E {
	n := r.ArrayLen() // at most the number of bytes left
	r.require(n >= 0)
	var all []E
	for range n {
		e := element()
		if !r.Ok() {
			break
		}
		r.require(len(all) == 0 || compare(all[len(all)-1], e) < 0)
		all = append(all, e)
	}
	return all
}

func (r *reader) partition() Partition {
	p := Partition{r.name(), r.Int32()}
	r.require(p.Partition >= 0)
	return p
}

func (r *reader) offset() Offset {
	o := Offset{r.partition(), r.Int64(), r.Int32(), r.String()}
	r.require(o.Offset >= 0 && o.LeaderEpoch >= -1)
	return o
}

func (r *reader) transaction() *transaction {
	t := &transaction{
		id:         r.name(),
		producer:   Producer{r.Int64(), r.Int16()},
		lastEpoch:  r.Int16(),
		previousID: r.Int64(),
		nextID:     r.Int64(),
		timeout:    r.Int32(),
		state:      State(r.Int8()),
		version:    r.Int8(),
		start:      r.Int64(),
		updated:    r.Int64(),
	}
	t.partitions = list(r, r.partition, comparePartitions)
	t.groups = list(r, r.name, strings.Compare)
	t.offsets = list(r, func() stagedOffset { return stagedOffset{r.name(), r.offset()} }, compareStaged)

	r.require(t.producer.ID >= 0 && t.producer.Epoch >= 0)
	r.require(t.lastEpoch >= -1 && t.previousID >= -1 && t.nextID >= -1)
	r.require(t.previousID < 0 || t.lastEpoch >= 0)
	r.require(t.nextID < 0 || t.state.preparing() && t.producer.Epoch == math.MaxInt16 && t.version == 2)
	r.require(t.timeout > 0)
	r.require(t.state >= Empty && t.state <= CompleteAbort)
	r.require(t.version == 1 || t.version == 2 || t.version == 0 && t.state == Empty)
	r.require(len(t.partitions) == 0 || t.state == Ongoing || t.state.preparing())
	r.require(len(t.partitions) > 0 || !t.state.preparing())
	r.require(len(t.groups) == 0 || t.state == Ongoing || t.state.preparing())
	r.require(len(t.offsets) == 0 || t.state == Ongoing || t.state.ended(true))
	return t
}
