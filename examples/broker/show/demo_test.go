package show

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// What the demo claims must hold, and the runs without deduplication and without
// transactions must show what they are good for.
func TestDemo(t *testing.T) {
	var out bytes.Buffer
	if err := run(context.Background(), &out, nil, nil, 200); err != nil {
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
	for row, want := range map[string]string{
		"transactions committed":             "180 180",
		"given up halfway":                   "20 20",
		"begun again by another application": "10 10",
		"transactions whole":                 "180 170",
		"transactions in part":               "0 20",
		"transactions lost":                  "0 0",
		"transactions doubled":               "0 10",
		"aborted records seen":               "0 500",
	} {
		if got := strings.Join(table[row], " "); got != want {
			t.Errorf("%s: %q, want %q", row, got, want)
		}
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
	if err := Run(ctx, new(bytes.Buffer), nil, nil); err == nil {
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

func TestTxnOutcomeJudge(t *testing.T) {
	outcome := func() txnOutcome {
		return txnOutcome{
			committed: 900, aborted: 100, again: 50, recognised: 1,
			cuts:      map[kmsg.Key]int{kmsg.Produce: 1, kmsg.AddPartitionsToTxn: 1, kmsg.EndTxn: 1},
			txnCounts: txnCounts{Whole: 900},
		}
	}
	if err := outcome().judge(1000); err != nil {
		t.Errorf("good run: %v", err)
	}
	for name, spoil := range map[string]func(*txnOutcome){
		"not all came to an end": func(o *txnOutcome) { o.aborted-- },
		"in part":                func(o *txnOutcome) { o.InPart++ },
		"lost":                   func(o *txnOutcome) { o.Lost++ },
		"doubled":                func(o *txnOutcome) { o.Doubled++ },
		"aborted records":        func(o *txnOutcome) { o.AbortedRecords++ },
		"none begun again":       func(o *txnOutcome) { o.again = 0 },
		"no append cut off":      func(o *txnOutcome) { delete(o.cuts, kmsg.Produce) },
		"no EndTxn cut off":      func(o *txnOutcome) { delete(o.cuts, kmsg.EndTxn) },
		"nothing a duplicate":    func(o *txnOutcome) { o.recognised = 0 },
	} {
		o := outcome()
		spoil(&o)
		if o.judge(1000) == nil {
			t.Errorf("%s: judged to be as it should", name)
		}
	}
}

func TestCountTransactions(t *testing.T) {
	committed := map[string]bool{"a": true, "b": true, "c": true, "d": true}
	log := [][]string{
		{"a 1", "b 1", "a 2", "x 1", "c 2"},
		{"a 3", "b 2", "b 2", "b 3", "x 3"},
	}
	want := txnCounts{Whole: 1, InPart: 2, Lost: 1, Doubled: 1, AbortedRecords: 2} // x and c in part
	if got := countTransactions(log, 3, committed); got != want {
		t.Errorf("counted %+v, want %+v", got, want)
	}
}
