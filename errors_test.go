package idempotence

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

// sentinels is every reason with what the package says of it: the name, the
// Kafka code, and the wider reason that it is a case of.
var sentinels = []struct {
	err   error
	code  int16
	wider error
}{
	{ErrOutOfOrderSequence, 45, nil},
	{ErrUnknownProducer, 59, ErrOutOfOrderSequence},
	{ErrFenced, 47, nil},
	{ErrInvalidBatch, 87, nil},
	{ErrDuplicateSequence, 46, ErrOutOfOrderSequence},
	{ErrOffsetOrder, 56, nil},
}

// TestKafkaErrorCode: every sentinel has its code, bare, in a BatchError and
// however deep it is wrapped by others.
func TestKafkaErrorCode(t *testing.T) {
	if got := KafkaErrorCode(nil); got != 0 {
		t.Errorf("no error is %d, want 0", got)
	}
	for _, err := range []error{io.EOF, fmt.Errorf("wrapped: %w", io.EOF), &BatchError{}, errors.Join()} {
		want := int16(-1)
		if err == nil {
			want = 0
		}
		if got := KafkaErrorCode(err); got != want {
			t.Errorf("%v is %d, want %d", err, got, want)
		}
	}
	for _, s := range sentinels {
		facts := &BatchError{Err: s.err}
		for _, err := range []error{
			s.err, facts, fmt.Errorf("partition 3: %w", facts), errors.Join(io.EOF, fmt.Errorf("a: %w", s.err)),
		} {
			if got := KafkaErrorCode(err); got != s.code {
				t.Errorf("%v is %d, want %d", err, got, s.code)
			}
		}
	}
}

// TestSentinels: each is itself and its wider reason, and no other.
func TestSentinels(t *testing.T) {
	for _, s := range sentinels {
		if !strings.HasPrefix(s.err.Error(), "idempotence: ") {
			t.Errorf("%q does not say whose error it is", s.err)
		}
		for _, other := range sentinels {
			want := s.err == other.err || s.wider == other.err
			if got := errors.Is(&BatchError{Err: s.err}, other.err); got != want {
				t.Errorf("%v is %v: %t, want %t", s.err, other.err, got, want)
			}
		}
	}
}

// TestMessages: a refusal says what was got and what was expected, and the facts
// can be reached.
func TestMessages(t *testing.T) {
	m := New(Config{})
	for seq := range int32(3) {
		if err := m.Commit(31, 4, seq, 1, int64(seq)+70); err != nil {
			t.Fatal(err)
		}
	}
	check := func(pid int64, epoch int16, seq, n int32) error {
		_, err := m.Check(pid, epoch, seq, n)
		return err
	}
	for _, tt := range []struct {
		err  error
		want string
		fact BatchError
	}{
		{check(31, 4, 9, 2), "idempotence: out of order sequence: producer 31 epoch 4 sequence 9 count 2: expected sequence 3 in epoch 4",
			BatchError{Batch: Batch{ProducerID: 31, Epoch: 4, BaseSequence: 9, Count: 2}, Expected: 3, CurrentEpoch: 4, BaseOffset: -1, FirstCopy: -1, LowestOffset: -1, NextOffset: -1, Err: ErrOutOfOrderSequence}},
		{check(31, 5, 9, 1), "idempotence: out of order sequence: producer 31 epoch 5 sequence 9 count 1: expected sequence 0 in epoch 4",
			BatchError{Batch: Batch{ProducerID: 31, Epoch: 5, BaseSequence: 9, Count: 1}, Expected: 0, CurrentEpoch: 4, BaseOffset: -1, FirstCopy: -1, LowestOffset: -1, NextOffset: -1, Err: ErrOutOfOrderSequence}},
		{check(32, 0, 9, 1), "idempotence: unknown producer: producer 32 epoch 0 sequence 9 count 1: expected sequence 0",
			BatchError{Batch: Batch{ProducerID: 32, BaseSequence: 9, Count: 1}, Expected: 0, CurrentEpoch: -1, BaseOffset: -1, FirstCopy: -1, LowestOffset: -1, NextOffset: -1, Err: ErrUnknownProducer}},
		{check(31, 3, 0, 1), "idempotence: fenced by a newer epoch: producer 31 epoch 3 sequence 0 count 1: current epoch is 4",
			BatchError{Batch: Batch{ProducerID: 31, Epoch: 3, Count: 1}, Expected: -1, CurrentEpoch: 4, BaseOffset: -1, FirstCopy: -1, LowestOffset: -1, NextOffset: -1, Err: ErrFenced}},
		{check(31, 4, -7, 1), "idempotence: malformed batch: producer 31 epoch 4 sequence -7 count 1",
			BatchError{Batch: Batch{ProducerID: 31, Epoch: 4, BaseSequence: -7, Count: 1}, Expected: -1, CurrentEpoch: -1, BaseOffset: -1, FirstCopy: -1, LowestOffset: -1, NextOffset: -1, Err: ErrInvalidBatch}},
		{m.Commit(31, 4, 1, 1, 80), "idempotence: already committed: producer 31 epoch 4 sequence 1 count 1: appended at offset 80, first copy at offset 71",
			BatchError{Batch: Batch{ProducerID: 31, Epoch: 4, BaseSequence: 1, Count: 1}, Expected: 3, CurrentEpoch: 4, BaseOffset: 80, FirstCopy: 71, LowestOffset: -1, NextOffset: -1, Err: ErrDuplicateSequence}},
		{m.Commit(31, 4, 3, 1, 72), "idempotence: offset out of order: producer 31 epoch 4 sequence 3 count 1: base offset 72, lowest possible is 73",
			BatchError{Batch: Batch{ProducerID: 31, Epoch: 4, BaseSequence: 3, Count: 1}, Expected: -1, CurrentEpoch: 4, BaseOffset: 72, FirstCopy: -1, LowestOffset: 73, NextOffset: -1, Err: ErrOffsetOrder}},
		{m.Commit(31, 4, 9, 1, 80), "idempotence: out of order sequence: producer 31 epoch 4 sequence 9 count 1: expected sequence 3 in epoch 4",
			BatchError{Batch: Batch{ProducerID: 31, Epoch: 4, BaseSequence: 9, Count: 1}, Expected: 3, CurrentEpoch: 4, BaseOffset: 80, FirstCopy: -1, LowestOffset: -1, NextOffset: -1, Err: ErrOutOfOrderSequence}},
		{m.CommitBatch(Batch{ProducerID: 31, Epoch: 3, Count: 1, Transactional: true}, 80), "idempotence: fenced by a newer epoch: producer 31 epoch 3 sequence 0 count 1: current epoch is 4",
			BatchError{Batch: Batch{ProducerID: 31, Epoch: 3, Count: 1, Transactional: true}, Expected: -1, CurrentEpoch: 4, BaseOffset: 80, FirstCopy: -1, LowestOffset: -1, NextOffset: -1, Err: ErrFenced}},
	} {
		if got := fmt.Sprint(tt.err); got != tt.want {
			t.Errorf("got  %s\nwant %s", got, tt.want)
		}
		var e *BatchError
		if !errors.As(fmt.Errorf("partition 3: %w", tt.err), &e) || *e != tt.fact {
			t.Errorf("the facts are %+v, want %+v", e, tt.fact)
		}
	}
}

