// Tiles of 16-bit rows in shared memory: how they are laid out, filled, and cleaned of inf and NaN.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_TILE_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_TILE_CUH_

#include "xla_ffi/kernels/sm80/ptx.cuh"

namespace magi_jax::sm80 {

// [kRows, kCols] elements in chunks of 16 bytes. A chunk's place is permuted by its row, so that
// the eight rows that ldmatrix reads at one column lie in eight different groups of banks: with a
// row of a multiple of 128 bytes by all eight positions, with 96 columns (192 bytes) by four of
// them, since neighbouring rows start half a bank cycle apart there.
template <int kRows_, int kCols_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kChunks = kCols / 8;
  static constexpr int kBytes = kRows * kCols * 2;
  static_assert(kChunks % 4 == 0, "a row must be a multiple of 64 bytes");

  static __device__ __forceinline__ uint32_t Offset(int row, int chunk) {
    const int swizzle = kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3;
    return static_cast<uint32_t>((row * kChunks + (chunk ^ swizzle)) * 16);
  }
};

// Rows of one head of a [rows, heads, dim] tensor.
struct HeadRows {
  const char* base;      // row 0 of the head
  int64_t stride_bytes;  // from one row to the next
  int length;            // rows

  __device__ __forceinline__ HeadRows(const void* tensor, int rows, int num_heads, int head,
                                      int dim)
      : base(static_cast<const char*>(tensor) + static_cast<int64_t>(head) * dim * 2),
        stride_bytes(static_cast<int64_t>(num_heads) * dim * 2),
        length(rows) {}
};

// Starts copying rows [first, first + kRows) of `from`; rows at or past `end` become zeros.
template <class TileT, int kThreads>
__device__ __forceinline__ void LoadRows(uint32_t tile, const HeadRows& from, int first, int end) {
  constexpr int kTotal = TileT::kRows * TileT::kChunks;
  end = min(end, from.length);
  if constexpr (kThreads % TileT::kChunks == 0 && kTotal % kThreads == 0) {
    // Each thread keeps its column and steps down the rows.
    constexpr int kStep = kThreads / TileT::kChunks;
    const int row = threadIdx.x / TileT::kChunks, chunk = threadIdx.x % TileT::kChunks;
    const char* source = from.base + (first + row) * from.stride_bytes + chunk * 16;
#pragma unroll
    for (int step = 0; step < TileT::kRows; step += kStep) {
      // An address that is not read is never dereferenced, so it may lie outside.
      CopyAsync16(tile + TileT::Offset(row + step, chunk), source, first + row + step < end);
      source += kStep * from.stride_bytes;
    }
  } else {
#pragma unroll
    for (int start = 0; start < kTotal; start += kThreads) {
      const int i = start + threadIdx.x;
      if (kTotal % kThreads != 0 && i >= kTotal) break;
      const int row = i / TileT::kChunks, chunk = i % TileT::kChunks;
      const bool inside = first + row < end;
      const char* source =
          from.base + (inside ? (first + row) * from.stride_bytes + chunk * 16 : 0);
      CopyAsync16(tile + TileT::Offset(row, chunk), source, inside);
    }
  }
}

// Whether this thread's own copied chunks hold an inf or NaN. Needs its copies to have landed, no
// barrier: 0 * x + sum stays +0 exactly while every x is finite.
template <typename T, class TileT, int kThreads>
__device__ __forceinline__ bool HasNonFinite(const char* tile) {
  using Pair = typename Element<T>::Pair;
  constexpr int kTotal = TileT::kRows * TileT::kChunks;
  uint32_t zero_bits = 0;
  const Pair zero = reinterpret_cast<const Pair&>(zero_bits);
  Pair sum = zero;
#pragma unroll
  for (int start = 0; start < kTotal; start += kThreads) {
    const int i = start + threadIdx.x;
    if (kTotal % kThreads != 0 && i >= kTotal) break;
    const uint32_t offset = TileT::Offset(i / TileT::kChunks, i % TileT::kChunks);
    const uint4 words = *reinterpret_cast<const uint4*>(tile + offset);
    sum = __hfma2(reinterpret_cast<const Pair&>(words.x), zero, sum);
    sum = __hfma2(reinterpret_cast<const Pair&>(words.y), zero, sum);
    sum = __hfma2(reinterpret_cast<const Pair&>(words.z), zero, sum);
    sum = __hfma2(reinterpret_cast<const Pair&>(words.w), zero, sum);
  }
  return reinterpret_cast<const uint32_t&>(sum) != 0;
}

// Zeroes the inf and NaN elements among this thread's chunks and sets the bits of their rows in
// `rows`.
template <typename T, class TileT, int kThreads>
__device__ __noinline__ void ZeroNonFinite(char* tile, uint32_t* rows) {
  constexpr int kTotal = TileT::kRows * TileT::kChunks;
  for (int i = threadIdx.x; i < kTotal; i += kThreads) {
    const int row = i / TileT::kChunks;
    auto* words = reinterpret_cast<uint32_t*>(tile + TileT::Offset(row, i % TileT::kChunks));
    for (int w = 0; w < 4; ++w) {
      constexpr uint32_t kLow = Element<T>::kExponent, kHigh = kLow << 16;
      const uint32_t bad = ((words[w] & kLow) == kLow ? 0xffffu : 0) |
                           ((words[w] & kHigh) == kHigh ? 0xffff0000u : 0);
      if (bad == 0) continue;
      words[w] &= ~bad;
      atomicOr(rows + row / 32, 1u << (row % 32));
    }
  }
}

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_TILE_CUH_
