// Which tile a block of the persistent grid works on next.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_

#include "xla_ffi/kernels/sm90/kernel_params.h"

namespace magi_jax::sm90 {

struct WorkTile {
  int table_tile;  // tile of the slice table whose runs apply
  int token;       // first of the tile's 128 / pack tokens; may be past the last row
  int head, kv_head;
};

// Work items of a section of kv heads; the last may have fewer.
__device__ __forceinline__ int SectionWork(const KernelParams& params) {
  return params.by_query.num_tiles * params.section_kv_heads * params.parts_per_group *
         params.parts_per_tile;
}

// Work is ordered by section of kv heads, then longest tile first, then kv head, so that the keys
// of a section stay in L2 and each section ends with its shortest tiles.
__device__ __forceinline__ WorkTile DecodeWork(const KernelParams& params, int work, int tokens) {
  const int per_kv_head = params.parts_per_group * params.parts_per_tile;
  const int per_section = SectionWork(params);
  const int section = work / per_section;
  const int section_begin = section * params.section_kv_heads;
  const int section_heads = min(params.section_kv_heads, params.num_kv_heads - section_begin);
  work -= section * per_section;
  const int rank = work / (section_heads * per_kv_head);
  work -= rank * section_heads * per_kv_head;
  const int kv_head = section_begin + work / per_kv_head;
  work %= per_kv_head;
  const int part = work / params.parts_per_tile, sub_tile = work % params.parts_per_tile;
  // A table may be hostile; its entries must not lead outside of the arrays.
  const int table_tile = min(max(params.by_query.order[rank], 0), params.by_query.num_tiles - 1);
  return {table_tile, table_tile * params.table_tile_size + sub_tile * tokens,
          (kv_head * params.parts_per_group + part) << params.pack_log2, kv_head};
}

// Asks for the next tile early and reads the answer late, so that the trip to memory is hidden.
struct TileScheduler {
  int work = blockIdx.x, next;

  __device__ __forceinline__ bool HasWork(const KernelParams& params) const {
    return work < params.num_work;
  }

  __device__ __forceinline__ void Request(const KernelParams& params) {
    // Without a counter, in turn and back: of tiles in falling order all get about the same.
    const int block = blockIdx.x, blocks = gridDim.x, round = work / blocks + 1;
    next = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
    if (params.counter != nullptr && threadIdx.x % 32 == 0)
      next = atomicAdd(params.counter, 1) + gridDim.x;
  }

  // Nothing is left to do in the section of `work`: whoever asks next goes on behind it.
  __device__ __forceinline__ void LeaveSection(const KernelParams& params) const {
    const int end = (work / SectionWork(params) + 1) * SectionWork(params);
    if (params.counter != nullptr && threadIdx.x % 32 == 0)
      atomicMax(params.counter, end - static_cast<int>(gridDim.x));
  }

  __device__ __forceinline__ void Advance() { work = __shfl_sync(0xFFFFFFFF, next, 0); }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_
