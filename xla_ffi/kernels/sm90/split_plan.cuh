// Makes the plan of split_plan.h on the device, by one block of threads, one of each tile of the
// table.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_SPLIT_PLAN_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_SPLIT_PLAN_CUH_

#include <climits>

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/split_plan.h"

namespace magi_jax::sm90 {

struct SplitPlanParams {
  SplitScratch scratch;
  int block_keys;    // of a block
  int num_blocks;    // of the grid
  int most_pieces;   // of items
  int arrivals;      // that are counted
  bool skips_empty;  // tiles without runs are not dealt out
};

// Sum over this and all later threads of the block.
__device__ __forceinline__ int SumFromHere(int value, int (&warp_sums)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_down_sync(0xFFFFFFFF, value, distance);
    if (lane + distance < 32) value += other;
  }
  if (lane == 0) warp_sums[warp] = value;
  __syncthreads();
  const bool is_later = lane > warp && lane < static_cast<int>(blockDim.x / 32);
  return value + __reduce_add_sync(0xFFFFFFFF, is_later ? warp_sums[lane] : 0);
}

// Blocks that tile `rank` of the table walks, and one for what it costs besides. A tile with long
// lists of slices counts as one that cannot be cut.
struct TileLength {
  int blocks = 0;
  bool is_active = false, may_be_cut = false;

  __device__ __forceinline__ TileLength(const KernelParams& params, int rank, int block_keys) {
    const TileRuns& table = params.by_query;
    if (rank >= table.num_tiles) return;
    const int tile = min(max(table.order[rank], 0), table.num_tiles - 1);
    const int first = max(table.ptr[tile], 0), end = min(table.ptr[tile + 1], table.num_runs);
    is_active = first < end;
    const TileExtent extent(params, first, end);
    blocks = is_active ? min(extent.keys / block_keys + 1, 1 << 20) : 0;
    may_be_cut = extent.has_short_lists && blocks >= 2 * kLeastBlocks;
  }
};

// Of each section, the first items of tiles of one rank that are longer than what is left to do
// for one multiprocessor, by which they are too long.
__device__ __forceinline__ void FindLongItems(const KernelParams& params, int active_tiles,
                                              const TileLength& length, int blocks_from_here,
                                              int all_blocks, int num_blocks,
                                              int (&begin)[kCutClasses + 1]) {
  const int per_kv_head = params.parts_per_group * params.parts_per_tile;
  const int64_t share_of_item = int64_t{length.blocks} * num_blocks;
  for (int head = 0; head < params.num_kv_heads; head += params.section_kv_heads) {
    const int section_heads = min(params.section_kv_heads, params.num_kv_heads - head);
    const int items = section_heads * per_kv_head;
    const int64_t after =
        int64_t{all_blocks} * per_kv_head * (params.num_kv_heads - head - section_heads);
    const int64_t left = after + int64_t{blocks_from_here} * items;
    const int first = active_tiles * per_kv_head * head + static_cast<int>(threadIdx.x) * items;
#pragma unroll
    for (int c = 0; c < kCutClasses; ++c) {
      const int64_t spare = (left << c) - share_of_item;
      const int64_t skipped = spare < 0 ? 0 : spare / (int64_t{length.blocks} << c) + 1;
      if (skipped >= items) continue;
      atomicMin(&begin[c], first + static_cast<int>(skipped));
      atomicMax(&begin[kCutClasses], first + items);
    }
  }
}

__global__ void __launch_bounds__(kMostSplitTiles)
    MakeSplitPlan(const __grid_constant__ KernelParams params,
                  const __grid_constant__ SplitPlanParams plan) {
  __shared__ int warp_sums[32], begin[kCutClasses + 1], active_tiles, all_blocks;
  const int rank = threadIdx.x;
  if (rank <= kCutClasses) begin[rank] = rank < kCutClasses ? INT_MAX : 0;
  if (rank == 0) active_tiles = 0;
  auto* const arrivals = reinterpret_cast<int4*>(plan.scratch.arrivals);
  for (int i = rank; i < plan.arrivals / 4; i += blockDim.x) arrivals[i] = make_int4(0, 0, 0, 0);
  const TileLength length(params, rank, plan.block_keys);
  const int blocks_from_here = SumFromHere(length.blocks, warp_sums);
  if (rank == 0) all_blocks = blocks_from_here;
  if (length.is_active) atomicMax(&active_tiles, rank + 1);
  __syncthreads();
  if (length.may_be_cut)
    FindLongItems(params, active_tiles, length, blocks_from_here, all_blocks, plan.num_blocks,
                  begin);
  __syncthreads();
  if (rank != 0) return;

  SplitPlan made;
  const int items_per_tile = params.num_kv_heads * params.parts_per_group * params.parts_per_tile;
  made.active_tiles = active_tiles;
  made.num_dense = active_tiles * items_per_tile;
  made.begin[kCutClasses] = begin[kCutClasses];
  int places = plan.most_pieces;
  for (int c = kCutClasses - 1; c >= 0; --c) {
    // The last items are those that matter.
    const int end = made.begin[c + 1], cuts = 2 << c;
    made.begin[c] = max(min(begin[c], end), end - places / cuts);
    places -= (end - made.begin[c]) * cuts;
    made.num_dense += (end - made.begin[c]) * (cuts - 1);
  }
  made.num_work = made.num_dense;
  if (!plan.skips_empty)
    made.num_work += (params.by_query.num_tiles - active_tiles) * items_per_tile;
  *plan.scratch.plan = made;
  *plan.scratch.counter = 0;
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_SPLIT_PLAN_CUH_
