package segmenttest

import (
	"os"

	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// An Op is something that a log does to a file.
type Op string

// The operations that may fail.
const (
	Write    Op = "write"
	Sync     Op = "sync"
	Truncate Op = "truncate"
)

// A Disk opens files for a log. Before each operation it calls Before, which may
// take its time; when that returns an error the operation fails. A write that
// fails gets half way.
type Disk struct {
	Before func(Op) error
}

// OpenFile is for [segment.Options].
func (d *Disk) OpenFile(name string, flag int, perm os.FileMode) (segment.File, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return file{f, d}, nil
}

type file struct {
	*os.File
	disk *Disk
}

func (f file) WriteAt(p []byte, at int64) (int, error) {
	if err := f.disk.Before(Write); err != nil {
		n, _ := f.File.WriteAt(p[:len(p)/2], at)
		return n, err
	}
	return f.File.WriteAt(p, at)
}

func (f file) Sync() error {
	if err := f.disk.Before(Sync); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f file) Truncate(size int64) error {
	if err := f.disk.Before(Truncate); err != nil {
		return err
	}
	return f.File.Truncate(size)
}
