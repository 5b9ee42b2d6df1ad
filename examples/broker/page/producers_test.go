package page

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

func TestProducersInPages(t *testing.T) {
	r := start(t, server.Config{Partitions: 1})
	const producers = 7
	for i := range producers {
		r.produce(i + 1)
	}
	var all []idempotence.ProducerState
	path := "/debug/producers?topic=orders&partition=0&limit=3"
	for pages := 1; ; pages++ {
		code, body := r.get(path)
		if code != 200 {
			t.Fatalf("%s: %d %s", path, code, body)
		}
		var page producersPage
		if err := json.Unmarshal([]byte(body), &page); err != nil {
			t.Fatal(err)
		}
		if page.Len != producers || page.EndOffset != 28 {
			t.Errorf("page %d: %d producers, end offset %d; want %d and 28", pages, page.Len, page.EndOffset, producers)
		}
		all = append(all, page.Producers...)
		if page.Next == nil {
			if pages != 3 {
				t.Errorf("%d pages, want 3", pages)
			}
			break
		}
		path = fmt.Sprintf("/debug/producers?topic=orders&partition=0&limit=3&after=%d", *page.Next)
	}
	var want []idempotence.ProducerState
	view, _ := r.server.Partition(topic, 0)
	for p := range view.Producers() {
		want = append(want, p)
	}
	if diff := cmp.Diff(want, all); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestProducersOfNothing(t *testing.T) {
	r := start(t, server.Config{Partitions: 1})
	r.produce(1)
	for path, want := range map[string]int{
		"/debug/producers":                                                    404,
		"/debug/producers?topic=orders&partition=1":                           404,
		"/debug/producers?topic=orders&partition=-1":                          404,
		"/debug/producers?topic=nothing&partition=0":                          404,
		"/debug/producers?topic=orders&partition=x":                           400,
		"/debug/producers?topic=orders&partition=0&limit=0":                   400,
		"/debug/producers?topic=orders&partition=0&limit=1001":                400,
		"/debug/producers?topic=orders&partition=0&after=y":                   400,
		"/debug/producers?topic=orders&partition=0&after=9223372036854775807": 200,
	} {
		if code, body := r.get(path); code != want {
			t.Errorf("%s: %d %s, want %d", path, code, body, want)
		}
	}
	if n := len(r.server.Partitions()); n != 1 {
		t.Errorf("%d partitions after looking, want 1", n)
	}
}
