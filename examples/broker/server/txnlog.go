package server

// This file is transactions.log: the records of the coordinator on disk.

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/idempotence-go/idempotence/examples/broker/durable"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// A txnLog is a [txn.Log] in a file. Records that arrive while one waits for the
// disk make up the next group, which shares one write and one sync.
type txnLog struct {
	file   segment.File
	noSync bool

	mu      sync.Mutex
	size    int64     // without the group that is being written
	next    *txnGroup // not being written yet, or nil
	writing bool
	uncut   bool  // a failed group was cut off, but the cut was not synced
	broken  error // why no more records are taken
	writers sync.WaitGroup
}

// A txnGroup is records that share a sync.
type txnGroup struct {
	records []byte
	written chan struct{} // closed when err is set
	err     error
}

// openTxnLog opens the log at path, and returns what it holds. A torn tail is cut
// off, and a log that is mostly history is replaced by a shorter one. A log
// without any record is lost unless it is new.
func openTxnLog(path string, cfg Config) (*txnLog, *txn.Recovery, error) {
	open := func() (segment.File, error) { return cfg.OpenTxnLog(path, os.O_RDWR|os.O_CREATE, 0o644) }
	f, err := open()
	if err != nil {
		return nil, nil, err
	}
	fail := func(err error) (*txnLog, *txn.Recovery, error) {
		return nil, nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	info, err := f.Stat()
	if err != nil {
		return fail(err)
	}
	text, err := io.ReadAll(io.NewSectionReader(f, 0, info.Size()))
	if err != nil {
		return fail(err)
	}
	found, err := txn.Recover(text)
	if err != nil {
		return fail(err)
	}
	l := &txnLog{file: f, noSync: cfg.NoSync, size: found.Size}
	if shorter := found.Rewritten(); shorter != nil {
		if err := durable.WriteFile(path, shorter); err != nil {
			return fail(err)
		}
		old := f
		if f, err = open(); err != nil {
			return nil, nil, errors.Join(err, old.Close())
		}
		old.Close()
		l.file, l.size = f, int64(len(shorter))
	} else if err := errors.Join(f.Truncate(found.Size), f.Sync(), durable.SyncDir(filepath.Dir(path))); err != nil {
		return fail(err)
	}
	return l, found, nil
}

// Append hands a record over to the writer. It never blocks.
func (l *txnLog) Append(record []byte) (wait func() error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.next == nil {
		l.next = &txnGroup{written: make(chan struct{})}
	}
	g := l.next
	g.records = append(g.records, record...)
	if !l.writing {
		l.writing = true
		l.writers.Go(l.write)
	}
	return func() error {
		<-g.written
		return g.err
	}
}

// write writes groups until there are no more records.
func (l *txnLog) write() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.next != nil {
		g := l.next
		l.next = nil
		l.mu.Unlock()
		g.err = l.writeGroup(g.records)
		l.mu.Lock()
		close(g.written)
	}
	l.writing = false
}

// writeGroup writes a group, of which nothing is left after an error. If that
// cannot be made sure, the log takes no more. Only the writer calls it.
func (l *txnLog) writeGroup(records []byte) error {
	if l.broken != nil {
		return l.broken
	}
	if l.uncut {
		if err := l.file.Sync(); err != nil {
			return err
		}
		l.uncut = false
	}
	_, err := l.file.WriteAt(records, l.size)
	if err == nil && !l.noSync {
		err = l.file.Sync()
	}
	if err == nil {
		l.size += int64(len(records))
		return nil
	}
	// A failed sync may have written anything too. A restart must not find it.
	if cut := l.file.Truncate(l.size); cut != nil {
		l.broken = fmt.Errorf("transactions.log closed to records: %w", cut)
	} else {
		l.uncut = l.file.Sync() != nil
	}
	return err
}

// close closes the file when nothing is being written.
func (l *txnLog) close() error {
	l.writers.Wait()
	return l.file.Close()
}
