// Which cells of a block of logits are visible, as bits.
//
// A thread of a WGMMA accumulator holds, in each of two rows, the columns 8j + lane_column + {0, 1}
// of a block, lane_column = 2 * (lane % 4): element 2j + i of the row. The visible columns of one
// slice in one row are an interval, so they are a bit field over these elements whose ends need a
// few integer operations, however wide the block is. Fields of several slices are joined by OR, and
// one pass over the elements applies the result.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_MASK_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_MASK_H_

#include <cstdint>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm90/ptx.h"

namespace magi_jax::sm90 {

// Elements of one row of this thread whose column is below `column`, counted as if rows had no
// end; any integer is fine.
__device__ __forceinline__ int ElementsBelow(int column, int lane_column) {
  const int from_lane = column - lane_column;
  return max(2 * (from_lane >> 3) + min(from_lane & 7, 2), 0);
}

template <int kElements>
struct RowMask {
  static constexpr int kWords = (kElements + 31) / 32;
  uint32_t words[kWords];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = 0;
  }

  // Adds the columns of a block starting at `key_start` that `query` sees through `slice`.
  __device__ __forceinline__ void Add(const Slice& slice, int query, int key_start,
                                      int lane_column) {
    const bool inside = query >= slice.q_start && query < slice.q_end;
    const int low = max(slice.k_start, query + slice.d_min) - key_start;
    const int high = min(slice.k_end, query + slice.d_max + 1) - key_start;
    const int first = ElementsBelow(low, lane_column);
    const int last = inside ? ElementsBelow(high, lane_column) : 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int word_first = max(first - 32 * w, 0);
      words[w] |= BitField(word_first, max(last - 32 * w - word_first, 0));
    }
  }

  __device__ __forceinline__ bool Has(int element) const {
    return words[element / 32] >> (element % 32) & 1;
  }
};

// Sets hidden logits of an accumulator to minus infinity.
template <int kCount>
__device__ __forceinline__ void ApplyMask(float (&logits)[kCount],
                                          const RowMask<kCount / 2> (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = i / 2 % 2, element = i / 4 * 2 + i % 2;
    logits[i] = rows[row].Has(element) ? logits[i] : -INFINITY;
  }
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_MASK_H_
