package server

// This file is InitProducerID: producer ids that are handed out only once.

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/durable"
)

const (
	// producerIDBlock is how many ids are reserved on disk at a time. A restart
	// loses the rest of the block.
	producerIDBlock = 1000

	// firstMadeUpID and all ids above it were made up by a client: counting from
	// 0, the broker does not get there. They are not counted on from, so no client
	// can use up the supply.
	firstMadeUpID = 1 << 62

	// lostIDs is how many ids are left out when the file that reserves them is
	// lost: more than were handed out without being seen in a log.
	lostIDs = 1_000_000
)

// producerIDs hands out producer ids. The file at path has the first id that is
// not reserved. It is written before an id of a new block is handed out.
type producerIDs struct {
	path string

	mu       sync.Mutex
	next     int64
	reserved int64 // the end of the block that next is in
}

var errNoProducerIDs = errors.New("no producer ids left")

// openProducerIDs continues behind the ids reserved in the file at path, and
// behind highest, the highest id that any log or snapshot has seen: it may come
// from another broker, or from a time before the file was lost.
func openProducerIDs(path string, highest int64, log *slog.Logger) *producerIDs {
	next := int64(firstMadeUpID)
	if highest < firstMadeUpID {
		next = highest + 1
	}
	reserved, err := readProducerIDs(path)
	switch {
	case err == nil && next == firstMadeUpID:
		next = reserved
	case err == nil:
		next = max(next, reserved)
	case next > 0 || !errors.Is(err, os.ErrNotExist):
		next = min(next+lostIDs, firstMadeUpID)
		log.Error("producer ids lost", "continuing with", next, "err", err)
	}
	return &producerIDs{path: path, next: next, reserved: next}
}

func readProducerIDs(path string) (int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	reserved, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 63)
	return int64(reserved), err
}

// take returns an id that was not handed out before.
func (ids *producerIDs) take() (int64, error) {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	if ids.next == ids.reserved {
		if ids.next > math.MaxInt64-producerIDBlock {
			return 0, errNoProducerIDs
		}
		end := ids.next + producerIDBlock
		if err := durable.WriteFile(ids.path, fmt.Appendf(nil, "%d\n", end)); err != nil {
			return 0, err
		}
		ids.reserved = end
	}
	id := ids.next
	ids.next++
	return id, nil
}

// initProducerID gives every producer a fresh id at epoch 0, as Kafka does for
// producers without a transactional id. A producer that names the id and epoch
// it has had gets a fresh id too.
func (s *Server) initProducerID(req *kmsg.InitProducerIDRequest) *kmsg.InitProducerIDResponse {
	resp := kmsg.NewPtrInitProducerIDResponse()
	resp.ProducerEpoch = -1
	if req.TransactionalID != nil {
		resp.ErrorCode = kerr.InvalidRequest.Code // there are no transactions
		return resp
	}
	id, err := s.freshProducerID()
	if err != nil {
		s.cfg.repeated.Error("no producer id", "err", err)
		resp.ErrorCode = kerr.CoordinatorNotAvailable.Code // clients retry it
		return resp
	}
	resp.ProducerID, resp.ProducerEpoch = id, 0
	return resp
}

// freshProducerID takes ids until it has one that no partition remembers. A
// client may have used an id that was never handed out. The first batches of the
// next producer with that id would be taken for retries.
func (s *Server) freshProducerID() (int64, error) {
	for {
		id, err := s.producerIDs.take()
		if err != nil || !s.topics.knowProducer(id) {
			return id, err
		}
	}
}
