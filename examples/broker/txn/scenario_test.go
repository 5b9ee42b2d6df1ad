package txn

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
)

// This file runs scenarios: steps of a request and the answer it must get.
//
//	init ID [expect P] [timeout D]      InitProducerId
//	add ID P vN PARTITION...            AddPartitionsToTxn
//	group ID P GROUP                    AddOffsetsToTxn
//	stage ID P vN GROUP PARTITION=N...  TxnOffsetCommit
//	end ID P vN commit|abort            EndTxn
//	verify ID P PARTITION               VerifyPartition
//	commit GROUP PARTITION=N...         OffsetCommit
//	fetch GROUP [stable] [PARTITION...] OffsetFetch
//	markers                             Markers
//	done ID PARTITION [ERROR]           MarkerDone of a listed marker
//	expire                              Expire
//	state ID                            what is known of the id
//	newid                               NewProducerID
//	epoch                               Epoch
//	quiet REQUEST                       a request that writes no record
//	clock D                             D passes
//	write fails                         the next record cannot be written
//	crash before|after write            the log ends before or behind the next record
//	restart                             recovers what the log holds; answers with the epoch
//
// P is ID/EPOCH, PARTITION is TOPIC-N. Answers are ok, P, the name of a Kafka
// error, or what was asked for.

type step struct{ do, want string }

// A fate is what becomes of a record.
type fate int

const (
	written    fate = iota
	refused         // it cannot be written
	diedBefore      // the log ends with half of it
	diedAfter       // the log ends behind it, and the caller gets an error
)

var errDisk = errors.New("disk error")

// A memLog is a log in memory. Fates are those of the next records other than
// starts, blocks and stops.
type memLog struct {
	bytes   []byte
	fates   []fate
	dead    bool
	waiting func(record) // called before each wait returns
}

func (l *memLog) Append(record []byte) func() error {
	f, _, err := decodeFrame(record)
	if err != nil {
		panic(err)
	}
	what := written
	switch f.record.kind() {
	case kindTransaction, kindForgotten, kindOffsets:
		if len(l.fates) > 0 {
			what, l.fates = l.fates[0], l.fates[1:]
		}
	}
	err = nil
	if l.dead || what != written {
		err = errDisk
	}
	if !l.dead && (what == written || what == diedAfter) {
		l.bytes = append(l.bytes, record...)
	}
	if !l.dead && what == diedBefore {
		l.bytes = append(l.bytes, record[:len(record)/2]...)
	}
	l.dead = l.dead || what >= diedBefore
	return func() error {
		if l.waiting != nil {
			l.waiting(f.record)
		}
		return err
	}
}

// A fataler is a *testing.T or a *rapid.T.
type fataler interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// A world is a coordinator, its log and a clock.
type world struct {
	t        fataler
	cfg      Config
	now      time.Time
	log      *memLog
	c        *Coordinator
	rewrites bool // a restart rewrites the log if that is worth it
}

const firstID = 4000

// newWorld starts a coordinator whose log holds the records.
func newWorld(t fataler, given ...record) *world {
	w := &world{
		t:   t,
		cfg: Config{FirstProducerID: firstID},
		now: time.UnixMilli(1_700_000_000_000),
		log: new(memLog),
	}
	for i, r := range given {
		w.log.bytes = frame{int64(i + 1), int64(i), r}.appendTo(w.log.bytes)
	}
	w.restart()
	return w
}

func (w *world) restart() {
	w.t.Helper()
	r, err := Recover(w.log.bytes)
	if err != nil {
		w.t.Fatalf("Recover: %v", err)
	}
	if r.Duplicates != 0 || (r.Tail != nil) != (r.Size < int64(len(w.log.bytes))) {
		w.t.Fatalf("Recover: size %d of %d, tail %v, %d duplicates", r.Size, len(w.log.bytes), r.Tail, r.Duplicates)
	}
	w.log.bytes = w.log.bytes[:r.Size]
	if w.rewrites {
		if short := r.Rewritten(); short != nil {
			w.log.bytes = short
		}
	}
	w.log.dead, w.log.fates = false, nil
	w.c, err = NewCoordinator(w.cfg, r, w.log)
	if err != nil {
		w.t.Fatalf("NewCoordinator: %v", err)
	}
}

