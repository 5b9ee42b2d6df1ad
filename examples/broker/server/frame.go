package server

// This file reads requests off a connection, within limits of size and time.

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/wire"
)

const (
	idleTimeout = 10 * time.Minute // for the next request to begin
	readTimeout = 10 * time.Second // for the rest of it

	// maxSmallRequest is the size up to which a request is small. All requests
	// but Produce must be. A small request claims memory when it has arrived, so
	// a client that sends half of one holds only the buffer of its connection.
	// A larger one claims memory when this much of it has arrived.
	maxSmallRequest = networkPiece

	// decodedRatio is how many bytes one byte of a small request can become when
	// it is decoded. Requests but Produce are lists of small elements.
	decodedRatio = 40

	// smallShare is the part of the request memory that is kept for small
	// requests: a client that sends large ones cannot use it up.
	smallShare = 4
)

// minRequestMemory returns the least request memory that every request fits in.
func minRequestMemory(maxRequestBytes int) int64 {
	large := (int64(maxRequestBytes)*smallShare + smallShare - 2) / (smallShare - 1)
	return max(large, smallShare*maxSmallRequest*decodedRatio)
}

const (
	lengthSize = 4 // of a request's length
	keySize    = 2 // of the key, with which every request begins
)

// readFrame reads one request without its length. The claim is for the memory
// that the request takes until it has been answered; there is none with an
// error.
func (c *conn) readFrame() ([]byte, claim, error) {
	size, deadline, err := c.awaitFrame()
	if err != nil {
		return nil, claim{}, err
	}
	var start [keySize]byte
	if _, err := io.ReadFull(c.net, start[:]); err != nil {
		return nil, claim{}, err
	}
	key := kmsg.Key(binary.BigEndian.Uint16(start[:]))
	limit := maxSmallRequest
	if key == kmsg.Produce {
		limit = c.server.cfg.MaxRequestBytes
	}
	if size > limit {
		return nil, claim{}, fmt.Errorf("%w: %d bytes, at most %d", wire.ErrMalformed, size, limit)
	}
	frame := make([]byte, min(size, maxSmallRequest))
	copy(frame, start[:])
	if _, err := io.ReadFull(c.net, frame[keySize:]); err != nil {
		return nil, claim{}, err
	}
	ctx, cancel := context.WithDeadline(c.server.closing, deadline)
	defer cancel()
	return c.finishFrame(ctx, frame, size, key)
}

// awaitFrame waits for a request and reads its length. It returns when the rest
// must have arrived.
func (c *conn) awaitFrame() (size int, deadline time.Time, err error) {
	c.net.SetReadDeadline(time.Now().Add(idleTimeout))
	// Shutdown ends closing, then sets a deadline. This is the other way round,
	// so that one of the two takes effect.
	if err := c.server.closing.Err(); err != nil {
		return 0, deadline, err
	}
	var length [lengthSize]byte
	if _, err := io.ReadFull(c.net, length[:1]); err != nil {
		return 0, deadline, err
	}
	deadline = time.Now().Add(readTimeout)
	c.net.SetReadDeadline(deadline)
	if _, err := io.ReadFull(c.net, length[1:]); err != nil {
		return 0, deadline, err
	}
	size = int(int32(binary.BigEndian.Uint32(length[:])))
	if size < keySize {
		return 0, deadline, fmt.Errorf("%w: %d bytes", wire.ErrMalformed, size)
	}
	return size, deadline, nil
}

// finishFrame claims memory for a request of the given size, the beginning of
// which has been read, and reads the rest.
func (c *conn) finishFrame(ctx context.Context, frame []byte, size int, key kmsg.Key) ([]byte, claim, error) {
	memory := claim{c.server.smallRequests, int64(size)}
	if key != kmsg.Produce {
		memory.bytes *= decodedRatio
	}
	if size > len(frame) {
		memory.pool = c.server.largeRequests
	}
	if err := memory.pool.acquire(ctx, c, memory.bytes); err != nil {
		return nil, claim{}, err
	}
	frame, err := c.readPieces(frame, size)
	if err != nil {
		memory.release(c)
		return nil, claim{}, err
	}
	return frame, memory, nil
}

// readPieces reads until the frame has the given size, piece by piece to note
// its pace.
func (c *conn) readPieces(frame []byte, size int) ([]byte, error) {
	n := len(frame)
	if n == size {
		return frame, nil
	}
	frame = append(make([]byte, 0, size), frame...)[:size]
	defer c.reading.pauses()
	for n < size {
		c.reading.moves()
		end := min(n+networkPiece, size)
		if _, err := io.ReadFull(c.net, frame[n:end]); err != nil {
			return nil, err
		}
		n = end
	}
	return frame, nil
}
