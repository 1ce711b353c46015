// The consumer warpgroups: QK, softmax and PV over one endless stream of key blocks.
//
// The stream does not stop at tile borders. While PV of block b runs, QK of block b + 1 is done and its softmax is
// under way, also when b + 1 belongs to the next tile; the outputs of a tile are written when its last PV is done,
// between the softmax of the next tile's first block and that block's PV. So a tile of a short document costs its
// blocks and little else. Two warpgroups take turns to issue their products, so that one's softmax runs beside the
// other's products.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_MAINLOOP_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_MAINLOOP_H_

#include "xla_ffi/kernels/sm90/epilogue.h"
#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/mask.h"
#include "xla_ffi/kernels/sm90/softmax.h"
#include "xla_ffi/kernels/sm90/wgmma.h"

namespace magi_jax::sm90 {

constexpr int kTurnBarrier = 1;  // and the next: named barrier of each consumer's turn; 0 is __syncthreads

template <typename Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kLogits = Traits::kBlockN / 2;  // accumulators of a thread
  static constexpr int kOutputs = Traits::kVHeadDim / 2;

  const KernelParams& params;
  SharedStorage<Traits>& shared;
  const int warpgroup;   // 0 or 1
  const int thread_row;  // this thread's first row in the tile
  const float scale_log2;

  Ring<Traits::kQStages> q_ring;
  Ring<Traits::kStages> k_ring, v_ring;
  int block_slot = 0;
  TileNote tile;
  RowStats stats;

  float o[kOutputs];
  uint32_t p[kLogits / 2];

  __device__ __forceinline__ Consumer(const KernelParams& params, SharedStorage<Traits>& shared)
      : params(params),
        shared(shared),
        warpgroup(__shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        thread_row(64 * warpgroup + (threadIdx.x % 128) / 32 * 16 + threadIdx.x % 32 / 4),
        scale_log2(params.transform ? 1.0f : params.scale * kLog2e) {}

  __device__ __forceinline__ void Work() {
    BarrierWait(&shared.k_full[k_ring.slot], k_ring.parity);
    BlockHeader block = shared.blocks[block_slot].header;
    if (block.flags & kEndOfWork) return;

    FirstStep(block);
    if (Traits::kTurns && warpgroup == 1) NamedBarrierArrive(kTurnBarrier, 256);

    while (true) {
      BarrierWait(&shared.k_full[k_ring.slot], k_ring.parity);
      const BlockHeader next = shared.blocks[block_slot].header;
      if (next.flags & kEndOfWork) break;
      if (Traits::kNarrowN > 0 && next.flags & kNarrowBlock) {
        if constexpr (Traits::kNarrowN > 0) Step<Traits::kNarrowN>(block, next);
      } else {
        Step<Traits::kBlockN>(block, next);
      }
      block = next;
    }

    BarrierWait(&shared.v_full[v_ring.slot], v_ring.parity);
    WgmmaFence();
    IssuePV(block);
    WgmmaWait<0>();
    PinRegisters(o);
    Epilogue<Traits>::Write(params, tile, thread_row, scale_log2, stats, o);
    if (Traits::kTurns && warpgroup == 0) NamedBarrierSync(kTurnBarrier, 256);  // the other's last turn
  }

 private:
  // QK and softmax of the first block of all, which has no PV beside it.
  __device__ __forceinline__ void FirstStep(const BlockHeader& block) {
    StartTile();
    float s[kLogits], rescale[2];
    WgmmaFence();
    IssueQK<Traits::kBlockN>(s);
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
    ReleaseKeys();
    SoftmaxBlock(block, s, rescale);
    PackProbabilities<Element>(s, p);
  }

  // PV of `block` beside QK and softmax of the first kN columns of `next`.
  template <int kN>
  __device__ __forceinline__ void Step(const BlockHeader& block, const BlockHeader& next) {
    const bool new_tile = next.flags & kFirstBlock;
    const TileNote finished = tile;
    const RowStats finished_stats = stats;
    if (new_tile) {
      ReleaseQueries();
      StartTile();
    }
    float s[kN / 2];
    if (Traits::kTurns) NamedBarrierSync(kTurnBarrier + warpgroup, 256);
    WgmmaFence();
    IssueQK<kN>(s);
    WgmmaCommit();
    BarrierWait(&shared.v_full[v_ring.slot], v_ring.parity);
    IssuePV(block);
    if (Traits::kTurns) NamedBarrierArrive(kTurnBarrier + (warpgroup ^ 1), 256);

    WgmmaWait<1>();
    PinRegisters(s);
    ReleaseKeys();
    float rescale[2];
    const bool moved = SoftmaxBlock(next, s, rescale);
    PinRegisters(s);
    // The assembler hoists a wait over arithmetic that it does not depend on, here all of the softmax, which would
    // undo the overlap. It stays behind a branch on the softmax's result, if both sides do not share their text.
    if (moved) {
      WgmmaWait<0, 1>();
      FinishPV();
      if (!new_tile) Rescale(o, rescale);
    } else {
      WgmmaWait<0, 2>();
      FinishPV();
    }
    if (new_tile) Epilogue<Traits>::Write(params, finished, thread_row, scale_log2, finished_stats, o);
    PackProbabilities<Element>(s, p);
  }

  __device__ __forceinline__ void StartTile() {
    BarrierWait(&shared.q_full[q_ring.slot], q_ring.parity);
    tile = shared.tiles[q_ring.slot];
    stats.Reset();
  }

  template <int kN>
  __device__ __forceinline__ void IssueQK(float (&s)[kN / 2]) {
    const uint32_t q = SharedAddress(shared.q[q_ring.slot]) + warpgroup * 64 * Traits::kRowBytes * Traits::kChunks;
    const uint64_t q_operand = DescribeRows(q), k_operand = DescribeRows(SharedAddress(shared.k[k_ring.slot]));
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const int chunk = step / 4, column_bytes = step % 4 * 32;
      const int q_offset = chunk * 64 * Traits::kRowBytes + column_bytes;
      const int k_offset = chunk * Traits::kBlockN * Traits::kRowBytes + column_bytes;
      Wgmma<kN>::template SharedShared<false>(s, q_operand + (q_offset >> 4), k_operand + (k_offset >> 4), step > 0,
                                              Element{});
    }
  }