func (w *world) run(steps []step) {
	w.t.Helper()
	for i, s := range steps {
		if got := w.do(s.do); got != s.want {
			w.t.Fatalf("step %d: %s\ngot  %s\nwant %s", i+1, s.do, got, s.want)
		}
	}
}

func (w *world) do(line string) string {
	w.t.Helper()
	args := strings.Fields(line)
	verb, args := args[0], args[1:]
	switch verb {
	case "init":
		expected, timeout := NoProducer, time.Minute
		for rest := args[1:]; len(rest) > 0; rest = rest[2:] {
			if rest[0] == "expect" {
				expected = w.producer(rest[1])
			} else {
				timeout = w.duration(rest[1])
			}
		}
		return producerOr(w.c.InitProducerID(w.now, args[0], expected, timeout))
	case "add":
		var partitions []Partition
		for _, p := range args[3:] {
			partitions = append(partitions, w.partition(p))
		}
		return ok(w.c.AddPartitionsToTxn(w.now, args[0], w.producer(args[1]), version(args[2]), partitions))
	case "group":
		return ok(w.c.AddOffsetsToTxn(w.now, args[0], w.producer(args[1]), args[2]))
	case "stage":
		return ok(w.c.TxnOffsetCommit(w.now, args[0], w.producer(args[1]), version(args[2]), args[3], w.offsets(args[4:])))
	case "end":
		return producerOr(w.c.EndTxn(w.now, args[0], w.producer(args[1]), version(args[2]), args[3] == "commit"))
	case "verify":
		return ok(w.c.VerifyPartition(args[0], w.producer(args[1]), w.partition(args[2])))
	case "commit":
		return ok(w.c.OffsetCommit(args[0], w.offsets(args[1:])))
	case "fetch":
		group, args := args[0], args[1:]
		stable := len(args) > 0 && args[0] == "stable"
		if stable {
			args = args[1:]
		}
		var partitions []Partition
		for _, p := range args {
			partitions = append(partitions, w.partition(p))
		}
		return fetched(w.c.OffsetFetch(group, partitions, stable))
	case "markers":
		return markers(w.c.Markers())
	case "done":
		var err error
		if len(args) > 2 {
			err = kafkaError(w.t, args[2])
		}
		for _, m := range w.c.Markers() {
			if m.TransactionalID == args[0] && partitionName(m.Partition) == args[1] {
				return ok(w.c.MarkerDone(w.now, m, err))
			}
		}
		return "not listed"
	case "expire":
		return ok(w.c.Expire(w.now))
	case "state":
		return w.state(args[0])
	case "quiet":
		before := len(w.log.bytes)
		got := w.do(strings.Join(args, " "))
		if len(w.log.bytes) != before {
			got += ", and wrote a record"
		}
		return got
	case "newid":
		id, err := w.c.NewProducerID()
		if err != nil {
			return ok(err)
		}
		return strconv.FormatInt(id, 10)
	case "epoch":
		return fmt.Sprint(w.c.Epoch())
	case "clock":
		w.now = w.now.Add(w.duration(args[0]))
		return ""
	case "write":
		w.log.fates = []fate{refused}
		return ""
	case "crash":
		w.log.fates = []fate{diedBefore}
		if args[0] == "after" {
			w.log.fates = []fate{diedAfter}
		}
		return ""
	case "restart":
		w.restart()
		return fmt.Sprint(w.c.Epoch())
	}
	w.t.Fatalf("unknown step: %s", line)
	return ""
}

