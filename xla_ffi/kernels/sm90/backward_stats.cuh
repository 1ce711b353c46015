// Prepares lse and delta for the backward kernel: [T, N] in, [N, stat_rows] out, so that the
// statistics of a block of queries are contiguous; lse in powers of two.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_STATS_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_STATS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/softmax.h"

namespace magi_jax::sm90 {

// Rows of the prepared statistics: a block may begin at the last query.
inline int StatRows(int q_len) { return (q_len + kStatTile - 1) / kStatTile * kStatTile + 128; }

// What is prepared, and from what.
struct Statistics {
  const float *lse, *delta;  // [T, N]
  float *lse_out, *delta_out;
  uint32_t* suspects;
  float delta_factor;
  int q_len, num_heads, stat_rows;

  __host__ __device__ int Tiles() const {
    return (stat_rows + kStatTile - 1) / kStatTile * ((num_heads + kStatTile - 1) / kStatTile);
  }
};

constexpr int kStatThreads = 256;  // that do a tile

// The block's tile of 32 rows and 32 heads, by 32 x 8 of its threads each. Queries without keys,
// and rows past the last query, get +inf, which makes every probability 0.
template <int kThreads>
__device__ void PrepareStats(const Statistics& stats, int first_tile) {
  constexpr int kTiles = kThreads / kStatThreads;
  __shared__ float lse_tiles[kTiles][kStatTile][kStatTile + 1];
  __shared__ float delta_tiles[kTiles][kStatTile][kStatTile + 1];
  auto& lse_tile = lse_tiles[threadIdx.x / kStatThreads];
  auto& delta_tile = delta_tiles[threadIdx.x / kStatThreads];
  const int x = threadIdx.x % 32, y = threadIdx.x % kStatThreads / 32;
  const int row_tiles = (stats.stat_rows + kStatTile - 1) / kStatTile;
  const int tile = first_tile + threadIdx.x / kStatThreads;
  const int row_start = tile % row_tiles * kStatTile, head_start = tile / row_tiles * kStatTile;
  for (int i = y; i < kStatTile; i += 8) {
    const int row = row_start + i, head = head_start + x;
    const int64_t at = static_cast<int64_t>(row) * stats.num_heads + head;
    const bool inside = row < stats.q_len && head < stats.num_heads;
    const float value = inside ? stats.lse[at] : -INFINITY;
    lse_tile[i][x] = value == -INFINITY ? INFINITY : value * kLog2e;
    delta_tile[i][x] = inside ? stats.delta[at] * stats.delta_factor : 0.0f;
  }
  __syncthreads();
  for (int i = y; i < kStatTile; i += 8) {
    const int row = row_start + x, head = head_start + i;
    if (head >= stats.num_heads) continue;
    const int64_t at = static_cast<int64_t>(head) * stats.stat_rows + row;
    const float head_lse = lse_tile[x][i], head_delta = delta_tile[x][i];
    stats.lse_out[at] = head_lse;
    stats.delta_out[at] = head_delta;
    const bool suspect = row < stats.q_len && !(isfinite(head_lse) && isfinite(head_delta));
    const bool any = __any_sync(0xFFFFFFFF, suspect);
    if (x == 0) stats.suspects[head * (stats.stat_rows / kStatTile) + row_start / kStatTile] = any;
  }
  __syncthreads();
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_STATS_CUH_
