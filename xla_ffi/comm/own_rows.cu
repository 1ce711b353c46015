// Rows of a cast that stay on their rank, copied by a quarter of the SMs: with that many in flight
// memory is as busy as with all, and computation beside it has the others. The kernel that moves
// the other rows has few, whose reads of their own memory would take the longer the fewer they are.

#include <cuda_runtime.h>

#include <algorithm>

#include "xla_ffi/comm/call.cuh"
#include "xla_ffi/comm/kernels.h"

namespace magi_jax::comm {
namespace {

constexpr int kThreads = 1024;
constexpr int kUnroll = 4;  // vectors in flight per thread
constexpr int kUnitBytes = kThreads * kUnroll * 16;
constexpr int64_t kMostBlocks = 32;  // one SM each

// Copies `count` vectors, a unit of them per block and turn. `units` is where the turns stand.
template <class Vector>
__device__ void CopyInTurns(Vector* to, const Vector* from, uint64_t count, uint64_t* units) {
  constexpr uint32_t kUnit = kUnitBytes / sizeof(Vector);
  constexpr int kEach = kUnit / kThreads;
  const uint64_t first = (blockIdx.x + gridDim.x - *units % gridDim.x) % gridDim.x;
  const uint64_t total = (count + kUnit - 1) / kUnit;
  for (uint64_t unit = first; unit < total; unit += gridDim.x) {
    const uint64_t begin = unit * kUnit + threadIdx.x;
    if (unit + 1 < total) {
#pragma unroll 1
      for (int group = 0; group < kEach; group += kUnroll) {
        Vector values[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) values[u] = from[begin + (group + u) * kThreads];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) to[begin + (group + u) * kThreads] = values[u];
      }
    } else {
      for (uint64_t i = begin; i < count; i += kThreads) to[i] = from[i];
    }
  }
  *units += total;
}

__device__ void CopyRun(const Leaf& leaf, int32_t src_row, int32_t dst_row, int32_t rows,
                        uint64_t* units) {
  const auto* from = static_cast<const char*>(leaf.operand) + int64_t{src_row} * leaf.row_bytes;
  auto* to = static_cast<char*>(leaf.result) + int64_t{dst_row} * leaf.row_bytes;
  const uint64_t bytes = uint64_t{static_cast<uint32_t>(rows)} * leaf.row_bytes;
  if (leaf.row_bytes % 16 == 0) {
    CopyInTurns(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), bytes / 16,
                units);
  } else if (leaf.row_bytes % 4 == 0) {
    CopyInTurns(reinterpret_cast<uint32_t*>(to), reinterpret_cast<const uint32_t*>(from), bytes / 4,
                units);
  } else {
    CopyInTurns(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from), bytes,
                units);
  }
}

__global__ void __launch_bounds__(kThreads)
    CopyOwnKernel(const __grid_constant__ Meeting meeting, const __grid_constant__ Move move) {
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(meeting.apart), 1ull);
  // The results of a call that failed are overwritten, and stay so.
  if (IsBroken(meeting)) return;
  const int lane = threadIdx.x % kWarpSize;
  uint64_t units = 0;
  for (int base = 0; base < meeting.recv.num_pieces; base += kWarpSize) {
    const bool listed = base + lane < meeting.recv.num_pieces;
    const Piece piece = listed ? meeting.recv.pieces[base + lane] : Piece{-1};
    const Span span = InsideSpan(piece, meeting.extents);
    const bool stays = piece.peer == meeting.rank && span.begin < span.end;
    for (unsigned left = __ballot_sync(~0u, stays); left != 0; left &= left - 1) {
      const int one = __ffs(static_cast<int>(left)) - 1;
      const int32_t src_row = __shfl_sync(~0u, piece.src_row + span.begin, one);
      const int32_t dst_row = __shfl_sync(~0u, piece.dst_row + span.begin, one);
      const int32_t rows = __shfl_sync(~0u, span.end - span.begin, one);
      for (int i = 0; i < move.num_leaves; ++i) {
        CopyRun(move.leaves[i], src_row, dst_row, rows, &units);
      }
    }
  }
}

}  // namespace

int32_t OwnRowBlocks(const Move& move) {
  if (move.own_rows == 0) return 0;
  int64_t bytes = 0;
  for (int i = 0; i < move.num_leaves; ++i) bytes += move.own_rows * move.leaves[i].row_bytes;
  return static_cast<int32_t>(std::clamp<int64_t>(bytes / kUnitBytes, 1, kMostBlocks));
}

cudaError_t CopyOwnRows(const Meeting& meeting, const Move& move, cudaStream_t stream) {
  return LaunchCall(CopyOwnKernel, {OwnRowBlocks(move), kThreads, 0}, meeting, move, stream);
}

cudaError_t LoadOwnRowsKernel() { return LoadKernel(CopyOwnKernel, false); }

}  // namespace magi_jax::comm
