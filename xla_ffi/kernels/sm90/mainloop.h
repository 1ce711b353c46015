// The consumer warpgroups: QK, softmax and PV over one endless stream of key blocks.
//
// The stream does not stop at tile borders. While PV of block b runs, QK of block b + 1 is done and
// its softmax is under way, also when b + 1 belongs to the next tile; the outputs of a tile are
// written when its last PV is done, between the softmax of the next tile's first block and that
// block's PV. So a tile of a short document costs its blocks and little else. Two warpgroups take
// turns to issue their products, so that one's softmax runs beside the other's products.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_MAINLOOP_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_MAINLOOP_H_

#include "xla_ffi/kernels/sm90/epilogue.h"
#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/mask.h"
#include "xla_ffi/kernels/sm90/softmax.h"
#include "xla_ffi/kernels/sm90/wgmma.h"

namespace magi_jax::sm90 {

constexpr int kTurnBarrier =
    1;  // and the next: named barrier of each consumer's turn; 0 is __syncthreads

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

  uint32_t tiles = 0;  // whose queries are no longer needed
  uint32_t blocks =
      0;  // whose keys are no longer needed; the values of the last of them are still to be used
  TileNote tile;
  RowStats stats;
  bool all_seen;  // by all rows of this warp, some key of the tile

  float o[kOutputs];
  uint32_t p[kLogits / 2];

  __device__ __forceinline__ Consumer(const KernelParams& params, SharedStorage<Traits>& shared)
      : params(params),
        shared(shared),
        warpgroup(__shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        thread_row(64 * warpgroup + (threadIdx.x % 128) / 32 * 16 + threadIdx.x % 32 / 4),
        scale_log2(params.transform ? 1.0f : params.scale * kLog2e) {}

  __device__ __forceinline__ void Work() {
    WaitForKeys();
    BlockHeader block = shared.blocks[0].header;
    if (block.flags & kEndOfWork) return;

    FirstStep(block);
    if (Traits::kTurns && warpgroup == 1) NamedBarrierArrive(kTurnBarrier, 256);

    while (true) {
      WaitForKeys();
      const BlockHeader next = shared.blocks[SlotOf<kBlockSlots>(blocks)].header;
      if (next.flags & kEndOfWork) break;
      Step(block, next);
      block = next;
    }

    const uint32_t poisoned = CheckValues(block, tile);
    WaitForValues();
    WgmmaFence();
    IssuePV(block);
    WgmmaWait<0>();
    PinRegisters(o);
    if (__builtin_expect(poisoned, 0)) Poison(poisoned);
    Epilogue<Traits>::Write(params, tile, thread_row, scale_log2, stats, o);
    if (Traits::kTurns && warpgroup == 0)
      NamedBarrierSync(kTurnBarrier, 256);  // the other's last turn
  }

 private:
  // QK and softmax of the first block of all, which has no PV beside it.
  __device__ __forceinline__ void FirstStep(const BlockHeader& block) {
    StartTile();
    float s[kLogits], rescale[2];
    WgmmaFence();
    IssueQK(s);
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
    SoftmaxBlock(block, s, rescale);
    ReleaseKeys();
    if (block.flags & kLastBlock) ReleaseQueries();
    PackProbabilities<Element>(s, p);
  }

  // PV of `block` beside QK and softmax of `next`.
  __device__ __forceinline__ void Step(const BlockHeader& block, const BlockHeader& next) {
    const bool new_tile = next.flags & kFirstBlock;
    const TileNote finished = tile;
    const RowStats finished_stats = stats;
    const uint32_t poisoned = CheckValues(block, tile);
    if (new_tile) StartTile();
    float s[kLogits];
    TakeTurn();
    WgmmaFence();
    IssueQK(s);
    WgmmaCommit();
    WaitForValues();
    IssuePV(block);
    if (Traits::kTurns) PassTurn();

    WgmmaWait<1>();
    PinRegisters(s);
    float rescale[2];
    bool moved = false;
    if (Traits::kLazy && all_seen && !new_tile) {
      PrepareLogits(next, s);
      if (__builtin_expect(!SoftmaxAtReference(s, stats, scale_log2), false)) {
        RecomputeLogits(s);
        moved = SoftmaxBlock(next, s, rescale);
      }
    } else {
      moved = SoftmaxBlock(next, s, rescale);
    }
    PinRegisters(s);
    ReleaseKeys();
    if (next.flags & kLastBlock) ReleaseQueries();
    // The assembler hoists a wait over arithmetic that it does not depend on, here all of the
    // softmax, which would undo the overlap. It stays behind a branch on the softmax's result, if
    // both sides do not share their text.
    if (moved) {
      WgmmaWait<0, 1>();
      FinishPV();
      if (!new_tile) Rescale(o, rescale);
    } else {
      WgmmaWait<0, 2>();
      FinishPV();
    }
    if (__builtin_expect(poisoned, 0)) Poison(poisoned);
    if (new_tile)
      Epilogue<Traits>::Write(params, finished, thread_row, scale_log2, finished_stats, o);
    PackProbabilities<Element>(s, p);
  }

  __device__ __forceinline__ void TakeTurn() {
    if (Traits::kTurns) NamedBarrierSync(kTurnBarrier + warpgroup, 256);
  }

  __device__ __forceinline__ void PassTurn() {
    NamedBarrierArrive(kTurnBarrier + (warpgroup ^ 1), 256);
  }

  __device__ __forceinline__ void WaitForKeys() {
    BarrierWait(&shared.k_full[SlotOf<Traits::kStages>(blocks)], ParityOf<Traits::kStages>(blocks));
  }

  __device__ __forceinline__ void WaitForValues() {
    BarrierWait(&shared.v_full[SlotOf<Traits::kStages>(blocks - 1)],
                ParityOf<Traits::kStages>(blocks - 1));
  }

  // Waits until the values of `block` are inspected, if it has a mask. Returns bit i where this
  // thread's row i of `rows_tile` sees a value that is not finite.
  __device__ __forceinline__ uint32_t CheckValues(const BlockHeader& block,
                                                  const TileNote& rows_tile) {
    if (!(block.flags & kMaskedBlock)) return 0;
    const int slot = SlotOf<Traits::kStages>(blocks - 1);
    BarrierWait(&shared.v_clean[slot], ParityOf<Traits::kStages>(blocks - 1));
    const bool* found = shared.has_bad_keys[slot];
    if (__builtin_expect(!found[0] && !found[1] && !found[2], 1)) return 0;
    RowMask<kLogits / 2> rows[2];
    MaskRows(block, blocks - 1, rows_tile, rows);
    uint32_t poisoned = 0;
#pragma unroll
    for (int word = 0; word < RowMask<kLogits / 2>::kWords; ++word) {
#pragma unroll 1
      for (int bit = 0; bit < 32 && word * 32 + bit < kLogits / 2; ++bit) {
        const int element = word * 32 + bit,
                  column = element / 2 * 8 + threadIdx.x % 4 * 2 + element % 2;
        uint32_t bad = 0;
        for (int i = 0; i < kInspectors; ++i) {
          if (found[i]) bad |= shared.bad_keys[slot][i][column / 32] >> column % 32 & 1;
        }
        poisoned |= bad & rows[0].words[word] >> bit | (bad & rows[1].words[word] >> bit) << 1;
      }
    }
    poisoned |= __shfl_xor_sync(0xFFFFFFFF, poisoned, 1);
    return poisoned | __shfl_xor_sync(0xFFFFFFFF, poisoned, 2);
  }

  __device__ __forceinline__ void Poison(uint32_t rows) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = rows >> i / 2 % 2 & 1 ? NAN : o[i];
  }

