package server

import (
	"errors"
	"time"

	"github.com/idempotence-go/idempotence"
)

// errInUse is returned for a lock that another broker has.
var errInUse = errors.New("in use by another broker")

// awaitLock takes a lock that was perhaps given up only just now. A process that
// is being started has a copy of every open file until it executes its program,
// so for a moment a lock may stay after its file was closed.
func awaitLock[T any](take func() (T, error)) (lock T, err error) {
	for range 50 {
		lock, err = take()
		if !errors.Is(err, errInUse) && !errors.Is(err, idempotence.ErrSnapshotDirInUse) {
			return lock, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return lock, err
}
