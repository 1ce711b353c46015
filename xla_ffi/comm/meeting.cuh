// The two ends of a call: ranks tell each other where their operands are, and wait until nobody
// reads them any more. Block 0 does both.
//
// No word is written by two ranks, and calls of one rank run in order; so a mailbox is free for
// call n + 1 when its writer has seen `left == n` of its reader.

#ifndef MAGI_JAX_XLA_FFI_COMM_MEETING_CUH_
#define MAGI_JAX_XLA_FFI_COMM_MEETING_CUH_

#include "xla_ffi/comm/params.h"
#include "xla_ffi/comm/signals.cuh"

namespace magi_jax::comm {

constexpr uint64_t kEagerNs = 20000;  // polls without a pause at first
constexpr unsigned kPauseNs = 200;

__device__ inline bool IsBroken(const Meeting& meeting) {
  return *static_cast<volatile uint32_t*>(meeting.broken) != 0;
}

// Calls `body(peer)` for every other rank, dealt out to the threads of the block.
template <class Body>
__device__ void ForEachPeer(const Meeting& meeting, Body body) {
  for (int peer = threadIdx.x; peer < meeting.extents.cp_size; peer += blockDim.x) {
    if (peer != meeting.rank) body(peer);
  }
}

// Waits until `*word >= call`. Gives up when time is over or when the peer gave up.
__device__ inline Failure Await(const uint64_t* word, const Mailbox& mailbox,
                                const Meeting& meeting, Failure late) {
  const uint64_t start = Nanoseconds();
  while (LoadAcquire(word) < meeting.call) {
    if (LoadAcquire(&mailbox.gave_up) != 0) return Failure::kGaveUp;
    const uint64_t waited = Nanoseconds() - start;
    if (waited > meeting.timeout_ns) return late;
    if (waited > kEagerNs) __nanosleep(kPauseNs);
  }
  return Failure::kNone;
}

// Keeps the first failure.
__device__ inline void Fail(const Meeting& meeting, Failure failure, int peer) {
  if (failure == Failure::kNone || atomicExch(meeting.broken, 1u) != 0) return;
  FailureRecord* record = meeting.record;
  record->call = meeting.call;
  record->kind = meeting.kind;
  record->peer = static_cast<uint32_t>(peer);
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&record->failure) = static_cast<uint32_t>(failure);
  __threadfence_system();
}

// Digests of the pieces between this rank and each other, of both directions.
struct Digests {
  unsigned long long outgoing[kMaxRanks], incoming[kMaxRanks];

  __device__ void Fill(const Meeting& meeting) {
    for (int peer = threadIdx.x; peer < meeting.extents.cp_size; peer += blockDim.x) {
      outgoing[peer] = incoming[peer] = 0;
    }
    __syncthreads();
    Add(meeting.send, meeting.extents.cp_size, outgoing);
    Add(meeting.recv, meeting.extents.cp_size, incoming);
    __syncthreads();
  }

 private:
  // A warp adds up what it has for a peer first: adding to one word of shared memory takes turns.
  __device__ static void Add(const PieceTable& table, int cp_size, unsigned long long* digests) {
    const int lane = threadIdx.x % 32;
    for (int base = threadIdx.x - lane; base < table.num_pieces; base += blockDim.x) {
      const Piece piece = base + lane < table.num_pieces ? table.pieces[base + lane] : Piece{-1};
      const unsigned long long digest = Digest(piece);
      unsigned left = __ballot_sync(~0u, piece.peer >= 0 && piece.peer < cp_size);
      while (left != 0) {
        const int peer = __shfl_sync(~0u, piece.peer, __ffs(static_cast<int>(left)) - 1);
        const unsigned same = __ballot_sync(~0u, piece.peer == peer);
        unsigned long long sum = piece.peer == peer ? digest : 0;
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) atomicAdd(&digests[peer], sum);
        left &= ~same;
      }
    }
  }
};

__device__ inline void TellPeer(const Meeting& meeting, int peer, const Digests& digests) {
  Mailbox& mailbox = *meeting.outbox[peer];
  for (int i = 0; i < meeting.num_leaves; ++i) mailbox.addresses[i] = meeting.addresses[i];
  mailbox.signature = meeting.signature;
  mailbox.run = meeting.run;
  mailbox.outgoing = digests.outgoing[peer];
  mailbox.incoming = digests.incoming[peer];
  StoreRelease(&mailbox.entered, meeting.call);
}

