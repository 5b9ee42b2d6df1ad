package txn

// This file is the state that the records of a log add up to. Live calls and
// replays change it in one way only, by applying a record.

import (
	"maps"
	"slices"
)

// A state is all that the coordinator knows. It has no lock.
type state struct {
	epoch    int32 // of the coordinator: the number of starts
	reserved int64 // all producer ids below are reserved
	number   int64 // of the newest record
	durable  int64 // the highest number known to be durable

	transactions map[string]*transaction // by transactional id

	// unmarked has, for each transactional id in Prepare*, the partitions whose
	// markers are not done. It is not in the log.
	unmarked map[string]map[Partition]struct{}

	offsets map[string]map[Partition]committedOffset // by group
	staging map[string]map[string]struct{}           // transactional ids with staged offsets, by group
}

// A committedOffset is an offset and the number of the record that committed it.
type committedOffset struct {
	Offset
	number int64
}

func newState() *state {
	return &state{
		transactions: make(map[string]*transaction),
		unmarked:     make(map[string]map[Partition]struct{}),
		offsets:      make(map[string]map[Partition]committedOffset),
		staging:      make(map[string]map[string]struct{}),
	}
}

// apply makes the record part of the state. Records of one transactional id are
// applied in the order of their numbers, others may overtake each other.
func (s *state) apply(number int64, r record) {
	switch r := r.(type) {
	case startRecord:
		s.epoch = r.epoch
	case blockRecord:
		s.reserved = max(s.reserved, r.end)
	case *transaction:
		s.applyTransaction(number, r)
	case forgottenRecord:
		s.unstage(r.id)
		delete(s.unmarked, r.id)
		delete(s.transactions, r.id)
	case offsetsRecord:
		s.commitOffsets(number, r.group, r.offsets)
	}
}

func (s *state) applyTransaction(number int64, t *transaction) {
	s.unstage(t.id)
	applied := *t
	applied.fenced = false // the record is the fence
	if t.state.ended(true) {
		for _, o := range t.offsets {
			s.commitOffsets(number, o.group, []Offset{o.Offset})
		}
		applied.offsets = nil
	}
	t = &applied
	for _, o := range t.offsets {
		if s.staging[o.group] == nil {
			s.staging[o.group] = make(map[string]struct{})
		}
		s.staging[o.group][t.id] = struct{}{}
	}
	delete(s.unmarked, t.id)
	if t.state.preparing() {
		s.unmarked[t.id] = make(map[Partition]struct{}, len(t.partitions))
		for _, p := range t.partitions {
			s.unmarked[t.id][p] = struct{}{}
		}
	}
	s.transactions[t.id] = t
}

// unstage forgets which groups the transactional id has staged offsets of.
func (s *state) unstage(id string) {
	t := s.transactions[id]
	if t == nil {
		return
	}
	for _, o := range t.offsets {
		delete(s.staging[o.group], id)
		if len(s.staging[o.group]) == 0 {
			delete(s.staging, o.group)
		}
	}
}

// commitOffsets sets the offsets of a group that no later record has set.
func (s *state) commitOffsets(number int64, group string, offsets []Offset) {
	if s.offsets[group] == nil && len(offsets) > 0 {
		s.offsets[group] = make(map[Partition]committedOffset)
	}
	for _, o := range offsets {
		if s.offsets[group][o.Partition].number < number {
			s.offsets[group][o.Partition] = committedOffset{o, number}
		}
	}
}

// staged reports whether an open transaction has staged an offset of the group
// for the partition.
func (s *state) staged(group string, partition Partition) bool {
	for id := range s.staging[group] {
		_, found := slices.BinarySearchFunc(s.transactions[id].offsets,
			stagedOffset{group, Offset{Partition: partition}}, compareStaged)
		if found {
			return true
		}
	}
	return false
}

// marked reports whether all markers of a transaction in Prepare* are done.
func (s *state) marked(t *transaction) bool {
	return t.state.preparing() && len(s.unmarked[t.id]) == 0
}

// markers lists the markers that are not done, sorted.
func (s *state) markers() []Marker {
	var all []Marker
	for _, id := range slices.Sorted(maps.Keys(s.unmarked)) {
		for _, p := range slices.SortedFunc(maps.Keys(s.unmarked[id]), comparePartitions) {
			all = append(all, s.transactions[id].marker(p, s.epoch))
		}
	}
	return all
}

// frames returns the fewest records that add up to the state, numbered from
// s.number+1 on. Equal states give equal frames.
func (s *state) frames() []frame {
	var records []record
	if s.epoch > 0 {
		records = append(records, startRecord{s.epoch})
	}
	if s.reserved > 0 {
		records = append(records, blockRecord{s.reserved})
	}
	for _, id := range slices.Sorted(maps.Keys(s.transactions)) {
		records = append(records, s.transactions[id])
	}
	for _, group := range slices.Sorted(maps.Keys(s.offsets)) {
		r := offsetsRecord{group: group}
		for _, o := range s.offsets[group] {
			r.offsets = append(r.offsets, o.Offset)
		}
		slices.SortFunc(r.offsets, compareOffsets)
		records = append(records, r)
	}
	frames := make([]frame, len(records))
	for i, r := range records {
		frames[i] = frame{s.number + 1 + int64(i), s.number + int64(len(records)), r}
	}
	return frames
}
