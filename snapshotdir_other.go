//go:build !(darwin || dragonfly || freebsd || illumos || linux || netbsd || openbsd || windows)

package idempotence

import (
	"errors"
	"io"
	"os"
)

// lock only opens the file: what these systems have in common has no lock that
// ends with the process, and one that does not would keep a broker from starting
// after a crash.
func (osFileSystem) lock(name string) (io.Closer, error) {
	return os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
}

func (osFileSystem) syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
