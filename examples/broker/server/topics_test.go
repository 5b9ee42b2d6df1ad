package server_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// A topic gets a name only if its directories are ordinary ones, wherever the
// broker runs. (B9)
func TestB9_TopicNames(t *testing.T) {
	c := start(t, server.Config{}).dial()
	for name, want := range map[string]int16{
		"t": 0, "T2": 0, "_schemas": 0, "__consumer": 0, "a.b-c_d": 0, "0": 0, "lock": 0, "console": 0, "com10": 0, "nullable.x": 0, "a.con": 0,
		strings.Repeat("x", 249): 0,

		"": 17, ".": 17, "..": 17, ".hidden": 17, "-": 17, "--": 17, "-n": 17, "a/b": 17, `a\b`: 17, "a b": 17, "a:b": 17, "ä": 17,
		"con": 17, "CON": 17, "nul": 17, "aux.x": 17, "Prn.a.b": 17, "com1": 17, "LPT9.x": 17,
		strings.Repeat("x", 250): 17,
	} {
		if code := c.create(name); code != want {
			t.Errorf("topic %q: code %d, want %d", name, code, want)
		}
	}
}

// Two topics never share directories, not even on a file system that takes
// letters of both cases for the same. (B9)
func TestB9_TopicsThatDifferInCase(t *testing.T) {
	c := start(t, server.Config{}).dial()
	if code := c.create("Orders"); code != 0 {
		t.Errorf("code %d", code)
	}
	if code := c.create("orders"); code != kerr.InvalidTopicException.Code {
		t.Errorf("another case: code %d, want %d", code, kerr.InvalidTopicException.Code)
	}
	if code := c.create("Orders"); code != 0 {
		t.Errorf("the topic that exists: code %d", code)
	}
}

// What else is in the data directory makes no topics, and does not keep the
// broker from starting. What looks like a partition and is not served is named.
// (B9)
func TestB9_OtherDirectories(t *testing.T) {
	var log logBuffer
	cfg := server.Config{Dir: t.TempDir(), Log: log.logger()}
	b := start(t, cfg)
	b.dial().create("t")
	b.stop()
	for _, name := range []string{"backup-2024", "notes", "x-01", "99999999999-99999999999"} {
		if err := os.Mkdir(filepath.Join(cfg.Dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	ignored := []string{"t-0.bak", "t-007", "big-3000", "big-99999999999", "-0", ".hidden-1"}
	for _, name := range ignored {
		makeLog(t, filepath.Join(cfg.Dir, name))
	}
	c := start(t, cfg).dial()
	req := kmsg.NewPtrMetadataRequest()
	req.Version = 1
	topics := ask[*kmsg.MetadataResponse](c, req).Topics
	if len(topics) != 1 || *topics[0].Topic != "t" || len(topics[0].Partitions) != 3 {
		t.Errorf("topics %+v, want t with 3 partitions", topics)
	}
	for _, name := range ignored {
		if !strings.Contains(log.String(), "dir="+name+" ") {
			t.Errorf("%s was ignored without a word", name)
		}
	}
}

// A request that names one thing thousands of times is not answered thousands
// of times. (B5)
func TestB5_RepeatedNames(t *testing.T) {
	c := start(t, server.Config{}).dial()
	c.create("t")
	c.batch(31, 0, 0, 1)

	name, other := "t", "u"
	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Version = 9
	metadata.Topics = slices.Repeat([]kmsg.MetadataRequestTopic{{Topic: &name}, {Topic: &other}}, 5000)
	topics := ask[*kmsg.MetadataResponse](c, metadata).Topics
	if len(topics) != 2 || *topics[0].Topic != name || *topics[1].Topic != other {
		t.Errorf("%d topics, want each of the two once", len(topics))
	}

	p := kmsg.NewListOffsetsRequestTopicPartition()
	p.Timestamp = 1000
	offsets := kmsg.NewPtrListOffsetsRequest()
	offsets.Version = 1
	offsets.Topics = slices.Repeat([]kmsg.ListOffsetsRequestTopic{{Topic: "t", Partitions: []kmsg.ListOffsetsRequestTopicPartition{p, p}}}, 2)
	var codes []int16
	for _, topic := range ask[*kmsg.ListOffsetsResponse](c, offsets).Topics {
		for _, p := range topic.Partitions {
			codes = append(codes, p.ErrorCode)
		}
	}
	if want := []int16{0, 42, 42, 42}; !slices.Equal(codes, want) {
		t.Errorf("ListOffsets answers codes %v, want %v", codes, want)
	}
}

// A partition that is offline is answered with KAFKA_STORAGE_ERROR whatever it
// is asked, and Metadata shows it. (B7)
func TestB7_OfflineOnTheWire(t *testing.T) {
	cfg := server.Config{Dir: t.TempDir(), SegmentBytes: 1}
	b := start(t, cfg)
	c := b.dial()
	c.create("t")
	for seq := range int32(3) {
		c.batch(31, 0, seq, 1)
	}
	b.stop()
	if err := os.Truncate(filepath.Join(cfg.Dir, "t-0", "00000000000000000001.log"), 10); err != nil {
		t.Fatal(err)
	}
	var log logBuffer
	cfg.Log = log.logger()
	b = start(t, cfg)
	c = b.dial()
	storage := kerr.KafkaStorageError
	wantAnswer(t, "produce", c.batch(31, 0, 3, 1), refused(storage))
	if got := c.fetch(fetchRequest("t", 0, 0)); got.ErrorCode != storage.Code {
		t.Errorf("fetch: code %d", got.ErrorCode)
	}
	p := kmsg.NewListOffsetsRequestTopicPartition()
	p.Timestamp = -1
	offsets := kmsg.NewPtrListOffsetsRequest()
	offsets.Version = 1
	offsets.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: "t", Partitions: []kmsg.ListOffsetsRequestTopicPartition{p}}}
	if got := ask[*kmsg.ListOffsetsResponse](c, offsets).Topics[0].Partitions[0]; got.ErrorCode != storage.Code {
		t.Errorf("list offsets: code %d", got.ErrorCode)
	}
	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Version = 9
	for i, p := range ask[*kmsg.MetadataResponse](c, metadata).Topics[0].Partitions {
		if offline := len(p.OfflineReplicas) > 0; offline != (i == 0) {
			t.Errorf("metadata: partition %d offline: %t", i, offline)
		}
	}
	if !strings.Contains(log.String(), `level=ERROR msg="partition offline"`) {
		t.Errorf("the log does not say so:\n%s", log.String())
	}
	wantAnswer(t, "another partition", c.produce(produceRequest("t", 1, segmenttest.Batch(31, 0, 0, "x"))), stored(0))
}
