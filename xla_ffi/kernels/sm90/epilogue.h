// Finishes a warpgroup's rows and writes them straight from registers: neighbours trade words until
// the quad that shares a row fills whole sectors, so that no shared memory is needed and the next
// tile can run on.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_EPILOGUE_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_EPILOGUE_H_

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/partials.h"
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

// Loads and stores under a predicate, where the compiler would branch and wait for each in turn.

__device__ __forceinline__ float2 LoadPair(const float2* address, bool on) {
  float2 pair;
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.b32 on, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@on ld.global.v2.f32 {%0, %1}, [%2];\n}\n"
      : "=&f"(pair.x), "=&f"(pair.y)
      : "l"(address), "r"(static_cast<int>(on))
      : "memory");
  return pair;
}

__device__ __forceinline__ void StorePair(void* address, uint32_t x, uint32_t y, bool on) {
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.b32 on, %3, 0;\n@on st.global.v2.b32 [%0], {%1, %2};\n}\n" ::"l"(
          address),
      "r"(x), "r"(y), "r"(static_cast<int>(on))
      : "memory");
}

__device__ __forceinline__ void StoreFloat(float* address, float x, bool on) {
  asm volatile(
      "{\n.reg .pred on;\nsetp.ne.b32 on, %2, 0;\n@on st.global.f32 [%0], %1;\n}\n" ::"l"(address),
      "f"(x), "r"(static_cast<int>(on))
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
    // Both rows step by step, without branches: each step waits for the one before.
    RowResults results;
    const float sums[2] = {QuadSum(stats.sum[0]), QuadSum(stats.sum[1])};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Not `sum > 0`: a NaN must reach the output.
      const bool is_empty = sums[row] == 0.0f;
      results.weights[row] = is_empty ? 0.0f : Reciprocal(sums[row]);
      results.lse_log2[row] = is_empty ? -INFINITY : stats.reference[row] + Log2(sums[row]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const RowPlace place(params, tile, row_in_tile + 8 * row);
      const bool writes = place.inside && threadIdx.x % 4 == 0;
      StoreFloat(params.lse + place.index, results.lse_log2[row] * kLn2,
                 writes && !params.merges && !IsPiece(tile));
      if (params.row_max != nullptr) {
        const float top = stats.reference[row] * kLn2;
        StoreFloat(params.row_max + place.index, sums[row] == sums[row] ? top : sums[row], writes);
      }
    }
    return results;
  }

  // When the last product is done: outputs that hidden values spoiled are made again, and float32
  // results are merged with what other calls gave, and written.
  static __device__ __forceinline__ void CloseOutputs(const KernelParams& params, TileNote& tile,
                                                      int row_in_tile, float scale_log2,
                                                      RowResults& results, float (&o)[kCount]) {
    if (__builtin_expect(IsPiece(tile), 0)) {
      if (!JoinPieces(params, tile, row_in_tile, results, o)) {
        tile.token = params.q_len;
        return;
      }
    }
    if (__builtin_expect(IsSpoiled(results.lse_log2, o), 0)) {
      RowsAgain<Traits>(params, tile, row_in_tile, scale_log2, results.lse_log2).Walk(o);
      results.weights[0] = results.weights[1] = 1.0f / RowsAgain<Traits>::kGain;
    }
    if (!params.out_is_f32) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const RowPlace place(params, tile, row_in_tile + 8 * row);
      Shares shares = {1.0f, 0.0f};
      if (params.merges) shares = Merge(params, place, results.lse_log2[row] * kLn2);
      float* out = static_cast<float*>(params.out) + int64_t{place.index} * Traits::kVHeadDim;
      const bool adds = params.merges && place.inside;
      const float weight = results.weights[row] * shares.added;
      StoreFloats(out, place.inside, adds, row, weight, shares.earlier, o);
    }
  }

  // Writes outputs in the type of the operands; float32 ones are written already.
  static __device__ __forceinline__ void Store(const KernelParams& params, const TileNote& tile,
                                               int row_in_tile, const RowResults& results,
                                               const float (&o)[kCount]) {
    if (params.out_is_f32) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const RowPlace place(params, tile, row_in_tile + 8 * row);
      Element* out = static_cast<Element*>(params.out) + int64_t{place.index} * Traits::kVHeadDim;
      StoreElements(out, place.inside, row, results.weights[row], o);
    }
  }

 private:
  static __device__ __forceinline__ bool IsPiece(const TileNote& tile) {
    return Traits::kSplits && tile.IsPiece();
  }

  // The results of all keys from those of a piece. Returns false if other pieces are to come.
  static __device__ __forceinline__ bool JoinPieces(const KernelParams& params,
                                                    const TileNote& tile, int row_in_tile,
                                                    RowResults& results, float (&o)[kCount]) {
    Partials<Traits> partials(params.split, tile, Partners<Traits>(params));
    const int cuts = tile.Cuts();
    if (!partials.Leave(tile.Piece(), cuts, results.weights, results.lse_log2, o)) return false;
    partials.Join(cuts, results.lse_log2, o);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      results.weights[row] = 1.0f;
      const RowPlace place(params, tile, row_in_tile + 8 * row);
      StoreFloat(params.lse + place.index, results.lse_log2[row] * kLn2,
                 place.inside && threadIdx.x % 4 == 0 && !params.merges);
    }
    return true;
  }

  struct RowPlace {
    int index;  // of the (token, head) pair; 2^31 of them are more than a device holds
    bool inside;
    __device__ __forceinline__ RowPlace(const KernelParams& params, const TileNote& tile,
                                        int packed_row) {
      const int token = tile.token + (packed_row >> params.pack_log2);
      const int head = tile.Head() + (packed_row & ((1 << params.pack_log2) - 1));
      index = token * params.num_heads + head;
      inside = token < params.q_len;
    }
  };

  // Whether outputs of the warp are not finite although the sum of some row is: then a value is not
  // finite, and the row need not see it. Such a value spoils all rows of a tile in its column,
  // hidden or not, so that one of a thread's two is looked at.
  static __device__ __forceinline__ bool IsSpoiled(const float (&lse_log2)[2],
                                                   const float (&o)[kCount]) {
    float probes[2] = {0.0f, 0.0f};  // NaN once an output is not finite
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      probes[0] = fmaf(o[i], 0.0f, probes[0]);
      probes[1] = fmaf(o[i + 1], 0.0f, probes[1]);
    }
    const float probe = probes[0] + probes[1];
    const bool is_finite = lse_log2[0] < INFINITY || lse_log2[1] < INFINITY;
    return __any_sync(0xFFFFFFFF, probe != probe && is_finite);
  }

  // Writes 16 columns at a time, of which each thread has two of the left half and two of the
  // right.
  static __device__ __forceinline__ void StoreElements(Element* out, bool inside, int row,
                                                       float weight, const float (&o)[kCount]) {
    // Neighbours trade words until each has four columns: a quad then fills a sector of 32 bytes.
    const bool odd = threadIdx.x & 1;
    uint2* destination = reinterpret_cast<uint2*>(out) + (threadIdx.x % 4 / 2 + (odd ? 2 : 0));
#pragma unroll
    for (int group = 0; group < kCount / 8; ++group) {
      const int i = 8 * group + 2 * row;
      const uint32_t left = Pack(o[i] * weight, o[i + 1] * weight, Element{});
      const uint32_t right = Pack(o[i + 4] * weight, o[i + 5] * weight, Element{});
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, odd ? left : right, 1);
      StorePair(destination + 4 * group, odd ? other : left, odd ? right : other, inside);
    }
  }

  // Writes a row; if it `adds`, together with `earlier` times what is there. Several loads are
  // under way at a time.
  static __device__ __forceinline__ void StoreFloats(float* out, bool inside, bool adds, int row,
                                                     float weight, float earlier,
                                                     const float (&o)[kCount]) {
    constexpr int kPairs = kCount / 4, kBatch = kPairs % 8 == 0 ? 8 : 6;
    static_assert(kPairs % kBatch == 0);
    float2* destination = reinterpret_cast<float2*>(out) + threadIdx.x % 4;
#pragma unroll
    for (int first = 0; first < kPairs; first += kBatch) {
      float2 there[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) there[j] = LoadPair(destination + 4 * (first + j), adds);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = 4 * (first + j) + 2 * row;
        const float x = fmaf(there[j].x, earlier, o[i] * weight);
        const float y = fmaf(there[j].y, earlier, o[i + 1] * weight);
        StorePair(destination + 4 * (first + j), __float_as_uint(x), __float_as_uint(y), inside);
      }
    }
  }

  // What a row of this call and what was there before count for in their sum.
  struct Shares {
    float added, earlier;
  };

  // Merges the lse of a row with that of other keys.
  static __device__ __forceinline__ Shares Merge(const KernelParams& params, const RowPlace& place,
                                                 float lse) {
    const auto& [index, inside] = place;
    const float earlier_lse = inside ? params.lse[index] : -INFINITY;
    __syncwarp();  // every thread of the quad has read lse before one of them overwrites it
    const float top = fmaxf(earlier_lse, lse);
    const float base = top == -INFINITY ? 0.0f : top;
    const float earlier = Exp2((earlier_lse - base) * kLog2e), added = Exp2((lse - base) * kLog2e);
    const float total = earlier + added;
    const float inverse = total == 0.0f ? 0.0f : Reciprocal(total);
    if (inside && threadIdx.x % 4 == 0)
      params.lse[index] = total == 0.0f ? -INFINITY : base + Log2(total) * kLn2;
    return {added * inverse, earlier * inverse};
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_EPILOGUE_H_
