module github.com/idempotence-go/idempotence/examples/loop

go 1.26.0

require github.com/idempotence-go/idempotence v0.0.0

replace github.com/idempotence-go/idempotence => ../..
