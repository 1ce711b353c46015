// Forward: one thread block owns the query rows of a tile and one head, and walks the tile's runs.
//
// Per block of keys: S = Q.K^T, mask, online softmax in exp2, O += P.V. K and V have one buffer
// each; V travels while S is computed and the next K while O is, so that copies hide behind
// products without a second stage. Each output is written once: results do not depend on
// scheduling.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_FORWARD_KERNEL_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_FORWARD_KERNEL_CUH_

#include <cuda_runtime.h>

#include "xla_ffi/kernels/sm80/config.h"
#include "xla_ffi/kernels/sm80/logits.cuh"
#include "xla_ffi/kernels/sm80/poison.cuh"
#include "xla_ffi/kernels/sm80/walk.cuh"

namespace magi_jax::sm80 {

template <typename T_, int kHeadDim, int kVHeadDim>
struct ForwardTraits {
  using T = T_;
  static constexpr TileConfig kTile = ForwardTile(kHeadDim, kVHeadDim);
  static constexpr int kThreads = kTile.threads();
  static constexpr int kColumns = kTile.columns;
  static constexpr int kMTiles = kTile.row_tiles();
  static constexpr int kRows = 2 * kMTiles;      // of a thread
  static constexpr int kSTiles = kColumns / 8;   // of S along keys
  static constexpr int kOTiles = kVHeadDim / 8;  // of O along head dims
  using TileQ = Tile<kTile.rows, kHeadDim>;
  using TileK = Tile<kColumns, kHeadDim>;
  using TileV = Tile<kColumns, kVHeadDim>;
  using Bits = ColumnBits<kColumns>;
};

// Running softmax of a thread's rows: maximal logit, and the thread's part of the sum.
template <int kRows>
struct SoftmaxState {
  float max[kRows], sum[kRows];
  uint32_t poisoned;  // bit r: row r sees a value that is inf or NaN and was zeroed, see poison.cuh
};

// Products to logits, in units of 1 / log2_factor of log2; columns not visible become -inf.
template <class C>
__device__ __forceinline__ void ToLogits(Fragment<C::kMTiles, C::kSTiles>& s, const Logits& logits,
                                         bool masked, const typename C::Bits (&visible)[C::kRows]) {
  if (logits.transforms()) {
#pragma unroll
    for (int m = 0; m < C::kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < C::kSTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] = logits.Transform(s[m][n][c]);
  }
  if (!masked) return;
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const auto bits = visible[r] >> ColumnShift();
#pragma unroll
    for (int n = 0; n < C::kSTiles; ++n)
#pragma unroll
      for (int c = r % 2 * 2; c < r % 2 * 2 + 2; ++c)
        if (!IsVisible(bits, n, c)) s[r / 2][n][c] = -INFINITY;
  }
}

// Logits to probabilities relative to the new maximum; O and the sums are brought to it.
template <class C>
__device__ __forceinline__ void UpdateSoftmax(Fragment<C::kMTiles, C::kSTiles>& s,
                                              Fragment<C::kMTiles, C::kOTiles>& o,
                                              SoftmaxState<C::kRows>& state, float log2_factor) {
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const int m = r / 2, c0 = r % 2 * 2;
    float row_max = state.max[r];
#pragma unroll
    for (int n = 0; n < C::kSTiles; ++n)
      row_max = fmaxf(row_max, fmaxf(s[m][n][c0], s[m][n][c0 + 1]));
    row_max = QuadMax(row_max);
    // A row that has seen nothing keeps a finite reference, so that exp2 gives 0 and never NaN.
    // (__fmul_rn: contracted into an fma, equal maxima would rescale by something else than 1.)
    const float reference = row_max == -INFINITY ? 0.f : __fmul_rn(row_max, log2_factor);
    // Maxima settle after a few blocks; most blocks leave O as it is.
    if (__any_sync(0xffffffff, row_max > state.max[r])) {
      const float rescale = Exp2(__fmul_rn(state.max[r], log2_factor) - reference);
      state.sum[r] *= rescale;
      state.max[r] = row_max;
#pragma unroll
      for (int n = 0; n < C::kOTiles; ++n) {
        o[m][n][c0] *= rescale;
        o[m][n][c0 + 1] *= rescale;
      }
    }
    float sum = state.sum[r];
#pragma unroll
    for (int n = 0; n < C::kSTiles; ++n)
#pragma unroll
      for (int c = c0; c < c0 + 2; ++c) {
        s[m][n][c] = Exp2(fmaf(s[m][n][c], log2_factor, -reference));
        sum += s[m][n][c];
      }
    state.sum[r] = sum;
  }
}

