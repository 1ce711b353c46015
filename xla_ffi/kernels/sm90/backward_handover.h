// How a consumer warpgroup of 64 keys hands gradients to the warps that move them: dQ of a block,
// and dK and dV of tiles that are split.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_HANDOVER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_HANDOVER_H_

#include "xla_ffi/kernels/sm90/backward_block.h"
#include "xla_ffi/kernels/sm90/backward_documents.h"
#include "xla_ffi/kernels/sm90/backward_sums.h"

namespace magi_jax::sm90 {

template <typename Traits>
struct GradientHandover : BlockConsumer<Traits> {
  using Base = BlockConsumer<Traits>;
  MAGI_BLOCK_CONSUMER(Base);
  static constexpr int kGradients =
      (Traits::kTransposed ? Traits::kBlockM : Traits::kGradientColumns) / 2;
  static constexpr int kOutputs = Traits::kHeadDim / 2;

  static_assert(!Traits::kDocuments ||
                Traits::kGradientBytes == PlaceOfSums<Element, kGradients>::kBytes);

  uint32_t sum_parities = 0;  // of what earlier tiles gave to dQ, a bit for each place

  __device__ __forceinline__ GradientHandover(const BackwardKernelParams& params,
                                              BackwardStorage<Traits>& shared)
      : Base(params, shared) {}

  // The slots of dS and the phases of dQ alternate with the slots of the cotangents, whose ring
  // stands at the next block once dS of a block is made.
  static_assert(Traits::kDoutStages == 2);

  // Says what is handed over at the turn of a block.
  __device__ __forceinline__ void NoteQueryGradient(int slot, int turn) {
    if (thread % 128 != 0) return;
    const QueryBlockHeader& header = shared.notes[slot].header;
    GradientNote& note = shared.gradient_notes[turn][warpgroup];
    note.row = header.query_start;
    note.head = header.head;
    if constexpr (Traits::kCopiesSums) note.target = kToQueries;
    if constexpr (Traits::kOrdered) {
      note.rank = header.rank;
      note.next_row = header.next_query;
    }
  }

  __device__ __forceinline__ void StoreQueryGradient(float (&dq)[kGradients], int slot,
                                                     int block_flags) {
    PinRegisters(dq);
    if constexpr (Traits::kDocuments) {
      PassQueryGradient(dq, block_flags);
      return;
    }
    const uint32_t address = PlaceOfQueryGradient();
    BarrierWait(&shared.dq_empty[warpgroup], dout_ring.slot);
    if constexpr (!Traits::kLong) NoteQueryGradient(slot, 0);
    PlaceQueryGradient(dq, address);
  }

  // Which note the warp that adds reads at a turn.
  static __device__ __forceinline__ int NoteTurn(int turn) {
    return Traits::kNoteTurns > 1 ? turn & 1 : 0;
  }

  // Has the copy engine add this warpgroup's 64 keys of a split tile, in parts of 64 columns. dK
  // and dV are as many parts together as the phases of dQ's place, so that these alternate as
  // before.
  __device__ __forceinline__ void HandSumsOver(const float (&sums)[kOutputs], float factor,
                                               GradientTarget target, int kv_head, int key_start) {
    constexpr int kCount = Traits::kGradientColumns / 2, kParts = (kOutputs + kCount - 1) / kCount;
    const int lane = thread % 32, warp = thread / 32 % 4, row = lane / 4;
    const uint32_t address = SharedAddress(shared.dq[warpgroup]) + (16 * warp + row) * 128 +
                             ((lane % 4 / 2 ^ row) << 4) + lane % 2 * 8;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int turn = part + (target == kToKeys ? kParts : 0);
      BarrierWait(&shared.dq_empty[warpgroup], dout_ring.slot ^ (turn + 1 & 1));
      if (thread % 128 == 0) {
        shared.gradient_notes[NoteTurn(dout_ring.slot ^ turn)][warpgroup] = {
            key_start + 64 * warpgroup, kv_head, 0, 0, part * Traits::kGradientColumns, 0, target};
      }
#pragma unroll
      for (int i = 0; i < kCount && part * kCount + i < kOutputs; i += 4) {
        const int group = i / 4;  // of 8 columns
        const uint32_t place = (address ^ (group % 4 << 5)) + group / 4 * Traits::kSumRows * 128;
        const float* const values = sums + part * kCount + i;
        StorePair(place, values[0] * factor, values[1] * factor);
        StorePair(place + 8 * 128, values[2] * factor, values[3] * factor);
      }
      if constexpr (!Traits::kLong) FenceAsyncProxy();
      Release(&shared.dq_full[warpgroup]);
    }
  }

  // A document's: added to what earlier tiles gave, and left for the warp that carries it, rounded
  // where it is complete.
  __device__ __forceinline__ void PassQueryGradient(float (&dq)[kGradients], int block_flags) {
    // Blocks take turns in both places; the ring of cotangents stands at the next block.
    const int turn = dout_ring.slot ^ 1, barrier = turn * Traits::kConsumers + warpgroup;
    uint8_t* const place = shared.dq[warpgroup] + turn * Traits::kGradientBytes;
    const PlaceOfSums<Element, kGradients> sums{place, static_cast<int>(thread % 128)};
    BarrierWait(&shared.dq_empty[barrier], dout_ring.parity ^ dout_ring.slot);
    if (block_flags & kBeganBefore) {
      BarrierWait(&shared.sums_full[barrier], sum_parities >> turn & 1);
      sum_parities ^= 1u << turn;
      sums.AddTo(dq);
      // Rounded rows lie where others read.
      if (!(block_flags & kEndsLater)) NamedBarrierSync(kTurnBarrier + warpgroup, 128);
    }
    if (block_flags & kEndsLater) {
      sums.Keep(dq);
    } else {
      const float factor = Traits::kScaledDifference ? 1.0f : params.scale;
      const int lane = thread % 32, row = 16 * (thread / 32 % 4) + QueryOfRow(lane / 4);
      // In the 128-byte swizzle, which rows 8 apart have alike.
      const uint32_t address =
          SharedAddress(place) + row * Traits::kRowBytes + (row % 8 << 4) + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < kGradients; i += 4) {
        const uint32_t word = address ^ (i / 4 << 4);
        StoreWord(word, Pack(dq[i] * factor, dq[i + 1] * factor, Element{}));
        StoreWord(word + 8 * Traits::kRowBytes,
                  Pack(dq[i + 2] * factor, dq[i + 3] * factor, Element{}));
      }
    }
    FenceAsyncProxy();
    Release(&shared.dq_full[barrier]);
  }

  // Of the tile's own.
  __device__ __forceinline__ int EndOfKeys() const {
    return Traits::kDocuments ? shared.notes[ring.slot].header.end_key : params.k_len;
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_HANDOVER_H_
