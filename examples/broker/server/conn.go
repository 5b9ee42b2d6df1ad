package server

// This file is one connection: requests in, answers out, one after the other,
// within limits of size, memory and time.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/wire"
)

const (
	idleTimeout  = 10 * time.Minute // between two requests of a connection
	readTimeout  = 10 * time.Second // for the rest of a request that has begun
	writeTimeout = 10 * time.Second // for an answer

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

// A conn serves the requests of one connection, one after the other, which
// is the order the protocol wants the answers in.
type conn struct {
	*Server
	net          net.Conn
	claimed      int64 // of requestMemory, by the request being served
	fetchClaimed int64 // of fetchMemory, by the answer being sent
	out          []byte
}

func (s *Server) serveConn(nc net.Conn) {
	defer s.dismiss(nc)
	c := &conn{Server: s, net: nc}
	for {
		err := c.serveRequest()
		c.releaseMemory()
		if err != nil {
			// A client that hangs up is not worth a word.
			if !errors.Is(err, io.EOF) && s.closing.Err() == nil {
				s.cfg.Log.Debug("connection closed", "client", nc.RemoteAddr(), "err", err)
			}
			return
		}
	}
}

// serveRequest reads one request, serves it and writes the answer. After an
// error the connection is of no further use.
func (c *conn) serveRequest() error {
	frame, err := c.readFrame()
	if err != nil {
		return err
	}
	h, req, err := wire.Decode(frame, apis)
	if errors.Is(err, wire.ErrUnsupportedVersion) && kmsg.Key(h.Key) == kmsg.ApiVersions {
		h.Version = 0
		return c.write(h, unsupportedApiVersions())
	}
	if err != nil {
		return err
	}
	resp, err := c.handle(req)
	if resp == nil || err != nil {
		return err
	}
	return c.write(h, resp)
}

// readFrame reads one request without its length.
func (c *conn) readFrame() ([]byte, error) {
	c.net.SetReadDeadline(time.Now().Add(idleTimeout))
	// Shutdown first says that it closes and then sets a deadline; the other
	// way round here, so that one of the two is noticed.
	if c.closing.Err() != nil {
		return nil, c.closing.Err()
	}
	var prefix [4 + 2]byte // the length, and the key, which every request begins with
	if _, err := io.ReadFull(c.net, prefix[:1]); err != nil {
		return nil, err
	}
	deadline := time.Now().Add(readTimeout)
	c.net.SetReadDeadline(deadline)
	if _, err := io.ReadFull(c.net, prefix[1:4]); err != nil {
		return nil, err
	}
	size := int(int32(binary.BigEndian.Uint32(prefix[:])))
	if size < len(prefix)-4 {
		return nil, fmt.Errorf("%w: length %d", wire.ErrMalformed, size)
	}
	if _, err := io.ReadFull(c.net, prefix[4:]); err != nil {
		return nil, err
	}
	limit, ratio := maxSmallRequest, int64(smallRequestRatio)
	if kmsg.Key(binary.BigEndian.Uint16(prefix[4:])) == kmsg.Produce {
		limit, ratio = c.cfg.MaxRequestBytes, 1
	}
	if size > limit {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", wire.ErrMalformed, size, limit)
	}

	ctx, cancel := context.WithDeadline(c.closing, deadline)
	defer cancel()
	frame := append(make([]byte, 0, min(size, readPiece)), prefix[4:]...)
	for len(frame) < size {
		piece := min(size-len(frame), readPiece)
		if err := c.claimMemory(ctx, int64(piece)*ratio); err != nil {
			return nil, err
		}
		n := len(frame)
		frame = append(frame, make([]byte, piece)...)
		if _, err := io.ReadFull(c.net, frame[n:]); err != nil {
			return nil, err
		}
	}
	return frame, nil
}

func (c *conn) claimMemory(ctx context.Context, n int64) error {
	if c.requestMemory.Acquire(ctx, n) != nil {
		return errBusy
	}
	c.claimed += n
	return nil
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

func (c *conn) releaseMemory() {
	c.requestMemory.Release(c.claimed)
	c.fetchMemory.Release(c.fetchClaimed)
	c.claimed, c.fetchClaimed = 0, 0
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

// handle serves a request. Without an answer the client gets none.
func (c *conn) handle(req kmsg.Request) (kmsg.Response, error) {
	switch req := req.(type) {
	case *kmsg.ApiVersionsRequest:
		return apiVersions(), nil
	case *kmsg.MetadataRequest:
		return c.metadata(req)
	case *kmsg.InitProducerIDRequest:
		return c.initProducerID(req), nil
	case *kmsg.ProduceRequest:
		return c.produce(req)
	case *kmsg.ListOffsetsRequest:
		return c.listOffsets(req), nil
	case *kmsg.FetchRequest:
		return c.fetch(req)
	}
	return nil, fmt.Errorf("%w: key %d", wire.ErrUnsupportedKey, req.Key())
}
