package answers

import (
	"context"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/idempotence-go/idempotence"
)

// A reaction is what a producer does after one of its records was refused.
type reaction string

const (
	again             reaction = "again"                                // with the same epoch and sequence
	newEpochAgain     reaction = "new epoch, again"                     // from sequence 0
	asWritten         reaction = "as written"                           // goes on; the record is lost
	failsNewEpoch     reaction = "fails it, new epoch"                  // from sequence 0
	failsSameSequence reaction = "fails it, same sequence for the next" // in the same epoch
	fatal             reaction = "fatal"                                // stores no further record
)

// What each client does with an error code. The two versions of librdkafka stand
// for those from 2.4 on, and for those before; the test measures the one that
// kcat is linked with.
var reactions = []struct {
	code            int16
	franz           reaction // franz-go 1.22
	sarama          reaction // Sarama 1.61
	librdkafka211   reaction // librdkafka 2.11; the same: 2.4, 2.5, 2.6, 2.8
	librdkafka20    reaction // librdkafka 2.0; the same: 2.3
	kafkaJS         reaction // KafkaJS 2.2
	platformatic1   reaction // @platformatic/kafka 1.35
	platformatic212 reaction // @platformatic/kafka 2.12
}{
	{2, failsNewEpoch, again, again, failsNewEpoch, again, again, again},
	{6, again, again, again, again, again, again, again},
	{7, again, again, again, again, again, again, again},
	{45, newEpochAgain, failsNewEpoch, fatal, fatal, failsSameSequence, failsSameSequence, newEpochAgain},
	{46, asWritten, asWritten, asWritten, asWritten, failsSameSequence, failsSameSequence, failsNewEpoch},
	{47, newEpochAgain, failsNewEpoch, failsNewEpoch, failsNewEpoch, failsSameSequence, failsSameSequence, failsNewEpoch},
	{56, again, again, again, again, again, again, again},
	{59, newEpochAgain, failsNewEpoch, newEpochAgain, newEpochAgain, failsSameSequence, failsSameSequence, newEpochAgain},
	{87, failsNewEpoch, failsNewEpoch, failsNewEpoch, failsNewEpoch, failsSameSequence, failsSameSequence, failsNewEpoch},
	{-1, failsNewEpoch, failsNewEpoch, failsNewEpoch, failsNewEpoch, failsSameSequence, failsSameSequence, failsNewEpoch},
}

// subjects are the clients, each with its column of the table.
var subjects = []struct {
	name    string
	need    func(*testing.T)
	produce client
	want    func(t *testing.T, row int) reaction
}{
	{"franz-go", needNothing, each(franz), func(_ *testing.T, row int) reaction { return reactions[row].franz }},
	{"Sarama", needNothing, each(saramaClient), func(_ *testing.T, row int) reaction { return reactions[row].sarama }},
	{"kcat", needKcat, each(kcat), librdkafka},
	{"KafkaJS", needNode, node("kafkajs.mjs", "kafkajs"), func(_ *testing.T, row int) reaction { return reactions[row].kafkaJS }},
	{"platformatic 1", needNode, node("platformatic.mjs", "platformatic-kafka-1"), func(_ *testing.T, row int) reaction { return reactions[row].platformatic1 }},
	{"platformatic 2", needNode, node("platformatic.mjs", "@platformatic/kafka"), func(_ *testing.T, row int) reaction { return reactions[row].platformatic212 }},
}

var librdkafkaVersion = regexp.MustCompile(`librdkafka (\d+)\.(\d+)\.\d+`)

// librdkafka picks the column for kcat's librdkafka.
func librdkafka(t *testing.T, row int) reaction {
	t.Helper()
	out, err := exec.Command("kcat", "-V").CombinedOutput()
	m := librdkafkaVersion.FindStringSubmatch(string(out))
	if m == nil {
		t.Fatalf("kcat -V: %v: no version of librdkafka in %s", err, out)
	}
	t.Log(m[0])
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	if major < 2 || major == 2 && minor < 4 {
		return reactions[row].librdkafka20
	}
	return reactions[row].librdkafka211
}

const (
	records = 6 // of a session
	refused = 3 // the record in the fourth request

	sessionTimeout = 3 * time.Minute
)

// play runs a session of a client against each of the judges. The sessions are
// under way at once.
func play(t *testing.T, produce client, judges []judge) []session {
	t.Helper()
	var (
		interposers []*interposer
		addrs       []string
	)
	for _, j := range judges {
		p := interpose(t, j)
		interposers, addrs = append(interposers, p), append(addrs, p.addr)
	}
	ctx, cancel := context.WithTimeout(context.Background(), sessionTimeout)
	defer cancel()
	acknowledged, err := produce(ctx, addrs, records)
	if err != nil {
		t.Fatal(err)
	}
	var sessions []session
	for _, p := range interposers {
		sessions = append(sessions, session{p.record(), acknowledged[p.addr]})
	}
	return sessions
}

