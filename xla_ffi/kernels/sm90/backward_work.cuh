// Deals the work of the backward out: a tile of keys that walks many blocks is split by the heads
// of its group, so that items are of like length and tiles in flight walk the same head, whose
// queries and gradients stay in L2. The gradients of split tiles are summed in float32.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_WORK_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_WORK_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "xla_ffi/kernels/sm90/backward_items.cuh"
#include "xla_ffi/kernels/sm90/backward_order.h"
#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/softmax.h"

namespace magi_jax::sm90 {

constexpr int kMergeThreads = 256;

// Thread blocks that clear or round a tile's sums: enough to fill the device, and not so many that
// starting them takes long where a tile has none.
constexpr int MergeBlocks(int num_tiles) {
  return num_tiles <= 16 ? 128 : num_tiles <= 64 ? 32 : num_tiles <= 512 ? 2048 / num_tiles : 4;
}

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

__device__ __forceinline__ int RunsOfTile(const TileRuns& by_key, int table_tile) {
  const int first = max(by_key.ptr[table_tile], 0);
  return max(min(by_key.ptr[table_tile + 1], by_key.num_runs) - first, 0);
}

// The segments of queries in which a table tile's walk is done. Walks no longer than a segment stay
// whole, and so do those of more slices than a note has room for, since notes cut slices.
struct Segments {
  int first, count;  // in units of segment_queries

  __device__ __forceinline__ bool Begins(int segment) const {
    return segment >= first && segment < first + count;
  }
};

__device__ __forceinline__ Segments SegmentsOfTile(const BackwardKernelParams& params, int size,
                                                   int table_tile) {
  const TileRuns& by_key = params.by_key;
  if (size >= params.q_len) return {0, 1};
  const int first = max(by_key.ptr[table_tile], 0);
  const int end = min(by_key.ptr[table_tile + 1], by_key.num_runs);
  if (first >= end) return {0, 1};
  const int begin = min(max(by_key.runs[first].begin, 0), params.q_len - 1);
  const int last = min(max(by_key.runs[end - 1].end - 1, begin), params.q_len - 1);
  bool cut = last - begin >= size;
  for (int r = first; r < end && cut; ++r) {
    const Run& run = by_key.runs[r];
    cut = int64_t{run.ids_end} - run.ids_begin <= kMaxInlineSlices;
  }
  return {begin / size, cut ? last / size - begin / size + 1 : 1};
}

// First query that a table tile may see, a multiple of kQueryAlignment, or kNoQuery.
__device__ __forceinline__ int FirstQueryOfTile(const TileRuns& by_key, int table_tile) {
  const int first = max(by_key.ptr[table_tile], 0);
  const int end = min(by_key.ptr[table_tile + 1], by_key.num_runs);
  return first < end ? max(by_key.runs[first].begin, 0) & ~(kQueryAlignment - 1) : kNoQuery;
}

// The order of sums: tiles by falling first query. Nobody has added anything.
__device__ void PlanOrder(const BackwardKernelParams& params, int num_tiles) {
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads)
    params.first_queries[tile] = FirstQueryOfTile(params.by_key, tile / params.parts_per_tile);
  __syncthreads();
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads) {
    const int first = params.first_queries[tile];
    int rank = 0;
    for (int other = 0; other < num_tiles; ++other) {
      const int query = params.first_queries[other];
      rank += query > first || (query == first && other < tile);
    }
    params.tile_order[rank] = tile;
  }
  __syncthreads();
  const int64_t words = int64_t{2} * params.num_heads * num_tiles;
  for (int64_t i = threadIdx.x; i < words; i += kPlanThreads) {
    // Tiles before it start no earlier.
    const int first = params.first_queries[params.tile_order[i % num_tiles]];
    params.progress[i] = {first, first};
  }
  for (int64_t i = threadIdx.x; i < int64_t{2} * params.num_kv_heads * num_tiles; i += kPlanThreads)
    params.turns[i] = 0;
}

struct RankedTile {
  int tile, blocks;  // tile < 0: none
  int parts;         // of its group's heads
  Segments segments;
};

// The tile of a rank in the table's order, longest first.
__device__ __forceinline__ int ListedTile(const BackwardKernelParams& params, int rank,
                                          int num_tiles) {
  const TileRuns& by_key = params.by_key;
  const int at = min(rank, num_tiles - 1);
  const int table_tile =
      min(max(by_key.order[at / params.parts_per_tile], 0), by_key.num_tiles - 1);
  return table_tile * params.parts_per_tile + at % params.parts_per_tile;
}

