// Which tile a block of the persistent grid works on next.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_

#include "xla_ffi/kernels/sm90/kernel_params.h"

namespace magi_jax::sm90 {

struct WorkTile {
  int table_tile;  // tile of the slice table whose runs apply
  int kv_head;
  TileNote note;  // of the item's first tile; may be past the last row
};

// Work items of a section of kv heads; the last may have fewer.
__device__ __forceinline__ int SectionWork(const KernelParams& params, int num_tiles) {
  return num_tiles * params.section_kv_heads * params.parts_per_group * params.parts_per_tile;
}

// An item of table tile `rank` and a kv head: `index` is that of the part of the group and of the
// table tile.
__device__ __forceinline__ WorkTile TileOf(const KernelParams& params, int rank, int kv_head,
                                           int index) {
  const int part = index / params.parts_per_tile, sub_tile = index % params.parts_per_tile;
  // A table may be hostile; its entries must not lead outside of the arrays.
  const int table_tile = min(max(params.by_query.order[rank], 0), params.by_query.num_tiles - 1);
  return {table_tile, kv_head,
          TileNote::Of(table_tile * params.table_tile_size + sub_tile * params.item_tokens,
                       (kv_head * params.parts_per_group + part) << params.pack_log2)};
}

// Work is ordered by section of kv heads, then longest tile first, then kv head, so that the keys
// of a section stay in L2 and each section ends with its shortest tiles.
__device__ __forceinline__ WorkTile DecodeWork(const KernelParams& params, int work,
                                               int num_tiles) {
  const int per_kv_head = params.parts_per_group * params.parts_per_tile;
  const int per_section = SectionWork(params, num_tiles);
  const int section = work / per_section;
  const int section_begin = section * params.section_kv_heads;
  const int section_heads = min(params.section_kv_heads, params.num_kv_heads - section_begin);
  work -= section * per_section;
  const int rank = work / (section_heads * per_kv_head);
  work -= rank * section_heads * per_kv_head;
  return TileOf(params, rank, section_begin + work / per_kv_head, work % per_kv_head);
}

// The same of a plan: items with runs, some of which are cut, and then those without.
__device__ __forceinline__ WorkTile DecodePlanned(const KernelParams& params, int work) {
  const SplitPlan& plan = *params.split.plan;
  if (work >= plan.num_dense) {
    const int per_kv_head = params.parts_per_group * params.parts_per_tile;
    const int index = work - plan.num_dense, of_heads = index / per_kv_head;
    return TileOf(params, plan.active_tiles + of_heads / params.num_kv_heads,
                  of_heads % params.num_kv_heads, index % per_kv_head);
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
  WorkTile tile = DecodeWork(params, item, plan.active_tiles);
  if (cuts_log2 > 0) tile.note.Cut(piece, 1 << cuts_log2, place - piece);
  return tile;
}

// Deals tiles out. The walker, blocks ahead of those who compute, asks for the next when it has
// walked this one: what is asked for earlier waits for this one while others have nothing to do.
template <typename Traits>
struct TileScheduler {
  static constexpr bool kSplits = Traits::kSplits;

  const KernelParams& params;
  SharedStorage<Traits>& shared;
  int work;
  uint32_t answers = 0;  // of the first walker of a pair

  __device__ __forceinline__ TileScheduler(const KernelParams& params,
                                           SharedStorage<Traits>& shared)
      : params(params), shared(shared), work(blockIdx.x / Partners<Traits>(params)) {}

  __device__ __forceinline__ bool HasWork() const {
    return work < (IsPlanned() ? params.split.plan->num_work : params.num_work);
  }

  __device__ __forceinline__ WorkTile Tile() const {
    return IsPlanned() ? DecodePlanned(params, work)
                       : DecodeWork(params, work, params.by_query.num_tiles);
  }

  __device__ __forceinline__ void Advance() {
    if (params.counter == nullptr) {
      // In turn and back: of tiles in falling order all get about the same.
      const int worker = blockIdx.x / Partners<Traits>(params), workers = NumWorkers();
      const int round = work / workers + 1;
      work = round * workers + (round % 2 == 0 ? worker : workers - 1 - worker);
    } else if (Partners<Traits>(params) == 1) {
      work = __shfl_sync(0xFFFFFFFF, Ask(), 0);
    } else {
      work = ClusterRank() == 0 ? AskForBoth() : Listen();
    }
  }

  // Nothing is left to do in the section of `work`: whoever asks next goes on behind it. A plan has
  // none of this.
  __device__ __forceinline__ void LeaveSection() const {
    if (IsPlanned()) return;
    const int section_work = SectionWork(params, params.by_query.num_tiles);
    const int end = (work / section_work + 1) * section_work;
    if (params.counter != nullptr && threadIdx.x % 32 == 0)
      atomicMax(params.counter, end - NumWorkers());
  }

 private:
  __device__ __forceinline__ int NumWorkers() const { return gridDim.x / Partners<Traits>(params); }

  // What is dealt out next, in one lane.
  __device__ __forceinline__ int Ask() const {
    return threadIdx.x % 32 == 0 ? atomicAdd(params.counter, 1) + NumWorkers() : 0;
  }

  // The first walker of a pair asks, and tells the second.
  __device__ __forceinline__ int AskForBoth() {
    const int slot = SlotOf<kAnswers>(answers), next = Ask();
    BarrierWait(&shared.answer_empty[slot], ParityOf<kAnswers>(answers) ^ 1);
    if (threadIdx.x % 32 == 0)
      ClusterStore(&shared.answers[slot], &shared.answer_full[slot], 1, next);
    ++answers;
    return __shfl_sync(0xFFFFFFFF, next, 0);
  }

  __device__ __forceinline__ int Listen() {
    const int slot = SlotOf<kAnswers>(answers);
    if (threadIdx.x % 32 == 0) BarrierArriveExpect(&shared.answer_full[slot], sizeof(int));
    BarrierWait(&shared.answer_full[slot], ParityOf<kAnswers>(answers));
    const int next = *static_cast<volatile int*>(&shared.answers[slot]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ClusterArrive(&shared.answer_empty[slot], 0);
    ++answers;
    return next;
  }

  __device__ __forceinline__ bool IsPlanned() const {
    return kSplits && params.split.plan != nullptr;
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_TILE_SCHEDULER_H_
