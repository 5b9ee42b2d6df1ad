package server

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
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

// openProducerIDs continues after the ids reserved in the file at path and
// after highest, which the logs have seen: somebody may have lost the file, or
// put the logs there.
func openProducerIDs(path string, highest int64) (*producerIDs, error) {
	ids := &producerIDs{path: path, next: highest + 1}
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	default:
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		ids.next = max(ids.next, n)
	}
	ids.reserved = ids.next
	return ids, nil
}

// take returns an id that nobody has had.
func (ids *producerIDs) take() (int64, error) {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	if ids.next == ids.reserved {
		end := ids.next + producerIDBlock
		if err := writeDurably(ids.path, fmt.Appendf(nil, "%d\n", end)); err != nil {
			return 0, err
		}
		ids.reserved = end
	}
	id := ids.next
	ids.next++
	return id, nil
}

// writeDurably replaces the file at path; a crash leaves the old one or the
// new one, and once it has returned, the new one.
func writeDurably(path string, data []byte) error {
	f, err := os.Create(path + ".tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
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
	id, err := c.producerIDs.take()
	if err != nil {
		c.cfg.Log.Error("no producer id", "err", err)
		resp.ErrorCode = kerr.CoordinatorNotAvailable.Code // may be asked again
		return resp
	}
	resp.ProducerID, resp.ProducerEpoch = id, 0
	return resp
}
