package server

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// A full disk fails every append, and a flood of connections has every one of
// them refused. Of such messages the log gets the first few of each minute, and
// how many more there were.
const (
	quietInterval = time.Minute
	quietBurst    = 5
)

// A quietHandler passes records on to another handler, but of those with the
// same message only quietBurst in an interval. At its end it passes on one more,
// with their number. It is made for messages that are constants.
type quietHandler struct {
	slog.Handler
	*quietCounts // shared by all handlers with other attributes
}

type quietCounts struct {
	interval time.Duration

	mu       sync.Mutex
	messages map[string]*quietCount
}

// A quietCount counts the records with one message in the current interval.
type quietCount struct {
	passed, held int
	end          *time.Timer
	last         slog.Record // of those that were held back
	to           slog.Handler
}

func newQuietHandler(h slog.Handler, interval time.Duration) *quietHandler {
	return &quietHandler{h, &quietCounts{interval: interval, messages: make(map[string]*quietCount)}}
}

func (h *quietHandler) Handle(ctx context.Context, r slog.Record) error {
	if h.holdBack(r, h.Handler) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

func (h *quietHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &quietHandler{h.Handler.WithAttrs(attrs), h.quietCounts}
}

func (h *quietHandler) WithGroup(name string) slog.Handler {
	return &quietHandler{h.Handler.WithGroup(name), h.quietCounts}
}

// holdBack counts a record and reports whether it is one too many.
func (c *quietCounts) holdBack(r slog.Record, to slog.Handler) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.messages[r.Message]
	if m == nil {
		m = &quietCount{end: time.AfterFunc(c.interval, func() { c.finish(r.Message) })}
		c.messages[r.Message] = m
	}
	if m.passed < quietBurst {
		m.passed++
		return false
	}
	m.held++
	m.last, m.to = r, to
	return true
}

// finish ends the interval of a message.
func (c *quietCounts) finish(message string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.messages[message]
	if m == nil {
		return
	}
	delete(c.messages, message)
	m.end.Stop()
	if m.held > 0 {
		sum := slog.NewRecord(time.Now(), m.last.Level, message, 0)
		sum.AddAttrs(slog.Int("more", m.held))
		m.to.Handle(context.Background(), sum)
	}
}

// flush ends the intervals of all messages.
func (c *quietCounts) flush() {
	c.mu.Lock()
	var messages []string
	for message := range c.messages {
		messages = append(messages, message)
	}
	c.mu.Unlock()
	for _, message := range messages {
		c.finish(message)
	}
}
