package page

// This file is /debug/producers: what is remembered of the producers of a
// partition, in pages.

import (
	"cmp"
	"fmt"
	"net/http"
	"strconv"

	"github.com/idempotence-go/idempotence"
	"github.com/idempotence-go/idempotence/examples/broker/server"
)

// Sizes of a page of producers.
const (
	defaultPageSize = 100
	maxPageSize     = 1000
)

// A producersPage is the answer: ProducerStates as package idempotence has them.
type producersPage struct {
	Topic     string
	Partition int32
	EndOffset int64
	Len       int // producers remembered
	Producers []idempotence.ProducerState

	// Next is to be given as after to get the next page. It is absent on the
	// last one.
	Next *int64 `json:",omitempty"`
}

// serveProducers answers /debug/producers?topic=T&partition=P, from the producer
// behind the id given as after, with at most limit producers.
func (p *Page) serveProducers(w http.ResponseWriter, r *http.Request) {
	sel, err := parseSelection(r)
	after, errAfter := strconv.ParseInt(cmp.Or(r.FormValue("after"), "-1"), 10, 64)
	limit, errLimit := strconv.Atoi(cmp.Or(r.FormValue("limit"), strconv.Itoa(defaultPageSize)))
	if err := cmp.Or(err, errAfter, errLimit); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if limit < 1 || limit > maxPageSize {
		http.Error(w, fmt.Sprintf("limit: %d, want 1 to %d", limit, maxPageSize), http.StatusBadRequest)
		return
	}
	var view server.PartitionView
	found := false
	if s := p.broker.Load(); s != nil {
		view, found = s.Partition(sel.topic, sel.partition)
	}
	if !found {
		http.Error(w, fmt.Sprintf("no partition %q %d", sel.topic, sel.partition), http.StatusNotFound)
		return
	}
	var page producersPage
	if p.gate.pass(w, r, func() { page = pageOf(view, after, limit) }) {
		writeJSON(w, page)
	}
}

func pageOf(v server.PartitionView, after int64, limit int) producersPage {
	page := producersPage{Topic: v.Topic(), Partition: v.Index(), Len: v.Len(), Producers: []idempotence.ProducerState{}}
	_, _, page.EndOffset = v.Offsets()
	for p := range v.Producers() {
		if p.ProducerID <= after {
			continue
		}
		if len(page.Producers) == limit {
			next := page.Producers[limit-1].ProducerID
			page.Next = &next
			break
		}
		page.Producers = append(page.Producers, p)
	}
	return page
}
