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

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_poison.h"
#include "xla_ffi/kernels/sm90/backward_producer.h"
#include "xla_ffi/kernels/sm90/backward_store.h"
#include "xla_ffi/kernels/sm90/mask.h"
#include "xla_ffi/kernels/sm90/softmax.h"
#include "xla_ffi/kernels/sm90/wgmma.h"

namespace magi_jax::sm90 {

// Named barriers of the two consumers; 0 is __syncthreads.
constexpr int kGradientBarrier = 1;  // dS is in shared memory
constexpr int kVoteBarrier = 2;
constexpr int kTurnBarrier = 3;  // and 4: of one warpgroup

constexpr int kSpoiledKeys = 1, kSpoiledValues = 2;

template <typename Traits>
struct GradientConsumer {
  using Element = typename Traits::Element;
  static constexpr int kM = Traits::kBlockM;
  static constexpr int kLogits = kM / 2;  // accumulators of a thread
  static constexpr int kGradients = Traits::kGradientColumns / 2;
  static constexpr int kOutputs = Traits::kHeadDim / 2;
  static constexpr int kQChunkBytes = kM * Traits::kRowBytes;
  static constexpr int kKChunkBytes = Traits::kBlockN * Traits::kRowBytes;

  const BackwardKernelParams& params;
  BackwardStorage<Traits>& shared;
  const int thread;      // of the thread block
  const int warpgroup;   // 0 or 1
  const int thread_row;  // this thread's first key in the tile
  const float scale_log2;

  StageRing<Traits::kStages> ring;           // of the block whose logits were started last
  StageRing<Traits::kDoutStages> dout_ring;  // of the block whose dP is made
  uint32_t kv_parity = 0;
  int flags;    // of the block whose logits were started last
  int spoiled;  // of kSpoiledKeys, kSpoiledValues: some of the tile are not finite

  float dk[kOutputs], dv[kOutputs];

  __device__ __forceinline__ GradientConsumer(const BackwardKernelParams& params,
                                              BackwardStorage<Traits>& shared)
      : params(params),
        shared(shared),
        thread(ThreadIndex()),
        warpgroup(__shfl_sync(0xFFFFFFFF, thread / 128 - 1, 0)),
        thread_row(64 * warpgroup + thread % 128 / 32 * 16 + thread % 32 / 4),
        scale_log2(params.scale * kLog2e) {}

  __device__ __forceinline__ void Work() {
    while (true) {
      BarrierWait(&shared.q_full[ring.slot], ring.parity);
      flags = shared.notes[ring.slot].header.flags;
      if (flags & kEndOfWork) break;
      if (flags & kEmptyTile) {
        WriteZeros();
      } else {
        WalkTile();
      }
    }
    BarrierWait(&shared.dq_empty[warpgroup], dout_ring.slot ^ 1);
    if (thread % 128 == 0) shared.gradient_notes[warpgroup].row = -1;
    Release(&shared.dq_full[warpgroup]);
  }

 private:
  __device__ __forceinline__ void WalkTile() {
    const int kv_head = shared.notes[ring.slot].header.kv_head;
    const int key_start = shared.notes[ring.slot].header.key_start;
    BarrierWait(&shared.kv_full, kv_parity);
    kv_parity ^= 1;
    CleanKeys();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) dk[i] = dv[i] = 0.0f;
    PinRegisters(dk);
    PinRegisters(dv);

