// Command broker is a small Kafka-protocol broker that embeds package
// idempotence the way a user would.
package main

func main() {}
