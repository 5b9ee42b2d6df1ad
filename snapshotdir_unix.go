//go:build darwin || dragonfly || freebsd || illumos || linux || netbsd || openbsd

package idempotence

import (
	"errors"
	"io"
	"os"
	"syscall"
)

// lock takes a flock, which ends with the process.
func (osFileSystem) lock(name string) (io.Closer, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if err == syscall.EWOULDBLOCK {
			err = ErrSnapshotDirInUse
		}
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (osFileSystem) syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
