// The two ends of a call: ranks tell each other where their operands are, and wait until nobody
// reads them any more. One block each, so that a rank that is early holds one SM and no more.
//
// No word is written by two ranks, and calls of one rank run in order; so a mailbox is free for
// call n + 1 when its writer has seen `left == n` of its reader.

#include <cuda_runtime.h>

#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/signals.cuh"
#include "xla_ffi/comm/sources.cuh"

namespace magi_jax::comm {
namespace {

constexpr int kThreads = 256;
constexpr int kPoisonThreads = 1024;
constexpr uint64_t kEagerNs = 20000;  // polls without a pause at first
constexpr unsigned kPauseNs = 200;

// Waits until `*word >= call`. Gives up when time is over or when the peer gave up.
__device__ Failure Await(const uint64_t* word, const Mailbox& mailbox, const Meeting& meeting,
                         Failure late) {
  const uint64_t start = Nanoseconds();
  while (LoadAcquire(word) < meeting.call) {
    if (LoadAcquire(&mailbox.gave_up) != 0) return Failure::kGaveUp;
    const uint64_t waited = Nanoseconds() - start;
    if (waited > meeting.timeout_ns) return late;
    if (waited > kEagerNs) __nanosleep(kPauseNs);
  }
  return Failure::kNone;
}

// Called by one thread, the first that fails or any of several that do.
__device__ void Fail(const Meeting& meeting, Failure failure, int peer) {
  if (atomicExch(meeting.broken, 1u) != 0) return;
  FailureRecord* record = meeting.record;
  record->call = meeting.call;
  record->kind = meeting.kind;
  record->peer = static_cast<uint32_t>(peer);
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&record->failure) = static_cast<uint32_t>(failure);
  __threadfence_system();
}

__device__ void TellGivenUp(const Meeting& meeting) {
  for (int peer = threadIdx.x; peer < meeting.cp_size; peer += blockDim.x) {
    if (peer != meeting.rank) StoreRelease(&meeting.outbox[peer]->gave_up, meeting.call);
  }
}

__device__ void AddDigests(const PieceTable& table, int cp_size, unsigned long long* digests) {
  for (int i = threadIdx.x; i < table.num_pieces; i += blockDim.x) {
    const Piece& piece = table.pieces[i];
    if (piece.peer >= 0 && piece.peer < cp_size) {
      atomicAdd(&digests[piece.peer], static_cast<unsigned long long>(Digest(piece)));
    }
  }
}

__device__ void TellPeer(const Meeting& meeting, int peer, uint64_t outgoing, uint64_t incoming) {
  Mailbox& mailbox = *meeting.outbox[peer];
  for (int i = 0; i < meeting.num_leaves; ++i) mailbox.addresses[i] = meeting.addresses[i];
  mailbox.signature = meeting.signature;
  mailbox.outgoing = outgoing;
  mailbox.incoming = incoming;
  StoreRelease(&mailbox.entered, meeting.call);
}

__device__ Failure HearPeer(const Meeting& meeting, int peer, uint64_t outgoing,
                            uint64_t incoming) {
  const Mailbox& mailbox = meeting.inbox[peer];
  const Failure failure = Await(&mailbox.entered, mailbox, meeting, Failure::kNeverEntered);
  if (failure != Failure::kNone) return failure;
  if (LoadAcquire(&mailbox.signature) != meeting.signature) return Failure::kOtherCall;
  const bool same =
      LoadAcquire(&mailbox.outgoing) == incoming && LoadAcquire(&mailbox.incoming) == outgoing;
  return same ? Failure::kNone : Failure::kOtherPlan;
}

__global__ void __launch_bounds__(kThreads)
    EnterKernel(const __grid_constant__ Meeting meeting, PieceTable send, PieceTable recv,
                const int32_t* rank) {
  __shared__ unsigned long long outgoing[kMaxRanks], incoming[kMaxRanks];
  if (IsBroken(meeting)) return;
  for (int peer = threadIdx.x; peer < meeting.cp_size; peer += blockDim.x) {
    outgoing[peer] = incoming[peer] = 0;
  }
  __syncthreads();
  AddDigests(send, meeting.cp_size, outgoing);
  AddDigests(recv, meeting.cp_size, incoming);
  __syncthreads();
  if (*rank != meeting.rank && threadIdx.x == 0) Fail(meeting, Failure::kOtherRank, *rank);
  for (int peer = threadIdx.x; peer < meeting.cp_size; peer += blockDim.x) {
    if (peer != meeting.rank) TellPeer(meeting, peer, outgoing[peer], incoming[peer]);
  }
  for (int peer = threadIdx.x; peer < meeting.cp_size; peer += blockDim.x) {
    if (peer == meeting.rank) continue;
    const Failure failure = HearPeer(meeting, peer, outgoing[peer], incoming[peer]);
    if (failure != Failure::kNone) Fail(meeting, failure, peer);
  }
  __syncthreads();
  if (IsBroken(meeting)) TellGivenUp(meeting);
}

// NaN in every floating dtype; true for booleans, whose bytes must be 0 or 1.
__device__ void Poison(const Leaf& leaf) {
  auto* bytes = static_cast<uint8_t*>(leaf.result);
  const uint8_t value = leaf.element == Element::kPred ? 1 : 0xff;
  for (int64_t i = threadIdx.x; i < leaf.result_bytes; i += blockDim.x) bytes[i] = value;
}

__global__ void __launch_bounds__(kPoisonThreads)
    LeaveKernel(const __grid_constant__ Meeting meeting, const __grid_constant__ Move move) {
  if (!IsBroken(meeting)) {
    for (int peer = threadIdx.x; peer < meeting.cp_size; peer += blockDim.x) {
      if (peer != meeting.rank) StoreRelease(&meeting.outbox[peer]->left, meeting.call);
    }
    for (int peer = threadIdx.x; peer < meeting.cp_size; peer += blockDim.x) {
      if (peer == meeting.rank) continue;
      const Mailbox& mailbox = meeting.inbox[peer];
      const Failure failure = Await(&mailbox.left, mailbox, meeting, Failure::kNeverLeft);
      if (failure != Failure::kNone) Fail(meeting, failure, peer);
    }
    __syncthreads();
    if (IsBroken(meeting)) TellGivenUp(meeting);
  }
  __syncthreads();
  if (!IsBroken(meeting)) return;
  for (int i = 0; i < move.num_leaves; ++i) Poison(move.leaves[i]);
}

}  // namespace

cudaError_t Enter(const Meeting& meeting, const PieceTable& send, const PieceTable& recv,
                  const int32_t* rank, cudaStream_t stream) {
  EnterKernel<<<1, kThreads, 0, stream>>>(meeting, send, recv, rank);
  return cudaGetLastError();
}

cudaError_t Leave(const Meeting& meeting, const Move& move, cudaStream_t stream) {
  LeaveKernel<<<1, kPoisonThreads, 0, stream>>>(meeting, move);
  return cudaGetLastError();
}

cudaError_t LoadMeetingKernels() {
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, EnterKernel)) return error;
  return cudaFuncGetAttributes(&attributes, LeaveKernel);
}

}  // namespace magi_jax::comm