  __device__ __forceinline__ void StartTile() {
    const int slot = SlotOf<Traits::kQStages>(tiles);
    BarrierWait(&shared.q_full[slot], ParityOf<Traits::kQStages>(tiles));
    tile = shared.tiles[slot];
    stats.Reset();
  }

  __device__ __forceinline__ void IssueQK(float (&s)[kLogits]) {
    const uint32_t q = SharedAddress(shared.q[SlotOf<Traits::kQStages>(tiles)]) +
                       warpgroup * 64 * Traits::kRowBytes * Traits::kChunks;
    const Operand q_operand = OperandOfRows(q),
                  k_operand =
                      OperandOfRows(SharedAddress(shared.k[SlotOf<Traits::kStages>(blocks)]));
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const int chunk = step / 4, column_bytes = step % 4 * 32;
      const int q_offset = chunk * 64 * Traits::kRowBytes + column_bytes;
      const int k_offset = chunk * Traits::kBlockN * Traits::kRowBytes + column_bytes;
      Wgmma<Traits::kBlockN>::template SharedShared<false>(
          s, q_operand.Advance(q_offset), k_operand.Advance(k_offset), step > 0, Element{});
    }
  }

  // Adds to the outputs, or starts them on the first block of a tile.
  __device__ __forceinline__ void IssuePV(const BlockHeader& block) {
    const Operand v_operand =
        OperandOfColumns(SharedAddress(shared.v[SlotOf<Traits::kStages>(blocks - 1)]),
                         Traits::kBlockN * Traits::kRowBytes);
    const bool adds = !(block.flags & kFirstBlock);
#pragma unroll
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      Wgmma<Traits::kVHeadDim>::RegistersShared(o, p + 4 * step,
                                                v_operand.Advance(step * 2 * kSwizzleAtomBytes),
                                                step > 0 || adds, Element{});
    }
    WgmmaCommit();
  }

  // Logits to probabilities. Must come before the keys of the next block are released: see
  // Producer::NoteBlock.
  __device__ __forceinline__ bool SoftmaxBlock(const BlockHeader& block, float (&s)[kLogits],
                                               float (&rescale)[2]) {
    PrepareLogits(block, s);
    const bool moved = Softmax(s, stats, rescale, scale_log2);
    if (Traits::kLazy) all_seen = stats.AllSeen();
    return moved;
  }

  __device__ __forceinline__ void PrepareLogits(const BlockHeader& block, float (&s)[kLogits]) {
    if (__builtin_expect(params.transform, false))
      TransformLogits(s, params.transform_scale, params.cap_log2);
    if (block.flags & kMaskedBlock) MaskBlock(block, s);
  }

  // This thread's logits by plain arithmetic, since the other warps of the warpgroup take no part.
  // Rare and slow.
  __device__ __forceinline__ void RecomputeLogits(float (&s)[kLogits]) {
    const uint8_t* q = shared.q[SlotOf<Traits::kQStages>(tiles)] +
                       warpgroup * 64 * Traits::kRowBytes * Traits::kChunks;
    const uint8_t* k = shared.k[SlotOf<Traits::kStages>(blocks)];
    const int row = thread_row % 64, lane_column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) s[i] = 0.0f;
