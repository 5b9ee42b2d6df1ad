package txn

// This file is the offsets of consumer groups.

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
)

// maxMetadata is the longest metadata of an offset, in bytes. It is Kafka's
// default.
const maxMetadata = 4096

// An Offset is a position that a consumer group commits for a partition.
type Offset struct {
	Partition   Partition
	Offset      int64
	LeaderEpoch int32 // -1: unknown
	Metadata    string
}

func compareOffsets(a, b Offset) int { return comparePartitions(a.Partition, b.Partition) }

func checkOffsets(group string, offsets []Offset) error {
	if err := checkGroup(group); err != nil {
		return err
	}
	for _, o := range offsets {
		switch err := checkPartition(o.Partition); {
		case err != nil:
			return err
		case o.Offset < 0 || o.LeaderEpoch < -1:
			return kerr.InvalidRequest
		case len(o.Metadata) > maxMetadata:
			return kerr.OffsetMetadataTooLarge
		}
	}
	return nil
}

// TxnOffsetCommit stages offsets of a group in the transaction of p. They are
// committed with it. Version 2 adds the group to the transaction, and begins one
// if none is open.
//
// Errors: as AddOffsetsToTxn, and INVALID_TXN_STATE, OFFSET_METADATA_TOO_LARGE.
func (c *Coordinator) TxnOffsetCommit(now time.Time, transactionalID string, p Producer, version int8, group string, offsets []Offset) error {
	if err := cmp.Or(checkName(transactionalID), checkOffsets(group, offsets)); err != nil {
		return err
	}
	_, err := c.change(now, transactionalID, func(t *transaction) (*transaction, error) {
		return t.stage(p, clampVersion(version), group, offsets, now.UnixMilli())
	})
	return err
}

// OffsetCommit commits offsets of a group, outside of a transaction.
//
// Errors: INVALID_GROUP_ID, INVALID_REQUEST, OFFSET_METADATA_TOO_LARGE.
func (c *Coordinator) OffsetCommit(group string, offsets []Offset) error {
	if err := checkOffsets(group, offsets); err != nil {
		return err
	}
	return c.write(offsetsRecord{group, merge(nil, offsets, compareOffsets)})
}

// A FetchedOffset is the answer of OffsetFetch for a partition.
type FetchedOffset struct {
	Committed Offset // its Offset is -1 where nothing was committed, or with an error
	Err       error  // nil or UNSTABLE_OFFSET_COMMIT
}

// OffsetFetch returns the committed offsets of a group for partitions, or for
// all that have one or have one staged if partitions is nil. If stable is set,
// a partition with a staged offset is answered with UNSTABLE_OFFSET_COMMIT: the
// transaction that staged it has not ended.
func (c *Coordinator) OffsetFetch(group string, partitions []Partition, stable bool) []FetchedOffset {
	c.mu.Lock()
	defer c.mu.Unlock()
	if partitions == nil {
		partitions = c.state.partitionsOf(group)
	}
	answers := make([]FetchedOffset, len(partitions))
	for i, p := range partitions {
		answers[i].Committed = Offset{Partition: p, Offset: -1, LeaderEpoch: -1}
		if stable && c.state.staged(group, p) {
			answers[i].Err = kerr.UnstableOffsetCommit
		} else if o, ok := c.state.offsets[group][p]; ok {
			answers[i].Committed = o.Offset
		}
	}
	return answers
}

// partitionsOf returns the partitions that a group has offsets of, committed or
// staged.
func (s *state) partitionsOf(group string) []Partition {
	all := slices.Collect(maps.Keys(s.offsets[group]))
	for id := range s.staging[group] {
		for _, o := range s.transactions[id].offsets {
			if o.group == group {
				all = append(all, o.Partition)
			}
		}
	}
	return merge(nil, all, comparePartitions)
}
