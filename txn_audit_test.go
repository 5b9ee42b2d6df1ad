package idempotence

import (
	"errors"
	"fmt"
	"math"
)

// This file is the part of the audit that is about transactions: the invariants of
// transactions, endedQueue and abortedRanges, by their numbers there, and those of
// offsetQueue for the open ones.

func init() { audits = append(audits, auditTransactions) }

// auditError is audit for a test that says more when it fails.
func auditError(m *ProducerStateManager) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, check := range audits {
		if err := check(m); err != nil {
			return err
		}
	}
	return nil
}

func auditTransactions(m *ProducerStateManager) error {
	logStart, abortedFrom := m.txns.bounds()
	if logStart < 0 || logStart > m.knownEnd() || abortedFrom < 0 || abortedFrom > m.knownEnd() {
		return fmt.Errorf("log start offset %d, aborted transactions known from %d, end offset %d", logStart, abortedFrom, m.endOffset)
	}
	want := map[int64]int64{} // first offsets, by producer id
	for row := range m.table.rows {
		if p := m.table.at(row); p.inTransaction() {
			want[p.id] = p.txnFirst
		}
	}
	t := m.txns
	if t == nil {
		if len(want) > 0 {
			return fmt.Errorf("state 3: transactions are open from %v, and none is known", want)
		}
		return nil
	}
	if t.watermark > m.knownEnd() {
		return fmt.Errorf("transactions: the watermark is %d, the end offset %d", t.watermark, m.endOffset)
	}
	return errors.Join(auditOpen(&t.open, want), auditEnded(t), auditAborted(&t.aborted, logStart, m.knownEnd()))
}

// auditOpen holds the open transactions against those in the rows.
func auditOpen(q *offsetQueue, want map[int64]int64) error {
	live := 0
	for i, e := range q.entries {
		if i > q.head && q.entries[i-1].key > e.key {
			return fmt.Errorf("offsetQueue 1: key %d comes after %d", e.key, q.entries[i-1].key)
		}
		if i == q.head && e.value == removed {
			return fmt.Errorf("offsetQueue 2: the head is removed")
		}
		if e.value == removed {
			continue
		}
		live++
		if first, ok := want[e.value]; i < q.head || !ok || first != e.key {
			return fmt.Errorf("transactions 1: entry %d is producer %d from %d, the head is %d, its row has %d (%t)", i, e.value, e.key, q.head, first, ok)
		}
	}
	if live != q.live || live != len(want) {
		return fmt.Errorf("offsetQueue 3: %d live, counted %d, and %d rows have a transaction", live, q.live, len(want))
	}
	if len(q.entries)-live > live+32 {
		return fmt.Errorf("offsetQueue 3: %d of %d entries are live", live, len(q.entries))
	}
	return nil
}

func auditEnded(t *transactions) error {
	last := endedTxn{noOffset, noOffset}
	for i, e := range t.ended {
		if e.first <= last.first || e.marker <= last.marker || e.first >= e.marker {
			return fmt.Errorf("endedQueue: entry %d is %+v, and comes after %+v", i, e, last)
		}
		if t.watermark == noOffset || e.marker < t.watermark {
			return fmt.Errorf("transactions 2: entry %d is %+v, and the watermark is %d", i, e, t.watermark)
		}
		last = e
	}
	return nil
}

func auditAborted(a *abortedRanges, logStart, end int64) error {
	if a.head < 0 || a.head > len(a.ranges) {
		return fmt.Errorf("abortedRanges: the head is %d of %d", a.head, len(a.ranges))
	}
	last := logStart - 1
	for i, r := range a.ranges[a.head:] {
		if r.LastOffset <= last || r.FirstOffset >= r.LastOffset || r.FirstOffset < 0 || r.LastOffset >= end {
			return fmt.Errorf("abortedRanges 1: range %d is %+v, behind a marker at %d, and the log [%d, %d)", i, r, last, logStart, end)
		}
		last = r.LastOffset
	}
	return auditMinima(a)
}

// auditMinima computes every minimum again.
func auditMinima(a *abortedRanges) error {
	below := make([]int64, len(a.ranges))
	for i, r := range a.ranges {
		below[i] = r.FirstOffset
	}
	for l, level := range a.minima {
		want := make([]int64, 0, len(level))
		for i, v := range below {
			if i%fanout == 0 {
				want = append(want, math.MaxInt64)
			}
			want[i/fanout] = min(want[i/fanout], v)
		}
		if fmt.Sprint(level) != fmt.Sprint(want) {
			return fmt.Errorf("abortedRanges 2: level %d has %v, want %v", l, level, want)
		}
		below = want
	}
	if len(a.ranges) > 0 && (len(a.minima) == 0 || len(below) != 1) {
		return fmt.Errorf("abortedRanges 3: %d ranges, and %d entries on the topmost of %d levels", len(a.ranges), len(below), len(a.minima))
	}
	return nil
}
