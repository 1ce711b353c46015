// How long an item of the backward is to be: short ones balance better, long ones cost less.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_ITEMS_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_ITEMS_CUH_

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "xla_ffi/kernels/sm90/backward_params.h"

namespace magi_jax::sm90 {

constexpr int kPlanThreads = 1024;
constexpr int kItemsPerSm = 10;   // at least, while items are not too short
constexpr int kShortestItem = 8;  // blocks of an item at least, however little there is to do
// Below this share of an SM, in blocks (that of tiles of about the same length), who ends last
// decides how long it takes. Then what an item costs besides its blocks counts: in blocks, where
// its tile is whole and where it is split.
constexpr int kShortShare = 400, kShortAlikeShare = 1000;
constexpr int kWholeItemCost = 3, kSplitItemCost = 5;
constexpr int kItemLimits = 14;  // that are compared: 8, 12, 16, 24, ... 768 blocks

// Into how many parts the heads of a group may be split: its divisors (no number below 1680 has
// more than 36; of others the least are kept, and the group). They are kept, since finding them
// takes longer than all else about a tile.
struct Divisors {
  static constexpr int kMost = 36;
  int count;
  int parts[kMost], heads[kMost];  // of the group, rising, and of a part

  // All threads of a block.
  __device__ void Find(int group) {
    if (threadIdx.x < 32) {
      int found = 0;
      for (int first = 1; first <= group; first += 32) {
        const int divisor = first + threadIdx.x;
        const bool divides = divisor <= group && group % divisor == 0;
        const uint32_t dividing = __ballot_sync(0xFFFFFFFF, divides);
        const int at = found + __popc(dividing & ((1u << threadIdx.x) - 1));
        if (divides && at < kMost) {
          parts[at] = divisor;
          heads[at] = group / divisor;
        }
        found += __popc(dividing);
      }
      __syncwarp();
      if (threadIdx.x == 0) {
        count = min(found, kMost);
        // A head may be a part of its own, however many divisors are left out before it.
        parts[count - 1] = group;
        heads[count - 1] = 1;
      }
    }
    __syncthreads();
  }

  // Parts where each head walks this many blocks.
  __device__ __forceinline__ int PartsOfTile(int blocks, int item_blocks) const {
    int at = 0;
    while (at + 1 < count && int64_t{blocks} * heads[at] > item_blocks) ++at;
    return parts[at];
  }
};

// What a block of threads knows of all tiles.
struct TileStats {
  unsigned long long all_blocks;  // of one head
  int most_blocks;                // of one tile and head
  int runs;
  bool any_split;

  __device__ __forceinline__ bool RunsAreShort(int block_queries) const {
    return all_blocks * block_queries < static_cast<unsigned long long>(runs) * kLongRun;
  }

  __device__ __forceinline__ bool AreAlike(int num_tiles) const {
    return int64_t{most_blocks} * num_tiles * 5 <= static_cast<int64_t>(all_blocks) * 7;
  }

  // Where all tiles walk about the same number of blocks, splitting them would balance nothing.
  __device__ __forceinline__ bool StaysWhole(const BackwardKernelParams& params, int num_tiles,
                                             int group, int num_sms) const {
    const bool enough = int64_t{num_tiles} * params.num_kv_heads * 10 >= int64_t{num_sms} * 9;
    const bool fits = int64_t{most_blocks} * group <= params.item_blocks;
    return AreAlike(num_tiles) && enough && fits;
  }

  // More blocks than this in an item and its tile is split.
  __device__ __forceinline__ int ItemBlocks(const BackwardKernelParams& params, int num_tiles,
                                            int group, int num_sms) const {
    if (StaysWhole(params, num_tiles, group, num_sms)) return params.item_blocks;
    const int64_t share = static_cast<int64_t>(all_blocks) * params.num_heads / num_sms;
    // Where a whole SM has little to do, short items cost less than SMs that end early.
    const int64_t least =
        min(max(share / 4, int64_t{kShortestItem}), int64_t{params.least_item_blocks});
    return static_cast<int>(min(max(share / kItemsPerSm, least), int64_t{params.item_blocks}));
  }
};

// Blocks of an item with which a short call ends first, by an estimate of when the last thread
// block does. All threads of a block; a warp looks at one limit.
__device__ int FastestItemBlocks(const BackwardKernelParams& params, const Divisors& divisors,
                                 const int* blocks_of, int num_tiles, int num_sms) {
  __shared__ unsigned long long best;
  if (threadIdx.x == 0) best = ~0ull;
  __syncthreads();
  const int lane = threadIdx.x % 32, candidate = threadIdx.x / 32;
  const int group = params.num_heads / params.num_kv_heads;
  if (candidate < kItemLimits) {
    const int limit = (candidate % 2 == 0 ? 8 : 12) << (candidate / 2);
    int items = 0, all = 0, longest = 0, shortest = INT_MAX;
    for (int tile = lane; tile < num_tiles; tile += 32) {
      const int parts = divisors.PartsOfTile(blocks_of[tile], limit);
      const int blocks =
          blocks_of[tile] * (group / parts) + (parts > 1 ? kSplitItemCost : kWholeItemCost);
      items += parts;
      all += blocks * parts;
      longest = max(longest, blocks);
      shortest = min(shortest, blocks);
    }
    items = __reduce_add_sync(0xFFFFFFFF, items) * params.num_kv_heads;
    all = __reduce_add_sync(0xFFFFFFFF, all) * params.num_kv_heads;
    longest = __reduce_max_sync(0xFFFFFFFF, longest);
    shortest = __reduce_min_sync(0xFFFFFFFF, shortest);
    // Equal items end in rounds; others leave some of the longest between the first and the last.
    int64_t end = int64_t{(items + num_sms - 1) / num_sms} * longest * num_sms;
    if (items > num_sms && longest > shortest)
      end = max(all + int64_t{longest} * num_sms / 2, int64_t{longest} * num_sms);
    if (lane == 0) atomicMin(&best, static_cast<unsigned long long>(end) << 16 | limit);
  }
  __syncthreads();
  return static_cast<int>(best & 0xFFFF);
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_ITEMS_CUH_
