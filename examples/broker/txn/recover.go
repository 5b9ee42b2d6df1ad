package txn

// This file is what happens to a log between two runs.

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// ErrDamaged is returned by [Recover] for a log in which a record is broken
// that was durable once. Outcomes of transactions may be lost.
var ErrDamaged = errors.New("txn: damaged log")

// ErrVersion is returned by [Recover] for a log with a record of a version that
// this package does not know.
var ErrVersion = errors.New("txn: unknown record version")

// A Recovery is what a log holds. [NewCoordinator] goes on from it.
type Recovery struct {
	// Size is the length in bytes of the log without its tail. The caller cuts
	// the log to that length.
	Size int64

	// Tail is nil if the log ends with a whole record. Otherwise it says what is
	// wrong with the bytes from Size on: a record that was being written when
	// the last run ended, or that was not synced and did not outlive a loss of
	// power. Nothing that took effect is in it, unless a disk has damaged the
	// last records that a killed run wrote.
	Tail error

	// Duplicates is how many records were there twice. The second ones have no
	// effect.
	Duplicates int

	state *state
}

// Recover reads a log, which may be empty.
//
// A record that is broken ends the log, if nothing shows that it was ever
// durable: it is in the tail. Otherwise the error wraps [ErrDamaged], and says
// where the record is. [ErrVersion] is for a record that is whole and of a newer
// version.
func Recover(log []byte) (*Recovery, error) {
	r := &Recovery{state: newState()}
	if err := r.read(log); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *Recovery) read(log []byte) error {
	s := r.state
	for r.Size < int64(len(log)) {
		f, size, err := decodeFrame(log[r.Size:])
		switch {
		case isBroken(err):
			return r.cut(log[r.Size:], size, err)
		case err != nil:
			return fmt.Errorf("%w: at byte %d: %w", ErrDamaged, r.Size, err)
		case f.number <= s.number:
			r.Duplicates++
		default:
			s.apply(f.number, f.record)
			s.number, s.durable = f.number, max(s.durable, f.durable)
		}
		r.Size += int64(size)
	}
	return r.end(errShort)
}

// cut ends the log before tail because of cause, unless a record that was
// durable is missing then. Size is that of the broken record, or 0 if it is
// unknown.
func (r *Recovery) cut(tail []byte, size int, cause error) error {
	if len(bytes.Trim(tail, "\x00")) == 0 {
		cause, size = errors.New("nothing but zeros"), len(tail)
	}
	for at := max(size, 1); at < len(tail) && r.state.durable <= r.state.number; at++ {
		if f, _, err := decodeFrame(tail[at:]); err == nil {
			r.state.durable = max(r.state.durable, f.durable)
		}
	}
	r.Tail = fmt.Errorf("txn: %d bytes from byte %d on are no record: %w", len(tail), r.Size, cause)
	return r.end(cause)
}

// end returns an error if a record that was durable lies behind the newest one.
// What a caller goes on from is synced first, and so durable.
func (r *Recovery) end(cause error) error {
	s := r.state
	if s.durable > s.number {
		return fmt.Errorf("%w: at byte %d, after record %d of at least %d: %w", ErrDamaged, r.Size, s.number, s.durable, cause)
	}
	s.durable = s.number
	return nil
}

// Epoch returns the coordinator epoch of the last run, or 0 if there was none. Like
// List, it must not be called after [NewCoordinator].
func (r *Recovery) Epoch() int32 { return r.state.epoch }

// List describes the transactional ids that the log holds, sorted.
func (r *Recovery) List() []Transaction {
	return describeAll(slices.Collect(maps.Values(r.state.transactions)))
}

// Rewritten returns a log that holds the same in the fewest records, or nil if
// the log that was read is at most twice as long. The caller may replace the log
// with it, in one step that is durable before [NewCoordinator] is called, or may
// keep the log as it is.
func (r *Recovery) Rewritten() []byte {
	frames := r.state.frames()
	var log []byte
	for _, f := range frames {
		log = f.appendTo(log)
	}
	if int64(len(log)) > r.Size/2 || len(frames) == 0 {
		return nil
	}
	r.state.number += int64(len(frames))
	r.state.durable = r.state.number
	return log
}
