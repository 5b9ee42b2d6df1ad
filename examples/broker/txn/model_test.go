package txn

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file is the model: the rules once more, so plain that they can be checked
// by reading. It remembers all that ever happened to a transactional id and
// answers each question by going through that. It shares no state and no
// arithmetic with the code under test.

// An event happened to a transactional id, and is in the log.
type event struct {
	what      string // granted, added, ended or completed
	at        time.Time
	told      Producer      // granted, ended: what the client is told
	missed    Producer      // granted, ended: what a client that missed that goes by, or NoProducer
	timeout   time.Duration // granted
	version   int8          // added, ended
	partition []Partition   // added
	group     []string      // added
	offset    []stagedOffset
	commit    bool     // ended
	marked    Producer // ended: what the markers bear
	fence     bool     // ended: by another request than EndTxn
}

type modelCommit struct {
	group string
	Offset
}

type model struct {
	now     time.Time
	events  map[string][]event
	fenced  map[string]bool               // in memory: could not be fenced
	done    map[string]map[Partition]bool // in memory: markers that are done
	commits []modelCommit                 // in the order of the log
	starts  int32
	nextID  int64
	blocks  int64 // how many were reserved

	fates []fate
	dead  bool
}

// write decides the fate of a record. It reports whether the record counts, and
// whether its write was acknowledged.
func (m *model) write() (counts, acked bool) {
	what := written
	if len(m.fates) > 0 {
		what, m.fates = m.fates[0], m.fates[1:]
	}
	if m.dead {
		return false, false
	}
	m.dead = what >= diedBefore
	return what == written || what == diedAfter, what == written
}

// happen writes an event, or not.
func (m *model) happen(id string, e event) (acked bool) {
	e.at = m.now
	counts, acked := m.write()
	if counts {
		m.events[id] = append(m.events[id], e)
		delete(m.done, id)
	}
	m.fenced[id] = m.fenced[id] && !acked || e.fence && !acked
	return acked
}

// newID takes a producer id.
func (m *model) newID() int64 {
	if m.nextID == firstID+1000*m.blocks {
		if m.dead {
			return -1 // nor can what it is for be written
		}
		m.blocks++
	}
	m.nextID++
	return m.nextID - 1
}

func (m *model) restart() {
	m.starts++
	m.nextID = firstID + 1000*m.blocks
	m.fenced, m.done = map[string]bool{}, map[string]map[Partition]bool{}
	m.fates, m.dead = nil, false
}

// newest returns the newest event that is one of what, and its index.
func (m *model) newest(id string, what ...string) (event, int) {
	for i, e := range slices.Backward(m.events[id]) {
		if slices.Contains(what, e.what) {
			return e, i
		}
	}
	return event{told: NoProducer, missed: NoProducer}, -1
}

func (m *model) present(id string) Producer {
	e, _ := m.newest(id, "granted", "ended")
	return e.told
}

// last returns what a client goes by that missed the newest answer. A client
// that has begun a transaction since has missed nothing.
func (m *model) last(id string) Producer {
	if e, _ := m.newest(id, "granted", "added", "ended"); e.what != "added" {
		return e.missed
	}
	return NoProducer
}

// open returns what was added to the newest transaction, ended or not.
func (m *model) open(id string) (version int8, start time.Time, partitions map[Partition]bool, groups map[string]bool, offsets map[stagedOffset]int64) {
	partitions, groups, offsets = map[Partition]bool{}, map[string]bool{}, map[stagedOffset]int64{}
	all := m.events[id]
	if _, last := m.newest(id, "granted", "added", "ended"); last >= 0 && all[last].what == "ended" {
		all = all[:last]
	}
	begun := false
	for _, e := range all {
		if e.what != "added" {
			begun = false
			continue
		}
		if !begun {
			begun, start = true, e.at
			clear(partitions)
			clear(groups)
			clear(offsets)
		}
		version = e.version
		for _, p := range e.partition {
			partitions[p] = true
		}
		for _, g := range e.group {
			groups[g] = true
		}
		for _, o := range e.offset {
			offsets[stagedOffset{o.group, Offset{Partition: o.Partition}}] = o.Offset.Offset
		}
	}
	if !begun {
		clear(partitions)
		clear(groups)
		clear(offsets)
	}
	return version, start, partitions, groups, offsets
}

