package idempotence

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

// This file checks what the package comment must say: the samples, and the duties that
// no test of the code can show.

// TestF12_SamplesAnswerErrorsWithMinusOne: a handler that returns an offset beside
// an error returns -1, which is what a Kafka client expects in the answer.
func TestF12_SamplesAnswerErrorsWithMinusOne(t *testing.T) {
	text := read(t, "doc.go") + read(t, "README.md")
	for _, file := range []string{"example_test.go", "example_reserve_test.go", "example_more_test.go"} {
		text += read(t, file)
	}
	returns := regexp.MustCompile(`return (-?\w+(?:\.\w+)?), (err\b|\w*[eE]rr(?:or)?\w*|fmt\.Errorf|errors\.New)`)
	seen := 0
	for _, r := range returns.FindAllStringSubmatch(text, -1) {
		switch r[1] {
		case "-1":
			seen++
		case "0":
			t.Errorf("a sample answers an error with offset 0: %s", r[0])
		}
	}
	if seen < 3 {
		t.Errorf("only %d samples answer an error with -1", seen)
	}
}

// TestDuties: what an embedder must know, and nothing catches, is in the package comment or
// in the comment of the call that it is about. Each row names the fault that it mends.
func TestDuties(t *testing.T) {
	for _, tt := range []struct{ fault, file, says string }{
		{"F2", "replay.go", `in flight is abandoned: .* use CheckMarker and CommitMarker, or ReserveMarker`},
		{"F6", "expire.go", `clock that jumps ahead cannot be told from idleness`},
		{"F9", "doc.go", `AdvanceStart\(500\)`},
		{"F9", "snapshotdir.go", `replayed much of the log it calls Save at once`},
		{"F11", "rules.go", `zero ProducerID is the id of a producer`},
		{"F14", "doc.go", `LogEndOffset is not past the log's end`},
		{"F15", "reserve.go", `Their producers count as active`},
		{"F15", "reserve.go", `first of its epoch|before any other of its epoch|its epoch: a policy that would accept another first sequence`},
		{"F18", "doc.go", `Expire\] under the append lock`},
		{"F18", "expire.go", `hold the append lock: a producer must not be forgotten between the two`},
	} {
		t.Run(tt.fault, func(t *testing.T) { requireSays(t, tt.file, tt.says) })
	}
}

// requireSays checks that a file has a sentence that matches says.
func requireSays(t *testing.T, file, says string) {
	t.Helper()
	if !regexp.MustCompile(says).MatchString(prose(read(t, file))) {
		t.Errorf("%s does not say: %s", file, says)
	}
}

// TestF13_OnlyFlushEndsWait: a retry that waits for its first copy waits until the log
// has settled that copy, however long. So if the log flushes lazily something must flush
// it, and the documents say so.
func TestF13_OnlyFlushEndsWait(t *testing.T) {
	m := New(Config{Expiration: time.Minute})
	first := reserved(t, m, 0, 1)
	var waits *InFlightError
	if _, _, err := m.Reserve(Batch{ProducerID: 31, Count: 1}); !errors.As(err, &waits) {
		t.Fatalf("the retry gets %v, want an InFlightError", err)
	}
	m.Expire(time.Unix(0, 0))
	m.Expire(time.Unix(1_000_000, 0))
	second := reserved(t, m, 1, 1) // the log is not full yet
	settled(t, second.Commit(1))   // and reports a later batch first
	if isClosed(waits.Done()) {
		t.Error("the wait ends before the first copy is flushed")
	}
	settled(t, first.Commit(0))
	if !isClosed(waits.Done()) {
		t.Error("the wait goes on after the first copy was flushed")
	}
	for _, file := range []string{"doc.go", "reserve.go"} {
		requireSays(t, file, `lazy, make sure that something flushes it`)
	}
}

// TestF16_OtherPlatforms: what must hold before a change is taken includes the tests on 32
// bits, and that everything compiles for Windows and macOS.
func TestF16_OtherPlatforms(t *testing.T) {
	requireSays(t, ".ci/run", `GOARCH=386 go test \.`)
	requireSays(t, ".ci/run", `for os in windows darwin; do CGO_ENABLED=0 GOOS=\$os go vet "\$\{packages\[@\]\}"`)
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// prose returns a text as one line, without the marks of comments.
func prose(text string) string {
	return strings.Join(strings.Fields(strings.ReplaceAll(text, "//", " ")), " ")
}
