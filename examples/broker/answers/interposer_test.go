package answers

// An interposer is what a client takes for the broker: it passes requests on to
// a real one, answers some Produce requests itself, and keeps a record of all.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/wire"
)

// A judge returns the error code to answer a batch with, or 0 to pass it on.
// The number counts the Produce requests of the session from 1.
type judge func(number int, b idempotence.Batch) int16

// A produced batch is one that a client has sent, with what it was answered.
type produced struct {
	idempotence.Batch
	Record string // the value of its first record
	Code   int16
}

func (p produced) String() string {
	answer := "stored"
	if p.Code != 0 {
		answer = kerr.TypedErrorForCode(p.Code).Message
	}
	return fmt.Sprintf("%s: producer %d epoch %d seq %d: %s", p.Record, p.ProducerID, p.Epoch, p.BaseSequence, answer)
}

type interposer struct {
	t      *testing.T
	addr   string
	broker string // the address of the real one
	judge  judge

	mu   sync.Mutex
	sent []produced // in the order in which they were answered
}

// interpose starts a broker with an interposer in front of it, for one session.
func interpose(t *testing.T, judge judge) *interposer {
	t.Helper()
	front, back := listen(t), listen(t)
	s, err := server.Open(server.Config{Dir: t.TempDir(), Advertise: front.Addr().String(), Partitions: 1, NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	p := &interposer{t: t, addr: front.Addr().String(), broker: back.Addr().String(), judge: judge}
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Serve(back); err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	running.Go(func() { p.serve(front, &running) })
	t.Cleanup(func() {
		front.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		running.Wait()
	})
	return p
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// serve accepts connections until the listener is closed.
func (p *interposer) serve(ln net.Listener, running *sync.WaitGroup) {
	for {
		client, err := ln.Accept()
		if err != nil {
			return
		}
		running.Go(func() {
			defer client.Close()
			client.SetDeadline(time.Now().Add(sessionTimeout))
			if err := p.serveConn(client); err != nil && !errors.Is(err, io.EOF) {
				p.t.Logf("connection: %v", err)
			}
		})
	}
}

// serveConn has one request at a time under way, so that the answers keep the
// order of the requests.
func (p *interposer) serveConn(client net.Conn) error {
	broker, err := net.Dial("tcp", p.broker)
	if err != nil {
		return err
	}
	defer broker.Close()
	for {
		request, err := readFrame(client)
		if err != nil {
			return err
		}
		response, err := p.exchange(broker, request)
		if err != nil {
			return err
		}
		if _, err := client.Write(response); err != nil {
			return err
		}
	}
}

// readFrame reads a request or a response, its length included.
func readFrame(r io.Reader) ([]byte, error) {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(length[:])
	if n < 8 || n > 1<<20 {
		return nil, fmt.Errorf("a frame of %d bytes", n)
	}
	frame := append(make([]byte, 0, 4+n), length[:]...)[:4+n]
	_, err := io.ReadFull(r, frame[4:])
	return frame, err
}

// exchange returns the response to a request, from the broker or of its own.
func (p *interposer) exchange(broker net.Conn, request []byte) ([]byte, error) {
	ask := func() ([]byte, error) {
		if _, err := broker.Write(request); err != nil {
			return nil, err
		}
		return readFrame(broker)
	}
	if kmsg.Key(binary.BigEndian.Uint16(request[4:])) != kmsg.Produce {
		return ask()
	}
	header, req, err := wire.Decode(request[4:], wire.APIs{int16(kmsg.Produce): {Min: 3, Max: 12}})
	if err != nil {
		return nil, err
	}
	sent, err := readProduce(req.(*kmsg.ProduceRequest))
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	defer func() { p.sent = append(p.sent, sent) }()
	if sent.Code = p.judge(len(p.sent)+1, sent.Batch); sent.Code != 0 {
		return wire.AppendResponse(nil, header.CorrelationID, refuse(req.(*kmsg.ProduceRequest), sent.Code)), nil
	}
	response, err := ask()
	if err != nil {
		return nil, err
	}
	sent.Code, err = readCode(req, response)
	return response, err
}

// readProduce returns the only batch of a request.
func readProduce(req *kmsg.ProduceRequest) (p produced, err error) {
	if req.Acks != -1 || len(req.Topics) != 1 || len(req.Topics[0].Partitions) != 1 {
		return p, fmt.Errorf("a Produce request that is not one batch with acks=all: %+v", req)
	}
	records := req.Topics[0].Partitions[0].Records
	if p.Batch, _, err = idempotence.ParseBatch(records); err != nil {
		return p, err
	}
	var batch kmsg.RecordBatch
	if err := batch.ReadFrom(records); err != nil {
		return p, err
	}
	var record kmsg.Record
	if err := record.ReadFrom(batch.Records); err != nil {
		return p, fmt.Errorf("a batch of %d records, attributes %#x: %w", batch.NumRecords, batch.Attributes, err)
	}
	p.Record = string(record.Value)
	return p, nil
}

// refuse answers a request whose batch was not stored.
func refuse(req *kmsg.ProduceRequest, code int16) *kmsg.ProduceResponse {
	resp := req.ResponseKind().(*kmsg.ProduceResponse)
	topic := kmsg.NewProduceResponseTopic()
	topic.Topic = req.Topics[0].Topic
	partition := kmsg.NewProduceResponseTopicPartition()
	partition.Partition = req.Topics[0].Partitions[0].Partition
	partition.ErrorCode, partition.BaseOffset = code, -1
	topic.Partitions = append(topic.Partitions, partition)
	resp.Topics = append(resp.Topics, topic)
	return resp
}

// readCode returns the code of the only batch that a response is about.
func readCode(req kmsg.Request, frame []byte) (int16, error) {
	body := frame[4+4:] // behind the length and the correlation id
	if req.IsFlexible() {
		body = body[1:] // no tags
	}
	resp := req.ResponseKind().(*kmsg.ProduceResponse)
	if err := resp.ReadFrom(body); err != nil {
		return 0, err
	}
	return resp.Topics[0].Partitions[0].ErrorCode, nil
}

// record returns what has been sent so far.
func (p *interposer) record() []produced {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.sent)
}
