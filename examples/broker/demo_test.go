package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
)

// The demo is the claim made to whoever tries the library: it must hold, and
// the run without deduplication must show what it is good for.
func TestDemo(t *testing.T) {
	var out bytes.Buffer
	if err := demo(context.Background(), &out, nil); err != nil {
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
	if err := demo(ctx, new(bytes.Buffer), nil); err == nil {
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
		"missing":             func(o *outcome) { o.missing++ },
		"duplicated":          func(o *outcome) { o.duplicated++ },
		"out of order":        func(o *outcome) { o.outOfOrder++ },
		"misplaced":           func(o *outcome) { o.misplaced++ },
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

// The judge of all these tests is itself worth a test.
func TestCount(t *testing.T) {
	at := func(partition int32, offset int64) place { return place{partition, offset} }
	for name, tt := range map[string]struct {
		log          [][]string
		acknowledged map[string]place
		want         counts
	}{
		"exactly once": {
			[][]string{{"a 1", "a 3"}, {"a 2"}},
			map[string]place{"a 1": at(0, 0), "a 3": at(0, 1), "a 2": at(1, 0)},
			counts{},
		},
		"two names interleaved": {
			[][]string{{"b 1", "a 1", "b 2", "a 2"}},
			map[string]place{"a 1": at(0, 1), "a 2": at(0, 3), "b 1": at(0, 0), "b 2": at(0, 2)},
			counts{},
		},
		"missing":                {[][]string{{"a 1"}}, map[string]place{"a 1": at(0, 0), "a 2": at(0, 1)}, counts{missing: 1}},
		"duplicated":             {[][]string{{"a 1", "a 2", "a 1", "a 1"}}, map[string]place{"a 1": at(0, 3)}, counts{duplicated: 2}},
		"duplicated elsewhere":   {[][]string{{"a 1"}, {"a 1"}}, nil, counts{duplicated: 1}},
		"out of order":           {[][]string{{"a 1", "a 3", "a 2"}}, nil, counts{outOfOrder: 1}},
		"at another offset":      {[][]string{{"a 1", "a 2"}}, map[string]place{"a 2": at(0, 0)}, counts{misplaced: 1}},
		"at an offset not there": {[][]string{{"a 1"}}, map[string]place{"a 1": at(0, 7)}, counts{misplaced: 1}},
	} {
		if got := count(tt.log, tt.acknowledged); got != tt.want {
			t.Errorf("%s: counted %+v, want %+v", name, got, tt.want)
		}
	}
}
