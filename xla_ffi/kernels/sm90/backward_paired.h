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

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PAIRED_H_
