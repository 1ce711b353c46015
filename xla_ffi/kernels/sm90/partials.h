// Pieces of one tile's keys, joined. Each warp for itself: it leaves its 16 rows in scratch memory,
// and the last of the warps that have the same rows adds them all up, in the order of their keys.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_PARTIALS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_PARTIALS_H_

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/softmax.h"

namespace magi_jax::sm90 {

template <typename Traits>
class Partials {
 public:
  static constexpr int kCount = Traits::kVHeadDim / 2;  // outputs of a thread
  static constexpr int kVectors = kCount / 4;

  __device__ __forceinline__ Partials(const SplitScratch& scratch, const TileNote& tile,
                                      int partners)
      : scratch_(scratch),
        first_place_(tile.FirstPlace() * partners),
        partners_(partners),
        rank_(partners > 1 ? ClusterRank() : 0),
        warp_(threadIdx.x / 32 - 4),
        lane_(threadIdx.x % 32) {}

  // Leaves the rows of this thread at a piece's place. Returns whether those of all pieces are
  // there now.
  __device__ __forceinline__ bool Leave(int piece, int cuts, const float (&weights)[2],
                                        const float (&lse_log2)[2], const float (&o)[kCount]) {
    float4* const out = Out(piece);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      out[32 * i] = make_float4(o[4 * i] * weights[0], o[4 * i + 1] * weights[0],
                                o[4 * i + 2] * weights[1], o[4 * i + 3] * weights[1]);
    }
    *Lse(piece) = make_float2(lse_log2[0], lse_log2[1]);
    __threadfence();
    __syncwarp();
    int arrived = 0;
    if (lane_ == 0) arrived = atomicAdd(scratch_.arrivals + Place(0), 1);
    arrived = __shfl_sync(0xFFFFFFFF, arrived, 0);
    __threadfence();
    return arrived == cuts - 1;
  }

  // Adds up what all pieces have left.
  __device__ __forceinline__ void Join(int cuts, float (&lse_log2)[2], float (&o)[kCount]) {
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int piece = 0; piece < cuts; ++piece) {
      const float2 lse = __ldcg(Lse(piece));
      top[0] = fmaxf(top[0], lse.x);
      top[1] = fmaxf(top[1], lse.y);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) top[row] = top[row] == -INFINITY ? 0.0f : top[row];
#pragma unroll 1
    for (int piece = 0; piece < cuts; ++piece) {
      const float2 lse = __ldcg(Lse(piece));
      sum[0] += Exp2(lse.x - top[0]);
      sum[1] += Exp2(lse.y - top[1]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row)
      lse_log2[row] = sum[row] == 0.0f ? -INFINITY : top[row] + Log2(sum[row]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] = 0.0f;
#pragma unroll 1
    for (int piece = 0; piece < cuts; ++piece) AddPiece(piece, top, sum, o);
  }

 private:
  __device__ __forceinline__ void AddPiece(int piece, const float (&top)[2], const float (&sum)[2],
                                           float (&o)[kCount]) {
    const float2 lse = __ldcg(Lse(piece));
    const float4* const out = Out(piece);
    // A row without keys: 0, and NaN where a hidden value spoiled a piece, which shows so.
    const float weights[2] = {sum[0] == 0.0f ? 0.0f : Exp2(lse.x - top[0]) * Reciprocal(sum[0]),
                              sum[1] == 0.0f ? 0.0f : Exp2(lse.y - top[1]) * Reciprocal(sum[1])};
    constexpr int kBatch = 4;
    static_assert(kVectors % kBatch == 0);
#pragma unroll
    for (int first = 0; first < kVectors; first += kBatch) {
      float4 there[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) there[j] = __ldcg(out + 32 * (first + j));
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = 4 * (first + j);
        o[i] = fmaf(there[j].x, weights[0], o[i]);
        o[i + 1] = fmaf(there[j].y, weights[0], o[i + 1]);
        o[i + 2] = fmaf(there[j].z, weights[1], o[i + 2]);
        o[i + 3] = fmaf(there[j].w, weights[1], o[i + 3]);
      }
    }
  }

  __device__ __forceinline__ int Place(int piece) const {
    return (first_place_ + piece * partners_ + rank_) * kSplitWarps + warp_;
  }

  __device__ __forceinline__ float2* Lse(int piece) const {
    return scratch_.lse + Place(piece) * 32 + lane_;
  }

  __device__ __forceinline__ float4* Out(int piece) const {
    return scratch_.out + static_cast<int64_t>(Place(piece)) * (kVectors * 32) + lane_;
  }

  const SplitScratch& scratch_;
  const int first_place_, partners_, rank_, warp_, lane_;
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_PARTIALS_H_
