package durable

import (
	"errors"
	"os"
	"time"
)

// ErrInUse is returned by [Lock] for a lock that another process has.
var ErrInUse = errors.New("in use by another process")

// Lock creates the file at path, if there is none, and takes a lock that ends
// when the file is closed or the process ends. It returns ErrInUse for a lock
// that stays taken.
func Lock(path string) (*os.File, error) {
	return AwaitLock(ErrInUse, func() (*os.File, error) { return lock(path) })
}

// AwaitLock calls take until it returns another error than inUse, for half a
// second at most. The lock was perhaps given up only just now: a process that is
// being started has a copy of every open file until it executes its program, so
// for a moment a lock may stay after its file was closed.
func AwaitLock[T any](inUse error, take func() (T, error)) (lock T, err error) {
	for range 50 {
		lock, err = take()
		if !errors.Is(err, inUse) {
			return lock, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return lock, err
}
