// dK and dV: one thread block owns the key rows of a tile and one kv head, and walks, for each
// query head of the group in turn, the runs of queries that see the tile.
//
// Everything is transposed, so that accumulators never leave registers: per block of queries, S^T =
// K.Q^T and dP^T = V.dO^T give P^T and dS^T, then dV += P^T.dO and dK += dS^T.Q. Q, dO, lse and
// delta travel in two stages. The group is reduced inside the thread block, in a fixed order: no
// atomics, the same bits in every run, and keys are never repeated.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_KEY_GRAD_KERNEL_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_KEY_GRAD_KERNEL_CUH_

#include <cuda_runtime.h>

#include "xla_ffi/kernels/sm80/gradient.cuh"

namespace magi_jax::sm80 {

template <typename T_, int kHeadDim, int kVHeadDim, bool kMakesDk_, bool kMakesDv_>
struct KeyGradTraits {
  using T = T_;
  static constexpr bool kMakesDk = kMakesDk_, kMakesDv = kMakesDv_;
  static constexpr TileConfig kTile = KeyGradTile(kHeadDim, kVHeadDim);
  static constexpr int kThreads = kTile.threads();
  static constexpr int kColumns = kTile.columns;
  static constexpr int kMTiles = kTile.row_tiles();
  static constexpr int kRows = 2 * kMTiles;
  static constexpr int kSTiles = kColumns / 8;
  static constexpr int kKTiles = kMakesDk ? kHeadDim / 8 : 2;  // along head dims; 2 = not made
  static constexpr int kVTiles = kMakesDv ? kVHeadDim / 8 : 2;
  using TileK = Tile<kTile.rows, kHeadDim>;
  using TileV = Tile<kTile.rows, kVHeadDim>;
  using TileQ = Tile<kColumns, kHeadDim>;
  using TileO = Tile<kColumns, kVHeadDim>;
  using Bits = ColumnBits<kColumns>;
  static constexpr int kStageBytes = TileQ::kBytes + TileO::kBytes + kColumns * 8;
};

// The walks of all heads of a group, one after the other.
template <int kColumns>
struct GroupWalk {
  Walk<kColumns> walk;
  int head, end_head;

  __device__ __forceinline__ bool Done() const { return walk.Done(); }

