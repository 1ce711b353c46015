// Online softmax over the rows of WGMMA accumulators. A thread holds two rows (index 0 and 1
// below), and the four threads of a quad share them.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_SOFTMAX_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_SOFTMAX_H_

#include <cmath>
#include <cstdint>

#include "xla_ffi/kernels/sm90/ptx.h"
#include "xla_ffi/kernels/sm90/wgmma.h"

namespace magi_jax::sm90 {

constexpr float kLog2e = 1.4426950408889634f;

struct RowStats {
  float reference[2];  // what is subtracted from scaled logits; -inf until a row has seen a key
  float sum[2];        // this thread's share of the sum of probabilities

  __device__ __forceinline__ void Reset() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // Whether all rows of the warp have seen a key.
  __device__ __forceinline__ bool AllSeen() const {
    return __all_sync(0xFFFFFFFF, reference[0] != -INFINITY && reference[1] != -INFINITY);
  }
};

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Logits that a plain multiplication cannot express as scale * max: capped ones, and scales that
// are not positive. Leaves them in powers of two.
template <int kCount>
__device__ __forceinline__ void TransformLogits(float (&logits)[kCount], float scale,
                                                float cap_log2) {
  if (cap_log2 == 0.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) logits[i] *= scale;
    return;
  }
  // tanh(x) = 1 - 2 / (1 + exp(2x)), accurate where the hardware's tanh has 11 bits.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    logits[i] = fmaf(-2.0f * cap_log2, Reciprocal(1.0f + Exp2(logits[i] * scale)), cap_log2);
  }
}

// Logits to probabilities relative to each row's reference, and this thread's share of their sums.
// In a short block only the first kFirst logits are looked at. kAllSeen: all rows have seen a key.
template <bool kAllSeen, int kFirst, int kCount>
__device__ __forceinline__ void Exponentiate(float (&logits)[kCount], bool is_short,
                                             const RowStats& stats, float scale_log2,
                                             float (&sums)[2]) {
  float reference[2], sum[2][2];
#pragma unroll
  for (int row = 0; row < 2; ++row)
    reference[row] = !kAllSeen && stats.reference[row] == -INFINITY ? 0.0f : stats.reference[row];
  const auto exponentiate = [&](int i) {
    return logits[i] = Exp2(fmaf(logits[i], scale_log2, -reference[i / 2 % 2]));
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i / 2][i % 2] = exponentiate(i);
#pragma unroll
  for (int i = 4; i < kFirst; ++i) sum[i / 2 % 2][i % 2] += exponentiate(i);
  if (__builtin_expect(!is_short, 1)) {
#pragma unroll
    for (int i = kFirst; i < kCount; ++i) sum[i / 2 % 2][i % 2] += exponentiate(i);
  }
  sums[0] = sum[0][0] + sum[0][1];
  sums[1] = sum[1][0] + sum[1][1];
}

// Turns logits into probabilities relative to each row's reference, which it moves when the row's
// maximum has grown by more than `threshold`, in powers of two. `rescale` is what earlier sums and
// outputs of the rows must be multiplied by. Returns whether any row of the warp moved.
template <int kCount>
__device__ __forceinline__ bool Softmax(float (&logits)[kCount], RowStats& stats,
                                        float (&rescale)[2], float scale_log2, float threshold) {
  bool moved = false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float top[2] = {logits[2 * row], logits[2 * row + 1]};
#pragma unroll
    for (int i = 4; i < kCount; i += 4) {
      top[0] = fmaxf(top[0], logits[i + 2 * row]);
      top[1] = fmaxf(top[1], logits[i + 2 * row + 1]);
    }
    const float row_top = QuadMax(fmaxf(top[0], top[1])) * scale_log2;
    // False for a row that still has no key: -inf - -inf is NaN.
    const bool moves = row_top - stats.reference[row] > threshold;
    rescale[row] = moves ? Exp2(stats.reference[row] - row_top) : 1.0f;
    stats.reference[row] = moves ? row_top : stats.reference[row];
    moved |= moves;
  }
  float sum[2];
  Exponentiate<false, kCount>(logits, false, stats, scale_log2, sum);
#pragma unroll
  for (int row = 0; row < 2; ++row) stats.sum[row] = fmaf(stats.sum[row], rescale[row], sum[row]);
  return __any_sync(0xFFFFFFFF, moved);
}

// The same without a look at the maximum: keeps the references, which must be finite. Nearly all
// blocks allow it, for probabilities and float sums bear references that are far too low. Returns
// false, with `stats` unchanged, if a sum of the warp came out above `most`: probabilities may then
// be too large for their type.
template <int kFirst, int kCount>
__device__ __forceinline__ bool SoftmaxAtReference(float (&logits)[kCount], bool is_short,
                                                   RowStats& stats, float (&sums)[2],
                                                   float scale_log2, float most) {
  Exponentiate<true, kFirst>(logits, is_short, stats, scale_log2, sums);
  // A NaN is not above: it is the result.
  if (__any_sync(0xFFFFFFFF, sums[0] > most || sums[1] > most)) return false;
  stats.sum[0] += sums[0];
  stats.sum[1] += sums[1];
  return true;
}

// Sums up to this can be brought down; above it, exponentials may have overflowed.
constexpr float kMostSum = 0x1p100f;
// A row's largest probability is no smaller than a thread's sum over its columns, which are fewer
// than 2^6, by this many powers of two. It comes out at 1 or above, so that small ones are as
// precise as with a reference at the maximum.
constexpr int kColumnsLog2 = 6;

__device__ __forceinline__ bool IsWithin(float sum) { return sum <= kMostSum || sum != sum; }

// Raises the references of rows whose probabilities came out too large, by the powers of two by
// which it brings them down, which is exact. Returns false if some sum of the warp is above
// kMostSum: the block must then be done again. `rescale` is what outputs must be multiplied by.
template <int kCount>
__device__ __forceinline__ bool RaiseReferences(float (&probabilities)[kCount], RowStats& stats,
                                                const float (&sums)[2], float (&rescale)[2]) {
  if (!__all_sync(0xFFFFFFFF, IsWithin(sums[0]) && IsWithin(sums[1]))) return false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float top = QuadMax(sums[row]);  // NaN only where all are
    const int exponent = (__float_as_int(top) >> 23) - 127;
    const int raise = max(top == top ? exponent - kColumnsLog2 : 0, 0);
    rescale[row] = __int_as_float((127 - raise) << 23);
    stats.reference[row] += static_cast<float>(raise);
    stats.sum[row] = (stats.sum[row] + sums[row]) * rescale[row];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) probabilities[i + 2 * row + j] *= rescale[row];
    }
  }
  return true;
}

__device__ __forceinline__ uint32_t Pack(float low, float high, __nv_bfloat16) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t Pack(float low, float high, __half) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float2 ToFloats(uint32_t pair, __nv_bfloat16) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000));
}

__device__ __forceinline__ float2 ToFloats(uint32_t pair, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Accumulator layout is A-operand layout once neighbours are packed: registers 4s .. 4s + 3 feed
// step s of PV.
template <typename Element, int kCount, int kPacked>
__device__ __forceinline__ void PackProbabilities(const float (&p)[kCount],
                                                  uint32_t (&packed)[kPacked]) {
  static_assert(kCount / 2 <= kPacked);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) packed[i] = Pack(p[2 * i], p[2 * i + 1], Element{});
}

template <int kCount>
__device__ __forceinline__ void Rescale(float (&output)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) output[i] *= factor[i / 2 % 2];
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_SOFTMAX_H_
