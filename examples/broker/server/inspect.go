package server

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// A Recovery is what a broker would recover of a partition.
type Recovery struct {
	Producers *idempotence.ProducerStateManager

	// Snapshot is the end offset of the snapshot that was loaded, or 0. The log
	// was replayed from there on.
	Snapshot int64

	// NotLoaded has an error for each newer snapshot that could not be loaded.
	NotLoaded []error

	// Cut is what the broker would cut off the log, or nil.
	Cut *segment.Cut
}

// Inspect recovers the partition in the directory dir as a broker would, but for
// a limit on producers, and changes nothing. A broker may be running. An error
// is why the partition would be offline.
func Inspect(dir string) (Recovery, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Recovery{}, err
	}
	clean := readCleanStop(filepath.Dir(dir))[filepath.Base(dir)]
	log, err := segment.Open(dir, segment.Options{ReadOnly: true, Clean: clean})
	if err != nil {
		return Recovery{}, err
	}
	defer log.Close()
	snapshots, err := copySnapshots(dir)
	if err != nil {
		return Recovery{}, err
	}
	defer snapshots.close()

	cfg := idempotence.Config{Contiguous: true}
	if topic, i, ok := parseDirName(filepath.Base(dir)); ok {
		cfg.LogID = LogID(topic, i)
	}
	r := Recovery{Producers: idempotence.New(cfg), Cut: log.Cut()}
	found, err := recoverProducers(r.Producers, log, snapshots.SnapshotDir)
	r.Snapshot, r.NotLoaded = found.EndOffset, found.Skipped
	return r, err
}

// snapshotCopies are copies of snapshots, in a directory that goes with them: a
// SnapshotDir locks its directory and removes files from it.
type snapshotCopies struct {
	*idempotence.SnapshotDir
	dir string
}

const snapshotSuffix = ".idps"

func copySnapshots(from string) (c snapshotCopies, err error) {
	if c.dir, err = os.MkdirTemp("", "inspect-"); err != nil {
		return c, err
	}
	entries, err := os.ReadDir(from)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), snapshotSuffix) && err == nil {
			err = copyFile(filepath.Join(c.dir, e.Name()), filepath.Join(from, e.Name()))
		}
	}
	if err == nil {
		c.SnapshotDir, err = idempotence.OpenSnapshotDir(c.dir, 0)
	}
	if err != nil {
		err = errors.Join(err, os.RemoveAll(c.dir))
	}
	return c, err
}

func (c snapshotCopies) close() error { return errors.Join(c.Close(), os.RemoveAll(c.dir)) }

// copyFile copies a file, unless a running broker has removed it.
func copyFile(to, from string) error {
	r, err := os.Open(from)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}
