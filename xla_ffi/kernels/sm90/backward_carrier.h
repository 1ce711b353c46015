// The warps that carry dQ of short documents from tile to tile and to where it stays; see
// backward_documents.h.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CARRIER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CARRIER_H_

#include <cstddef>
#include <cstdint>

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_ptx.h"

namespace magi_jax::sm90 {

// Where what a consumer has of a block's dQ is kept, counted in such places.
template <typename Traits>
__device__ __forceinline__ int64_t PlaceOfBlock(const BackwardKernelParams& params, int slot,
                                                int head, int consumer) {
  return (int64_t{slot} * params.num_heads + head) * Traits::kConsumers + consumer;
}

// The header of a note, a word in each lane, since the warps that carry have few registers.
struct HeaderInLanes {
  int word = 0;

  __device__ __forceinline__ HeaderInLanes() {}

  __device__ __forceinline__ explicit HeaderInLanes(const QueryBlockHeader& header) {
    const int* const words = reinterpret_cast<const int*>(&header);
    const int lane = threadIdx.x % 32;
    word = lane < static_cast<int>(sizeof(header) / sizeof(int)) ? words[lane] : 0;
  }
  template <size_t kOffset>
  __device__ __forceinline__ int At() const {
    return __shfl_sync(0xFFFFFFFF, word, kOffset / sizeof(int));
  }
};

// Walks the notes of blocks beside the consumers.
template <typename Traits>
struct NoteReader {
  BackwardStorage<Traits>& shared;
  const int lane = threadIdx.x % 32;
  StageRing<Traits::kStages> ring;

  __device__ __forceinline__ explicit NoteReader(BackwardStorage<Traits>& shared)
      : shared(shared) {}

  // The note of the next block; of none once there are no more.
  __device__ __forceinline__ bool Next(HeaderInLanes& note) {
    while (true) {
      BarrierWait(&shared.q_full[ring.slot], ring.parity);
      note = HeaderInLanes{shared.notes[ring.slot].header};
      __syncwarp();
      if (kEveryLaneArrives || lane == 0) BarrierArrive(&shared.q_empty[ring.slot]);
      ring.Advance();
      const int flags = note.template At<offsetof(QueryBlockHeader, flags)>();
      if (flags & kEmptyTile) continue;
      return !(flags & kEndOfWork);
    }
  }
};

// Of consumer `consumer`, for block `block`: blocks take turns in its places.
template <typename Traits>
__device__ __forceinline__ int BarrierOfBlock(uint32_t block, int consumer) {
  return block % 2 * Traits::kConsumers + consumer;
}

template <typename Traits>
__device__ __forceinline__ uint8_t* PlaceInShared(BackwardStorage<Traits>& shared, uint32_t block,
                                                  int consumer) {
  return shared.dq[consumer] + block % 2 * Traits::kGradientBytes;
}

// Until the place of a block is free: the block before in it has been handed over and taken. An
// mbarrier tells two phases apart by turns, so neither may be waited for two phases early, nor
// late. Not late, as this block waits for what will be brought. Not early: with its note in a slot,
// the consumers have handed over what stood in the slot before, three blocks ago, so the blocks up
// to it; and when they hand over the block two ago they have found its place free.
template <typename Traits>
__device__ __forceinline__ void AwaitPlace(BackwardStorage<Traits>& shared, int barrier,
                                           uint32_t parity) {
  static_assert(Traits::kStages <= 3);
  BarrierWait(&shared.dq_full[barrier], parity);
  BarrierWait(&shared.dq_empty[barrier], parity);
}

// One warp: brings what tiles before gave to a block's dQ as soon as it is there and its place is
// free, for one consumer after the other. Those who take dQ away do not wait for it, so what it
// waits for never waits for it. The lane that sees the flag copies.
template <typename Traits>
__device__ void BringSums(const BackwardKernelParams& params, BackwardStorage<Traits>& shared) {
  NoteReader<Traits> notes(shared);
  HeaderInLanes note;
  for (uint32_t block = 0; notes.Next(note); ++block) {
    const int flags = note.template At<offsetof(QueryBlockHeader, flags)>(),
              slot = note.template At<offsetof(QueryBlockHeader, sum_slot)>(),
              head = note.template At<offsetof(QueryBlockHeader, head)>(),
              flag = note.template At<offsetof(QueryBlockHeader, flag_before)>();
    if (!(flags & kBeganBefore)) continue;
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      const int barrier = BarrierOfBlock<Traits>(block, consumer);
      AwaitPlace(shared, barrier, block >> 1 & 1 ^ 1);
      const int64_t at = PlaceOfBlock<Traits>(params, slot, head, consumer);
      while (__any_sync(0xFFFFFFFF, notes.lane == 0 && AcquireWord(params.sum_flags + at) < flag)) {
      }
      if (notes.lane == 0) {
        FenceAsyncProxyGlobal();
        BarrierArriveExpect(&shared.sums_full[barrier], Traits::kGradientBytes);
        CopyBytes(PlaceInShared(shared, block, consumer),
                  params.query_sums + at * Traits::kGradientBytes, Traits::kGradientBytes,
                  &shared.sums_full[barrier]);
      }
      __syncwarp();
    }
  }
}