// A session is what a client sent, and which records it takes for written.
type session struct {
	sent         []produced
	acknowledged []string
}

func (s session) log(t *testing.T) {
	t.Helper()
	for _, p := range s.sent {
		t.Log(p)
	}
	t.Log("acknowledged:", s.acknowledged)
}

// The fourth Produce request of a session is answered with a code, and nothing
// is stored.
func TestReactions(t *testing.T) {
	t.Parallel()
	for _, subject := range subjects {
		t.Run(subject.name, func(t *testing.T) {
			t.Parallel()
			subject.need(t)
			var judges []judge
			for _, r := range reactions {
				judges = append(judges, func(number int, _ idempotence.Batch) int16 {
					if number == refused+1 {
						return r.code
					}
					return 0
				})
			}
			for row, s := range play(t, subject.produce, judges) {
				t.Run(strconv.Itoa(int(reactions[row].code)), func(t *testing.T) {
					s.log(t)
					if got, want := react(t, s), subject.want(t, row); got != want {
						t.Errorf("%q, want %q", got, want)
					}
				})
			}
		})
	}
}

// react returns what a client did after the refused request. Where the client
// went on with the next record, the first batch stored is the one that tells: a
// batch may have been on its way before the client read the refusal.
func react(t *testing.T, s session) reaction {
	t.Helper()
	if len(s.sent) <= refused || s.sent[refused].Record != record(refused) {
		t.Fatal("the fourth request does not hold the fourth record")
	}
	was, after := s.sent[refused], s.sent[refused+1:]
	told := slices.Contains(s.acknowledged, was.Record)

	resent := slices.IndexFunc(after, func(p produced) bool { return p.Record == was.Record })
	stored := slices.IndexFunc(after, func(p produced) bool { return p.Code == 0 })
	switch {
	case resent >= 0 && told && after[resent].Batch == was.Batch:
		return again
	case resent >= 0 && told && newEpoch(after[resent], was):
		return newEpochAgain
	case resent >= 0:
		t.Fatalf("sent again in an unknown way, acknowledged: %v", told)
	case told:
		return asWritten
	case stored < 0:
		return fatal
	case after[stored].Batch == was.Batch:
		return failsSameSequence
	case newEpoch(after[stored], was):
		return failsNewEpoch
	}
	t.Fatal("an unknown reaction")
	return ""
}

// newEpoch reports whether p begins a newer epoch than was, or another producer.
func newEpoch(p, was produced) bool {
	return p.BaseSequence == 0 && (p.ProducerID != was.ProducerID || p.Epoch > was.Epoch)
}

// A partition that forgets its producer before the fourth batch costs records
// under StartAtZero: the one in that batch with Sarama, that one and all that
// follow with KafkaJS and the older @platformatic/kafka, which go on with the
// sequence that was refused. The other policies cost nothing.
func TestForgottenProducer(t *testing.T) {
	t.Parallel()
	all := []string{"0", "1", "2", "3", "4", "5"}
	atZero := map[string][]string{
		"franz-go":       all,
		"Sarama":         {"0", "1", "2", "4", "5"},
		"kcat":           all,
		"KafkaJS":        {"0", "1", "2"},
		"platformatic 1": {"0", "1", "2"},
		"platformatic 2": all,
	}
	policies := []idempotence.UnknownProducerPolicy{
		idempotence.StartAtZero, idempotence.AcceptAny, idempotence.StartAtZeroOnNewLog,
	}
	for _, subject := range subjects {
		t.Run(subject.name, func(t *testing.T) {
			t.Parallel()
			subject.need(t)
			var judges []judge
			for _, p := range policies {
				judges = append(judges, forgetful(p))
			}
			for i, s := range play(t, subject.produce, judges) {
				t.Run(policies[i].String(), func(t *testing.T) {
					s.log(t)
					want := all
					if policies[i] == idempotence.StartAtZero {
						want = atZero[subject.name]
					}
					if !slices.Equal(s.acknowledged, want) {
						t.Errorf("acknowledged: %v, want %v", s.acknowledged, want)
					}
				})
			}
		})
	}
}

// forgetful judges as a partition does that forgot all producers before the
// fourth batch.
func forgetful(policy idempotence.UnknownProducerPolicy) judge {
	producers := idempotence.New(idempotence.Config{UnknownProducer: policy})
	producers.Advance(refused) // the log is not new
	return func(number int, b idempotence.Batch) int16 {
		if number <= refused {
			return 0
		}
		res, err := producers.CheckBatch(b)
		if err == nil && res.Verdict == idempotence.Append {
			err = producers.CommitBatch(b, producers.EndOffset())
		}
		return idempotence.KafkaErrorCode(err)
	}
}
