// Package durable changes files so that the change survives a power cut, and keeps
// other processes away from them.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// WriteFile replaces the file at path. After a crash there is the old file or
// the new one; once WriteFile has returned nil, there is the new one.
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

// Remove removes the file at path, if there is one.
func Remove(path string) error {
	err := os.Remove(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return errors.Join(err, SyncDir(filepath.Dir(path)))
}

// MkdirAll creates the directory at path with all its parents, as [os.MkdirAll]
// does, and syncs the parent of each directory that it creates. Without that,
// the directory could be gone after a power cut with everything in it.
func MkdirAll(path string) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil
	}
	parent := filepath.Dir(filepath.Clean(path))
	if err := MkdirAll(parent); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return err
	}
	return SyncDir(parent)
}

// SyncDir makes the creation, renaming and removal of files in dir durable.
func SyncDir(dir string) error { return syncDir(dir) }
