package show

import (
	"bytes"
	"context"
	"strings"
	"testing"
)

// What the demo claims must hold, and the run without deduplication must show what
// it is good for.
func TestDemo(t *testing.T) {
	var out bytes.Buffer
	if err := Run(context.Background(), &out, nil); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	table := make(map[string][]string)
	for line := range strings.Lines(out.String()) {
		if f := strings.Fields(line); len(f) > 2 {
			table[strings.Join(f[:len(f)-2], " ")] = f[len(f)-2:]
		}
	}
	for row, want := range map[string]string{
		"records sent":         "50,000 50,000",
		"records acknowledged": "50,000 50,000",
		"records missing":      "0 0",
	} {
		if got := strings.Join(table[row], " "); got != want {
			t.Errorf("%s: %q, want %q", row, got, want)
		}
	}
	duplicated := table["records duplicated"]
	if len(duplicated) != 2 || duplicated[0] != "0" || duplicated[1] == "0" {
		t.Errorf("records duplicated: %q, want none with deduplication and some without", duplicated)
	}
	// How much faster pipelining is depends on the machine and on what else it
	// does at the moment, so only the demo shows it.
	if rates := table["records acknowledged a second"]; len(rates) != 2 || rates[0] == "0" || rates[1] == "0" {
		t.Errorf("records acknowledged a second: %q, want two rates", rates)
	}
	if t.Failed() {
		t.Log(out.String())
	}
}

// A demo that cannot go as it should says so, and does not hang.
func TestDemoInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Run(ctx, new(bytes.Buffer), nil); err == nil {
		t.Error("a demo that was interrupted at once reports success")
	}
}

func TestOutcomeJudge(t *testing.T) {
	good := outcome{sent: 10, acknowledged: 10, cuts: 1, retried: 2, recognised: 2}
	if err := good.judge(); err != nil {
		t.Errorf("good run: %v", err)
	}
	for name, spoil := range map[string]func(*outcome){
		"not acknowledged":    func(o *outcome) { o.acknowledged-- },
		"missing":             func(o *outcome) { o.Missing++ },
		"duplicated":          func(o *outcome) { o.Duplicated++ },
		"out of order":        func(o *outcome) { o.OutOfOrder++ },
		"misplaced":           func(o *outcome) { o.Misplaced++ },
		"nothing retried":     func(o *outcome) { o.retried = 0 },
		"nothing a duplicate": func(o *outcome) { o.recognised = 0 },
	} {
		o := good
		spoil(&o)
		if o.judge() == nil {
			t.Errorf("%s: judged to be as it should", name)
		}
	}
}