    uint32_t ds[kLogits / 2];
    FirstBlock(ds);
    // No product is in flight from one iteration to the next: the assembler would give up all
    // overlap.
    while (!(flags & kLastBlock)) NextBlock(ds);
    const int head = LastBlock(ds);
    Release(&shared.kv_empty);
    const KeyGradientStore<Traits> store{params, kv_head, key_start + thread_row};
    const float factor = Traits::kScaledDifference ? 1.0f : params.scale;
    if (flags & kSplitTile) {
      const KeyTurn turn{params, warpgroup, kv_head, key_start / Traits::kBlockN, head};
      if (Traits::kOrdered) turn.Await(kTurnBarrier + warpgroup, thread % 128);
      store.Add(params.dv_sum, dv, 1.0f);
      store.Add(params.dk_sum, dk, factor);
      if (Traits::kOrdered) turn.Pass(kTurnBarrier + warpgroup, thread % 128);
    } else {
      store.Write(params.dv, dv, 1.0f);
      store.Write(params.dk, dk, factor);
    }
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
    const int slot = ring.slot;
    ShareLogitGradients(ds);
    IssueQueryGradient(dq);
    ring.Advance();
    BarrierWait(&shared.q_full[ring.slot], ring.parity);
    flags = shared.notes[ring.slot].header.flags;
    IssueLogits(s);
    IssueAccumulate(dk, ds, SharedAddress(shared.q[slot]));
    RowMask<kLogits / 2> rows[2];
    FindVisible(rows);
    WgmmaWait<2, 1>();
    StoreQueryGradient(dq, slot);
    float2 lse[kLogits / 8];
    LoadStats<0>(lse, shared.lse[ring.slot]);
    IssueLogitGradients(dp);
    WgmmaWait<2, 2>();
    PinRegisters(s);
    ToProbabilities<0>(s, lse, rows);
    LoadStats<1>(lse, shared.lse[ring.slot]);
    ToProbabilities<1>(s, lse, rows);
    WgmmaWait<1, 7>();
    PinRegisters(dk);
    PinRegisters(ds);
    Release(&shared.q_empty[slot]);
    ToGradients(s, dp, rows, ds);
  }

  // dQ and dK of the last block; returns its head.
  __device__ __forceinline__ int LastBlock(uint32_t (&ds)[kLogits / 2]) {
    float dq[kGradients];
    ShareLogitGradients(ds);
    IssueQueryGradient(dq);
    IssueAccumulate(dk, ds, SharedAddress(shared.q[ring.slot]));
    WgmmaWait<1, 3>();
    StoreQueryGradient(dq, ring.slot);
    WgmmaWait<0, 3>();
    PinRegisters(dk);
    PinRegisters(ds);
    const int head = shared.notes[ring.slot].header.head;
    Release(&shared.q_empty[ring.slot]);
    ring.Advance();
    return head;
  }

  // Half of a thread's logits, as statistics of both halves would take too many registers.
  template <int kHalf>
  __device__ __forceinline__ void ToProbabilities(float (&s)[kLogits],
                                                  const float2 (&lse)[kLogits / 8],
                                                  const RowMask<kLogits / 2> (&rows)[2]) {
    if constexpr (kHalf == 0) {
      if (__builtin_expect(spoiled & kSpoiledKeys, false)) SpoilRows(s);
      if constexpr (Traits::kSoftCap) TransformLogits(s, params.transform_scale, params.cap_log2);
    }
#pragma unroll
    for (int i = kHalf * kLogits / 2; i < (kHalf + 1) * kLogits / 2; i += 4) {
      const float2 reference = lse[i / 4 - kHalf * kLogits / 8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float minus = j % 2 ? -reference.y : -reference.x;
        s[i + j] = Exp2(Traits::kSoftCap ? s[i + j] + minus : fmaf(s[i + j], scale_log2, minus));
      }
    }
    if (kHalf == 1 && flags & kMaskedBlock) Hide(s, rows);
  }

  // From probabilities, and dP in flight, to dS. dV runs meanwhile, and gives its operand's
  // registers to dS.
  __device__ __forceinline__ void ToGradients(float (&s)[kLogits], float (&dp)[kLogits],
                                              const RowMask<kLogits / 2> (&rows)[2],
                                              uint32_t (&ds)[kLogits / 2]) {
    if (__builtin_expect(flags & kSuspectBlock, false)) {
      WgmmaWait<0, 4>();
      PinRegisters(dp);
      CleanQueries(s, dp);
      Hide(s, rows);
    }
    uint32_t p[kLogits / 2];
    PackProbabilities<Element>(s, p);
    float2 delta[kLogits / 8];
    LoadStats<0>(delta, shared.delta[dout_ring.slot]);
    WgmmaFence();
    IssueAccumulate(dv, p, SharedAddress(shared.dout[dout_ring.slot]));

    WgmmaWait<1, 5>();
    PinRegisters(dp);
    TimesDifference<0>(s, delta, dp);
    LoadStats<1>(delta, shared.delta[dout_ring.slot]);
    TimesDifference<1>(s, delta, dp);
    if constexpr (Traits::kSoftCap) ScaleByCap(s, dp);
    // Else dS of a hidden cell is 0 because its probability is.
    if (__builtin_expect(
            flags & kSuspectBlock || (flags & kMaskedBlock && spoiled & kSpoiledValues), false))
      Hide(dp, rows);
    PinRegisters(dp);
    WgmmaWait<0, 5>();
    PinRegisters(dv);
    PinRegisters(p);
    Release(&shared.dout_empty[dout_ring.slot]);
    dout_ring.Advance();
    PackProbabilities<Element>(dp, ds);
  }

