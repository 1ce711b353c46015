// Casts by writing: a rank puts its rows where its peers want them. Where 12 SMs and more move rows
// this is faster than reading, whose requests take room on the link beside the rows that go the
// other way. A rank writes to another only under a lease (meeting.cuh), so that none writes where
// the other has given up.

#include <cuda_runtime.h>

#include "xla_ffi/comm/call.cuh"
#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/ptx.cuh"
#include "xla_ffi/comm/sources.cuh"

namespace magi_jax::comm {
namespace {

constexpr int kWarps = 12;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kSlots = 8;  // of a warp's ring
constexpr int kSlotBytes = 2048;
constexpr int kLaneVectors = kSlotBytes / 16 / kWarpSize;
constexpr int kPushBytes = kWarps * kSlots * (kSlotBytes + 8);
constexpr int64_t kUnitBytes = 4 * kSlotBytes;  // that a warp takes at once

// A warp's ring: bulk copies bring rows in from this rank's memory, stores of 16 bytes take them
// out over the link. All lanes call all functions together.
class PushRing {
 public:
  // `memory` has kPushBytes of the block, aligned to 128 bytes.
  __device__ explicit PushRing(char* memory) {
    const int warp = threadIdx.x / kWarpSize;
    slots_ = memory + warp * kSlots * kSlotBytes;
    barriers_ = reinterpret_cast<uint64_t*>(memory + kWarps * kSlots * kSlotBytes) + warp * kSlots;
  }

  __device__ void Initialize() {
    const int lane = threadIdx.x % kWarpSize;
    if (lane < kSlots) InitializeBarrier(&barriers_[lane]);
    __syncwarp();
  }

  // Addresses and bytes are multiples of 16.
  __device__ void Push(char* to, const char* from, int64_t bytes) {
    for (int64_t begin = 0; begin < bytes; begin += kSlotBytes) {
      const int64_t left = bytes - begin;
      if (filled_ - emptied_ == kSlots) Empty();
      Fill(to + begin, from + begin, static_cast<uint32_t>(left < kSlotBytes ? left : kSlotBytes));
    }
  }

  __device__ void Finish() {
    while (filled_ != emptied_) Empty();
  }

 private:
  __device__ void Fill(char* to, const char* from, uint32_t bytes) {
    const uint32_t slot = filled_++ % kSlots;
    const uint32_t lane = threadIdx.x % kWarpSize;
    // Each lane keeps what there is to know of one slot.
    if (lane == slot) {
      to_ = reinterpret_cast<uint64_t>(to);
      bytes_ = bytes;
    }
    if (lane != 0) return;
    ArriveExpecting(&barriers_[slot], bytes);
    BulkLoad(slots_ + slot * kSlotBytes, from, bytes, &barriers_[slot]);
  }

  __device__ void Empty() {
    const uint32_t slot = emptied_ % kSlots;
    const uint32_t lane = threadIdx.x % kWarpSize;
    AwaitBarrier(&barriers_[slot], emptied_ / kSlots & 1);
    auto* to = reinterpret_cast<uint4*>(__shfl_sync(~0u, to_, slot));
    const uint32_t vectors = __shfl_sync(~0u, bytes_, slot) / 16;
    const auto* from = reinterpret_cast<const uint4*>(slots_ + slot * kSlotBytes);
    uint4 values[kLaneVectors];
#pragma unroll
    for (int k = 0; k < kLaneVectors; ++k) {
      const uint32_t i = k * kWarpSize + lane;
      if (i < vectors) values[k] = from[i];
    }
#pragma unroll
    for (int k = 0; k < kLaneVectors; ++k) {
      const uint32_t i = k * kWarpSize + lane;
      if (i < vectors) to[i] = values[k];
    }
    __syncwarp();
    ++emptied_;
  }

