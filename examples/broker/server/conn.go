package server

// This file is one connection: requests in, answers out in the same order,
// within limits of number, size, memory and time.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/wire"
)

const (
	idleTimeout  = 10 * time.Minute // between two requests of a connection
	readTimeout  = 10 * time.Second // for the rest of a request that has begun
	writeTimeout = 10 * time.Second // for an answer

	// maxPending is how many Produce requests may wait for their appends before
	// the next one is not read. Clients have five in flight.
	maxPending = 8

	// Requests other than Produce are lists of small elements, which take many
	// times their bytes once decoded: they are kept short, and their memory is
	// counted at the worst ratio.
	maxSmallRequest   = 64 << 10
	smallRequestRatio = 40

	// A body is read, and its memory claimed, piece by piece, so that a client
	// that announces much and sends nothing holds next to nothing.
	readPiece = 64 << 10
)

// errBusy is returned when memory for a request or an answer did not become
// free in time.
var errBusy = errors.New("server: out of request memory")

// A conn serves the requests of one connection. One goroutine reads requests and
// hands their batches to the logs, another answers them, in the order in which
// they came, as the protocol wants it. So the appends of several Produce
// requests are under way at once. Any other request is served when all before
// it have been answered, and before any that follows is read.
type conn struct {
	*Server
	net          net.Conn
	pending      chan *exchange
	fetchClaimed int64 // of fetchMemory, by the answer being sent
	out          []byte
}

// An exchange is a request and its answer.
type exchange struct {
	header   wire.Header
	claimed  int64                         // of requestMemory
	overlaps bool                          // with the requests that follow
	answer   func() (kmsg.Response, error) // waits for what has been begun
	answered chan struct{}
}

func (s *Server) serveConn(nc net.Conn) {
	defer s.dismiss(nc)
	c := &conn{Server: s, net: nc, pending: make(chan *exchange, maxPending)}
	var answering sync.WaitGroup
	answering.Go(c.answerAll)
	err := c.readAll()
	close(c.pending)
	answering.Wait()
	// A client that hangs up is not worth a word.
	if !errors.Is(err, io.EOF) && s.closing.Err() == nil {
		s.cfg.Log.Debug("connection closed", "client", nc.RemoteAddr(), "err", err)
	}
}

// readAll reads requests and begins them. After an error the connection is of
// no further use.
func (c *conn) readAll() error {
	for {
		x, err := c.readRequest()
		if err != nil {
			return err
		}
		c.pending <- x
		if !x.overlaps {
			<-x.answered
		}
	}
}

// answerAll answers what has been begun. Once that has failed the connection is
// closed, and it only waits for what is under way still.
func (c *conn) answerAll() {
	for x := range c.pending {
		if err := c.answer(x); err != nil {
			c.net.Close()
		}
		c.releaseMemory(x)
		close(x.answered)
	}
}

func (c *conn) answer(x *exchange) error {
	resp, err := x.answer()
	if resp == nil || err != nil {
		return err
	}
	return c.write(x.header, resp)
}

// readRequest reads one request and begins to serve it.
func (c *conn) readRequest() (*exchange, error) {
	frame, claimed, err := c.readFrame()
	x := &exchange{claimed: claimed, answered: make(chan struct{})}
	if err == nil {
		err = c.begin(x, frame)
	}
	if err != nil {
		c.requestMemory.Release(claimed)
		return nil, err
	}
	return x, nil
}

// begin decodes a request and says how it is answered.
func (c *conn) begin(x *exchange, frame []byte) error {
	h, req, err := wire.Decode(frame, apis)
	x.header = h
	if errors.Is(err, wire.ErrUnsupportedVersion) && kmsg.Key(h.Key) == kmsg.ApiVersions {
		x.header.Version = 0
		x.answer = func() (kmsg.Response, error) { return unsupportedApiVersions(), nil }
		return nil
	}
	if err != nil {
		return err
	}
	if req, ok := req.(*kmsg.ProduceRequest); ok {
		x.overlaps = true
		x.answer = c.produce(req)
		return nil
	}
	x.answer = func() (kmsg.Response, error) { return c.handle(req) }
	return nil
}

