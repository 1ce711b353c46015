// What comes before the backward kernel, in one launch, since each part of it is short: the first
// thread block deals the work out, the others prepare statistics and clear what is added to.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_

#include "xla_ffi/kernels/sm90/backward_stats.cuh"
#include "xla_ffi/kernels/sm90/backward_work.cuh"

namespace magi_jax::sm90 {

// Memory to clear.
struct Zeros {
  float4* words;
  int64_t count;
};

struct Preparation {
  Statistics stats;
  Zeros zeros[3];
  int block_queries, num_sms;
};

__global__ void __launch_bounds__(kPlanThreads)
    PrepareBackward(const __grid_constant__ BackwardKernelParams params,
                    const __grid_constant__ Preparation preparation) {
  if (blockIdx.x == 0) {
    PlanWork(params, preparation.block_queries, preparation.num_sms);
    return;
  }
  const int block = blockIdx.x - 1, blocks = gridDim.x - 1;
  constexpr int kTiles = kPlanThreads / kStatThreads;
  for (int tile = block * kTiles; tile < preparation.stats.Tiles(); tile += blocks * kTiles)
    PrepareStats<kPlanThreads>(preparation.stats, tile);
#pragma unroll
  for (const Zeros& zeros : preparation.zeros) {
    for (int64_t i = int64_t{block} * kPlanThreads + threadIdx.x; i < zeros.count;
         i += int64_t{blocks} * kPlanThreads) {
      zeros.words[i] = make_float4(0, 0, 0, 0);
    }
  }
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_
