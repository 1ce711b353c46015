// The warpgroup of the backward for wide heads that has dK. It makes the gradients of the logits
// from the probabilities of the warpgroup that has dV, and half of the columns of dQ.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_KEYS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_KEYS_H_

#include "xla_ffi/kernels/sm90/backward_paired.h"

namespace magi_jax::sm90 {

template <typename Traits>
struct KeyConsumer : PairedConsumer<Traits> {
  using Base = PairedConsumer<Traits>;
  MAGI_PAIRED_CONSUMER(Base);
  static constexpr int kOutputs = Traits::kHeadDim / 2;

  float dk[kOutputs];

  __device__ __forceinline__ KeyConsumer(const BackwardKernelParams& params,
                                         BackwardStorage<Traits>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void Work() {
    while (true) {
      AwaitBlock();
      if (flags & kEndOfWork) break;
      if (flags & kEmptyTile) {
        Base::template WriteZeros<Traits::kHeadDim>(dk, params.dk);
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
    for (int i = 0; i < kOutputs; ++i) dk[i] = 0.0f;
    PinRegisters(dk);
    uint32_t ds[kLogits / 2];
    FirstBlock(ds);
    while (!(flags & kLastBlock)) NextBlock(ds);
    LastBlock(ds);
    block_parity ^= 1;
    Release(&shared.kv_empty);
    const float factor = Traits::kScaledDifference ? 1.0f : params.scale;
    Base::template WriteSums<Traits::kHeadDim>(dk, params.dk, params.dk_sum, factor, kv_head,
                                               key_start);
  }

  __device__ __forceinline__ void FirstBlock(uint32_t (&ds)[kLogits / 2]) {
    float dp[kLogits];
    IssueLogitGradients(dp);
    WgmmaWait<0, 1>();
    PinRegisters(dp);
    MakeGradients(dp, block_parity);
    PackProbabilities<Element>(dp, ds);
    ShareLogitGradients(ds, block_parity);
  }

  // dQ and dK of the current block, dS of the next.
  __device__ __forceinline__ void NextBlock(uint32_t (&ds)[kLogits / 2]) {
    float dp[kLogits], first[kFirstCount], rest[kRestCount];
    const int slot = ring.slot;
    Base::template IssuePart<false>(first);
    IssueAccumulate(dk, ds, SharedAddress(shared.q[slot]));
    ring.Advance();
    AwaitBlock();
    WgmmaWait<1, 3>();
    Base::template StorePart<false>(first);
    WgmmaWait<0, 4>();
    PinRegisters(dk);
    PinRegisters(ds);
    Release(&shared.q_empty[slot]);
    IssueLogitGradients(dp);
    Base::template IssuePart<true>(rest);
    WgmmaWait<1, 5>();
    PinRegisters(dp);
    MakeGradients(dp, block_parity ^ 1);
    WgmmaWait<0, 6>();
    Base::template StorePart<true>(rest);
    PackProbabilities<Element>(dp, ds);
    block_parity ^= 1;
    ShareLogitGradients(ds, block_parity);
  }

  __device__ __forceinline__ void LastBlock(uint32_t (&ds)[kLogits / 2]) {
    float first[kFirstCount], rest[kRestCount];
    Base::template IssuePart<false>(first);
    IssueAccumulate(dk, ds, SharedAddress(shared.q[ring.slot]));
    Base::template IssuePart<true>(rest);
    WgmmaWait<2, 7>();
    Base::template StorePart<false>(first);
    WgmmaWait<0, 8>();
    PinRegisters(dk);
    PinRegisters(ds);
    Base::template StorePart<true>(rest);
    Release(&shared.q_empty[ring.slot]);
    ring.Advance();
  }

  __device__ __forceinline__ void IssueLogitGradients(float (&dp)[kLogits]) {
    BarrierWait(&shared.dout_full[dout_ring.slot], dout_ring.parity);
    WgmmaFence();
    Base::template IssueTransposed<Traits::kVHeadDim>(dp, SharedAddress(shared.v),
                                                      SharedAddress(shared.dout[dout_ring.slot]));
  }

  // From dP to dS, with the probabilities of the other warpgroup.
  __device__ __forceinline__ void MakeGradients(float (&dp)[kLogits], uint32_t parity) {
    if (__builtin_expect(flags & kSuspectBlock, false)) CleanQueries();
    NotePending(parity);
    BarrierWait(&shared.pair.full, p_parity);
    p_parity ^= 1;
    TimesProbabilities<0>(dp);
    TimesProbabilities<1>(dp);
    Release(&shared.pair.empty);
    Release(&shared.dout_empty[dout_ring.slot]);
    dout_ring.Advance();
  }

  // Half of dS.
  template <int kHalf>
  __device__ __forceinline__ void TimesProbabilities(float (&dp)[kLogits]) {
    const float2* const delta = reinterpret_cast<const float2*>(shared.delta[dout_ring.slot]);
    const float2* const lse = reinterpret_cast<const float2*>(shared.lse[ring.slot]);
    const bool hides = flags & kMaskedBlock;
#pragma unroll
    for (int i = kHalf * kLogits / 2; i < (kHalf + 1) * kLogits / 2; i += 4) {
      const float4 words = shared.pair.probabilities[i / 4][thread % 128];
      const float p[4] = {words.x, words.y, words.z, words.w};
      const float2 mean = delta[i + thread % 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float minus = j % 2 ? -mean.y : -mean.x;
        dp[i + j] = p[j] * (Traits::kScaledDifference ? fmaf(dp[i + j], params.scale, minus)
                                                      : dp[i + j] + minus);
        // What is not finite must not come from cells that are hidden.
        if (hides && p[j] == 0.0f) dp[i + j] = 0.0f;
      }
      if constexpr (Traits::kSoftCap) {
        const float2 reference = lse[i + thread % 4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          dp[i + j] *= Base::CapFactor(p[j], j % 2 ? reference.y : reference.x);
      }
    }
  }

  // Hands dS to both warpgroups. Nobody reads this slot any more: its last readers made dQ of two
  // blocks ago, and were done before the probabilities of this block were.
  __device__ __forceinline__ void ShareLogitGradients(uint32_t (&ds)[kLogits / 2], int slot) {
    StoreLogitGradients(ds, shared.ds[slot][0]);
    FenceAsyncProxy();
    NamedBarrierSync(kKeysBarrier, 128);
    NamedBarrierArrive(kGradientBarrier, kThreads);
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_KEYS_H_
