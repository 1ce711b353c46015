// The consumer warpgroups of the backward: five products per block of 64 queries and 128 keys.
//
//   S^T  = K Q^T    [64 keys of the warpgroup, 64 queries], both operands in shared memory
//   dP^T = V dO^T   likewise
//   dV  += P^T dO   P^T and dS^T have the layout of a left operand in registers as they come
//   dK  += dS^T Q
//   dQ   = dS K     dS of both warpgroups through shared memory; each makes 64 of the columns
//
// where P = exp(logits - lse) and dS = P (dP - delta). dQ is stored beside the next block's S
// and dK, P is made beside dK and dP, and dS beside dV.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_MAINLOOP_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_MAINLOOP_H_

#include "xla_ffi/kernels/sm90/backward_handover.h"

namespace magi_jax::sm90 {

template <typename Traits>
struct GradientConsumer : GradientHandover<Traits> {
  using Base = GradientHandover<Traits>;
  MAGI_BLOCK_CONSUMER(Base);
  using Base::EndOfKeys;
  using Base::HandSumsOver;
  using Base::kGradients;
  using Base::kOutputs;
  using Base::StoreQueryGradient;

  float dk[kOutputs], dv[kOutputs];

  __device__ __forceinline__ GradientConsumer(const BackwardKernelParams& params,
                                              BackwardStorage<Traits>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void Work() {
    while (true) {
      BarrierWait(&shared.q_full[ring.slot], ring.parity);
      flags = FlagsOfBlock();
      if (flags & kEndOfWork) break;
      if (flags & kEmptyTile) {
        WriteZeros();
      } else {
        WalkTile();
      }
    }
    if constexpr (!Traits::kDocuments) EndGradients();
  }

 protected:
  struct KeyTile {
    int kv_head, key_start, end_key;
  };

  // Tells the warp that adds dQ that there is no more.
  __device__ __forceinline__ void EndGradients() {
    BarrierWait(&shared.dq_empty[warpgroup], dout_ring.slot ^ 1);
    if (thread % 128 == 0)
      shared.gradient_notes[Base::NoteTurn(dout_ring.slot)][warpgroup].row = -1;
    Release(&shared.dq_full[warpgroup]);
  }

  __device__ __forceinline__ KeyTile OpenTile() {
    const KeyTile tile = {shared.notes[ring.slot].header.kv_head,
                          shared.notes[ring.slot].header.key_start, EndOfKeys()};
    BarrierWait(&shared.kv_full, kv_parity);
    kv_parity ^= 1;
    CleanKeys();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) dk[i] = dv[i] = 0.0f;
    PinRegisters(dk);
    PinRegisters(dv);
    return tile;
  }

  // Writes dK and dV, or adds them; `head` is that of the last block.
  __device__ __forceinline__ void CloseTile(const KeyTile& tile, int head) {
    const auto [kv_head, key_start, end_key] = tile;
    Release(&shared.kv_empty);
    const bool by_row = Traits::kDocuments && flags & kSplitTile;
    const KeyGradientStore<Element, Traits::kHeadDim> store{params, kv_head, key_start + thread_row,
                                                            end_key, by_row};
    const float factor = Traits::kScaledDifference ? 1.0f : params.scale;
    if (flags & kSplitTile) {
      const KeyTurn turn{params, warpgroup, kv_head, key_start / Traits::kBlockN, head};
      if (Traits::kOrdered) turn.Await(kTurnBarrier + warpgroup, thread % 128);
      if constexpr (Traits::kCopiesSums) {
        HandSumsOver(dv, 1.0f, kToValues, kv_head, key_start);
        HandSumsOver(dk, factor, kToKeys, kv_head, key_start);
      } else {
        store.Add(params.dv_sum, dv, 1.0f);
        store.Add(params.dk_sum, dk, factor);
      }
      if (Traits::kOrdered) turn.Pass(kTurnBarrier + warpgroup, thread % 128);
    }
    if (Traits::kDocuments || !(flags & kSplitTile)) {
      store.Write(params.dv, dv, 1.0f);
      store.Write(params.dk, dk, factor);
    }
  }

