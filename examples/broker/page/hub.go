package page

// This file is the live page: one collector for all readers, and a bounded queue
// for each of them.

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/idempotence-go/idempotence/examples/broker/page/lesson"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

const (
	collectInterval = 500 * time.Millisecond
	minRest         = 20 * time.Millisecond
	heartbeat       = 15 * time.Second // so that a reader that has gone is noticed
	messageTimeout  = 5 * time.Second  // for one message to one reader
	queuedMessages  = 4                // for one reader
	shownPartitions = 200
)

// A hub sends what it collects to all subscribers. Its goroutine runs while there
// is one.
type hub struct {
	page     *Page
	interval time.Duration

	mu          sync.Mutex
	subscribers map[*subscriber]struct{}
	running     bool
	wake        chan struct{} // gets one for a new subscriber
}

// A subscriber is one reader of the live page.
type subscriber struct {
	selection
	messages chan []byte // closed when the reader is too slow
	last     []byte      // the message sent last
	sentAt   time.Time
}

func newHub(p *Page) *hub {
	return &hub{
		page:        p,
		interval:    collectInterval,
		subscribers: make(map[*subscriber]struct{}),
		wake:        make(chan struct{}, 1),
	}
}

// subscribe returns a subscriber, or nil if there are too many.
func (h *hub) subscribe(sel selection) (s *subscriber, stop func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.subscribers) >= maxSubscribers {
		return nil, nil
	}
	unfollow := h.page.answers.follow(sel)
	s = &subscriber{selection: sel, messages: make(chan []byte, queuedMessages)}
	h.subscribers[s] = struct{}{}
	if !h.running {
		h.running = true
		go h.run()
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
	return s, func() {
		unfollow()
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.subscribers, s)
	}
}

// run sends messages until there are no subscribers.
func (h *hub) run() {
	for {
		begun := time.Now()
		if !h.round() {
			return
		}
		// Like the gate, it rests nine times as long as it worked.
		time.Sleep(max(minRest, 9*time.Since(begun)))
		select {
		case <-h.wake:
		case <-time.After(h.interval):
		}
	}
}

// round sends one message to each subscriber for whom something has changed.
func (h *hub) round() bool {
	selections := h.selections()
	messages := h.page.collect(selections)
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.subscribers {
		h.send(s, messages[s.selection])
	}
	h.running = len(h.subscribers) > 0
	return h.running
}

func (h *hub) selections() map[selection]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	selections := make(map[selection]bool)
	for s := range h.subscribers {
		selections[s.selection] = true
	}
	return selections
}

// send queues a message for a subscriber, and drops the subscriber if its queue is
// full. It requires mu to be held, and never waits.
func (h *hub) send(s *subscriber, message []byte) {
	now := time.Now()
	switch {
	case message == nil: // it came during the round
		return
	case string(message) != string(s.last):
	case now.Sub(s.sentAt) < heartbeat:
		return
	}
	select {
	case s.messages <- message:
		s.last, s.sentAt = message, now
	default:
		close(s.messages)
		delete(h.subscribers, s)
	}
}

// serveEvents sends what it is subscribed to as server-sent events.
func (p *Page) serveEvents(w http.ResponseWriter, r *http.Request) {
	sel, err := parseSelection(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s, stop := p.hub.subscribe(sel)
	if s == nil {
		w.Header().Set("Retry-After", "60")
		http.Error(w, fmt.Sprintf("%d readers already.", maxSubscribers), http.StatusServiceUnavailable)
		return
	}
	defer stop()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Connection", "close") // a reader that is dropped is disconnected
	rc := http.NewResponseController(w)
	rc.SetReadDeadline(time.Time{}) // that of the request is past once the reader is waited for
	rc.Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case message, ok := <-s.messages:
			if !ok {
				return
			}
			rc.SetWriteDeadline(time.Now().Add(messageTimeout))
			if _, err := fmt.Fprintf(w, "data: %s\n\n", message); err != nil {
				return
			}
			if err := rc.Flush(); err != nil {
				return
			}
		}
	}
}