// One warp for each consumer: takes away what it makes of a block's dQ, so that consumers, whose
// fences wait for all that they write, never write to global memory.
template <typename Traits>
struct GradientTaker {
  const BackwardKernelParams& params;
  const CUtensorMap& dq_map;
  BackwardStorage<Traits>& shared;
  const int consumer;
  const int lane = threadIdx.x % 32;
  uint32_t taken = 0;  // blocks

  __device__ __forceinline__ GradientTaker(const BackwardKernelParams& params,
                                           const CUtensorMap& dq_map,
                                           BackwardStorage<Traits>& shared, int consumer)
      : params(params), dq_map(dq_map), shared(shared), consumer(consumer) {}

  __device__ void Work() {
    NoteReader<Traits> notes(shared);
    HeaderInLanes note;
    while (notes.Next(note)) Take(note);
    WaitBoxes();
  }

 private:
  static __device__ __forceinline__ int Flags(const HeaderInLanes& header) {
    return header.template At<offsetof(QueryBlockHeader, flags)>();
  }
  __device__ __forceinline__ int64_t PlaceOf(const HeaderInLanes& header) const {
    return PlaceOfBlock<Traits>(params, header.template At<offsetof(QueryBlockHeader, sum_slot)>(),
                                header.template At<offsetof(QueryBlockHeader, head)>(), consumer);
  }

  __device__ __forceinline__ void Take(const HeaderInLanes& block) {
    uint8_t* const place = PlaceInShared(shared, taken, consumer);
    const int barrier = BarrierOfBlock<Traits>(taken, consumer);
    const bool ends_later = Flags(block) & kEndsLater;
    const int64_t at = PlaceOf(block);
    BarrierWait(&shared.dq_full[barrier], taken >> 1 & 1);
    if (ends_later) {
      if (lane == 0)
        TakeBytes(params.query_sums + at * Traits::kGradientBytes, place, Traits::kGradientBytes);
    } else {
      TakeRows(block, place);
    }
    CommitBoxes();
    WaitBoxesRead();
    __syncwarp();
    if (kEveryLaneArrives || lane == 0) BarrierArrive(&shared.dq_empty[barrier]);
    ++taken;
    if (!ends_later) return;
    const int flag = block.template At<offsetof(QueryBlockHeader, flag_after)>();
    if (lane == 0) {
      WaitBoxes();
      FenceAsyncProxyGlobal();
      ReleaseWord(params.sum_flags + at, flag);
    }
    __syncwarp();
  }

  // Rounded rows to dQ: groups of eight by the copy engine, what is left of others by lanes.
  __device__ __forceinline__ void TakeRows(const HeaderInLanes& block, const uint8_t* place) {
    const int query = block.template At<offsetof(QueryBlockHeader, query_start)>(),
              head = block.template At<offsetof(QueryBlockHeader, head)>(),
              first = block.template At<offsetof(QueryBlockHeader, first_row)>() - query,
              end = block.template At<offsetof(QueryBlockHeader, end_row)>() - query;
    constexpr int kGroup = Traits::kRoundedRows;
    const int first_group = (first + kGroup - 1) / kGroup * kGroup,
              end_group = end / kGroup * kGroup;
    if (lane == 0) {
      for (int row = first_group; row < end_group; row += kGroup) {
        TakeBox(&dq_map, place + row * Traits::kRowBytes, consumer * Traits::kGradientColumns, head,
                query + row);
      }
    }
    const auto take = [&](int from, int to) {
      const int part = lane % 8;
      for (int row = from + lane / 8; row < to; row += 4) {
        const auto* words = reinterpret_cast<const uint4*>(place + row * Traits::kRowBytes);
        const int64_t at =
            (static_cast<int64_t>(query + row) * params.num_heads + head) * Traits::kHeadDim +
            consumer * Traits::kGradientColumns;
        reinterpret_cast<uint4*>(static_cast<typename Traits::Element*>(params.dq_rounded) +
                                 at)[part] = words[part ^ row % 8];
      }
    };
    take(first, min(first_group, end));
    take(max(first_group, end_group), end);
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CARRIER_H_