  // Half of dp = p (dp - delta), times scale where kScaledDifference.
  template <int kHalf>
  __device__ __forceinline__ void TimesDifference(const float (&p)[kLogits],
                                                  const float2 (&delta)[kLogits / 8],
                                                  float (&dp)[kLogits]) const {
#pragma unroll
    for (int i = kHalf * kLogits / 2; i < (kHalf + 1) * kLogits / 2; i += 4) {
      const float2 mean = delta[i / 4 - kHalf * kLogits / 8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float minus = j % 2 ? -mean.y : -mean.x;
        dp[i + j] = p[i + j] * (Traits::kScaledDifference ? fmaf(dp[i + j], params.scale, minus)
                                                          : dp[i + j] + minus);
      }
    }
  }

  // dS of capped logits c tanh(x / c) is that times 1 - tanh^2, with the tanh that the probability
  // tells, so that no register keeps it.
  __device__ __forceinline__ void ScaleByCap(const float (&p)[kLogits], float (&ds)[kLogits]) {
    const float2* lse = reinterpret_cast<const float2*>(shared.lse[ring.slot]) + thread % 4;
    const float inverse = 1.0f / params.cap_log2;
#pragma unroll
    for (int i = 0; i < kLogits; i += 4) {
      const float2 reference = lse[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float logit = Log2(p[i + j]) + (j % 2 ? reference.y : reference.x);
        // Clamped: a probability of 0 has no logarithm, and its dS is 0 whatever the factor.
        const float tanh = fminf(fmaxf(logit * inverse, -1.0f), 1.0f);
        ds[i + j] *= fmaf(-tanh, tanh, 1.0f);
      }
    }
  }

  // Hands dS to both warpgroups.
  __device__ __forceinline__ void ShareLogitGradients(uint32_t (&ds)[kLogits / 2]) {
    StoreLogitGradients(ds);
    FenceAsyncProxy();
    NamedBarrierSync(kGradientBarrier, Traits::kConsumerThreads);
  }

  // --- products; each function commits its own group ---

  __device__ __forceinline__ void IssueLogits(float (&s)[kLogits]) {
    WgmmaFence();
    IssueTransposed(s, SharedAddress(shared.k), SharedAddress(shared.q[ring.slot]));
  }

  __device__ __forceinline__ void IssueLogitGradients(float (&dp)[kLogits]) {
    BarrierWait(&shared.dout_full[dout_ring.slot], dout_ring.parity);
    WgmmaFence();
    IssueTransposed(dp, SharedAddress(shared.v), SharedAddress(shared.dout[dout_ring.slot]));
  }

