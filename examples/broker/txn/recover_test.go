package txn

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// shown is all that a coordinator shows, and what is kept for retries.
type shown struct {
	Epoch   int32
	States  []string
	Offsets map[string]string
	Markers string
}

// shown returns it. Coordinator epochs are left out: each start raises them.
func (w *world) shown() shown {
	s := shown{Offsets: map[string]string{}}
	for _, d := range w.c.List() {
		t := w.c.transaction(d.TransactionalID)
		s.States = append(s.States, fmt.Sprintf("%s %s timeout %v start %v updated %v version %d %v",
			d.TransactionalID, w.state(d.TransactionalID), d.Timeout, d.Start, d.LastUpdate, t.version, t.offsets))
	}
	for group := range w.c.state.offsets {
		s.Offsets[group] = fetched(w.c.OffsetFetch(group, nil, false)) + "; stable: " + fetched(w.c.OffsetFetch(group, nil, true))
	}
	s.Markers = strings.ReplaceAll(markers(w.c.Markers()), fmt.Sprintf(" c%d", w.c.Epoch()), "")
	return s
}

// recovered returns what a coordinator shows that starts with the log.
func recovered(t testing.TB, log []byte) shown {
	t.Helper()
	w := &world{t: t, log: &memLog{bytes: bytes.Clone(log)}}
	w.restart()
	return w.shown()
}

// aRun has transitions of every kind. It ends with markers outstanding.
var aRun = []step{
	{"init a", "4000/0"},
	{"init b", "4001/0"},
	{"commit g in-0=1 in-1=1", "ok"},
	{"add a 4000/0 v2 t-0 t-1", "ok"},
	{"stage a 4000/0 v2 g in-0=5", "ok"},
	{"add b 4001/0 v1 t-0", "ok"},
	{"end a 4000/0 v2 commit", "4000/1"},
	{"init b", "CONCURRENT_TRANSACTIONS"},
	{"done a t-0", "ok"},
	{"done b t-0", "ok"},
	{"init c", "4002/0"},
	{"clock 1s", ""},
	{"stage c 4002/0 v2 h in-0=7", "ok"},
	{"done a t-1", "ok"},
	{"commit g in-0=6", "ok"},
	{"add a 4000/1 v2 t-2", "ok"},
	{"end a 4000/1 v2 abort", "4000/2"},
	{"init d", "4003/0"},
}

// A log that is cut at any byte, or whose rest is zero, gives the state of the
// records that are whole.
func TestRecoverTornTail(t *testing.T) {
	w := newWorld(t)
	wholeAt := map[int]bool{0: true}
	for _, s := range aRun {
		w.run([]step{s})
	}
	log := w.log.bytes
	for at := 0; at < len(log); {
		_, size, err := decodeFrame(log[at:])
		if err != nil {
			t.Fatal(err)
		}
		at += size
		wholeAt[at] = true
	}
	whole := 0
	for n := range len(log) + 1 {
		if wholeAt[n] {
			whole = n
		}
		for name, torn := range map[string][]byte{
			"cut":    log[:n],
			"zeroed": append(bytes.Clone(log[:n]), make([]byte, len(log)-n)...),
		} {
			r, err := Recover(torn)
			if err != nil || r.Size < int64(whole) || (r.Tail == nil) != (r.Size == int64(len(torn))) {
				t.Fatalf("%s at %d: %+v, %v", name, n, r, err)
			}
			if name == "zeroed" && wholeAt[n] && n < len(log) && !strings.Contains(r.Tail.Error(), "nothing but zeros") {
				t.Fatalf("%s at %d: tail %v", name, n, r.Tail)
			}
			// Zeros may happen to be what is missing.
			if name == "cut" && r.Size > int64(whole) || !bytes.Equal(torn[:r.Size], log[:r.Size]) {
				t.Fatalf("%s at %d: size %d, but %d bytes are whole", name, n, r.Size, whole)
			}
		}
	}
}

// The state that a prefix of the log gives is the one that was seen when the
// prefix was all there was.
func TestRecoverAfterEveryStep(t *testing.T) {
	w := newWorld(t)
	for _, s := range aRun {
		w.run([]step{s})
		live, again := w.shown(), recovered(t, w.log.bytes)
		if !strings.HasSuffix(again.Markers, live.Markers) { // a marker that is done is sent again
			t.Fatalf("after %s: markers\n%s\nrecovered\n%s", s.do, live.Markers, again.Markers)
		}
		live.Markers, again.Markers = "", ""
		if diff := cmp.Diff(live, again); diff != "" {
			t.Fatalf("after %s (-live +recovered):\n%s", s.do, diff)
		}
	}
}

