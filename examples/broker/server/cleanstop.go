package server

// This file remembers which logs were closed in good order. A log that was not
// may have lost the end of what was not synced, and the end is cut off if it is
// damaged: see [segment.Options]. For any other log that would be wrong.
//
// The data directory has a file with the names of the partitions that were
// closed so, one a line. It is written when the broker stops, and again before
// anything is appended after the next start. Then it has only the partitions
// that stay offline, whose logs are not touched.

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/idempotence-go/idempotence/examples/broker/durable"
)

const cleanStopName = "clean-stop"

// wasClosedCleanly reports whether the log in a partition's directory was closed
// in good order, and has not been opened since.
func wasClosedCleanly(dir string) bool {
	text, _ := os.ReadFile(filepath.Join(filepath.Dir(dir), cleanStopName))
	return slices.Contains(strings.Split(string(text), "\n"), filepath.Base(dir))
}

// writeCleanStop writes the names of those partitions whose logs are closed in
// good order now.
func writeCleanStop(dir string, partitions []*partition) error {
	var text strings.Builder
	for _, p := range partitions {
		if p.clean {
			text.WriteString(filepath.Base(p.dir) + "\n")
		}
	}
	path := filepath.Join(dir, cleanStopName)
	if text.Len() == 0 {
		return durable.Remove(path)
	}
	return durable.WriteFile(path, []byte(text.String()))
}