  // Adds to the outputs, or starts them on the first block of a tile. The group is committed inside each branch:
  // past a branch the compiler would have to end it with an empty product, and waits would count that.
  __device__ __forceinline__ void IssuePV(const BlockHeader& block) {
    const uint64_t v_operand =
        DescribeColumns(SharedAddress(shared.v[v_ring.slot]), Traits::kBlockN * Traits::kRowBytes);
    const bool adds = !(block.flags & kFirstBlock);
    if (Traits::kNarrowN > 0 && block.flags & kNarrowBlock) {
      MultiplyPV<Traits::kNarrowN / 16>(v_operand, adds);
      WgmmaCommit();
    } else {
      MultiplyPV<Traits::kBlockN / 16>(v_operand, adds);
      WgmmaCommit();
    }
  }

  template <int kSteps>
  __device__ __forceinline__ void MultiplyPV(uint64_t v_operand, bool adds) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<Traits::kVHeadDim>::RegistersShared(o, p + 4 * step, v_operand + (step * 2 * kSwizzleAtomBytes >> 4),
                                                step > 0 || adds, Element{});
    }
  }

  // Logits to probabilities. Must come before the keys of the next block are released: see Producer::OpenBlock.
  template <int kCount>
  __device__ __forceinline__ bool SoftmaxBlock(const BlockHeader& block, float (&s)[kCount], float (&rescale)[2]) {
    if (__builtin_expect(params.transform, false)) TransformLogits(s, params.transform_scale, params.cap_log2);
    if (block.flags & kMaskedBlock) MaskBlock(block, s);
    block_slot = (block_slot + 1) % kBlockSlots;
    return Softmax(s, stats, rescale, scale_log2);
  }

  template <int kCount>
  __device__ __forceinline__ void MaskBlock(const BlockHeader& block, float (&s)[kCount]) {
    const int lane_column = threadIdx.x % 4 * 2;
    const int queries[2] = {tile.token + (thread_row >> params.pack_log2),
                            tile.token + ((thread_row + 8) >> params.pack_log2)};
    RowMask<kCount / 2> rows[2];
    rows[0].Clear();
    rows[1].Clear();
    const bool inline_slices = block.num_slices >= 0;
    const int count = inline_slices ? block.num_slices : -block.num_slices;
    for (int i = 0; i < count; ++i) {
      Slice slice;
      if (inline_slices) {
        slice = shared.blocks[block_slot].slices[i];
      } else {
        const int id = params.by_query.ids[block.ids_begin + i];
        slice = params.slices[min(max(id, 0), params.num_slices - 1)];
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) rows[row].Add(slice, queries[row], block.key_start, lane_column);
    }
    ApplyMask(s, rows);
  }

  // One lane of each warp speaks for it: the warp's own products are done. Keys and values come from all blocks of the
  // cluster, so that each is told.
  __device__ __forceinline__ void Release(uint64_t* barrier) {
    if (Traits::kCluster == 1) {
      if (threadIdx.x % 32 == 0) BarrierArrive(barrier);
    } else {
      if (threadIdx.x % 32 < Traits::kCluster) BarrierArriveAtPeer(barrier, threadIdx.x % 32);
    }
  }

  __device__ __forceinline__ void FinishPV() {
    PinRegisters(o);
    PinRegisters(p);
    Release(&shared.v_empty[v_ring.slot]);
    v_ring.Advance();
  }

  __device__ __forceinline__ void ReleaseQueries() {
    if (threadIdx.x % 32 == 0) BarrierArrive(&shared.q_empty[q_ring.slot]);
    q_ring.Advance();
  }

  __device__ __forceinline__ void ReleaseKeys() {
    Release(&shared.k_empty[k_ring.slot]);
    k_ring.Advance();
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_MAINLOOP_H_
