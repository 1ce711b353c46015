// Which tile a block of the persistent grid works on next.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_

#include "xla_ffi/kernels/sm90/kernel_params.h"

namespace magi_jax::sm90 {

struct WorkTile {
  int table_tile;  // tile of the slice table whose runs apply
  int kv_head;
  TileNote note;  // its token is the first of the tile's 128 / pack; may be past the last row
};

// Work items of a section of kv heads; the last may have fewer.
__device__ __forceinline__ int SectionWork(const KernelParams& params, int num_tiles) {
  return num_tiles * params.section_kv_heads * params.parts_per_group * params.parts_per_tile;
}

// An item of table tile `rank` and a kv head: `index` is that of the part of the group and of the
// table tile.
__device__ __forceinline__ WorkTile TileOf(const KernelParams& params, int rank, int kv_head,
                                           int index, int tokens) {
  const int part = index / params.parts_per_tile, sub_tile = index % params.parts_per_tile;
  // A table may be hostile; its entries must not lead outside of the arrays.
  const int table_tile = min(max(params.by_query.order[rank], 0), params.by_query.num_tiles - 1);
  return {table_tile, kv_head,
          TileNote::Of(table_tile * params.table_tile_size + sub_tile * tokens,
                       (kv_head * params.parts_per_group + part) << params.pack_log2)};
}

// Work is ordered by section of kv heads, then longest tile first, then kv head, so that the keys
// of a section stay in L2 and each section ends with its shortest tiles.
__device__ __forceinline__ WorkTile DecodeWork(const KernelParams& params, int work, int num_tiles,
                                               int tokens) {
  const int per_kv_head = params.parts_per_group * params.parts_per_tile;
  const int per_section = SectionWork(params, num_tiles);
  const int section = work / per_section;
  const int section_begin = section * params.section_kv_heads;
  const int section_heads = min(params.section_kv_heads, params.num_kv_heads - section_begin);
  work -= section * per_section;
  const int rank = work / (section_heads * per_kv_head);
  work -= rank * section_heads * per_kv_head;
  return TileOf(params, rank, section_begin + work / per_kv_head, work % per_kv_head, tokens);
}

// The same of a plan: items with runs, some of which are cut, and then those without.
__device__ __forceinline__ WorkTile DecodePlanned(const KernelParams& params, int work,
                                                  int tokens) {
  const SplitPlan& plan = *params.split.plan;
  if (work >= plan.num_dense) {
    const int per_kv_head = params.parts_per_group * params.parts_per_tile;
    const int index = work - plan.num_dense, of_heads = index / per_kv_head;
    return TileOf(params, plan.active_tiles + of_heads / params.num_kv_heads,
                  of_heads % params.num_kv_heads, index % per_kv_head, tokens);
  }
  int item = work, cuts_log2 = 0, piece = 0;
  const int place = work - plan.begin[0];
  if (place >= 0) {
    int rest = place;
    item = plan.begin[0];
#pragma unroll 1
    for (cuts_log2 = 1; cuts_log2 <= kCutClasses; ++cuts_log2) {
      const int items = plan.begin[cuts_log2] - item;
      if (rest < items << cuts_log2) break;
      rest -= items << cuts_log2;
      item += items;
    }
    if (cuts_log2 > kCutClasses) cuts_log2 = 0;
    item += rest >> cuts_log2;
    piece = rest & ((1 << cuts_log2) - 1);
  }
  WorkTile tile = DecodeWork(params, item, plan.active_tiles, tokens);
  if (cuts_log2 > 0) tile.note.Cut(piece, 1 << cuts_log2, place - piece);
  return tile;
}

// Deals tiles out. The walker, blocks ahead of those who compute, asks for the next when it has
// walked this one: what is asked for earlier waits for this one while others have nothing to do.
template <bool kSplits>
struct TileScheduler {
  int work = blockIdx.x;

  __device__ __forceinline__ bool HasWork(const KernelParams& params) const {
    return work < (IsPlanned(params) ? params.split.plan->num_work : params.num_work);
  }

  __device__ __forceinline__ WorkTile Tile(const KernelParams& params, int tokens) const {
    return IsPlanned(params) ? DecodePlanned(params, work, tokens)
                             : DecodeWork(params, work, params.by_query.num_tiles, tokens);
  }

  __device__ __forceinline__ void Advance(const KernelParams& params) {
    // Without a counter, in turn and back: of tiles in falling order all get about the same.
    const int block = blockIdx.x, blocks = gridDim.x, round = work / blocks + 1;
    int next = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
    if (params.counter != nullptr && threadIdx.x % 32 == 0)
      next = atomicAdd(params.counter, 1) + gridDim.x;
    work = __shfl_sync(0xFFFFFFFF, next, 0);
  }

  // Nothing is left to do in the section of `work`: whoever asks next goes on behind it. A plan has
  // none of this.
  __device__ __forceinline__ void LeaveSection(const KernelParams& params) const {
    if (IsPlanned(params)) return;
    const int section_work = SectionWork(params, params.by_query.num_tiles);
    const int end = (work / section_work + 1) * section_work;
    if (params.counter != nullptr && threadIdx.x % 32 == 0)
      atomicMax(params.counter, end - static_cast<int>(gridDim.x));
  }

 private:
  static __device__ __forceinline__ bool IsPlanned(const KernelParams& params) {
    return kSplits && params.split.plan != nullptr;
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_