func (m *model) state(id string) string {
	if len(m.events[id]) == 0 {
		return "unknown"
	}
	end, _ := m.newest(id, "ended")
	outcome := "Abort"
	if end.commit {
		outcome = "Commit"
	}
	switch newest := m.events[id][len(m.events[id])-1]; newest.what {
	case "granted":
		return "Empty"
	case "added":
		return "Ongoing"
	case "completed":
		return "Complete" + outcome
	}
	if _, _, partitions, _, _ := m.open(id); len(partitions) == 0 {
		return "Complete" + outcome // there are no markers to wait for
	}
	return "Prepare" + outcome
}

func (m *model) preparing(id string) bool {
	s := m.state(id)
	return s == "PrepareCommit" || s == "PrepareAbort"
}

func (m *model) complete(id string) bool {
	s := m.state(id)
	return s == "CompleteCommit" || s == "CompleteAbort"
}

// end ends the transaction of id.
func (m *model) end(id string, version int8, commit, raise, fence bool, missed Producer) (acked bool) {
	e := event{what: "ended", version: version, commit: commit, fence: fence, missed: NoProducer}
	e.told, e.marked = m.present(id), m.present(id)
	if raise {
		e.marked.Epoch = int16(min(int(e.marked.Epoch)+1, 32767))
		e.told, e.missed = e.marked, missed
		if version == 2 && e.marked.Epoch == 32767 {
			e.told = Producer{m.newID(), 0}
		}
	}
	_, _, _, _, offsets := m.open(id)
	before := m.state(id)
	before2 := len(m.events[id])
	acked = m.happen(id, e)
	if commit && before == "Ongoing" && len(m.events[id]) > before2 {
		for o, offset := range offsets {
			m.commits = append(m.commits, modelCommit{o.group, Offset{Partition: o.Partition, Offset: offset}})
		}
	}
	return acked
}

const unavailable = "COORDINATOR_NOT_AVAILABLE"

func answer(p Producer, acked bool) string {
	if !acked {
		return unavailable
	}
	return producerName(p)
}

func done(acked bool) string {
	if !acked {
		return unavailable
	}
	return "ok"
}

func (m *model) initProducerID(id string, expected Producer, timeout time.Duration) string {
	state, present, last := m.state(id), m.present(id), m.last(id)
	named := expected != NoProducer
	granted := event{what: "granted", timeout: timeout, missed: expected}
	version, _, _, _, _ := m.open(id)
	switch {
	case state == "unknown" && named:
		return "PRODUCER_FENCED"
	case state == "unknown":
		granted.told = Producer{m.newID(), 0}
	case named && expected != present && expected != last:
		return "PRODUCER_FENCED"
	case m.preparing(id):
		return "CONCURRENT_TRANSACTIONS"
	case state == "Ongoing":
		missed := NoProducer
		if named {
			missed = present
		}
		if !m.end(id, version, false, true, true, missed) {
			return unavailable
		}
		return "CONCURRENT_TRANSACTIONS"
	case named && expected == last && present.Epoch < 32767:
		return producerName(present)
	case present.Epoch >= 32766:
		granted.told = Producer{m.newID(), 0}
	default:
		granted.told = Producer{present.ID, present.Epoch + 1}
	}
	return answer(granted.told, m.happen(id, granted))
}

// holder refuses a request of a producer other than the present one.
func (m *model) holder(id string, p Producer) string {
	switch {
	case m.state(id) == "unknown" || p.ID != m.present(id).ID:
		return "INVALID_PRODUCER_ID_MAPPING"
	case p != m.present(id) || m.fenced[id]:
		return "PRODUCER_FENCED"
	}
	return ""
}

func (m *model) add(id string, p Producer, version int8, partitions []Partition, groups []string, offsets []stagedOffset) string {
	if refusal := m.holder(id, p); refusal != "" {
		return refusal
	}
	if m.preparing(id) {
		return "CONCURRENT_TRANSACTIONS"
	}
	was, _, havePartitions, haveGroups, haveOffsets := m.open(id)
	if m.state(id) != "Ongoing" {
		was, havePartitions, haveGroups, haveOffsets = 0, nil, nil, nil
	}
	if len(offsets) > 0 && version == 1 {
		if !haveGroups[offsets[0].group] {
			return "INVALID_TXN_STATE"
		}
		groups, version = nil, was // it neither adds the group nor changes the version
	}
	news := m.state(id) != "Ongoing" || version != was
	for _, x := range partitions {
		news = news || !havePartitions[x]
	}
	for _, x := range groups {
		news = news || !haveGroups[x]
	}
	final := map[stagedOffset]int64{}
	for _, o := range offsets {
		final[stagedOffset{o.group, Offset{Partition: o.Partition}}] = o.Offset.Offset
	}
	for o, offset := range final {
		old, have := haveOffsets[o]
		news = news || !have || old != offset
	}
	if !news || len(partitions)+len(groups)+len(offsets) == 0 {
		return "ok"
	}
	return done(m.happen(id, event{
		what: "added", version: version, partition: partitions, group: groups, offset: offsets,
	}))
}

