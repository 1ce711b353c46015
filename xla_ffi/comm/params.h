// What the kernels of the group collectives are told, and what ranks write into each other's
// memory.

#ifndef MAGI_JAX_XLA_FFI_COMM_PARAMS_H_
#define MAGI_JAX_XLA_FFI_COMM_PARAMS_H_

#include <cstdint>

#include "xla_ffi/comm/pieces.h"

namespace magi_jax::comm {

constexpr int kMaxLeaves = 8;
constexpr int kMaxRanks = 1024;

// One direction between two ranks: lies in the memory of the reader, written by the other alone.
// A call is known by its number in the sequence of the pool's calls, the first is 1.
struct alignas(128) Mailbox {
  uint64_t addresses[kMaxLeaves];  // where the writer's arrays are, see Meeting::bases
  uint64_t signature;              // of the call: kind, sizes
  uint64_t run;                    // Meeting::run
  uint64_t outgoing, incoming;  // digest of the pieces that the writer sends here, gets from here
  uint64_t entered;             // the last call whose fields above are set
  uint64_t left;                // the last call in which the writer needs nothing of the reader
  uint64_t gave_up;             // the call in which the writer gave up, 0 = none
  // The last call in which the writer may write to results of the reader, who takes that right back
  // by kRevoked: the one word that both write, by exchange.
  uint64_t lease;
};

constexpr uint64_t kRevoked = ~0ull;

enum class Failure : uint32_t {
  kNone = 0,
  kNeverEntered = 1,  // the peer did not enter the call in time
  kNeverLeft = 2,     // the peer did not finish reading in time
  kGaveUp = 3,        // the peer had an error of its own
  kOtherCall = 4,     // the peer makes a different call
  kOtherPlan = 5,     // the peer's table does not match this rank's
  kOtherRank = 6,     // the caller's place in its mesh is not that of the memory
  kOtherRun = 7,      // the peer makes this call in another execution of the program
};

// In host memory that the device writes; `failure` last. The first failure of a pool stays.
struct FailureRecord {
  uint64_t call;
  uint32_t kind, peer;
  uint32_t failure;
};

// How a rank meets the others in one call. All pointers are valid on the rank's device.
struct Meeting {
  Mailbox* inbox;           // [cp] mailbox that peer p writes
  Mailbox* const* outbox;   // [cp] this rank's mailbox at peer p
  const uint64_t* bases;    // [cp] added to the addresses that peer p tells
  uint32_t* broken;         // not 0 after a failure: later calls do nothing but poison results
  uint64_t* arrived;        // blocks that reached a barrier, over all calls
  uint64_t arrived_before;  // of these, in the calls before
  uint64_t* apart;          // blocks that began to copy own rows apart, over all calls
  FailureRecord* record;    // in host memory
  PieceTable send, recv;    // of this rank
  const int32_t* caller;    // the caller's place on its mesh axis, which must be `rank`
  Extents extents;          // of the transfer
  int32_t rank;
  int32_t num_leaves;
  uint32_t kind;  // of the call, for the record
  uint64_t call, signature;
  uint64_t run;  // number of the execution, equal on all ranks; 0: ranks do not share one
  uint64_t timeout_ns;
  bool pushes;  // ranks write to the results of others, whose addresses they tell, not operands'
  uint64_t addresses[kMaxLeaves];  // to tell the peers
};

// How elements are added up: in float32, as integers, or with a logical or.
enum class Element : int32_t { kF32, kF16, kBF16, kS32, kPred };

// One array of a call, rows on its leading axis. Rows of operand and result have as many elements.
struct Leaf {
  const void* operand;  // [operand rows, row_elements], this rank's
  void* result;         // [result rows, row_elements]
  uint32_t row_elements;
  uint32_t row_bytes;    // of the operand
  int64_t result_bytes;  // in all
  Element element;       // of the operand; a cast moves bytes and does not look at it
};

struct Move {
  Leaf leaves[kMaxLeaves];  // all of one kind of element, unless they are cast
  int32_t num_leaves;
  RowMap map;  // of the result's rows
  int32_t num_blocks;
  // Of a cast: at most so many rows stay on their rank. Where it is not 0 another kernel copies
  // them.
  int64_t own_rows;
  bool stream;  // whether the device has bulk copies and shared memory for their rings
  bool adds;    // sums are added to what the results hold, where rows have any
};

// Barriers of all blocks in one call; `arrived` grows by as many times the blocks.
constexpr int kBarriers = 4;

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_PARAMS_H_
