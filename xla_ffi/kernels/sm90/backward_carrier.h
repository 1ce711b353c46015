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

// One warp for each consumer: brings what tiles before gave to a block's dQ, and takes away what
// the consumer makes of it, so that consumers, whose fences wait for all that they write, never
// write to global memory. A block's sums are brought before the block before it is taken, if they
// are there by then.
template <typename Traits>
struct GradientCarrier {
  const BackwardKernelParams& params;
  const CUtensorMap& dq_map;
  BackwardStorage<Traits>& shared;
  const int consumer;
  const int lane = threadIdx.x % 32;
  StageRing<Traits::kStages> ring;
  uint32_t taken = 0;  // blocks

  __device__ __forceinline__ GradientCarrier(const BackwardKernelParams& params,
                                             const CUtensorMap& dq_map,
                                             BackwardStorage<Traits>& shared, int consumer)
      : params(params), dq_map(dq_map), shared(shared), consumer(consumer) {}

  __device__ void Work() {
    bool waits = false;  // a block has still to be taken
    HeaderInLanes before;
    while (true) {
      BarrierWait(&shared.q_full[ring.slot], ring.parity);
      const HeaderInLanes next{shared.notes[ring.slot].header};
      __syncwarp();
      if (kEveryLaneArrives || lane == 0) BarrierArrive(&shared.q_empty[ring.slot]);
      ring.Advance();
      const int flags = Flags(next);
      if (flags & kEmptyTile) continue;
      if (flags & kEndOfWork) break;
      if (flags & kBeganBefore) {
        const int64_t place = PlaceOf(next);
        const int flag = next.template At<offsetof(QueryBlockHeader, flag_before)>();
        if (!IsThere(place, flag)) {
          // What this waits for may wait for what is still to be taken here.
          if (waits) Take(before);
          waits = false;
          while (!IsThere(place, flag)) {
          }
        }
        if (lane == 0) Bring(place, taken + waits);
      }
      if (waits) Take(before);
      before = next;
      waits = true;
    }
    if (waits) Take(before);
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
  __device__ __forceinline__ int Barrier(uint32_t block) const {
    return block % 2 * Traits::kConsumers + consumer;
  }
  __device__ __forceinline__ uint8_t* Place(uint32_t block) const {
    return shared.dq[consumer] + block % 2 * Traits::kGradientBytes;
  }

  __device__ __forceinline__ bool IsThere(int64_t place, int flag) const {
    return __any_sync(0xFFFFFFFF, lane == 0 && AcquireWord(params.sum_flags + place) >= flag);
  }

  // One lane, the same that has seen the flag.
  __device__ __forceinline__ void Bring(int64_t place, uint32_t block) {
    FenceAsyncProxyEverywhere();
    uint64_t* const barrier = &shared.sums_full[Barrier(block)];
    BarrierArriveExpect(barrier, Traits::kGradientBytes);
    CopyBytes(Place(block), params.query_sums + place * Traits::kGradientBytes,
              Traits::kGradientBytes, barrier);
  }

  __device__ __forceinline__ void Take(const HeaderInLanes& block) {
    uint8_t* const place = Place(taken);
    const bool ends_later = Flags(block) & kEndsLater;
    const int64_t at = PlaceOf(block);
    BarrierWait(&shared.dq_full[Barrier(taken)], taken >> 1 & 1);
    if (ends_later) {
      if (lane == 0)
        TakeBytes(params.query_sums + at * Traits::kGradientBytes, place, Traits::kGradientBytes);
    } else {
      TakeRows(block, place);
    }
    CommitBoxes();
    WaitBoxesRead();
    __syncwarp();
    if (lane == 0) BarrierArrive(&shared.dq_empty[Barrier(taken)]);
    ++taken;
    if (!ends_later) return;
    const int flag = block.template At<offsetof(QueryBlockHeader, flag_after)>();
    if (lane == 0) {
      WaitBoxes();
      FenceAsyncProxyEverywhere();
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
