// The inspector warps: keep values that are not finite away from rows that do not see them.
//
// A hidden key has probability 0, but 0 * inf and 0 * NaN are NaN, and products of matrices do not
// look. Blocks without a mask have no hidden keys. In all others these warps, beside the producer
// and ahead of the consumers, look through the values; in the rare case they set what is not finite
// to zero and note the keys, and consumers write NaN into the rows that see one of them.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_INSPECTOR_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_INSPECTOR_H_

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/softmax.h"

namespace magi_jax::sm90 {

// Adds zero to `sum` if all elements of the pair are finite, else NaN.
__device__ __forceinline__ __nv_bfloat162 AddZeroOrNan(uint32_t pair, __nv_bfloat162 sum) {
  return __hfma2(*reinterpret_cast<__nv_bfloat162*>(&pair), __nv_bfloat162(0.0f, 0.0f), sum);
}

__device__ __forceinline__ __half2 AddZeroOrNan(uint32_t pair, __half2 sum) {
  return __hfma2(*reinterpret_cast<__half2*>(&pair), __half2(0.0f, 0.0f), sum);
}

template <typename Pair>
__device__ __forceinline__ bool IsNan(Pair x) {
  return __low2float(x) != __low2float(x) || __high2float(x) != __high2float(x);
}

// Zeroes what is not finite in this warp's share of a tile of values, and notes the rows; 4 rows of
// a chunk at a time.
template <typename Traits>
__device__ __forceinline__ void RemoveBadValues(uint8_t* tile, uint32_t* bad_keys, int warp) {
  using Pair = typename Traits::Pair;
  const int lane = threadIdx.x % 32;
  if (lane < Traits::kBadWords) bad_keys[lane] = 0;
  __syncwarp();
#pragma unroll 1
  for (int row = 4 * warp; row < Traits::kBlockN * Traits::kVChunks; row += 4 * kInspectors) {
    auto* words = reinterpret_cast<uint32_t*>(tile + row * Traits::kRowBytes) + 4 * lane;
    bool bad = false;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      if (!IsNan(AddZeroOrNan(words[i], Pair(0.0f, 0.0f)))) continue;
      bad = true;
      words[i] = 0;  // also a finite neighbour: the rows that see this key become NaN as a whole
    }
    const int key = (row + lane / 8) % Traits::kBlockN;
    if (bad) atomicOr(&bad_keys[key / 32], 1u << key % 32);
  }
  ProxyFence();
  __syncwarp();
}

template <typename Traits>
__device__ __forceinline__ bool HasBadValues(const uint8_t* tile, int warp) {
  using Pair = typename Traits::Pair;
  constexpr int kUnits = Traits::kVBytes / 512;  // of 16 bytes for each lane
  const auto* units = reinterpret_cast<const uint4*>(tile) + threadIdx.x % 32;
  Pair sums[4] = {Pair(0.0f, 0.0f), Pair(0.0f, 0.0f), Pair(0.0f, 0.0f), Pair(0.0f, 0.0f)};
#pragma unroll 4
  for (int i = warp; i < kUnits; i += kInspectors) {
    const uint4 x = units[32 * i];
    sums[0] = AddZeroOrNan(x.x, sums[0]);
    sums[1] = AddZeroOrNan(x.y, sums[1]);
    sums[2] = AddZeroOrNan(x.z, sums[2]);
    sums[3] = AddZeroOrNan(x.w, sums[3]);
  }
  return __any_sync(0xFFFFFFFF,
                    IsNan(__hadd2(__hadd2(sums[0], sums[1]), __hadd2(sums[2], sums[3]))));
}

template <typename Traits>
__device__ __forceinline__ void InspectValues(SharedStorage<Traits>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1;
  for (uint32_t n = 0;; ++n) {
    const int slot = SlotOf<Traits::kStages>(n);
    const uint32_t parity = ParityOf<Traits::kStages>(n);
    BarrierWait(&shared.k_full[slot], parity);
    const int flags = shared.blocks[SlotOf<kBlockSlots>(n)].header.flags;
    if (flags & kEndOfWork) return;
    __syncwarp();
    if (lane == 0) BarrierArrive(&shared.k_empty[slot]);  // the note is read
    BarrierWait(&shared.v_full[slot], parity);
    if (flags & kMaskedBlock) {
      const bool bad = HasBadValues<Traits>(shared.v[slot], warp);
      if (bad) RemoveBadValues<Traits>(shared.v[slot], shared.bad_keys[slot][warp], warp);
      if (lane == 0) shared.has_bad_keys[slot][warp] = bad;
      __syncwarp();
      if (lane == 0) BarrierArrive(&shared.v_clean[slot]);
    } else if (lane == 0) {
      BarrierArrive(&shared.v_clean[slot]);
    }
    if (lane == 0) BarrierArrive(&shared.v_empty[slot]);
  }
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_INSPECTOR_H_
