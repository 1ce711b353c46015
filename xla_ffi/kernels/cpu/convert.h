// Rows between memory (f32, f16 or bf16, strided by heads) and f32 scratch.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_CONVERT_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_CONVERT_H_

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/cpu/simd.h"

namespace magi_jax::cpu::MAGI_JAX_ISA {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

MAGI_JAX_INLINE float FloatOf(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
MAGI_JAX_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

MAGI_JAX_INLINE float Widen(float x) { return x; }
MAGI_JAX_INLINE float Widen(BFloat x) { return FloatOf(uint32_t{x.bits} << 16); }
MAGI_JAX_INLINE float Widen(Half x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, exponent = magnitude & (0x1fu << 23);
  // XLA's threads take denormal float32 for zero, so those of float16 must not pass through one:
  // the difference of two normal numbers makes them exact.
  const uint32_t denormal =
      BitsOf(FloatOf(magnitude + (113u << 23)) - FloatOf(uint32_t{113} << 23));
  const uint32_t bias = exponent == 0x1fu << 23 ? 224u << 23 : 112u << 23;
  const uint32_t bits = exponent == 0 ? denormal : magnitude + bias;
  return FloatOf(bits | (x.bits & 0x8000u) << 16);
}

MAGI_JAX_INLINE void Narrow(float x, float* out) { *out = x; }
MAGI_JAX_INLINE void Narrow(float x, BFloat* out) {
  const uint32_t bits = BitsOf(x);
  const uint32_t nearest_even = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<uint16_t>((is_nan ? bits | 0x400000u : nearest_even) >> 16);
}
MAGI_JAX_INLINE void Narrow(float x, Half* out) {
  const uint32_t bits = BitsOf(x), magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // denormal: the sum rounds at 2^-24
    half = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

// Calls `function` with a value of the C++ type of `dtype`.
template <typename Function>
MAGI_JAX_INLINE void WithType(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kF32:
      return function(float{});
    case DType::kF16:
      return function(Half{});
    case DType::kBF16:
      return function(BFloat{});
  }
}

// Rows of one head in a dense [length, heads, dim] tensor.
struct HeadRows {
  const void* data;
  DType dtype;
  int32_t heads, head, dim;
};

// Offset of the first element of a row.
MAGI_JAX_INLINE int64_t RowOffset(const HeadRows& rows, int64_t row) {
  return (row * rows.heads + rows.head) * rows.dim;
}

// Stride of a row of `dim` floats in scratch. Whole panels; the odd number of cache lines keeps
// rows of a power of two from meeting in the same cache sets.
MAGI_JAX_INLINE int32_t RowStride(int32_t dim) {
  const int32_t whole = RoundUp(dim, kPanel);
  return whole / 16 % 2 == 0 ? whole + 16 : whole;
}

// Copies rows [first, first + count) to `out` [count, RowStride(dim)], filling rows up with zeros.
// Returns whether all values are finite.
static bool CopyRows(const HeadRows& source, int32_t first, int32_t count, float* out) {
  const int32_t dim = source.dim, stride = RowStride(dim), padded = RoundUp(dim, kPanel);
  uint32_t not_finite = 0;
  WithType(source.dtype, [&](auto tag) {
    for (int32_t r = 0; r < count; ++r) {
      const auto* from =
          static_cast<const decltype(tag)*>(source.data) + RowOffset(source, first + r);
      float* to = out + int64_t{r} * stride;
      for (int32_t i = 0; i < dim; ++i) {
        const float x = Widen(from[i]);
        not_finite |= (BitsOf(x) & 0x7f800000u) == 0x7f800000u;
        to[i] = x;
      }
      for (int32_t i = dim; i < padded; ++i) to[i] = 0.0f;
    }
  });
  return not_finite == 0;
}

// Transposes rows [first, first + count) into panels `out` [panels, dim, kPanel]; lanes past the
// last row are zeros.
static void CopyTransposed(const HeadRows& source, int32_t first, int32_t count, float* out) {
  const int32_t dim = source.dim;
  WithType(source.dtype, [&](auto tag) {
    for (int32_t lane = 0; lane < RoundUp(count, kPanel); ++lane) {
      float* to = out + int64_t{lane / kPanel} * dim * kPanel + lane % kPanel;
      if (lane < count) {
        const auto* from =
            static_cast<const decltype(tag)*>(source.data) + RowOffset(source, first + lane);
        for (int32_t i = 0; i < dim; ++i) to[i * kPanel] = Widen(from[i]);
      } else {
        for (int32_t i = 0; i < dim; ++i) to[i * kPanel] = 0.0f;
      }
    }
  });
}

// Writes panels [panels, dim, kPanel], each lane times its factor, to rows [first, first + count)
// of `out`.
static void WriteTransposed(const float* panels, const float* factors, const HeadRows& rows,
                            int32_t first, int32_t count, void* out) {
  const int32_t dim = rows.dim;
  WithType(rows.dtype, [&](auto tag) {
    for (int32_t lane = 0; lane < count; ++lane) {
      const float* from = panels + int64_t{lane / kPanel} * dim * kPanel + lane % kPanel;
      auto* to = static_cast<decltype(tag)*>(out) + RowOffset(rows, first + lane);
      const float factor = factors[lane];
      for (int32_t i = 0; i < dim; ++i) Narrow(from[i * kPanel] * factor, &to[i]);
    }
  });
}

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_CONVERT_H_
