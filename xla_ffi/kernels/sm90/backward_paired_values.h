// The warpgroup of the backward for wide heads that has dV. It makes the probabilities, a block
// ahead of the warpgroup that has dK, and half of the columns of dQ.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_VALUES_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_VALUES_H_

#include "xla_ffi/kernels/sm90/backward_paired.h"

namespace magi_jax::sm90 {

template <typename Traits>
struct ValueConsumer : PairedConsumer<Traits> {
  using Base = PairedConsumer<Traits>;
  MAGI_PAIRED_CONSUMER(Base);
  static constexpr int kOutputs = Traits::kVHeadDim / 2;

  float dv[kOutputs];

  __device__ __forceinline__ ValueConsumer(const BackwardKernelParams& params,
                                           BackwardStorage<Traits>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void Work() {
    while (true) {
      AwaitBlock();
      if (flags & kEndOfWork) break;
      if (flags & kEmptyTile) {
        Base::template WriteZeros<Traits::kVHeadDim>(dv, params.dv);
      } else {
        WalkTile();
      }
    }
    Stop();
  }

 private:
  __device__ __forceinline__ void WalkTile() {
    const int kv_head = shared.notes[ring.slot].header.kv_head;
    const int key_start = shared.notes[ring.slot].header.key_start;
    BarrierWait(&shared.kv_full, kv_parity);
    kv_parity ^= 1;
    CleanKeys();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) dv[i] = 0.0f;
    PinRegisters(dv);
    FirstBlock();
    while (!(flags & kLastBlock)) NextBlock();
    LastBlock();
    block_parity ^= 1;
    Release(&shared.kv_empty);
    Base::template WriteSums<Traits::kVHeadDim>(dv, params.dv, params.dv_sum, 1.0f, kv_head,
                                                key_start);
  }

  __device__ __forceinline__ void FirstBlock() {
    float s[kLogits];
    uint32_t p[kLogits / 2];
    IssueLogits(s);
    RowMask<kLogits / 2> rows[2];
    FindVisible(rows);
    float2 lse[kLogits / 8];
    LoadStats<0>(lse, shared.lse[ring.slot]);
    WgmmaWait<0, 1>();
    PinRegisters(s);
    MakeProbabilities(s, lse, rows, block_parity);
    PackProbabilities<Element>(s, p);
    AccumulateValues(p);
    WgmmaWait<0, 2>();
    PinRegisters(dv);
    PinRegisters(p);
    ReleaseBlock();
  }

  // dQ of the current block, dV of the next.
  __device__ __forceinline__ void NextBlock() {
    float s[kLogits], first[kFirstCount], rest[kRestCount];
    uint32_t p[kLogits / 2];
    AwaitBlock();
    IssueLogits(s);
    NamedBarrierSync(kGradientBarrier, kThreads);
    Base::template IssuePart<false>(first);
    RowMask<kLogits / 2> rows[2];
    FindVisible(rows);
    float2 lse[kLogits / 8];
    LoadStats<0>(lse, shared.lse[ring.slot]);
    WgmmaWait<1, 3>();
    PinRegisters(s);
    MakeProbabilities(s, lse, rows, block_parity ^ 1);
    PackProbabilities<Element>(s, p);
    WgmmaWait<0, 4>();
    Base::template StorePart<false>(first);
    Base::template IssuePart<true>(rest);
    AccumulateValues(p);
    WgmmaWait<1, 5>();
    Base::template StorePart<true>(rest);
    WgmmaWait<0, 6>();
    PinRegisters(dv);
    PinRegisters(p);
    ReleaseBlock();
    block_parity ^= 1;
  }

  __device__ __forceinline__ void LastBlock() {
    float first[kFirstCount], rest[kRestCount];
    NamedBarrierSync(kGradientBarrier, kThreads);
    Base::template IssuePart<false>(first);
    Base::template IssuePart<true>(rest);
    WgmmaWait<1, 7>();
    Base::template StorePart<false>(first);
    WgmmaWait<0, 8>();
    Base::template StorePart<true>(rest);
  }

  __device__ __forceinline__ void IssueLogits(float (&s)[kLogits]) {
    WgmmaFence();
    Base::template IssueTransposed<Traits::kHeadDim>(s, SharedAddress(shared.k),
                                                     SharedAddress(shared.q[ring.slot]));
  }

  // From logits to probabilities, also in shared memory. Then nobody here needs the queries.
  __device__ __forceinline__ void MakeProbabilities(float (&s)[kLogits], float2 (&lse)[kLogits / 8],
                                                    const RowMask<kLogits / 2> (&rows)[2],
                                                    uint32_t parity) {
    Base::template ToProbabilities<0>(s, lse, rows);
    LoadStats<1>(lse, shared.lse[ring.slot]);
    Base::template ToProbabilities<1>(s, lse, rows);
    if (__builtin_expect(flags & kSuspectBlock, false)) {
      BarrierWait(&shared.dout_full[dout_ring.slot], dout_ring.parity);
      CleanQueries();
      SpoilColumns(s);
      Hide(s, rows);
    }
    NotePending(parity);
    Release(&shared.q_empty[ring.slot]);
    ring.Advance();
    BarrierWait(&shared.pair.empty, p_parity ^ 1);
    p_parity ^= 1;
#pragma unroll
    for (int i = 0; i < kLogits; i += 4)
      shared.pair.probabilities[i / 4][thread % 128] =
          make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
    Release(&shared.pair.full);
  }

  // Probabilities of queries whose cotangents are not finite.
  __device__ __forceinline__ void SpoilColumns(float (&p)[kLogits]) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      if (shared.pair.spoiled_queries[i / 4 * 8 + thread % 4 * 2 + i % 2]) p[i] = NAN;
    }
  }

  __device__ __forceinline__ void AccumulateValues(const uint32_t (&p)[kLogits / 2]) {
    BarrierWait(&shared.dout_full[dout_ring.slot], dout_ring.parity);
    WgmmaFence();
    IssueAccumulate(dv, p, SharedAddress(shared.dout[dout_ring.slot]));
  }

  __device__ __forceinline__ void ReleaseBlock() {
    Release(&shared.dout_empty[dout_ring.slot]);
    dout_ring.Advance();
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_VALUES_H_
