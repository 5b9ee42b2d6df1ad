package server

// This file knows the topics: where they are on disk and how they come to be.

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/idempotence-go/idempotence"
)

// topics are all topics of the broker, by name. A topic is its partitions; on
// disk it is a directory TOPIC-PARTITION for each, as in Kafka.
type topics struct {
	cfg Config

	mu     sync.RWMutex
	byName map[string][]*partition
	count  int // partitions of all topics
}

var (
	validTopic   = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)
	partitionDir = regexp.MustCompile(`^(.+)-([0-9]+)$`)
)

// openTopics opens every topic found in the data directory.
func openTopics(cfg Config) (*topics, error) {
	ts := &topics{cfg: cfg, byName: make(map[string][]*partition)}
	entries, err := os.ReadDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	counts := make(map[string]int)
	for _, e := range entries {
		m := partitionDir.FindStringSubmatch(e.Name())
		if !e.IsDir() || m == nil || !validTopic.MatchString(m[1]) {
			continue
		}
		i, err := strconv.Atoi(m[2])
		if err != nil || i >= cfg.MaxPartitions {
			return nil, fmt.Errorf("partition directory %s: number too large", e.Name())
		}
		counts[m[1]] = max(counts[m[1]], i+1)
	}
	for name, n := range counts {
		if err := ts.open(name, n); err != nil {
			return nil, errors.Join(err, ts.close(false))
		}
	}
	return ts, nil
}

// open opens or creates the n partitions of a topic, the last one first: if a
// crash comes between, the number of partitions is known all the same.
func (ts *topics) open(name string, n int) error {
	partitions := make([]*partition, n)
	for i := n - 1; i >= 0; i-- {
		p, err := openPartition(ts.cfg, name, int32(i))
		if err != nil {
			for _, opened := range partitions[i+1:] {
				err = errors.Join(err, opened.close(false))
			}
			return err
		}
		partitions[i] = p
	}
	ts.byName[name] = partitions
	ts.count += n
	return nil
}

// get returns the partitions of a topic, which it creates if it may.
func (ts *topics) get(name string, create bool) ([]*partition, error) {
	ts.mu.RLock()
	t, ok := ts.byName[name]
	ts.mu.RUnlock()
	if ok {
		return t, nil
	}
	if !validTopic.MatchString(name) || strings.Trim(name, ".") == "" {
		return nil, kerr.InvalidTopicException
	}
	if !create {
		return nil, kerr.UnknownTopicOrPartition
	}
	return ts.create(name)
}

func (ts *topics) create(name string) ([]*partition, error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t, ok := ts.byName[name]; ok {
		return t, nil
	}
	if ts.count+int(ts.cfg.Partitions) > ts.cfg.MaxPartitions {
		return nil, kerr.PolicyViolation
	}
	if err := ts.open(name, int(ts.cfg.Partitions)); err != nil {
		ts.cfg.Log.Error("topic not created", "topic", name, "err", err)
		return nil, kerr.KafkaStorageError
	}
	ts.cfg.Log.Info("topic created", "topic", name, "partitions", ts.cfg.Partitions)
	return ts.byName[name], nil
}

// partition returns one partition of a topic that exists.
func (ts *topics) partition(topic string, i int32) (*partition, error) {
	t, err := ts.get(topic, false)
	if err != nil {
		return nil, err
	}
	if i < 0 || int(i) >= len(t) {
		return nil, kerr.UnknownTopicOrPartition
	}
	return t[i], nil
}

func (ts *topics) names() []string {
	ts.mu.RLock()
	defer ts.mu.RUnlock()
	return slices.Sorted(maps.Keys(ts.byName))
}

// all returns every partition, in no particular order.
func (ts *topics) all() []*partition {
	ts.mu.RLock()
	defer ts.mu.RUnlock()
	return slices.Concat(slices.Collect(maps.Values(ts.byName))...)
}

// maxProducerID returns the highest producer id that any log has seen.
func (ts *topics) maxProducerID() int64 {
	highest := idempotence.NoProducerID
	for _, p := range ts.all() {
		highest = max(highest, p.producers.MaxProducerID())
	}
	return highest
}

// knowProducer reports whether any partition remembers a producer.
func (ts *topics) knowProducer(id int64) bool {
	return slices.ContainsFunc(ts.all(), func(p *partition) bool {
		_, known := p.producers.Producer(id)
		return known
	})
}

// expire has every partition forget the producers that have been idle too long.
func (ts *topics) expire(now time.Time) {
	for _, p := range ts.all() {
		if n := p.producers.Expire(now); n > 0 {
			p.cfg.Log.Info("producers expired", "log", p.dir, "producers", n)
		}
	}
}

// close closes every partition, after a clean end of the broker or any other.
func (ts *topics) close(clean bool) error {
	var errs []error
	for _, p := range ts.all() {
		errs = append(errs, p.close(clean))
	}
	return errors.Join(errs...)
}

func dirOf(cfg Config, topic string, i int32) string {
	return filepath.Join(cfg.Dir, fmt.Sprintf("%s-%d", topic, i))
}
