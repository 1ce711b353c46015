// Products of a warp's rows with a tile, on mma.sync m16n8k16 with float32 accumulation.
//
// Fragments: accumulator element c of tile (m, n) is row m * 16 + lane / 4 + 8 * (c / 2) of the
// warp and column n * 8 + lane % 4 * 2 + c % 2. A thread thus owns kMTiles * 2 rows; `RowOf` names
// them.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_PRODUCT_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_PRODUCT_CUH_

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm80/tile.cuh"

namespace magi_jax::sm80 {

template <int kMTiles, int kNTiles>
using Fragment = float[kMTiles][kNTiles][4];

__device__ __forceinline__ int Lane() { return threadIdx.x % 32; }

// Row, within the warp's rows, of the thread's row r (r = 2 * m + half).
__device__ __forceinline__ int RowOf(int r) { return r / 2 * 16 + r % 2 * 8 + Lane() / 4; }

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void Clear(Fragment<kMTiles, kNTiles>& acc) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[m][n][c] = 0.f;
}

// acc += A . B^T, contracted over columns; A's rows of this warp begin at `a_row`, B has kNTiles *
// 8 rows.
template <typename T, class TileA, class TileB, int kMTiles, int kNTiles>
__device__ __forceinline__ void MultiplyTransposed(Fragment<kMTiles, kNTiles>& acc, uint32_t a,
                                                   int a_row, uint32_t b) {
  static_assert(TileA::kCols == TileB::kCols && kNTiles % 2 == 0);
  const int lane = Lane();
#pragma unroll
  for (int k = 0; k < TileA::kCols / 16; ++k) {
    uint32_t fa[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
      LoadMatrix(fa[m], a + TileA::Offset(a_row + m * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t fb[4];
      LoadMatrix(fb, b + TileB::Offset(n * 8 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        Element<T>::Mma(acc[m][n], fa[m], fb[0], fb[1]);
        Element<T>::Mma(acc[m][n + 1], fa[m], fb[2], fb[3]);
      }
    }
  }
}

// An accumulator rounded to T and laid out as the left operand of the next product: two accumulator
// tiles side by side are one operand tile.
template <int kMTiles, int kKTiles>
using Operand = uint32_t[kMTiles][kKTiles / 2][4];

template <typename T, int kMTiles, int kKTiles>
__device__ __forceinline__ void Round(const Fragment<kMTiles, kKTiles>& p,
                                      Operand<kMTiles, kKTiles>& rounded) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int k = 0; k < kKTiles; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rounded[m][k / 2][k % 2 * 2 + half] =
            Element<T>::Pack(p[m][k][2 * half], p[m][k][2 * half + 1]);
}

// acc += P . B, contracted over the kKTiles * 8 rows of B.
template <typename T, class TileB, int kKTiles, int kMTiles, int kNTiles>
__device__ __forceinline__ void MultiplyOperand(Fragment<kMTiles, kNTiles>& acc,
                                                const Operand<kMTiles, kKTiles>& p, uint32_t b) {
  static_assert(TileB::kCols == kNTiles * 8 && kKTiles % 2 == 0 && kNTiles % 2 == 0);
  const int lane = Lane();
#pragma unroll
  for (int k = 0; k < kKTiles / 2; ++k) {
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t fb[4];
      LoadMatrixTransposed(fb, b + TileB::Offset(k * 16 + lane % 16, n + lane / 16));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        Element<T>::Mma(acc[m][n], p[m][k], fb[0], fb[1]);
        Element<T>::Mma(acc[m][n + 1], p[m][k], fb[2], fb[3]);
      }
    }
  }
}

// Writes a pair of columns, float32 or rounded to T.
template <typename T>
__device__ __forceinline__ void StorePair(void* out, DType dtype, int64_t at, float x, float y) {
  if (dtype == DType::kF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(out) + at) = make_float2(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(out) + at) = Element<T>::Pack(x, y);
  }
}

// Sum and maximum over the four threads that share a row.
__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_PRODUCT_CUH_
