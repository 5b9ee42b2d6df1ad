package server

// This file tells clients what there is: ApiVersions and Metadata.

import (
	"net"
	"slices"
	"strconv"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/wire"
)

// nodeID is this broker's: leader, controller and only replica of everything.
const nodeID = 1

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

// metadata tells where the partitions are, and is the request by which a
// client's first use of a topic creates it.
func (c *conn) metadata(req *kmsg.MetadataRequest) (*kmsg.MetadataResponse, error) {
	broker, err := c.advertised()
	if err != nil {
		return nil, err
	}
	resp := kmsg.NewPtrMetadataResponse()
	resp.Brokers = append(resp.Brokers, broker)
	resp.ControllerID = nodeID
	resp.ClusterID = kmsg.StringPtr("idempotence-example")
	if req.Topics == nil {
		for _, name := range c.topics.names() {
			resp.Topics = append(resp.Topics, c.topicMetadata(name, false))
		}
	}
	// Up to version 3 a request for a topic always creates it.
	create := req.AllowAutoTopicCreation || req.Version < 4
	for _, t := range req.Topics {
		resp.Topics = append(resp.Topics, c.topicMetadata(*t.Topic, create))
	}
	return resp, nil
}

func (c *conn) topicMetadata(name string, create bool) kmsg.MetadataResponseTopic {
	resp := kmsg.NewMetadataResponseTopic()
	resp.Topic = &name
	t, err := c.topics.get(name, create)
	if err != nil {
		resp.ErrorCode = errorCode(err)
		return resp
	}
	for i := range t {
		p := kmsg.NewMetadataResponseTopicPartition()
		p.Partition = int32(i)
		p.Leader, p.LeaderEpoch = nodeID, 0
		p.Replicas, p.ISR = []int32{nodeID}, []int32{nodeID}
		resp.Partitions = append(resp.Partitions, p)
	}
	return resp
}

// advertised is the address clients are told to come to. Without one set, it
// is the address this client has come to already.
func (c *conn) advertised() (kmsg.MetadataResponseBroker, error) {
	broker := kmsg.NewMetadataResponseBroker()
	addr := c.cfg.Advertise
	if addr == "" {
		addr = c.net.LocalAddr().String()
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return broker, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	broker.NodeID, broker.Host, broker.Port = nodeID, host, int32(n)
	return broker, err
}
