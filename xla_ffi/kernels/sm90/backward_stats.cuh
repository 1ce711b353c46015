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
inline int StatRows(int q_len) { return (q_len + kStatTile - 1) / kStatTile * kStatTile + 64; }

// Blocks of 32 x 8 threads over tiles of 32 x 32. Queries without
// keys, and rows past the last query, get +inf, which makes every probability 0.
__global__ void __launch_bounds__(256)
    PrepareStats(const float* lse, const float* delta, float* lse_out, float* delta_out,
                 uint32_t* suspects, float delta_factor, int q_len, int num_heads, int stat_rows) {
  __shared__ float lse_tile[kStatTile][kStatTile + 1], delta_tile[kStatTile][kStatTile + 1];
  const int row_start = blockIdx.x * kStatTile, head_start = blockIdx.y * kStatTile;
  for (int i = threadIdx.y; i < kStatTile; i += 8) {
    const int row = row_start + i, head = head_start + threadIdx.x;
    const int64_t at = static_cast<int64_t>(row) * num_heads + head;
    const bool inside = row < q_len && head < num_heads;
    const float value = inside ? lse[at] : -INFINITY;
    lse_tile[i][threadIdx.x] = value == -INFINITY ? INFINITY : value * kLog2e;
    delta_tile[i][threadIdx.x] = inside ? delta[at] * delta_factor : 0.0f;
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kStatTile; i += 8) {
    const int row = row_start + threadIdx.x, head = head_start + i;
    if (head >= num_heads) continue;
    const int64_t at = static_cast<int64_t>(head) * stat_rows + row;
    const float head_lse = lse_tile[threadIdx.x][i], head_delta = delta_tile[threadIdx.x][i];
    lse_out[at] = head_lse;
    delta_out[at] = head_delta;
    const bool suspect = row < q_len && !(isfinite(head_lse) && isfinite(head_delta));
    const bool any = __any_sync(0xFFFFFFFF, suspect);
    if (threadIdx.x == 0) suspects[head * (stat_rows / kStatTile) + blockIdx.x] = any;
  }
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_STATS_CUH_