// parseSelection reads the query of a request: a topic, a partition and a
// producer, each of which may be absent if the following are.
func parseSelection(r *http.Request) (selection, error) {
	sel := selection{producer: anyProducer}
	sel.topic = r.FormValue("topic")
	if sel.topic == "" {
		return sel, nil
	}
	partition, err := strconv.ParseInt(cmp.Or(r.FormValue("partition"), "0"), 10, 32)
	if err != nil {
		return sel, fmt.Errorf("partition: %w", err)
	}
	sel.partition = int32(partition)
	if text := r.FormValue("producer"); text != "" {
		if sel.producer, err = strconv.ParseInt(text, 10, 64); err != nil {
			return sel, fmt.Errorf("producer: %w", err)
		}
	}
	return sel, nil
}

// A message is what a reader of the live page gets.
type message struct {
	Partitions json.RawMessage `json:"partitions"` // the same for all readers
	More       int             `json:"more"`       // partitions that are not among them
	Selected   *selected       `json:"selected"`
}

// A partitionRow is one partition on the page.
type partitionRow struct {
	Topic      string `json:"topic"`
	Partition  int32  `json:"partition"`
	Start      int64  `json:"start"`
	Stable     int64  `json:"stable"`
	End        int64  `json:"end"`
	OpenTxns   int    `json:"openTxns"`
	Producers  int    `json:"producers"`
	InFlight   int    `json:"inFlight"`
	Accepted   uint64 `json:"accepted"`
	Duplicates uint64 `json:"duplicates"`
	Refused    uint64 `json:"refused"`
	Offline    string `json:"offline,omitempty"`
}

// selected is the partition and the producer that a reader has chosen.
type selected struct {
	Row      *partitionRow  `json:"row"`      // nil if there is no such partition
	Producer *producerState `json:"producer"` // nil if none is chosen, or it is not known
	Answers  []shownAnswer  `json:"answers"`
}

// producerState is one producer for the page.
type producerState struct {
	ID          int64              `json:"id,string"`
	Epoch       int16              `json:"epoch"`
	Window      []lesson.BatchSlot `json:"window"`
	Next        int32              `json:"next"`
	InFlight    int                `json:"inFlight"`
	Txn         int64              `json:"txn"`
	Coordinator int32              `json:"coordinator"`
	Active      *time.Time         `json:"active"`
}

// collect returns the message for each selection. The broker's locks are held for
// a look-up each.
func (p *Page) collect(selections map[selection]bool) map[selection][]byte {
	messages := make(map[selection][]byte, len(selections))
	var views []server.PartitionView
	s := p.broker.Load()
	if s != nil {
		views = s.Partitions()
	}
	rows := make([]partitionRow, min(len(views), shownPartitions))
	for i := range rows {
		rows[i] = rowOf(views[i])
	}
	m := message{More: len(views) - len(rows)}
	m.Partitions, _ = json.Marshal(rows) // numbers and text
	for sel := range selections {
		m.Selected = nil
		if sel.topic != "" && s != nil {
			m.Selected = p.selected(s, sel)
		}
		messages[sel], _ = json.Marshal(m)
	}
	return messages
}

func rowOf(v server.PartitionView) partitionRow {
	stats := v.Stats()
	row := partitionRow{
		Topic:      v.Topic(),
		Partition:  v.Index(),
		OpenTxns:   stats.OpenTransactions,
		Producers:  v.Len(),
		InFlight:   stats.OpenReservations,
		Accepted:   stats.Accepted,
		Duplicates: stats.Duplicate,
		Refused: stats.OutOfOrder + stats.Unknown + stats.Fenced + stats.Invalid +
			stats.InvalidTxn + stats.ConcurrentTxn + stats.CoordinatorFenced,
	}
	row.Start, row.Stable, row.End = v.Offsets()
	if err := v.Offline(); err != nil {
		row.Offline = err.Error()
	}
	return row
}

func (p *Page) selected(s *server.Server, sel selection) *selected {
	v, ok := s.Partition(sel.topic, sel.partition)
	if !ok {
		return &selected{Answers: []shownAnswer{}}
	}
	row := rowOf(v)
	out := &selected{Row: &row, Answers: show(p.answers.of(sel))}
	if state, known := v.Producer(sel.producer); known {
		ps := producerState{
			ID:          state.ProducerID,
			Epoch:       state.Epoch,
			InFlight:    state.InFlight,
			Txn:         state.CurrentTxnFirstOffset,
			Coordinator: state.CoordinatorEpoch,
		}
		ps.Window, ps.Next = lesson.WindowOf(state)
		if !state.LastActivity.IsZero() {
			ps.Active = &state.LastActivity
		}
		out.Producer = &ps
	}
	return out
}