  __device__ __forceinline__ void WalkTile() {
    const KeyTile tile = OpenTile();
    uint32_t ds[kLogits / 2];
    FirstBlock(ds);
    // No product is in flight from one iteration to the next: the assembler would give up all
    // overlap.
    while (!(flags & kLastBlock)) NextBlock(ds);
    CloseTile(tile, LastBlock(ds));
  }

  // dV, and dS, of the first block of a tile.
  __device__ __forceinline__ void FirstBlock(uint32_t (&ds)[kLogits / 2]) {
    float s[kLogits], dp[kLogits];
    IssueLogits(s);
    IssueLogitGradients(dp);
    RowMask<kLogits / 2> rows[2];
    FindVisible(rows);
    float2 lse[kLogits / 8];
    LoadStats<0>(lse, shared.lse[ring.slot]);
    WgmmaWait<1>();
    PinRegisters(s);
    ToProbabilities<0>(s, lse, rows);
    LoadStats<1>(lse, shared.lse[ring.slot]);
    ToProbabilities<1>(s, lse, rows);
    ToGradients(s, dp, rows, ds);
  }

  // dQ and dK of the current block, dV and dS of the next.
  __device__ __forceinline__ void NextBlock(uint32_t (&ds)[kLogits / 2]) {
    float dq[kGradients], s[kLogits], dp[kLogits];
    const int slot = ring.slot, block_flags = flags;
    ShareLogitGradients(ds);
    IssueQueryGradient(dq);
    // Tall blocks have no registers for dP while an operand of dK is alive, so dK comes before S.
    if constexpr (Traits::kTall) IssueAccumulate(dk, ds, SharedAddress(shared.q[slot]));
    ring.Advance();
    BarrierWait(&shared.q_full[ring.slot], ring.parity);
    flags = FlagsOfBlock();
    IssueLogits(s);
    if constexpr (!Traits::kTall) IssueAccumulate(dk, ds, SharedAddress(shared.q[slot]));
    RowMask<kLogits / 2> rows[2];
    FindVisible(rows);
    WgmmaWait<2, 1>();
    StoreQueryGradient(dq, slot, block_flags);
    if constexpr (Traits::kTall) FinishKeys(ds, slot);
    float2 lse[kLogits / 8];
    LoadStats<0>(lse, shared.lse[ring.slot]);
    IssueLogitGradients(dp);
    WgmmaWait<Traits::kTall ? 1 : 2, 2>();
    PinRegisters(s);
    ToProbabilities<0>(s, lse, rows);
    LoadStats<1>(lse, shared.lse[ring.slot]);
    ToProbabilities<1>(s, lse, rows);
    if constexpr (!Traits::kTall) FinishKeys(ds, slot);
    ToGradients(s, dp, rows, ds);
  }

  // Of documents by a vote: only then does the compiler know that branches on them are uniform, and
  // keep what the loop counts in uniform registers.
  __device__ __forceinline__ int FlagsOfBlock() const {
    const int found = shared.notes[ring.slot].header.flags;
    return Traits::kDocuments ? __reduce_or_sync(0xFFFFFFFF, found) : found;
  }

  // Waits for dK, after which only one more product was started.
  __device__ __forceinline__ void FinishKeys(uint32_t (&ds)[kLogits / 2], int slot) {
    WgmmaWait<1, 7>();
    PinRegisters(dk);
    PinRegisters(ds);
    Release(&shared.q_empty[slot]);
  }

  // dQ and dK of the last block; returns its head.
  __device__ __forceinline__ int LastBlock(uint32_t (&ds)[kLogits / 2]) {
    float dq[kGradients];
    ShareLogitGradients(ds);
    IssueQueryGradient(dq);
    IssueAccumulate(dk, ds, SharedAddress(shared.q[ring.slot]));
    WgmmaWait<1, 3>();
    StoreQueryGradient(dq, ring.slot, flags);
    WgmmaWait<0, 3>();
    PinRegisters(dk);
    PinRegisters(ds);
    const int head = shared.notes[ring.slot].header.head;
    Release(&shared.q_empty[ring.slot]);
    ring.Advance();
    return head;
  }

