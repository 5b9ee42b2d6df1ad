//go:build !windows

package durable

import (
	"errors"
	"os"
)

// syncDir is a variable so that a test can see which directories are synced.
var syncDir = func(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
