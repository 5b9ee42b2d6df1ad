package idempotence

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
)

// This file is what transcripts say about transactions.
//
//	marker pid=31 epoch=0 coord=1 commit v=2 -> OK base=3   CheckMarker, append, CommitMarker
//	check-marker pid=31 epoch=0 coord=0 abort -> STALE_COORD current=0 coord=1 txn=3
//	reserve-marker pid=31 epoch=0 coord=1 abort -> OK #M    an append begins
//	commit #M base=3 -> OK                                  it landed at 3
//	append-failed #M                                        it did not land
//	commit-marker pid=31 epoch=0 coord=1 abort base=3 -> OK CommitMarker without CheckMarker
//	lso hw=4 -> 3                                           LastStableOffset
//	aborted from=0 to=9 -> 31@0-3 32@1-4                    or: none, UNKNOWN
//	open -> 31@0 32@1                                       or: none; by first offset
//	oldest -> 31@0                                          OldestTransaction
//	delete to=3                                             retention, and AdvanceStart
//	known-from -> 3                                         of aborted transactions
//	replayed-to to=9                                        ReplayedTo
//	snapshot-kafka K -> 4                                   in Kafka's format
//	restart-kafka K                                         memory lost, K restored, the log replayed from its end
//	txn-stats -> markers=1 invalid=0 concurrent=0 coordinator=0 open=0 aborted=1
//
// current= is the epoch that a refused marker met, coord= the coordinator epoch, txn=
// the first offset of the open transaction and offset= what was given.

func init() {
	for name, v := range map[string]verb{
		"marker":         {play: (*transcript).marker},
		"check-marker":   {play: (*transcript).checkMarker},
		"reserve-marker": {play: (*transcript).reserveMarker},
		"commit-marker":  {play: (*transcript).commitMarker},
		"commit":         {play: (*transcript).commitAny},
		"lso":            {play: (*transcript).lso, changes: true, whole: true},
		"aborted":        {play: (*transcript).aborted, whole: true},
		"open":           {play: (*transcript).open, whole: true},
		"oldest":         {play: (*transcript).oldest, whole: true},
		"delete":         {play: (*transcript).delete, changes: true},
		"known-from":     {play: (*transcript).knownFrom, whole: true},
		"replayed-to":    {play: (*transcript).replayedTo, changes: true},
		"snapshot-kafka": {play: (*transcript).snapshotKafka, whole: true},
		"restart-kafka":  {play: (*transcript).restartKafka, changes: true},
		"txn-stats":      {play: (*transcript).txnStats, whole: true},
	} {
		verbs[name] = v
	}
	for name, v := range verbs {
		v.play = unlessRefused(v)
		verbs[name] = v
	}
}

// unlessRefused holds the transactions after a refusal against those before it.
func unlessRefused(v verb) func(*transcript, step) string {
	return func(tr *transcript, s step) string {
		before := transactionsOf(tr.part.m)
		got := v.play(tr, s)
		if diff := cmp.Diff(before, transactionsOf(tr.part.m)); diff != "" && !v.changes && !strings.HasPrefix(got, "OK") {
			tr.t.Fatalf("it answered %q and changed the transactions (-before +after):\n%s", got, diff)
		}
		return got
	}
}

// txnState is what is known of transactions, as plain values.
type txnState struct {
	Open                  []string
	Ended                 []string
	Aborted               []AbortedTransaction
	Watermark             int64
	LogStart, AbortedFrom int64
}

// transactionsOf reads what is known of transactions, and leaves no mark.
func transactionsOf(m *ProducerStateManager) txnState {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := txnState{Watermark: noOffset}
	s.LogStart, s.AbortedFrom = m.txns.bounds()
	if t := m.txns; t != nil {
		for _, e := range t.open.entries[t.open.head:] {
			if e.value != removed {
				s.Open = append(s.Open, fmt.Sprintf("%d@%d", e.value, e.key))
			}
		}
		for _, e := range t.ended {
			s.Ended = append(s.Ended, fmt.Sprintf("%d-%d", e.first, e.marker))
		}
		s.Aborted = append(s.Aborted, t.aborted.ranges[t.aborted.head:]...)
		s.Watermark = t.watermark
	}
	return s
}

func (tr *transcript) versionedMarkerOf(s step) Marker {
	k := *tr.markerOf(s)
	if s.args["v"] != "" {
		k.Version = int8(tr.number(s, "v"))
	}
	return k
}

// markerRefusal writes down the refusal of a marker and the facts that it states.
func markerRefusal(err error) string {
	var e *MarkerError
	if !errors.As(err, &e) {
		return refusal(err)
	}
	return fmt.Sprintf("%s current=%d coord=%d txn=%d offset=%d",
		refusalName(err), e.CurrentEpoch, e.CurrentCoordinatorEpoch, e.TransactionFirstOffset, e.Offset)
}

// marker judges a marker, and appends and commits it where it is accepted.
func (tr *transcript) marker(s step) string {
	k := tr.versionedMarkerOf(s)
	if err := tr.part.m.CheckMarker(k); err != nil {
		return markerRefusal(err)
	}
	base := tr.part.end
	if err := tr.part.m.CommitMarker(k, base); err != nil {
		return "REFUSED " + markerRefusal(err)
	}
	tr.part.append(logged{marker: &k, base: base})
	return fmt.Sprintf("OK base=%d", base)
}

func (tr *transcript) checkMarker(s step) string {
	if err := tr.part.m.CheckMarker(tr.versionedMarkerOf(s)); err != nil {
		return markerRefusal(err)
	}
	return "OK"
}

