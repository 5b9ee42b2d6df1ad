// Package readback compares what a producer was told with what the log holds.
package readback

import (
	"context"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
)

// A Place is where a record is stored.
type Place struct {
	Partition int32
	Offset    int64
}

// Acks collects where each record, named by its value, was acknowledged.
type Acks struct {
	mu     sync.Mutex
	places map[string]Place
	err    error
}

// Promise is called by a client when a record has been acknowledged or has
// failed. It may be called concurrently.
func (a *Acks) Promise(r *kgo.Record, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err != nil && a.err == nil:
		a.err = err
	case err == nil && a.places == nil:
		a.places = make(map[string]Place)
		fallthrough
	case err == nil:
		a.places[string(r.Value)] = Place{r.Partition, r.Offset}
	}
}

// Len returns how many records were acknowledged so far.
func (a *Acks) Len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.places)
}

// Places returns where the records were acknowledged, and the error of the first
// one that failed. No Promise may be called after it.
func (a *Acks) Places() (map[string]Place, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.places, a.err
}

// Read returns the records of a topic, by partition and in the order of the log:
// all of them, unless an option says otherwise. Each partition must have at least
// one, and no transaction may be open.
func Read(ctx context.Context, addr, topic string, partitions int32, more ...kgo.Opt) ([][]string, error) {
	starts := make(map[int32]kgo.Offset)
	for i := range partitions {
		starts[i] = kgo.NewOffset().At(0)
	}
	cl, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(addr),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: starts}),
		kgo.KeepControlRecords(), // with which a partition may end
		kgo.AlwaysRetryEOF(),
	}, more...)...)
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
				if !r.Attrs.IsControl() {
					records[p.Partition] = append(records[p.Partition], string(r.Value))
				}
			}
			if n := len(p.Records); n > 0 && p.Records[n-1].Offset+1 == p.HighWatermark {
				unfinished--
			}
		})
	}
	return records, nil
}

// Counts are the differences between a log and one that has every acknowledged
// record exactly once, in order, at the offset acknowledged.
type Counts struct {
	Missing    int // acknowledged, and not in the log
	Duplicated int // copies beyond the first
	OutOfOrder int // first copies that come after a later record
	Misplaced  int // acknowledged at an offset where something else is
}

// Count compares a log with what was acknowledged. A record is "NAME NUMBER" and
// perhaps more. In each partition the numbers of a name must have one width and
// rise in the order in which they were produced.
func Count(log [][]string, acknowledged map[string]Place) Counts {
	var c Counts
	seen := make(map[string]bool)
	for _, records := range log {
		newest := make(map[string]string) // by name
		for _, r := range records {
			name, _, _ := strings.Cut(r, " ")
			switch {
			case seen[r]:
				c.Duplicated++
			case r < newest[name]:
				c.OutOfOrder++
			}
			seen[r] = true
			newest[name] = max(newest[name], r)
		}
	}
	for r, at := range acknowledged {
		records := log[at.Partition]
		switch {
		case !seen[r]:
			c.Missing++
		case at.Offset >= int64(len(records)) || records[at.Offset] != r:
			c.Misplaced++
		}
	}
	return c
}
