package answers

// The clients. Each sends its records one by one to partition 0 of a topic, goes
// on after a failure, and returns which records were acknowledged.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

const topic = "t"

// record returns the value of record i.
func record(i int) string { return strconv.Itoa(i) }

// A client sends n records to each of several brokers, and returns which were
// acknowledged by the broker at each address. Its error is for a client that did
// not work, not for a record that failed.
type client func(ctx context.Context, addrs []string, n int) (acknowledged map[string][]string, err error)

// each makes a client of one that sends to one broker.
func each(produce func(ctx context.Context, addr string, n int) ([]string, error)) client {
	return func(ctx context.Context, addrs []string, n int) (map[string][]string, error) {
		results := make([][]string, len(addrs))
		g, ctx := errgroup.WithContext(ctx)
		for i, addr := range addrs {
			g.Go(func() (err error) {
				results[i], err = produce(ctx, addr, n)
				return err
			})
		}
		err := g.Wait()
		acknowledged := make(map[string][]string)
		for i, addr := range addrs {
			acknowledged[addr] = results[i]
		}
		return acknowledged, err
	}
}

func franz(ctx context.Context, addr string, n int) ([]string, error) {
	cl, err := kgo.NewClient(
		kgo.SeedBrokers(addr),
		kgo.DefaultProduceTopic(topic),
		kgo.AllowAutoTopicCreation(),
		kgo.ProducerBatchCompression(kgo.NoCompression()),
		kgo.RetryBackoffFn(func(int) time.Duration { return 5 * time.Millisecond }),
		kgo.MetadataMinAge(10*time.Millisecond),
	)
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	var acknowledged []string
	for i := range n {
		if cl.ProduceSync(ctx, kgo.StringRecord(record(i))).FirstErr() == nil {
			acknowledged = append(acknowledged, record(i))
		}
	}
	return acknowledged, ctx.Err()
}

func saramaClient(ctx context.Context, addr string, n int) ([]string, error) {
	cfg := sarama.NewConfig()
	cfg.Version = sarama.V2_8_0_0
	cfg.Producer.Idempotent = true
	cfg.Net.MaxOpenRequests = 1
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	cfg.Producer.Retry.Backoff = 10 * time.Millisecond
	cfg.Producer.Return.Successes = true
	cfg.Metadata.Retry.Backoff = 10 * time.Millisecond
	p, err := sarama.NewSyncProducer([]string{addr}, cfg)
	if err != nil {
		return nil, err
	}
	var acknowledged []string
	for i := range n {
		if _, _, err := p.SendMessage(&sarama.ProducerMessage{Topic: topic, Value: sarama.StringEncoder(record(i))}); err == nil {
			acknowledged = append(acknowledged, record(i))
		}
	}
	return acknowledged, errors.Join(ctx.Err(), p.Close())
}

// kcat is librdkafka.
func kcat(ctx context.Context, addr string, n int) ([]string, error) {
	var in strings.Builder
	for i := range n {
		fmt.Fprintln(&in, record(i))
	}
	// One record a request and one request in flight, so that the fourth request
	// holds the fourth record, and no other is under way when it is answered.
	cmd := exec.CommandContext(ctx, "kcat", "-b", addr, "-t", topic, "-p", "0", "-P", "-E", "-vv",
		"-X", "enable.idempotence=true", "-X", "batch.num.messages=1", "-X", "max.in.flight=1",
		"-X", "linger.ms=0", "-X", "retry.backoff.ms=10", "-X", "topic.metadata.refresh.fast.interval.ms=10")
	cmd.Stdin = strings.NewReader(in.String())
	out, err := cmd.CombinedOutput()
	// It exits with 1 after an error of the client, as opposed to one of a record.
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	// The reports come in the order of the records. Their lines do not say which
	// record they are about.
	var acknowledged []string
	reports := 0
	for line := range strings.Lines(string(out)) {
		switch {
		case strings.HasPrefix(line, "% Message delivered to partition"):
			acknowledged = append(acknowledged, record(reports))
			reports++
		case strings.HasPrefix(line, "% Delivery failed for message"):
			reports++
		}
	}
	if reports == 0 {
		return nil, fmt.Errorf("kcat reported no delivery:\n%s", out)
	}
	return acknowledged, nil
}

const nodeClients = "testdata/clients"

// node runs one of the Node clients, which takes a package and, since it takes a
// second to start, all addresses at once.
func node(script, pkg string) client {
	return func(ctx context.Context, addrs []string, n int) (map[string][]string, error) {
		cmd := exec.CommandContext(ctx, "node", append([]string{script, pkg, topic, strconv.Itoa(n)}, addrs...)...)
		cmd.Dir = nodeClients
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("%w\n%s", err, stderr.Bytes())
		}
		acknowledged := make(map[string][]string)
		reports := json.NewDecoder(bytes.NewReader(out))
		for reports.More() {
			var r struct{ Address, Record, Error string }
			if err := reports.Decode(&r); err != nil {
				return nil, err
			}
			if r.Error == "" {
				acknowledged[r.Address] = append(acknowledged[r.Address], r.Record)
			}
		}
		return acknowledged, nil
	}
}

// need fails the test if a tool is missing. A test that were skipped would not be
// seen.
func need(t *testing.T, missing error, install string) {
	t.Helper()
	if missing == nil {
		return
	}
	if testing.Short() {
		t.Skipf("%v; install it with: %s", missing, install)
	}
	t.Fatalf("%v; install it with: %s; or leave it out with: go test -short", missing, install)
}

func needNothing(*testing.T) {}

func needKcat(t *testing.T) {
	t.Helper()
	_, err := exec.LookPath("kcat")
	need(t, err, "apt-get install kcat (or brew install kcat)")
}

func needNode(t *testing.T) {
	t.Helper()
	_, err := exec.LookPath("node")
	need(t, err, "apt-get install nodejs npm, version 20 or later")
	_, err = os.Stat(nodeClients + "/node_modules")
	need(t, err, "npm ci --prefix examples/broker/answers/"+nodeClients)
}
