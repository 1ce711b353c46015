// Small matrix products that live in registers: C[rows, kPanel] (+)= A[rows, depth] B[depth,
// kPanel].
//
// The lanes of C are always the axis that a tile owns, so that softmax works on whole vectors and
// never across lanes. A is read one scalar at a time and broadcast; it may be stored by rows or by
// columns.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_GEMM_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_GEMM_H_

#include "xla_ffi/kernels/cpu/simd.h"

namespace magi_jax::cpu::MAGI_JAX_ISA {

enum class Order { kRows, kColumns };  // A[i, p] is a[i * lda + p] or a[i + p * lda]
enum class Into { kFresh, kSum };      // C = A B or C += A B

struct Matrix {
  const float* data;
  int64_t stride;
};

template <int kRows, Order kOrder, Into kInto>
MAGI_JAX_INLINE void RegisterBlock(int32_t depth, Matrix a, Matrix b, float* c, int64_t ldc) {
  Vec sum[kRows][2];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < 2; ++j) sum[i][j] = Vec{};
  }
  const float* b_row = b.data;
  for (int32_t p = 0; p < depth; ++p, b_row += b.stride) {
    const Vec b0 = Load(b_row), b1 = Load(b_row + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const float x = kOrder == Order::kRows ? a.data[i * a.stride + p] : a.data[i + p * a.stride];
      sum[i][0] += x * b0;
      sum[i][1] += x * b1;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < 2; ++j) {
      float* cell = c + i * ldc + j * kLanes;
      // A block's sum of its own: half a million terms one after the other would lose five bits.
      Store(cell, kInto == Into::kSum ? Load(cell) + sum[i][j] : sum[i][j]);
    }
  }
}

// The last rows, fewer than a whole register block.
template <int kRows, Order kOrder, Into kInto>
MAGI_JAX_INLINE void RemainingRows(int32_t rows, int32_t depth, Matrix a, Matrix b, float* c,
                                   int64_t ldc) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      RegisterBlock<kRows, kOrder, kInto>(depth, a, b, c, ldc);
    } else {
      RemainingRows<kRows - 1, kOrder, kInto>(rows, depth, a, b, c, ldc);
    }
  }
}

template <Order kOrder, Into kInto>
static void Gemm(int32_t rows, int32_t depth, Matrix a, Matrix b, float* c, int64_t ldc) {
  const int64_t a_step = kGemmRows * (kOrder == Order::kRows ? a.stride : 1);
  for (; rows >= kGemmRows; rows -= kGemmRows) {
    RegisterBlock<kGemmRows, kOrder, kInto>(depth, a, b, c, ldc);
    a.data += a_step;
    c += kGemmRows * ldc;
  }
  RemainingRows<kGemmRows - 1, kOrder, kInto>(rows, depth, a, b, c, ldc);
}

// C += A B where a zero of B wins over anything in A, infinities and NaN included. The plain
// product would carry what stands in a row into those that do not see it. A is stored by columns.
// Sums round as those of Gemm, so that no row shows by its bits what stands in rows it does not
// see.
static void GemmWhereNonzero(int32_t rows, int32_t depth, Matrix a, Matrix b, float* c,
                             int64_t ldc) {
  for (int32_t i = 0; i < rows; ++i) {
    for (int j = 0; j < 2; ++j) {
      float* cell = c + i * ldc + j * kLanes;
      Vec sum = {};
      for (int32_t p = 0; p < depth; ++p) {
        const Vec weight = Load(b.data + p * b.stride + j * kLanes);
        const Vec next = sum + a.data[i + p * a.stride] * weight;
        sum = Select(weight == 0.0f, sum, next);
      }
      Store(cell, Load(cell) + sum);
    }
  }
}

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_GEMM_H_
