package wire_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/wire"
)

// everything is every request that kmsg knows, in every version but the one,
// never served here, whose header has no client id.
var everything = func() wire.APIs {
	apis := make(wire.APIs)
	for key := range int16(kmsg.MaxKey + 1) {
		if req := kmsg.RequestForKey(key); req != nil {
			apis[key] = wire.Versions{Min: 0, Max: req.MaxVersion()}
		}
	}
	apis[int16(kmsg.ControlledShutdown)] = wire.Versions{Min: 1, Max: 3}
	return apis
}()

// frame returns a request as a client sends it, without the length.
func frame(req kmsg.Request) []byte {
	return kmsg.NewRequestFormatter(kmsg.FormatterClientID("me")).AppendRequest(nil, req, 42)[4:]
}

// The header has tags in flexible versions only, and the client id is never
// compact: every request and version that kmsg knows must come through.
func TestDecodeEveryVersion(t *testing.T) {
	for key, versions := range everything {
		for v := versions.Min; v <= versions.Max; v++ {
			req := kmsg.RequestForKey(key)
			req.SetVersion(v)
			h, got, err := wire.Decode(frame(req), everything)
			if err != nil {
				t.Errorf("%s version %d: %v", kmsg.NameForKey(key), v, err)
				continue
			}
			if want := (wire.Header{Key: key, Version: v, CorrelationID: 42, ClientID: "me"}); h != want {
				t.Errorf("%s: header %+v, want %+v", kmsg.NameForKey(key), h, want)
			}
			if got.Key() != key || got.GetVersion() != v {
				t.Errorf("%s version %d came back as %s version %d",
					kmsg.NameForKey(key), v, kmsg.NameForKey(got.Key()), got.GetVersion())
			}
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	apis := wire.APIs{
		int16(kmsg.Produce):  {Min: 3, Max: 11},
		int16(kmsg.Metadata): {Min: 1, Max: 9},
	}
	metadata := func(version int16) []byte {
		req := kmsg.NewPtrMetadataRequest()
		req.Version = version
		return frame(req)
	}
	topics := func(version int16, n int) []byte {
		req := kmsg.NewPtrProduceRequest()
		req.Version = version
		req.Topics = make([]kmsg.ProduceRequestTopic, n)
		return frame(req)
	}
	partitions := func(version int16, topics, each int) []byte {
		req := kmsg.NewPtrProduceRequest()
		req.Version = version
		req.Topics = make([]kmsg.ProduceRequestTopic, topics)
		for i := range req.Topics {
			req.Topics[i].Partitions = make([]kmsg.ProduceRequestTopicPartition, each)
		}
		return frame(req)
	}
	tags := func(n uint32) []byte {
		req := kmsg.NewPtrProduceRequest()
		req.Version = 9
		for key := range n {
			req.UnknownTags.Set(key, nil)
		}
		return frame(req)
	}
	for name, tt := range map[string]struct {
		frame []byte
		want  error
	}{
		"nothing":                {nil, wire.ErrMalformed},
		"half a header":          {metadata(1)[:5], wire.ErrMalformed},
		"no client id":           {metadata(1)[:8], wire.ErrMalformed},
		"no header tags":         {metadata(9)[:12], wire.ErrMalformed},
		"half a body":            {metadata(1)[:13], wire.ErrMalformed},
		"unknown key":            {[]byte{0x7f, 0xff, 0, 0, 0, 0, 0, 0}, wire.ErrUnsupportedKey},
		"known key, not served":  {frame(kmsg.NewPtrJoinGroupRequest()), wire.ErrUnsupportedKey},
		"older version":          {metadata(0), wire.ErrUnsupportedVersion},
		"newer version":          {metadata(10), wire.ErrUnsupportedVersion},
		"10,001 topics":          {topics(3, 10_001), wire.ErrMalformed},
		"10,001 topics, compact": {topics(9, 10_001), wire.ErrMalformed},
		"10,000 topics":          {topics(3, 10_000), nil},

		"10,100 topics and partitions":          {partitions(3, 100, 100), wire.ErrMalformed},
		"10,100 topics and partitions, compact": {partitions(9, 100, 100), wire.ErrMalformed},
		"10,000 topics and partitions":          {partitions(3, 100, 99), nil},
		"10,000 topics and partitions, compact": {partitions(9, 100, 99), nil},
		"10,001 tags":                           {tags(10_001), wire.ErrMalformed},
		"10,000 tags":                           {tags(10_000), nil},
	} {
		if _, _, err := wire.Decode(tt.frame, apis); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

// A client reads the answer to ApiVersions without knowing the version the
// broker took, so its header has no tags even where the body has (KIP-511).
func TestResponseHeader(t *testing.T) {
	plain, flexible := kmsg.NewPtrMetadataResponse(), kmsg.NewPtrMetadataResponse()
	plain.Version, flexible.Version = 8, 9
	versions := kmsg.NewPtrApiVersionsResponse()
	versions.Version = 3
	for _, tt := range []struct {
		resp kmsg.Response
		tags bool
	}{{plain, false}, {flexible, true}, {versions, false}} {
		want := []byte{0, 0, 0, 42}
		if tt.tags {
			want = append(want, 0)
		}
		want = tt.resp.AppendTo(want)
		want = append(kbin.AppendInt32(nil, int32(len(want))), want...)
		if got := wire.AppendResponse(nil, 42, tt.resp); !bytes.Equal(got, want) {
			t.Errorf("%s version %d: got % x, want % x", kmsg.NameForKey(tt.resp.Key()), tt.resp.GetVersion(), got, want)
		}
	}
}

// Invariants of Decode for any bytes:
//  1. It does not panic.
//  2. It returns a request or one of its three errors, never both.
//  3. What it accepts it also accepts, with the same meaning, after it has
//     been encoded again.
func FuzzDecode(f *testing.F) {
	for key, versions := range everything {
		for _, v := range []int16{versions.Min, versions.Max} {
			req := kmsg.RequestForKey(key)
			req.SetVersion(v)
			f.Add(frame(req))
		}
	}
	produce := kmsg.NewPtrProduceRequest()
	produce.Version = 9
	produce.Topics = []kmsg.ProduceRequestTopic{{Topic: "t", Partitions: []kmsg.ProduceRequestTopicPartition{
		{Partition: 1, Records: []byte("records")},
	}}}
	f.Add(frame(produce))
	f.Add(frame(produce)[:20])

	f.Fuzz(func(t *testing.T, p []byte) {
		h, req, err := wire.Decode(p, everything)
		if err != nil {
			if req != nil {
				t.Fatal("a request and an error")
			}
			if !errors.Is(err, wire.ErrMalformed) && !errors.Is(err, wire.ErrUnsupportedKey) &&
				!errors.Is(err, wire.ErrUnsupportedVersion) {
				t.Fatalf("an error of its own: %v", err)
			}
			return
		}
		again := kmsg.NewRequestFormatter(kmsg.FormatterClientID(h.ClientID)).AppendRequest(nil, req, h.CorrelationID)
		h2, req2, err := wire.Decode(again[4:], everything)
		if err != nil {
			t.Fatalf("encoded again: %v", err)
		}
		if h != h2 || !bytes.Equal(req.AppendTo(nil), req2.AppendTo(nil)) {
			t.Fatalf("%+v became %+v", req, req2)
		}
	})
}
