package main

// This file prints what is remembered of producers, from files alone: nothing is
// changed, and a broker may be running over them.

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
)

// The names of the files that are known, beside a log's segments.
const (
	logSuffix           = ".log"
	snapshotSuffix      = ".idps"
	kafkaSnapshotSuffix = ".snapshot"
)

// inspect prints a table for each of the paths, or several for one with several
// partitions.
func inspect(out io.Writer, paths []string) error {
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		show := inspectFile
		if info.IsDir() {
			show = inspectDir
		}
		if err := show(out, path); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// inspectDir shows one partition, or all that are in a data directory.
func inspectDir(out io.Writer, dir string) error {
	if len(filesIn(dir, logSuffix)) > 0 {
		return inspectPartition(out, dir)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	found := false
	for _, e := range entries {
		partition := filepath.Join(dir, e.Name())
		if len(filesIn(partition, logSuffix)) == 0 {
			continue
		}
		found = true
		if err := inspectPartition(out, partition); err != nil {
			return err
		}
	}
	if !found {
		return errors.New("no log in it")
	}
	return nil
}

// filesIn returns the files of a directory whose names end so, sorted; there
// are none in what is no directory. Its own name may hold what would be special
// in a pattern.
func filesIn(dir, suffix string) (paths []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), suffix) {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths
}

// inspectPartition shows what a broker would recover.
func inspectPartition(out io.Writer, dir string) error {
	log, err := segment.Open(dir, segment.Options{ReadOnly: true})
	if err != nil {
		return err
	}
	defer log.Close()
	producers, from := newestSnapshot(dir, log.End())
	if err := log.Replay(from, producers.ReplayLog); err != nil {
		return err
	}
	source := fmt.Sprintf("log from offset %d", from)
	if from > 0 {
		source = fmt.Sprintf("snapshot at offset %d, then the log", from)
	}
	return printProducers(out, dir, source, producers)
}

// newestSnapshot returns the state of the newest snapshot that is good and not
// past the end of the log, and the offset from which the log goes on.
func newestSnapshot(dir string, logEnd int64) (*idempotence.ProducerStateManager, int64) {
	for _, name := range slices.Backward(filesIn(dir, snapshotSuffix)) {
		producers := idempotence.New(idempotence.Config{})
		p, err := os.ReadFile(name)
		if err == nil && producers.Restore(bytes.NewReader(p)) == nil && producers.EndOffset() <= logEnd {
			return producers, producers.EndOffset()
		}
	}
	return idempotence.New(idempotence.Config{}), 0
}

// inspectFile shows a snapshot or a segment.
func inspectFile(out io.Writer, name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	producers := idempotence.New(idempotence.Config{})
	source := "snapshot"
	switch filepath.Ext(name) {
	case snapshotSuffix:
		err = producers.Restore(f)
	case kafkaSnapshotSuffix:
		source = "Kafka snapshot"
		err = producers.RestoreKafka(f, endOffsetOf(name))
	case logSuffix:
		source, err = inspectSegment(producers, f)
	default:
		err = fmt.Errorf("not a %s, %s or %s", logSuffix, snapshotSuffix, kafkaSnapshotSuffix)
	}
	if err != nil {
		return err
	}
	return printProducers(out, name, source, producers)
}

// inspectSegment reads one segment on its own. A torn tail is what the newest
// one of a running broker may have at any time.
func inspectSegment(producers *idempotence.ProducerStateManager, f io.Reader) (source string, err error) {
	found, err := producers.ReplayLog(f)
	source = fmt.Sprintf("segment of %d batches and %d markers", found.Batches, found.Markers)
	if errors.Is(err, idempotence.ErrTornTail) {
		return fmt.Sprintf("%s, torn after byte %d", source, found.Bytes), nil
	}
	return source, err
}

// endOffsetOf returns the offset that Kafka has named a snapshot by. One that
// bears another name may be of a log of any length.
func endOffsetOf(name string) int64 {
	offset, err := strconv.ParseInt(strings.TrimSuffix(filepath.Base(name), kafkaSnapshotSuffix), 10, 64)
	if err != nil {
		return math.MaxInt64
	}
	return offset
}

func printProducers(out io.Writer, name, source string, producers *idempotence.ProducerStateManager) error {
	end := "unknown"
	if offset := producers.EndOffset(); offset != math.MaxInt64 {
		end = fmt.Sprint(offset)
	}
	fmt.Fprintf(out, "%s: %s; end offset %s, %d producers\n", name, source, end, producers.Len())
	if producers.Len() == 0 {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  producer\tepoch\tlast activity\ttransaction\twindow: sequences@offset, oldest first")
	for p := range producers.Producers() {
		fmt.Fprintf(w, "  %d\t%d\t%s\t%s\t%s\n", p.ProducerID, p.Epoch, activityOf(p), transactionOf(p), windowOf(p))
	}
	return w.Flush()
}

// activityOf is when the producer was last seen to be active. After a replay
// nobody has looked yet.
func activityOf(p idempotence.ProducerState) string {
	if p.LastActivity.IsZero() {
		return "-"
	}
	return p.LastActivity.UTC().Format(time.RFC3339)
}

func transactionOf(p idempotence.ProducerState) string {
	if !p.InTransaction {
		return "-"
	}
	return fmt.Sprintf("from %d", p.TransactionOffset)
}

func windowOf(p idempotence.ProducerState) string {
	if len(p.Window) == 0 {
		return "-"
	}
	batches := make([]string, len(p.Window))
	for i, b := range p.Window {
		batches[i] = fmt.Sprintf("%d-%d@%d", b.FirstSequence, b.LastSequence, b.BaseOffset)
	}
	return strings.Join(batches, " ")
}