func (m *model) verify(id string, p Producer, partition Partition) string {
	if refusal := m.holder(id, p); refusal != "" {
		return refusal
	}
	_, _, partitions, _, _ := m.open(id)
	switch {
	case m.preparing(id):
		return "CONCURRENT_TRANSACTIONS"
	case m.state(id) != "Ongoing" || !partitions[partition]:
		return "INVALID_TXN_STATE"
	}
	return "ok"
}

func (m *model) endTxn(id string, p Producer, version int8, commit bool) string {
	present, last, state := m.present(id), m.last(id), m.state(id)
	outcome, _ := m.newest(id, "ended")
	ended := m.preparing(id) || m.complete(id)
	if version == 2 && ended && p == last && last != NoProducer && present.Epoch < 32767 {
		if outcome.commit != commit {
			return "INVALID_TXN_STATE"
		}
		return producerName(present)
	}
	if refusal := m.holder(id, p); refusal != "" {
		return refusal
	}
	switch {
	case state == "Ongoing":
	case version == 1 && ended && outcome.commit == commit:
		return producerName(present)
	case version == 2 && m.preparing(id):
		return "CONCURRENT_TRANSACTIONS"
	case version == 1 || commit:
		return "INVALID_TXN_STATE"
	}
	acked := m.end(id, version, commit, version == 2, false, present)
	return answer(m.present(id), acked)
}

// markers lists what is to be written.
func (m *model) markers() []Marker {
	var all []Marker
	for _, id := range slices.Sorted(maps.Keys(m.events)) {
		if !m.preparing(id) {
			continue
		}
		e, _ := m.newest(id, "ended")
		_, _, partitions, _, _ := m.open(id)
		for _, p := range slices.SortedFunc(maps.Keys(partitions), comparePartitions) {
			if !m.done[id][p] {
				all = append(all, Marker{id, p, e.marked.ID, e.marked.Epoch, m.starts, e.commit, e.version})
			}
		}
	}
	return all
}

func (m *model) allDone(id string) bool {
	_, _, partitions, _, _ := m.open(id)
	return m.preparing(id) && len(m.done[id]) == len(partitions)
}

func (m *model) markerDone(k Marker) string {
	if !slices.Contains(m.markers(), k) {
		return "ok"
	}
	if m.done[k.TransactionalID] == nil {
		m.done[k.TransactionalID] = map[Partition]bool{}
	}
	m.done[k.TransactionalID][k.Partition] = true
	if !m.allDone(k.TransactionalID) {
		return "ok"
	}
	return done(m.completes(k.TransactionalID))
}

func (m *model) completes(id string) (acked bool) {
	kept := m.done[id]
	if acked = m.happen(id, event{what: "completed"}); !acked {
		m.done[id] = kept
	}
	return acked
}

func (m *model) expire() string {
	failed := false
	for _, id := range slices.Sorted(maps.Keys(m.events)) {
		version, start, _, _, _ := m.open(id)
		granted, _ := m.newest(id, "granted")
		newest := m.events[id][len(m.events[id])-1]
		acked := true
		switch state := m.state(id); {
		case state == "Ongoing" && !m.now.Before(start.Add(granted.timeout)):
			acked = m.end(id, version, false, true, true, m.present(id))
		case m.allDone(id):
			acked = m.completes(id)
		case state != "Ongoing" && !m.preparing(id) && !m.now.Before(newest.at.Add(7*24*time.Hour)):
			var counts bool
			if counts, acked = m.write(); counts {
				delete(m.events, id)
			}
		}
		failed = failed || !acked
	}
	return done(!failed)
}

func (m *model) offsetCommit(group string, offsets []Offset) string {
	counts, acked := m.write()
	if counts {
		for _, o := range offsets {
			m.commits = append(m.commits, modelCommit{group, o})
		}
	}
	return done(acked)
}

func (m *model) fetch(group string, p Partition, stable bool) string {
	for id := range m.events {
		if _, _, _, _, offsets := m.open(id); m.state(id) == "Ongoing" && stable {
			if _, staged := offsets[stagedOffset{group, Offset{Partition: p}}]; staged {
				return partitionName(p) + "=UNSTABLE_OFFSET_COMMIT"
			}
		}
	}
	for _, c := range slices.Backward(m.commits) {
		if c.group == group && c.Partition == p {
			return fmt.Sprintf("%s=%d", partitionName(p), c.Offset.Offset)
		}
	}
	return partitionName(p) + "=-1"
}

