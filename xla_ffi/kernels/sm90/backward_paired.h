// The consumer warpgroups of the backward for wide heads: five products per block of 64 queries and
// 64 keys.
//
//   values                               keys
//   S^T = K Q^T                          dP^T = V dO^T
//   P   = exp2(S^T - lse)  -- shared ->  dS   = P (dP - delta)
//   dV += P^T dO                         dK  += dS^T Q
//   dQ  = dS K, half of the columns  <- shared --  dQ, the other half
//
// Each makes its columns of dQ in two parts, of which one is stored while the other is made. The
// values' warpgroup is a block ahead: it makes probabilities of a block beside dQ of the block
// before.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_H_

#include "xla_ffi/kernels/sm90/backward_block.h"

namespace magi_jax::sm90 {

constexpr int kKeysBarrier = 5;  // of the keys' warpgroup

// What both warpgroups do.
template <typename Traits>
struct PairedConsumer : BlockConsumer<Traits> {
  using Base = BlockConsumer<Traits>;
  MAGI_BLOCK_CONSUMER(Base);
  static constexpr int kThreads = Traits::kConsumerThreads;
  static constexpr int kFirstCount = Traits::kGradientColumns / 2;
  static constexpr int kRestCount = Traits::kRestColumns / 2;

  uint32_t block_parity = 0;  // of the block whose dQ is made: its slots of dS and pending notes
  uint32_t p_parity = 0;      // of the block whose probabilities are exchanged
  int head;                   // of the block whose pending note was written last

  __device__ __forceinline__ PairedConsumer(const BackwardKernelParams& params,
                                            BackwardStorage<Traits>& shared)
      : Base(params, shared) {}

  // Waits for the next block's note and queries.
  __device__ __forceinline__ void AwaitBlock() {
    BarrierWait(&shared.q_full[ring.slot], ring.parity);
    flags = shared.notes[ring.slot].header.flags;
  }

  // Notes where dQ of the block in `ring` belongs, since its note is given back before that is
  // made.
  __device__ __forceinline__ void NotePending(uint32_t parity) {
    const QueryBlockHeader& header = shared.notes[ring.slot].header;
    if constexpr (Traits::kOrdered) head = header.head;
    if (thread % 128 != 0) return;
    shared.pair.pending_notes[warpgroup][parity] = {
        header.query_start, header.head, header.rank, header.next_query, Traits::kHeadDim, 0};
  }

  // The first column of a part of this warpgroup's dQ. Parts lie in one chunk each.
  template <bool kRest>
  __device__ __forceinline__ int FirstColumn() const {
    const int last_chunk = Traits::kHeadDim - kChunk;
    if constexpr (kRest) return warpgroup == 0 ? kChunk : Traits::kHeadDim / 2;
    return warpgroup == 0 ? 0 : last_chunk;
  }

  template <bool kRest, int kCount>
  __device__ __forceinline__ void IssuePart(float (&dq)[kCount]) {
    const int column = FirstColumn<kRest>();
    Base::IssueQueryGradient(
        dq, SharedAddress(shared.ds[block_parity]),
        SharedAddress(shared.k) + column / kChunk * kKChunkBytes + column % kChunk * 2);
  }

  // Hands a part of dQ to the copy engine. Parts alternate, so the first has even phases.
  template <bool kRest, int kCount>
  __device__ __forceinline__ void StorePart(float (&dq)[kCount]) {
    PinRegisters(dq);
    const uint32_t address = PlaceOfQueryGradient();
    BarrierWait(&shared.dq_empty[warpgroup], kRest ? 0 : 1);
    if (thread % 128 == 0) {
      GradientNote note = shared.pair.pending_notes[warpgroup][block_parity];
      note.column = FirstColumn<kRest>();
      note.columns = 2 * kCount;
      if (!kRest) note.next_row = -1;
      shared.gradient_notes[0][warpgroup] = note;
    }
    PlaceQueryGradient(dq, address);
  }

  __device__ __forceinline__ void Stop() {
    BarrierWait(&shared.dq_empty[warpgroup], 1);
    if (thread % 128 == 0) shared.gradient_notes[0][warpgroup].row = -1;
    Release(&shared.dq_full[warpgroup]);
  }

  // Both warpgroups, when S and dP of a block are done.
  __device__ __forceinline__ void CleanQueries() {
    AwaitConsumers();
    const int row = (thread - 128) % kM;
    for (int part = (thread - 128) / kM; part < Traits::kChunks; part += kThreads / kM)
      CleanRow<Element, true, 1>(shared.q[ring.slot] + part * kQChunkBytes + row * 128, row);
    bool found = false;
    if (thread - 128 < kM) {
      for (int part = 0; part < Traits::kVChunks; ++part) {
        found |= CleanRow<Element, true, 1>(
            shared.dout[dout_ring.slot] + part * kQChunkBytes + row * 128, row);
      }
      shared.pair.spoiled_queries[row] = found;
    }
    FenceAsyncProxy();
    AwaitConsumers();
  }

  template <int kWidth>
  __device__ __forceinline__ void WriteSums(float (&sums)[kWidth / 2], void* gradient,
                                            float* gradient_sums, float factor, int kv_head,
                                            int key_start) {
    const KeyGradientStore<Element, kWidth> store{params, kv_head, key_start + thread_row,
                                                  params.k_len, false};
    if (flags & kSplitTile) {
      const KeyTurn turn{params, warpgroup, kv_head, key_start / Traits::kBlockN, head};
      if (Traits::kOrdered) turn.Await(kTurnBarrier + warpgroup, thread % 128);
      store.Add(gradient_sums, sums, factor);
      if (Traits::kOrdered) turn.Pass(kTurnBarrier + warpgroup, thread % 128);
    } else {
      store.Write(gradient, sums, factor);
    }
  }

  // The gradient of keys that no query sees.
  template <int kWidth>
  __device__ __forceinline__ void WriteZeros(float (&sums)[kWidth / 2], void* gradient) {
    const int kv_head = shared.notes[ring.slot].header.kv_head;
    const int key_start = shared.notes[ring.slot].header.key_start;
    Release(&shared.q_empty[ring.slot]);
    ring.Advance();
    if (flags & kSplitTile) return;  // its sums were cleared
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sums[i] = 0.0f;
    const KeyGradientStore<Element, kWidth> store{params, kv_head, key_start + thread_row,
                                                  params.k_len, false};
    store.Write(gradient, sums, 1.0f);
  }
};

// Lets a warpgroup call what it has of PairedConsumer by its name.
#define MAGI_PAIRED_CONSUMER(Base) \
  MAGI_BLOCK_CONSUMER(Base);       \
  using Base::AwaitBlock;          \
  using Base::block_parity;        \
  using Base::CleanQueries;        \
  using Base::kFirstCount;         \
  using Base::kRestCount;          \
  using Base::kThreads;            \
  using Base::NotePending;         \
  using Base::head;                \
  using Base::p_parity;            \
  using Base::Stop

// The warpgroup that has dV.
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

// The warpgroup that has dK.
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

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_H_
