// What comes before the backward kernel, in one launch, since each part of it is short: the first
// thread block deals the work out, the others prepare statistics and clear what is added to.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_

#include "xla_ffi/kernels/sm90/backward_document_plan.cuh"
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
  Zeros zeros[3];  // of dQ first
  int block_queries, num_sms;
};

__global__ void __launch_bounds__(kPlanThreads)
    PrepareBackward(const __grid_constant__ BackwardKernelParams params,
                    const __grid_constant__ Preparation preparation) {
  __shared__ DocumentStats document_stats;
  const bool documents =
      params.num_document_items != nullptr && AreDocuments(params, document_stats);
  if (blockIdx.x == 0) {
    if (documents) {
      PlanDocuments(params, document_stats);
      return;
    }
    PlanWork(params, preparation.block_queries, preparation.num_sms);
    if (threadIdx.x == 0 && params.num_document_items != nullptr) *params.num_document_items = 0;
    return;
  }
  const int block = blockIdx.x - 1, blocks = gridDim.x - 1;
  constexpr int kTiles = kPlanThreads / kStatThreads;
  for (int tile = block * kTiles; tile < preparation.stats.Tiles(); tile += blocks * kTiles)
    PrepareStats<kPlanThreads>(preparation.stats, tile);
#pragma unroll
  for (int part = documents ? 1 : 0; part < 3; ++part) {
    const Zeros& zeros = preparation.zeros[part];
    for (int64_t i = int64_t{block} * kPlanThreads + threadIdx.x; i < zeros.count;
         i += int64_t{blocks} * kPlanThreads) {
      zeros.words[i] = make_float4(0, 0, 0, 0);
    }
  }
}

// What comes after it: sums of split tiles and dQ to results.
template <typename Element>
__global__ void __launch_bounds__(kMergeThreads)
    FinishBackward(const __grid_constant__ BackwardKernelParams params, int tile_rows, int head_dim,
                   int v_head_dim, bool has_sums, const float4* dq, int64_t query_words) {
  if (has_sums && params.parts[blockIdx.x] != 1)
    WriteSplitTile<Element>(params, tile_rows, head_dim, v_head_dim);
  if (params.dq_rounded == nullptr) return;
  if (params.num_document_items != nullptr && *params.num_document_items > 0) return;
  const int64_t threads = int64_t{gridDim.x} * gridDim.y * kMergeThreads;
  const int64_t first = (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kMergeThreads;
  for (int64_t i = first + threadIdx.x; i < query_words; i += threads) {
    const float4 sum = dq[i];
    static_cast<uint2*>(params.dq_rounded)[i] =
        make_uint2(Pack(sum.x, sum.y, Element{}), Pack(sum.z, sum.w, Element{}));
  }
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_
