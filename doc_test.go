package idempotence

import (
	"os"
	"regexp"
	"strings"
	"testing"
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

// TestFault_Duties: what an embedder must know and nothing catches is in the package
// comment or in the comment of the call that it is about.
func TestFault_Duties(t *testing.T) {
	for _, tt := range []struct{ fault, file, says string }{
		{"F2", "replay.go", `in flight is abandoned: .* use CheckMarker and CommitMarker, or ReserveMarker`},
		{"F6", "expire.go", `clock that jumps ahead cannot be told from idleness`},
		{"F9", "doc.go", `AdvanceStart\(500\)`},
		{"F9", "snapshotdir.go", `replayed much of the log it calls Save at once`},
		{"F11", "rules.go", `zero ProducerID is the id of a producer`},
		{"F13", "doc.go", `lazy, make sure that something flushes it`},
		{"F13", "reserve.go", `lazy, make sure that something flushes it`},
		{"F14", "doc.go", `LogEndOffset is not past the log's end`},
		{"F15", "reserve.go", `Their producers count as active`},
		{"F15", "reserve.go", `first of its epoch|before any other of its epoch|its epoch: a policy that would accept another first sequence`},
		{"F18", "doc.go", `Expire\] under the append lock`},
		{"F18", "expire.go", `hold the append lock: a producer must not be forgotten between the two`},
	} {
		if !regexp.MustCompile(tt.says).MatchString(prose(read(t, tt.file))) {
			t.Errorf("%s: %s does not say: %s", tt.fault, tt.file, tt.says)
		}
	}
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
