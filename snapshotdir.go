package idempotence

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// This file keeps snapshots in a directory. A file under its final name is
// complete: it is written under another name, synced, and then renamed, and the
// rename is synced before anything older is removed. So after any failure or
// crash, Load finds the state from before a Save or the one from after it.

const (
	snapshotSuffix  = ".idps"
	temporarySuffix = snapshotSuffix + ".tmp"
	lockName        = "idps.lock"
	offsetDigits    = 20 // of the end offset in a name, as in Kafka's

	defaultKeep = 2 // one to load, and one in case that cannot be read
)

// SnapshotDir is a directory with the snapshots of one log. Each is in a file
// named by its end offset, in 20 digits, with the suffix .idps. Other files are
// left alone, so it may be the directory of the log.
//
// The broker calls Load at its start, Save when it rolls a segment and when it
// shuts down, and DropAfter when it truncates the log. After a recovery that
// replayed much of the log it calls Save at once: otherwise a broker that is
// killed again replays it again.
//
// Create one with OpenSnapshotDir. It is safe for concurrent use; its methods
// wait for each other. Do not copy it.
type SnapshotDir struct {
	path string
	keep int
	fs   fileSystem
	lock io.Closer

	mu sync.Mutex
	// intact holds the snapshots that were written or read without an error: the
	// log end offset of each by its end offset.
	intact map[int64]int64
}

// OpenSnapshotDir opens the directory at path, and creates it if it does not
// exist. keep is the number of snapshots to keep; zero or less means 2. With more
// than one, Load can fall back to an older one.
//
// It locks the directory until Close, against a second process started by
// mistake: it holds a flock on the file idps.lock, or on Windows opens that file
// without sharing. Either lock ends with the process. Systems that have neither lock
// nothing. It returns ErrSnapshotDirInUse if the directory is
// locked already, and otherwise the error of the file system, wrapped.
func OpenSnapshotDir(path string, keep int) (*SnapshotDir, error) {
	return openSnapshotDir(osFileSystem{}, path, keep)
}

func openSnapshotDir(fs fileSystem, path string, keep int) (*SnapshotDir, error) {
	if keep <= 0 {
		keep = defaultKeep
	}
	err := fs.makeDir(path)
	var lock io.Closer
	if err == nil {
		lock, err = fs.lock(filepath.Join(path, lockName))
	}
	if err != nil {
		return nil, fmt.Errorf("idempotence: opening a snapshot directory: %w", err)
	}
	return &SnapshotDir{path: path, keep: keep, fs: fs, lock: lock, intact: make(map[int64]int64)}, nil
}

// Close releases the lock of the directory, and returns the error of that. The
// SnapshotDir must not be used afterwards.
func (d *SnapshotDir) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lock.Close()
}

// Save writes a snapshot to the directory and syncs it. It replaces a snapshot
// with the same end offset. It then removes the snapshots that reach further than
// s, since the log was truncated after them, and those older than the newest
// intact ones it keeps.
//
// Save snapshots in the order in which they were taken. An older one that is
// saved after a newer one removes it, which costs a longer replay.
//
// If the error is nil, s is on disk. It is ErrStaleSnapshot if the log was
// truncated after s was taken, and otherwise the error of the file system,
// wrapped. After an error Load gives s or what it gave before.
//
// It takes as long as the disk does: call it without holding a lock.
func (d *SnapshotDir) Save(s *Snapshot) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.stale() {
		return fmt.Errorf("%w: end offset %d", ErrStaleSnapshot, s.EndOffset())
	}
	if err := d.save(s); err != nil {
		return fmt.Errorf("idempotence: saving a snapshot: %w", err)
	}
	if err := d.retain(s.EndOffset(), s.LogEndOffset()); err != nil {
		return fmt.Errorf("idempotence: removing old snapshots: %w", err)
	}
	return nil
}

func (d *SnapshotDir) save(s *Snapshot) error {
	name := snapshotName(s.EndOffset())
	temporary := strings.TrimSuffix(name, snapshotSuffix) + temporarySuffix
	delete(d.intact, s.EndOffset()) // of the file that is replaced
	err := d.write(s, temporary)
	if err == nil {
		err = d.fs.rename(d.file(temporary), d.file(name))
	}
	if err != nil {
		d.fs.remove(d.file(temporary)) // or else Load does, and reports the error
		return err
	}
	if err := d.fs.syncDir(d.path); err != nil {
		return err
	}
	d.intact[s.EndOffset()] = s.LogEndOffset()
	return nil
}

