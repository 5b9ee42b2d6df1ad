//go:build !(darwin || dragonfly || freebsd || illumos || linux || netbsd || openbsd || windows)

package idempotence

import (
	"errors"
	"io"
	"os"
)

// lock only opens the file. These systems share no lock that ends with the process, and
// any other would keep a broker from starting after a crash.
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
