package server

// This file is one connection: it reads requests and answers them in the same
// order.

import (
	"context"
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
	writeTimeout = 10 * time.Second // for an answer

	// maxPending is how many Produce requests may wait for their appends before
	// the next one is read. Clients have five in flight.
	maxPending = 8
)

// A conn serves the requests of one connection. One goroutine reads requests and
// passes their batches to the logs. Another one answers them in the order in
// which they came, as the protocol demands. So several Produce requests can be
// in progress at once. Any other request is served after all earlier ones have
// been answered, and before a later one is read.
type conn struct {
	server  *Server
	net     net.Conn
	pending chan *exchange

	// waiting has, for each partition, the newest batch of this connection that
	// waits to be judged. A later batch for the partition waits behind it.
	waiting map[*partition]*pendingAppend

	answer           claim  // for the Fetch answer being sent
	out              []byte // buffer for answers
	reading, writing pace
}

// An exchange is a request and its answer.
type exchange struct {
	header   wire.Header
	memory   claim
	overlaps bool                          // later requests may be read before it is answered
	answer   func() (kmsg.Response, error) // waits for what the request has begun
	answered chan struct{}
}

func (s *Server) serveConn(nc net.Conn) {
	defer s.dismiss(nc)
	c := &conn{
		server:  s,
		net:     nc,
		pending: make(chan *exchange, maxPending),
		waiting: make(map[*partition]*pendingAppend),
	}
	var answering sync.WaitGroup
	answering.Go(c.answerAll)
	err := c.readAll()
	close(c.pending)
	answering.Wait()
	if !errors.Is(err, io.EOF) && s.closing.Err() == nil {
		s.cfg.Log.Debug("connection closed", "client", nc.RemoteAddr(), "err", err)
	}
}

// stalled reports whether the connection waits for a client that is too slow.
func (c *conn) stalled(now time.Time) bool { return c.reading.stalled(now) || c.writing.stalled(now) }

// drop ends the connection.
func (c *conn) drop() { c.net.Close() }

// readAll reads requests and begins to serve them, until there is an error or
// the client hangs up.
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

// answerAll answers the requests that were read. After an error it closes the
// connection and waits for what the remaining requests have begun.
func (c *conn) answerAll() {
	for x := range c.pending {
		if err := c.answerOne(x); err != nil {
			c.net.Close()
		}
		c.answer.release(c)
		c.answer = claim{}
		x.memory.release(c)
		close(x.answered)
	}
}

func (c *conn) answerOne(x *exchange) error {
	resp, err := x.answer()
	if resp == nil || err != nil {
		return err
	}
	return c.write(x.header, resp)
}

// readRequest reads one request and begins to serve it.
func (c *conn) readRequest() (*exchange, error) {
	frame, memory, err := c.readFrame()
	if err != nil {
		return nil, err
	}
	x := &exchange{memory: memory, answered: make(chan struct{})}
	if err := c.begin(x, frame); err != nil {
		memory.release(c)
		return nil, err
	}
	return x, nil
}

// begin decodes a request and sets how it is answered.
func (c *conn) begin(x *exchange, frame []byte) error {
	h, req, err := wire.Decode(frame, c.server.apis)
	x.header = h
	if errors.Is(err, wire.ErrUnsupportedVersion) && kmsg.Key(h.Key) == kmsg.ApiVersions {
		x.header.Version = 0
		x.answer = func() (kmsg.Response, error) { return c.server.unsupportedApiVersions(), nil }
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
	x.answer = func() (kmsg.Response, error) {
		resp, err := c.handle(req)
		if err == nil {
			c.server.cfg.ObserveAnswer(req, resp)
		}
		return resp, err
	}
	return nil
}

// claimAnswer claims memory for a Fetch answer. It is released when the answer
// has been sent.
func (c *conn) claimAnswer(bytes int64) error {
	ctx, cancel := context.WithTimeout(c.server.closing, writeTimeout)
	defer cancel()
	if err := c.server.fetchAnswers.acquire(ctx, c, bytes); err != nil {
		return err
	}
	c.answer = claim{c.server.fetchAnswers, bytes}
	return nil
}

// write sends an answer, piece by piece to note its pace.
func (c *conn) write(h wire.Header, resp kmsg.Response) error {
	resp.SetVersion(h.Version)
	c.out = wire.AppendResponse(c.out[:0], h.CorrelationID, resp)
	c.net.SetWriteDeadline(time.Now().Add(writeTimeout))
	defer c.writing.pauses()
	for p := c.out; len(p) > 0; {
		c.writing.moves()
		n, err := c.net.Write(p[:min(len(p), networkPiece)])
		if err != nil {
			return err
		}
		p = p[n:]
	}
	if cap(c.out) > networkPiece {
		c.out = nil // the next answer is probably small
	}
	return nil
}

// handle serves a request other than Produce.
func (c *conn) handle(req kmsg.Request) (kmsg.Response, error) {
	switch req := req.(type) {
	case *kmsg.ApiVersionsRequest:
		return c.server.apiVersions(), nil
	case *kmsg.MetadataRequest:
		return c.metadata(req)
	case *kmsg.InitProducerIDRequest:
		return c.server.initProducerID(req), nil
	case *kmsg.ListOffsetsRequest:
		return c.server.listOffsets(req)
	case *kmsg.FetchRequest:
		return c.fetch(req)
	case *kmsg.FindCoordinatorRequest:
		return c.findCoordinator(req)
	case *kmsg.AddPartitionsToTxnRequest:
		return c.server.addPartitionsToTxn(req), nil
	case *kmsg.EndTxnRequest:
		return c.server.endTxn(req), nil
	case *kmsg.AddOffsetsToTxnRequest:
		return c.server.addOffsetsToTxn(req), nil
	case *kmsg.TxnOffsetCommitRequest:
		return c.server.txnOffsetCommit(req), nil
	case *kmsg.OffsetCommitRequest:
		return c.server.offsetCommit(req), nil
	case *kmsg.OffsetFetchRequest:
		return c.server.offsetFetch(req), nil
	case *kmsg.WriteTxnMarkersRequest:
		return c.server.writeTxnMarkers(req), nil
	case *kmsg.DescribeProducersRequest:
		return c.describeProducers(req)
	case *kmsg.ListTransactionsRequest:
		return c.server.listTransactions(req), nil
	case *kmsg.DescribeTransactionsRequest:
		return c.server.describeTransactions(req), nil
	}
	return nil, fmt.Errorf("%w: key %d", wire.ErrUnsupportedKey, req.Key())
}
