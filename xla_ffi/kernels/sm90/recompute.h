// Rows spoiled by values that they do not see, done again.
//
// A hidden key has probability 0, but 0 * inf and 0 * NaN are NaN, and products of matrices do not
// look. The main loop does not look either: it tests a tile's finished outputs, once, and a warp
// that finds one that is not finite comes here. Logits and sums are right in any case, for masks
// select logits; so this is one more product of probabilities and values, from global memory, with
// what is not finite left out. Rows that see such a value become NaN as a whole. Rare and slow.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_RECOMPUTE_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_RECOMPUTE_H_

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/ptx.h"
#include "xla_ffi/kernels/sm90/softmax.h"

namespace magi_jax::sm90 {

// D[16, 8] += A[16, 16] B[16, 8] by one warp.
#define MAGI_WARP_PRODUCT(type, name)                                                             \
  __device__ __forceinline__ void WarpProduct(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, \
                                              uint32_t b1, type) {                                \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                           \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                 \
  }
MAGI_WARP_PRODUCT(__nv_bfloat16, "bf16")
MAGI_WARP_PRODUCT(__half, "f16")
#undef MAGI_WARP_PRODUCT

// The 16 rows of one warp. The four threads of a quad share two rows, 8 apart, as in the
// accumulators of the main loop; keys go by in steps of 16, of which a thread holds the columns
// 2 (lane % 4) + {0, 1, 8, 9}.
template <typename Traits>
class RowsAgain {
 public:
  using Element = typename Traits::Element;
  static constexpr int kCount = Traits::kVHeadDim / 2;  // outputs of a thread
  static constexpr int kStep = 16;
  // All ones in what is not finite.
  static constexpr uint32_t kExponent = std::is_same_v<Element, __half> ? 0x7C00 : 0x7F80;
  // Probabilities are made as large as float16 bears, so that small ones keep their precision.
  static constexpr float kGain = 256.0f, kLog2Gain = 8.0f;

  // `lse_log2` of the two rows, in powers of two; -inf for rows without keys.
  __device__ __forceinline__ RowsAgain(const KernelParams& params, const TileNote& tile,
                                       int row_in_tile, float scale_log2,
                                       const float (&lse_log2)[2])
      : params_(params), scale_log2_(scale_log2), column_(threadIdx.x % 4 * 2) {
    const int group = params.parts_per_group << params.pack_log2;
    kv_head_ = tile.Head() / group;
    table_tile_ = tile.token / params.table_tile_size;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int packed_row = row_in_tile + 8 * row;
      query_[row] = min(tile.token + (packed_row >> params.pack_log2), params.q_len - 1);
      const int head = tile.Head() + (packed_row & ((1 << params.pack_log2) - 1));
      q_row_[row] =
          static_cast<const Element*>(params.q) +
          (static_cast<int64_t>(query_[row]) * params.num_heads + head) * Traits::kHeadDim +
          column_;
      reference_[row] = lse_log2[row] == -INFINITY ? 0.0f : lse_log2[row] - kLog2Gain;
    }
  }

  // Leaves the normalised outputs in `o`, times kGain.
  __device__ __forceinline__ void Walk(float (&o)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] = 0.0f;
    uint32_t spoiled = 0;  // bit i: the thread's row i sees a value that is not finite
    const int first_run = max(params_.by_query.ptr[table_tile_], 0);
    const int end_run = min(params_.by_query.ptr[table_tile_ + 1], params_.by_query.num_runs);
#pragma unroll 1
    for (int r = first_run; r < end_run; ++r) {
      const Run run = params_.by_query.runs[r];
      const int end = min(run.end, params_.k_len);
#pragma unroll 1
      for (int key = max(run.begin, 0); key < end; key += kStep) {
        const uint32_t visible = VisibleCells(run, key);
        if (__any_sync(0xFFFFFFFF, visible != 0)) spoiled |= AddKeys(key, visible, o);
        if (__all_sync(0xFFFFFFFF, spoiled == 3)) break;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] = spoiled >> i / 2 % 2 & 1 ? NAN : o[i];
  }