// write writes a snapshot to a file and syncs it.
func (d *SnapshotDir) write(s *Snapshot, name string) error {
	f, err := d.fs.create(d.file(name))
	if err != nil {
		return err
	}
	_, err = s.WriteTo(f)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// retain removes the snapshots past the one that was just saved, and those older
// than the newest intact ones to keep.
func (d *SnapshotDir) retain(endOffset, logEndOffset int64) error {
	offsets, _, err := d.list()
	if err != nil {
		return err
	}
	var past, old []int64
	kept := 0
	for _, offset := range offsets {
		switch {
		case offset > endOffset || d.logEndOffset(offset) > logEndOffset:
			past = append(past, offset)
		case kept == d.keep:
			old = append(old, offset)
		case d.isIntact(offset):
			kept++
		}
	}
	if err := d.drop(namesOf(past)); err != nil {
		return err
	}
	return d.remove(namesOf(old))
}

// isIntact reports whether a file has the bytes that were written to it.
func (d *SnapshotDir) isIntact(offset int64) bool {
	if _, ok := d.intact[offset]; ok {
		return true
	}
	f, err := d.fs.open(d.file(snapshotName(offset)))
	if err != nil {
		return false
	}
	defer f.Close()
	if verifySnapshot(f) != nil {
		return false
	}
	d.intact[offset] = d.logEndOffset(offset)
	return true
}

// LoadResult is what Load found.
type LoadResult struct {
	// Found reports whether a snapshot was restored.
	Found bool
	// EndOffset is the offset from which to replay the log: the end offset of
	// the snapshot, or the log's start if none was restored.
	EndOffset int64
	// Skipped has an error for each newer snapshot that could not be restored,
	// and one if useless files could not be removed. Report them: the disk may
	// be failing.
	Skipped []error
}

// Load restores the newest snapshot of the manager's log that is intact and lies
// within the log. logStart is the log's start offset, or 0, and logEnd its end
// offset after a torn tail was cut off. A snapshot lies within the log if its
// EndOffset is not below logStart, since the batches in between are missing, and
// its LogEndOffset not above logEnd, since it may hold batches that are gone.
// Load removes the others, and what an interrupted Save left.
//
// If no snapshot is restored, the state is untouched: load into a new manager, or
// call Reset before.
//
// The error is nil unless the directory could not be read, or no snapshot was
// restored and one could not be read, which may have been intact. The state is
// untouched then.
func (d *SnapshotDir) Load(m *ProducerStateManager, logStart, logEnd int64) (LoadResult, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	res := LoadResult{EndOffset: logStart}
	offsets, temporary, err := d.list()
	if err != nil {
		return res, fmt.Errorf("idempotence: loading a snapshot: %w", err)
	}
	var within []int64
	useless := temporary
	for _, offset := range offsets {
		if offset < logStart || d.reachesPast(offset, logEnd) {
			useless = append(useless, snapshotName(offset))
		} else {
			within = append(within, offset)
		}
	}
	if err := d.drop(useless); err != nil {
		res.Skipped = append(res.Skipped, fmt.Errorf("idempotence: removing useless snapshots: %w", err))
	}
	var unread error
	for _, offset := range within {
		err := d.load(m, offset, logEnd)
		if err == nil {
			res.Found, res.EndOffset = true, offset
			return res, nil
		}
		res.Skipped = append(res.Skipped, fmt.Errorf("%s: %w", snapshotName(offset), err))
		if !errors.Is(err, ErrCorruptSnapshot) && !errors.Is(err, ErrSnapshotLog) {
			unread = errors.Join(unread, err)
		}
	}
	return res, unread
}

// load restores one snapshot.
func (d *SnapshotDir) load(m *ProducerStateManager, offset, logEnd int64) error {
	f, err := d.fs.open(d.file(snapshotName(offset)))
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := readSnapshot(f, m.config())
	switch {
	case err != nil:
		return err
	case n.endOffset != offset:
		return fmt.Errorf("%w: end offset %d, file name says %d", ErrCorruptSnapshot, n.endOffset, offset)
	case n.restoredLogEnd > logEnd: // its header could not be read before
		return fmt.Errorf("%w: log end offset %d, log ends at %d", ErrStaleSnapshot, n.restoredLogEnd, logEnd)
	}
	d.intact[offset] = n.restoredLogEnd
	m.replace(n)
	return nil
}

// DropAfter removes the snapshots whose LogEndOffset is above to, the offset at
// which the log was truncated. Call it after [ProducerStateManager.Truncate] and
// before anything is appended: otherwise Load may restore one once the log has
// grown past it again. After [ProducerStateManager.Reset], call it with -1. If the
// error is nil, they are gone from the disk; otherwise it is that of the file
// system, wrapped.
//
// It waits for a Save in progress and drops its snapshot too. A later Save
// refuses snapshots from before the truncation.
func (d *SnapshotDir) DropAfter(to int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	offsets, _, err := d.list()
	past := slices.DeleteFunc(offsets, func(offset int64) bool { return !d.reachesPast(offset, to) })
	if err = errors.Join(err, d.drop(namesOf(past))); err != nil {
		return fmt.Errorf("idempotence: dropping snapshots past offset %d: %w", to, err)
	}
	return nil
}

// reachesPast reports whether a snapshot was taken of a log that reached past to.
func (d *SnapshotDir) reachesPast(offset, to int64) bool {
	return offset > to || d.logEndOffset(offset) > to
}

// logEndOffset returns the log end offset of a snapshot, or its end offset where
// it cannot be read.
func (d *SnapshotDir) logEndOffset(offset int64) int64 {
	if end, ok := d.intact[offset]; ok {
		return end
	}
	f, err := d.fs.open(d.file(snapshotName(offset)))
	if err != nil {
		return offset
	}
	defer f.Close()
	dec := newSnapshotDecoder(f)
	if head := dec.head(); dec.err == nil {
		return max(offset, head.logEndOffset)
	}
	return offset
}

// drop removes files, and syncs the directory if there are any.
func (d *SnapshotDir) drop(names []string) error {
	if len(names) == 0 {
		return nil
	}
	return errors.Join(d.remove(names), d.fs.syncDir(d.path))
}

func (d *SnapshotDir) remove(names []string) (err error) {
	for _, name := range names {
		if offset, ok := parseSnapshotName(name); ok {
			delete(d.intact, offset)
		}
		err = errors.Join(err, d.fs.remove(d.file(name)))
	}
	return err
}

// EndOffsets returns the end offsets of the snapshots in the directory, newest
// first, intact or not. It returns the error of the file system, wrapped.
func (d *SnapshotDir) EndOffsets() ([]int64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	offsets, _, err := d.list()
	if err != nil {
		return nil, fmt.Errorf("idempotence: listing snapshots: %w", err)
	}
	return offsets, nil
}

// list returns the end offsets of the snapshots, newest first, and the names of
// temporary files that an interrupted Save left.
func (d *SnapshotDir) list() (offsets []int64, temporary []string, err error) {
	names, err := d.fs.list(d.path)
	for _, name := range names {
		if offset, ok := parseSnapshotName(name); ok {
			offsets = append(offsets, offset)
		} else if isTemporary(name) {
			temporary = append(temporary, name)
		}
	}
	slices.Sort(offsets)
	slices.Reverse(offsets)
	return offsets, temporary, err
}

func (d *SnapshotDir) file(name string) string { return filepath.Join(d.path, name) }

// snapshotName returns the name of the file for an end offset.
func snapshotName(offset int64) string {
	return fmt.Sprintf("%0*d%s", offsetDigits, offset, snapshotSuffix)
}

func namesOf(offsets []int64) []string {
	names := make([]string, len(offsets))
	for i, offset := range offsets {
		names[i] = snapshotName(offset)
	}
	return names
}

// parseSnapshotName returns the end offset in the name of a file, and whether it
// is the name of a snapshot.
func parseSnapshotName(name string) (int64, bool) {
	digits, ok := strings.CutSuffix(name, snapshotSuffix)
	if !ok || len(digits) != offsetDigits || strings.Trim(digits, "0123456789") != "" {
		return 0, false
	}
	offset, err := strconv.ParseInt(digits, 10, 64)
	return offset, err == nil
}

// isTemporary reports whether a file was written by a Save that has not ended.
func isTemporary(name string) bool {
	digits, ok := strings.CutSuffix(name, temporarySuffix)
	_, named := parseSnapshotName(digits + snapshotSuffix)
	return ok && named
}

// fileSystem is the disk. A test can make each method fail.
type fileSystem interface {
	makeDir(path string) error
	// list returns the names of the files in a directory.
	list(path string) ([]string, error)
	open(name string) (io.ReadCloser, error)
	// create creates a file, or empties an existing one.
	create(name string) (syncWriteCloser, error)
	// rename replaces an existing file.
	rename(from, to string) error
	remove(name string) error
	// syncDir syncs the names in a directory.
	syncDir(path string) error
	// lock locks a file until Close, or returns ErrSnapshotDirInUse.
	lock(name string) (io.Closer, error)
}

type syncWriteCloser interface {
	io.WriteCloser
	Sync() error
}

// osFileSystem is the operating system's. Its lock and syncDir are in a file for each
// kind of system.
type osFileSystem struct{}

func (osFileSystem) makeDir(path string) error                   { return os.MkdirAll(path, 0o755) }
func (osFileSystem) open(name string) (io.ReadCloser, error)     { return os.Open(name) }
func (osFileSystem) create(name string) (syncWriteCloser, error) { return os.Create(name) }
func (osFileSystem) rename(from, to string) error                { return os.Rename(from, to) }
func (osFileSystem) remove(name string) error                    { return os.Remove(name) }

func (osFileSystem) list(path string) ([]string, error) {
	entries, err := os.ReadDir(path)
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}
