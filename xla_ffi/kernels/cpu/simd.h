// Vectors of the instruction set that this file is compiled for, and the functions of softmax on
// them.
//
// Everything the kernels use is in a namespace per instruction set and of internal linkage: a
// function that two object files shared could be taken from the one whose instructions the
// processor lacks. For the same reason no header of the C++ library with inline functions is
// included here.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_SIMD_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_SIMD_H_

#include <stdint.h>
#include <string.h>

#define MAGI_JAX_INLINE static inline __attribute__((always_inline))

namespace magi_jax::cpu::MAGI_JAX_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;     // floats of a vector
constexpr int kGemmRows = 12;  // rows of a register block: 24 of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kGemmRows = 6;  // 12 of 16 registers
#else
constexpr int kLanes = 4;
constexpr int kGemmRows = 6;
#endif
constexpr int kPanel = 2 * kLanes;  // floats of a panel: the width of a register block

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UIntVec __attribute__((vector_size(kLanes * 4)));

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

MAGI_JAX_INLINE Vec Load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof(v));
  return v;
}
MAGI_JAX_INLINE IntVec LoadInt(const int32_t* p) {
  IntVec v;
  memcpy(&v, p, sizeof(v));
  return v;
}
MAGI_JAX_INLINE void Store(float* p, Vec v) { memcpy(p, &v, sizeof(v)); }
MAGI_JAX_INLINE void StoreInt(int32_t* p, IntVec v) { memcpy(p, &v, sizeof(v)); }
MAGI_JAX_INLINE Vec Broadcast(float x) { return x - Vec{}; }
MAGI_JAX_INLINE IntVec BroadcastInt(int32_t x) { return x - IntVec{}; }
MAGI_JAX_INLINE IntVec Bits(Vec v) { return reinterpret_cast<IntVec>(v); }
MAGI_JAX_INLINE Vec FromBits(IntVec v) { return reinterpret_cast<Vec>(v); }

MAGI_JAX_INLINE Vec Select(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }
// Ignores NaN in `b`.
MAGI_JAX_INLINE Vec Max(Vec a, Vec b) { return Select(b > a, b, a); }

MAGI_JAX_INLINE int32_t MinInt(int32_t a, int32_t b) { return a < b ? a : b; }
MAGI_JAX_INLINE int32_t MaxInt(int32_t a, int32_t b) { return a > b ? a : b; }
MAGI_JAX_INLINE int32_t RoundUp(int32_t x, int32_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// 2^x for x <= 127, within 1 unit in the last place; 0 for x < -126 (no denormal results); NaN
// stays NaN. The integer part goes into the exponent, 2^fraction is a polynomial fitted on [-1/2,
// 1/2].
MAGI_JAX_INLINE Vec Exp2(Vec x) {
  const IntVec tiny = x < -126.0f;
  x = Select(tiny, Broadcast(-126.0f), x);
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const Vec magic = Broadcast(12582912.0f);
  const Vec shifted = x + magic;
  const Vec f = x - (shifted - magic);
  Vec p = Broadcast(1.5353362e-4f);
  p = p * f + 1.3398875e-3f;
  p = p * f + 9.6184369e-3f;
  p = p * f + 5.55033237e-2f;
  p = p * f + 2.40226477e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.0f;
  // Unsigned: hidden cells may hold anything, and what they give is not used.
  const UIntVec power_bits = (reinterpret_cast<UIntVec>(shifted) << 23) + (127u << 23);
  const Vec power = reinterpret_cast<Vec>(power_bits);
  return Select(tiny, Vec{}, p * power);
}

// tanh within 3 units in the last place: an odd polynomial near zero, 1 - 2 / (e^2x + 1) elsewhere.
MAGI_JAX_INLINE Vec Tanh(Vec x) {
  const IntVec sign = Bits(x) & static_cast<int32_t>(0x80000000u);
  const Vec magnitude = FromBits(Bits(x) ^ sign);
  const Vec bounded = Select(magnitude > 10.0f, Broadcast(10.0f), magnitude);
  const Vec far = 1.0f - 2.0f / (Exp2(bounded * (2.0f * kLog2E)) + 1.0f);
  const Vec square = magnitude * magnitude;
  Vec p = Broadcast(-5.70494635e-3f);
  p = p * square + 2.06390526e-2f;
  p = p * square - 5.37397042e-2f;
  p = p * square + 1.33314416e-1f;
  p = p * square - 3.33332807e-1f;
  const Vec near = magnitude + magnitude * square * p;
  return FromBits(Bits(Select(magnitude < 0.625f, near, far)) | sign);
}

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_SIMD_H_