// shown is what a coordinator in the model's place shows.
func (m *model) shown() []string {
	var lines []string
	for _, id := range slices.Sorted(maps.Keys(m.events)) {
		state, present := m.state(id), m.present(id)
		producer := present
		line := ""
		if last := m.last(id); last != NoProducer {
			line += " last " + producerName(last)
		}
		if m.preparing(id) {
			e, _ := m.newest(id, "ended")
			if producer = e.marked; producer != present {
				line += " next " + producerName(present)
			}
		}
		if state == "Ongoing" || m.preparing(id) {
			_, start, partitions, groups, _ := m.open(id)
			for _, p := range slices.SortedFunc(maps.Keys(partitions), comparePartitions) {
				line += " " + partitionName(p)
			}
			for _, g := range slices.Sorted(maps.Keys(groups)) {
				line += " " + g
			}
			line += " since " + start.UTC().String()
		}
		granted, _ := m.newest(id, "granted")
		lines = append(lines, fmt.Sprintf("%s: %s %s%s, %v, %v", id, state, producerName(producer), line,
			granted.timeout, m.events[id][len(m.events[id])-1].at.UTC()))
	}
	for _, g := range modelGroups {
		for _, p := range modelPartitions {
			lines = append(lines, g+": "+m.fetch(g, p, false)+" "+m.fetch(g, p, true))
		}
	}
	return append(lines, markers(m.markers()))
}

func (w *world) lines() []string {
	var lines []string
	for _, d := range w.c.List() {
		since := ""
		if !d.Start.IsZero() {
			since = " since " + d.Start.UTC().String()
		}
		lines = append(lines, fmt.Sprintf("%s: %s%s, %v, %v", d.TransactionalID, w.state(d.TransactionalID), since, d.Timeout, d.LastUpdate.UTC()))
	}
	for _, g := range modelGroups {
		for _, p := range modelPartitions {
			one := []Partition{p}
			lines = append(lines, g+": "+fetched(w.c.OffsetFetch(g, one, false))+" "+fetched(w.c.OffsetFetch(g, one, true)))
		}
	}
	return append(lines, markers(w.c.Markers()))
}

var (
	modelIDs        = []string{"a", "b", "c"}
	modelGroups     = []string{"g", "h"}
	modelPartitions = []Partition{{"t", 0}, {"t", 1}, {"u", 0}}
)

