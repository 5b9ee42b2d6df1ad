module github.com/idempotence-go/idempotence/examples/history

go 1.26.0

require (
	github.com/anishathalye/porcupine v1.3.1
	github.com/idempotence-go/idempotence v0.0.0
)

replace github.com/idempotence-go/idempotence => ../..
