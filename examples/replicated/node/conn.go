package node

// This file is one connection: requests in, answers out in the same order. It
// has the limits of number, size and time that a broker needs to outlive its
// clients; package server of examples/broker has more of them.

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

	// maxPending is how many Produce requests may wait for their answers before
	// the next one is not read. Clients have five in flight.
	maxPending = 8

	// Requests other than Produce are short, and take many times their bytes
	// once decoded.
	maxSmallRequest = 64 << 10
)

// acceptAll serves clients until Close.
func (n *Node) acceptAll() {
	for n.closing.Err() == nil {
		nc, err := n.cfg.ClientListener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			// Most likely out of file descriptors, which passes.
			n.cfg.Log.Warn("accept failed", "err", err)
			time.Sleep(50 * time.Millisecond)
		case !n.admit(nc):
			nc.Close()
		default:
			go n.serveConn(nc)
		}
	}
}

// admit takes the connection on, unless there are too many or it is too late.
func (n *Node) admit(nc net.Conn) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing.Err() != nil || len(n.conns) >= n.cfg.MaxConnections {
		return false
	}
	n.conns[nc] = struct{}{}
	n.serving.Add(1)
	return true
}

func (n *Node) dismiss(nc net.Conn) {
	nc.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, nc)
	n.serving.Done()
}

func (n *Node) closeConns() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for nc := range n.conns {
		nc.Close()
	}
}

// An exchange is a request and its answer.
type exchange struct {
	header   wire.Header
	size     int                           // of the request
	claim    int64                         // of the memory for Fetch answers
	overlaps bool                          // with the requests that follow
	answer   func() (kmsg.Response, error) // waits for what has been begun
	answered chan struct{}
}

// serveConn serves one connection. One goroutine reads requests and proposes
// their batches, another answers, in the order in which the requests came. So
// several Produce requests are under way at once; any other request is served
// when all before it have been answered, and before any that follows is read.
func (n *Node) serveConn(nc net.Conn) {
	defer n.dismiss(nc)
	pending := make(chan *exchange, maxPending)
	var answering sync.WaitGroup
	answering.Go(func() { n.answerAll(nc, pending) })
	err := n.readAll(nc, pending)
	close(pending)
	answering.Wait()
	if !errors.Is(err, io.EOF) && n.closing.Err() == nil {
		n.cfg.Log.Debug("connection closed", "client", nc.RemoteAddr(), "err", err)
	}
}

func (n *Node) readAll(nc net.Conn, pending chan<- *exchange) error {
	for {
		frame, err := n.readFrame(nc)
		if err != nil {
			return err
		}
		x := &exchange{size: len(frame), answered: make(chan struct{})}
		if err := n.begin(x, frame); err != nil {
			n.requestMemory.Release(int64(len(frame)))
			return err
		}
		pending <- x
		if !x.overlaps {
			<-x.answered
		}
	}
}

// answerAll answers what has been begun. Once that has failed the connection is
// closed, and it only waits for what is under way still.
func (n *Node) answerAll(nc net.Conn, pending <-chan *exchange) {
	for x := range pending {
		resp, err := x.answer()
		if err == nil && resp != nil {
			err = writeResponse(nc, x.header, resp)
		}
		if err != nil {
			nc.Close()
		}
		n.requestMemory.Release(int64(x.size))
		n.fetchMemory.Release(x.claim)
		close(x.answered)
	}
}

func writeResponse(nc net.Conn, h wire.Header, resp kmsg.Response) error {
	resp.SetVersion(h.Version)
	nc.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := nc.Write(wire.AppendResponse(nil, h.CorrelationID, resp))
	return err
}

// readFrame reads one request without its length. Its memory is claimed before
// it is taken.
func (n *Node) readFrame(nc net.Conn) ([]byte, error) {
	var prefix [4 + 2]byte // the length, and the key, which every request begins with
	nc.SetReadDeadline(time.Now().Add(idleTimeout))
	if _, err := io.ReadFull(nc, prefix[:1]); err != nil {
		return nil, err
	}
	deadline := time.Now().Add(readTimeout)
	nc.SetReadDeadline(deadline)
	if _, err := io.ReadFull(nc, prefix[1:]); err != nil {
		return nil, err
	}
	limit := maxSmallRequest
	if kmsg.Key(binary.BigEndian.Uint16(prefix[4:])) == kmsg.Produce {
		limit = n.cfg.MaxRequestBytes
	}
	size := int(int32(binary.BigEndian.Uint32(prefix[:])))
	if size < len(prefix)-4 || size > limit {
		return nil, fmt.Errorf("%w: length %d, at most %d", wire.ErrMalformed, size, limit)
	}
	ctx, cancel := context.WithDeadline(n.closing, deadline)
	defer cancel()
	if err := n.requestMemory.Acquire(ctx, int64(size)); err != nil {
		return nil, err
	}
	frame := append(make([]byte, 0, size), prefix[4:]...)[:size]
	if _, err := io.ReadFull(nc, frame[2:]); err != nil {
		n.requestMemory.Release(int64(size))
		return nil, err
	}
	return frame, nil
}

// begin decodes a request and says how it is answered.
func (n *Node) begin(x *exchange, frame []byte) error {
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
	switch req := req.(type) {
	case *kmsg.ProduceRequest:
		x.overlaps = true
		x.answer = n.produce(req)
	case *kmsg.FetchRequest:
		x.answer = func() (kmsg.Response, error) {
			n.awaitRecords(req)
			claim := fetchClaim(req)
			if err := n.fetchMemory.Acquire(n.closing, claim); err != nil {
				return nil, err
			}
			x.claim = claim
			return n.fetch(req), nil
		}
	default:
		x.answer = func() (kmsg.Response, error) { return n.handle(h, req) }
	}
	return nil
}

// handle serves a request other than Produce and Fetch.
func (n *Node) handle(h wire.Header, req kmsg.Request) (kmsg.Response, error) {
	switch req := req.(type) {
	case *kmsg.ApiVersionsRequest:
		return apiVersions(), nil
	case *kmsg.MetadataRequest:
		return n.metadata(h, req), nil
	case *kmsg.InitProducerIDRequest:
		return n.initProducerID(h, req), nil
	case *kmsg.ListOffsetsRequest:
		return n.listOffsets(req), nil
	}
	return nil, fmt.Errorf("%w: key %d", wire.ErrUnsupportedKey, req.Key())
}