  __device__ __forceinline__ void Next(const TileRuns& table, int tile, int length) {
    walk.Next(table, length);
    if (!walk.Done() || head + 1 >= end_head) return;
    ++head;
    walk = Walk<kColumns>(table, tile, length);
  }
};

// Starts copying Q, dO, lse and delta of the walk's block to a stage.
template <class C>
__device__ __forceinline__ void LoadQueryBlock(uint32_t at, const BackwardParams& params,
                                               const GroupWalk<C::kColumns>& group) {
  const Problem& problem = params.problem;
  const int first = group.walk.begin;
  const HeadRows q(params.q, problem.q_len, problem.num_heads, group.head, problem.head_dim);
  const HeadRows o(params.dout, problem.q_len, problem.num_heads, group.head, problem.v_head_dim);
  LoadRows<typename C::TileQ, C::kThreads>(at, q, first, problem.q_len);
  at += C::TileQ::kBytes;
  LoadRows<typename C::TileO, C::kThreads>(at, o, first, problem.q_len);
  at += C::TileO::kBytes;
  if (threadIdx.x < C::kColumns) {
    const int row = first + threadIdx.x;
    const bool inside = row < problem.q_len;
    const int64_t from =
        inside ? static_cast<int64_t>(row) * problem.num_heads + group.head : int64_t{0};
    CopyAsync4(at + threadIdx.x * 4, params.lse + from, inside);
    CopyAsync4(at + (C::kColumns + threadIdx.x) * 4, params.delta + from, inside);
  }
}

// Adds one block of queries, landed in `stage`, to dK and dV. Returns which rows are spoiled.
template <class C>
__device__ __forceinline__ uint32_t AddQueryBlock(Fragment<C::kMTiles, C::kKTiles>& dk,
                                                  Fragment<C::kMTiles, C::kVTiles>& dv,
                                                  uint32_t k_at, char* stage, uint32_t* flags,
                                                  int warp_row, const Logits& logits, bool masked,
                                                  const typename C::Bits (&visible)[C::kRows]) {
  using T = typename C::T;
  char* const o_tile = stage + C::TileQ::kBytes;
  const uint32_t q_at = SharedAddress(stage), o_at = SharedAddress(o_tile);
  const auto* lse = reinterpret_cast<const float*>(o_tile + C::TileO::kBytes);
  uint32_t poisoned = 0;
  if (masked) {
    const uint64_t bad = BarrierAndClean<T, typename C::TileQ, C::kThreads>(stage, flags) |
                         BarrierAndClean<T, typename C::TileO, C::kThreads>(o_tile, flags + 2);
    for (int r = 0; r < C::kRows; ++r)
      if (visible[r] & bad) poisoned |= 1u << r;
  } else {
    __syncthreads();
  }
  Fragment<C::kMTiles, C::kSTiles> s, dp;
  Clear<C::kMTiles, C::kSTiles>(s);
  MultiplyTransposed<T, typename C::TileK, typename C::TileQ>(s, k_at, warp_row, q_at);
  Clear<C::kMTiles, C::kSTiles>(dp);
  if constexpr (C::kMakesDk)
    MultiplyTransposed<T, typename C::TileV, typename C::TileO>(dp, k_at + C::TileK::kBytes,
                                                                warp_row, o_at);
  const ColumnStatistics statistics{lse, lse + C::kColumns};
  ToGradients<C::kMTiles, C::kSTiles>(s, dp, logits, statistics, masked, visible);
  if constexpr (C::kMakesDv) {
    Operand<C::kMTiles, C::kSTiles> p;
    Round<T>(s, p);
    MultiplyOperand<T, typename C::TileO, C::kSTiles>(dv, p, o_at);
  }
  if constexpr (C::kMakesDk) {
    Operand<C::kMTiles, C::kSTiles> ds;
    Round<T>(dp, ds);
    MultiplyOperand<T, typename C::TileQ, C::kSTiles>(dk, ds, q_at);
  }
  return poisoned;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads)
    KeyGradKernel(const __grid_constant__ BackwardParams params) {
  using T = typename C::T;
  extern __shared__ __align__(128) char shared[];
  char* const stages = shared + C::TileK::kBytes + C::TileV::kBytes;
  auto* const flags = reinterpret_cast<uint32_t*>(stages + 2 * C::kStageBytes);
  const uint32_t k_at = SharedAddress(shared), stages_at = SharedAddress(stages);

  const Problem& problem = params.problem;
  const TileRuns& table = params.by_key;
  const int kv_head = blockIdx.x % problem.num_kv_heads;
  const RowRange rows = RowsOf<C::kTile.rows>(table, problem.tile_size, problem.k_len,
                                              blockIdx.x / problem.num_kv_heads);
  if (rows.tile < 0) return;
  const int group_size = problem.num_heads / problem.num_kv_heads;
  const int warp_row = threadIdx.x / 32 * C::kMTiles * 16;

  GroupWalk<C::kColumns> group{Walk<C::kColumns>(table, rows.tile, problem.q_len),
                               kv_head * group_size, (kv_head + 1) * group_size};
  const HeadRows k(params.k, problem.k_len, problem.num_kv_heads, kv_head, problem.head_dim);
  const HeadRows v(params.v, problem.k_len, problem.num_kv_heads, kv_head, problem.v_head_dim);
  LoadRows<typename C::TileK, C::kThreads>(k_at, k, rows.begin, rows.end);
  if constexpr (C::kMakesDk)
    LoadRows<typename C::TileV, C::kThreads>(k_at + C::TileK::kBytes, v, rows.begin, rows.end);
  if (!group.Done()) LoadQueryBlock<C>(stages_at, params, group);
  CommitCopies();

  Fragment<C::kMTiles, C::kKTiles> dk;
  Fragment<C::kMTiles, C::kVTiles> dv;
  Clear<C::kMTiles, C::kKTiles>(dk);
  Clear<C::kMTiles, C::kVTiles>(dv);
  const Logits logits(problem);
  uint32_t poisoned = 0;

  for (int stage = 0; !group.Done(); stage ^= 1) {
    const bool masked = group.walk.Masked();
    typename C::Bits visible[C::kRows];
    if (masked)
      VisibleColumns<true, C::kColumns>(visible, group.walk, table, params.slices,
                                        problem.num_slices, rows, rows.begin + warp_row);
    group.Next(table, rows.tile, problem.q_len);
    if (!group.Done()) LoadQueryBlock<C>(stages_at + (stage ^ 1) * C::kStageBytes, params, group);
    CommitCopies();
    WaitCopies<1>();
    poisoned |= AddQueryBlock<C>(dk, dv, k_at, stages + stage * C::kStageBytes, flags, warp_row,
                                 logits, masked, visible);
    __syncthreads();  // nobody reads this stage any more
  }
  WaitCopies<0>();

#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const int row = rows.begin + warp_row + RowOf(r);
    if (row >= rows.end) continue;
    const int64_t at = static_cast<int64_t>(row) * problem.num_kv_heads + kv_head;
    const bool spoiled = poisoned >> r & 1;
    if constexpr (C::kMakesDk)
      StoreRow<T>(params.dk, params.dkv_dtype, at, dk, r, problem.scale, spoiled);
    if constexpr (C::kMakesDv) StoreRow<T>(params.dv, params.dkv_dtype, at, dv, r, 1.f, spoiled);
  }
}

template <class C>
cudaError_t LaunchKeyGradPass(const BackwardParams& params, cudaStream_t stream) {
  const auto kernel = KeyGradKernel<C>;
  constexpr int kSharedBytes = C::kTile.shared_bytes();
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks = params.by_key.num_tiles *
                     BlocksPerTile<C::kTile.rows>(params.problem.tile_size) *
                     params.problem.num_kv_heads;
  kernel<<<blocks, C::kThreads, kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename T, int kHeadDim, int kVHeadDim>
cudaError_t LaunchKeyGrad(const BackwardParams& params, cudaStream_t stream) {
  if constexpr (KeyGradTile(kHeadDim, kVHeadDim).passes == 1) {
    return LaunchKeyGradPass<KeyGradTraits<T, kHeadDim, kVHeadDim, true, true>>(params, stream);
  } else {
    const cudaError_t error =
        LaunchKeyGradPass<KeyGradTraits<T, kHeadDim, kVHeadDim, true, false>>(params, stream);
    if (error != cudaSuccess) return error;
    return LaunchKeyGradPass<KeyGradTraits<T, kHeadDim, kVHeadDim, false, true>>(params, stream);
  }
}

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_KEY_GRAD_KERNEL_CUH_