// Any flipped byte is noticed, unless it lies in what nothing proves to have
// been durable: the last record of a run that was killed.
func TestRecoverFlippedByte(t *testing.T) {
	for _, end := range []string{"killed", "stopped", "killed, started and killed"} {
		w := newWorld(t)
		w.run(aRun)
		switch end {
		case "stopped":
			if err := w.c.Stop(); err != nil {
				t.Fatal(err)
			}
		case "killed, started and killed":
			w.restart()
		}
		last := lastRecord(t, w.log.bytes)
		for i := range w.log.bytes {
			log := bytes.Clone(w.log.bytes)
			log[i] ^= 0x10
			r, err := Recover(log)
			switch {
			case i < last && !errors.Is(err, ErrDamaged):
				t.Fatalf("%s: byte %d of %d flipped: %v", end, i, len(log), err)
			case i >= last && (err != nil || r.Size != int64(last) || r.Tail == nil):
				t.Fatalf("%s: byte %d of the last record flipped: %+v, %v", end, i-last, r, err)
			}
		}
	}
}

func lastRecord(t testing.TB, log []byte) int {
	t.Helper()
	last := 0
	for at := 0; at < len(log); {
		_, size, err := decodeFrame(log[at:])
		if err != nil {
			t.Fatal(err)
		}
		last, at = at, at+size
	}
	return last
}

// Records that were written together, and lost some sectors with the power, were
// never durable and never took effect.
func TestRecoverLostSectors(t *testing.T) {
	w := newWorld(t)
	w.run([]step{{"init a", "4000/0"}})
	synced := len(w.log.bytes)
	durable := w.c.state.durable
	for i := range 4 { // a group, written and not synced
		r := held("b", Empty, Producer{5, int16(i)}, 0)
		w.log.bytes = frame{w.c.state.number + int64(i) + 1, durable, r}.appendTo(w.log.bytes)
	}
	for from := synced; from < len(w.log.bytes); from++ {
		log := bytes.Clone(w.log.bytes)
		clear(log[from:min(from+64, len(log))])
		r, err := Recover(log)
		if err != nil {
			t.Fatalf("64 bytes zeroed at %d: %v", from, err)
		}
		if r.Size < int64(synced) || !bytes.Equal(log[:r.Size], w.log.bytes[:r.Size]) {
			t.Fatalf("64 bytes zeroed at %d: size %d, tail %v", from, r.Size, r.Tail)
		}
		if r.state.transactions["a"] == nil {
			t.Fatal("what was synced is gone")
		}
	}
}

// A record that is there twice counts once, wherever the second one lies.
func TestRecoverDuplicates(t *testing.T) {
	w := newWorld(t)
	w.run(aRun)
	log := w.log.bytes
	want := recovered(t, log)
	for at := 0; at < len(log); {
		_, size, err := decodeFrame(log[at:])
		if err != nil {
			t.Fatal(err)
		}
		again := log[at : at+size]
		for name, doubled := range map[string][]byte{
			"at once":    slices.Insert(bytes.Clone(log), at+size, again...),
			"at the end": append(bytes.Clone(log), again...),
		} {
			r, err := Recover(doubled)
			if err != nil || r.Duplicates != 1 || r.Tail != nil {
				t.Fatalf("the record at %d %s: %+v, %v", at, name, r, err)
			}
			fake := &world{t: t, log: new(memLog)}
			if fake.c, err = NewCoordinator(Config{}, r, fake.log); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, fake.shown()); diff != "" {
				t.Fatalf("the record at %d %s (-want +got):\n%s", at, name, diff)
			}
		}
		at += size
	}
	twice := append(bytes.Clone(log), log...)
	if r, err := Recover(twice); err != nil || r.Size != int64(len(twice)) {
		t.Errorf("the log twice: %+v, %v", r, err)
	}
}

// A client writes what it likes into an offset's metadata, a record too.
func TestRecoverIgnoresRecordsInsideRecords(t *testing.T) {
	w := newWorld(t)
	inner := string(frame{1 << 40, 1 << 40, forgottenRecord{"a"}}.appendTo(nil))
	w.run([]step{{"init a", "4000/0"}})
	if err := w.c.OffsetCommit("g", []Offset{{Partition{"t", 0}, 1, -1, inner + "after"}}); err != nil {
		t.Fatal(err)
	}
	last := lastRecord(t, w.log.bytes)
	for n := last; n < len(w.log.bytes); n++ {
		if r, err := Recover(w.log.bytes[:n]); err != nil || r.Size != int64(last) {
			t.Fatalf("cut at %d: %+v, %v", n, r, err)
		}
	}
	log := bytes.Clone(w.log.bytes)
	log[len(log)-1] ^= 1
	if r, err := Recover(log); err != nil || r.Size != int64(last) {
		t.Fatalf("flipped: %+v, %v", r, err)
	}
}

func TestRecoverOtherVersion(t *testing.T) {
	log := encodeAll(everyRecord())
	body := withByte(frame{20, 0, stopRecord{}}.appendTo(nil)[headerSize:], 0, 2)
	_, err := Recover(append(log, sealed(body)...))
	if !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("err = %v", err)
	}
}