func (tr *transcript) commitMarker(s step) string {
	k, base := tr.versionedMarkerOf(s), tr.number(s, "base")
	if err := tr.part.m.CommitMarker(k, base); err != nil {
		return "REFUSED " + markerRefusal(err)
	}
	tr.part.append(logged{marker: &k, base: base})
	return "OK"
}

// reserveMarker also asks CheckMarker, which must give the same answer.
func (tr *transcript) reserveMarker(s step) string {
	k := tr.versionedMarkerOf(s)
	check := tr.part.m.CheckMarker(k)
	r, err := tr.part.m.ReserveMarker(k)
	if (check == nil) != (err == nil) || (r == nil) != (err != nil) || err != nil && markerRefusal(check) != markerRefusal(err) {
		tr.t.Fatalf("CheckMarker answers %v, and ReserveMarker %v with %v", check, err, r)
	}
	if err != nil {
		return markerRefusal(err)
	}
	tr.held[handle(s.want)] = inFlight{batch: k.batch(), reservation: r}
	return "OK"
}

// commitAny is commit for a batch or a marker.
func (tr *transcript) commitAny(s step) string {
	f, ok := tr.held[handle(s.words)]
	if !ok || f.reservation == nil || f.batch.BaseSequence >= 0 {
		return tr.commit(s)
	}
	k := tr.markerInFlight(f)
	base := tr.number(s, "base")
	if err := f.reservation.Commit(base); err != nil {
		return "REFUSED " + markerRefusal(err)
	}
	tr.part.append(logged{marker: k, base: base})
	return "OK"
}

// markerInFlight returns the marker that a reservation is for, or nil if it has ended.
func (tr *transcript) markerInFlight(f inFlight) *Marker {
	m := tr.part.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.inFlight == nil || int(f.reservation.queue) >= len(m.inFlight.queues) {
		return nil
	}
	return m.inFlight.queues[f.reservation.queue].marker
}

func (tr *transcript) lso(s step) string {
	return fmt.Sprint(tr.part.m.LastStableOffset(tr.number(s, "hw")))
}

func (tr *transcript) aborted(s step) string {
	all, err := tr.part.m.AbortedTransactions(tr.number(s, "from"), tr.number(s, "to"))
	switch {
	case errors.Is(err, ErrAbortedUnknown) && all == nil:
		return "UNKNOWN"
	case err != nil:
		return fmt.Sprintf("%v together with %v", err, all)
	case all == nil:
		return "none"
	}
	var words []string
	for _, a := range all {
		words = append(words, fmt.Sprintf("%d@%d-%d", a.ProducerID, a.FirstOffset, a.LastOffset))
	}
	return strings.Join(words, " ")
}

// open lists the open transactions, as Producers and the index of them have them.
func (tr *transcript) open(step) string {
	states := slices.DeleteFunc(slices.Collect(tr.part.m.Producers()), func(p ProducerState) bool { return p.CurrentTxnFirstOffset < 0 })
	slices.SortFunc(states, func(a, b ProducerState) int { return int(a.CurrentTxnFirstOffset - b.CurrentTxnFirstOffset) })
	words := []string{}
	for _, p := range states {
		words = append(words, fmt.Sprintf("%d@%d", p.ProducerID, p.CurrentTxnFirstOffset))
	}
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, " ")
}

func (tr *transcript) oldest(step) string {
	p, ok := tr.part.m.OldestTransaction()
	if !ok {
		return "none"
	}
	return fmt.Sprintf("%d@%d", p.ProducerID, p.CurrentTxnFirstOffset)
}

func (tr *transcript) delete(s step) string {
	tr.part.advanceStart(tr.number(s, "to"))
	tr.part.m.AdvanceStart(tr.number(s, "to"))
	return ""
}

// knownFrom finds the lowest offset from which aborted transactions are told.
func (tr *transcript) knownFrom(step) string {
	from := int64(0)
	for {
		if _, err := tr.part.m.AbortedTransactions(from, from); err == nil {
			return fmt.Sprint(from)
		}
		from++
	}
}

func (tr *transcript) replayedTo(s step) string {
	tr.part.m.ReplayedTo(tr.number(s, "to"))
	return ""
}

func (tr *transcript) snapshotKafka(s step) string {
	snapshot := tr.part.m.Snapshot()
	var b bytes.Buffer
	if _, err := snapshot.WriteKafka(&b); err != nil {
		tr.t.Fatalf("WriteKafka: %v", err)
	}
	tr.snapshots["kafka "+s.words[0]] = b.Bytes()
	return fmt.Sprint(snapshot.EndOffset())
}

func (tr *transcript) restartKafka(s step) string {
	tr.part.m = New(tr.part.cfg)
	if err := tr.part.m.RestoreKafka(bytes.NewReader(tr.snapshots["kafka "+s.words[0]]), tr.number(s, "end")); err != nil {
		tr.t.Fatalf("RestoreKafka: %v", err)
	}
	for _, l := range tr.part.log {
		if l.end() > tr.part.m.EndOffset() {
			if err := apply(tr.part.m, l); err != nil {
				tr.t.Fatalf("replay of %+v: %v", l, err)
			}
		}
	}
	tr.part.m.Advance(tr.part.end)
	return ""
}

func (tr *transcript) txnStats(step) string {
	s := tr.part.m.Stats()
	return fmt.Sprintf("markers=%d invalid=%d concurrent=%d coordinator=%d open=%d aborted=%d",
		s.Markers, s.InvalidTxn, s.ConcurrentTxn, s.CoordinatorFenced, s.OpenTransactions, s.AbortedRanges)
}
