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
	"sync/atomic"
)

// This file keeps snapshots in a directory. The rule behind it: a file under its
// final name is whole. It is written under another name, forced to disk, and only
// then renamed, and the rename is forced to disk before anything older is
// removed. So whatever fails, and wherever a crash comes, what is loaded
// afterwards is the state before or the state after, and never something between.

const (
	snapshotSuffix  = ".idps"
	temporarySuffix = snapshotSuffix + ".tmp"
	lockName        = "idps.lock"
	offsetDigits    = 20 // of the end offset in a name, as in Kafka's

	// keepByDefault is one to load, and one in case it cannot be read.
	keepByDefault = 2
)

// Returned by SnapshotDir.
var (
	// ErrSnapshotDirInUse: another process, or another SnapshotDir of this one,
	// has the directory open. Two brokers that write to one log lose data
	// whatever this directory does, so the broker must not start.
	ErrSnapshotDirInUse error = &reason{text: "snapshot directory is in use", code: codeKafkaStorageError}

	// ErrStaleSnapshot: the log was cut, or deleted, after the snapshot was
	// taken, so it may hold batches that are gone. It is not saved. The broker
	// takes another one.
	ErrStaleSnapshot error = &reason{text: "log was cut after the snapshot", code: codeKafkaStorageError}
)

// SnapshotDir is a directory with the snapshots of one log, each in a file named
// by its end offset in 20 digits and the suffix .idps. Other files in it are left alone, so it may be
// the directory of the log.
//
// The broker calls Load at its start, Save when a segment is rolled and at
// shutdown, and DropAfter whenever the log is cut. Make one with OpenSnapshotDir.
// It is safe for concurrent use; its methods wait for each other. It must not be
// copied.
type SnapshotDir struct {
	path string
	keep int
	fs   fileSystem
	lock io.Closer

	mu sync.Mutex
	// intact has the end offsets of files that this SnapshotDir knows to be
	// whole, from having written or read them.
	intact map[int64]bool
	// saved is what Save has written last, but for what was overtaken.
	saved provenance
}

// provenance says of which manager a snapshot is, and how often its log had been
// cut then. Two with the same have one history, in which end offsets rise.
type provenance struct {
	truncations       *atomic.Uint64
	truncationsBefore uint64
	endOffset         int64
}

func provenanceOf(s *Snapshot) provenance {
	return provenance{s.truncations, s.truncationsBefore, s.EndOffset()}
}

// overtakes reports whether q is an earlier snapshot of the same history.
func (p provenance) overtakes(q provenance) bool {
	return p.truncations == q.truncations && p.truncationsBefore == q.truncationsBefore && p.endOffset > q.endOffset
}

// OpenSnapshotDir opens the directory at path, and makes it if it does not exist.
// keep is how many snapshots to keep, 2 if it is 0 or less: more than one, so
// that an older one is left where the newest cannot be read.
//
// It locks the directory until Close, against a second process that was started
// by mistake: with flock on a file in it, idps.lock, or by opening that without
// sharing on Windows. Either ends with the process, however that ends. Where the
// system has neither, there is no lock. ErrSnapshotDirInUse says that somebody
// else has it. Files left over from a crash in the middle of a Save are removed.
func OpenSnapshotDir(path string, keep int) (*SnapshotDir, error) {
	return openSnapshotDir(osFileSystem{}, path, keep)
}

func openSnapshotDir(fs fileSystem, path string, keep int) (*SnapshotDir, error) {
	if keep <= 0 {
		keep = keepByDefault
	}
	d := &SnapshotDir{path: path, keep: keep, fs: fs, intact: make(map[int64]bool)}
	if err := d.open(); err != nil {
		return nil, fmt.Errorf("idempotence: opening a snapshot directory: %w", err)
	}
	return d, nil
}

func (d *SnapshotDir) open() error {
	if err := d.fs.makeDir(d.path); err != nil {
		return err
	}
	lock, err := d.fs.lock(filepath.Join(d.path, lockName))
	if err != nil {
		return err
	}
	d.lock = lock
	if err := d.removeTemporary(); err != nil {
		return errors.Join(err, lock.Close())
	}
	return nil
}

// removeTemporary removes what a crash in the middle of a Save has left.
func (d *SnapshotDir) removeTemporary() error {
	names, err := d.fs.list(d.path)
	for _, name := range names {
		if isTemporary(name) {
			err = errors.Join(err, d.fs.remove(filepath.Join(d.path, name)))
		}
	}
	return err
}

// Close gives up the lock of the directory. Nothing else may be called after it.
func (d *SnapshotDir) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lock.Close()
}