// TestErrorsInJSON: an error in a structured log keeps its reason and its facts.
func TestErrorsInJSON(t *testing.T) {
	m := New(Config{})
	if err := m.Commit(31, 4, 0, 1, 70); err != nil {
		t.Fatal(err)
	}
	_, gap := m.Check(31, 4, 9, 2)
	if _, _, err := m.Reserve(Batch{ProducerID: 31, Epoch: 4, BaseSequence: 1, Count: 1}); err != nil {
		t.Fatal(err)
	}
	_, inFlight := m.Check(31, 4, 1, 1)
	_, torn := VerifyLog(strings.NewReader("half a batch"))
	for _, tt := range []struct {
		err  error
		want string
	}{
		{gap, `{"Batch":{"ProducerID":31,"Epoch":4,"BaseSequence":9,"Count":2,"Transactional":false},` +
			`"Expected":1,"CurrentEpoch":4,"BaseOffset":-1,"FirstCopy":-1,"LowestOffset":-1,"NextOffset":-1,"Err":"idempotence: out of order sequence"}`},
		{inFlight, `{"Batch":{"ProducerID":31,"Epoch":4,"BaseSequence":1,"Count":1,"Transactional":false},` +
			`"Epoch":4,"FirstSequence":1,"LastSequence":1}`},
		{torn, `{"Position":0,"Offset":0,"Err":"idempotence: torn tail of log: 12 of 61 bytes of an entry"}`},
	} {
		got, err := json.Marshal(tt.err)
		if err != nil || string(got) != tt.want {
			t.Errorf("%v:\n got %s, %v\nwant %s", tt.err, got, err, tt.want)
		}
	}
}

// TestPolicyText: a policy is configured by its name.
func TestPolicyText(t *testing.T) {
	type config struct{ Policy UnknownProducerPolicy }
	for _, tt := range []struct {
		json string
		want UnknownProducerPolicy
		err  bool
	}{
		{`{"Policy":"StartAtZero"}`, StartAtZero, false},
		{`{"Policy":"AcceptAny"}`, AcceptAny, false},
		{`{"Policy":"StartAtZeroOnNewLog"}`, StartAtZeroOnNewLog, false},
		{`{}`, StartAtZero, false},
		{`{"Policy":"acceptany"}`, StartAtZero, true},
		{`{"Policy":""}`, StartAtZero, true},
		{`{"Policy":1}`, StartAtZero, true},
	} {
		var got config
		err := json.Unmarshal([]byte(tt.json), &got)
		if got.Policy != tt.want || (err != nil) != tt.err {
			t.Errorf("%s is %v, %v, want %v", tt.json, got.Policy, err, tt.want)
		}
		if again, err := json.Marshal(got); err != nil || !tt.err && tt.json != `{}` && string(again) != tt.json {
			t.Errorf("%s becomes %s, %v", tt.json, again, err)
		}
	}
	unchanged := AcceptAny
	if err := unchanged.UnmarshalText([]byte("nothing")); err == nil || unchanged != AcceptAny {
		t.Errorf("an unknown name leaves %v, %v", unchanged, err)
	}
}
