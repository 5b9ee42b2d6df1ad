package lesson

import (
	"errors"

	"github.com/idempotence-go/idempotence"
)

// A Rule is one of the rules by which a batch is judged.
type Rule struct {
	Number string `json:"number"` // as in the package comment of idempotence
	Text   string `json:"text"`
}

var (
	rule1 = &Rule{"1", "Numbers must not be negative, and a batch has at least one record."}
	rule2 = &Rule{"2", "A producer that is not known must start at sequence 0."}
	rule3 = &Rule{"3", "A batch of an older epoch is refused."}
	rule4 = &Rule{"4", "A newer epoch must start at sequence 0. Once its first batch is stored, the batches of the older epoch are forgotten."}
	rule5 = &Rule{"5", "A batch with exactly the sequences of one of the last five is a copy of it."}
	rule6 = &Rule{"6", "A batch that begins right after the newest one is appended."}
	rule7 = &Rule{"7", "Anything else is out of order: a gap, an overlap, or a copy too old to be recognised."}

	ruleInFlight = &Rule{"in flight", "A copy of a batch whose append has not ended must wait: the append may still fail."}
)

// ruleOf returns the rule by which a batch was judged. epoch is that of its
// producer before, if it was known.
func ruleOf(b idempotence.Batch, res idempotence.Result, err error, epoch int16, known bool) *Rule {
	switch {
	case errors.Is(err, idempotence.ErrInvalidBatch):
		return rule1
	case errors.Is(err, idempotence.ErrInFlight):
		return ruleInFlight
	case !known:
		return rule2
	case b.Epoch < epoch:
		return rule3
	case b.Epoch > epoch:
		return rule4
	case res.Verdict == idempotence.Duplicate:
		return rule5
	case res.Verdict == idempotence.Append:
		return rule6
	}
	return rule7
}