__device__ inline Failure HearPeer(const Meeting& meeting, int peer, const Digests& digests) {
  const Mailbox& mailbox = meeting.inbox[peer];
  const Failure failure = Await(&mailbox.entered, mailbox, meeting, Failure::kNeverEntered);
  if (failure != Failure::kNone) return failure;
  if (LoadAcquire(&mailbox.signature) != meeting.signature) return Failure::kOtherCall;
  if (LoadAcquire(&mailbox.run) != meeting.run) return Failure::kOtherRun;
  const bool same = LoadAcquire(&mailbox.outgoing) == digests.incoming[peer] &&
                    LoadAcquire(&mailbox.incoming) == digests.outgoing[peer];
  return same ? Failure::kNone : Failure::kOtherPlan;
}

__device__ inline void TellGivenUp(const Meeting& meeting) {
  __syncthreads();
  if (!IsBroken(meeting)) return;
  ForEachPeer(meeting,
              [&](int peer) { StoreRelease(&meeting.outbox[peer]->gave_up, meeting.call); });
}

// Tells the peers of this call and waits for them; checks that they make the same call with
// matching tables.
__device__ inline void Enter(const Meeting& meeting, Digests& digests) {
  if (IsBroken(meeting)) return;
  digests.Fill(meeting);
  if (threadIdx.x == 0 && *meeting.caller != meeting.rank) {
    Fail(meeting, Failure::kOtherRank, *meeting.caller);
  }
  ForEachPeer(meeting, [&](int peer) { TellPeer(meeting, peer, digests); });
  ForEachPeer(meeting, [&](int peer) { Fail(meeting, HearPeer(meeting, peer, digests), peer); });
  TellGivenUp(meeting);
}

// Takes the right to write to the results of all peers in this call, after Enter. A peer that has
// given up meanwhile has taken it back for ever.
__device__ inline void TakeLeases(const Meeting& meeting) {
  if (IsBroken(meeting)) return;
  ForEachPeer(meeting, [&](int peer) {
    if (Exchange(&meeting.outbox[peer]->lease, meeting.call) != kRevoked) return;
    Fail(meeting, Failure::kGaveUp, peer);
  });
  TellGivenUp(meeting);
}

// Takes that right back from all peers when this rank gives up. One that has it in this call is
// writing, waits for nobody and will soon have left, or gives up before it writes.
__device__ inline void RevokeLeases(const Meeting& meeting) {
  ForEachPeer(meeting, [&](int peer) {
    Mailbox& mailbox = meeting.inbox[peer];
    if (Exchange(&mailbox.lease, kRevoked) != meeting.call) return;
    Await(&mailbox.left, mailbox, meeting, Failure::kNeverLeft);
  });
  __syncthreads();
}

// NaN in every floating dtype; true for booleans, whose bytes must be 0 or 1.
__device__ inline void Poison(const Leaf& leaf) {
  auto* bytes = static_cast<uint8_t*>(leaf.result);
  const uint8_t value = leaf.element == Element::kPred ? 1 : 0xff;
  for (int64_t i = threadIdx.x; i < leaf.result_bytes; i += blockDim.x) bytes[i] = value;
}

// Waits until no peer reads this rank's operands, or writes to its results; after a failure,
// overwrites all results.
__device__ inline void Leave(const Meeting& meeting, const Move& move) {
  if (!IsBroken(meeting)) {
    ForEachPeer(meeting,
                [&](int peer) { StoreRelease(&meeting.outbox[peer]->left, meeting.call); });
    ForEachPeer(meeting, [&](int peer) {
      const Mailbox& mailbox = meeting.inbox[peer];
      Fail(meeting, Await(&mailbox.left, mailbox, meeting, Failure::kNeverLeft), peer);
    });
    TellGivenUp(meeting);
  }
  __syncthreads();
  if (!IsBroken(meeting)) return;
  if (meeting.pushes) RevokeLeases(meeting);
  for (int i = 0; i < move.num_leaves; ++i) Poison(move.leaves[i]);
}

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_MEETING_CUH_
