// Which masks are documents, and how these are dealt out; see backward_documents.h.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENT_PLAN_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENT_PLAN_CUH_

#include "xla_ffi/kernels/sm90/backward_documents.h"
#include "xla_ffi/kernels/sm90/backward_work.cuh"

namespace magi_jax::sm90 {

constexpr int kDocumentsPerSm = 2;  // a mask may be documents where each SM could have so many
// A block of queries is walked by at most so many tiles in the mean, and a thread block has at
// least so many blocks of queries for each tile that walks one: else additions in global memory are
// faster. Causal documents may have more tiles, but then want more blocks.
constexpr int kMostTilesOfBlock = 5, kLeastBlocksPerTile = 6, kMostTilesOfCausalBlock = 13,
              kLeastBlocksPerCausalTile = 8;
constexpr int kItemLengths = 32;  // classes of items, the longest dealt out first

struct DocumentStats {
  // Of one head: what tiles walk, blocks of queries, those whose dQ goes from tile to tile, and
  // what one tile walks at most.
  unsigned long long walked;
  unsigned long long whole;  // that they would walk if they saw all
  int blocks, kept, longest_tile;
  int count, items;  // documents, and what they are dealt out as

  // What an item may walk, where tiles may be split by heads: a thread block's share.
  __device__ __forceinline__ int ItemBlocks(const BackwardKernelParams& params) const {
    return static_cast<int>(walked * params.num_heads / kDocumentBlocks);
  }

  // Half of them is seen, and somewhat more where blocks and tiles are long beside them.
  __device__ __forceinline__ bool AreCausal() const {
    return 2 * walked >= whole && 4 * walked <= 3 * whole;
  }

  __device__ __forceinline__ bool AreWithin(int most_tiles, int least_blocks, int num_heads) const {
    const int64_t all = static_cast<int64_t>(walked);
    return all <= int64_t{blocks} * most_tiles &&
           int64_t{blocks} * blocks * num_heads >= all * least_blocks * kDocumentBlocks;
  }

  __device__ __forceinline__ bool PayOff(const BackwardKernelParams& params) const {
    const int64_t all = static_cast<int64_t>(walked) * params.num_heads;
    return (AreWithin(kMostTilesOfBlock, kLeastBlocksPerTile, params.num_heads) ||
            (AreCausal() &&
             AreWithin(kMostTilesOfCausalBlock, kLeastBlocksPerCausalTile, params.num_heads))) &&
           int64_t{longest_tile} * kDocumentBlocks * 2 <= all;
  }
};

// Blocks whose dQ is kept between tiles.
__device__ __forceinline__ int KeptBlocks(const Document& document) {
  return document.NumTiles() > 1 ? document.NumBlocks() : 0;
}

// Of the blocks that are kept, from the first on.
__device__ __forceinline__ int64_t FlagsOf(const BackwardKernelParams& params,
                                           const DocumentStats& stats) {
  return int64_t{stats.kept} * params.num_heads * kDocumentConsumers;
}

// Whether slice `index` comes after the one before it in queries and keys, and lies in the tensors.
__device__ __forceinline__ bool Follows(const BackwardKernelParams& params, int index) {
  const Slice slice = params.slices[index];
  if (IsEmpty(slice)) return index > 0;
  const Slice before = index > 0 ? params.slices[index - 1] : Slice{0, 0, 0, 0, 0, 0};
  return slice.q_start >= before.q_end && slice.k_start >= before.k_end && slice.q_start >= 0 &&
         slice.k_start >= 0 && slice.q_end <= params.q_len && slice.k_end <= params.k_len &&
         (index == 0 || !IsEmpty(before));
}

// All threads of a block, with the same result in all blocks: whether the mask is documents for
// which this kernel is the faster one, and for whose items and dQ there is room.
__device__ bool AreDocuments(const BackwardKernelParams& params, const Divisors& divisors,
                             DocumentStats& stats) {
  if (threadIdx.x == 0) stats = {};
  bool fits = true;
  __syncthreads();
  for (int i = threadIdx.x; i < params.num_slices; i += kPlanThreads) {
    fits &= Follows(params, i);
    if (!fits || IsEmpty(params.slices[i])) continue;
    const Document document = DocumentOf(params, i);
    atomicAdd(&stats.walked, document.BlocksOfHead());
    atomicAdd(&stats.whole, uint64_t{1} * document.NumTiles() * document.NumBlocks());
    atomicAdd(&stats.blocks, document.NumBlocks());
    atomicAdd(&stats.kept, KeptBlocks(document));
    atomicMax(&stats.longest_tile, document.NumBlocks());
    atomicAdd(&stats.count, 1);
  }
  fits = __syncthreads_and(fits);
  if (!fits || stats.count == 0 || stats.kept > params.sum_slots || !stats.PayOff(params))
    return false;
  for (int i = threadIdx.x; i < stats.count; i += kPlanThreads) {
    const Document document = DocumentOf(params, i);
    atomicAdd(&stats.items, document.NumTiles() * divisors.PartsOfTile(document.NumBlocks(),
                                                                       stats.ItemBlocks(params)));
  }
  __syncthreads();
  return stats.items <= params.most_document_items;
}

// One block: lists the items of one kv head, documents by falling length of their items.
__device__ void PlanDocuments(const BackwardKernelParams& params, const Divisors& divisors,
                              const DocumentStats& stats) {
  __shared__ int counts[kItemLengths];
  __shared__ int slots;
  const int group = params.num_heads / params.num_kv_heads;
  const int num_tiles = NumTiles(params);
  const int item_blocks = stats.ItemBlocks(params);
  if (threadIdx.x < kItemLengths) counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) slots = 0;
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads) params.parts[tile] = 1;
  __syncthreads();
  const auto length_of = [&](int blocks) {
    const int64_t length = int64_t{blocks} * kItemLengths / (item_blocks + 1);
    return kItemLengths - 1 - static_cast<int>(min(length, int64_t{kItemLengths - 1}));
  };
  const auto for_documents = [&](auto step) {
    for (int i = threadIdx.x; i < stats.count; i += kPlanThreads) {
      const Document document = DocumentOf(params, i);
      const int blocks = document.NumBlocks();
      const int parts = divisors.PartsOfTile(blocks, item_blocks);
      step(document, i, parts, length_of(blocks * (group / parts)));
    }
  };
  for_documents([&](const Document& document, int, int parts, int length) {
    atomicAdd(&counts[length], parts * document.NumTiles());
    for (int tile = document.first_key / Document::kKeys;
         parts > 1 && tile * Document::kKeys < document.end_key; ++tile) {
      params.parts[tile] = 2;
    }
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    int listed = 0;
    for (int& count : counts) {
      const int items = count;
      count = listed;
      listed += items;
    }
    *params.num_document_items = listed;
  }
  __syncthreads();
  for_documents([&](const Document& document, int index, int parts, int length) {
    int at = atomicAdd(&counts[length], parts * document.NumTiles());
    const int slot = atomicAdd(&slots, KeptBlocks(document)), heads = group / parts;
    for (int tile = document.NumTiles() - 1; tile >= 0; --tile) {
      for (int part = 0; part < parts; ++part) {
        params.items[at++] = {index, static_cast<int16_t>(part * heads),
                              static_cast<int16_t>(heads), tile, slot};
      }
    }
  });
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENT_PLAN_CUH_
