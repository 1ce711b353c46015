// Keeping inf and NaN of a row that others may see away from rows that must not see it.
//
// A masked probability is 0, but 0 * inf is NaN: in a product whose contracted rows are partly
// masked, a row of the walked tile that is not finite would spoil every row of the result. So in
// masked blocks such elements are zeroed in shared memory and the tile's rows that held them are
// flagged; result rows that do see a flagged row become NaN altogether, all others are exact.
// Blocks without a mask need nothing.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_POISON_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_POISON_CUH_

#include "xla_ffi/kernels/sm80/tile.cuh"

namespace magi_jax::sm80 {

// A barrier after which `tile` is finite; returns the flags of its rows. Call with the thread's
// copies landed. Costs a scan of the tile, and two more barriers only when something was found.
template <typename T, class TileT, int kThreads>
__device__ __forceinline__ uint64_t BarrierAndClean(char* tile, uint32_t* flags) {
  static_assert(TileT::kRows <= 64);
  if (!__syncthreads_or(HasNonFinite<T, TileT, kThreads>(tile))) return 0;
  if (threadIdx.x < 2) flags[threadIdx.x] = 0;
  __syncthreads();
  ZeroNonFinite<T, TileT, kThreads>(tile, flags);
  __syncthreads();
  const uint64_t low = flags[0], high = flags[1];
  return high << 32 | low;
}

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_POISON_CUH_