// Save writes a snapshot to the directory, in place of one with the same end
// offset, and forces it to disk. It then removes those that are older than the
// newest few to keep, of which it counts only intact ones, and those past the
// end offset of s, which are of a log that was cut since. Where two are saved
// in another order than they were taken in, the later one stays.
//
// The error is nil if s is on disk and will survive. It is ErrStaleSnapshot if
// the log was cut since s was taken. On any error Load gives what was there
// before, or s; nothing is removed that could still be needed.
//
// It takes as long as the disk does: call it outside any lock.
func (d *SnapshotDir) Save(s *Snapshot) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.stale() {
		return fmt.Errorf("%w: its end offset is %d", ErrStaleSnapshot, s.EndOffset())
	}
	if err := d.save(s); err != nil {
		return fmt.Errorf("idempotence: saving a snapshot: %w", err)
	}
	var err error
	if from := provenanceOf(s); !d.saved.overtakes(from) {
		// Those past it are of a log that was cut since.
		d.saved = from
		err = d.dropNewer(s.EndOffset())
	}
	if err == nil {
		err = d.retain()
	}
	if err != nil {
		return fmt.Errorf("idempotence: removing old snapshots: %w", err)
	}
	return nil
}

func (d *SnapshotDir) save(s *Snapshot) error {
	name := d.name(s.EndOffset())
	temporary := strings.TrimSuffix(name, snapshotSuffix) + temporarySuffix
	err := d.write(s, temporary)
	if err == nil {
		err = d.fs.rename(temporary, name)
	}
	if err != nil {
		// What this error says is of no interest: it is removed once more
		// when the directory is opened.
		d.fs.remove(temporary)
		return err
	}
	if err := d.fs.syncDir(d.path); err != nil {
		return err
	}
	d.intact[s.EndOffset()] = true
	return nil
}

