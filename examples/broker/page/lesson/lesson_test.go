package lesson

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A want is what one step must show. Numbers of -1 are not compared.
type want struct {
	step    string
	kind    Kind // empty if no batch is sent
	rule    string
	code    int16
	window  string // after it: FIRST-LAST@OFFSET, oldest first
	changes int    // how many
}

func playTable(t *testing.T, table []want) {
	t.Helper()
	var steps []string
	for i, w := range table {
		steps = append(steps, w.step)
		shown, err := Play(steps)
		if err != nil {
			t.Fatalf("step %d, %s: %v", i+1, w.step, err)
		}
		s := shown[i]
		var kind Kind
		var rule string
		var code int16
		if s.Answer != nil {
			kind, code = s.Answer.Kind, s.Answer.Code
		}
		if s.Rule != nil {
			rule = s.Rule.Number
		}
		got := want{w.step, kind, rule, code, windowText(s.State), len(s.Changed)}
		if got != w {
			t.Errorf("step %d:\n got %+v\nwant %+v\n%+v", i+1, got, w, s)
		}
	}
}

func windowText(s State) string {
	var w []string
	for _, b := range s.Window {
		w = append(w, fmt.Sprintf("%d-%d@%d", b.First, b.Last, b.Base))
	}
	return strings.Join(w, " ")
}

func TestWorkedTrace(t *testing.T) {
	table := []want{
		{"0.0.3", Append, "2", 0, "0-2@0", 3},
		{"0.3.2", Append, "6", 0, "0-2@0 3-4@3", 2},
		{"0.3.2", Duplicate, "5", 0, "0-2@0 3-4@3", 0},
		{"0.7.1", OutOfOrder, "7", 45, "0-2@0 3-4@3", 0},
		{"1.7.1", OutOfOrder, "4", 45, "0-2@0 3-4@3", 0},
		{"1.0.1", Append, "4", 0, "0-0@5", 3},
		{"0.5.1", Fenced, "3", 47, "0-0@5", 0},
	}
	playTable(t, table)
	if len(table) != len(WorkedTrace) {
		t.Errorf("the trace has %d steps, want %d", len(WorkedTrace), len(table))
	}
	for i := range table {
		if table[i].step != WorkedTrace[i] {
			t.Errorf("step %d of the trace is %s, want %s", i+1, WorkedTrace[i], table[i].step)
		}
	}
}

func TestTheOtherSteps(t *testing.T) {
	for name, table := range map[string][]want{
		"a lost answer": {
			{Cut, Append, "2", 0, "0-1@0", 3},
			{Same, Duplicate, "5", 0, "0-1@0", 0},
			{NextBatch, Append, "6", 0, "0-1@0 2-3@2", 2},
		},
		"over the wrap": {
			{NextBatch, Append, "2", 0, "0-1@0", 3},
			{Wrap, Append, "6", 0, "0-1@0 2147483641-2147483645@2147483641 2147483646-1@2147483646", 3},
			{Same, Duplicate, "5", 0, "0-1@0 2147483641-2147483645@2147483641 2147483646-1@2147483646", 0},
			{NextBatch, Append, "6", 0, "0-1@0 2147483641-2147483645@2147483641 2147483646-1@2147483646 2-3@2147483650", 2},
		},
		"a restart forgets nothing": {
			{NextBatch, Append, "2", 0, "0-1@0", 3},
			{NextBatch, Append, "6", 0, "0-1@0 2-3@2", 2},
			{Restart, "", "", 0, "0-1@0 2-3@2", 0},
			{Same, Duplicate, "5", 0, "0-1@0 2-3@2", 0},
			{NextBatch, Append, "6", 0, "0-1@0 2-3@2 4-5@4", 2},
		},
		"a restart with an append in flight": {
			{NextBatch, Append, "2", 0, "0-1@0", 3},
			{Hold, Append, "6", 0, "0-1@0", 1},
			{Restart, "", "", 0, "0-1@0", 1},
			{Same, Append, "6", 0, "0-1@0 2-3@2", 2},
		},
		"a slow append": {
			{Hold, Append, "2", 0, "", 1},
			{Same, InFlight, "in flight", 7, "", 0},
			{NextBatch, Append, "6", 0, "", 1},
			{Expire, "", "", 0, "", 0},
			{Finish, "", "", 0, "0-1@0 2-3@2", 5},
			{Same, Duplicate, "5", 0, "0-1@0 2-3@2", 0},
		},
		"forgotten": {
			{NextBatch, Append, "2", 0, "0-1@0", 3},
			{Expire, "", "", 0, "", 1},
			{NextBatch, Unknown, "2", 59, "", 0},
			{NewEpoch, Append, "2", 0, "0-0@2", 3},
			{OldEpoch, Fenced, "3", 47, "0-0@2", 0},
		},
		"the window turns": {
			{NextBatch, Append, "2", 0, "0-1@0", 3},
			{NextBatch, Append, "6", 0, "0-1@0 2-3@2", 2},
			{NextBatch, Append, "6", 0, "0-1@0 2-3@2 4-5@4", 2},
			{NextBatch, Append, "6", 0, "0-1@0 2-3@2 4-5@4 6-7@6", 2},
			{NextBatch, Append, "6", 0, "0-1@0 2-3@2 4-5@4 6-7@6 8-9@8", 2},
			{NextBatch, Append, "6", 0, "2-3@2 4-5@4 6-7@6 8-9@8 10-11@10", 3},
			{"0.0.2", OutOfOrder, "7", 45, "2-3@2 4-5@4 6-7@6 8-9@8 10-11@10", 0},
			{"0.2.2", Duplicate, "5", 0, "2-3@2 4-5@4 6-7@6 8-9@8 10-11@10", 0},
			{Gap, OutOfOrder, "7", 45, "2-3@2 4-5@4 6-7@6 8-9@8 10-11@10", 0},
		},
	} {
		t.Run(name, func(t *testing.T) { playTable(t, table) })
	}
}

