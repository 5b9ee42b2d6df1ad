package server

// This file is InitProducerID: ids that no two producers ever share.

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/durable"
)

// producerIDBlock is how many ids are reserved on disk at a time; a restart
// loses what is left of the block.
const producerIDBlock = 1000

// producerIDs hands out producer ids, none of them twice. The file at path
// holds the first id that has not been reserved, and is always moved on before
// an id from the block is handed out.
type producerIDs struct {
	path string

	mu       sync.Mutex
	next     int64
	reserved int64 // next may go up to here, this one excluded
}

var errNoProducerIDs = errors.New("no producer ids left")

// openProducerIDs continues after the ids reserved in the file at path, which
// may be missing, and after highest, the highest id that the logs and snapshots
// have seen: whoever bears that one must not get a double, whether it was
// handed out here or not.
func openProducerIDs(path string, highest int64) (*producerIDs, error) {
	var reserved int64
	text, err := os.ReadFile(path)
	if err == nil {
		reserved, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	next := max(reserved, min(highest, math.MaxInt64-1)+1)
	return &producerIDs{path: path, next: next, reserved: next}, nil
}

// take returns an id that nobody has had.
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

// initProducerID gives a fresh id at epoch 0 to whoever asks, as Kafka does for
// producers without a transactional id; one that names the id and epoch it has
// had gets a fresh one too.
func (c *conn) initProducerID(req *kmsg.InitProducerIDRequest) *kmsg.InitProducerIDResponse {
	resp := kmsg.NewPtrInitProducerIDResponse()
	resp.ProducerEpoch = -1
	if req.TransactionalID != nil {
		resp.ErrorCode = kerr.InvalidRequest.Code // no transactions here
		return resp
	}
	id, err := c.freshProducerID()
	if err != nil {
		c.cfg.Log.Error("no producer id", "err", err)
		resp.ErrorCode = kerr.CoordinatorNotAvailable.Code // may be asked again
		return resp
	}
	resp.ProducerID, resp.ProducerEpoch = id, 0
	return resp
}

// freshProducerID takes ids until it has one that no partition knows. Nobody
// keeps a client from producing under an id that was never handed out; whoever got
// it afterwards would have its first batches taken for retries of that client's.
func (c *conn) freshProducerID() (int64, error) {
	for {
		id, err := c.producerIDs.take()
		if err != nil || !c.topics.knowProducer(id) {
			return id, err
		}
	}
}
