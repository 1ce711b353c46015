// Keeping inf and NaN of rows that others see away from rows that must not see them.
//
// A hidden probability is 0, but 0 * inf is NaN: where the summed rows of a product are partly
// hidden, one that is not finite would spoil all rows of the result. Such elements are zeroed in
// shared memory, and what does see their row is made NaN by its probability instead. Keys and
// values are looked at once per tile. A query or cotangent that is not finite shows in its lse or
// delta, which PrepareStats looks through; only blocks with a mask and such a query are cleaned.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_POISON_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_POISON_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace magi_jax::sm90 {

__device__ __forceinline__ constexpr uint32_t ExponentBits(__nv_bfloat16) { return 0x7F807F80; }
__device__ __forceinline__ constexpr uint32_t ExponentBits(__half) { return 0x7C007C00; }

// Zeroes what is not finite in one 128-byte row of shared memory; tells whether anything was.
// `rotation` spreads the threads of a warp over the banks.
template <typename Element, bool kZero = true, int kUnroll = 8>
__device__ __forceinline__ bool CleanRow(uint8_t* row, int rotation) {
  constexpr uint32_t kExponent = ExponentBits(Element{});
  bool found = false;
#pragma unroll kUnroll
  for (int i = 0; i < 8; ++i) {
    uint4* const place = reinterpret_cast<uint4*>(row) + (i + rotation) % 8;
    const uint4 old = *place;
    const uint32_t words[4] = {old.x, old.y, old.z, old.w};
    uint32_t clean[4];
    bool changed = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t exponent = words[j] & kExponent;
      const bool low = (exponent & 0xFFFF) == (kExponent & 0xFFFF),
                 high = (exponent >> 16) == (kExponent >> 16);
      clean[j] = words[j] & (low ? 0xFFFF0000 : 0xFFFFFFFF) & (high ? 0x0000FFFF : 0xFFFFFFFF);
      changed |= low || high;
    }
    if (kZero && changed) *place = make_uint4(clean[0], clean[1], clean[2], clean[3]);
    found |= changed;
  }
  return found;
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_POISON_H_