  // From probabilities, and dP in flight, to dS. dV runs meanwhile, and gives its operand's
  // registers to dS; where blocks are tall it starts when dS is made, as logits leave no registers
  // for it before.
  __device__ __forceinline__ void ToGradients(float (&s)[kLogits], float (&dp)[kLogits],
                                              const RowMask<kLogits / 2> (&rows)[2],
                                              uint32_t (&ds)[kLogits / 2]) {
    if (__builtin_expect(flags & kSuspectBlock, false)) {
      WgmmaWait<0, 4>();
      PinRegisters(dp);
      Base::CleanQueries(s, dp);
      Hide(s, rows);
    }
    uint32_t p[kLogits / 2];
    if constexpr (!Traits::kTall) StartValues(s, p);
    float2 delta[kLogits / 8];
    LoadStats<0>(delta, shared.delta[dout_ring.slot]);
    WgmmaWait<Traits::kTall ? 0 : 1, 5>();
    PinRegisters(dp);
    ToLogitGradients(s, delta, rows, dp);
    if constexpr (Traits::kTall) {
      StartValues(s, p);
      PackProbabilities<Element>(dp, ds);
    } else {
      PinRegisters(dp);
    }
    WgmmaWait<0, 6>();
    PinRegisters(dv);
    PinRegisters(p);
    Release(&shared.dout_empty[dout_ring.slot]);
    dout_ring.Advance();
    if constexpr (!Traits::kTall) PackProbabilities<Element>(dp, ds);
  }

  __device__ __forceinline__ void StartValues(const float (&s)[kLogits],
                                              uint32_t (&p)[kLogits / 2]) {
    PackProbabilities<Element>(s, p);
    WgmmaFence();
    IssueAccumulate(dv, p, SharedAddress(shared.dout[dout_ring.slot]));
  }

  // Hands dS to both warpgroups.
  __device__ __forceinline__ void ShareLogitGradients(uint32_t (&ds)[kLogits / 2]) {
    // Nobody reads this slot any more: its last readers, two blocks ago, were waited for before the
    // barrier of the last block.
    StoreLogitGradients(ds, shared.ds[LogitGradientSlot()][warpgroup]);
    FenceAsyncProxy();
    NamedBarrierSync(kGradientBarrier, Traits::kConsumerThreads);
  }

  // --- products; each function commits its own group ---

  __device__ __forceinline__ void IssueLogits(float (&s)[kLogits]) {
    WgmmaFence();
    const uint32_t keys = SharedAddress(shared.k) + warpgroup * 64 * Traits::kRowBytes;
    IssueTransposed<Traits::kHeadDim>(s, keys, SharedAddress(shared.q[ring.slot]));
  }

  __device__ __forceinline__ void IssueLogitGradients(float (&dp)[kLogits]) {
    BarrierWait(&shared.dout_full[dout_ring.slot], dout_ring.parity);
    WgmmaFence();
    const uint32_t values = SharedAddress(shared.v) + warpgroup * 64 * Traits::kRowBytes;
    IssueTransposed<Traits::kHeadDim>(dp, values, SharedAddress(shared.dout[dout_ring.slot]));
  }

  // This warpgroup's part of dQ: half of the queries of tall blocks, else half of the columns.
  __device__ __forceinline__ void IssueQueryGradient(float (&dq)[kGradients]) {
    const uint32_t queries = SharedAddress(shared.ds[LogitGradientSlot()]),
                   keys = SharedAddress(shared.k);
    if constexpr (Traits::kTall) {
      Base::IssueQueryGradient(dq, queries + warpgroup * Traits::kGradientRows * 128, keys);
    } else {
      Base::IssueQueryGradient(dq, queries, keys + warpgroup * kKChunkBytes);
    }
  }

  __device__ __forceinline__ int LogitGradientSlot() const { return dout_ring.slot ^ 1; }

  // The gradients of keys that no query sees.
  __device__ __forceinline__ void WriteZeros() {
    const int kv_head = shared.notes[ring.slot].header.kv_head;
    const int key_start = shared.notes[ring.slot].header.key_start;
    const int end_key = EndOfKeys();
    Release(&shared.q_empty[ring.slot]);
    ring.Advance();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) dk[i] = 0.0f;
    const bool split = flags & kSplitTile;
    if (!Traits::kDocuments && split) return;  // its sums were cleared
    const KeyGradientStore<Element, Traits::kHeadDim> store{params, kv_head, key_start + thread_row,
                                                            end_key, split};
    store.Write(params.dv, dk, 1.0f);
    store.Write(params.dk, dk, 1.0f);
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_MAINLOOP_H_