// One block. Lists the items of one kv head: those that start at the first head of the group before
// those that start at the second. Neighbours walk the same queries, so tiles follow each other by
// place while that cannot leave a long one to the end; then longest first.
__device__ void PlanWork(const BackwardKernelParams& params, const Divisors& divisors,
                         int block_queries, int num_sms) {
  __shared__ int warp_counts[kPlanThreads / 32];
  __shared__ TileStats stats;
  if (threadIdx.x == 0) stats = {0, 0, 0, false};
  __syncthreads();
  // Of each tile. Tables of up to 131072 keys need no memory for it, which is busy being cleared.
  __shared__ int few_blocks[kPlanThreads];
  const bool ordered = params.progress != nullptr;
  const int group = params.num_heads / params.num_kv_heads;
  const int num_tiles = NumTiles(params);
  int* const blocks_of = num_tiles <= kPlanThreads ? few_blocks : params.parts;
  const int first_listed = ListedTile(params, threadIdx.x, num_tiles);
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads) {
    const int blocks =
        BlocksOfTile(params.by_key, tile / params.parts_per_tile, params.q_len, block_queries);
    blocks_of[tile] = blocks;
    atomicAdd(&stats.all_blocks, blocks);
    atomicMax(&stats.most_blocks, blocks);
    atomicAdd(&stats.runs, RunsOfTile(params.by_key, tile / params.parts_per_tile));
  }
  __syncthreads();
  int item_blocks = stats.ItemBlocks(params, num_tiles, group, num_sms);
  const int short_share = stats.AreAlike(num_tiles) ? kShortAlikeShare : kShortShare;
  const bool is_short =
      static_cast<int64_t>(stats.all_blocks) * params.num_heads < int64_t{short_share} * num_sms;
  if (is_short && !ordered)
    item_blocks = FastestItemBlocks(params, divisors, blocks_of, num_tiles, num_sms);
  // Where items wait for each other all tiles are split alike, so that they stand in one order for
  // all heads.
  const auto parts_of = [&](int blocks) {
    if (!ordered) return divisors.PartsOfTile(blocks, item_blocks);
    return int64_t{stats.most_blocks} * group > item_blocks ? group : 1;
  };
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads) {
    if (parts_of(blocks_of[tile]) > 1) stats.any_split = true;
  }
  if (ordered) PlanOrder(params, num_tiles);
  __syncthreads();
  const bool any_split = stats.any_split;
  // Without parts there is but one round: its long tiles first.
  const int rounds = any_split || ordered ? 1 : 2;
  const int64_t long_blocks = static_cast<int64_t>(stats.all_blocks) * 3 / 2 / max(num_tiles, 1);
  // Only where most of what there is to do is done by walks that are cut: others lose by it.
  const bool cuts = params.segment_queries < params.q_len &&
                    static_cast<int64_t>(stats.all_blocks) * block_queries * 4 >=
                        int64_t{num_tiles} * params.q_len * 3;
  const int segment_queries = cuts ? params.segment_queries : params.q_len;
  const int num_segments = (params.q_len + segment_queries - 1) / segment_queries;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int listed = 0;
  const auto list = [&](const RankedTile& ranked, int head, int segment, bool wanted) {
    const int num_heads = group / ranked.parts;
    const Segments& segments = ranked.segments;
    const bool starts =
        wanted && ranked.tile >= 0 && head % num_heads == 0 && segments.Begins(segment);
    const uint32_t starting = __ballot_sync(0xFFFFFFFF, starts);
    if (lane == 0) warp_counts[warp] = __popc(starting);
    __syncthreads();
    const int count = warp_counts[lane];
    const int before = __reduce_add_sync(0xFFFFFFFF, lane < warp ? count : 0);
    if (starts) {
      const bool whole = segments.count == 1;
      params.items[listed + before + __popc(starting & ((1u << lane) - 1))] = {
          ranked.tile, static_cast<int16_t>(head), static_cast<int16_t>(num_heads),
          whole ? 0 : segment * segment_queries,
          whole ? params.q_len : min((segment + 1) * segment_queries, params.q_len)};
    }
    listed += __reduce_add_sync(0xFFFFFFFF, count);
    __syncthreads();
  };
  const auto tile_of = [&](int rank, int listed, bool by_place) {
    const int tile =
        ordered ? params.tile_order[min(rank, num_tiles - 1)] : (by_place ? rank : listed);
    if (rank >= num_tiles) return RankedTile{-1, 0, 1, {0, 1}};
    const int blocks = blocks_of[tile];
    return RankedTile{tile, blocks, parts_of(blocks),
                      SegmentsOfTile(params, segment_queries, tile / params.parts_per_tile)};
  };
  const RankedTile first_by_place = tile_of(threadIdx.x, first_listed, true);
  const RankedTile first_by_length = tile_of(threadIdx.x, first_listed, false);
  for (int head = 0; head < (any_split ? group : 1); ++head) {
    const bool by_place = !any_split || 2 * head < group;
    for (int pass = 0; pass < rounds * num_segments; ++pass) {
      const int round = pass / num_segments, segment = pass % num_segments;
      for (int start = 0; start < num_tiles; start += kPlanThreads) {
        const int rank = start + threadIdx.x;
        const RankedTile ranked = start > 0
                                      ? tile_of(rank, ListedTile(params, rank, num_tiles), by_place)
                                      : (by_place ? first_by_place : first_by_length);
        const bool wanted = rounds == 1 || (ranked.blocks > long_blocks) == (round == 0);
        list(ranked, head, segment, wanted);
      }
    }
  }
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads) {
    params.parts[tile] =
        parts_of(blocks_of[tile]) *
        SegmentsOfTile(params, segment_queries, tile / params.parts_per_tile).count;
  }
  if (threadIdx.x == 0) {
    const bool takes_short = params.num_short_items != nullptr && !cuts &&
                             (params.q_len < kLongRun || stats.RunsAreShort(block_queries));
    int* const num_items = cuts          ? params.num_cut_items
                           : takes_short ? params.num_short_items
                                         : params.num_items;
    *num_items = listed;
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

// Rounds the sums of tile blockIdx.x to results.
template <typename Element>
__device__ void WriteSplitTile(const BackwardKernelParams& params, int tile_rows, int head_dim,
                               int v_head_dim) {
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
