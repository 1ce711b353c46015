// The consumer warpgroups: QK, softmax and PV over one endless stream of key blocks.
//
// The stream does not stop at tile borders. While PV of block b runs, QK of block b + 1 is done and
// its softmax is under way, also when b + 1 belongs to the next tile. When the last PV of a tile is
// done its outputs stay in registers until QK of the next tile's second block runs, and are written
// beside it. So a tile of a short document costs its blocks and little else. Two warpgroups take
// turns, so that one's softmax runs beside the other's products.

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
  // Those that are exponentiated in a short block. Where softmax is what takes time, all are: one
  // more branch in it costs more than short blocks save.
  static constexpr int kFirstLogits =
      Traits::kTurns == Turns::kProducts ? Traits::kShortKeys / 2 : kLogits;
  // Whether most steps of a long walk have code of their own. Turns at the softmax are of no use in
  // it: without a branch between, the assembler takes exponentials out of them.
  static constexpr bool kPlainSteps =
      Traits::kLazy && !Traits::kTransform && Traits::kTurns == Turns::kProducts;
  static constexpr int kOutputs = Traits::kVHeadDim / 2;

  const KernelParams& params;
  SharedStorage<Traits>& shared;
  const int warpgroup;   // 0 or 1
  const int thread_row;  // this thread's first row in the tile
  const float scale_log2;

  uint32_t tiles = 0;  // whose queries are no longer needed
  uint32_t blocks =
      0;  // whose keys are no longer needed; the values of the last of them are still to be used
  int key_start;  // of the block whose logits are at hand
  TileNote tile;
  RowStats stats;
  TileNote finished;   // the tile before, whose outputs are still in registers
  RowResults results;  // of its rows

  float o[kOutputs];
  uint32_t p[kLogits / 2];

  __device__ __forceinline__ Consumer(const KernelParams& params, SharedStorage<Traits>& shared)
      : params(params),
        shared(shared),
        warpgroup(__shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        thread_row(64 * warpgroup + (threadIdx.x % 128) / 32 * 16 + threadIdx.x % 32 / 4),
        scale_log2(Traits::kTransform ? 1.0f : params.scale * kLog2e) {}

  __device__ __forceinline__ void Work() {
    const BlockHeader first = NextBlock();
    int flags = first.flags;
    if (flags & kEndOfWork) return;

    flags |= FirstStep(first);
    if (warpgroup == 1) NamedBarrierArrive(kTurnBarrier, 256);

    while (true) {
      BlockHeader next = NextBlock();
      while (IsPlain(flags, next.flags)) flags = PlainStep(flags & kKeepsReferences, next);
      if (next.flags & kEndOfWork) break;
      if (Traits::kLazy) key_start = next.key_start;
      const int kept = Step(flags, next);
      flags = next.flags | kept | (next.flags & kFirstBlock ? kClosesTile : 0);
    }
    if (flags & kClosesTile) StoreTile();

    WaitForValues();
    WgmmaFence();
    IssuePV(flags);
    WgmmaWait<0>();
    PinRegisters(o);
    CloseSums();
    CloseOutputs();
    StoreTile();
    if (warpgroup == 0) NamedBarrierSync(kTurnBarrier, 256);  // the other's last turn
  }

 private:
  // What is known of the next block, when its keys are there.
  __device__ __forceinline__ BlockHeader NextBlock() {
    WaitForKeys();
    return shared.notes[SlotOf<kNotes>(blocks)].header;
  }

  // QK and softmax of the first block of all, which has no PV beside it. Returns KeptReferences().
  __device__ __forceinline__ int FirstStep(const BlockHeader& block) {
    const int flags = block.flags;
    WaitForQueries();
    StartTile();
    float s[kLogits], rescale[2];
    RowMask<kLogits / 2> rows[2];
    if (flags & kMaskedBlock) MaskRows(block, rows);
    WgmmaFence();
    IssueQK(s);
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
    SoftmaxBlock(flags, rows, s, rescale);
    ReleaseKeys();
    if (flags & kLastBlock) ReleaseQueries();
    PackProbabilities<Element>(s, p);
    return KeptReferences();
  }

  // Whether a step is one of many in the midst of a walk: the next block is wholly visible, and
  // neither begins or ends a tile. The same in all warps of a warpgroup, which issue products
  // together; whether references are kept is a warp's own affair.
  static __device__ __forceinline__ bool IsPlain(int flags, int next_flags) {
    return kPlainSteps && (flags & (kFirstBlock | kShortBlock | kClosesTile) | next_flags) == 0;
  }

  // Step() for these, without a test of what is known of them; also finds the block after `next`.
  // `kept` is kKeepsReferences or 0.
  __device__ __forceinline__ int PlainStep(int kept, BlockHeader& next) {
    key_start = next.key_start;
    float s[kLogits];
    TakeTurn();
    WgmmaFence();
    IssueQK(s);
    WgmmaCommit();
    WaitForValues();
    IssuePVSteps<Traits::kBlockN / 16>(0);
    PassTurn();

    WgmmaWait<1>();
    PinRegisters(s);
    Forget(kept);
    float rescale[2];
    bool moved = false, done = false;
    if (__builtin_expect(kept, true)) {
      float sums[2];
      done = SoftmaxAtReference<kLogits>(s, false, stats, sums, scale_log2, Traits::kMostLazySum);
      if (__builtin_expect(!done, false)) {
        done = moved = RaiseReferences(s, stats, sums, rescale);
        if (!done) RecomputeLogits(s);
      }
    }
    if (__builtin_expect(!done, false)) {
      moved = Softmax(s, stats, rescale, scale_log2, params.move_threshold);
      kept = KeptReferences();
    }
    PinRegisters(s);
    ReleaseKeys();       // ahead of the exponentials it is slower
    next = NextBlock();  // beside the end of PV
    WgmmaWait<0>();
    FinishPV();
    if (__builtin_expect(moved, false)) Rescale(o, rescale);
    PackProbabilities<Element>(s, p);
    return kept;
  }

  // PV of one block beside QK and softmax of the next. Returns kKeepsReferences if those of the
  // next block's rows may be kept in the block after it.
  __device__ __forceinline__ int Step(int flags, const BlockHeader& next) {
    int next_flags = next.flags;
    if (next_flags & kFirstBlock) WaitForQueries();
    float s[kLogits];
    if (Traits::kTurns == Turns::kProducts) TakeTurn();
    WgmmaFence();
    IssueQK(s);
    WgmmaCommit();
    // Beside QK, for products with values are issued only when it is done.
    if (__builtin_expect(flags & kClosesTile, 0)) {
      if (Traits::kTurns == Turns::kProducts) PassTurn();
      StoreTile();
    }
    if (__builtin_expect(next_flags & kFirstBlock, 0)) {
      CloseSums();
      StartTile();
    }
    RowMask<kLogits / 2> rows[2];
    if (__builtin_expect(next_flags & kMaskedBlock, 0)) MaskRows(next, rows);
    Forget(flags);
    WaitForValues();
    IssuePV(flags);
    if (Traits::kTurns == Turns::kProducts && !(flags & kClosesTile)) PassTurn();

    WgmmaWait<1>();
    PinRegisters(s);
    ReleaseKeys();
    if (next_flags & kLastBlock) ReleaseQueries();
    if (Traits::kTurns == Turns::kSoftmax) TakeTurn();
    Forget(next_flags);
    float rescale[2];
    bool moved = false, done = false;
    int kept = flags & kKeepsReferences;
    if (Traits::kLazy && kept && !(next_flags & kFirstBlock)) {
      PrepareLogits(next_flags, rows, s);
      float sums[2];
      done = SoftmaxAtReference<kFirstLogits>(s, next_flags & kShortBlock, stats, sums, scale_log2,
                                              Traits::kMostLazySum);
      if (__builtin_expect(!done, false)) {
        done = moved = RaiseReferences(s, stats, sums, rescale);
        if (!done) RecomputeLogits(s);
      }
    }
    if (__builtin_expect(!done, !Traits::kLazy)) {
      moved = SoftmaxBlock(next_flags, rows, s, rescale);
      kept = KeptReferences();
    }
    PinRegisters(s);
    if (Traits::kTurns == Turns::kSoftmax) PassTurn();
    Forget(next_flags);
    if (!Traits::kLazy) BranchOnSums();
    WgmmaWait<0>();
    FinishPV();
    if (moved && !(next_flags & kFirstBlock)) Rescale(o, rescale);
    if (__builtin_expect(next_flags & kFirstBlock, 0)) CloseOutputs();
    PackProbabilities<Element>(s, p);
    return kept;
  }

  // The assembler hoists a wait over arithmetic that it does not depend on, here all of the
  // softmax, which would undo the overlap, unless a branch on its result stands between. Where no
  // such branch is needed this is one, never taken: sums are not negative.
  __device__ __forceinline__ void BranchOnSums() const {
    const bool never = __any_sync(0xFFFFFFFF, stats.sum[0] < 0.0f || stats.sum[1] < 0.0f);
#pragma unroll 1
    for (int i = never; i > 0; --i) asm volatile("nanosleep.u32 0;");
  }

  // Makes the compiler test the flags again rather than keep the outcomes of tests, for which it
  // has no registers left.
  static __device__ __forceinline__ void Forget(int& flags) { asm volatile("" : "+r"(flags)); }

  __device__ __forceinline__ void TakeTurn() { NamedBarrierSync(kTurnBarrier + warpgroup, 256); }

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

  // The tile's sums are complete; its outputs will be after the next products with values.
  __device__ __forceinline__ void CloseSums() {
    finished = tile;
    results = Epilogue<Traits>::CloseSums(params, tile, thread_row, scale_log2, stats);
  }

  __device__ __forceinline__ void CloseOutputs() {
    Epilogue<Traits>::CloseOutputs(params, finished, thread_row, scale_log2, results, o);
  }

  __device__ __forceinline__ void StoreTile() {
    Epilogue<Traits>::Store(params, finished, thread_row, results, o);
  }

  __device__ __forceinline__ void WaitForQueries() {
    const int slot = SlotOf<Traits::kQStages>(tiles);
    BarrierWait(&shared.q_full[slot], ParityOf<Traits::kQStages>(tiles));
  }

  __device__ __forceinline__ void StartTile() {
    tile = shared.notes[SlotOf<kNotes>(blocks)].tile;
    stats.Reset();
  }

  __device__ __forceinline__ void IssueQK(float (&s)[kLogits]) {
    uint32_t q = SharedAddress(shared.q[SlotOf<Traits::kQStages>(tiles)]) +
                 warpgroup * 64 * Traits::kRowBytes * Traits::kChunks;
    // With one slot for queries every step's descriptor is the same for the whole launch, and the
    // compiler would rather keep them all, in registers that it does not have.
    if (Traits::kQStages == 1) asm volatile("" : "+r"(q));
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
  __device__ __forceinline__ void IssuePV(int flags) {
    if (__builtin_expect(flags & kShortBlock, 0)) {
      IssuePVSteps<Traits::kShortKeys / 16>(flags);
    } else {
      IssuePVSteps<Traits::kBlockN / 16>(flags);
    }
  }

  template <int kSteps>
  __device__ __forceinline__ void IssuePVSteps(int flags) {
    const Operand v_operand =
        OperandOfColumns(SharedAddress(shared.v[SlotOf<Traits::kStages>(blocks - 1)]),
                         Traits::kBlockN * Traits::kRowBytes);
    const bool adds = !(flags & kFirstBlock);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<Traits::kVHeadDim>::RegistersShared(o, p + 4 * step,
                                                v_operand.Advance(step * 2 * kSwizzleAtomBytes),
                                                step > 0 || adds, Element{});
    }
    WgmmaCommit();
  }

  // kKeepsReferences if all rows of this warp have seen a key and no exact maximum is asked for.
  // Kept among the flags, for a variable of its own would be spilled.
  __device__ __forceinline__ int KeptReferences() const {
    return Traits::kLazy && params.row_max == nullptr && stats.AllSeen() ? kKeepsReferences : 0;
  }

  // Logits to probabilities.
  __device__ __forceinline__ bool SoftmaxBlock(int flags, const RowMask<kLogits / 2> (&rows)[2],
                                               float (&s)[kLogits], float (&rescale)[2]) {
    PrepareLogits(flags, rows, s);
    return Softmax(s, stats, rescale, scale_log2, params.move_threshold);
  }

  __device__ __forceinline__ void PrepareLogits(int flags, const RowMask<kLogits / 2> (&rows)[2],
                                                float (&s)[kLogits]) {
    if constexpr (Traits::kTransform) TransformLogits(s, params.transform_scale, params.cap_log2);
    if (__builtin_expect(flags & kMaskedBlock, 0)) ApplyMask(s, rows);
  }

  // This thread's logits by plain arithmetic, from global memory, for the keys in shared memory are
  // given back already, and the other warps of the warpgroup take no part. Rare and slow.
  __device__ __forceinline__ void RecomputeLogits(float (&s)[kLogits]) {
    const Element* q[2];
    int first_row = thread_row;
    Forget(first_row);  // or addresses are found ahead of every walk
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int packed_row = first_row + 8 * i;
      const int token = min(tile.token + (packed_row >> params.pack_log2), params.q_len - 1);
      const int head = tile.Head() + (packed_row & ((1 << params.pack_log2) - 1));
      q[i] = static_cast<const Element*>(params.q) +
             (static_cast<int64_t>(token) * params.num_heads + head) * Traits::kHeadDim;
    }
    const int kv_head = tile.Head() / (params.parts_per_group << params.pack_log2);
    const Element* k =
        static_cast<const Element*>(params.k) + static_cast<int64_t>(kv_head) * Traits::kHeadDim;
    int first_key = key_start + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) s[i] = 0.0f;
