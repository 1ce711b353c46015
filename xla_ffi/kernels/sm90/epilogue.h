// Finishes a warpgroup's rows and writes them straight from registers: neighbours trade words until
// the quad that shares a row fills whole sectors, so that no shared memory is needed and the next
// tile can run on.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_EPILOGUE_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_EPILOGUE_H_

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/recompute.h"
#include "xla_ffi/kernels/sm90/softmax.h"

namespace magi_jax::sm90 {

constexpr float kLn2 = 0.6931471805599453f;

// Transposes the 4 x 4 words that a quad holds: word j of lane i becomes word i of lane j.
// Gradients are stored so.
__device__ __forceinline__ void QuadTranspose(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(0xFFFFFFFF, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(0xFFFFFFFF, odd ? w[2] : w[3], 1);
  w[0] = odd ? a : w[0];
  w[1] = odd ? w[1] : a;
  w[2] = odd ? b : w[2];
  w[3] = odd ? w[3] : b;
  const uint32_t c = __shfl_xor_sync(0xFFFFFFFF, upper ? w[0] : w[2], 2);
  const uint32_t d = __shfl_xor_sync(0xFFFFFFFF, upper ? w[1] : w[3], 2);
  w[0] = upper ? c : w[0];
  w[2] = upper ? w[2] : c;
  w[1] = upper ? d : w[1];
  w[3] = upper ? w[3] : d;
}

// What is left to do to the rows of a thread when their sums are known: `weights` normalise
// outputs.
struct RowResults {
  float weights[2];
  float lse_log2[2];  // in powers of two; -inf for rows without keys
};

__device__ __forceinline__ void StorePair(void* address, uint32_t x, uint32_t y, bool on) {
  // A predicate, where the compiler would branch and wait for each store's operands in turn.
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.b32 on, %3, 0;\n@on st.global.v2.b32 [%0], {%1, %2};\n}\n" ::"l"(
          address),
      "r"(x), "r"(y), "r"(static_cast<int>(on))
      : "memory");
}

template <typename Traits>
struct Epilogue {
  using Element = typename Traits::Element;
  static constexpr int kCount = Traits::kVHeadDim / 2;  // accumulators of a thread

