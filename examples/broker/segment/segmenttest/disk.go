package segmenttest

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

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

// A Disk opens files for a log.
type Disk struct {
	// Before is called before each operation and may block. If it returns an
	// error, the operation fails. A write that fails writes the first half.
	Before func(Op) error

	// Volatile makes the disk remember what was not synced, for PowerCut.
	Volatile bool

	mu    sync.Mutex
	files []*file
}

// OpenFile is for [segment.Options].
func (d *Disk) OpenFile(name string, flag int, perm os.FileMode) (segment.File, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	v := &file{File: f, disk: d}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.Volatile {
		d.files = append(d.files, v)
	}
	return v, v.synced()
}

// PowerCut copies the directory from to the directory to, as a power cut would
// leave it. Of each file that was opened with OpenFile, any subset of the
// sectors that changed since the last sync is in its new state, and the size may
// be an old or the new one. Where a size is new and a sector is not, there are
// zeros. All other files are copied as they are.
func (d *Disk) PowerCut(rng *rand.Rand, sector int, from, to string) error {
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.files {
		name, err := filepath.Rel(from, f.Name())
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), f.remains(rng, sector), 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// A file is one file of a disk.
type file struct {
	*os.File
	disk *Disk

	// states are the contents of the file that may be on disk, of a volatile
	// one: as it was synced, and as it was after each change since.
	states [][]byte
}

// remains returns what a power cut leaves of the file.
func (f *file) remains(rng *rand.Rand, sector int) []byte {
	pick := func() []byte { return f.states[rng.IntN(len(f.states))] }
	p := make([]byte, len(pick()))
	for at := 0; at < len(p); at += sector {
		if state := pick(); at < len(state) {
			copy(p[at:min(at+sector, len(p))], state[at:])
		}
	}
	return p
}

func (f *file) before(op Op) error {
	if f.disk.Before == nil {
		return nil
	}
	return f.disk.Before(op)
}

func (f *file) WriteAt(p []byte, at int64) (int, error) {
	if err := f.before(Write); err != nil {
		n, _ := f.File.WriteAt(p[:len(p)/2], at)
		f.changed()
		return n, err
	}
	n, err := f.File.WriteAt(p, at)
	f.changed()
	return n, err
}

func (f *file) Sync() error {
	if err := f.before(Sync); err != nil {
		return err
	}
	if !f.disk.Volatile {
		return f.File.Sync()
	}
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	return f.synced()
}

func (f *file) Truncate(size int64) error {
	if err := f.before(Truncate); err != nil {
		return err
	}
	err := f.File.Truncate(size)
	f.changed()
	return err
}

// changed adds a state to those that may be on disk.
func (f *file) changed() {
	if !f.disk.Volatile {
		return
	}
	p, err := os.ReadFile(f.Name())
	if err != nil {
		panic(err)
	}
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	f.states = append(f.states, p)
}

// synced leaves the state that the file is in as the only one. It requires mu
// to be held.
func (f *file) synced() error {
	if !f.disk.Volatile {
		return nil
	}
	p, err := os.ReadFile(f.Name())
	f.states = [][]byte{p}
	return err
}
