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

// This thread among all of a grid of tiles.
__device__ __forceinline__ int64_t ThreadOfGrid() {
  return (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kMergeThreads + threadIdx.x;
}

__device__ __forceinline__ int64_t ThreadsOfGrid() {
  return int64_t{gridDim.x} * gridDim.y * kMergeThreads;
}

// Calls step(first word of four elements, words) for rows of queries in tiles that see keys, with
// the threads of one block for each.
template <typename Step>
__device__ __forceinline__ void ForRowsThatSee(const BackwardKernelParams& params, int head_dim,
                                               Step step) {
  const int words = params.num_heads * head_dim / 4;
  const int blocks = gridDim.x * gridDim.y;
  for (int row = blockIdx.y * gridDim.x + blockIdx.x; row < params.q_len; row += blocks) {
    const int* const tile = params.query_ptr + row / params.query_tile_size;
    if (tile[0] < tile[1]) step(int64_t{row} * words, words);
  }
}

// Rounds words of four floats, with some threads. Several are loaded at a time:
// the compiler would keep each load behind the stores before it.
template <typename Element>
__device__ __forceinline__ void RoundWords(const float4* from, uint2* to, int64_t count,
                                           int64_t thread, int64_t threads) {
  constexpr int kBatch = 4;
  for (int64_t i = thread; i < count; i += kBatch * threads) {
    float4 words[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (i + j * threads < count) words[j] = from[i + j * threads];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (i + j * threads >= count) break;
      to[i + j * threads] = make_uint2(Pack(words[j].x, words[j].y, Element{}),
                                       Pack(words[j].z, words[j].w, Element{}));
    }
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    PrepareBackward(const __grid_constant__ BackwardKernelParams params,
                    const __grid_constant__ Preparation preparation) {
  __shared__ DocumentStats document_stats;
  __shared__ Divisors divisors;
  LetKernelAfterBegin();
  if (blockIdx.x == 0 || params.num_document_items != nullptr)
    divisors.Find(params.num_heads / params.num_kv_heads);
  const bool documents =
      params.num_document_items != nullptr && AreDocuments(params, divisors, document_stats);
  if (blockIdx.x == 0) {
    if (threadIdx.x < kCounters) params.counter[threadIdx.x] = 0;
    __syncthreads();
    if (documents) {
      PlanDocuments(params, divisors, document_stats);
      return;
    }
    PlanWork(params, divisors, preparation.block_queries, preparation.num_sms);
    return;
  }
  const int block = blockIdx.x - 1, blocks = gridDim.x - 1;
  if (documents) {
    const int64_t flags = FlagsOf(params, document_stats);
    for (int64_t i = int64_t{block} * kPlanThreads + threadIdx.x; i < flags;
         i += int64_t{blocks} * kPlanThreads) {
      params.sum_flags[i] = 0;
    }
  }
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

// Clears what is much, and only where the plan adds to it: the sums of split tiles, where
// `has_sums`, and dQ.
__global__ void __launch_bounds__(kMergeThreads)
    ClearByPlan(const __grid_constant__ BackwardKernelParams params, int tile_rows, int head_dim,
                int v_head_dim, bool has_sums, const Zeros queries) {
  LetKernelAfterBegin();
  AwaitKernelBefore();
  const float4 zero = make_float4(0, 0, 0, 0);
  if (has_sums && params.parts[blockIdx.x] != 1) {
    const auto clear = [zero](float* sums) {
      return [sums, zero](int64_t i) { reinterpret_cast<float4*>(sums)[i] = zero; };
    };
    ForRowsOfTile(params, tile_rows, head_dim, clear(params.dk_sum));
    ForRowsOfTile(params, tile_rows, v_head_dim, clear(params.dv_sum));
  }
  const bool documents = params.num_document_items != nullptr && *params.num_document_items > 0;
  if (queries.count == 0 || documents) return;
  if (params.query_ptr != nullptr) {
    ForRowsThatSee(params, head_dim, [&](int64_t first, int words) {
      for (int i = threadIdx.x; i < words; i += kMergeThreads) queries.words[first + i] = zero;
    });
    return;
  }
#pragma unroll 4
  for (int64_t i = ThreadOfGrid(); i < queries.count; i += ThreadsOfGrid()) queries.words[i] = zero;
}

// What comes after it: sums of split tiles and dQ to results.
template <typename Element>
__global__ void __launch_bounds__(kMergeThreads)
    FinishBackward(const __grid_constant__ BackwardKernelParams params, int tile_rows, int head_dim,
                   int v_head_dim, bool has_sums, const float4* dq, int64_t query_words) {
  AwaitKernelBefore();
  if (has_sums && params.parts[blockIdx.x] != 1)
    WriteSplitTile<Element>(params, tile_rows, head_dim, v_head_dim);
  if (params.dq_rounded == nullptr) return;
  if (params.num_document_items != nullptr && *params.num_document_items > 0) return;
  uint2* const rounded = static_cast<uint2*>(params.dq_rounded);
  if (params.query_ptr != nullptr) {
    ForRowsThatSee(params, head_dim, [&](int64_t first, int words) {
      RoundWords<Element>(dq + first, rounded + first, words, threadIdx.x, kMergeThreads);
    });
    return;
  }
  RoundWords<Element>(dq, rounded, query_words, ThreadOfGrid(), ThreadsOfGrid());
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PREPARE_CUH_
