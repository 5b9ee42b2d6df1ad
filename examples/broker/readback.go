package main

// What a producer was told and what the log holds, and how the two compare.

import (
	"context"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
)

// A place is where a record lives.
type place struct {
	partition int32
	offset    int64
}

// acks collects where each record, named by its value, was acknowledged.
type acks struct {
	mu     sync.Mutex
	places map[string]place
	err    error // the first record that failed
}

func newAcks() *acks { return &acks{places: make(map[string]place)} }

// promise is called by the client once a record has been acknowledged or
// given up.
func (a *acks) promise(r *kgo.Record, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err == nil:
		a.places[string(r.Value)] = place{r.Partition, r.Offset}
	case a.err == nil:
		a.err = err
	}
}

func (a *acks) len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.places)
}

// readBack returns all records of a topic, by partition and in log order. Each
// partition holds at least one.
func readBack(ctx context.Context, addr, topic string, partitions int32) ([][]string, error) {
	starts := make(map[int32]kgo.Offset)
	for i := range partitions {
		starts[i] = kgo.NewOffset().At(0)
	}
	cl, err := kgo.NewClient(
		kgo.SeedBrokers(addr),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: starts}),
		kgo.AlwaysRetryEOF(),
	)
	if err != nil {
		return nil, err
	}
	defer cl.Close()

	records := make([][]string, partitions)
	for unfinished := int(partitions); unfinished > 0; {
		fetches := cl.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return nil, err
		}
		fetches.EachPartition(func(p kgo.FetchTopicPartition) {
			for _, r := range p.Records {
				records[p.Partition] = append(records[p.Partition], string(r.Value))
			}
			if n := len(p.Records); n > 0 && p.Records[n-1].Offset+1 == p.HighWatermark {
				unfinished--
			}
		})
	}
	return records, nil
}

// counts is how a log differs from one that holds every acknowledged record
// exactly once, in order, at the offset acknowledged. All zero is as it should
// be.
type counts struct {
	missing    int // acknowledged and not there
	duplicated int // copies beyond the first
	outOfOrder int // first copies that come after a later record
	misplaced  int // acknowledged at an offset where something else is
}

// count compares the log with what was acknowledged. A record is "NAME NUMBER"
// and perhaps more, with numbers of one width that ascend, for each name and
// partition, in the order in which they were produced.
func count(log [][]string, acknowledged map[string]place) counts {
	var c counts
	seen := make(map[string]bool)
	for _, records := range log {
		newest := make(map[string]string) // by name
		for _, r := range records {
			name, _, _ := strings.Cut(r, " ")
			switch {
			case seen[r]:
				c.duplicated++
			case r < newest[name]:
				c.outOfOrder++
			}
			seen[r] = true
			newest[name] = max(newest[name], r)
		}
	}
	for r, at := range acknowledged {
		records := log[at.partition]
		switch {
		case !seen[r]:
			c.missing++
		case at.offset >= int64(len(records)) || records[at.offset] != r:
			c.misplaced++
		}
	}
	return c
}
