package main

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/segment/segmenttest"
)

// This file tests faults that are seen only on the command line.

// TestB5_UnknownProducerFlag: the policy for unknown producers can be chosen, so that a
// producer that was forgotten, and whose client cannot start again at 0, is not refused
// for ever.
func TestB5_UnknownProducerFlag(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		args []string
		want int16 // for a first batch with sequence 5, on a new log
	}{
		{nil, 59},
		{[]string{"-unknown-producer", "StartAtZero"}, 59},
		{[]string{"-unknown-producer", "StartAtZeroOnNewLog"}, 45},
		{[]string{"-unknown-producer", "AcceptAny"}, 0},
	} {
		p := startProcess(t, append(tt.args, "-data", t.TempDir(), "-partitions", "1")...)
		if !p.serves(func(string) {}) {
			t.Fatalf("%q: the broker did not start", tt.args)
		}
		if code := produceRaw(t, p.addr, segmenttest.Batch(31, 0, 5, "x")); code != tt.want {
			t.Errorf("%q: sequence 5 gets %d, want %d", tt.args, code, tt.want)
		}
		if err := p.end(syscall.SIGTERM); err != nil {
			t.Errorf("the broker ended with %v", err)
		}
	}
}

// produceRaw sends a batch to partition 0 as it is, and returns the error code.
func produceRaw(t *testing.T, addr string, batch []byte) int16 {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cl, err := newFranz(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	create := kmsg.NewPtrMetadataRequest()
	create.AllowAutoTopicCreation = true
	create.Topics = []kmsg.MetadataRequestTopic{{Topic: kmsg.StringPtr(topic)}}
	if _, err := cl.Request(ctx, create); err != nil {
		t.Fatal(err)
	}
	req := kmsg.NewPtrProduceRequest()
	req.Acks, req.TimeoutMillis = -1, 5000
	req.Topics = []kmsg.ProduceRequestTopic{{Topic: topic, Partitions: []kmsg.ProduceRequestTopicPartition{{Records: batch}}}}
	resp, err := cl.Request(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	return resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0].ErrorCode
}

// TestB6_MissingKcatFailsTheTests: without kcat a test that needs it fails and says how
// kcat is installed. The test runs itself again, with nothing in PATH.
func TestB6_MissingKcatFailsTheTests(t *testing.T) {
	const again = "IDEMPOTENCE_TEST_WITHOUT_KCAT"
	if os.Getenv(again) != "" {
		needKcat(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), again+"=1", "PATH=")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--- FAIL: "+t.Name()) || !strings.Contains(string(out), "apt-get install kcat") {
		t.Errorf("without kcat: %v\n%s", err, out)
	}
}