// state prints what is known of a transactional id.
func (w *world) state(id string) string {
	d, known := w.c.Describe(id)
	if !known {
		return "unknown"
	}
	parts := []string{d.State.String(), producerName(d.Producer)}
	t := w.c.transaction(id)
	if last := t.last(); last != NoProducer {
		parts = append(parts, "last", producerName(last))
	}
	if t.nextID >= 0 {
		parts = append(parts, "next", producerName(t.present()))
	}
	for _, p := range d.Partitions {
		parts = append(parts, partitionName(p))
	}
	return strings.Join(append(parts, d.Groups...), " ")
}

func (w *world) producer(s string) Producer {
	w.t.Helper()
	id, epoch, _ := strings.Cut(s, "/")
	i, err1 := strconv.ParseInt(id, 10, 64)
	e, err2 := strconv.ParseInt(epoch, 10, 16)
	if err := cmp.Or(err1, err2); err != nil {
		w.t.Fatalf("producer %q: %v", s, err)
	}
	return Producer{i, int16(e)}
}

func (w *world) partition(s string) Partition {
	w.t.Helper()
	topic, number, _ := strings.Cut(s, "-")
	n, err := strconv.ParseInt(number, 10, 32)
	if err != nil {
		w.t.Fatalf("partition %q: %v", s, err)
	}
	return Partition{topic, int32(n)}
}

func (w *world) offsets(args []string) []Offset {
	w.t.Helper()
	var all []Offset
	for _, arg := range args {
		p, value, _ := strings.Cut(arg, "=")
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			w.t.Fatalf("offset %q: %v", arg, err)
		}
		all = append(all, Offset{Partition: w.partition(p), Offset: n, LeaderEpoch: -1})
	}
	return all
}

func (w *world) duration(s string) time.Duration {
	w.t.Helper()
	d, err := time.ParseDuration(s)
	if err != nil {
		w.t.Fatal(err)
	}
	return d
}

func version(s string) int8 { return int8(s[1] - '0') }

func kafkaError(t fataler, name string) error {
	for code := range int16(200) {
		if err := kerr.TypedErrorForCode(code); err != nil && err.Message == name {
			return err
		}
	}
	t.Fatalf("no error is called %s", name)
	return nil
}

func ok(err error) string {
	var k *kerr.Error
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &k):
		return k.Message
	}
	return err.Error()
}

func producerName(p Producer) string { return fmt.Sprintf("%d/%d", p.ID, p.Epoch) }

func producerOr(p Producer, err error) string {
	if err != nil {
		return ok(err)
	}
	return producerName(p)
}

func partitionName(p Partition) string { return fmt.Sprintf("%s-%d", p.Topic, p.Partition) }

func markers(all []Marker) string {
	var names []string
	for _, m := range all {
		outcome := "abort"
		if m.Commit {
			outcome = "commit"
		}
		names = append(names, fmt.Sprintf("%s %s %d/%d %s v%d c%d", m.TransactionalID, partitionName(m.Partition),
			m.ProducerID, m.Epoch, outcome, m.Version, m.CoordinatorEpoch))
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

func fetched(all []FetchedOffset) string {
	var names []string
	for _, o := range all {
		if o.Err != nil {
			names = append(names, partitionName(o.Committed.Partition)+"="+ok(o.Err))
		} else {
			names = append(names, fmt.Sprintf("%s=%d", partitionName(o.Committed.Partition), o.Committed.Offset))
		}
	}
	return cmp.Or(strings.Join(names, " "), "none")
}

// held returns the record of a transactional id in a state, to start from.
func held(id string, state State, p Producer, version int8, partitions ...Partition) *transaction {
	slices.SortFunc(partitions, comparePartitions)
	return &transaction{
		id: id, producer: p, lastEpoch: -1, previousID: -1, nextID: -1, timeout: 60_000, state: state, version: version,
		start: 1_700_000_000_000, updated: 1_700_000_000_000, partitions: partitions,
	}
}
