package idempotence

import "testing"

// TestTruncateAgainstChronicle: whatever has happened, with epochs that change,
// sequences that wrap, windows that rolled over, transactions, producers
// forgotten and batches replayed twice, a Truncate that says exact leaves what
// a log would have left that had never been longer; it says so whenever its
// comment promises it; and where it does not say so, nothing that was cut off is
// remembered, not even if the broker ignores the answer.
func TestTruncateAgainstChronicle(t *testing.T) {
	checkHistories(t, someConfig, commits, replays, markers, coordinators, overlaps, clocks, cuts, cuts)
}