  // This warpgroup's 64 rows of `left` [kBlockN, kHeadDim] times `right` [kBlockM, kHeadDim],
  // transposed.
  __device__ __forceinline__ void IssueTransposed(float (&result)[kLogits], uint32_t left,
                                                  uint32_t right) {
    const Operand left_operand = Opaque(OperandOfRows(left + warpgroup * 64 * Traits::kRowBytes));
    const Operand right_operand = Opaque(OperandOfRows(right));
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const int chunk = step / 4, column_bytes = step % 4 * 32;
      Wgmma<kM>::template SharedShared<false>(
          result, left_operand.Advance(chunk * kKChunkBytes + column_bytes),
          right_operand.Advance(chunk * kQChunkBytes + column_bytes), step > 0, Element{});
    }
    WgmmaCommit();
  }

  // sum += left [64 keys, kBlockM] rows [kBlockM, kHeadDim].
  __device__ __forceinline__ void IssueAccumulate(float (&sum)[kOutputs],
                                                  const uint32_t (&left)[kLogits / 2],
                                                  uint32_t rows) {
    const Operand operand = Opaque(OperandOfColumns(rows, kQChunkBytes));
#pragma unroll
    for (int step = 0; step < kM / 16; ++step) {
      Wgmma<Traits::kHeadDim>::RegistersShared(
          sum, left + 4 * step, operand.Advance(step * 2 * kSwizzleAtomBytes), true, Element{});
    }
    WgmmaCommit();
  }

  // dq = dS [kBlockM, kBlockN] K [kBlockN, this warpgroup's columns].
  __device__ __forceinline__ void IssueQueryGradient(float (&dq)[kGradients]) {
    WgmmaFence();
    const Operand ds_operand = Opaque(OperandOfRows(SharedAddress(shared.ds[dout_ring.slot ^ 1])));
    constexpr int kOffset =
        Traits::kGradientColumns == kChunk ? kKChunkBytes : Traits::kGradientColumns * 2;
    const Operand k_operand =
        Opaque(OperandOfColumns(SharedAddress(shared.k) + warpgroup * kOffset, kKChunkBytes));
#pragma unroll
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      const int ds_offset = step / 4 * kM * 128 + step % 4 * 32;
      Wgmma<Traits::kGradientColumns>::template SharedShared<true>(
          dq, ds_operand.Advance(ds_offset), k_operand.Advance(step * 2 * kSwizzleAtomBytes),
          step > 0, Element{});
    }
    WgmmaCommit();
  }

  // --- shared memory ---

  // The slots of dS and the phases of dQ alternate with the slots of the cotangents, whose ring
  // stands at the next block once dS of a block is made.
  static_assert(Traits::kDoutStages == 2);

  // Writes dS as rows of queries, in this warpgroup's chunk of 64 keys. Nobody reads this slot any
  // more: its last readers, two blocks ago, were waited for before the barrier of the last block.
  __device__ __forceinline__ void StoreLogitGradients(const uint32_t (&ds_words)[kLogits / 2]) {
    const int lane = thread % 32, warp = thread / 32 % 4;
    const int matrix = lane / 8, row = RowOfQuery(lane % 8);
    const int unit = 2 * warp + (matrix & 1);  // of 8 keys
    const uint32_t address = SharedAddress(shared.ds[dout_ring.slot ^ 1][warpgroup]) +
                             (8 * (matrix >> 1) + row) * 128 + ((unit ^ row) << 4);
#pragma unroll
    for (int step = 0; step < kM / 16; ++step)
      StoreMatricesTransposed(address + step * 16 * 128, ds_words + 4 * step);
  }

  __device__ __forceinline__ void StoreQueryGradient(float (&dq)[kGradients], int slot) {
    PinRegisters(dq);
    const int lane = thread % 32, warp = thread / 32 % 4;
    const int row = QueryOfRow(lane / 4);  // in its group of 8
    const uint32_t address = SharedAddress(shared.dq[warpgroup]) + (16 * warp + row) * 128 +
                             ((lane % 4 / 2 ^ row) << 4) + lane % 2 * 8;
    const float factor = Traits::kScaledDifference ? 1.0f : params.scale;
    BarrierWait(&shared.dq_empty[warpgroup], dout_ring.slot);
    if (thread % 128 == 0) {
      const QueryBlockHeader& header = shared.notes[slot].header;
      shared.gradient_notes[warpgroup].row = header.query_start;
      shared.gradient_notes[warpgroup].head = header.head;
      if constexpr (Traits::kOrdered) {
        shared.gradient_notes[warpgroup].rank = header.rank;
        shared.gradient_notes[warpgroup].next_row = header.next_query;
      }
    }
#pragma unroll
    for (int i = 0; i < kGradients; i += 4) {
      const int group = i / 4;  // of 8 columns
      const uint32_t place = (address ^ (group % 4 << 5)) + group / 4 * kM * 128;
      StorePair(place, dq[i] * factor, dq[i + 1] * factor);
      StorePair(place + 8 * 128, dq[i + 2] * factor, dq[i + 3] * factor);
    }
    FenceAsyncProxy();
    Release(&shared.dq_full[warpgroup]);
  }

  // Half of what this thread needs of the statistics of a block: those of queries
  // 8j + 2 (thread % 4) + {0, 1}.
  template <int kHalf>
  __device__ __forceinline__ void LoadStats(float2 (&values)[kLogits / 8],
                                            const float (&stats)[kM]) const {
#pragma unroll
    for (int j = 0; j < kLogits / 8; ++j)
      values[j] =
          reinterpret_cast<const float2*>(stats)[4 * (j + kHalf * kLogits / 8) + thread % 4];
  }

  // One lane of each warp speaks for it.
  __device__ __forceinline__ void Release(uint64_t* barrier) {
    __syncwarp();
    if (thread % 32 == 0) BarrierArrive(barrier);
  }

  // --- masks ---

  __device__ __forceinline__ void FindVisible(RowMask<kLogits / 2> (&rows)[2]) {
    const QueryBlockNote& note = shared.notes[ring.slot];
    const QueryBlockHeader& block = note.header;
    if (!(flags & kMaskedBlock)) return;
    const int keys[2] = {block.key_start + thread_row, block.key_start + thread_row + 8};
    const int lane_column = thread % 4 * 2;
    rows[0].Clear();
    rows[1].Clear();
    const bool inline_slices = block.num_slices >= 0;
    const int count = inline_slices ? block.num_slices : -block.num_slices;
    for (int i = 0; i < count; ++i) {
      Slice slice;
      if (inline_slices) {
        slice = note.slices[i];
      } else {
        const int id = params.by_key.ids[block.ids_begin + i];
        slice = Transposed(params.slices[min(max(id, 0), params.num_slices - 1)]);
      }
#pragma unroll
      for (int row = 0; row < 2; ++row)
        rows[row].Add(slice, keys[row], block.query_start, lane_column);
    }
  }

  static __device__ __forceinline__ void Hide(float (&values)[kLogits],
                                              const RowMask<kLogits / 2> (&rows)[2]) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      values[i] = rows[i / 2 % 2].Has(i / 4 * 2 + i % 2) ? values[i] : 0.0f;
    }
  }

  // --- what is not finite, see backward_poison.h ---

  __device__ __forceinline__ void CleanKeys() {
    const int row = (thread - 128) / 2, chunk = thread % 2;
    bool found = false, value_found = false;
    if (chunk < Traits::kChunks) {
      const int at = chunk * kKChunkBytes + row * Traits::kRowBytes;
      found = CleanRow<Element>(shared.k + at, row);
      value_found = CleanRow<Element, false>(shared.v + at, row);
    }
    found |= __shfl_xor_sync(0xFFFFFFFF, found, 1);
    if (chunk == 0) shared.spoiled_keys[row] = found;
    FenceAsyncProxy();
    spoiled = NamedBarrierOr(kVoteBarrier, Traits::kConsumerThreads, found) ? kSpoiledKeys : 0;
    if (NamedBarrierOr(kVoteBarrier, Traits::kConsumerThreads, value_found))
      spoiled |= kSpoiledValues;
  }

  __device__ __forceinline__ void SpoilRows(float (&s)[kLogits]) {
    const bool spoiled[2] = {shared.spoiled_keys[thread_row] != 0,
                             shared.spoiled_keys[thread_row + 8] != 0};
#pragma unroll
    for (int i = 0; i < kLogits; ++i) s[i] = spoiled[i / 2 % 2] ? NAN : s[i];
  }

  // Both consumers come here with the same blocks.
  __device__ __forceinline__ void CleanQueries(float (&p)[kLogits], const float (&dp)[kLogits]) {
    static_assert(Traits::kConsumerThreads >= 2 * Traits::kChunks * kM);
    NamedBarrierSync(kVoteBarrier, Traits::kConsumerThreads);  // S and dP are done
    const int row = (thread - 128) % kM, part = (thread - 128) / kM;
    uint8_t* const tile =
        part < Traits::kChunks ? shared.q[ring.slot] : shared.dout[dout_ring.slot];
    if (part < 2 * Traits::kChunks) {
      // Rolled up: its addresses would take registers from the loop of blocks.
      CleanRow<Element, true, 1>(
          tile + part % Traits::kChunks * kQChunkBytes + row * Traits::kRowBytes, row);
    }
#pragma unroll
    for (int i = 0; i < kLogits; ++i) p[i] = dp[i] - dp[i] == 0.0f ? p[i] : NAN;
    FenceAsyncProxy();
    NamedBarrierSync(kVoteBarrier, Traits::kConsumerThreads);
  }

  // The gradients of keys that no query sees.
  __device__ __forceinline__ void WriteZeros() {
    const int kv_head = shared.notes[ring.slot].header.kv_head;
    const int key_start = shared.notes[ring.slot].header.key_start;
    Release(&shared.q_empty[ring.slot]);
    ring.Advance();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) dk[i] = 0.0f;
    if (flags & kSplitTile) return;  // its sums were cleared
    const KeyGradientStore<Traits> store{params, kv_head, key_start + thread_row};
    store.Write(params.dv, dk, 1.0f);
    store.Write(params.dk, dk, 1.0f);
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_MAINLOOP_H_
