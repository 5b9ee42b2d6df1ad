package server

// This file is for looking in while the broker serves. Nothing in it changes
// anything, and none of it waits for a disk or a client.

import (
	"cmp"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/idempotence-go/idempotence"
)

// A PartitionView is one partition to look at. It stays valid after Shutdown and
// then shows the last state. Its methods may be called concurrently.
type PartitionView struct{ p *partition }

// Partitions returns all partitions, in the order of their topics' names and
// their numbers.
func (s *Server) Partitions() []PartitionView {
	var views []PartitionView
	for _, p := range s.topics.all() {
		views = append(views, PartitionView{p})
	}
	slices.SortFunc(views, func(a, b PartitionView) int {
		return cmp.Or(cmp.Compare(a.Topic(), b.Topic()), cmp.Compare(a.Index(), b.Index()))
	})
	return views
}

// Partition returns a partition by its topic and number, and whether there is
// one. It creates nothing.
func (s *Server) Partition(topic string, i int32) (PartitionView, bool) {
	s.topics.mu.RLock()
	defer s.topics.mu.RUnlock()
	t := s.topics.byName[topic]
	if i < 0 || int(i) >= len(t) {
		return PartitionView{}, false
	}
	return PartitionView{t[i]}, true
}

// Topic returns the name of the partition's topic.
func (v PartitionView) Topic() string { return v.p.topic }

// Index returns the number of the partition in its topic.
func (v PartitionView) Index() int32 { return v.p.index }

// Offline returns why the partition is not served, or nil.
func (v PartitionView) Offline() error { return v.p.offlineReason() }

// Offsets returns where the log starts, the offset that the next record gets, and
// the last stable offset: that of the first record that a consumer of committed
// records must still wait for. All are 0 if the log could not be opened.
func (v PartitionView) Offsets() (start, lastStable, end int64) {
	if v.p.log == nil {
		return 0, 0, 0
	}
	end = v.p.log.End()
	return v.p.log.Start(), v.p.producers.LastStableOffset(end), end
}

// Stats returns the counts of the partition's answers.
func (v PartitionView) Stats() idempotence.Stats { return v.p.producers.Stats() }

// Len returns how many producers the partition remembers.
func (v PartitionView) Len() int { return v.p.producers.Len() }

// Producer returns what is remembered of one producer, and whether anything is.
func (v PartitionView) Producer(id int64) (idempotence.ProducerState, bool) {
	return v.p.producers.Producer(id)
}

// Producers returns what is remembered of all producers, in the order of their
// ids. It sorts them first, which takes about 0.1 s for a million.
func (v PartitionView) Producers() iter.Seq[idempotence.ProducerState] {
	return v.p.producers.Producers()
}

// Timings returns how long the partition's recovery and snapshots have taken.
func (v PartitionView) Timings() Timings { return v.p.timings.get() }

// Timings are of one partition, since the broker was started.
type Timings struct {
	Recovery time.Duration // of the producers, at start; 0 if the log could not be opened

	Snapshots       int           // that were saved
	SnapshotTime    time.Duration // of all of them together
	LastSnapshot    time.Time     // when the newest was saved; zero if none was
	FailedSnapshots int
}

// timings are Timings that are still being taken.
type timings struct {
	mu sync.Mutex
	t  Timings
}

func (t *timings) get() Timings {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.t
}

func (t *timings) recovered(took time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.t.Recovery = took
}

func (t *timings) saved(begun time.Time, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		t.t.FailedSnapshots++
		return
	}
	t.t.Snapshots++
	t.t.LastSnapshot = time.Now()
	t.t.SnapshotTime += t.t.LastSnapshot.Sub(begun)
}

// ErrorCode returns the Kafka code that a producer gets for the Err of an Event.
func ErrorCode(err error) int16 { return errorCode(err) }
