// Moves rows: the receiver reads them where the sender has them and writes its own result. A rank
// writes no buffer of another, so that one that is late, or whose table is damaged, spoils nothing.

#include <cuda_runtime.h>

#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/sources.cuh"

namespace magi_jax::comm {
namespace {

constexpr int kThreads = 768;
// 96 KiB in flight per block: a read over NVLink takes more than a microsecond.
constexpr int kUnroll = 8;

template <class Vector>
__device__ void CastLeaf(const Leaf& leaf, const Sources& sources, const RowMap& map) {
  const uint32_t per_row = leaf.row_bytes / sizeof(Vector);
  auto* result = static_cast<Vector*>(leaf.result);
  ForEachChunk<kUnroll>(per_row * map.rows, [&](const auto& index, const auto& valid) {
    const Vector* from[kUnroll];
    Vector values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t row = index[u] / per_row, column = index[u] - row * per_row;
      const int32_t peer = valid[u] ? map.row_of[row] : -1;
      const int32_t source = map.row_of[int64_t{map.rows} + row];
      from[u] = peer < 0 ? nullptr : sources.Row<Vector>(peer, source, leaf.row_bytes) + column;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      values[u] = Vector{};
      if (from[u] != nullptr) values[u] = *from[u];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (valid[u]) result[index[u]] = values[u];
    }
  });
}

__global__ void __launch_bounds__(kThreads)
    CastKernel(const __grid_constant__ Meeting meeting, const __grid_constant__ Move move) {
  __shared__ Sources sources;
  if (IsBroken(meeting)) return;
  for (int i = 0; i < move.num_leaves; ++i) {
    const Leaf& leaf = move.leaves[i];
    sources.Fill(meeting, leaf, i);
    if (leaf.row_bytes % 16 == 0) {
      CastLeaf<uint4>(leaf, sources, move.map);
    } else if (leaf.row_bytes % 4 == 0) {
      CastLeaf<uint32_t>(leaf, sources, move.map);
    } else {
      CastLeaf<uint8_t>(leaf, sources, move.map);
    }
  }
}

}  // namespace

cudaError_t Cast(const Meeting& meeting, const Move& move, cudaStream_t stream) {
  CastKernel<<<move.num_blocks, kThreads, 0, stream>>>(meeting, move);
  return cudaGetLastError();
}

cudaError_t LoadCastKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, CastKernel);
}

}  // namespace magi_jax::comm
