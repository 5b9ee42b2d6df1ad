package main

func Example() {
	main()
	// Output:
	// first batch:               Append, offset 0
	// next batch, answer lost:   Append, offset 3
	// its retry:                 Duplicate, offset 3
	// a gap, 5 and 6 missing:    code 45: idempotence: out of order sequence: producer 31 epoch 0 sequence 7 count 1: expected sequence 5 in epoch 0
	// another producer:          Append, offset 5
	// a new epoch:               Append, offset 6
	// the producer it replaced:  code 47: idempotence: fenced by a newer epoch: producer 31 epoch 0 sequence 5 count 1: current epoch is 1
	// --- restart
	// replayed at offset 6: [f g]
	// known from the snapshot:   Duplicate, offset 5
	// known from the replay:     Duplicate, offset 6
	// the next batch:            Append, offset 8
}
