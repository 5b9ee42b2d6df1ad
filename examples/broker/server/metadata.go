package server

// This file is ApiVersions and Metadata.

import (
	"slices"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/idempotence-go/idempotence/examples/broker/wire"
)

// nodeID is this broker: the controller, and the leader and only replica of all
// partitions.
const nodeID = 1

// servedAPIs returns the requests that are served. Later versions of Produce and
// Fetch name topics by id, later ones of InitProducerID have two-phase commit,
// later ones of AddPartitionsToTxn are for brokers, and later ones of OffsetCommit
// and OffsetFetch for members of a group of KIP-848.
func servedAPIs(transactionVersion int16) wire.APIs {
	apis := wire.APIs{
		int16(kmsg.Produce):              {Min: 3, Max: implicitProduce},
		int16(kmsg.Fetch):                {Min: 4, Max: 12},
		int16(kmsg.ListOffsets):          {Min: 1, Max: 6},
		int16(kmsg.Metadata):             {Min: 1, Max: 9},
		int16(kmsg.FindCoordinator):      {Min: 0, Max: 4},
		int16(kmsg.ApiVersions):          {Min: 0, Max: 3},
		int16(kmsg.InitProducerID):       {Min: 0, Max: 4},
		int16(kmsg.AddPartitionsToTxn):   {Min: 0, Max: 3},
		int16(kmsg.AddOffsetsToTxn):      {Min: 0, Max: 3},
		int16(kmsg.TxnOffsetCommit):      {Min: 0, Max: implicitTxnOffsetCommit},
		int16(kmsg.EndTxn):               {Min: 0, Max: raisingEndTxn},
		int16(kmsg.WriteTxnMarkers):      {Min: 0, Max: 2},
		int16(kmsg.DescribeProducers):    {Min: 0, Max: 0},
		int16(kmsg.ListTransactions):     {Min: 0, Max: 0},
		int16(kmsg.DescribeTransactions): {Min: 0, Max: 0},
		int16(kmsg.OffsetCommit):         {Min: 2, Max: 8},
		int16(kmsg.OffsetFetch):          {Min: 1, Max: manyGroupsOffsetFetch},
	}
	if transactionVersion < 2 {
		apis[int16(kmsg.Produce)] = wire.Versions{Min: 3, Max: implicitProduce - 1}
		apis[int16(kmsg.TxnOffsetCommit)] = wire.Versions{Min: 0, Max: implicitTxnOffsetCommit - 1}
		apis[int16(kmsg.EndTxn)] = wire.Versions{Min: 0, Max: raisingEndTxn - 1}
	}
	return apis
}

// Versions of requests from which on they are those of transactions of version 2
// (KIP-890).
const (
	implicitProduce         = 12 // adds its partition to the transaction
	implicitTxnOffsetCommit = 5  // adds its group
	raisingEndTxn           = 5  // raises the epoch
)

// manyGroupsOffsetFetch is the version of OffsetFetch from which on it is for
// several groups.
const manyGroupsOffsetFetch = 8

// transactionFeature is the feature that tells clients which version of
// transactions to use.
const transactionFeature = "transaction.version"

func (s *Server) apiVersions() *kmsg.ApiVersionsResponse {
	resp := kmsg.NewPtrApiVersionsResponse()
	resp.FinalizedFeaturesEpoch = 0 // clients ignore features at -1
	supported := kmsg.NewApiVersionsResponseSupportedFeature()
	supported.Name, supported.MaxVersion = transactionFeature, 2
	resp.SupportedFeatures = append(resp.SupportedFeatures, supported)
	finalized := kmsg.NewApiVersionsResponseFinalizedFeature()
	finalized.Name = transactionFeature
	finalized.MinVersionLevel, finalized.MaxVersionLevel = s.cfg.TransactionVersion, s.cfg.TransactionVersion
	resp.FinalizedFeatures = append(resp.FinalizedFeatures, finalized)
	for key, served := range s.apis {
		k := kmsg.NewApiVersionsResponseApiKey()
		k.ApiKey, k.MinVersion, k.MaxVersion = key, served.Min, served.Max
		resp.ApiKeys = append(resp.ApiKeys, k)
	}
	slices.SortFunc(resp.ApiKeys, func(a, b kmsg.ApiVersionsResponseApiKey) int {
		return int(a.ApiKey) - int(b.ApiKey)
	})
	return resp
}

// unsupportedApiVersions answers a client that is newer than the broker. The
// client asks again with the version that is named (KIP-511). It would take a
// full list as it is, and not see the features, which this answer cannot have.
func (s *Server) unsupportedApiVersions() *kmsg.ApiVersionsResponse {
	resp := kmsg.NewPtrApiVersionsResponse()
	resp.ErrorCode = kerr.UnsupportedVersion.Code
	k := kmsg.NewApiVersionsResponseApiKey()
	k.ApiKey = int16(kmsg.ApiVersions)
	k.MinVersion, k.MaxVersion = s.apis[k.ApiKey].Min, s.apis[k.ApiKey].Max
	resp.ApiKeys = append(resp.ApiKeys, k)
	return resp
}

// metadata tells clients where the partitions are. It creates a topic that a
// client asks for.
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
		for _, name := range c.server.topics.names() {
			resp.Topics = append(resp.Topics, c.server.topicMetadata(name, false))
		}
	}
	// Up to version 3 a request for a topic always creates it.
	create := req.AllowAutoTopicCreation || req.Version < 4
	answered := make(map[string]bool)
	for _, t := range req.Topics {
		if name := *t.Topic; !answered[name] {
			answered[name] = true // and is named once, however often it was asked for
			resp.Topics = append(resp.Topics, c.server.topicMetadata(name, create))
		}
	}
	return resp, nil
}

func (s *Server) topicMetadata(name string, create bool) kmsg.MetadataResponseTopic {
	resp := kmsg.NewMetadataResponseTopic()
	resp.Topic = &name
	t, err := s.topics.get(name, create)
	if err != nil {
		resp.ErrorCode = errorCode(err)
		return resp
	}
	for i, partition := range t {
		p := kmsg.NewMetadataResponseTopicPartition()
		p.Partition = int32(i)
		p.Leader, p.LeaderEpoch = nodeID, 0
		p.Replicas, p.ISR = []int32{nodeID}, []int32{nodeID}
		if partition.offlineReason() != nil {
			p.OfflineReplicas = []int32{nodeID}
		}
		resp.Partitions = append(resp.Partitions, p)
	}
	return resp
}

// advertised returns the address that clients are told. By default it is the one
// that this client has connected to.
func (c *conn) advertised() (kmsg.MetadataResponseBroker, error) {
	broker := kmsg.NewMetadataResponseBroker()
	addr := c.server.cfg.Advertise
	if addr == "" {
		addr = c.net.LocalAddr().String()
	}
	host, port, err := splitHostPort(addr)
	broker.NodeID, broker.Host, broker.Port = nodeID, host, int32(port)
	return broker, err
}
