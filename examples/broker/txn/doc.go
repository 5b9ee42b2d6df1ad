// Package txn is a transaction coordinator: it hands out producer ids, knows
// which producer holds a transactional id, which partitions take part in its
// transaction and how the transaction ends, and it keeps the offsets of
// consumer groups, those committed in transactions among them.
//
// The package does no I/O and starts no goroutines. The time is an argument.
// Records go to a [Log] that the caller provides, and what a record says takes
// effect once the log reports it durable. Markers are listed by
// [Coordinator.Markers]; the caller writes them to the partitions and reports
// the outcome with [Coordinator.MarkerDone], as if the partitions were remote: a
// marker may fail, and is sent again.
//
// Refusals are errors of franz-go's package kerr, to be found with errors.Is or
// errors.As. Where a record could not be written, the error wraps
// kerr.CoordinatorNotAvailable and the cause; nothing has changed then, except
// as noted under fencing.
//
// # What is remembered
//
// Of a transactional id: the producer (id and epoch), the last epoch and the
// previous id, the next id, the time-out, the state, and of an open transaction
// its version, start, partitions, groups and staged offsets.
//
//	present  what a client that holds the transactional id has been told: the
//	         producer id and epoch, or the next id and epoch 0 if there is one
//	last     the id and epoch before the present ones. It is known only while
//	         the client may have missed the answer that raised the epoch, and
//	         only if that answer was meant for the client that held it
//
// Epoch 32766 is the last one that a client gets; 32767 exists so that there is
// always one left to fence with.
//
// # InitProducerId
//
// Without a transactional id: a fresh producer id at epoch 0. With one, a
// request may name the (id, epoch) it expects, and the first row that fits
// applies:
//
//	transactional id   expected            answer
//	unknown            none                a fresh id, epoch 0
//	unknown            any                 90 PRODUCER_FENCED
//	any                neither the present
//	                   nor the last        90 PRODUCER_FENCED
//	Prepare*           any                 51 CONCURRENT_TRANSACTIONS
//	Ongoing            any                 the transaction is fenced and aborted;
//	                                       51, the client asks again
//	Empty, Complete*   last                the present one: a retry. At epoch
//	                                       32767: a fresh id, epoch 0
//	Empty, Complete*   none or present     the epoch plus 1; from 32766 on a
//	                                       fresh id, epoch 0 (a rotation)
//
// Kafka accepts any expectation for an unknown transactional id. Here a
// producer whose transactional id has expired is fenced, since another one may
// have come and gone in between.
//
// # AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit
//
//	unknown transactional id, or not the present id  49 INVALID_PRODUCER_ID_MAPPING
//	not the present epoch                            90 PRODUCER_FENCED
//	Prepare*                                         51 CONCURRENT_TRANSACTIONS
//	Ongoing, nothing new                             done: a retry
//	Ongoing, Empty, Complete*                        added; the state is Ongoing
//
// With version 2 a TxnOffsetCommit adds its group by itself. With version 1 the
// group must have been added to the open transaction: 48 INVALID_TXN_STATE
// otherwise, as for a [Coordinator.VerifyPartitions] of a partition that was not
// added.
//
// # EndTxn
//
// Version 1:
//
//	unknown transactional id, or not the present id  49
//	not the present epoch                            90
//	Ongoing                                          PrepareCommit, PrepareAbort
//	Prepare*, Complete*, the same outcome            done: a retry
//	anything else                                    48 INVALID_TXN_STATE
//
// Version 2 raises the epoch by 1 in the same record, and rotates the producer
// id at epoch 32766; the answer has the present id and epoch:
//
//	the last id and epoch in Prepare*, Complete*     a retry: the present ones
//	                                                 for the same outcome, else 48
//	unknown transactional id, or not the present id  49
//	not the present epoch                            90
//	Prepare*                                         51
//	Ongoing                                          PrepareCommit, PrepareAbort
//	Empty, Complete*, abort                          CompleteAbort, raised too
//	Empty, Complete*, commit                         48: a commit of nothing
//
// A transaction without partitions has no markers to wait for, and the state is
// CompleteCommit or CompleteAbort at once.
//
// # Fencing
//
// InitProducerId and time-outs abort a transaction of the present producer: the
// epoch is raised by 1, once, in the record of PrepareAbort, with version 1 and 2
// alike. The marker bears the raised epoch, so that a late batch is refused by
// the partition. Version 2 rotates the id at epoch 32766. Version 1 reaches
// 32767, and the next InitProducerId rotates.
//
// If that record cannot be written, the producer stays fenced in memory: its
// requests get 90, and the next attempt to fence it raises the same epoch once.
//
// # Markers
//
// Each partition of a transaction in PrepareCommit or PrepareAbort has a marker
// to be written. A marker is done when the partition has acknowledged it, or has
// refused it for good with 47 INVALID_PRODUCER_EPOCH or 52
// TRANSACTION_COORDINATOR_FENCED; after any other error it stays listed. When all
// markers are done, the state is CompleteCommit or CompleteAbort. A marker bears
// the coordinator epoch, which is the number of starts. After a start, every
// marker of a transaction in Prepare* is listed again.
//
// # Time
//
// [Coordinator.Expire] aborts transactions that have been open for their
// time-out, and forgets transactional ids that are Empty or Complete* and have
// not changed for seven days.
//
// # Offsets
//
// Offsets committed in a transaction are staged with it, by group and
// partition, the last one counts. They take effect with the record that decides
// to commit, PrepareCommit or CompleteCommit, and are dropped by an abort. An
// OffsetFetch that requires stable offsets gets 88 UNSTABLE_OFFSET_COMMIT for
// those staged. Of several commits of one offset, the last record in the log
// counts.
//
// # Producer ids
//
// Ids are reserved in blocks of 1,000. The record that reserves a block is
// durable before an id of the block is handed out. A start leaves the rest of a
// block unused.
package txn
