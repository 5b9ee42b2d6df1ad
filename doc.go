/*
Package idempotence is the broker's half of Kafka's idempotent producer. For
each batch that arrives it says whether to append it, to answer it from memory
or to refuse it, so that a batch which a producer sends again is still in the
log exactly once.

An idempotent producer numbers what it sends. Each batch carries a producer id,
an epoch and the sequence of its first record, and a batch whose
acknowledgement was lost is sent again with the same three. Whoever remembers
the last few batches of every producer can therefore recognise the second copy,
notice that one is missing, and shut out a producer that has been replaced. That
memory and those decisions are this package; the log, the disk, the replicas and
the clients stay with the broker that embeds it.

The rules are those of KIP-98, with the window of five batches that came with
KAFKA-5494.

# Usage

The primary object is a [ProducerStateManager]. Make one for each partition:

	producers := idempotence.New(idempotence.Config{})

One for each partition, because sequences count per partition: a producer that
writes to two of them starts at 0 on both, and a manager shared between them
would see gaps and overlaps in what is perfectly in order. A manager is small
while it is empty, and the work of one partition never waits for another's.

You then have a few responsibilities, for each batch that arrives, in this
order.

 1. Take the partition's append lock, the one that makes sure that nobody else
    appends, and hold it through the third step. What an answer of
    [ProducerStateManager.Check] says is true until the next Commit.

 2. Check. On an error, or on the verdict [Duplicate], append nothing and go to
    the answer. Check changes nothing, so it does not matter whether it comes
    before or after your own reasons to refuse the batch (its checksum, its
    size, the rights of the client).

 3. On the verdict [Append], append the batch to your log, and then call
    [ProducerStateManager.Commit] with the base offset the log gave. If the
    append fails, do not call Commit: nothing is remembered then, and the
    producer's retry is judged as if this try had never been. But make sure
    that it did fail. If your log cannot tell (a write that came back half
    done, a sync that failed, a timeout), find out before the next batch, and
    cut off what may be there or take the partition offline: a batch that is in
    the log and not remembered will be stored again.

 4. Release the lock and answer the producer: the base offset that the log gave
    for Append, the offset of the first copy ([Result].BaseOffset) for Duplicate,
    and the code from [KafkaErrorCode] for a refusal. A duplicate is a success.
    It is acknowledged on the same terms as its first copy: where that has to
    wait for replicas, so has the duplicate, until they have the whole range
    from BaseOffset on.

The whole loop looks like this:

	func (p *Partition) Produce(b idempotence.Batch, records []byte) (int64, error) {
		p.appendLock.Lock()
		defer p.appendLock.Unlock()

		res, err := p.producers.CheckBatch(b)
		if err != nil {
			return 0, err // refused, and nothing has changed
		}
		if res.Verdict == idempotence.Duplicate {
			return res.BaseOffset, nil // in the log already
		}
		base, err := p.log.Append(records)
		if err != nil {
			return 0, err // nothing is remembered: the producer may try again
		}
		if err := p.producers.CommitBatch(b, base); err != nil {
			p.takeOffline(err) // the log and the memory have parted
			return 0, err
		}
		return base, nil
	}

[ProducerStateManager.CheckBatch] and [ProducerStateManager.CommitBatch] take
everything that a batch header carries, and [ParseBatch] reads it from the bytes
of a Kafka record batch. Check and Commit are shorthand for a batch that is not
transactional. The count of a batch is lastOffsetDelta+1 from its header, which is
not the number of records that compaction left in it.

A batch without a producer id ([NoProducerID]) is always appended. Commit it like
the others, or tell the manager with [ProducerStateManager.Advance] where the log
ends; only the end offset moves.

Producer ids are handed out by the broker (InitProducerId), and two producers
under one id cannot be told apart. Never hand one out twice, not even after a
restart: whatever the next one is, it must be above
[ProducerStateManager.MaxProducerID] of every partition.

# Who serialises

The manager is safe for concurrent use, but it cannot see your log: from Check to
Commit, the append lock is yours to hold. If nobody holds it, two copies of one
batch can both be judged Append, and both are appended. The second Commit notices
and is refused, with [ErrDuplicateSequence] for two copies or with
[ErrOutOfOrderSequence] for two batches that changed places, and the state stays
sound. The log, however, holds something that it should not.

So Commit judges the batch once more, and a refused Commit means that the log and
the memory have parted: the lock was not held, Check was skipped, or the offset
([ErrOffsetOrder]) is not the batch's own. The state is unchanged. Do not
acknowledge the batch, and append nothing more to the partition before you have
either cut the batch off the log again or thrown the manager away and rebuilt
it from the log. The facts are in the [*BatchError].

# The rules

A batch with producer id p, epoch e, first sequence s and last sequence l is
judged by the first of these that applies. Sequences are in 0..2147483647 and
count records; after 2147483647 comes 0. Of each producer the epoch is remembered,
and the last five ([WindowSize]) batches of that epoch.

 0. p is -1: append. Nothing is remembered.
 1. p < -1, e < 0, s < 0 or a count below 1: [ErrInvalidBatch].
 2. Nothing is remembered of p: s must be 0, else [ErrUnknownProducer], which is
    also an ErrOutOfOrderSequence. Config.UnknownProducer can relax this; what the
    relaxed policies refuse is a plain ErrOutOfOrderSequence.
 3. e is older than the epoch remembered: [ErrFenced].
 4. e is newer: s must be 0, else [ErrOutOfOrderSequence]. The Commit adopts the
    epoch and forgets the batches of the older one.
 5. s and l are exactly those of a remembered batch: duplicate.
 6. s is one after the newest remembered l: append. Where p is known only by its
    epoch, s must be 0.
 7. Anything else, [ErrOutOfOrderSequence]: a gap, an overlap, a retry that was
    split or merged, a range that has left the window.

A refusal changes nothing. In particular, an epoch that is refused is not
adopted, so a confused producer cannot fence a good one.

# Answers

What each answer means to a producer, and what a Kafka broker sends. The codes
are those of [KafkaErrorCode].

	answer                 send                              the producer then
	Append                 0, the offset the log gave        goes on
	Duplicate              0, Result.BaseOffset              goes on
	ErrOutOfOrderSequence  45 OUT_OF_ORDER_SEQUENCE_NUMBER   sends what is missing first, or
	                                                         takes a new epoch and starts at 0
	ErrUnknownProducer     59 UNKNOWN_PRODUCER_ID            takes a new epoch and starts at 0
	ErrFenced              47 INVALID_PRODUCER_EPOCH         stops: another one has taken over
	ErrInvalidBatch        87 INVALID_RECORD                 fails the batch; it is a bug

From reading a batch, before it is judged:

	ErrCorruptBatch        2 CORRUPT_MESSAGE                 sends it again
	ErrUnsupportedMagic    87 INVALID_RECORD                 fails the batch

Only from Commit, and only where the append lock was not held, Check was skipped,
or the offset is not the batch's own:

	ErrDuplicateSequence   46 DUPLICATE_SEQUENCE_NUMBER      counts the batch as written
	ErrOffsetOrder         56 KAFKA_STORAGE_ERROR            tries again later

A failure of your own (the disk is full, the leader has moved) is no error of
this package, and KafkaErrorCode gives -1 for it, which clients do not retry. Tell
those errors apart first, and answer with a code that clients retry, 56 KAFKA_STORAGE_ERROR
or 6 NOT_LEADER_OR_FOLLOWER: the retry carries the same sequence and is judged
anew. An answer that never arrives is the same case.

# Unknown producers

A producer of which nothing is remembered is either new or forgotten, and the two
look alike. The policy says which mistake to risk:

  - [StartAtZero], the zero value: only sequence 0 is accepted. A producer whose
    first batch got lost cannot leave a hole, and one that has been forgotten is
    told so and starts a new epoch. Kafka before 2.5 did this.
  - [AcceptAny]: any first sequence is accepted. A forgotten producer goes on
    without noticing; neither does anybody notice if its batch was not the next.
    Kafka 2.5 to 4.4 do this.
  - [StartAtZeroOnNewLog]: only sequence 0 while the log has never held a record,
    any first sequence after that. Kafka does this from 4.5. Right after a topic
    is created, a first batch that is overtaken by the second would otherwise be
    lost.

None of them can recognise a retry of what was stored before the producer was
forgotten.

# Appends that finish later

The loop above holds the append lock until the batch is in the log. That is right
where an append is one write. Where it ends with a sync that is shared by many, an
answer of a replica, or an upload, the lock would let one batch at a time through,
and a producer that has five requests in flight would wait for each. For such a
log there is a second loop, in which a batch takes its place when it is reserved
and is remembered when its append has succeeded:

	func (p *Partition) Produce(ctx context.Context, b idempotence.Batch, records []byte) (int64, error) {
		for {
			a, base, err := p.reserve(b, records)
			if a != nil {
				<-a.settled
				return a.base, a.err
			}
			var inFlight *idempotence.InFlightError
			if !errors.As(err, &inFlight) {
				return base, err // a duplicate, or refused
			}
			select { // its own first copy is on its way: see what becomes of it
			case <-inFlight.Done():
			case <-ctx.Done():
				return 0, err
			}
		}
	}

	func (p *Partition) reserve(b idempotence.Batch, records []byte) (*pending, int64, error) {
		p.order.Lock()
		defer p.order.Unlock()
		if p.offline != nil {
			return nil, 0, p.offline
		}
		r, res, err := p.producers.Reserve(b)
		if r == nil {
			return nil, res.BaseOffset, err
		}
		a := &pending{reservation: r, settled: make(chan struct{})}
		p.log.Enqueue(a, records)
		return a, 0, nil
	}

	// landed is called by the log, in the order of the log.
	func (p *Partition) landed(a *pending, base int64) {
		a.base, a.err = base, a.reservation.Commit(base)
		if a.err != nil {
			p.order.Lock()
			p.takeOffline(a.err) // the log and the memory have parted
			p.order.Unlock()
		}
		close(a.settled)
	}

	// failed is called by the log when a write has failed and what it may have
	// left has been cut off. The log holds no lock that Enqueue or DropQueue takes.
	func (p *Partition) failed(written []*pending, why error) {
		p.order.Lock() // nothing is judged or queued meanwhile
		defer p.order.Unlock()
		for _, a := range append(written, p.log.DropQueue()...) {
			a.err = why
			if errors.Is(a.reservation.Abort(), idempotence.ErrHole) {
				p.takeOffline(idempotence.ErrHole)
			}
			close(a.settled)
		}
	}

	// takeOffline is called with order held. Whoever waits for a reservation that
	// will not be settled any more is let go.
	func (p *Partition) takeOffline(why error) {
		p.offline = why
		p.producers.AbandonReservations()
	}

Its duties differ from those of the first loop in these points.

 1. Hold a lock over [ProducerStateManager.Reserve] and the hand-over to the log,
    so that the batches of a producer enter the log in the order in which they
    were reserved. Release it before you wait, also for room in a queue: the log
    takes it when an append has failed. ([ProducerStateManager.ReserveWait]
    does the waiting for whoever needs no such lock, since one goroutine alone
    hands over the batches of a producer.)

 2. End each [Reservation] in exactly one [Reservation.Commit] or
    [Reservation.Abort]. Commits may come in any order. One that never ends keeps
    all behind it invisible.

 3. Never acknowledge on [ErrInFlight]. It is the answer to a copy of a batch that
    is on its way, and nobody knows yet whether that will arrive. Wait for Done and
    ask again, or send 7 REQUEST_TIMED_OUT and let the producer ask. A Commit that
    returns nil is good to acknowledge if nothing before the batch in the log can
    fail any more, as in a log that is written from front to back. If an earlier
    append of the producer may yet be aborted, wait until the batch is visible:
    until CheckBatch answers Duplicate for it.

 4. When an append fails, nothing behind it of that producer may stay in the log,
    or there is a gap that no retry can fill. Abort ends those reservations too
    ([ErrAbandoned] is what their Commit and Abort return); it is for the log to
    drop what is queued behind, and to cut off what is written. Do both under the
    lock of the first duty, before the log takes another batch: otherwise one that
    was judged to follow the failed one slips in between. [ErrHole] says that one
    of them had been committed already: cut the log off before it, or give up
    leadership.

 5. A Commit that returns an error means what it means in the first loop: the
    log and the memory have parted, and the partition is offline until one has been
    made to agree with the other. After [ErrOffsetOrder] the reservation is open
    still, so it has to be ended, as takeOffline does with all of them.

 6. When leadership is lost, take the partition offline in the same way:
    [ProducerStateManager.AbandonReservations] lets everybody go who waits for a
    reservation, and an append that ends afterwards is told [ErrAbandoned]. Let the
    log end its appends, so that whoever waits for one of them has an answer. Some
    of what was in flight is in the log now, unknown to the manager. So cut the log
    to what the new leader has and call [ProducerStateManager.Truncate]: where that
    returns false, rebuild the state as below. Where nothing is cut, replay the log
    from the EndOffset of a [Snapshot] taken after AbandonReservations. Both before
    the next Check or Reserve.

Prefer the first loop where an append is quick, since it is the simpler and the
cheaper; the second where it is not. One partition can have both at work, for
different producers: Commit refuses with ErrInFlight what would overtake a
reservation of its own producer.

	ErrInFlight    7 REQUEST_TIMED_OUT        sends it again
	ErrAbandoned   6 NOT_LEADER_OR_FOLLOWER   looks for the leader and sends it again
	ErrHole        56 KAFKA_STORAGE_ERROR     sends it again later
	ErrSettled     (a second Commit or Abort; the producer has its answer)

A producer whose very first append fails is unknown again. What was reserved behind
it must then not pass for its first batch, which it would under [AcceptAny]. So the
failed batch is owed: until it has come again, every other first sequence of its
epoch is refused with ErrOutOfOrderSequence, under every policy and for at least as
long as a producer is remembered.

# Recovery

The state follows from the log, and lives in memory. Keeping the two together
when one of them moves by itself is the second half of your responsibilities.
Hold back the partition's appends during each of these.

 1. At start, find the end of the log, and make a new manager. If it keeps
    snapshots, restore the newest that is intact and does not lie beyond that end:
    [SnapshotDir.Load] does so and removes those beyond, or
    [ProducerStateManager.Restore] from wherever you keep them. Then play the log
    to it, from the snapshot's end offset on, or from its beginning where there is
    no snapshot, before the partition takes its first batch:
    [ProducerStateManager.ReplayLog] for Kafka's segments,
    [ProducerStateManager.Replay] for each batch, and
    [ProducerStateManager.ReplayMarker] for each transaction marker, of any other
    log. Nothing is judged: what is in the log has happened, gaps and all. What the
    snapshot knows already is skipped. If the newest segment ends in [ErrTornTail],
    cut it off where the result says that the good part ends. A torn tail moves the
    log's end, so look for one first, with a ReplayLog to a manager that you throw
    away, or have no snapshot of what is not on the disk (sync the log before you
    save one). [ErrCorruptLog] is damage that a broker does not mend by itself.

 2. When a segment is full, and at a clean shutdown, take a
    [ProducerStateManager.Snapshot] and write it: [SnapshotDir.Save], or
    [Snapshot.WriteTo]. Taking it takes 0.3 ms where there are a million producers;
    write it without the append lock, and sync the log first. It is never the whole truth: the log behind
    its end offset is replayed in any case, also after a shutdown that was clean.

 3. On a follower, Replay each batch that comes from the leader and is appended,
    those without a producer id too, and ReplayMarker each marker. When it becomes
    the leader, its state is that of the old one, and there is nothing to do before
    the first Check. A follower saves snapshots and calls Expire as a leader does;
    for two replicas to forget the same producers they need the same calls.

 4. When leadership is lost, let whoever holds the append lock finish, or abandon
    what is in flight, answer everybody else with 6 NOT_LEADER_OR_FOLLOWER, and
    Replay from then on.

 5. When the log is cut, call [ProducerStateManager.Truncate] with its new end,
    and remove the snapshots beyond it: [SnapshotDir.DropAfter]. Where Truncate
    returns false, what is left may be less than the log tells: call
    [ProducerStateManager.Reset], which forgets it, and go on as at start.

 6. When the log is deleted and created again, call Reset, and DropAfter with -1.
    When only its oldest records are deleted, do nothing, but have a snapshot that
    is younger than the deletion, since the log can no longer tell. A retry of
    what stood there is still a duplicate, at an offset that is gone.

 7. When you append a transaction marker yourself, call ReplayMarker for it. The
    manager keeps track of which producer has a transaction open, since it must
    not be forgotten meanwhile; without the marker it never will be. Everything
    else about transactions is left to you.

Kafka's own snapshots can be read ([ProducerStateManager.RestoreKafka]) and written
([Snapshot.WriteKafka]). They hold one batch of each producer, so of five retries
after such a restore four are refused.

# Forgetting

A manager remembers every producer that it has met until it is told to stop.
Call [ProducerStateManager.Expire] with the time, on a ticker, and it forgets
those that have been idle for Config.Expiration, 24 hours unless you say
otherwise. Config.MaxProducers bounds how many are remembered at all, for clients
that take a new producer id for each message.

Remember longer than any producer goes on retrying (delivery.timeout.ms, two
minutes unless the client says otherwise) and longer than your longest outage: the
memory has to outlast the retries. A forgotten producer is an unknown one.

# What is left out

No I/O, except that a [SnapshotDir] writes and reads its files where you call it:
the log is yours, and so is the order in which it, the memory and the answer come
about. No goroutine: nothing happens except in a call that you make,
so there is nothing to close and nothing to wait for. No clock: time is an
argument, and two replicas that are given the same calls are in the same state.
No logger: every refusal is returned with its facts, [ProducerStateManager.Stats]
counts them, and what is worth a line in a log is for you to say. No
package-level state: two managers share nothing.

That leaves a state machine which can be tested without sleeping and reproduced
from a list of calls, which is how its own tests work.
*/
package idempotence
