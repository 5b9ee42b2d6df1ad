/*
Package idempotence is the broker's half of Kafka's idempotent producer. It judges
each batch that arrives: append it, answer it from memory, or refuse it. However often
a producer sends a batch, the log holds it once.

An idempotent producer numbers what it sends. Each batch carries a producer id, an
epoch and the sequence of its first record, and a retry carries the same three. This
package remembers the last five batches of each producer. It recognises a retry,
notices a gap, and fences a producer that has been replaced. It also follows
transactions. The log, the disk, replication and the clients stay with the broker.

# Usage

Create a [ProducerStateManager] for each partition, since sequences count per partition.
For each batch that arrives, in this order:

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

The program examples/loop is this loop with a restart. [ParseBatch] reads a [Batch] from
the header of a record batch. Check and Commit are shorthand for a batch that is not
transactional. A batch without a producer id ([NoProducerID]) is always appended; Commit
it like the others, or call [ProducerStateManager.Advance].

If your log cannot tell whether an append failed (a short write, a failed sync, a
time-out), find out before the next batch: cut off what may be there, or take the
partition offline. A batch that is in the log and not remembered will be stored again.

A duplicate is a success. Acknowledge it on the same terms as its first copy: if that
must wait for replicas, so must the duplicate.

The broker hands out producer ids (InitProducerId), and each of them once: stay above
[ProducerStateManager.MaxProducerID] of every partition. Refuse a batch whose id you
have not handed out, since it raises MaxProducerID, perhaps to the largest id there is.

# Who serialises

The manager is safe for concurrent use, but it cannot see your log. If no lock is held
from Check to Commit, two copies of a batch can both be judged Append, and both are
appended. Commit judges again, so the second Commit is refused with
[ErrDuplicateSequence] and the state stays sound, but the log holds the batch twice.

A refused Commit means that the log and the state have parted. Do not acknowledge the
batch, and append nothing more until you have cut it off the log or rebuilt the state
from the log. It has one of these causes:

  - The lock was not held, or Check was skipped.
  - The offset is not the batch's own ([ErrOffsetOrder]).
  - The producer was forgotten between Check and Commit. Call
    [ProducerStateManager.Expire] under the append lock. With Config.MaxProducers, do
    not use both loops on one partition, since a reservation's Commit can evict.

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

Rule T1 is for a batch that 4 or 6 would append while a transaction of p is open. Such a
batch is [ErrInvalidTxnState] if it is not transactional, and
[ErrConcurrentTransactions] if its epoch is newer.

A refusal changes nothing, so a refused epoch is not adopted. The comment of each error
says when it is returned, and [KafkaErrorCode] gives its code. Send the base offset -1
with every error. A failure of your own has code -1, which clients do not retry: answer
it with 56 KAFKA_STORAGE_ERROR or 6 NOT_LEADER_OR_FOLLOWER instead.

# What a producer does with an answer

Measured: the fourth Produce request of a session is answered with the code, and nothing
is stored.

	code       franz-go 1.22      Sarama 1.61        librdkafka 2.11    Node.js (1)            Node.js (2)
	2          fails, new epoch   again              again              again                  again
	6, 7, 56   again              again              again              again                  again
	45         new epoch, again   fails, new epoch   fatal              fails, same sequence   new epoch, again
	46         as written         as written         as written         fails, same sequence   fails, new epoch
	47         new epoch, again   fails, new epoch   fails, new epoch   fails, same sequence   fails, new epoch
	59         new epoch, again   fails, new epoch   new epoch, again   fails, same sequence   new epoch, again
	87, -1     fails, new epoch   fails, new epoch   fails, new epoch   fails, same sequence   fails, new epoch

Node.js (1) is KafkaJS 2.2 and @platformatic/kafka 1.35, (2) is @platformatic/kafka 2.12.
"Again" sends the batch again, and with "new epoch" from sequence 0. "Fails" gives up its
records; the next ones begin a new epoch or take the same sequence. "As written" goes on,
and "fatal" sends nothing more. librdkafka before 2.4 fails a batch that is answered 2.

So 45 ends a librdkafka producer; it is right only if data is missing. 47 fences an
epoch, not a client: most clients go on in a new one. 59 ends KafkaJS and
@platformatic/kafka 1.x producers, since every batch that follows has the refused
sequence. Before you send 45, 47 or 59, make sure that you still lead the partition.

# Unknown producers

A producer is unknown if it is new or was forgotten. The two look alike, and
Config.UnknownProducer says which mistake to risk.

  - [StartAtZero], the default: a producer whose first batch was lost is noticed. A
    forgotten one gets 59; see the table for what its client does then.
  - [AcceptAny], as Kafka 2.5 to 4.4: every client goes on after its state was lost. A
    batch that was lost meanwhile is not noticed. Choose it if clients may be KafkaJS or
    @platformatic/kafka 1.x, or if you do not know them.
  - [StartAtZeroOnNewLog], as Kafka from 4.5: AcceptAny, except that on a log that has
    never held a record a producer must start at 0. There, a second batch that overtakes
    the first is refused.

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
    for [InFlightError].Done and ask again, or answer 7 REQUEST_TIMED_OUT. If the log is
    lazy, make sure that something flushes it during the wait.
 4. A Commit is good to acknowledge if nothing before the batch in the log can fail any
    more. Otherwise wait until CheckBatch answers Duplicate.
 5. When an append fails, drop what is queued behind it of that producer, cut off what is
    written, and Abort, all under the lock of duty 1. Later reservations of the producer
    end with [ErrAbandoned]. [ErrGap] says that one of them is committed: cut the log
    before it, or give up leadership.
 6. When leadership is lost, or a Commit fails, take the partition offline and call
    [ProducerStateManager.AbandonReservations]. Batches that were in flight may be in the
    log. Once it has settled, before you judge again, either replay it from the EndOffset
    of a [Snapshot] taken after the call, and tell [ProducerStateManager.ReplayedTo] its
    end; or cut it, and call [ProducerStateManager.Truncate].

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

	func (p *Partition) FetchCommitted(from int64) ([]byte, []idempotence.AbortedTransaction, error) {
		limit := p.producers.LastStableOffset(p.log.HighWatermark())
		records, end, err := p.log.Read(from, limit)
		if err != nil {
			return nil, nil, err
		}
		aborted, err := p.producers.AbortedTransactions(from, end)
		return records, aborted, err
	}

Their duties:

 1. Write a marker under the append lock, like a batch. In the second loop, use
    [ProducerStateManager.ReserveMarker].
 2. Acknowledge it when it is durable.
 3. Call LastStableOffset first, then read the records, then call AbortedTransactions.
 4. Answer ListOffsets "latest" at READ_COMMITTED with LastStableOffset.
 5. Move the high watermark under the append lock, or reserve: it must not pass a batch
    that is in the log and neither committed nor reserved.
 6. Call [ProducerStateManager.AdvanceStart] when the log's start moves.
 7. Keep compaction and deletion below LastStableOffset, and delete a marker only after
    its data.

[ProducerStateManager.OldestTransaction] finds a transaction that hangs.

# In a replicated state machine

If the log is replicated by an engine such as Raft, decide in the state machine: propose
what clients send, and call [ProducerStateManager.Apply] when the command is applied, on
every replica alike. Nothing is reserved, and a change of leader needs no call. A marker is
a command too, recorded with [ProducerStateManager.CommitMarker].

 1. Answer early only what cannot become untrue: Duplicate, ErrFenced, ErrInvalidBatch.
    Propose everything else, including gaps.
 2. Configuration and time are part of the log: Config is fixed, and Expire is a command.
 3. Store a Snapshot with the index of the command that was applied last. All replicas
    then hold the same bytes. Stats differ, since they count answers.
 4. Append after Apply, and stop the process if you cannot.

The program examples/replicated does this. If the partition's log is the Raft log itself,
a batch has its offset before it is applied. Such a broker uses the second loop, and a new
leader waits for an entry of its own term, a barrier, before it judges.

# Recovery

The state follows from the log. Hold back the partition's appends during 1, 4 and 5.

 1. At start, find the end of the log with [VerifyLog] on its newest segment, and cut the
    segment off there if the error is [ErrTornTail]. Load the newest snapshot with
    [SnapshotDir.Load], or Restore one from elsewhere whose LogEndOffset is not past the
    log's end. Then replay the log from the snapshot's EndOffset, or without one from the
    log's start: ReplayLog, or Replay and ReplayMarker for a log of another format. If an
    emptied log begins at 500, call AdvanceStart(500) first. If much was replayed, save a
    snapshot.
 2. When a segment is full, and at a clean shutdown, sync the log, then save
    [ProducerStateManager.Snapshot] without the append lock ([SnapshotDir.Save]).
 3. On a follower, Replay each batch and ReplayMarker each marker from the leader. Save
    snapshots and call Expire as a leader does.
 4. When the log is cut, call [ProducerStateManager.Truncate] and [SnapshotDir.DropAfter].
    If Truncate returns false, call Reset and go on as at start.
 5. When the log is deleted and created again, call [ProducerStateManager.Reset] and
    DropAfter(-1). When only its oldest records are deleted, call AdvanceStart.

# Forgetting

Call [ProducerStateManager.Expire] on a ticker, in the first loop under the append lock.
It forgets producers that have been idle for Config.Expiration, 24 hours by default.
Config.MaxProducers bounds how many are remembered. Remember producers longer than they
retry (delivery.timeout.ms, two minutes by default) and longer than your longest outage.

# Mistakes that are caught, and those that cannot be

With Config.Contiguous, each of these is [ErrOffsetOrder] at the first batch at which it
can be known. Without it, an offset inside the producer's newest batch is.

  - one manager for two partitions
  - a Commit before an append that then fails
  - the last offset given for the base offset
  - an offset inside another batch
  - a log that was cut without Truncate
  - a restored state without a replay
  - a forgotten Commit
  - a log that was created again without Reset

These are caught in any case:

  - no append lock from Check to Commit: Commit refuses
  - a second Commit or Abort of a Reservation: [ErrSettled]
  - a snapshot of another log (Config.LogID), or of a log that was cut since

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