 private:
  // Bit 4 row + i for the thread's two rows and its four columns of the step at `key`.
  __device__ __forceinline__ uint32_t VisibleCells(const Run& run, int key) const {
    uint32_t visible = 0;
    const int ids_end = min(run.ids_end, params_.by_query.num_ids);
#pragma unroll 1
    for (int id = max(run.ids_begin, 0); id < ids_end; ++id) {
      const Slice slice =
          params_.slices[min(max(params_.by_query.ids[id], 0), params_.num_slices - 1)];
#pragma unroll
      for (int cell = 0; cell < 8; ++cell) {
        const int q = query_[cell / 4], k = key + column_ + cell % 4 / 2 * 8 + cell % 2;
        const bool sees = q >= slice.q_start && q < slice.q_end && k >= slice.k_start &&
                          k < slice.k_end && k - q >= slice.d_min && k - q <= slice.d_max;
        visible |= static_cast<uint32_t>(sees) << cell;
      }
    }
    return visible;
  }

  // Adds the products of 16 keys to `o`; returns which rows see a value that is not finite.
  __device__ __forceinline__ uint32_t AddKeys(int key, uint32_t visible, float (&o)[kCount]) const {
    float s[2][4] = {};
#pragma unroll 1
    for (int d = 0; d < Traits::kHeadDim; d += 16) {
      const uint32_t a[4] = {Pair(q_row_[0] + d), Pair(q_row_[1] + d), Pair(q_row_[0] + d + 8),
                             Pair(q_row_[1] + d + 8)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Element* k = Row(params_.k, key + 8 * half + threadIdx.x % 32 / 4, Traits::kHeadDim);
        WarpProduct(s[half], a, Pair(k + column_ + d), Pair(k + column_ + d + 8), Element{});
      }
    }
    uint32_t p[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Traits::kTransform)
        TransformLogits(s[half], params_.transform_scale, params_.cap_log2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool sees = visible >> (i / 2 * 4 + half * 2 + i % 2) & 1;
        s[half][i] = sees ? Exp2(fmaf(s[half][i], scale_log2_, -reference_[i / 2])) : 0.0f;
      }
#pragma unroll
      for (int row = 0; row < 2; ++row)
        p[2 * half + row] = Pack(s[half][2 * row], s[half][2 * row + 1], Element{});
    }

    uint32_t bad = 0;  // bit i: the value of the thread's key i is not finite in some column
    const uint16_t* v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = reinterpret_cast<const uint16_t*>(
                 Row(params_.v, key + column_ + i / 2 * 8 + i % 2, Traits::kVHeadDim)) +
             threadIdx.x % 32 / 4;
    }
#pragma unroll
    for (int group = 0; group < kCount / 4; ++group) {  // 8 columns
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = v[i][8 * group];
        const bool finite = (words[i] & kExponent) != kExponent;
        if (!finite) words[i] = 0;
        bad |= static_cast<uint32_t>(!finite) << i;
      }
      float (&outputs)[4] = reinterpret_cast<float (&)[4]>(o[4 * group]);
      WarpProduct(outputs, p, words[0] | words[1] << 16, words[2] | words[3] << 16, Element{});
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) bad |= __shfl_xor_sync(0xFFFFFFFF, bad, lanes);
    uint32_t spoiled = ((visible & bad) != 0) | ((visible >> 4 & bad) != 0) << 1;
    spoiled |= __shfl_xor_sync(0xFFFFFFFF, spoiled, 1);
    return spoiled | __shfl_xor_sync(0xFFFFFFFF, spoiled, 2);
  }

  __device__ __forceinline__ const Element* Row(const void* tensor, int key, int head_dim) const {
    const int64_t row =
        static_cast<int64_t>(min(key, params_.k_len - 1)) * params_.num_kv_heads + kv_head_;
    return static_cast<const Element*>(tensor) + row * head_dim;
  }

  static __device__ __forceinline__ uint32_t Pair(const Element* elements) {
    return *reinterpret_cast<const uint32_t*>(elements);
  }

  const KernelParams& params_;
  const float scale_log2_;
  const int column_;
  int kv_head_, table_tile_;
  int query_[2];
  const Element* q_row_[2];
  float reference_[2];
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_RECOMPUTE_H_
