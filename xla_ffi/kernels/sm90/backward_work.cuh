// Deals the work of the backward out: a tile of keys that walks many blocks is split by the heads
// of its group, so that items are of like length and tiles in flight walk the same head, whose
// queries and gradients stay in L2. The gradients of split tiles are summed in float32.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_WORK_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_WORK_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/softmax.h"

namespace magi_jax::sm90 {

constexpr int kPlanThreads = 1024;
constexpr int kItemsPerSm = 10;  // at least, while items are not too short
constexpr int kMergeThreads = 256, kMergeBlocks = 8;

// Blocks that a table tile walks for one head, at most; a table may be hostile.
__device__ __forceinline__ int BlocksOfTile(const TileRuns& by_key, int table_tile, int q_len,
                                            int block_queries) {
  const int first = max(by_key.ptr[table_tile], 0);
  const int end = min(by_key.ptr[table_tile + 1], by_key.num_runs);
  int64_t blocks = 0;
  for (int r = first; r < end; ++r) {
    const int begin = min(max(by_key.runs[r].begin, 0), q_len);
    const int rows = min(max(by_key.runs[r].end, begin), q_len) - begin;
    blocks += (rows + block_queries - 1) / block_queries;
  }
  return static_cast<int>(min(blocks, int64_t{1} << 24));
}

// Into how many parts the heads of a group are split where each walks this many blocks.
__device__ __forceinline__ int PartsOfTile(int blocks, int group, int item_blocks) {
  for (int parts = 1; parts < group; ++parts) {
    if (group % parts == 0 && int64_t{blocks} * (group / parts) <= item_blocks) return parts;
  }
  return group;
}

// One block. Lists the items of one kv head: those that start at the first head of the group before
// those that start at the second, longest tiles first.
__global__ void __launch_bounds__(kPlanThreads)
    PlanWork(const __grid_constant__ BackwardKernelParams params, int block_queries, int num_sms) {
  __shared__ int warp_counts[kPlanThreads / 32];
  __shared__ unsigned long long all_blocks;  // of one head
  if (threadIdx.x == 0) all_blocks = 0;
  __syncthreads();
  const TileRuns& by_key = params.by_key;
  const int parts_per_tile = params.parts_per_tile;
  const int group = params.num_heads / params.num_kv_heads;
  const int num_tiles = by_key.num_tiles * parts_per_tile;
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads) {
    const int blocks = BlocksOfTile(by_key, tile / parts_per_tile, params.q_len, block_queries);
    params.parts[tile] = blocks;
    atomicAdd(&all_blocks, blocks);
  }
  __syncthreads();
  const int64_t share = static_cast<int64_t>(all_blocks) * params.num_heads / num_sms;
  const int item_blocks = static_cast<int>(min(
      max(share / kItemsPerSm, int64_t{params.least_item_blocks}), int64_t{params.item_blocks}));
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads)
    params.parts[tile] = PartsOfTile(params.parts[tile], group, item_blocks);
  __syncthreads();
  int listed = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int head = 0; head < group; ++head) {
    for (int start = 0; start < num_tiles; start += kPlanThreads) {
      const int rank = start + threadIdx.x;
      WorkItem item{};
      bool starts = false;
      if (rank < num_tiles) {
        const int table_tile =
            min(max(by_key.order[rank / parts_per_tile], 0), by_key.num_tiles - 1);
        item.tile = table_tile * parts_per_tile + rank % parts_per_tile;
        item.head = head;
        item.num_heads = group / params.parts[item.tile];
        starts = head % item.num_heads == 0;
      }
      const uint32_t starting = __ballot_sync(0xFFFFFFFF, starts);
      if (lane == 0) warp_counts[warp] = __popc(starting);
      __syncthreads();
      int at = listed + __popc(starting & ((1u << lane) - 1));
      for (int w = 0; w < kPlanThreads / 32; ++w) {
        const int count = warp_counts[w];
        if (w < warp) at += count;
        listed += count;
      }
      if (starts) params.items[at] = item;
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) {
    *params.num_items = listed;
    *params.counter = 0;
  }
}

// Calls step(i) for the float4s of the rows of tile blockIdx.x, all kv heads.
template <typename Step>
__device__ __forceinline__ void ForRowsOfTile(const BackwardKernelParams& params, int tile_rows,
                                              int head_dim, Step step) {
  const int64_t row = int64_t{params.num_kv_heads} * head_dim / 4;
  const int first = blockIdx.x * tile_rows;
  const int64_t end = min(first + tile_rows, params.k_len) * row;
  for (int64_t i = first * row + blockIdx.y * kMergeThreads + threadIdx.x; i < end;
       i += gridDim.y * kMergeThreads) {
    step(i);
  }
}

// Zeroes the sums of split tiles.
__global__ void __launch_bounds__(kMergeThreads)
    ClearSplitTiles(const __grid_constant__ BackwardKernelParams params, int tile_rows,
                    int head_dim, int v_head_dim) {
  if (params.parts[blockIdx.x] == 1) return;
  const auto clear = [](float* sums) {
    return [sums](int64_t i) { reinterpret_cast<float4*>(sums)[i] = make_float4(0, 0, 0, 0); };
  };
  ForRowsOfTile(params, tile_rows, head_dim, clear(params.dk_sum));
  ForRowsOfTile(params, tile_rows, v_head_dim, clear(params.dv_sum));
}

// Rounds the sums of split tiles to results.
template <typename Element>
__global__ void __launch_bounds__(kMergeThreads)
    WriteSplitTiles(const __grid_constant__ BackwardKernelParams params, int tile_rows,
                    int head_dim, int v_head_dim) {
  if (params.parts[blockIdx.x] == 1) return;
  const auto write = [](const float* sums, void* gradient) {
    return [sums, gradient](int64_t i) {
      const float4 sum = reinterpret_cast<const float4*>(sums)[i];
      static_cast<uint2*>(gradient)[i] =
          make_uint2(Pack(sum.x, sum.y, Element{}), Pack(sum.z, sum.w, Element{}));
    };
  };
  ForRowsOfTile(params, tile_rows, head_dim, write(params.dk_sum, params.dk));
  ForRowsOfTile(params, tile_rows, v_head_dim, write(params.dv_sum, params.dv));
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_WORK_CUH_
