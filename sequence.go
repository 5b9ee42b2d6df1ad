package idempotence

// This file has all sequence arithmetic. Sequences number the records of one producer
// on one partition. They are int32 in 0..2147483647, and after 2147483647 comes 0, so
// the modulus is 2^31. It is neither 2^32, since sequences are never negative, nor
// 2^31-1, since 2147483647 is a sequence. A modulus of 2^31-1 is a common mistake: it
// shows only once a producer has written two thousand million records.
//
// The rule is that of Kafka's DefaultRecordBatch.incrementSequence (KIP-98).

// sequenceMask is 2^31-1. The modulus is a power of two, so the remainder is a mask.
// It is right for the sum of any two non-negative int32, which fits in 32 unsigned
// bits.
const sequenceMask = 1<<31 - 1

// addSequence returns the sequence n records after s. It requires s >= 0 and n >= 0,
// which hold for every batch that has been accepted as well formed.
func addSequence(s, n int32) int32 {
	return int32((uint32(s) + uint32(n)) & sequenceMask)
}

// nextSequence returns the sequence after s.
func nextSequence(s int32) int32 {
	return addSequence(s, 1)
}

// lastSequence returns the last sequence of a batch of count records whose first one
// is first. It requires first >= 0 and count >= 1.
func lastSequence(first, count int32) int32 {
	return addSequence(first, count-1)
}

// firstSequence returns the first sequence of a batch of count records whose last one
// is last. It requires last >= 0 and count >= 1.
func firstSequence(last, count int32) int32 {
	return int32((uint32(last) - uint32(count-1)) & sequenceMask)
}

// span is the sequences of a batch: the first one in the upper half, their number in
// the lower. It fits in one word, so five comparisons search the five remembered
// batches. A count is at least 1, so the zero span is no batch.
type span uint64

func makeSpan(first, count int32) span {
	return span(uint32(first))<<32 | span(uint32(count))
}

func (s span) first() int32 { return int32(s >> 32) }
func (s span) count() int32 { return int32(s) }
func (s span) last() int32  { return lastSequence(s.first(), s.count()) }
