// What comes before the backward kernel, in one launch, since each part of it is short: the first
// thread block deals the work out, the others prepare statistics and clear dQ.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_

#include "xla_ffi/kernels/sm90/backward_stats.cuh"
#include "xla_ffi/kernels/sm90/backward_work.cuh"

namespace magi_jax::sm90 {

__global__ void __launch_bounds__(kPlanThreads)
    PrepareBackward(const __grid_constant__ BackwardKernelParams params,
                    const __grid_constant__ Statistics stats, float4* dq, int64_t dq_words,
                    int block_queries, int num_sms) {
  if (blockIdx.x == 0) {
    PlanWork(params, block_queries, num_sms);
    return;
  }
  const int block = blockIdx.x - 1, blocks = gridDim.x - 1;
  constexpr int kTiles = kPlanThreads / kStatThreads;
  for (int tile = block * kTiles; tile < stats.Tiles(); tile += blocks * kTiles)
    PrepareStats<kPlanThreads>(stats, tile);
  for (int64_t i = int64_t{block} * kPlanThreads + threadIdx.x; i < dq_words;
       i += int64_t{blocks} * kPlanThreads) {
    dq[i] = make_float4(0, 0, 0, 0);
  }
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_
