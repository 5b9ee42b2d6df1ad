/*
Package idempotence is the broker's half of Kafka's idempotent producer. It judges
each batch that arrives: append it, answer it from memory, or refuse it. A batch that
a producer sends again is then in the log exactly once.

An idempotent producer numbers what it sends. Each batch carries a producer id, an
epoch and the sequence of its first record, and a retry carries the same three. This
package remembers the last five batches of every producer. It recognises a retry,
notices a gap, and fences a producer that has been replaced. It also follows
transactions. The log, the disk, replication and the clients stay with the broker.

# Usage

The primary object is a [ProducerStateManager]. Create one for each partition, since
sequences count per partition. For each batch that arrives, in this order:

 1. Take the partition's append lock, and hold it through step 3.
 2. Check. On an error or on [Duplicate], append nothing and go to step 4.
 3. On [Append], append the batch to your log, then Commit it with the base offset
    that the log gave. If the append fails, do not call Commit: nothing is
    remembered, and the retry is judged as if this attempt had never been made.
 4. Release the lock and answer the producer.

The loop:

	func (p *Partition) Produce(b idempotence.Batch, records []byte) (int64, error) {
		p.appendLock.Lock()
		defer p.appendLock.Unlock()
		res, err := p.producers.CheckBatch(b)
		if err != nil {
			return -1, err // refused; nothing has changed
		}
		if res.Verdict == idempotence.Duplicate {
			return res.BaseOffset, nil // in the log already
		}
		base, err := p.log.Append(records)
		if err != nil {
			return -1, err // nothing is remembered; the producer may retry
		}
		if err := p.producers.CommitBatch(b, base); err != nil {
			p.takeOffline(err) // the log and the state have parted
			return -1, err
		}
		return base, nil
	}

The program examples/loop is this loop with a restart, on two screens.

[ParseBatch] reads a [Batch] from the header of a record batch. Check and Commit are
shorthand for a batch that is not transactional. A batch without a producer id
([NoProducerID]) is always appended; Commit it like the others, or call
[ProducerStateManager.Advance].

If your log cannot tell whether an append failed (a short write, a failed sync, a
time-out), find out before the next batch: cut off what may be there, or take the
partition offline. A batch that is in the log and not remembered will be stored again.

A duplicate is a success. Acknowledge it on the same terms as its first copy: if that
must wait for replicas, so must the duplicate.

Producer ids are handed out by the broker (InitProducerId). Never hand one out twice:
stay above [ProducerStateManager.MaxProducerID] of every partition, and refuse a batch
with an id that you have not handed out, or a client can use up the ids.

# Who serialises

The manager is safe for concurrent use, but it cannot see your log. If no lock is held
from Check to Commit, two copies of a batch can both be judged Append, and both are
appended. Commit judges again, so the second Commit is refused with
[ErrDuplicateSequence] and the state stays sound, but the log holds the batch twice.

A refused Commit means that the log and the state have parted. Do not acknowledge the
batch, and append nothing more until you have cut it off the log or rebuilt the state
from the log. The reasons are: the lock was not held, Check was skipped, the offset is
not the batch's own ([ErrOffsetOrder]), or the producer was forgotten between the two:
call [ProducerStateManager.Expire] under the append lock, and do not use both loops on
one partition with Config.MaxProducers.

# The rules

A batch with producer id p, epoch e, first sequence s and last sequence l is judged by
the first of these that applies. Sequences are in 0..2147483647 and count records;
after 2147483647 comes 0.

 0. p is -1: append. Nothing is remembered.
 1. p < -1, e < 0, s < 0 or a count below 1: [ErrInvalidBatch].
 2. p is unknown: s must be 0, else [ErrUnknownProducer]; see "Unknown producers".
 3. e is older than the remembered epoch: [ErrFenced].
 4. e is newer: s must be 0, else [ErrOutOfOrderSequence]. Commit adopts the epoch and
    forgets the batches of the older one.
 5. s and l are exactly those of a remembered batch: duplicate.
 6. s is one after the newest l, or 0 if only the epoch is remembered: append.
 7. Anything else is [ErrOutOfOrderSequence]: a gap, an overlap, a retry that was split
    or merged, a range that has left the window of five.

T1. If 4 or 6 would append and a transaction of p is open: a batch that is not
transactional is [ErrInvalidTxnState]; a newer epoch is [ErrConcurrentTransactions].

A refusal changes nothing, so a refused epoch is not adopted. [KafkaErrorCode] gives the
code of each error, and the comment of each error says when it is returned. A failure
of your own is no error of this package and has code -1, which clients do not retry:
answer it with 56 KAFKA_STORAGE_ERROR or 6 NOT_LEADER_OR_FOLLOWER instead. Send the base
offset -1 with every error.

# What a producer does with an answer

Measured: the fourth Produce request of a session is answered with the code, and nothing
is stored. "Again" is the same batch again; "fails" means that its records fail.

	code       franz-go 1.22      Sarama 1.61        librdkafka 2.11         KafkaJS, @platformatic/kafka
	2          fails, new epoch   again              again                   again
	6, 7, 56   again              again              again                   again
	45         new epoch, again   fails, new epoch   fatal                   fails, same sequence next
	46         as written         as written         as written              fails, same sequence next
	47         new epoch, again   fails, new epoch   fails, new epoch        fails, same epoch next
	59         new epoch, again   fails, new epoch   new epoch, again        fails, same sequence for ever
	87, -1     fails, new epoch   fails, new epoch   fails, new epoch        fails, same sequence next

So 45 ends a librdkafka producer; it is right only if data is missing. 47 stops no client
by itself. 59 leaves the Node.js clients stuck. Before you send 45, 47 or 59, make sure
that you still lead the partition.

# Unknown producers

A producer is unknown if it is new or was forgotten. The two look alike, and
Config.UnknownProducer says which mistake to risk.

  - [StartAtZero], the default: a producer whose first batch was lost is noticed. A
    forgotten one gets 59, which the Node.js clients do not survive.
  - [AcceptAny], as Kafka 2.5 to 4.4: every client goes on after its state was lost, and
    a lost batch before it is not noticed. Choose it if you have clients other than
    franz-go, Sarama and librdkafka.
  - [StartAtZeroOnNewLog], as Kafka from 4.5: AcceptAny, but on a log that has never held
    a record the first batch of a producer cannot be overtaken by its second.

None of them recognises a retry of what was stored before the producer was forgotten.

# Appends that finish later

The first loop lets one batch at a time through. If an append ends with a shared sync, a
replica's answer or an upload, use the second loop: [ProducerStateManager.Reserve] judges
a batch against everything remembered and everything in flight, and gives it its place.
The [Reservation] ends in Commit or Abort when the append has ended. The example of
Reserve is a complete handler. Its duties differ from the first loop's:

 1. Hold a lock over Reserve and the hand-over to the log, so that the batches of a
    producer enter the log in the order of their reservations. Release it before you
    wait.
 2. End each Reservation in exactly one Commit or Abort. Commits may come in any order.
 3. Never acknowledge on [ErrInFlight], the answer to a copy of a batch in flight. Wait
    for [InFlightError].Done and ask again, or answer 7 REQUEST_TIMED_OUT. Something must
    flush a lazy log meanwhile. If an earlier append of the producer can still fail when
    Commit returns, wait until CheckBatch answers Duplicate before you acknowledge.
 4. When an append fails, drop what is queued behind it of that producer, cut off what is
    written, and Abort, all under the lock of duty 1. Later reservations of the producer
    end with [ErrAbandoned]. [ErrGap] says that one of them is committed: cut the log
    before it, or give up leadership.
 5. When leadership is lost, or a Commit fails, call
    [ProducerStateManager.AbandonReservations]. Once the log has settled, replay it from
    the EndOffset of a [Snapshot] taken afterwards and call
    [ProducerStateManager.ReplayedTo] with its end, or cut it and call
    [ProducerStateManager.Truncate], before you judge again.

# Transactions

A batch with Transactional set opens a transaction of its producer on this partition, and
a [Marker] ends it. The coordinator is yours. Two handlers use what the manager knows:

		func (p *Partition) WriteMarker(ctx context.Context, k idempotence.Marker) error {
			p.appendLock.Lock()
			err := p.producers.CheckMarker(k)
			var offset int64
			if err == nil {
				if offset, err = p.log.AppendMarker(k); err == nil {
					err = p.producers.CommitMarker(k, offset) // an error: the log and the state have parted
				}
			}
			p.appendLock.Unlock()
			if err != nil {
				return err
			}
			return p.log.WaitReplicated(ctx, offset+1)
		}

		func (p *Partition) FetchCommitted(from int64) (records []byte, aborted []idempotence.AbortedTransaction, err error) {
			limit := p.producers.LastStableOffset(p.log.HighWatermark())
			records, end, err := p.log.Read(from, limit)
			if err == nil {
				aborted, err = p.producers.AbortedTransactions(from, end)
			}
			return records, aborted, err
		}

	 1. Write a marker under the append lock, like a batch. In the second loop, use
	    [ProducerStateManager.ReserveMarker].
	 2. Acknowledge it when it is durable.
	 3. Call LastStableOffset first, then read the records, then call AbortedTransactions.
	 4. ListOffsets "latest" at READ_COMMITTED is LastStableOffset.
	 5. Call [ProducerStateManager.AdvanceStart] when the log's start moves.
	 6. Keep compaction and deletion below LastStableOffset, and delete a marker only after
	    its data.

[ProducerStateManager.OldestTransaction] finds a transaction that hangs.

# In a replicated state machine

If the log is replicated by an engine such as Raft, decide in the state machine: propose
what clients send, and call [ProducerStateManager.Apply] when the command is applied, on
every replica alike. Nothing is reserved, and nothing is to be done when a leader changes.

 1. Answer early only what cannot become untrue: Duplicate, ErrFenced, ErrInvalidBatch.
    Propose everything else, including gaps.
 2. Configuration and time are part of the log: Config is fixed, and Expire is a command.
 3. Take a Snapshot at the index that it is stored with. All replicas then hold the same
    bytes. Stats differ, since they count answers.
 4. Append after Apply, and stop the process if you cannot.

The program examples/replicated does this. If the partition's log is the replicated log,
use the second loop instead, with a barrier before the first judgement of a term.

# Recovery

The state follows from the log. Hold back the partition's appends during each of these.

 1. At start, find the end of the log: [VerifyLog] on its newest segment. Cut it off there
    if the error is [ErrTornTail]. Load the newest snapshot ([SnapshotDir.Load], or Restore
    from elsewhere, if LogEndOffset is not past the log's end). Replay the log from its
    EndOffset, or from the log's start: ReplayLog, or Replay and ReplayMarker for a log
    of another format. If an emptied log begins at 500, call AdvanceStart(500) first. Save
    a snapshot if much was replayed.
 2. When a segment is full, and at a clean shutdown, sync the log, then save
    [ProducerStateManager.Snapshot] without the append lock ([SnapshotDir.Save]).
 3. On a follower, Replay each batch and ReplayMarker each marker from the leader. Save
    snapshots and call Expire as a leader does.
 4. When the log is cut, call [ProducerStateManager.Truncate] and [SnapshotDir.DropAfter].
    If Truncate returns false, call Reset and go on as at start.
 5. When the log is deleted and created again, call [ProducerStateManager.Reset] and
    DropAfter(-1). When only its oldest records are deleted, call AdvanceStart.

# Forgetting

Call [ProducerStateManager.Expire] on a ticker. It forgets producers that have been idle
for Config.Expiration, 24 hours by default. Config.MaxProducers bounds how many are
remembered. Remember producers longer than they retry (delivery.timeout.ms, two minutes
by default) and longer than your longest outage.

# Mistakes that are caught, and those that cannot be

With Config.Contiguous, each of these is [ErrOffsetOrder] at the first batch at which it
can be known: one manager for two partitions; a Commit before an append that then fails;
the last offset given for the base offset; an offset inside another batch; a log that was
cut without Truncate, or created again without Reset; a restored state without a replay; a
forgotten Commit. Without it, an offset inside the producer's newest batch is caught.

In any case these are caught: no append lock from Check to Commit (refused by Commit); a
second Commit or Abort of a Reservation; a snapshot of another log (Config.LogID) or of a
log that was cut since.

These cannot be: an acknowledgement before the append is durable; a Commit after an append
that did not happen, if nothing follows; a producer id handed out twice; a clock that jumps
ahead; a high watermark beyond what is replicated.

# What is left out

I/O, except that [SnapshotDir] reads and writes its files when called; goroutines; clocks;
logging; package-level state. Time is an argument, so two managers that are given the same
calls are in the same state, and tests need not sleep. Every refusal is returned with its
facts, and [ProducerStateManager.Stats] counts them.
*/
package idempotence
