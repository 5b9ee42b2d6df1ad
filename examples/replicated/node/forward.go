package node

// This file is what a node asks the leader for on behalf of a client.

import (
	"context"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// forwardedClientID is the client id with which nodes ask the leader. Such a
	// request is not passed on again, or two nodes that each take the other one
	// for the leader would never end.
	forwardedClientID = "idempotence-replicated"

	// forwardTimeout is how long a node waits for the leader's answer.
	forwardTimeout = 2 * time.Second
)

// askLeader has the leader, as far as it is known, answer a request.
func (n *Node) askLeader(req kmsg.Request) (kmsg.Response, error) {
	leader, err := PeerOf(n.cfg.Peers, n.Leader())
	if err != nil {
		return nil, kerr.NotLeaderForPartition
	}
	cl, err := kgo.NewClient(kgo.SeedBrokers(leader.Client), kgo.ClientID(forwardedClientID),
		kgo.DialTimeout(forwardTimeout), kgo.RequestRetries(0))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(n.closing, forwardTimeout)
	defer cancel()
	return cl.SeedBrokers()[0].Request(ctx, req)
}
