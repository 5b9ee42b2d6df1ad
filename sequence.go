package idempotence

// This file is the single home of sequence arithmetic. A sequence numbers the
// records of one producer on one partition: an int32 in 0..2147483647, and
// after 2147483647 comes 0. The modulus is therefore 2^31. It is neither 2^32
// (sequences are never negative) nor 2^31-1 (2147483647 is a legal sequence),
// and taking it one short is the classic fault of this field: everything works
// until a producer has written two thousand million records.
//
// The rule is Kafka's DefaultRecordBatch.incrementSequence, since KIP-98.

// sequenceMask is 2^31-1. Since the modulus is a power of two, the remainder
// is a mask, and it is right for the sum of any two int32 that are not
// negative: that sum fits in 32 unsigned bits.
const sequenceMask = 1<<31 - 1

// addSequence returns the sequence n records after s. It requires s >= 0 and
// n >= 0, which whoever takes a batch in establishes before it gets here.
func addSequence(s, n int32) int32 {
	return int32((uint32(s) + uint32(n)) & sequenceMask)
}

// nextSequence returns the sequence after s.
func nextSequence(s int32) int32 {
	return addSequence(s, 1)
}

// lastSequence returns the sequence of the last record of a batch that starts
// at first and covers count records. It requires first >= 0 and count >= 1.
func lastSequence(first, count int32) int32 {
	return addSequence(first, count-1)
}

// firstSequence is lastSequence the other way round.
func firstSequence(last, count int32) int32 {
	return int32((uint32(last) - uint32(count-1)) & sequenceMask)
}

// span is a batch's place in the sequence space: the first sequence in the
// upper half, the count of sequences in the lower. It says the same as first
// and last, and it fits in one word, so that the five remembered batches are
// searched with five comparisons. A count is at least 1, so the zero span is
// no batch.
type span uint64

func makeSpan(first, count int32) span {
	return span(uint32(first))<<32 | span(uint32(count))
}

func (s span) first() int32 { return int32(s >> 32) }
func (s span) count() int32 { return int32(s) }
func (s span) last() int32  { return lastSequence(s.first(), s.count()) }
