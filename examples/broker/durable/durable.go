// Package durable changes files so that the change outlives a loss of power.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// WriteFile replaces the file at path. A crash leaves the old one or the new
// one, and once WriteFile has returned nil, the new one.
func WriteFile(path string, data []byte) error {
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
	return SyncDir(filepath.Dir(path))
}

// SyncDir makes the creation, renaming and removal of files in dir durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
