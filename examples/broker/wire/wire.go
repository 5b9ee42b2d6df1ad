// Package wire is the framing of the Kafka protocol: a four-byte length, a
// request or response header, and a body that package kmsg reads and writes.
// It does not know topics or producers.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// The reasons for which a frame is refused. The connection must be closed, with
// one exception: see [ErrUnsupportedVersion].
var (
	// ErrMalformed is returned for a frame that cannot be decoded.
	ErrMalformed = errors.New("wire: malformed request")

	// ErrUnsupportedKey is returned for a request that is not served.
	ErrUnsupportedKey = errors.New("wire: unsupported request")

	// ErrUnsupportedVersion is returned for a request in a version that is not
	// served. ApiVersions must be answered all the same, in version 0, which
	// every client understands. [Decode] returns the header with this error, so
	// that the caller can do that.
	ErrUnsupportedVersion = errors.New("wire: unsupported request version")
)

// Header is what precedes the body of every request.
type Header struct {
	Key           int16
	Version       int16
	CorrelationID int32
	ClientID      string // empty if the client sent none
}

// Versions is an inclusive range of versions of one request.
type Versions struct{ Min, Max int16 }

// APIs says which requests are served, by request key.
type APIs map[int16]Versions

// maxProduceElements is the limit for the topics, partitions and tags of a Produce
// request, all counted together. Each takes a few bytes in the request, which may
// have megabytes, and hundreds in memory.
const maxProduceElements = 10_000

// Decode reads one request from a frame without its length. The request
// refers to the frame's memory. All errors wrap one of the sentinels above.
func Decode(frame []byte, apis APIs) (h Header, req kmsg.Request, err error) {
	// The decoders are generated code that reads hostile bytes. If one of them
	// panics, the sender loses its connection, and the broker goes on.
	defer func() {
		if r := recover(); r != nil {
			req, err = nil, fmt.Errorf("%w: %v", ErrMalformed, r)
		}
	}()

	r := kbin.Reader{Src: frame}
	h = Header{Key: r.Int16(), Version: r.Int16(), CorrelationID: r.Int32()}
	if !r.Ok() {
		return h, nil, fmt.Errorf("%w: %d bytes", ErrMalformed, len(frame))
	}
	served, ok := apis[h.Key]
	if !ok {
		return h, nil, fmt.Errorf("%w: key %d", ErrUnsupportedKey, h.Key)
	}
	if h.Version < served.Min || h.Version > served.Max {
		return h, nil, fmt.Errorf("%w: %s version %d, served are %d to %d",
			ErrUnsupportedVersion, kmsg.NameForKey(h.Key), h.Version, served.Min, served.Max)
	}

	req = kmsg.RequestForKey(h.Key)
	req.SetVersion(h.Version)
	// The client id is never in the compact form, since a broker reads it before
	// it knows whether it serves the version.
	if id := r.NullableString(); id != nil {
		h.ClientID = *id
	}
	if req.IsFlexible() {
		kmsg.SkipTags(&r)
	}
	if err := r.Complete(); err != nil {
		return h, nil, fmt.Errorf("%w: header: %v", ErrMalformed, err)
	}
	if err := boundProduce(req, r.Src); err != nil {
		return h, nil, err
	}
	if err := req.ReadFrom(r.Src); err != nil {
		return h, nil, fmt.Errorf("%w: %s version %d: %v",
			ErrMalformed, kmsg.NameForKey(h.Key), h.Version, err)
	}
	return h, req, nil
}

// boundProduce counts the elements of a Produce request. It does not check that
// the request is well-formed; the decoder does.
func boundProduce(req kmsg.Request, body []byte) error {
	if _, ok := req.(*kmsg.ProduceRequest); !ok {
		return nil
	}
	c := counter{Reader: kbin.Reader{Src: body}, flexible: req.IsFlexible()}
	c.skipString() // transactional id
	c.Span(2 + 4)  // acks, timeout
	for range c.array() {
		c.skipString() // topic
		for range c.array() {
			c.Span(4) // partition
			c.skipRecords()
			c.skipTags()
		}
		c.skipTags()
	}
	c.skipTags()
	if c.elements > maxProduceElements {
		return fmt.Errorf("%w: more than %d topics, partitions and tags in a Produce request",
			ErrMalformed, maxProduceElements)
	}
	return nil
}

// A counter reads over a request and counts the elements of its arrays. When
// there are too many, it takes further arrays for empty.
type counter struct {
	kbin.Reader
	flexible bool
	elements int64
}

// array returns how many elements follow.
func (c *counter) array() int {
	if c.flexible {
		return c.count(int64(c.CompactArrayLen()))
	}
	return c.count(int64(c.ArrayLen()))
}

func (c *counter) count(n int64) int {
	c.elements += max(n, 0)
	if c.elements > maxProduceElements {
		return 0
	}
	return int(max(n, 0))
}

func (c *counter) skipString() {
	if c.flexible {
		c.UnsafeCompactNullableString()
	} else {
		c.UnsafeNullableString()
	}
}

func (c *counter) skipRecords() {
	if c.flexible {
		c.CompactNullableBytes()
	} else {
		c.NullableBytes()
	}
}

func (c *counter) skipTags() {
	if !c.flexible {
		return
	}
	for range c.count(int64(c.Uvarint())) {
		c.Uvarint() // key
		c.Span(int(c.Uvarint()))
	}
}

// AppendResponse appends a whole response, its length included, to dst.
func AppendResponse(dst []byte, correlationID int32, resp kmsg.Response) []byte {
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	dst = kbin.AppendInt32(dst, correlationID)
	// A client reads the answer to ApiVersions before it knows which versions the
	// broker serves, so the header of that answer never has tags.
	if _, ok := resp.(*kmsg.ApiVersionsResponse); !ok && resp.IsFlexible() {
		dst = append(dst, 0)
	}
	dst = resp.AppendTo(dst)
	binary.BigEndian.PutUint32(dst[start:], uint32(len(dst)-start-4))
	return dst
}