// write makes a file of a snapshot, and forces it to disk.
func (d *SnapshotDir) write(s *Snapshot, name string) error {
	f, err := d.fs.create(name)
	if err != nil {
		return err
	}
	_, err = s.WriteTo(f)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// retain removes what is older than the newest few intact snapshots.
func (d *SnapshotDir) retain() error {
	offsets, err := d.endOffsets()
	kept := 0
	for _, offset := range offsets {
		if kept == d.keep {
			err = errors.Join(err, d.remove(offset))
		} else if d.isIntact(offset) {
			kept++
		}
	}
	return err
}

// isIntact reports whether a file has the bytes that were written to it.
func (d *SnapshotDir) isIntact(offset int64) bool {
	if !d.intact[offset] {
		f, err := d.fs.open(d.name(offset))
		if err != nil {
			return false
		}
		defer f.Close()
		d.intact[offset] = verifySnapshot(f) == nil
	}
	return d.intact[offset]
}

func (d *SnapshotDir) remove(offset int64) error {
	delete(d.intact, offset)
	return d.fs.remove(d.name(offset))
}

// LoadResult says what Load has found.
type LoadResult struct {
	// Found says that a snapshot was restored.
	Found bool
	// EndOffset is the offset to replay the log from: the end offset of the
	// snapshot. Where none was found it is 0, and the log must be replayed from
	// its start.
	EndOffset int64
	// PassedOver has an error for each newer snapshot that could not be
	// restored, and one if what is past the log's end could not be removed. Tell
	// somebody: the disk may be failing.
	PassedOver []error
}

// Load restores the newest snapshot that is intact, of the manager's log, and not
// past logEnd, the end offset of the log after a torn tail has been cut off. What
// is past it is of records that a crash has lost, and is removed, as DropAfter
// does: the log would grow past it again, and then it would be taken for true.
// Where a snapshot cannot be restored, Load takes the next older one; where there
// is none, the state is untouched, so restore into a new manager or Reset the old
// one first.
//
// The error is nil unless the directory cannot be read, or none could be restored
// and one of them because it could not be read: it might be good. The state is
// untouched then too.
func (d *SnapshotDir) Load(m *ProducerStateManager, logEnd int64) (LoadResult, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var res LoadResult
	offsets, err := d.endOffsets()
	if err != nil {
		return res, fmt.Errorf("idempotence: loading a snapshot: %w", err)
	}
	past, offsets := splitAt(offsets, logEnd)
	if err := d.drop(past); err != nil {
		res.PassedOver = append(res.PassedOver, fmt.Errorf("removing what is past offset %d: %w", logEnd, err))
	}
	var unread error
	for _, offset := range offsets {
		err := d.load(m, offset, logEnd)
		if err == nil {
			res.Found, res.EndOffset = true, offset
			return res, nil
		}
		if errors.Is(err, errPastLogEnd) {
			if err = d.drop([]int64{offset}); err == nil {
				continue
			}
		}
		res.PassedOver = append(res.PassedOver, fmt.Errorf("%s: %w", filepath.Base(d.name(offset)), err))
		if !errors.Is(err, ErrCorruptSnapshot) && !errors.Is(err, ErrSnapshotLog) {
			unread = errors.Join(unread, err)
		}
	}
	return res, unread
}

// errPastLogEnd says that a snapshot was taken when the log was longer.
var errPastLogEnd = errors.New("idempotence: log is shorter than when the snapshot was taken")

// load restores one snapshot.
func (d *SnapshotDir) load(m *ProducerStateManager, offset, logEnd int64) error {
	f, err := d.fs.open(d.name(offset))
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := readSnapshot(f, m.cfg)
	if err != nil {
		return err
	}
	if n.endOffset != offset {
		return fmt.Errorf("%w: its end offset is %d, its name says %d", ErrCorruptSnapshot, n.endOffset, offset)
	}
	d.intact[offset] = true
	if n.restoredLogEnd > logEnd {
		return errPastLogEnd
	}
	m.replace(n)
	return nil
}

// DropAfter removes the snapshots that were taken when the log reached past to,
// since it was cut to end there: call it after [ProducerStateManager.Truncate] and
// before anything is appended, or they would be taken for snapshots of what is
// appended then. After [ProducerStateManager.Reset], call it with -1. They are gone from
// the disk when it returns without an error.
//
// A Save that is under way is waited for, and its snapshot dropped as well; one
// that has not begun yet refuses a snapshot from before the cut.
func (d *SnapshotDir) DropAfter(to int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	offsets, err := d.endOffsets()
	past, rest := splitAt(offsets, to)
	for _, offset := range rest {
		if d.logEnd(offset) > to {
			past = append(past, offset)
		}
	}
	if err = errors.Join(err, d.drop(past)); err != nil {
		return fmt.Errorf("idempotence: dropping snapshots past offset %d: %w", to, err)
	}
	return nil
}

// dropNewer removes the snapshots with an end offset past to.
func (d *SnapshotDir) dropNewer(to int64) error {
	offsets, err := d.endOffsets()
	past, _ := splitAt(offsets, to)
	return errors.Join(err, d.drop(past))
}

// splitAt parts end offsets, the newest first, into those past to and the rest.
func splitAt(offsets []int64, to int64) (past, rest []int64) {
	n := 0
	for n < len(offsets) && offsets[n] > to {
		n++
	}
	return offsets[:n:n], offsets[n:]
}

// logEnd returns the end of the log when a snapshot was taken, which may lie past
// its end offset, or that where it cannot be read: Load will find out.
func (d *SnapshotDir) logEnd(offset int64) int64 {
	f, err := d.fs.open(d.name(offset))
	if err != nil {
		return offset
	}
	defer f.Close()
	dec := newSnapshotDecoder(f)
	if head := dec.head(); dec.err == nil {
		return head.logEndOffset
	}
	return offset
}

// drop removes snapshots, and forces that to disk.
func (d *SnapshotDir) drop(offsets []int64) (err error) {
	if len(offsets) == 0 {
		return nil
	}
	for _, offset := range offsets {
		err = errors.Join(err, d.remove(offset))
	}
	return errors.Join(err, d.fs.syncDir(d.path))
}

// EndOffsets returns the end offsets of the snapshots in the directory, the
// newest first. Whether they are intact is not looked at.
func (d *SnapshotDir) EndOffsets() ([]int64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	offsets, err := d.endOffsets()
	if err != nil {
		return nil, fmt.Errorf("idempotence: listing snapshots: %w", err)
	}
	return offsets, nil
}

// endOffsets is EndOffsets.
func (d *SnapshotDir) endOffsets() ([]int64, error) {
	names, err := d.fs.list(d.path)
	var offsets []int64
	for _, name := range names {
		if offset, ok := parseSnapshotName(name); ok {
			offsets = append(offsets, offset)
		}
	}
	slices.Sort(offsets)
	slices.Reverse(offsets)
	return offsets, err
}

// name returns the name of the file for an end offset.
func (d *SnapshotDir) name(offset int64) string {
	return filepath.Join(d.path, fmt.Sprintf("%0*d%s", offsetDigits, offset, snapshotSuffix))
}

// parseSnapshotName returns the end offset that a file is named by, and whether
// it is a snapshot at all.
func parseSnapshotName(name string) (int64, bool) {
	digits, ok := strings.CutSuffix(name, snapshotSuffix)
	if !ok || len(digits) != offsetDigits || strings.Trim(digits, "0123456789") != "" {
		return 0, false
	}
	offset, err := strconv.ParseInt(digits, 10, 64)
	return offset, err == nil
}

// isTemporary reports whether a file is a snapshot that is not whole yet.
func isTemporary(name string) bool {
	digits, ok := strings.CutSuffix(name, temporarySuffix)
	_, named := parseSnapshotName(digits + snapshotSuffix)
	return ok && named
}

// fileSystem is what a SnapshotDir does to the disk, each step a method, so that
// a test can make each of them fail.
type fileSystem interface {
	makeDir(path string) error
	// list returns the names of the files in a directory.
	list(path string) ([]string, error)
	open(name string) (io.ReadCloser, error)
	// create makes an empty file, in place of one that is there.
	create(name string) (syncWriteCloser, error)
	// rename replaces a file that has the new name already.
	rename(from, to string) error
	remove(name string) error
	// syncDir forces the names in a directory to disk.
	syncDir(path string) error
	// lock takes a lock that no two have at once, or returns
	// ErrSnapshotDirInUse.
	lock(name string) (io.Closer, error)
}

type syncWriteCloser interface {
	io.WriteCloser
	Sync() error
}

// osFileSystem is that of the operating system. Its lock and syncDir are in the
// files for each.
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
