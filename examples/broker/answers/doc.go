// Package answers holds the measurements of what producers do with an error
// code in a Produce response. It has only tests: they run six records through
// the example broker with each of franz-go, Sarama, librdkafka, KafkaJS and
// @platformatic/kafka, and answer the fourth Produce request with the code.
//
// The table of [what each client does], which the documents of package
// idempotence quote, is the table of the test.
//
// librdkafka comes with kcat. The two Node clients need
//
//	npm ci --prefix examples/broker/answers/testdata/clients
//
// once, with Node 20 or later.
//
// [what each client does]: https://github.com/idempotence-go/idempotence/blob/main/examples/broker/answers/answers_test.go
package answers