// readFrame reads one request without its length, and returns how much memory
// it has claimed for it, also with an error.
func (c *conn) readFrame() (frame []byte, claimed int64, err error) {
	c.net.SetReadDeadline(time.Now().Add(idleTimeout))
	// Shutdown first says that it closes and then sets a deadline; the other
	// way round here, so that one of the two is noticed.
	if c.closing.Err() != nil {
		return nil, claimed, c.closing.Err()
	}
	var prefix [4 + 2]byte // the length, and the key, which every request begins with
	if _, err := io.ReadFull(c.net, prefix[:1]); err != nil {
		return nil, claimed, err
	}
	deadline := time.Now().Add(readTimeout)
	c.net.SetReadDeadline(deadline)
	if _, err := io.ReadFull(c.net, prefix[1:4]); err != nil {
		return nil, claimed, err
	}
	size := int(int32(binary.BigEndian.Uint32(prefix[:])))
	if size < len(prefix)-4 {
		return nil, claimed, fmt.Errorf("%w: length %d", wire.ErrMalformed, size)
	}
	if _, err := io.ReadFull(c.net, prefix[4:]); err != nil {
		return nil, claimed, err
	}
	limit, ratio := maxSmallRequest, smallRequestRatio
	if kmsg.Key(binary.BigEndian.Uint16(prefix[4:])) == kmsg.Produce {
		limit, ratio = c.cfg.MaxRequestBytes, 1
	}
	if size > limit {
		return nil, claimed, fmt.Errorf("%w: %d bytes, at most %d", wire.ErrMalformed, size, limit)
	}

	ctx, cancel := context.WithDeadline(c.closing, deadline)
	defer cancel()
	frame = append(make([]byte, 0, min(size, readPiece)), prefix[4:]...)
	for len(frame) < size {
		piece := min(size-len(frame), readPiece)
		if c.requestMemory.Acquire(ctx, int64(piece)) != nil {
			return nil, claimed, errBusy
		}
		claimed += int64(piece)
		n := len(frame)
		frame = append(frame, make([]byte, piece)...)
		if _, err := io.ReadFull(c.net, frame[n:]); err != nil {
			return nil, claimed, err
		}
	}
	// What decoding takes is claimed only now that there is something to decode.
	decoded := int64(size * (ratio - 1))
	if c.requestMemory.Acquire(ctx, decoded) != nil {
		return nil, claimed, errBusy
	}
	return frame, claimed + decoded, nil
}

// claimFetchMemory claims memory for an answer with n bytes of records: once
// as read and once as encoded.
func (c *conn) claimFetchMemory(n int) error {
	ctx, cancel := context.WithTimeout(c.closing, writeTimeout)
	defer cancel()
	if c.fetchMemory.Acquire(ctx, int64(2*n)) != nil {
		return errBusy
	}
	c.fetchClaimed += int64(2 * n)
	return nil
}

// releaseMemory gives back what a request and its answer have claimed. Only a
// Fetch claims memory for the answer, and nothing overlaps with that one.
func (c *conn) releaseMemory(x *exchange) {
	c.requestMemory.Release(x.claimed)
	c.fetchMemory.Release(c.fetchClaimed)
	c.fetchClaimed = 0
}

func (c *conn) write(h wire.Header, resp kmsg.Response) error {
	resp.SetVersion(h.Version)
	c.out = wire.AppendResponse(c.out[:0], h.CorrelationID, resp)
	c.net.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := c.net.Write(c.out)
	if cap(c.out) > readPiece {
		c.out = nil // is not kept for the next, probably small, answer
	}
	return err
}

// handle serves a request other than Produce.
func (c *conn) handle(req kmsg.Request) (kmsg.Response, error) {
	switch req := req.(type) {
	case *kmsg.ApiVersionsRequest:
		return apiVersions(), nil
	case *kmsg.MetadataRequest:
		return c.metadata(req)
	case *kmsg.InitProducerIDRequest:
		return c.initProducerID(req), nil
	case *kmsg.ListOffsetsRequest:
		return c.listOffsets(req)
	case *kmsg.FetchRequest:
		return c.fetch(req)
	}
	return nil, fmt.Errorf("%w: key %d", wire.ErrUnsupportedKey, req.Key())
}