  char* slots_;
  uint64_t* barriers_;
  uint32_t filled_ = 0, emptied_ = 0;
  uint64_t to_ = 0;
  uint32_t bytes_ = 0;
};

// Rows that lie together at both ends, and the first unit of them that this warp takes.
struct Run {
  int32_t peer = -1, src_row = 0, dst_row = 0;
  int64_t bytes = 0, unit = 0;

  __device__ bool HasUnit() const { return unit * kUnitBytes < bytes; }
};

__device__ Run RunOf(const Piece& piece, const Meeting& meeting, const Move& move,
                     uint32_t row_bytes) {
  const Span span = InsideSpan(piece, meeting.extents);
  Run run;
  if (span.begin >= span.end || (move.own_rows > 0 && piece.peer == meeting.rank)) return run;
  run.peer = piece.peer;
  run.src_row = piece.src_row + span.begin;
  run.dst_row = piece.dst_row + span.begin;
  run.bytes = int64_t{span.end - span.begin} * row_bytes;
  return run;
}

// Looks at pieces of a table 32 at a time, all lanes of a warp together: calls `body(piece)`, peer
// -1 past the end. The next pieces are on their way meanwhile, since every warp looks at all of
// them.
template <class Body>
__device__ void ForEachBatch(const PieceTable& table, int begin, int end, Body body) {
  const int lane = threadIdx.x % kWarpSize;
  const auto at = [&](int i) { return i < end ? table.pieces[i] : Piece{-1}; };
  Piece next = at(begin + lane);
  for (int base = begin; base < end; base += kWarpSize) {
    const Piece piece = next;
    next = at(base + kWarpSize + lane);
    body(piece);
  }
}

// Pushes the rows of one array. Warps of the grid take units in turns; each looks for those of all
// pieces that are its own.
__device__ void PushLeaf(const Meeting& meeting, const Move& move, const Leaf& leaf,
                         const Sources& targets, int first_piece, PushRing& ring) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t warps = gridDim.x * kWarps;
  // Neighbouring units go to different blocks.
  const uint32_t warp = blockIdx.x + gridDim.x * (threadIdx.x / kWarpSize);
  uint32_t before = 0;  // units of the pieces before these, modulo the warps
  const auto push = [&](const Piece& piece) {
    Run run = RunOf(piece, meeting, move, leaf.row_bytes);
    const auto units = static_cast<uint32_t>((run.bytes + kUnitBytes - 1) / kUnitBytes);
    uint32_t upto = units;
    for (int step = 1; step < kWarpSize; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    const uint32_t first = (before + upto - units) % warps;
    run.unit = (warp + warps - first) % warps;
    before = (before + __shfl_sync(~0u, upto, kWarpSize - 1)) % warps;
    for (unsigned left; (left = __ballot_sync(~0u, run.HasUnit())) != 0;) {
      const int one = __ffs(static_cast<int>(left)) - 1;
      const int32_t peer = __shfl_sync(~0u, run.peer, one);
      const int64_t begin = __shfl_sync(~0u, run.unit, one) * kUnitBytes;
      const int64_t rest = __shfl_sync(~0u, run.bytes, one) - begin;
      const int32_t src_row = __shfl_sync(~0u, run.src_row, one);
      const int32_t dst_row = __shfl_sync(~0u, run.dst_row, one);
      const char* from =
          static_cast<const char*>(leaf.operand) + int64_t{src_row} * leaf.row_bytes + begin;
      char* to = const_cast<char*>(targets.Row<char>(peer, dst_row, leaf.row_bytes)) + begin;
      ring.Push(to, from, rest < kUnitBytes ? rest : kUnitBytes);
      if (lane == one) run.unit += warps;
    }
  };
  ForEachBatch(meeting.send, first_piece, meeting.send.num_pieces, push);
  ForEachBatch(meeting.send, 0, first_piece, push);
}

__device__ void PushLeaves(const Meeting& meeting, const Move& move, Sources& targets,
                           PushRing& ring) {
  FenceAsyncProxy();  // what is read was written by ordinary stores
  const int first_piece = FirstPiece(meeting, meeting.send);
  for (int i = 0; i < move.num_leaves; ++i) {
    const Leaf& leaf = move.leaves[i];
    targets.Fill(meeting, leaf.result, i);
    PushLeaf(meeting, move, leaf, targets, first_piece, ring);
    ring.Finish();
  }
  __threadfence_system();
}

// Writes zeros to rows [begin, end) of this rank's results, with all threads of the grid but those
// of block 0, which meets the peers meanwhile.
__device__ void WriteZeros(const Move& move, int64_t begin, int64_t end) {
  const int64_t threads = int64_t{gridDim.x - 1} * kThreads;
  for (int i = 0; i < move.num_leaves; ++i) {
    const int64_t vectors = move.leaves[i].row_bytes / 16;
    auto* result = static_cast<uint4*>(move.leaves[i].result);
    for (int64_t at = begin * vectors + int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
         at < end * vectors; at += threads) {
      result[at] = uint4{};
    }
  }
}

// Writes zeros to the rows before each piece that this rank receives, and after the last, that
// belong to none: pieces are sorted.
__device__ void FillGaps(const Meeting& meeting, const Move& move) {
  if (blockIdx.x == 0) return;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t rows = meeting.extents.dst_rows;
  int64_t upto = 0;  // where the pieces before these end
  ForEachBatch(meeting.recv, 0, meeting.recv.num_pieces, [&](const Piece& piece) {
    const bool listed = piece.peer >= 0;
    const int64_t begin = listed ? Max(0, Min(piece.dst_row, rows)) : rows;
    const int64_t end = listed ? Max(0, Min(int64_t{piece.dst_row} + piece.n_rows, rows)) : rows;
    int64_t before = __shfl_up_sync(~0u, end, 1);
    if (lane == 0) before = upto;
    upto = __shfl_sync(~0u, end, kWarpSize - 1);
    for (unsigned left = __ballot_sync(~0u, before < begin); left != 0; left &= left - 1) {
      const int one = __ffs(static_cast<int>(left)) - 1;
      WriteZeros(move, __shfl_sync(~0u, before, one), __shfl_sync(~0u, begin, one));
    }
  });
  WriteZeros(move, upto, rows);
}

union PushShared {
  __device__ PushShared() {}
  Digests digests;
  Sources targets;
};

extern __shared__ __align__(128) char ring_memory[];

__global__ void __launch_bounds__(kThreads)
    PushKernel(const __grid_constant__ Meeting meeting, const __grid_constant__ Move move) {
  __shared__ PushShared shared;
  PushRing ring(ring_memory);
  ring.Initialize();
  Arrive(meeting);
  // Attention that waits for this call's start counts arrivals: those of all blocks come first.
  AwaitBlocks(meeting, 1);
  Arrive(meeting);  // where other calls have filled their maps
  if (!IsBroken(meeting)) FillGaps(meeting, move);
  if (blockIdx.x == 0) {
    Enter(meeting, shared.digests);
    TakeLeases(meeting);
  }
  Arrive(meeting);
  AwaitBlocks(meeting, 3);
  if (!IsBroken(meeting)) PushLeaves(meeting, move, shared.targets, ring);
  Arrive(meeting);
  if (blockIdx.x != 0) return;
  AwaitBlocks(meeting, 4);
  Leave(meeting, move);
}

}  // namespace

cudaError_t Push(const Meeting& meeting, const Move& move, cudaStream_t stream) {
  return LaunchCall(PushKernel, {move.num_blocks, kThreads, kPushBytes}, meeting, move, stream);
}

cudaError_t LoadPushKernel(bool stream) {
  if (cudaError_t error = LoadKernel(PushKernel, false)) return error;
  if (!stream) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(PushKernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, kPushBytes);
}

}  // namespace magi_jax::comm
