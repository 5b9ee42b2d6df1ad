package idempotence

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// This file tests the directory of snapshots, on a disk in memory whose every step
// can fail or be the last before a crash, and on a real one.

// disk is a file system in memory. A crash may lose names and contents that were not
// synced, each independently.
type disk struct {
	names   map[string]*inode // as programs see it
	durable map[string]*inode // the names as they are after a crash at the worst moment
	locked  bool
	steps   []string // what was done, with the step's number
	faults  map[int]fault
	failing string // every step of this name fails
}

type inode struct{ data, synced []byte }

// fault is what goes wrong in a step.
type fault int

const (
	fails      fault = iota + 1 // nothing is done, and an error comes back
	lies                        // it is done, and an error comes back all the same
	crashes0                    // the machine stops before it
	crashesEnd                  // the machine stops after it
)

var (
	errNoSpace = errors.New("no space left on device")
	errFault   = &os.PathError{Op: "write", Path: "disk", Err: errNoSpace}
	errCrash   = errors.New("the machine has stopped")
)

func newDisk() *disk {
	return &disk{names: map[string]*inode{}, durable: map[string]*inode{}, faults: map[int]fault{}}
}

// do performs a step, unless it fails. After a crash it does nothing.
func (d *disk) do(what string, effect func()) error {
	n := len(d.steps)
	d.steps = append(d.steps, what)
	for at, f := range d.faults {
		if at < n && f >= crashes0 {
			return errCrash
		}
	}
	if what == d.failing {
		return errFault
	}
	switch d.faults[n] {
	case fails:
		return errFault
	case lies:
		effect()
		return errFault
	case crashes0:
		return errCrash
	case crashesEnd:
		effect()
		return errCrash
	}
	effect()
	return nil
}

// afterCrash returns the disk after a restart, with the names as they were last or as
// they were last synced. kept returns what is left of contents that were not synced.
func (d *disk) afterCrash(namesKept bool, kept func(unsynced []byte) []byte) *disk {
	again := newDisk()
	from := d.durable
	if namesKept {
		from = d.names
	}
	for name, node := range from {
		data := node.synced
		if !bytes.Equal(node.data, node.synced) {
			data = kept(node.data)
		}
		again.names[name] = &inode{bytes.Clone(data), bytes.Clone(data)}
	}
	again.durable = maps.Clone(again.names)
	return again
}

func (d *disk) makeDir(string) error { return d.do("makeDir", func() {}) }

func (d *disk) list(string) (names []string, err error) {
	err = d.do("list", func() {
		for name := range d.names {
			names = append(names, filepath.Base(name))
		}
	})
	return names, err
}

func (d *disk) open(name string) (r io.ReadCloser, err error) {
	err = d.do("open", func() {
		if node := d.names[name]; node != nil {
			r = io.NopCloser(bytes.NewReader(node.data))
		}
	})
	if err == nil && r == nil {
		err = os.ErrNotExist
	}
	return r, err
}

func (d *disk) create(name string) (syncWriteCloser, error) {
	node := &inode{}
	return &diskFile{d, node}, d.do("create", func() { d.names[name] = node })
}

func (d *disk) rename(from, to string) error {
	return d.do("rename", func() {
		d.names[to] = d.names[from]
		delete(d.names, from)
	})
}

func (d *disk) remove(name string) error {
	return d.do("remove", func() { delete(d.names, name) })
}

func (d *disk) syncDir(string) error {
	return d.do("syncDir", func() { d.durable = maps.Clone(d.names) })
}

func (d *disk) lock(string) (io.Closer, error) {
	if d.locked {
		return nil, ErrSnapshotDirInUse
	}
	d.locked = true
	return diskLock{d}, nil
}

type diskLock struct{ d *disk }

func (l diskLock) Close() error { l.d.locked = false; return nil }

type diskFile struct {
	d    *disk
	node *inode
}

