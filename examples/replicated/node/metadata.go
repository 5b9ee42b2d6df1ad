package node

// This file tells clients what there is: ApiVersions and Metadata.

import (
	"net"
	"slices"
	"strconv"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/wire"
	"github.com/idempotence-go/idempotence/examples/replicated/statemachine"
)

// apis are the requests served. Produce ends where topic ids begin, and so
// does Fetch; InitProducerID where two-phase commit does.
var apis = wire.APIs{
	int16(kmsg.Produce):        {Min: 3, Max: 11},
	int16(kmsg.Fetch):          {Min: 4, Max: 12},
	int16(kmsg.ListOffsets):    {Min: 1, Max: 6},
	int16(kmsg.Metadata):       {Min: 1, Max: 9},
	int16(kmsg.ApiVersions):    {Min: 0, Max: 3},
	int16(kmsg.InitProducerID): {Min: 0, Max: 4},
}

func apiVersions() *kmsg.ApiVersionsResponse {
	resp := kmsg.NewPtrApiVersionsResponse()
	for key, served := range apis {
		k := kmsg.NewApiVersionsResponseApiKey()
		k.ApiKey, k.MinVersion, k.MaxVersion = key, served.Min, served.Max
		resp.ApiKeys = append(resp.ApiKeys, k)
	}
	slices.SortFunc(resp.ApiKeys, func(a, b kmsg.ApiVersionsResponseApiKey) int {
		return int(a.ApiKey) - int(b.ApiKey)
	})
	return resp
}

// unsupportedApiVersions answers a client that is newer than the broker; it
// asks again with a version from the list.
func unsupportedApiVersions() *kmsg.ApiVersionsResponse {
	resp := apiVersions()
	resp.ErrorCode = kerr.UnsupportedVersion.Code
	return resp
}

// leader returns the id of the leader and its epoch, which is the term.
func (n *Node) leader() (id, epoch int32) {
	// In this order, a leader may get the epoch of its successor, which does not
	// matter, but never the other way round: clients do not go back to the
	// leader of a lower epoch.
	id = n.Leader()
	return id, int32(n.raft.CurrentTerm())
}

// metadata tells where the partitions are, and is the request by which a
// client's first use of a topic creates it.
func (n *Node) metadata(h wire.Header, req *kmsg.MetadataRequest) *kmsg.MetadataResponse {
	resp := kmsg.NewPtrMetadataResponse()
	for _, p := range n.cfg.Peers {
		broker := kmsg.NewMetadataResponseBroker()
		e := endpoint(p)
		broker.NodeID, broker.Host, broker.Port = e.NodeID, e.Host, e.Port
		resp.Brokers = append(resp.Brokers, broker)
	}
	resp.ControllerID, _ = n.leader()
	resp.ClusterID = kmsg.StringPtr("idempotence-replicated")
	if req.Topics == nil {
		for _, t := range n.machine.Topics() {
			resp.Topics = append(resp.Topics, n.topicMetadata(t.Name, t, nil))
		}
	}
	// Up to version 3 a request for a topic always creates it.
	create := req.AllowAutoTopicCreation || req.Version < 4
	for _, asked := range req.Topics {
		t, err := n.machine.Topic(*asked.Topic)
		if err != nil && create {
			t, err = n.createTopic(h, *asked.Topic)
		}
		resp.Topics = append(resp.Topics, n.topicMetadata(*asked.Topic, t, err))
	}
	return resp
}

// createTopic creates a topic. A node that does not lead asks the leader to: some
// clients keep asking the same node.
func (n *Node) createTopic(h wire.Header, name string) (*statemachine.Topic, error) {
	var err error
	switch {
	case n.Ready():
		_, err = n.propose(statemachine.CreateTopic(name, n.cfg.Topic))
	case h.ClientID == forwardedClientID:
		err = kerr.NotLeaderForPartition
	default:
		err = n.leaderCreatesTopic(name)
	}
	if err != nil {
		return nil, topicError(err)
	}
	t, err := n.machine.Topic(name)
	if err != nil { // not applied here yet
		err = kerr.LeaderNotAvailable
	}
	return t, err
}

// leaderCreatesTopic has the leader create a topic.
func (n *Node) leaderCreatesTopic(name string) error {
	req := kmsg.NewPtrMetadataRequest()
	req.AllowAutoTopicCreation = true
	req.Topics = []kmsg.MetadataRequestTopic{{Topic: &name}}
	resp, err := n.askLeader(req)
	if err != nil {
		return err
	}
	for _, t := range resp.(*kmsg.MetadataResponse).Topics {
		err = kerr.ErrorForCode(t.ErrorCode)
	}
	return err
}

// topicError is the error of a topic that was not created. What raft gave up on
// is to be asked for again; librdkafka does that for this error of a topic, and
// gives up at those that a partition would have.
func topicError(err error) error {
	switch errorCode(err) {
	case kerr.NotLeaderForPartition.Code, kerr.RequestTimedOut.Code:
		return kerr.LeaderNotAvailable
	}
	return err
}

func (n *Node) topicMetadata(name string, t *statemachine.Topic, err error) kmsg.MetadataResponseTopic {
	resp := kmsg.NewMetadataResponseTopic()
	resp.Topic = &name
	if err != nil {
		resp.ErrorCode = errorCode(err)
		return resp
	}
	leader, epoch := n.leader()
	for i := range t.Partitions {
		p := kmsg.NewMetadataResponseTopicPartition()
		p.Partition = int32(i)
		p.Leader, p.LeaderEpoch = leader, epoch
		if leader < 0 {
			p.ErrorCode = kerr.LeaderNotAvailable.Code
		}
		for _, peer := range n.cfg.Peers {
			p.Replicas = append(p.Replicas, peer.ID)
			p.ISR = append(p.ISR, peer.ID)
		}
		resp.Partitions = append(resp.Partitions, p)
	}
	return resp
}

// endpoint is where clients reach a node. Start has checked the address.
func endpoint(p Peer) kmsg.ProduceResponseBroker {
	e := kmsg.NewProduceResponseBroker()
	host, port, _ := net.SplitHostPort(p.Client)
	number, _ := strconv.ParseUint(port, 10, 16)
	e.NodeID, e.Host, e.Port = p.ID, host, int32(number)
	return e
}
