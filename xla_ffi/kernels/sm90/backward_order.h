// A fixed order of sums, for callers who want equal bits from equal inputs.
//
// Tiles of keys add to dQ in the order of BackwardKernelParams::tile_order, which is also the order
// in which they are dealt out for each head. A block waits until all tiles before its own are past
// its rows. Tiles that start at later queries come first, so that under causal masks and windows a
// tile finds its predecessors ahead of it. dK and dV of a tile that is split by heads are added
// head by head.
//
// Nothing waits for an item that is dealt out later, so the first unfinished item always proceeds.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_ORDER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_ORDER_H_

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_ptx.h"

namespace magi_jax::sm90 {

__device__ __forceinline__ int NumTiles(const BackwardKernelParams& params) {
  return params.by_key.num_tiles * params.parts_per_tile;
}

// Progress of the tiles of a head, in their order; of the columns of one consumer.
__device__ __forceinline__ Progress* ProgressOfHead(const BackwardKernelParams& params,
                                                    int consumer, int head) {
  return params.progress +
         (static_cast<int64_t>(consumer) * params.num_heads + head) * NumTiles(params);
}

// Turns of a warp that adds blocks of dQ.
struct QueryTurn {
  const BackwardKernelParams& params;
  const int consumer;
  int before;  // tiles before the one that was waited for have nothing to add below this query

  // Returns when no tile before the one at `rank` has anything to add below `end_row`. Looks at the
  // nearest 32 of them first: any that knows of all its predecessors speaks for these.
  __device__ __forceinline__ void Await(int head, int rank, int end_row) {
    const Progress* const progress = ProgressOfHead(params, consumer, head);
    bool ready = false;
    while (!ready) {
      for (int nearest = rank - 1;; nearest -= 32) {
        const int at = nearest - static_cast<int>(threadIdx.x % 32);
        const Progress found = at >= 0 ? GetProgress(progress + at) : Progress{kNoQuery, kNoQuery};
        const uint32_t behind = __ballot_sync(0xFFFFFFFF, found.own < end_row);
        const uint32_t speakers = __ballot_sync(0xFFFFFFFF, found.all >= end_row);
        if (behind == 0 && speakers == 0) continue;
        const int speaker = __ffs(speakers) - 1;
        ready = speakers != 0 && (behind & ((1u << speaker) - 1)) == 0;
        before = __shfl_sync(0xFFFFFFFF, found.all, max(speaker, 0));
        break;
      }
    }
    __syncwarp();  // the lane that adds has acquired what any lane has
    FenceAsyncProxyGlobal();
  }

  // One thread, after it has handed the block to the copy engine.
  __device__ __forceinline__ void Pass(const GradientNote& note) const {
    WaitBoxes();
    FenceAsyncProxyGlobal();
    SetProgress(ProgressOfHead(params, consumer, note.head) + note.rank,
                {note.next_row, min(note.next_row, before)});
  }
};

// Turns of a warpgroup that adds the dK and dV that one head gives to a tile.
struct KeyTurn {
  const BackwardKernelParams& params;
  const int consumer, kv_head, tile, head;

  __device__ __forceinline__ int* Word() const {
    return params.turns +
           (static_cast<int64_t>(consumer) * params.num_kv_heads + kv_head) * NumTiles(params) +
           tile;
  }

  __device__ __forceinline__ int HeadInGroup() const {
    return head - kv_head * (params.num_heads / params.num_kv_heads);
  }

  __device__ __forceinline__ void Await(int barrier, int thread) const {
    if (thread == 0) {
      while (GetWord(Word()) != HeadInGroup()) {
      }
      __threadfence();
    }
    NamedBarrierSync(barrier, 128);
  }

  __device__ __forceinline__ void Pass(int barrier, int thread) const {
    NamedBarrierSync(barrier, 128);
    if (thread != 0) return;
    __threadfence();
    SetWord(Word(), HeadInGroup() + 1);
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_ORDER_H_
