// dQ: one thread block owns the query rows of a tile and one head, and walks the tile's runs.
//
// Per block of keys: S = Q.K^T and dP = dO.V^T give dS in registers, then dQ += dS.K. K and V
// travel in two stages. dQ is written once, so nothing depends on scheduling.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_QUERY_GRAD_KERNEL_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_QUERY_GRAD_KERNEL_CUH_

#include <cuda_runtime.h>

#include "xla_ffi/kernels/sm80/gradient.cuh"

namespace magi_jax::sm80 {

template <typename T_, int kHeadDim, int kVHeadDim>
struct QueryGradTraits {
  using T = T_;
  static constexpr TileConfig kTile = QueryGradTile(kHeadDim, kVHeadDim);
  static constexpr int kThreads = kTile.threads();
  static constexpr int kColumns = kTile.columns;
  static constexpr int kMTiles = kTile.row_tiles();
  static constexpr int kRows = 2 * kMTiles;
  static constexpr int kSTiles = kColumns / 8;
  static constexpr int kQTiles = kHeadDim / 8;
  using TileQ = Tile<kTile.rows, kHeadDim>;
  using TileO = Tile<kTile.rows, kVHeadDim>;
  using TileK = Tile<kColumns, kHeadDim>;
  using TileV = Tile<kColumns, kVHeadDim>;
  using Bits = ColumnBits<kColumns>;
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
};

// Adds one block of keys to dQ; its K and V have landed in `stage`. Returns which rows are spoiled.
template <class C>
__device__ __forceinline__ uint32_t AddKeyBlock(Fragment<C::kMTiles, C::kQTiles>& dq, uint32_t q_at,
                                                uint32_t o_at, char* stage, uint32_t* flags,
                                                int warp_row, const Logits& logits,
                                                const RowStatistics<C::kRows>& statistics,
                                                bool masked,
                                                const typename C::Bits (&visible)[C::kRows]) {
  using T = typename C::T;
  const uint32_t k_at = SharedAddress(stage), v_at = k_at + C::TileK::kBytes;
  uint32_t poisoned = 0;
  if (masked) {
    const uint64_t bad = BarrierAndClean<T, typename C::TileK, C::kThreads>(stage, flags);
    for (int r = 0; r < C::kRows; ++r)
      if (visible[r] & bad) poisoned |= 1u << r;
  } else {
    __syncthreads();
  }
  Fragment<C::kMTiles, C::kSTiles> s, dp;
  Clear<C::kMTiles, C::kSTiles>(s);
  MultiplyTransposed<T, typename C::TileQ, typename C::TileK>(s, q_at, warp_row, k_at);
  Clear<C::kMTiles, C::kSTiles>(dp);
  MultiplyTransposed<T, typename C::TileO, typename C::TileV>(dp, o_at, warp_row, v_at);
  ToGradients<C::kMTiles, C::kSTiles>(s, dp, logits, statistics, masked, visible);
  Operand<C::kMTiles, C::kSTiles> ds;
  Round<T>(dp, ds);
  MultiplyOperand<T, typename C::TileK, C::kSTiles>(dq, ds, k_at);
  return poisoned;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads)
    QueryGradKernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) char shared[];
  char* const stages = shared + C::TileQ::kBytes + C::TileO::kBytes;
  auto* const flags = reinterpret_cast<uint32_t*>(stages + 2 * C::kStageBytes);
  const uint32_t q_at = SharedAddress(shared), o_at = q_at + C::TileQ::kBytes;

  const Problem& problem = params.problem;
  const TileRuns& table = params.by_query;
  const int head = blockIdx.x % problem.num_heads;
  const RowRange rows = RowsOf<C::kTile.rows>(table, problem.tile_size, problem.q_len,
                                              blockIdx.x / problem.num_heads);
  if (rows.tile < 0) return;
  const int kv_head = head / (problem.num_heads / problem.num_kv_heads);
  const HeadRows k(params.k, problem.k_len, problem.num_kv_heads, kv_head, problem.head_dim);
  const HeadRows v(params.v, problem.k_len, problem.num_kv_heads, kv_head, problem.v_head_dim);
  const int warp_row = threadIdx.x / 32 * C::kMTiles * 16;
  const auto load = [&](int first, int stage) {
    const uint32_t at = SharedAddress(stages) + stage * C::kStageBytes;
    LoadRows<typename C::TileK, C::kThreads>(at, k, first, problem.k_len);
    LoadRows<typename C::TileV, C::kThreads>(at + C::TileK::kBytes, v, first, problem.k_len);
  };

  Walk<C::kColumns> walk(table, rows.tile, problem.k_len);
  if (params.accumulate && walk.Done()) return;
  const HeadRows q(params.q, problem.q_len, problem.num_heads, head, problem.head_dim);
  const HeadRows o(params.dout, problem.q_len, problem.num_heads, head, problem.v_head_dim);
  LoadRows<typename C::TileQ, C::kThreads>(q_at, q, rows.begin, rows.end);
  LoadRows<typename C::TileO, C::kThreads>(o_at, o, rows.begin, rows.end);
  if (!walk.Done()) load(walk.begin, 0);
  CommitCopies();

  RowStatistics<C::kRows> statistics;
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const int row = rows.begin + warp_row + RowOf(r);
    const int64_t at = static_cast<int64_t>(row) * problem.num_heads + head;
    statistics.lse[r] = row < rows.end ? ToLog2Lse(params.lse[at]) : INFINITY;
    statistics.delta[r] = row < rows.end ? params.delta[at] : 0.f;
  }
  Fragment<C::kMTiles, C::kQTiles> dq;
  Clear<C::kMTiles, C::kQTiles>(dq);
  const Logits logits(problem);
  uint32_t poisoned = 0;

  for (int stage = 0; !walk.Done(); stage ^= 1) {
    const bool masked = walk.Masked();
    typename C::Bits visible[C::kRows];
    if (masked)
      VisibleColumns<false, C::kColumns>(visible, walk, table, params.slices, problem.num_slices,
                                         rows, rows.begin + warp_row);
    walk.Next(table, problem.k_len);
    if (!walk.Done()) load(walk.begin, stage ^ 1);
    CommitCopies();
    WaitCopies<1>();
    poisoned |= AddKeyBlock<C>(dq, q_at, o_at, stages + stage * C::kStageBytes, flags, warp_row,
                               logits, statistics, masked, visible);
    __syncthreads();  // nobody reads this stage any more
  }
  WaitCopies<0>();

#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const int row = rows.begin + warp_row + RowOf(r);
    if (row >= rows.end) continue;
    const int64_t at = static_cast<int64_t>(row) * problem.num_heads + head;
    const bool is_poisoned = poisoned >> r & 1;
    if (params.accumulate) {
      AddRow(params.dq, at, dq, r, problem.scale, is_poisoned);
    } else {
      StoreRow<typename C::T>(params.dq, DType::kF32, at, dq, r, problem.scale, is_poisoned);
    }
  }
}

template <typename T, int kHeadDim, int kVHeadDim>
cudaError_t LaunchQueryGrad(const BackwardParams& params, cudaStream_t stream) {
  using C = QueryGradTraits<T, kHeadDim, kVHeadDim>;
  const auto kernel = QueryGradKernel<C>;
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

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_QUERY_GRAD_KERNEL_CUH_