// The coordinator and the model get the same requests, from producers that are
// right, late and wrong, with records that cannot be written and runs that end
// before or behind a record. They give the same answers and show the same.
func TestCoordinatorAgainstModel(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		var given []record
		m := &model{events: map[string][]event{}, starts: 0, nextID: firstID}
		for i, id := range modelIDs[:rapid.IntRange(0, 3).Draw(r, "given")] {
			p := Producer{int64(31 + i), rapid.SampledFrom([]int16{0, 32764, 32765, 32766}).Draw(r, "epoch")}
			x := held(id, Empty, p, 0)
			given = append(given, x)
			m.events[id] = []event{{what: "granted", told: p, missed: NoProducer, timeout: time.Minute, at: time.UnixMilli(x.updated)}}
		}
		w := newWorld(r, given...)
		w.rewrites = rapid.Bool().Draw(r, "rewrites")
		m.restart()
		m.now = w.now

		id := func() string { return rapid.SampledFrom(modelIDs).Draw(r, "id") }
		group := func() string { return rapid.SampledFrom(modelGroups).Draw(r, "group") }
		vers := func() int8 { return rapid.SampledFrom([]int8{1, 2}).Draw(r, "version") }
		partitions := func() []Partition {
			return rapid.SliceOfN(rapid.SampledFrom(modelPartitions), 0, 3).Draw(r, "partitions")
		}
		offsets := func() []Offset {
			var all []Offset
			for _, p := range rapid.SliceOfN(rapid.SampledFrom(modelPartitions), 1, 3).Draw(r, "offsets") {
				all = append(all, Offset{Partition: p, Offset: rapid.Int64Range(0, 9).Draw(r, "offset"), LeaderEpoch: -1})
			}
			return all
		}
		// producer is most often the one that is right.
		producer := func(id string) Producer {
			p := m.present(id)
			switch rapid.IntRange(0, 9).Draw(r, "who") {
			case 0:
				p = m.last(id)
			case 1:
				if all := m.events[id]; len(all) > 0 {
					if e := rapid.SampledFrom(all).Draw(r, "earlier"); e.told.ID > 0 {
						p = e.told
					}
				}
			case 2:
				p.Epoch = max(p.Epoch-1, 0)
			case 3:
				p = m.present(rapid.SampledFrom(modelIDs).Draw(r, "other"))
			}
			return Producer{max(p.ID, 0), max(p.Epoch, 0)}
		}
		same := func(what, got, want string) {
			r.Helper()
			if got != want {
				r.Fatalf("%s\ngot  %s\nwant %s", what, got, want)
			}
		}
		// end has the run end and another one start.
		restart := func() {
			w.restart()
			m.restart()
		}
		// audited runs an action, and checks everything afterwards.
		audited := func(action func()) func(*rapid.T) {
			return func(*rapid.T) {
				if rapid.IntRange(0, 9).Draw(r, "unlucky") == 0 {
					w.log.fates = rapid.SliceOfN(rapid.SampledFrom([]fate{written, refused, diedBefore, diedAfter}), 1, 3).Draw(r, "fates")
				}
				m.fates = slices.Clone(w.log.fates)
				action()
				w.log.fates = nil
				if w.log.dead {
					restart()
				}
				if diff := cmp.Diff(m.shown(), w.lines()); diff != "" {
					r.Fatalf("(-model +coordinator):\n%s", diff)
				}
			}
		}
		r.Repeat(map[string]func(*rapid.T){
			"init": audited(func() {
				id, expected := id(), NoProducer
				if rapid.Bool().Draw(r, "named") {
					expected = producer(id)
				}
				timeout := rapid.SampledFrom([]time.Duration{time.Second, time.Minute}).Draw(r, "timeout")
				want := m.initProducerID(id, expected, timeout)
				same(fmt.Sprint("init ", id, expected), producerOr(w.c.InitProducerID(w.now, id, expected, timeout)), want)
			}),
			"add": audited(func() {
				id := id()
				p, v, some := producer(id), vers(), partitions()
				want := m.add(id, p, v, some, nil, nil)
				same(fmt.Sprint("add ", id, p, v, some), ok(w.c.AddPartitionsToTxn(w.now, id, p, v, some)), want)
			}),
			"group": audited(func() {
				id := id()
				p, g := producer(id), group()
				want := m.add(id, p, 1, nil, []string{g}, nil)
				same(fmt.Sprint("group ", id, p, g), ok(w.c.AddOffsetsToTxn(w.now, id, p, g)), want)
			}),
			"stage": audited(func() {
				id := id()
				p, v, g, some := producer(id), vers(), group(), offsets()
				var staged []stagedOffset
				for _, o := range some {
					staged = append(staged, stagedOffset{g, o})
				}
				want := m.add(id, p, v, nil, []string{g}, staged)
				same(fmt.Sprint("stage ", id, p, v, g, some), ok(w.c.TxnOffsetCommit(w.now, id, p, v, g, some)), want)
			}),
			"verify": audited(func() {
				id := id()
				p, partition := producer(id), rapid.SampledFrom(modelPartitions).Draw(r, "partition")
				same(fmt.Sprint("verify ", id, p, partition), ok(w.c.VerifyPartition(id, p, partition)), m.verify(id, p, partition))
			}),
			"end": audited(func() {
				id := id()
				p, v, commit := producer(id), vers(), rapid.Bool().Draw(r, "commit")
				want := m.endTxn(id, p, v, commit)
				same(fmt.Sprint("end ", id, p, v, commit), producerOr(w.c.EndTxn(w.now, id, p, v, commit)), want)
			}),
			"done": audited(func() {
				all := w.c.Markers()
				if len(all) == 0 {
					return
				}
				k := rapid.SampledFrom(all).Draw(r, "marker")
				if rapid.IntRange(0, 9).Draw(r, "late") == 0 {
					k.Epoch--
				}
				want := m.markerDone(k)
				same(fmt.Sprint("done ", k), ok(w.c.MarkerDone(w.now, k, nil)), want)
			}),
			"expire": audited(func() {
				d := rapid.SampledFrom([]time.Duration{0, time.Second, time.Minute, 7 * 24 * time.Hour}).Draw(r, "later")
				w.now, m.now = w.now.Add(d), m.now.Add(d)
				want := m.expire()
				same("expire", ok(w.c.Expire(w.now)), want)
			}),
			"commit": audited(func() {
				g, some := group(), offsets()
				want := m.offsetCommit(g, some)
				same(fmt.Sprint("commit ", g, some), ok(w.c.OffsetCommit(g, some)), want)
			}),
			"newid": audited(func() {
				id, err := w.c.NewProducerID()
				same("newid", fmt.Sprint(id, err), fmt.Sprint(m.newID(), nil))
			}),
			"restart": audited(restart),
		})
	})
}
