// The warps that carry dQ of short documents from tile to tile and to where it stays; see
// backward_documents.h.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CARRIER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CARRIER_H_

#include <cstddef>
#include <cstdint>

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_ptx.h"

namespace magi_jax::sm90 {

// Where a thread block keeps what a consumer has of a block's dQ.
template <typename Traits>
__device__ __forceinline__ uint8_t* QuerySum(const BackwardKernelParams& params, int slot,
                                             int consumer) {
  const int64_t at = int64_t{blockIdx.x} * params.sum_slots + slot;
  return params.query_sums + (at * Traits::kConsumers + consumer) * Traits::kGradientBytes;
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

// One warp for each consumer: brings what earlier tiles gave to a block's dQ, and takes away what
// the consumer makes of it, so that consumers, whose fences wait for all that they write, never
// write to global memory. A block's sums are brought before the block before it is taken.
template <typename Traits>
struct GradientCarrier {
  const BackwardKernelParams& params;
  BackwardStorage<Traits>& shared;
  const int consumer;
  const int lane = threadIdx.x % 32;
  StageRing<Traits::kStages> ring;
  uint32_t taken = 0;        // blocks
  int last_slot = kNoQuery;  // to which the last of them was taken

  __device__ __forceinline__ GradientCarrier(const BackwardKernelParams& params,
                                             BackwardStorage<Traits>& shared, int consumer)
      : params(params), shared(shared), consumer(consumer) {}

  __device__ void Work() {
    bool waits = false;  // a block has still to be taken
    HeaderInLanes before;
    while (true) {
      BarrierWait(&shared.q_full[ring.slot], ring.parity);
      const HeaderInLanes next{shared.notes[ring.slot].header};
      __syncwarp();
      if (kEveryLaneArrives || lane == 0) BarrierArrive(&shared.q_empty[ring.slot]);
      ring.Advance();
      const int flags = Flags(next), slot = Slot(next);
      if (flags & kEmptyTile) continue;
      const bool ends = flags & kEndOfWork;
      if (waits && (ends || slot == Slot(before))) {
        Take(before);
        waits = false;
      }
      if (ends) break;
      if (flags & kBeganBefore && lane == 0) Bring(slot, taken + waits);
      if (waits) Take(before);
      before = next;
      waits = true;
    }
    WaitBoxes();
  }

 private:
  static __device__ __forceinline__ int Flags(const HeaderInLanes& header) {
    return header.template At<offsetof(QueryBlockHeader, flags)>();
  }
  static __device__ __forceinline__ int Slot(const HeaderInLanes& header) {
    return header.template At<offsetof(QueryBlockHeader, sum_slot)>();
  }
  __device__ __forceinline__ int Barrier(uint32_t block) const {
    return block % 2 * Traits::kConsumers + consumer;
  }
  __device__ __forceinline__ uint8_t* Place(uint32_t block) const {
    return shared.dq[consumer] + block % 2 * Traits::kGradientBytes;
  }

  // One lane, the same that takes sums.
  __device__ __forceinline__ void Bring(int slot, uint32_t block) {
    if (slot == last_slot) {
      WaitBoxes();
    } else {
      WaitBoxesButLast();
    }
    uint64_t* const barrier = &shared.sums_full[Barrier(block)];
    BarrierArriveExpect(barrier, Traits::kGradientBytes);
    CopyBytes(Place(block), QuerySum<Traits>(params, slot, consumer), Traits::kGradientBytes,
              barrier);
  }

  __device__ __forceinline__ void Take(const HeaderInLanes& block) {
    uint8_t* const place = Place(taken);
    const bool ends_later = Flags(block) & kEndsLater;
    const int slot = Slot(block);
    BarrierWait(&shared.dq_full[Barrier(taken)], taken >> 1 & 1);
    if (ends_later) {
      if (lane == 0)
        TakeBytes(QuerySum<Traits>(params, slot, consumer), place, Traits::kGradientBytes);
    } else {
      TakeRows(block, place);
    }
    last_slot = ends_later ? slot : kNoQuery;
    CommitBoxes();
    WaitBoxesRead();
    __syncwarp();
    if (lane == 0) BarrierArrive(&shared.dq_empty[Barrier(taken)]);
    ++taken;
  }

  // Rounded rows to dQ.
  __device__ __forceinline__ void TakeRows(const HeaderInLanes& block, const uint8_t* place) {
    const int query = block.template At<offsetof(QueryBlockHeader, query_start)>(),
              head = block.template At<offsetof(QueryBlockHeader, head)>(),
              first = block.template At<offsetof(QueryBlockHeader, first_row)>(),
              end = block.template At<offsetof(QueryBlockHeader, end_row)>();
    for (int row = lane; row < Traits::kGradientRows; row += 32) {
      if (query + row < first || query + row >= end) continue;
      const int64_t at =
          (static_cast<int64_t>(query + row) * params.num_heads + head) * Traits::kHeadDim +
          consumer * Traits::kGradientColumns;
      TakeBytes(static_cast<typename Traits::Element*>(params.dq_rounded) + at,
                place + row * Traits::kRoundedBytes, Traits::kGradientColumns * 2);
    }
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CARRIER_H_
