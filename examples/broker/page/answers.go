package page

// This file remembers the last answers of the broker.

import (
	"sync"
	"time"

	"github.com/idempotence-go/idempotence/examples/broker/page/lesson"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// A selection is what one reader looks at: a producer on a partition, or with
// anyProducer all of a partition, or with an empty topic nothing.
type selection struct {
	topic     string
	partition int32
	producer  int64
}

const anyProducer int64 = -2

const (
	recentAnswers   = 256 // of the whole broker
	selectedAnswers = 12  // of one selection
)

// answers are the last answers of the broker, and of each selection that readers
// look at, so that a quiet producer is not lost among busy ones. Answers to
// selections that nobody looks at are not kept.
type answers struct {
	mu       sync.Mutex
	n        uint64 // answers so far
	recent   ring
	followed map[selection]*following
}

type following struct {
	ring
	readers int
}

// An answered is an answer and when it was given. The words are found when a
// reader wants them.
type answered struct {
	number uint64
	at     time.Time
	server.Event
}

// A ring holds the newest answers.
type ring struct {
	a    []answered
	next int // where the next one goes once the ring is full
}

func (r *ring) push(a answered, size int) {
	if len(r.a) < size {
		r.a = append(r.a, a)
		return
	}
	r.a[r.next] = a
	r.next = (r.next + 1) % size
}

// newest returns the answers, newest first.
func (r *ring) newest() []answered {
	list := make([]answered, 0, len(r.a))
	for i := range r.a {
		list = append(list, r.a[(r.next+len(r.a)-1-i)%len(r.a)])
	}
	return list
}

func (s *answers) add(e server.Event, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	a := answered{s.n, now, e}
	s.recent.push(a, recentAnswers)
	if len(s.followed) == 0 {
		return
	}
	for _, producer := range [...]int64{e.Batch.ProducerID, anyProducer} {
		if f := s.followed[selection{e.Topic, e.Partition, producer}]; f != nil {
			f.push(a, selectedAnswers)
		}
	}
}

// follow begins to keep the answers of a selection, until stop is called. It
// begins with those that are known still.
func (s *answers) follow(sel selection) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.followed == nil {
		s.followed = make(map[selection]*following)
	}
	f := s.followed[sel]
	if f == nil {
		f = &following{}
		s.followed[sel] = f
		recent := s.recent.newest()
		for i := range recent {
			if a := recent[len(recent)-1-i]; sel.takes(a) {
				f.push(a, selectedAnswers)
			}
		}
	}
	f.readers++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if f.readers--; f.readers == 0 {
			delete(s.followed, sel)
		}
	}
}

func (sel selection) takes(a answered) bool {
	return a.Topic == sel.topic && a.Partition == sel.partition &&
		(sel.producer == anyProducer || sel.producer == a.Batch.ProducerID)
}

// of returns the last answers of a selection that is followed, newest first.
func (s *answers) of(sel selection) []answered {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.followed[sel]; f != nil {
		return f.newest()
	}
	return nil
}

// A shownAnswer is an answer for the page.
type shownAnswer struct {
	Number uint64    `json:"number"`
	At     time.Time `json:"at"`
	lesson.Answer
}

func show(list []answered) []shownAnswer {
	shown := make([]shownAnswer, len(list)) // not null
	for i, a := range list {
		shown[i] = shownAnswer{a.number, a.at, lesson.Explain(a.Batch, a.Result, a.Err, server.ErrorCode(a.Err))}
	}
	return shown
}