// A log is rewritten when more than half of it is history, and gives the same
// then, also where the caller keeps the old one.
func TestRewritten(t *testing.T) {
	w := newWorld(t)
	w.run(aRun)
	for range 40 {
		w.run([]step{{"init d", w.next("d")}})
	}
	for _, replaced := range []bool{true, false} {
		log := bytes.Clone(w.log.bytes)
		want := recovered(t, log)
		r, err := Recover(log)
		if err != nil {
			t.Fatal(err)
		}
		short := r.Rewritten()
		if len(short) == 0 || len(short) > len(log)/2 {
			t.Fatalf("rewritten to %d of %d bytes", len(short), len(log))
		}
		if again, err := Recover(short); err != nil || again.Rewritten() != nil {
			t.Fatalf("the rewritten log: %+v, %v", again, err)
		}
		if diff := cmp.Diff(want, recovered(t, short)); diff != "" {
			t.Fatalf("rewritten (-want +got):\n%s", diff)
		}
		if replaced {
			log = short
		}
		fresh := &world{t: t, log: &memLog{bytes: log}, now: w.now}
		if fresh.c, err = NewCoordinator(Config{}, r, fresh.log); err != nil {
			t.Fatal(err)
		}
		fresh.run([]step{
			{"epoch", "2"},
			{"commit g in-0=8", "ok"},
			{"init d", fresh.next("d")},
			{"newid", "5000"},
		})
		if diff := cmp.Diff(fresh.shown(), recovered(t, fresh.log.bytes)); diff != "" {
			t.Fatalf("replaced %t, after more records (-live +recovered):\n%s", replaced, diff)
		}
		// Damage to the rewritten part is noticed, and a part that is missing.
		if replaced {
			for i := range short {
				if _, err := Recover(withByte(short, i, short[i]^1)); !errors.Is(err, ErrDamaged) {
					t.Fatalf("byte %d of the rewritten log flipped: %v", i, err)
				}
				if r, err := Recover(short[:i]); i > 0 && err == nil && r.Size > 0 {
					t.Fatalf("the rewritten log cut at %d: %+v, %v", i, r, err)
				}
			}
		}
	}
	for name, log := range map[string][]byte{"no log": nil, "a fresh one": newWorld(t).log.bytes} {
		if r, err := Recover(log); err != nil || r.Rewritten() != nil {
			t.Errorf("%s: rewritten, %v", name, err)
		}
	}
}

// next returns the answer to the next InitProducerId.
func (w *world) next(id string) string {
	p := w.c.transaction(id).producer
	return producerName(Producer{p.ID, p.Epoch + 1})
}

func TestNewCoordinator(t *testing.T) {
	w := newWorld(t)
	for i := range 3 {
		w.run([]step{{"epoch", fmt.Sprint(i + 1)}, {"restart", fmt.Sprint(i + 2)}})
	}
	r, err := Recover(w.log.bytes)
	if err != nil {
		t.Fatal(err)
	}
	if c, err := NewCoordinator(w.cfg, r, &memLog{dead: true}); c != nil || !errors.Is(err, errDisk) {
		t.Errorf("with a log that takes nothing: %v, %v", c, err)
	}
	r, err = Recover(frame{1, 0, startRecord{1<<31 - 1}}.appendTo(nil))
	if err != nil {
		t.Fatal(err)
	}
	if c, err := NewCoordinator(w.cfg, r, w.log); c != nil || err == nil {
		t.Errorf("after the last epoch: %v, %v", c, err)
	}
}

// A log that no coordinator has written: it forgets what is still open.
func TestRecoverForgottenInMidTransaction(t *testing.T) {
	open := held("a", Ongoing, Producer{31, 0}, 2)
	open.groups, open.offsets = []string{"g"}, []stagedOffset{{"g", Offset{Partition{"in", 0}, 1, -1, ""}}}
	w := newWorld(t, open, forgottenRecord{"a"}, held("b", PrepareAbort, Producer{32, 0}, 1, Partition{"t", 0}), forgottenRecord{"b"})
	w.run([]step{
		{"fetch g stable in-0", "in-0=-1"},
		{"markers", "none"},
		{"state a", "unknown"},
		{"expire", "ok"},
	})
}

// Nothing is left of what is over.
func TestStateKeepsNothing(t *testing.T) {
	w := newWorld(t)
	w.run([]step{
		{"init a", "4000/0"},
		{"add a 4000/0 v2 t-0", "ok"},
		{"stage a 4000/0 v2 g in-0=1", "ok"},
		{"end a 4000/0 v2 abort", "4000/1"},
		{"done a t-0", "ok"},
		{"clock 168h", ""},
		{"expire", "ok"},
	})
	s := w.c.state
	if n := len(s.transactions) + len(s.unmarked) + len(s.offsets) + len(s.staging) + len(w.c.locks); n != 0 {
		t.Errorf("left: %+v", s)
	}
}