#pragma unroll 1
    for (int d = 0; d < Traits::kHeadDim; d += 2) {
      float2 a[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) a[i] = LoadPair(q, 64, row + 8 * i, d);
#pragma unroll
      for (int i = 0; i < kLogits; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float2 b = LoadPair(k, Traits::kBlockN, 2 * i + lane_column + j, d);
          s[i + j] = fmaf(a[0].y, b.y, fmaf(a[0].x, b.x, s[i + j]));
          s[i + 2 + j] = fmaf(a[1].y, b.y, fmaf(a[1].x, b.x, s[i + 2 + j]));
        }
      }
    }
  }

  // Elements d and d + 1 of a row of a swizzled tile.
  static __device__ __forceinline__ float2 LoadPair(const uint8_t* tile, int tile_rows, int row,
                                                    int d) {
    const int unit = d % kChunk / 8 ^ row % 8;
    const uint8_t* address =
        tile + (d / kChunk * tile_rows + row) * Traits::kRowBytes + unit * 16 + d % 8 * 2;
    return ToFloats(*reinterpret_cast<const uint32_t*>(address), Element{});
  }

  __device__ __forceinline__ void MaskBlock(const BlockHeader& block, float (&s)[kLogits]) {
    RowMask<kLogits / 2> rows[2];
    MaskRows(block, blocks, tile, rows);
    ApplyMask(s, rows);
  }

  // What the rows of `rows_tile` see of the `index`-th block.
  __device__ __forceinline__ void MaskRows(const BlockHeader& block, uint32_t index,
                                           const TileNote& rows_tile,
                                           RowMask<kLogits / 2> (&rows)[2]) {
    const int lane_column = threadIdx.x % 4 * 2;
    const int queries[2] = {rows_tile.token + (thread_row >> params.pack_log2),
                            rows_tile.token + ((thread_row + 8) >> params.pack_log2)};
    rows[0].Clear();
    rows[1].Clear();
    const bool inline_slices = block.num_slices >= 0;
    const int count = inline_slices ? block.num_slices : -block.num_slices;
    for (int i = 0; i < count; ++i) {
      Slice slice;
      if (inline_slices) {
        slice = shared.blocks[SlotOf<kBlockSlots>(index)].slices[i];
      } else {
        const int id = params.by_query.ids[block.ids_begin + i];
        slice = params.slices[min(max(id, 0), params.num_slices - 1)];
      }
#pragma unroll
      for (int row = 0; row < 2; ++row)
        rows[row].Add(slice, queries[row], block.key_start, lane_column);
    }
  }

  // One lane of each warp speaks for it: the warp's own products are done.
  __device__ __forceinline__ void Release(uint64_t* barrier) {
    if (threadIdx.x % 32 == 0) BarrierArrive(barrier);
  }

  __device__ __forceinline__ void FinishPV() {
    PinRegisters(o);
    PinRegisters(p);
    // `blocks` counts the next block already.
    Release(&shared.v_empty[SlotOf<Traits::kStages>(blocks - 2)]);
  }

  __device__ __forceinline__ void ReleaseQueries() {
    if (threadIdx.x % 32 == 0) BarrierArrive(&shared.q_empty[SlotOf<Traits::kQStages>(tiles)]);
    ++tiles;
  }

  __device__ __forceinline__ void ReleaseKeys() {
    Release(&shared.k_empty[SlotOf<Traits::kStages>(blocks)]);
    ++blocks;
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_MAINLOOP_H_
