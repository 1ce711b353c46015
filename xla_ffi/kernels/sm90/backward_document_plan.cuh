// Which masks are documents, and how these are dealt out; see backward_documents.h.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENT_PLAN_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENT_PLAN_CUH_

#include "xla_ffi/kernels/sm90/backward_documents.h"
#include "xla_ffi/kernels/sm90/backward_work.cuh"

namespace magi_jax::sm90 {

constexpr int kDocumentsPerSm = 4;  // a mask may be documents where each SM could have so many
constexpr int kItemsPerShare = 2;   // an item is at most one of so many parts of a block's share
constexpr int kItemLengths = 32;    // classes of items, the longest dealt out first

struct DocumentStats {
  unsigned long long all_blocks;  // of one head
  int longest;                    // of one document and head
  int count, items;               // documents, and what they are dealt out as

  // Blocks of an item, where a document may be split by heads.
  __device__ __forceinline__ int ItemBlocks(const BackwardKernelParams& params) const {
    const int64_t share = static_cast<int64_t>(all_blocks) * params.num_heads / kDocumentBlocks;
    return static_cast<int>(max(share / kItemsPerShare, int64_t{longest}));
  }
};

// Into how many parts a document is split by the heads of a group: items are of like length, and
// what an item keeps of dQ between tiles fits in the scratch of a thread block.
__device__ __forceinline__ int PartsOfDocument(const BackwardKernelParams& params,
                                               const Divisors& divisors, const Document& document,
                                               int blocks, int item_blocks) {
  const int parts = divisors.PartsOfTile(blocks, item_blocks);
  if (document.NumTiles() == 1) return parts;
  return max(parts, divisors.PartsOfTile(document.NumBlocks(), params.sum_slots));
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

// All threads of a block, with the same result in all blocks: whether the mask is documents that
// can be dealt out evenly, and none of which has more dQ than fits in a thread block's scratch.
__device__ bool AreDocuments(const BackwardKernelParams& params, const Divisors& divisors,
                             DocumentStats& stats) {
  if (threadIdx.x == 0) stats = {0, 0, 0, 0};
  bool fits = true;
  __syncthreads();
  for (int i = threadIdx.x; i < params.num_slices; i += kPlanThreads) {
    fits &= Follows(params, i);
    if (!fits || IsEmpty(params.slices[i])) continue;
    const Document document = DocumentOf(params, i);
    fits &= document.NumTiles() == 1 || document.NumBlocks() <= params.sum_slots;
    if (!fits) continue;
    const int blocks = document.BlocksOfHead();
    atomicAdd(&stats.all_blocks, blocks);
    atomicMax(&stats.longest, blocks);
    atomicAdd(&stats.count, 1);
  }
  fits = __syncthreads_and(fits) && stats.count > 0 &&
         stats.longest * int64_t{kDocumentBlocks} * 2 <=
             static_cast<int64_t>(stats.all_blocks) * params.num_heads;
  if (!fits) return false;
  for (int i = threadIdx.x; i < stats.count; i += kPlanThreads) {
    const Document document = DocumentOf(params, i);
    atomicAdd(&stats.items, PartsOfDocument(params, divisors, document, document.BlocksOfHead(),
                                            stats.ItemBlocks(params)));
  }
  __syncthreads();
  return stats.items <= NumTiles(params) * (params.num_heads / params.num_kv_heads);
}

// One block: lists the items of one kv head by falling length.
__device__ void PlanDocuments(const BackwardKernelParams& params, const Divisors& divisors,
                              const DocumentStats& stats) {
  __shared__ int counts[kItemLengths];
  const int group = params.num_heads / params.num_kv_heads;
  const int num_tiles = NumTiles(params);
  const int item_blocks = stats.ItemBlocks(params);
  if (threadIdx.x < kItemLengths) counts[threadIdx.x] = 0;
  for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads) params.parts[tile] = 1;
  __syncthreads();
  const auto length_of = [&](int blocks) {
    const int64_t length = int64_t{blocks} * kItemLengths / (item_blocks + 1);
    return kItemLengths - 1 - static_cast<int>(min(length, int64_t{kItemLengths - 1}));
  };
  const auto for_documents = [&](auto step) {
    for (int i = threadIdx.x; i < stats.count; i += kPlanThreads) {
      const Document document = DocumentOf(params, i);
      const int blocks = document.BlocksOfHead();
      const int parts = PartsOfDocument(params, divisors, document, blocks, item_blocks);
      step(document, i, parts, length_of(blocks * (group / parts)));
    }
  };
  for_documents([&](const Document& document, int, int parts, int length) {
    atomicAdd(&counts[length], parts);
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
  for_documents([&](const Document&, int index, int parts, int length) {
    const int at = atomicAdd(&counts[length], parts), heads = group / parts;
    for (int part = 0; part < parts; ++part) {
      params.items[at + part] = {index, static_cast<int16_t>(part * heads),
                                 static_cast<int16_t>(heads), 0, 0};
    }
  });
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENT_PLAN_CUH_