  // Takes the sums over all keys; the last products need not be done. Writes lse and the largest
  // logits. `row_in_tile` is this thread's first row, its second is 8 below.
  static __device__ __forceinline__ RowResults CloseSums(const KernelParams& params,
                                                         const TileNote& tile, int row_in_tile,
                                                         float scale_log2, const RowStats& stats) {
    RowResults results;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float sum = QuadSum(stats.sum[row]);
      // Not `sum > 0`: a NaN must reach the output.
      results.weights[row] = sum == 0.0f ? 0.0f : Reciprocal(sum);
      const float top = stats.reference[row];
      results.lse_log2[row] = sum == 0.0f ? -INFINITY : top + Log2(sum);
      const RowPlace place(params, tile, row_in_tile + 8 * row);
      if (place.inside && threadIdx.x % 4 == 0) {
        if (params.earlier == nullptr) params.lse[place.index] = results.lse_log2[row] * kLn2;
        if (params.row_max != nullptr) params.row_max[place.index] = sum == sum ? top * kLn2 : sum;
      }
    }
    return results;
  }

  // When the last product is done: outputs that hidden values spoiled are made again, what other
  // calls gave is merged, and what is to be float32 is written.
  static __device__ __forceinline__ void CloseOutputs(const KernelParams& params,
                                                      const TileNote& tile, int row_in_tile,
                                                      float scale_log2, RowResults& results,
                                                      float (&o)[kCount]) {
    if (__builtin_expect(IsSpoiled(results.lse_log2, o), 0)) {
      RowsAgain<Traits>(params, tile, row_in_tile, scale_log2, results.lse_log2).Walk(o);
      results.weights[0] = results.weights[1] = 1.0f / RowsAgain<Traits>::kGain;
    }
    if (params.earlier != nullptr) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const RowPlace place(params, tile, row_in_tile + 8 * row);
        Merge(params, place, row, results.weights[row], results.lse_log2[row] * kLn2, o);
      }
    } else if (params.out_is_f32) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const RowPlace place(params, tile, row_in_tile + 8 * row);
        float* out = static_cast<float*>(params.out) + place.index * Traits::kVHeadDim;
        StoreFloats(out, place.inside, row, results.weights[row], o);
      }
    }
  }

  // Writes outputs in the type of the operands, unless they were merged and are written.
  static __device__ __forceinline__ void Store(const KernelParams& params, const TileNote& tile,
                                               int row_in_tile, const RowResults& results,
                                               const float (&o)[kCount]) {
    if (params.out_is_f32 || params.earlier != nullptr) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const RowPlace place(params, tile, row_in_tile + 8 * row);
      Element* out = static_cast<Element*>(params.out) + place.index * Traits::kVHeadDim;
      StoreElements(out, place.inside, row, results.weights[row], o);
    }
  }

 private:
  struct RowPlace {
    int64_t index;  // of the (token, head) pair
    bool inside;
    __device__ __forceinline__ RowPlace(const KernelParams& params, const TileNote& tile,
                                        int packed_row) {
      const int token = tile.token + (packed_row >> params.pack_log2);
      const int head = tile.head + (packed_row & ((1 << params.pack_log2) - 1));
      index = static_cast<int64_t>(token) * params.num_heads + head;
      inside = token < params.q_len;
    }
  };

  // Whether some row of the warp has an output that is not finite although its sum is: then a
  // value is not finite, and the row need not see it.
  static __device__ __forceinline__ bool IsSpoiled(const float (&lse_log2)[2],
                                                   const float (&o)[kCount]) {
    float probes[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of row i / 2; NaN once an output is not finite
#pragma unroll
    for (int i = 0; i < kCount; ++i) probes[i % 4] = fmaf(o[i], 0.0f, probes[i % 4]);
    bool spoiled = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float probe = probes[2 * row] + probes[2 * row + 1];
      spoiled |= probe != probe && lse_log2[row] < INFINITY;
    }
    return __any_sync(0xFFFFFFFF, spoiled);
  }

  static __device__ __forceinline__ void StoreElements(Element* out, bool inside, int row,
                                                       float weight, const float (&o)[kCount]) {
#pragma unroll
    for (int group = 0; group < kCount / 8; ++group) {
      const int i = 8 * group + 2 * row;
      const uint32_t left = Pack(o[i] * weight, o[i + 1] * weight, Element{});
      const uint32_t right = Pack(o[i + 4] * weight, o[i + 5] * weight, Element{});
      StoreGroup(out, inside, group, left, right);
    }
  }

  // Writes 16 columns, of which each thread has two of the left half and two of the right.
  static __device__ __forceinline__ void StoreGroup(Element* out, bool inside, int group,
                                                    uint32_t left, uint32_t right) {
    // Neighbours trade words until each has four columns: a quad then fills a sector of 32 bytes.
    const bool odd = threadIdx.x & 1;
    uint2* destination = reinterpret_cast<uint2*>(out) + (threadIdx.x % 4 / 2 + (odd ? 2 : 0));
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, odd ? left : right, 1);
    StorePair(destination + 4 * group, odd ? other : left, odd ? right : other, inside);
  }

  static __device__ __forceinline__ void StoreFloats(float* out, bool inside, int row, float weight,
                                                     const float (&o)[kCount]) {
    float2* destination = reinterpret_cast<float2*>(out) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int i = 4 * j + 2 * row;
      if (inside) destination[4 * j] = make_float2(o[i] * weight, o[i + 1] * weight);
    }
  }

  // Normalises a row, merges it with that of other keys, and writes it.
  static __device__ __forceinline__ void Merge(const KernelParams& params, const RowPlace& place,
                                               int row, float weight, float lse,
                                               const float (&o)[kCount]) {
    const auto& [index, inside] = place;
    const float earlier_lse = inside ? params.lse[index] : -INFINITY;
    __syncwarp();  // every thread of the quad has read lse before one of them overwrites it
    const float top = fmaxf(earlier_lse, lse);
    const float base = top == -INFINITY ? 0.0f : top;
    const float earlier_share = Exp2((earlier_lse - base) * kLog2e),
                share = Exp2((lse - base) * kLog2e);
    const float total = earlier_share + share;
    const float inverse = total == 0.0f ? 0.0f : Reciprocal(total);
    weight *= share * inverse;
    const float earlier_weight = earlier_share * inverse;
    if (inside && threadIdx.x % 4 == 0)
      params.lse[index] = total == 0.0f ? -INFINITY : base + Log2(total) * kLn2;
    const float2* const source =
        reinterpret_cast<const float2*>(params.earlier + index * Traits::kVHeadDim) +
        threadIdx.x % 4;
    const auto merged = [&](int j) {  // of columns 8 * j and on
      const int i = 4 * j + 2 * row;
      const float2 earlier = inside ? source[4 * j] : float2{};
      return make_float2(fmaf(earlier.x, earlier_weight, o[i] * weight),
                         fmaf(earlier.y, earlier_weight, o[i + 1] * weight));
    };
    if (params.out_is_f32) {
      auto* const out = static_cast<float*>(params.out) + index * Traits::kVHeadDim;
      float2* const destination = reinterpret_cast<float2*>(out) + threadIdx.x % 4;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const float2 columns = merged(j);
        if (inside) destination[4 * j] = columns;
      }
    } else {
      auto* const out = static_cast<Element*>(params.out) + index * Traits::kVHeadDim;
#pragma unroll
      for (int group = 0; group < kCount / 8; ++group) {
        const float2 left = merged(2 * group), right = merged(2 * group + 1);
        StoreGroup(out, inside, group, Pack(left.x, left.y, Element{}),
                   Pack(right.x, right.y, Element{}));
      }
    }
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_EPILOGUE_H_