// Normalises and writes a thread's row, merged with what other calls gave in float32.
// All four threads of a row are here together: they share its lse.
template <class C>
__device__ __forceinline__ void WriteRow(const ForwardParams& params, int64_t row_head,
                                         const float (&o)[C::kOTiles][4], int c0, float max_log2,
                                         float sum, bool poisoned) {
  float weight = sum == 0.f ? 0.f : 1.f / sum;
  float lse = sum == 0.f ? -INFINITY : (max_log2 + log2f(sum)) * kLn2;
  if (poisoned) weight = NAN;
  float old_weight = 0.f;
  const bool merges = params.accumulates && params.out_dtype == DType::kF32;
  if (merges) {
    const float old = params.lse[row_head];
    const float top = fmaxf(old, lse);
    const float reference = top == -INFINITY ? 0.f : top;
    const float merged = reference + logf(expf(old - reference) + expf(lse - reference));
    old_weight = top == -INFINITY ? 0.f : expf(old - merged);
    weight *= top == -INFINITY ? 0.f : expf(lse - merged);
    lse = merged;
  }
  __syncwarp(0xfu << (Lane() & ~3));  // every thread of the row has read the old lse
  if (Lane() % 4 == 0) params.lse[row_head] = lse;
#pragma unroll
  for (int n = 0; n < C::kOTiles; ++n) {
    const int64_t at = row_head * (C::kOTiles * 8) + n * 8 + Lane() % 4 * 2;
    float x = o[n][c0] * weight, y = o[n][c0 + 1] * weight;
    if (merges) {
      const float2 old = *reinterpret_cast<const float2*>(static_cast<float*>(params.out) + at);
      x += old.x * old_weight;
      y += old.y * old_weight;
    }
    StorePair<typename C::T>(params.out, params.out_dtype, at, x, y);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads)
    ForwardKernel(const __grid_constant__ ForwardParams params) {
  using T = typename C::T;
  extern __shared__ __align__(128) char shared[];
  char* const v_tile = shared + C::TileQ::kBytes + C::TileK::kBytes;
  auto* const flags = reinterpret_cast<uint32_t*>(v_tile + C::TileV::kBytes);
  const uint32_t q_at = SharedAddress(shared), k_at = q_at + C::TileQ::kBytes;
  const uint32_t v_at = k_at + C::TileK::kBytes;

  const Problem& problem = params.problem;
  const TileRuns& table = params.by_query;
  const int head = blockIdx.x % problem.num_heads;
  const RowRange rows = RowsOf<C::kTile.rows>(table, problem.tile_size, problem.q_len,
                                              blockIdx.x / problem.num_heads);
  if (rows.tile < 0) return;
  const int kv_head = head / (problem.num_heads / problem.num_kv_heads);
  const HeadRows q(params.q, problem.q_len, problem.num_heads, head, problem.head_dim);
  const HeadRows k(params.k, problem.k_len, problem.num_kv_heads, kv_head, problem.head_dim);
  const HeadRows v(params.v, problem.k_len, problem.num_kv_heads, kv_head, problem.v_head_dim);
  const int warp_row = threadIdx.x / 32 * C::kMTiles * 16;

  Fragment<C::kMTiles, C::kOTiles> o;
  Clear<C::kMTiles, C::kOTiles>(o);
  SoftmaxState<C::kRows> state;
  for (int r = 0; r < C::kRows; ++r) {
    state.max[r] = -INFINITY;
    state.sum[r] = 0.f;
  }
  state.poisoned = 0;
  const Logits logits(problem);

  Walk<C::kColumns> walk(table, rows.tile, problem.k_len);
  const bool keeps = params.accumulates && walk.Done();  // what other calls gave
  if (keeps && params.row_max == nullptr) return;
  LoadRows<typename C::TileQ, C::kThreads>(q_at, q, rows.begin, rows.end);
  if (!walk.Done()) LoadRows<typename C::TileK, C::kThreads>(k_at, k, walk.begin, problem.k_len);
  CommitCopies();

  while (!walk.Done()) {
    WaitCopies<0>();
    __syncthreads();  // K is here, and nobody reads the previous V any more
    LoadRows<typename C::TileV, C::kThreads>(v_at, v, walk.begin, problem.k_len);
    CommitCopies();

    Fragment<C::kMTiles, C::kSTiles> s;
    Clear<C::kMTiles, C::kSTiles>(s);
    MultiplyTransposed<T, typename C::TileQ, typename C::TileK>(s, q_at, warp_row, k_at);
    const bool masked = walk.Masked();
    typename C::Bits visible[C::kRows];
    if (masked)
      VisibleColumns<false, C::kColumns>(visible, walk, table, params.slices, problem.num_slices,
                                         rows, rows.begin + warp_row);
    ToLogits<C>(s, logits, masked, visible);
    UpdateSoftmax<C>(s, o, state, logits.log2_factor);
    Operand<C::kMTiles, C::kSTiles> p;
    Round<T>(s, p);

    WaitCopies<0>();
    if (masked) {
      const uint64_t bad = BarrierAndClean<T, typename C::TileV, C::kThreads>(v_tile, flags);
      for (int r = 0; r < C::kRows; ++r)
        if (visible[r] & bad) state.poisoned |= 1u << r;
    } else {
      __syncthreads();  // V is here, and nobody reads K any more
    }
    walk.Next(table, problem.k_len);
    if (!walk.Done()) LoadRows<typename C::TileK, C::kThreads>(k_at, k, walk.begin, problem.k_len);
    CommitCopies();
    MultiplyOperand<T, typename C::TileV, C::kSTiles>(o, p, v_at);
  }
  WaitCopies<0>();

#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const float sum = QuadSum(state.sum[r]);
    const int row = rows.begin + warp_row + RowOf(r);
    if (row < rows.end) {
      const int64_t row_head = static_cast<int64_t>(row) * problem.num_heads + head;
      const float max_log2 = __fmul_rn(state.max[r], logits.log2_factor);
      if (params.row_max != nullptr && Lane() % 4 == 0) params.row_max[row_head] = max_log2 * kLn2;
      if (keeps) continue;
      WriteRow<C>(params, row_head, o[r / 2], r % 2 * 2, max_log2, sum, state.poisoned >> r & 1);
    }
  }
}

template <typename T, int kHeadDim, int kVHeadDim>
cudaError_t LaunchForward(const ForwardParams& params, cudaStream_t stream) {
  using C = ForwardTraits<T, kHeadDim, kVHeadDim>;
  const auto kernel = ForwardKernel<C>;
  constexpr int kSharedBytes = C::kTile.shared_bytes();
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks = params.by_query.num_tiles *
                     BlocksPerTile<C::kTile.rows>(params.problem.tile_size) *
                     params.problem.num_heads;
  kernel<<<blocks, C::kThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_FORWARD_KERNEL_CUH_
