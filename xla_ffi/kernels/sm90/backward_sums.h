// How the dQ of a document's block is kept between tiles: in 16 bits an element, since moving
// float32 takes much of the time. Each row has a unit that makes the largest of a thread's elements
// a large number of 16 bits, whatever their size.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_SUMS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_SUMS_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "xla_ffi/kernels/sm90/backward_ptx.h"
#include "xla_ffi/kernels/sm90/softmax.h"

namespace magi_jax::sm90 {

// Numbers of units. Where dQ is rounded to bfloat16 they are float16, with three bits more than it
// for elements of any size; where to float16, integers, with four more for the largest.
template <typename Element>
struct UnitsFor;

template <>
struct UnitsFor<__nv_bfloat16> {
  static constexpr int kLargest = 14;  // its exponent

  static __device__ __forceinline__ uint32_t Pack(float x, float y) {
    return sm90::Pack(x, y, __half{});
  }
  static __device__ __forceinline__ float2 Unpack(uint32_t word) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
};

template <>
struct UnitsFor<__half> {
  static constexpr int kLargest = 13;
  // Floats with the low half of an integer as their own.
  static constexpr float kMiddle = 8388608.0f + 32768.0f;
  static constexpr uint32_t kMiddleHigh = 0x4B00;

  static __device__ __forceinline__ uint32_t Pack(float x, float y) {
    return __byte_perm(__float_as_uint(x + kMiddle), __float_as_uint(y + kMiddle), 0x5410);
  }
  static __device__ __forceinline__ float2 Unpack(uint32_t word) {
    return {__uint_as_float(__byte_perm(word, kMiddleHigh, 0x5410)) - kMiddle,
            __uint_as_float(__byte_perm(word, kMiddleHigh, 0x5432)) - kMiddle};
  }
};

// A power of two.
struct RowUnit {
  static constexpr uint32_t kExponent = 0x7F800000;

  float unit, units_per_one;

  // Of the largest magnitude, not below 2^-100, as a number of units of exponent `exponent`; inf
  // and NaN make the unit NaN.
  __device__ __forceinline__ RowUnit(float largest, int exponent) {
    const uint32_t bits = (__float_as_uint(largest) & kExponent) - (exponent << 23);
    unit = fmaf(largest, 0.0f, __uint_as_float(bits));
    units_per_one = __uint_as_float((254u << 23) - bits);
  }
};

// A warpgroup's sums, kCount of each thread: words of two elements, by threads, then the units.
// Elements 4i and 4i + 1 of a thread are of its first row, the others of its second.
template <typename Element, int kCount>
struct PlaceOfSums {
  using Units = UnitsFor<Element>;
  static constexpr int kThreads = 128;
  static constexpr int kBytes = (kCount * 2 + sizeof(float2)) * kThreads;

  uint8_t* const place;
  const int thread;

  __device__ __forceinline__ uint4& Words(int i) const {
    return reinterpret_cast<uint4*>(place)[i * kThreads + thread];
  }
  __device__ __forceinline__ float2& RowUnits() const {
    return reinterpret_cast<float2*>(place + kCount * 2 * kThreads)[thread];
  }

  __device__ __forceinline__ void AddTo(float (&dq)[kCount]) const {
    const float2 units = RowUnits();
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      const uint4 found = Words(i / 8);
      const uint32_t words[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 sums = Units::Unpack(words[j]);
        const float unit = j % 2 ? units.y : units.x;
        dq[i + 2 * j] = fmaf(sums.x, unit, dq[i + 2 * j]);
        dq[i + 2 * j + 1] = fmaf(sums.y, unit, dq[i + 2 * j + 1]);
      }
    }
  }

  __device__ __forceinline__ void Keep(const float (&dq)[kCount]) const {
    float largest[2] = {0x1p-100f, 0x1p-100f};
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      largest[i / 2 % 2] = LargerOrNan(largest[i / 2 % 2], fabsf(dq[i]));
    const RowUnit first(largest[0], Units::kLargest), second(largest[1], Units::kLargest);
    RowUnits() = make_float2(first.unit, second.unit);
    const auto word = [&](int i) {
      const float factor = i / 2 % 2 ? second.units_per_one : first.units_per_one;
      return Units::Pack(dq[i] * factor, dq[i + 1] * factor);
    };
#pragma unroll
    for (int i = 0; i < kCount; i += 8)
      Words(i / 8) = make_uint4(word(i), word(i + 2), word(i + 4), word(i + 6));
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_SUMS_H_
