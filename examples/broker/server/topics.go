package server

// This file knows the topics: where they are on disk and how they are created.

import (
	"context"
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
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// topics are all topics of the broker, by name. A topic is its partitions. On
// disk each is a directory TOPIC-PARTITION, as in Kafka.
type topics struct {
	cfg   Config
	waits *semaphore.Weighted // for batches that wait to be judged

	creating sync.Mutex // held while a topic is created; mu is locked inside it

	mu     sync.RWMutex
	byName map[string][]*partition
}

const (
	// maxWaits is how many batches of all connections may wait to be judged.
	maxWaits = 10_000

	// atOnce is how many partitions are opened or closed concurrently. Most of
	// the time each waits for the disk.
	atOnce = 32
)

// openTopics opens all topics in the data directory. A partition that cannot be
// opened is offline; the others are served.
func openTopics(cfg Config) (*topics, error) {
	ts := &topics{
		cfg:    cfg,
		waits:  semaphore.NewWeighted(maxWaits),
		byName: make(map[string][]*partition),
	}
	counts, err := partitionCounts(cfg)
	if err != nil {
		return nil, err
	}
	clean := readCleanStop(cfg.Dir)
	var opening errgroup.Group
	opening.SetLimit(atOnce)
	for name, n := range counts {
		ts.byName[name] = ts.newPartitions(name, n)
		for _, p := range ts.byName[name] {
			p.clean = clean[filepath.Base(p.dir)]
			opening.Go(func() error {
				if err := p.open(); err != nil {
					p.offline = err
					cfg.Log.Error("partition offline", "log", p.dir, "err", err)
				}
				return nil
			})
		}
	}
	return ts, opening.Wait()
}

var partitionDir = regexp.MustCompile(`^(.+)-(0|[1-9][0-9]{0,8})$`)

// partitionCounts returns how many partitions each topic has whose directories
// are in the data directory. One without a log is not counted: either it is
// something else, or the broker crashed before it had created the topic.
func partitionCounts(cfg Config) (map[string]int, error) {
	entries, err := os.ReadDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	counts := make(map[string]int)
	for _, e := range entries {
		if !segment.Exists(filepath.Join(cfg.Dir, e.Name())) {
			continue
		}
		name, i, ok := parseDirName(e.Name())
		if !ok || int(i) >= cfg.MaxPartitions {
			cfg.Log.Error("directory ignored", "dir", e.Name(),
				"err", fmt.Sprintf("not named after a topic and a partition below %d", cfg.MaxPartitions))
			continue
		}
		counts[name] = max(counts[name], int(i)+1)
	}
	return counts, nil
}

// parseDirName returns the partition that a directory is named after.
func parseDirName(name string) (topic string, i int32, ok bool) {
	m := partitionDir.FindStringSubmatch(name)
	if m == nil || !validTopic(m[1]) {
		return "", 0, false
	}
	n, err := strconv.ParseInt(m[2], 10, 32)
	return m[1], int32(n), err == nil
}

// newPartitions returns the partitions of a topic, which are not open yet.
func (ts *topics) newPartitions(topic string, n int) []*partition {
	partitions := make([]*partition, n)
	for i := range partitions {
		partitions[i] = newPartition(ts.cfg, topic, int32(i))
		partitions[i].waits = ts.waits
	}
	return partitions
}

func newPartition(cfg Config, topic string, i int32) *partition {
	return &partition{
		cfg:   cfg,
		topic: topic,
		index: i,
		dir:   filepath.Join(cfg.Dir, fmt.Sprintf("%s-%d", topic, i)),
		producers: idempotence.New(idempotence.Config{
			UnknownProducer: cfg.UnknownProducer,
			Expiration:      cfg.ExpireAfter,
			MaxProducers:    cfg.MaxProducers,
			LogID:           LogID(topic, i),
			Contiguous:      true,
		}),
		waits:    semaphore.NewWeighted(maxWaits),
		watchers: make(map[chan<- struct{}]struct{}),
	}
}

var (
	topicName = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,248}$`)

	// Windows takes a name for that of a device if its part before the first
	// dot is one.
	deviceName = regexp.MustCompile(`^(?i:con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)`)
)

// validTopic reports whether a topic may have the name. Kafka allows a few more:
// names that begin with a dot or a dash, whose directories would be hidden, or
// taken for an option of a command, and names of devices.
func validTopic(name string) bool {
	return topicName.MatchString(name) && !deviceName.MatchString(name)
}

// get returns the partitions of a topic, which it creates if it may.
func (ts *topics) get(name string, create bool) ([]*partition, error) {
	ts.mu.RLock()
	t, ok := ts.byName[name]
	ts.mu.RUnlock()
	switch {
	case ok:
		return t, nil
	case !validTopic(name):
		return nil, kerr.InvalidTopicException
	case !create:
		return nil, kerr.UnknownTopicOrPartition
	}
	return ts.create(name)
}

// create creates a topic. Other topics are served meanwhile, whatever the disk
// takes.
func (ts *topics) create(name string) ([]*partition, error) {
	ts.creating.Lock()
	defer ts.creating.Unlock()
	if t, err := ts.mayCreate(name); t != nil || err != nil {
		return t, err
	}
	t := ts.newPartitions(name, int(ts.cfg.Partitions))
	if err := openAll(t); err != nil {
		ts.cfg.repeated.Error("topic not created", "topic", name, "err", err)
		return nil, kerr.KafkaStorageError
	}
	ts.cfg.Log.Info("topic created", "topic", name, "partitions", len(t))
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.byName[name] = t
	return t, nil
}

// mayCreate returns the topic if there is one, and an error if there cannot be.
func (ts *topics) mayCreate(name string) ([]*partition, error) {
	ts.mu.RLock()
	defer ts.mu.RUnlock()
	if t, ok := ts.byName[name]; ok {
		return t, nil
	}
	count := int(ts.cfg.Partitions)
	for other, t := range ts.byName {
		if strings.EqualFold(other, name) {
			// Some file systems would give both the same directories.
			return nil, fmt.Errorf("%w: there is %s", kerr.InvalidTopicException, other)
		}
		count += len(t)
	}
	if count > ts.cfg.MaxPartitions {
		return nil, kerr.PolicyViolation
	}
	return nil, nil
}

// openAll opens the partitions of a new topic, the last one first, so that their
// number is known after a crash in between.
func openAll(partitions []*partition) error {
	for i, p := range slices.Backward(partitions) {
		if err := p.open(); err != nil {
			for _, opened := range partitions[i+1:] {
				err = errors.Join(err, opened.close(false))
			}
			return err
		}
	}
	return nil
}

// partition returns a partition that exists and can be read.
func (ts *topics) partition(topic string, i int32) (*partition, error) {
	t, err := ts.get(topic, false)
	switch {
	case err != nil:
		return nil, err
	case i < 0 || int(i) >= len(t):
		return nil, kerr.UnknownTopicOrPartition
	case t[i].log == nil:
		return nil, kerr.KafkaStorageError
	}
	return t[i], nil
}

func (ts *topics) names() []string {
	ts.mu.RLock()
	defer ts.mu.RUnlock()
	return slices.Sorted(maps.Keys(ts.byName))
}

// all returns all partitions, in no particular order.
func (ts *topics) all() []*partition {
	ts.mu.RLock()
	defer ts.mu.RUnlock()
	return slices.Concat(slices.Collect(maps.Values(ts.byName))...)
}

// maxProducerID returns the highest producer id that any log has seen, or
// idempotence.NoProducerID.
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

func (ts *topics) expire(now time.Time) {
	for _, p := range ts.all() {
		p.expire(now)
	}
}

// close closes all partitions: in good order, until ctx ends.
func (ts *topics) close(ctx context.Context) error {
	var (
		closing errgroup.Group
		mu      sync.Mutex
		errs    []error
	)
	closing.SetLimit(atOnce)
	for _, p := range ts.all() {
		closing.Go(func() error {
			err := p.close(ctx.Err() == nil)
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
			return nil
		})
	}
	closing.Wait()
	return errors.Join(errs...)
}
