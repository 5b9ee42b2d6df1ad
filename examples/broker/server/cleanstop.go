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
	"strings"

	"github.com/idempotence-go/idempotence/examples/broker/durable"
)

const cleanStopName = "clean-stop"

// readCleanStop returns the names of the partitions whose logs were closed in
// good order, and have not been opened since.
func readCleanStop(dir string) map[string]bool {
	text, _ := os.ReadFile(filepath.Join(dir, cleanStopName)) // without it none was
	names := make(map[string]bool)
	for name := range strings.Lines(string(text)) {
		names[strings.TrimSpace(name)] = true
	}
	return names
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
