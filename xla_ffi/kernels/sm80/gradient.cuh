// What both backward kernels share: from products to probabilities and gradients of the products.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_GRADIENT_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_GRADIENT_CUH_

#include "xla_ffi/kernels/sm80/config.h"
#include "xla_ffi/kernels/sm80/logits.cuh"
#include "xla_ffi/kernels/sm80/poison.cuh"
#include "xla_ffi/kernels/sm80/walk.cuh"

namespace magi_jax::sm80 {

// lse in log2 units. A query that sees nothing gets +inf, so that its probabilities are 0 and not
// NaN.
__device__ __forceinline__ float ToLog2Lse(float lse) {
  return lse == -INFINITY ? INFINITY : lse * kLog2E;
}

// lse and delta when queries are rows: registers, one pair for each row of the thread.
template <int kRows>
struct RowStatistics {
  float lse[kRows], delta[kRows];

  __device__ __forceinline__ float Lse(int m, int, int c) const { return lse[2 * m + c / 2]; }
  __device__ __forceinline__ float Delta(int m, int, int c) const { return delta[2 * m + c / 2]; }
};

// lse and delta when queries are columns: shared memory, natural units.
struct ColumnStatistics {
  const float *lse, *delta;

  __device__ __forceinline__ float Lse(int, int n, int c) const {
    return ToLog2Lse(lse[n * 8 + Lane() % 4 * 2 + c % 2]);
  }
  __device__ __forceinline__ float Delta(int, int n, int c) const {
    return delta[n * 8 + Lane() % 4 * 2 + c % 2];
  }
};

// In place: s from q.k to probabilities p, dp from dout.v to the gradient of scale * q.k,
// p * (dp - delta) * slope of the cap. Invisible cells become 0 in both, whatever they held.
template <int kMTiles, int kNTiles, class Statistics, typename Bits>
__device__ __forceinline__ void ToGradients(Fragment<kMTiles, kNTiles>& s,
                                            Fragment<kMTiles, kNTiles>& dp, const Logits& logits,
                                            const Statistics& statistics, bool masked,
                                            const Bits (&visible)[2 * kMTiles]) {
  if (logits.capped()) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float tanh = logits.Tanh(s[m][n][c]);
          s[m][n][c] = Exp2(logits.cap_log2 * tanh - statistics.Lse(m, n, c));
          dp[m][n][c] =
              s[m][n][c] * (dp[m][n][c] - statistics.Delta(m, n, c)) * (1.f - tanh * tanh);
        }
  } else {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[m][n][c] = Exp2(fmaf(s[m][n][c], logits.factor, -statistics.Lse(m, n, c)));
          dp[m][n][c] = s[m][n][c] * (dp[m][n][c] - statistics.Delta(m, n, c));
        }
  }
  if (!masked) return;
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r) {
    const Bits bits = visible[r] >> ColumnShift();
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int c = r % 2 * 2; c < r % 2 * 2 + 2; ++c)
        if (!IsVisible(bits, n, c)) s[r / 2][n][c] = dp[r / 2][n][c] = 0.f;
  }
}

// Writes a row of accumulators times `factor`, or NaN, to row `at` of a dense tensor.
template <typename T, int kMTiles, int kNTiles>
__device__ __forceinline__ void StoreRow(void* out, DType dtype, int64_t row,
                                         const Fragment<kMTiles, kNTiles>& acc, int r, float factor,
                                         bool poisoned) {
  if (poisoned) factor = NAN;
  const int64_t first = row * (kNTiles * 8) + Lane() % 4 * 2;
#pragma unroll
  for (int n = 0; n < kNTiles; ++n)
    StorePair<T>(out, dtype, first + n * 8, acc[r / 2][n][r % 2 * 2] * factor,
                 acc[r / 2][n][r % 2 * 2 + 1] * factor);
}

// Adds it to a float32 tensor that no other thread adds to.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void AddRow(float* out, int64_t row,
                                       const Fragment<kMTiles, kNTiles>& acc, int r, float factor,
                                       bool poisoned) {
  if (poisoned) factor = NAN;
  auto* const sums = reinterpret_cast<float2*>(out + row * (kNTiles * 8) + Lane() % 4 * 2);
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
    const float2 sum = sums[4 * n];
    sums[4 * n] = make_float2(fmaf(acc[r / 2][n][r % 2 * 2], factor, sum.x),
                              fmaf(acc[r / 2][n][r % 2 * 2 + 1], factor, sum.y));
  }
}

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_GRADIENT_CUH_
