package durable

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// record returns a list that grows with each directory that is synced.
func record(t *testing.T) *[]string {
	var synced []string
	was := syncDir
	syncDir = func(dir string) error {
		synced = append(synced, dir)
		return was(dir)
	}
	t.Cleanup(func() { syncDir = was })
	return &synced
}

// The parent of each new directory is synced, after the directory is there.
func TestB9_MkdirAllSyncsEveryParent(t *testing.T) {
	root := t.TempDir()
	synced := record(t)
	path := filepath.Join(root, "a", "b", "c")
	for range 2 { // the second time there is nothing to do
		if err := MkdirAll(path); err != nil {
			t.Fatal(err)
		}
		want := []string{root, filepath.Join(root, "a"), filepath.Join(root, "a", "b")}
		if !slices.Equal(*synced, want) {
			t.Errorf("synced %q, want %q", *synced, want)
		}
	}
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		t.Errorf("%s: %v, %v", path, info, err)
	}

	// Relative, with a trailing separator, and in the way of a file.
	t.Chdir(root)
	if err := MkdirAll("d" + string(filepath.Separator)); err != nil {
		t.Error(err)
	}
	if got := *synced; got[len(got)-1] != "." {
		t.Errorf("synced %q, want the working directory last", got)
	}
	if err := os.WriteFile("file", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"file", filepath.Join("file", "x")} {
		if err := MkdirAll(path); err == nil {
			t.Errorf("MkdirAll(%q) made a directory over a file", path)
		}
	}
}

// After every change of a name the directory that holds it is synced.
func TestFilesAreDurable(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "ids")
	synced := record(t)
	for i, step := range []struct {
		do   func() error
		want int // directories synced until then
	}{
		{func() error { return WriteFile(name, []byte("1")) }, 1},
		{func() error { return WriteFile(name, []byte("2")) }, 2},
		{func() error { return Remove(name) }, 3},
		{func() error { return Remove(name) }, 3}, // nothing to remove
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		if got := len(*synced); got != step.want {
			t.Errorf("step %d: %d directories synced, want %d", i, got, step.want)
		}
	}
}

// A lock is there once, until its file is closed.
func TestLock(t *testing.T) {
	name := filepath.Join(t.TempDir(), "lock")
	first, err := Lock(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(name); !errors.Is(err, ErrInUse) {
		t.Errorf("the second lock: %v, want ErrInUse", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Lock(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
}
