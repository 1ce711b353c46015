// The consumers of head dims 96 and 128, of all masks but short documents: the products of a block
// of 80 queries (64 in short calls) one after another, while all else stands beside those that
// leave shared memory room.
//
//   S^T  = K Q^T, dP^T = V dO^T   both operands in shared memory: they leave nothing to others
//   dV  += P^T dO, dK += dS^T Q   P^T and dS^T from registers; dS is shared beside dV
//   dQ^T = K^T dS^T               64 columns each; stored beside dK

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LONG_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LONG_H_

#include "xla_ffi/kernels/sm90/backward_mainloop.h"

namespace magi_jax::sm90 {

template <typename Traits>
struct LongConsumer : GradientConsumer<Traits> {
  using Base = GradientConsumer<Traits>;
  MAGI_BLOCK_CONSUMER(Base);
  using Base::dk;
  using Base::dv;
  using Base::kGradients;

  int next_flags;  // of the note after the block

  __device__ __forceinline__ LongConsumer(const BackwardKernelParams& params,
                                          BackwardStorage<Traits>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void Work() {
    ReadNextFlags();
    while (true) {
      flags = next_flags;
      if (flags & kEndOfWork) break;
      if (flags & kEmptyTile) {
        Base::WriteZeros();
        ReadNextFlags();
      } else {
        WalkTile();
      }
    }
    Base::EndGradients();
  }

 private:
  // By a reduction, as the compiler has to know that all threads go the same way: else addresses of
  // operands, which depend on how often it went, are kept in registers of threads.
  __device__ __forceinline__ void ReadNextFlags() {
    BarrierWait(&shared.q_full[ring.slot], ring.parity);
    next_flags = __reduce_or_sync(0xFFFFFFFF, shared.notes[ring.slot].header.flags);
  }

  __device__ __forceinline__ void WalkTile() {
    const typename Base::KeyTile tile = Base::OpenTile();
    while (!(flags & kLastBlock)) {
      const int slot = WalkBlock();
      Release(&shared.q_empty[slot]);
      flags = next_flags;
    }
    const int slot = WalkBlock();
    const int head = shared.notes[slot].header.head;
    Release(&shared.q_empty[slot]);
    Base::CloseTile(tile, head);
  }

  // Returns where its queries lie.
  __device__ __forceinline__ int WalkBlock() {
    float s[kLogits], dp[kLogits];
    MakeLogitGradients(s, dp);
    uint32_t p[kLogits / 2], ds[kLogits / 2];
    PackProbabilities<Element>(s, p);
    PackProbabilities<Element>(dp, ds);
    // Nobody reads this slot any more: its last readers, two blocks ago, were waited for before the
    // barrier of the last block.
    StoreLogitGradients(ds, shared.ds[dout_ring.slot][warpgroup]);
    WgmmaFence();
    IssueAccumulate(dv, p, SharedAddress(shared.dout[dout_ring.slot]));
    FenceAsyncProxy();
    NamedBarrierSync(kGradientBarrier, Traits::kConsumerThreads);
    Base::NoteQueryGradient(ring.slot, dout_ring.slot);
    // No registers are left for dQ while an operand of dV is alive.
    WgmmaWait<0, 6>();
    PinRegisters(dv);
    PinRegisters(p);
    float dq[kGradients];
    BlockConsumer<Traits>::IssueQueryGradient(dq, SharedAddress(shared.ds[dout_ring.slot]),
                                              SharedAddress(shared.k) + warpgroup * kKChunkBytes);
    IssueAccumulate(dk, ds, SharedAddress(shared.q[ring.slot]));
    Release(&shared.dout_empty[dout_ring.slot]);
    dout_ring.Advance();
    WgmmaWait<1, 8>();
    Base::StoreQueryGradient(dq, ring.slot, flags);
    const int slot = ring.slot;
    ring.Advance();
    ReadNextFlags();
    WgmmaWait<0, 7>();
    PinRegisters(dk);
    PinRegisters(ds);
    return slot;
  }

  // P in s, dS in dp. Statistics are read before the products begin, beside which a load takes as
  // long as they do; of 80 queries those of half, as registers are few.
  __device__ __forceinline__ void MakeLogitGradients(float (&s)[kLogits], float (&dp)[kLogits]) {
    float2 lse[kLogits / 8], more_lse[kLogits / 8];
    LoadStats<0>(lse, shared.lse[ring.slot]);
    if constexpr (!Traits::kTransposed) LoadStats<1>(more_lse, shared.lse[ring.slot]);
    BarrierWait(&shared.dout_full[dout_ring.slot], dout_ring.parity);
    WgmmaFence();
    const uint32_t first_row = warpgroup * 64 * Traits::kRowBytes;
    IssueTransposed<Traits::kHeadDim>(s, SharedAddress(shared.k) + first_row,
                                      SharedAddress(shared.q[ring.slot]));
    IssueTransposed<Traits::kHeadDim>(dp, SharedAddress(shared.v) + first_row,
                                      SharedAddress(shared.dout[dout_ring.slot]));
    RowMask<kLogits / 2> rows[2];
    FindVisible(rows);
    WgmmaWait<1, 2>();
    PinRegisters(s);
    ToProbabilities<0>(s, lse, rows);
    if constexpr (Traits::kTransposed) LoadStats<1>(more_lse, shared.lse[ring.slot]);
    ToProbabilities<1>(s, more_lse, rows);
    float2 delta[kLogits / 8];
    LoadStats<0>(delta, shared.delta[dout_ring.slot]);
    WgmmaWait<0, 5>();
    PinRegisters(dp);
    if (__builtin_expect(flags & kSuspectBlock, false)) {
      Base::CleanQueries(s, dp);
      Hide(s, rows);
    }
    ToLogitGradients(s, delta, rows, dp);
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LONG_H_