// Write writes half of p if it fails, like a full disk.
func (f *diskFile) Write(p []byte) (int, error) {
	n := 0
	err := f.d.do("write", func() { n = len(p) })
	if err == errFault {
		n = len(p) / 2
	}
	f.node.data = append(f.node.data, p[:n]...)
	return n, err
}

func (f *diskFile) Sync() error {
	return f.d.do("sync", func() { f.node.synced = bytes.Clone(f.node.data) })
}

func (f *diskFile) Close() error { return f.d.do("close", func() {}) }

// logOf returns a manager that has committed a number of batches of one record.
func logOf(t testing.TB, batches int) *ProducerStateManager {
	t.Helper()
	m := New(Config{})
	for i := range batches {
		if err := m.Commit(31, 0, int32(i), 1, int64(i)); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func openDisk(t testing.TB, d *disk, keep int) *SnapshotDir {
	t.Helper()
	dir, err := openSnapshotDir(d, "snapshots", keep)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// loaded loads into a new manager and returns the end offset, or -1 if no snapshot
// was found. The state must be that of a log of that length.
func loaded(t testing.TB, dir *SnapshotDir, logEnd int64) int64 {
	t.Helper()
	m := New(Config{})
	res, err := dir.Load(m, 0, logEnd)
	if err != nil {
		t.Fatal(err)
	}
	if !res.Found {
		if m.EndOffset() != 0 || res.EndOffset != 0 {
			t.Fatalf("none found, and the state is %+v", stateOf(m))
		}
		return -1
	}
	if want := encoded(t, logOf(t, int(res.EndOffset))); !bytes.Equal(want, encoded(t, m)) {
		t.Fatalf("loaded at %d: %+v", res.EndOffset, stateOf(m))
	}
	return res.EndOffset
}

// endOffsets returns what the directory holds.
func endOffsets(t testing.TB, dir *SnapshotDir) []int64 {
	t.Helper()
	offsets, err := dir.EndOffsets()
	if err != nil {
		t.Fatal(err)
	}
	return offsets
}

// TestSaveFaults makes every step of a Save fail in every way, and crashes before and
// after every step, with every outcome for what was not synced. Load then finds the
// state from before or the saved one, and the saved one if Save returned no error.
func TestSaveFaults(t *testing.T) {
	for _, tt := range []struct {
		name  string
		saved []int // before, in this order
		save  int
		keep  int
		ends  []int64 // what may be loaded afterwards
	}{
		{"the first", nil, 6, 2, []int64{-1, 6}},
		{"the second", []int{3}, 6, 2, []int64{3, 6}},
		{"one too many", []int{2, 3}, 6, 2, []int64{3, 6}},
		{"in place of the only one", []int{3}, 6, 1, []int64{3, 6}},
		{"the same end offset", []int{2, 6}, 6, 2, []int64{6}},
		{"a shorter log", []int{3, 9}, 6, 2, []int64{9, 6}},
	} {
		prepare := func() (*disk, *SnapshotDir) {
			d := newDisk()
			dir := openDisk(t, d, tt.keep)
			for _, n := range tt.saved {
				if err := dir.Save(logOf(t, n).Snapshot()); err != nil {
					t.Fatal(err)
				}
			}
			d.steps = nil
			return d, dir
		}
		s := logOf(t, tt.save).Snapshot()
		d, dir := prepare()
		if err := dir.Save(s); err != nil {
			t.Fatal(err)
		}
		steps := d.steps
		if first := "create write write sync close rename syncDir list"; !strings.HasPrefix(strings.Join(steps, " "), first) {
			t.Fatalf("Save does %v", steps)
		}
		for at, step := range steps {
			for _, f := range []fault{fails, lies, crashes0, crashesEnd} {
				d, dir := prepare()
				d.faults[at] = f
				err := dir.Save(s)
				name := fmt.Sprintf("%s: fault %d at step %d, %s", tt.name, f, at, step)
				check := func(dir *SnapshotDir) {
					t.Helper()
					end := loaded(t, dir, 100)
					if err == nil && end != int64(tt.save) || !slices.Contains(tt.ends, end) {
						t.Fatalf("%s: Save returned %v, loaded %d", name, err, end)
					}
				}
				if f < crashes0 {
					// A file that cannot be read only does not count as intact.
					if err == nil && step != "open" {
						t.Fatalf("%s: Save has not noticed", name)
					}
					if left := leftOver(d); left != "" {
						t.Fatalf("%s: %s is left", name, left)
					}
					check(dir)
					if err := dir.Save(s); err != nil {
						t.Fatalf("%s: and once more: %v", name, err)
					}
					if end := loaded(t, dir, 100); end != int64(tt.save) {
						t.Fatalf("%s: and once more: loaded %d", name, end)
					}
					continue
				}
				for _, namesKept := range []bool{false, true} {
					for _, kept := range []func([]byte) []byte{
						func(b []byte) []byte { return nil },
						func(b []byte) []byte { return b[:len(b)/2] },
						func(b []byte) []byte { return b },
					} {
						again := d.afterCrash(namesKept, kept)
						check(openDisk(t, again, tt.keep))
						if left := leftOver(again); left != "" {
							t.Fatalf("%s: %s is left after a crash", name, left)
						}
					}
				}
			}
		}
	}
}

// leftOver returns a temporary file on the disk, or "".
func leftOver(d *disk) string {
	for name := range d.names {
		if strings.HasSuffix(name, temporarySuffix) {
			return name
		}
	}
	return ""
}

// TestLoadDropsWhatIsLost: a crash has lost the log behind 1 and left a snapshot from
// 2. It is not loaded, even when the log has grown past 2 with other records: a retry
// of the lost batch would be a duplicate.
func TestLoadDropsWhatIsLost(t *testing.T) {
	d := newDisk()
	dir := openDisk(t, d, 10)
	for n := 1; n <= 2; n++ {
		if err := dir.Save(logOf(t, n).Snapshot()); err != nil {
			t.Fatal(err)
		}
	}
	for _, logEnd := range []int64{1, 5} {
		if end := loaded(t, dir, logEnd); end != 1 {
			t.Errorf("a log that ends at %d: loaded %d", logEnd, end)
		}
	}

	if err := dir.Save(logOf(t, 2).Snapshot()); err != nil {
		t.Fatal(err)
	}
	d.steps, d.faults = nil, map[int]fault{1: fails}
	res, err := dir.Load(New(Config{}), 0, 1)
	if err != nil || res.EndOffset != 1 || len(res.Skipped) != 1 || !errors.Is(res.Skipped[0], errNoSpace) {
		t.Errorf("what is past the end cannot be removed: %+v, %v", res, err)
	}
}

// TestF9_LogStart: retention has deleted batches between a snapshot and the
// start of the log. The snapshot is not loaded: it would refuse a producer that has
// sent batches since.
func TestF9_LogStart(t *testing.T) {
	dir := openDisk(t, newDisk(), 2)
	m := New(Config{})
	commit := func(pid int64, from, to int32, base int64) {
		t.Helper()
		for seq := from; seq <= to; seq++ {
			if err := m.Commit(pid, 0, seq, 1, base+int64(seq-from)); err != nil {
				t.Fatal(err)
			}
		}
		if err := dir.Save(m.Snapshot()); err != nil {
			t.Fatal(err)
		}
	}
	commit(40, 0, 2, 0) // snapshot at 3
	commit(40, 3, 8, 3)
	commit(50, 0, 3, 9) // snapshot at 13
	for _, tt := range []struct {
		logStart int64
		damaged  bool
		from     int64
		left     []int64
	}{
		{9, false, 13, []int64{13, 9}},
		{9, true, 9, []int64{13, 9}}, // nothing is missing between 9 and the log
		{10, true, 10, []int64{13}},
		{10, false, 13, []int64{13}},
		{14, false, 14, nil},
	} {
		newest := dir.fs.(*disk).names[dir.file(snapshotName(13))]
		if tt.damaged {
			newest.data[30] ^= 1
		}
		n := New(Config{})
		res, err := dir.Load(n, tt.logStart, 20)
		if err != nil || res.EndOffset != tt.from || res.Found != (tt.from == 9 || tt.from == 13) || len(res.Skipped) > 0 != tt.damaged {
			t.Errorf("log from %d, newest damaged %t: %+v, %v", tt.logStart, tt.damaged, res, err)
		}
		if diff := cmp.Diff(tt.left, endOffsets(t, dir)); diff != "" {
			t.Errorf("log from %d: snapshots (-want +got)\n%s", tt.logStart, diff)
		}
		if tt.from == 10 {
			if _, err := n.Check(40, 0, 9, 1); !errors.Is(err, ErrUnknownProducer) {
				t.Errorf("the next batch of producer 40: %v, want %v", err, ErrUnknownProducer)
			}
		}
		if tt.damaged {
			newest.data[30] ^= 1
		}
	}
}

// TestLeftoversAreReported: Load removes what an interrupted Save left, and snapshots
// that do not lie within the log. If that fails, it reports the error and loads a
// snapshot.
func TestLeftoversAreReported(t *testing.T) {
	for _, name := range []string{"00000000000000000002.idps.tmp", snapshotName(1), snapshotName(9)} {
		for _, fails := range []bool{false, true} {
			d := newDisk()
			dir := openDisk(t, d, 2)
			if err := dir.Save(logOf(t, 5).Snapshot()); err != nil {
				t.Fatal(err)
			}
			d.names[dir.file(name)] = &inode{}
			if fails {
				d.failing = "remove"
			}
			res, err := dir.Load(New(Config{}), 3, 7)
			if err != nil || res.EndOffset != 5 || len(res.Skipped) > 0 != fails || fails && !errors.Is(res.Skipped[0], errNoSpace) {
				t.Errorf("%s, removing it fails %t: %+v, %v", name, fails, res, err)
			}
			if _, left := d.names[dir.file(name)]; left != fails {
				t.Errorf("%s, removing it fails %t: left %t", name, fails, left)
			}
		}
	}
}

// TestLoadSkips: Load skips snapshots that are not intact or of another log, and
// loads an older one without an error. It returns a reading error only if it loads
// none.
func TestLoadSkips(t *testing.T) {
	d := newDisk()
	dir := openDisk(t, d, 10)
	for n := 1; n <= 6; n++ {
		if err := dir.Save(logOf(t, n).Snapshot()); err != nil {
			t.Fatal(err)
		}
	}
	node := func(n int64) *inode { return d.names[dir.file(snapshotName(n))] }
	node(6).data = node(6).data[:50]
	node(5).data[4]++ // the version
	node(4).data = node(3).data
	other := New(Config{LogID: [16]byte{7}})
	other.Advance(3)
	node(3).data = encoded(t, other)

	m := New(Config{LogID: [16]byte{8}})
	res, err := dir.Load(m, 0, 100)
	if err != nil || !res.Found || res.EndOffset != 2 || len(res.Skipped) != 4 {
		t.Fatalf("%+v, %v", res, err)
	}
	for i, want := range []error{ErrCorruptSnapshot, ErrSnapshotVersion, ErrCorruptSnapshot, ErrSnapshotLog} {
		got := res.Skipped[i]
		if !errors.Is(got, want) || !strings.HasPrefix(got.Error(), filepath.Base(dir.file(snapshotName(int64(6-i))))+": idempotence: ") {
			t.Errorf("%d: %v", 6-i, got)
		}
	}

	d.names = map[string]*inode{dir.file(snapshotName(6)): {data: []byte("idps")}, dir.file(snapshotName(5)): {data: nil}}
	before := encoded(t, m)
	if res, err := dir.Load(m, 0, 100); err != nil || res.Found || len(res.Skipped) != 2 {
		t.Errorf("nothing intact: %+v, %v", res, err)
	}
	d.steps, d.faults = nil, map[int]fault{1: fails}
	if res, err := dir.Load(m, 0, 100); !errors.Is(err, errNoSpace) || res.Found || len(res.Skipped) != 2 {
		t.Errorf("one cannot be read, and the other is corrupt: %+v, %v", res, err)
	}
	d.steps, d.faults = nil, map[int]fault{0: fails}
	if _, err := dir.Load(m, 0, 100); !errors.Is(err, errNoSpace) {
		t.Errorf("the directory cannot be read: %v", err)
	}
	if !bytes.Equal(before, encoded(t, m)) {
		t.Error("the state was touched")
	}
	d.names[dir.file(snapshotName(4))] = &inode{data: encoded(t, logOf(t, 4))}
	d.steps, d.faults = nil, map[int]fault{1: fails}
	if res, err := dir.Load(m, 0, 100); err != nil || res.EndOffset != 4 {
		t.Errorf("one cannot be read, and there is an older one: %+v, %v", res, err)
	}
}

// TestRetention: Save keeps the newest intact snapshots. A damaged one does not
// count, so the last intact one is never removed.
func TestRetention(t *testing.T) {
	d := newDisk()
	dir := openDisk(t, d, 2)
	save := func(n int) {
		t.Helper()
		if err := dir.Save(logOf(t, n).Snapshot()); err != nil {
			t.Fatal(err)
		}
	}
	has := func(want ...int64) {
		t.Helper()
		if diff := cmp.Diff(want, endOffsets(t, dir)); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
	save(1)
	save(2)
	save(3)
	has(3, 2)
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
	d.names[dir.file(snapshotName(3))].data[30]++
	dir = openDisk(t, d, 2) // which does not know that 3 was written well once
	save(4)
	has(4, 3, 2)
	save(5)
	has(5, 4)
	d.steps = nil
	save(5)
	has(5, 4)
	if slices.Contains(d.steps, "open") {
		t.Errorf("it has read again what it has written: %v", d.steps)
	}
}

// TestSnapshotDirOnDisk: names, the lock, leftovers and other files, on a real file
// system.
func TestSnapshotDirOnDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "partition-0", "snapshots")
	dir, err := OpenSnapshotDir(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenSnapshotDir(path, 0); !errors.Is(err, ErrSnapshotDirInUse) {
		t.Errorf("opened twice: %v", err)
	}
	if end := loaded(t, dir, 100); end != -1 {
		t.Errorf("empty, and loaded %d", end)
	}
	for _, n := range []int{1, 2, 12} {
		if err := dir.Save(logOf(t, n).Snapshot()); err != nil {
			t.Fatal(err)
		}
	}
	strangers := []string{"00000000000000000000.log", "00000000000000000012.snapshot", "12.idps", "0000000000000000012x.idps",
		"99999999999999999999.idps", "+0000000000000000012.idps", "00000000000000000012.idps.bak"}
	for _, name := range append(strangers, "00000000000000000013.idps.tmp") {
		if err := os.WriteFile(filepath.Join(path, name), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
	dir, err = OpenSnapshotDir(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if diff := cmp.Diff([]int64{12, 2}, endOffsets(t, dir)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if end := loaded(t, dir, 100); end != 12 {
		t.Errorf("loaded %d", end)
	}
	if err := dir.DropAfter(-1); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	want := append(strangers, lockName)
	slices.Sort(want)
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}

// TestOpenFaults: a directory that cannot be opened is reported, and not left locked.
func TestOpenFaults(t *testing.T) {
	d := newDisk()
	openDisk(t, d, 1).Close()
	steps := d.steps
	for at := range steps {
		d := newDisk()
		d.faults[at] = fails
		if _, err := openSnapshotDir(d, "snapshots", 1); !errors.Is(err, errNoSpace) || d.locked {
			t.Errorf("step %d, %s: %v, locked %t", at, steps[at], err, d.locked)
		}
	}
}

// TestDropAfter: the snapshots past a truncation are removed durably, and faults are
// reported.
func TestDropAfter(t *testing.T) {
	d := newDisk()
	dir := openDisk(t, d, 10)
	for n := 1; n <= 5; n++ {
		if err := dir.Save(logOf(t, n).Snapshot()); err != nil {
			t.Fatal(err)
		}
	}
	if err := dir.DropAfter(3); err != nil {
		t.Fatal(err)
	}
	crashed := openDisk(t, d.afterCrash(false, func(b []byte) []byte { return b }), 10)
	for _, dir := range []*SnapshotDir{dir, crashed} {
		if diff := cmp.Diff([]int64{3, 2, 1}, endOffsets(t, dir)); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
	for _, at := range []int{0, 2, 3, 4} { // list, open 1 for its log end offset, remove 3, remove 2, syncDir
		again := d.afterCrash(true, nil)
		dir := openDisk(t, again, 10)
		again.steps, again.faults = nil, map[int]fault{at: fails}
		if err := dir.DropAfter(1); !errors.Is(err, errNoSpace) {
			t.Errorf("step %d of %v: %v", at, again.steps, err)
		}
	}
}

// TestSnapshotsSavedInAnyOrder: in whatever order snapshots of one log are saved,
// also with equal end offsets, Load and a replay give the state of the whole log. If
// they are saved in the order they were taken, Load loads the newest.
func TestSnapshotsSavedInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newSlowLog(t)
		p.run()
		inOrder := p.pick(4) == 0
		snapshots := slices.Clone(p.snapshots)
		if !inOrder {
			snapshots = rapid.Permutation(snapshots).Draw(t, "order")
		}
		dir, err := openSnapshotDir(newDisk(), "snapshots", 1+p.pick(3))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range snapshots {
			if err := dir.Save(s); err != nil {
				t.Fatal(err)
			}
		}
		m := New(Config{})
		res, err := dir.Load(m, 0, p.end)
		if err != nil || !res.Found {
			t.Fatalf("%+v, %v", res, err)
		}
		if newest := p.snapshots[len(p.snapshots)-1]; inOrder && res.EndOffset != newest.EndOffset() {
			t.Fatalf("loaded %d, want %d", res.EndOffset, newest.EndOffset())
		}
		want, got := withoutActivity(stateOf(p.rebuilt(New(Config{})))), withoutActivity(stateOf(p.rebuilt(m)))
		if !cmp.Equal(want, got) {
			t.Fatalf("log %+v, loaded at %d (-log +snapshot and log):\n%s", p.log, res.EndOffset, cmp.Diff(want, got))
		}
	})
}

// TestStaleSnapshot: a snapshot from before a truncation is not saved after it: it
// would count as one of what is appended since.
func TestStaleSnapshot(t *testing.T) {
	dir := openDisk(t, newDisk(), 2)
	for name, cut := range map[string]func(*ProducerStateManager){
		"truncate":      func(m *ProducerStateManager) { m.Truncate(3) },
		"truncate to 0": func(m *ProducerStateManager) { m.Truncate(0) },
		"reset":         func(m *ProducerStateManager) { m.Reset() },
	} {
		m := logOf(t, 5)
		s := m.Snapshot()
		cut(m)
		if err := dir.Save(s); !errors.Is(err, ErrStaleSnapshot) {
			t.Errorf("%s: %v", name, err)
		}
	}
	m := logOf(t, 5)
	s := m.Snapshot()
	m.Truncate(5) // cuts nothing
	if err := dir.Save(s); err != nil {
		t.Errorf("nothing was cut: %v", err)
	}
}

// slowDisk is a disk whose syncs last until the test ends them.
type slowDisk struct {
	*disk
	syncing chan struct{} // closed when a sync has begun
	goOn    chan struct{} // closed to let it end
}

type slowFile struct {
	syncWriteCloser
	on *slowDisk
}

func (d *slowDisk) create(name string) (syncWriteCloser, error) {
	f, err := d.disk.create(name)
	return slowFile{f, d}, err
}

func (f slowFile) Sync() error {
	close(f.on.syncing)
	<-f.on.goOn
	return f.syncWriteCloser.Sync()
}

// TestSnapshotOfShorterLog: a snapshot taken with a batch in flight is only good for
// a log that still reaches its log end offset. For a shorter log it is not loaded,
// and is removed.
func TestSnapshotOfShorterLog(t *testing.T) {
	m := New(Config{})
	var log []Batch // of one record each
	commit := func(seq int32, base int64) {
		b := Batch{ProducerID: 32, BaseSequence: seq, Count: 1}
		if err := m.CommitBatch(b, base); err != nil {
			t.Fatal(err)
		}
		log = append(log, b)
	}
	commit(0, 0)
	commit(1, 1)
	if r, _, err := m.Reserve(Batch{ProducerID: 31, Count: 1}); r == nil || err != nil {
		t.Fatal(err)
	}
	log = append(log, Batch{ProducerID: 31, Count: 1}) // at 2, and never committed
	for seq := int32(2); seq < 8; seq++ {
		commit(seq, int64(seq)+1)
	}
	s := m.Snapshot()
	if s.EndOffset() != 2 || s.LogEndOffset() != 9 {
		t.Fatalf("end offset %d, log end offset %d", s.EndOffset(), s.LogEndOffset())
	}
	for _, tt := range []struct {
		logEnd int64
		found  bool
	}{{9, true}, {8, false}, {2, false}, {9, false}} { // the last time, it is gone
		dir := openDisk(t, newDisk(), 2)
		if err := dir.Save(s); err != nil {
			t.Fatal(err)
		}
		if tt.logEnd == 9 && !tt.found {
			if err := dir.DropAfter(8); err != nil {
				t.Fatal(err)
			}
		}
		n := New(Config{})
		res, err := dir.Load(n, 0, tt.logEnd)
		if err != nil || res.Found != tt.found || len(res.Skipped) > 0 {
			t.Errorf("a log that ends at %d: %+v, %v", tt.logEnd, res, err)
		}
		if left := len(endOffsets(t, dir)); left > 0 != tt.found {
			t.Errorf("a log that ends at %d: %d snapshots are left", tt.logEnd, left)
		}
		for base := res.EndOffset; base < tt.logEnd; base++ {
			if err := n.Replay(log[base], base); err != nil {
				t.Fatal(err)
			}
		}
		newest := log[tt.logEnd-1]
		if res, err := n.CheckBatch(newest); err != nil || res != (Result{Duplicate, tt.logEnd - 1}) {
			t.Errorf("a retry of the newest batch of a log that ends at %d: %+v, %v", tt.logEnd, res, err)
		}
	}
}

// Other files in the directory are left alone, also such as end like those of a
// Save that was cut off.
func TestLoadLeavesOtherFilesAlone(t *testing.T) {
	path := t.TempDir()
	others := filepath.Join(path, "backup"+temporarySuffix)
	own := filepath.Join(path, "00000000000000000100"+temporarySuffix)
	settled(t, os.WriteFile(others, nil, 0o644), os.WriteFile(own, nil, 0o644))
	dir, err := OpenSnapshotDir(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if _, err := dir.Load(New(Config{}), 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(others); err != nil {
		t.Errorf("a file that no Save has made: %v", err)
	}
	if _, err := os.Stat(own); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that a Save has left: %v, want it removed", err)
	}
}