func TestNoSuchStep(t *testing.T) {
	for _, steps := range [][]string{
		{"dance"}, {""}, {"0.0"}, {"0.0.0.0"}, {"-1.0.1"}, {"32768.0.1"}, {"0.2147483648.1"}, {"0.0.x"},
		{Same}, {OldEpoch}, slices.Repeat([]string{NextBatch}, MaxSteps+1),
	} {
		if shown, err := Play(steps); err == nil {
			t.Errorf("%.3q: %+v, want an error", steps, shown)
		}
	}
}

// Whatever is played: the same steps show the same, a refusal and a duplicate
// change nothing, and a restart changes no more than what is in flight.
func TestAnyLesson(t *testing.T) {
	step := rapid.OneOf(
		rapid.SampledFrom([]string{NextBatch, Same, Gap, NewEpoch, OldEpoch, Wrap, Cut, Hold, Finish, Restart, Expire}),
		rapid.Custom(func(t *rapid.T) string {
			return fmt.Sprintf("%d.%d.%d", rapid.Int16Min(0).Draw(t, "epoch"), rapid.Int32Min(0).Draw(t, "sequence"), rapid.Int16Min(0).Draw(t, "count"))
		}),
	)
	rapid.Check(t, func(t *rapid.T) {
		var steps []string
		shown := []Shown{}
		for _, s := range rapid.SliceOfN(step, 1, 40).Draw(t, "steps") {
			longer, err := Play(append(slices.Clip(steps), s))
			if err != nil {
				if s != Same && s != OldEpoch {
					t.Fatalf("%s after %v: %v", s, steps, err)
				}
				continue
			}
			if !reflect.DeepEqual(longer[:len(shown)], shown) {
				t.Fatalf("the steps before %s have shown something else", s)
			}
			steps, shown = append(steps, s), longer
		}
		before := State{Window: []BatchSlot{}}
		for i, s := range shown {
			refused := s.Answer != nil && s.Answer.Kind != Append && s.Step != Wrap
			if changed := !reflect.DeepEqual(before, s.State); refused && (changed || len(s.Changed) > 0) {
				t.Fatalf("step %d, %s: %+v changed\n%+v\ninto\n%+v", i, s.Step, s.Answer, before, s.State)
			}
			if s.Step == Restart {
				before.InFlight, s.State.InFlight = 0, 0
				if !reflect.DeepEqual(before.Window, s.State.Window) || before.End != s.State.End {
					t.Fatalf("step %d, %s: %+v became %+v", i, s.Step, before, s.State)
				}
			}
			before = s.State
		}
	})
}
