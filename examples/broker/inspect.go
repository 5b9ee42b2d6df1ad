package main

// This file prints what is remembered of producers and transactions, from files
// alone. It changes nothing, and a broker may be running over them.

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/segment"
	"github.com/idempotence-go/idempotence/examples/broker/server"
	"github.com/idempotence-go/idempotence/examples/broker/txn"
)

// The files that can be inspected.
const (
	logSuffix           = ".log"
	snapshotSuffix      = ".idps"
	kafkaSnapshotSuffix = ".snapshot"
)

// inspect prints what is remembered at each of the paths. The error joins those of
// the paths that could not be read; the others are printed.
func inspect(out io.Writer, paths []string) error {
	var errs []error
	for _, path := range paths {
		info, err := os.Stat(path)
		switch {
		case err != nil:
		case info.IsDir():
			err = inspectDir(out, path)
		case filepath.Base(path) == server.TxnLogName:
			err = inspectTransactions(out, path)
		default:
			err = inspectFile(out, path)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// inspectDir prints the partition in a directory, or what is in a data directory:
// the transactions and all partitions.
func inspectDir(out io.Writer, dir string) error {
	transactions := filepath.Join(dir, server.TxnLogName)
	_, err := os.Stat(transactions)
	if err != nil && segment.Exists(dir) {
		return inspectPartition(out, dir)
	}
	found := err == nil
	var errs []error
	if found {
		if err := inspectTransactions(out, transactions); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", transactions, err))
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if partition := filepath.Join(dir, e.Name()); segment.Exists(partition) {
			found = true
			errs = append(errs, inspectPartition(out, partition))
		}
	}
	if !found {
		return errors.New("no log in it")
	}
	return errors.Join(errs...)
}

// inspectTransactions prints what a broker would recover of its transactional ids.
func inspectTransactions(out io.Writer, name string) error {
	log, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	found, err := txn.Recover(log)
	if err != nil {
		return err
	}
	all := found.List()
	fmt.Fprintf(out, "%s: coordinator epoch %d, %d transactional ids\n", name, found.Epoch(), len(all))
	if len(all) > 0 {
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(w, "  transactional id\tproducer\tepoch\tstate\tsince\tpartitions\tgroups")
		for _, t := range all {
			since := t.LastUpdate
			if !t.Start.IsZero() {
				since = t.Start
			}
			partitions := make([]string, len(t.Partitions))
			for i, p := range t.Partitions {
				partitions[i] = fmt.Sprintf("%s-%d", p.Topic, p.Partition)
			}
			fmt.Fprintf(w, "  %q\t%d\t%d\t%s\t%s\t%s\t%s\n", t.TransactionalID, t.Producer.ID, t.Producer.Epoch, t.State,
				since.UTC().Format(time.RFC3339), cmp.Or(strings.Join(partitions, " "), none), groupsOf(t))
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if found.Tail != nil {
		fmt.Fprintf(out, "  to be cut off: %v\n", found.Tail)
	}
	return nil
}

func groupsOf(t txn.Transaction) string {
	if len(t.Groups) == 0 {
		return none
	}
	return fmt.Sprintf("%q", t.Groups)
}

// inspectPartition prints what a broker would recover.
func inspectPartition(out io.Writer, dir string) error {
	found, err := server.Inspect(dir)
	if err != nil {
		return fmt.Errorf("%s: offline: %w", dir, err)
	}
	source := "log"
	if found.Snapshot > 0 {
		source = fmt.Sprintf("snapshot at offset %d, then the log", found.Snapshot)
	}
	err = printProducers(out, dir, source, found.Producers)
	for _, reason := range found.NotLoaded {
		fmt.Fprintf(out, "  snapshot not loaded: %v\n", reason)
	}
	if found.Cut != nil {
		fmt.Fprintf(out, "  to be cut off: %v\n", found.Cut)
	}
	return err
}

// inspectFile prints a snapshot or a segment.
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

// inspectSegment reads one segment. The newest one of a running broker may have
// a torn tail at any time.
func inspectSegment(producers *idempotence.ProducerStateManager, f io.Reader) (source string, err error) {
	found, err := producers.ReplayLog(f)
	source = fmt.Sprintf("segment of %d batches and %d markers", found.Batches, found.Markers)
	if errors.Is(err, idempotence.ErrTornTail) {
		return fmt.Sprintf("%s, torn after byte %d", source, found.Bytes), nil
	}
	return source, err
}

// endOffsetOf returns the offset that Kafka has named a snapshot by. A snapshot
// with another name may be of a log of any length.
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
	fmt.Fprintln(w, "  producer\tepoch\tlast activity\ttransaction\tcoordinator epoch\twindow: sequences@offset, oldest first")
	for p := range producers.Producers() {
		fmt.Fprintf(w, "  %d\t%d\t%s\t%s\t%s\t%s\n",
			p.ProducerID, p.Epoch, activityOf(p), transactionOf(p), coordinatorOf(p), windowOf(p))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return printTransactions(out, producers)
}

// printTransactions prints what readers of committed records are kept from, if
// anything: what lies at or past the last stable offset, and what was aborted. All
// of a log counts as replicated.
func printTransactions(out io.Writer, producers *idempotence.ProducerStateManager) error {
	s, end := producers.Stats(), producers.EndOffset()
	if s.OpenTransactions == 0 && s.AbortedRanges == 0 {
		return nil
	}
	fmt.Fprintf(out, "  last stable offset %d, %d open transactions, %d aborted\n",
		producers.LastStableOffset(end), s.OpenTransactions, s.AbortedRanges)
	if s.AbortedRanges == 0 {
		return nil
	}
	aborted, err := producers.AbortedTransactions(0, end)
	if err != nil { // a snapshot of a log of which the start was deleted
		fmt.Fprintf(out, "  aborted transactions not shown: %v\n", err)
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  aborted producer\tfirst offset\tmarker")
	for _, a := range aborted {
		fmt.Fprintf(w, "  %d\t%d\t%d\n", a.ProducerID, a.FirstOffset, a.LastOffset)
	}
	return w.Flush()
}

// none is printed for a value that a producer does not have.
const none = "-"

// activityOf is none after a replay: when that was, the log does not tell.
func activityOf(p idempotence.ProducerState) string {
	if p.LastActivity.IsZero() {
		return none
	}
	return p.LastActivity.UTC().Format(time.RFC3339)
}

func transactionOf(p idempotence.ProducerState) string {
	if p.CurrentTxnFirstOffset < 0 {
		return none
	}
	return fmt.Sprintf("from %d", p.CurrentTxnFirstOffset)
}

func coordinatorOf(p idempotence.ProducerState) string {
	if p.CoordinatorEpoch < 0 {
		return none
	}
	return fmt.Sprint(p.CoordinatorEpoch)
}

func windowOf(p idempotence.ProducerState) string {
	if len(p.Window) == 0 {
		return none
	}
	batches := make([]string, len(p.Window))
	for i, b := range p.Window {
		batches[i] = fmt.Sprintf("%d-%d@%d", b.FirstSequence, b.LastSequence, b.BaseOffset)
	}
	return strings.Join(batches, " ")
}