#pragma unroll 1
    for (int d = 0; d < Traits::kHeadDim; d += 2) {
      const float2 a[2] = {LoadPair(q[0] + d), LoadPair(q[1] + d)};
      Forget(first_key);  // or the address of every key gets a register
#pragma unroll
      for (int i = 0; i < kLogits; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = min(first_key + 2 * i + j, params.k_len - 1);
          const float2 b =
              LoadPair(k + static_cast<int64_t>(key) * params.num_kv_heads * Traits::kHeadDim + d);
          s[i + j] = fmaf(a[0].y, b.y, fmaf(a[0].x, b.x, s[i + j]));
          s[i + 2 + j] = fmaf(a[1].y, b.y, fmaf(a[1].x, b.x, s[i + 2 + j]));
        }
      }
    }
  }

  static __device__ __forceinline__ float2 LoadPair(const Element* pair) {
    return ToFloats(*reinterpret_cast<const uint32_t*>(pair), Element{});
  }

  // What this thread's rows see of the block whose logits are at hand.
  __device__ __forceinline__ void MaskRows(const BlockHeader& block,
                                           RowMask<kLogits / 2> (&rows)[2]) {
    const BlockNote& note = shared.notes[SlotOf<kNotes>(blocks)];
    const int lane_column = threadIdx.x % 4 * 2;
    const int queries[2] = {tile.token + (thread_row >> params.pack_log2),
                            tile.token + ((thread_row + 8) >> params.pack_log2)};
    rows[0].Clear();
    rows[1].Clear();
    const bool inline_slices = block.num_slices >= 0;
    const int count = inline_slices ? block.num_slices : -block.num_slices;
    for (int i = 0; i < count; ++i) {
      Slice slice;
      if (inline_slices) {
        slice = note.slices[i];
      } else {
        const int id = params.by_query.ids[block.ids_begin + i];
        slice = params.slices[min(max(id, 0), params.num_slices - 1)];
      }
#pragma unroll
      for (int row = 0; row < 2; ++row)
        rows[row].Add(slice, queries[row], block.key_start, lane_column);
    }
  }

  // One lane of each warp speaks for it: the warp's own products are done, and all lanes have read
  // what stands beside the operands.
  static __device__ __forceinline__ void Release(uint64_t* barrier) {
    if constexpr (kEveryLaneArrives) {
      BarrierArrive(barrier);
    } else {
      __syncwarp();
      BarrierArriveByOne(barrier);
    }
  }

  // The same for operands that partners share. At some head dims registers do not suffice for a
  // word to the other thread block of a pair beside the one to its own: there lane i tells partner
  // i, which takes longer alone.
  __device__ __forceinline__ void ReleaseShared(uint64_t* barrier) {
    if constexpr (!Traits::kPairs) {
      Release(barrier);
    } else if constexpr (kEveryLaneArrives) {
      for (int rank = 0; rank < params.partners; ++rank) ClusterArrive(barrier, rank);
    } else if constexpr (Traits::kTellsApart) {
      Release(barrier);
      ClusterArriveByOne(barrier, 1 - ClusterRank(), params.partners > 1);
    } else {
      __syncwarp();
      const int lane = threadIdx.x % 32;
      if (lane < params.partners) ClusterArrive(barrier, lane);
    }
  }

  __device__ __forceinline__ void FinishPV() {
    PinRegisters(o);
    PinRegisters(p);
    // `blocks` counts the next block already.
    ReleaseShared(&shared.v_empty[SlotOf<Traits::kStages>(blocks - 2)]);
  }

  __device__ __forceinline__ void ReleaseQueries() {
    Release(&shared.q_empty[SlotOf<Traits::kQStages>(tiles)]);
    ++tiles;
  }

  __device__ __forceinline__ void ReleaseKeys() {
    ReleaseShared(&shared.k_empty[SlotOf<Traits::kStages>(blocks)]);
    ++blocks;
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_MAINLOOP_H_
