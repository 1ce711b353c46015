// The walker warp: walks the slice table and writes a note about each block of keys, several blocks
// ahead of those who load and use them, so that nobody waits for the table's chains of loads.
//
// It decides everything about masks that is uniform over a tile. The runs of the table are those of
// a table tile; the warp cuts their slices to the tokens of its own, smaller tile, one slice per
// lane, visits only blocks in which some slice has a cell, and notes beside each block whether it
// needs a mask and which slices do.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_WALKER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_WALKER_H_

#include <climits>

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/softmax.h"
#include "xla_ffi/kernels/sm90/tile_scheduler.h"
#include "xla_ffi/kernels/sm90/tma.h"

namespace magi_jax::sm90 {

// One slice, cut to the rows of a tile: keys seen by any row, and keys seen by every row.
struct LaneSlice {
  int any_begin, any_end, all_begin, all_end;

  __device__ __forceinline__ void Clear() { any_begin = any_end = all_begin = all_end = 0; }

  __device__ __forceinline__ void Cut(const Slice& slice, int first_token, int last_token) {
    const int low = max(slice.q_start, first_token), high = min(slice.q_end - 1, last_token);
    any_begin = max(slice.k_start, low + slice.d_min);
    any_end = low <= high ? min(slice.k_end, high + slice.d_max + 1) : any_begin;
    const bool every_row = low == first_token && high == last_token;
    all_begin = max(slice.k_start, high + slice.d_min);
    all_end = every_row ? min(slice.k_end, low + slice.d_max + 1) : all_begin;
  }
};

template <typename Traits>
struct Walker {
  const KernelParams& params;
  SharedStorage<Traits>& shared;
  const int lane;

  uint32_t blocks = 0;  // handed over

  WorkTile tile;
  int first_walked;            // token of the item: partners walk the keys of all its rows
  bool has_note;               // a block of this tile is written down and not handed over
  int keys_before, keys_left;  // of its runs, to be skipped and to be walked
  Run run;                     // from `begin` to `end` it is walked
  int num_chunks;              // groups of 32 slices of the run
  LaneSlice mine;

  __device__ __forceinline__ Walker(const KernelParams& params, SharedStorage<Traits>& shared)
      : params(params), shared(shared), lane(threadIdx.x % 32) {}

  // Walks all tiles of this block of the grid.
  __device__ void Work() {
    TileScheduler<Traits> scheduler(params, shared);
    while (scheduler.HasWork()) {
      tile = scheduler.Tile();
      if (params.accumulates && params.row_max == nullptr && HasNoRuns()) {
        scheduler.LeaveSection();  // tiles are ordered by their work
      } else if (tile.note.token < params.q_len) {
        first_walked = tile.note.token;
        if (Partners<Traits>(params) > 1) tile.note.token += ClusterRank() * params.tile_tokens;
        WalkTile();
      }
      scheduler.Advance();
    }
    WaitForNote();
    if (lane == 0) shared.notes[SlotOf<kNotes>(blocks)].header.flags = 0;
    HandOver(kEndOfWork);
  }

 private:
  // The last token of the sequence before `end`.
  __device__ __forceinline__ int LastBefore(int end) const { return min(end, params.q_len) - 1; }

  __device__ __forceinline__ int LastToken() const {
    return LastBefore(tile.note.token + params.tile_tokens);
  }

  __device__ __forceinline__ bool IsPiece() const { return Traits::kSplits && tile.note.IsPiece(); }

  __device__ __forceinline__ bool HasNoRuns() const {
    const int32_t* const ptr = params.by_query.ptr + tile.table_tile;
    return ptr[0] >= ptr[1];
  }

  __device__ void WalkTile() {
    has_note = false;
    const int first_run = max(params.by_query.ptr[tile.table_tile], 0);
    const int end_run = min(params.by_query.ptr[tile.table_tile + 1], params.by_query.num_runs);
    keys_before = 0;
    keys_left = INT_MAX;
    if (IsPiece() && !TakePiece(first_run, end_run)) return;
    if (params.merges) PrefetchEarlier();
    for (int r = first_run; r < end_run; ++r) {
      if (EnterRun(params.by_query.runs[r])) WalkRun();
    }
    if (IsPiece() && !has_note) WriteHiddenBlock();
    if (has_note) {
      HandOver(kLastBlock);
    } else {
      WriteEmptyTile();
    }
  }

  // The tile's piece of the keys of its runs, in as many pieces as it is worth. Returns false if
  // there are fewer than planned, and this is none of them.
  __device__ __forceinline__ bool TakePiece(int first_run, int end_run) {
    const TileExtent extent(params, first_run, end_run);
    const int blocks = extent.keys / Traits::kBlockN;
    const int most = extent.has_short_lists ? min(tile.note.Cuts(), blocks / kLeastBlocks) : 1;
    const int cuts = max(most, 1), piece = tile.note.Piece();
    if (cuts > 1) {
      tile.note.Cut(piece, cuts, tile.note.FirstPlace());
      keys_left = (blocks / cuts + 1) * Traits::kBlockN;
      keys_before = piece * keys_left;
      if (piece == cuts - 1) keys_left = INT_MAX;
    } else {
      tile.note.MakeWhole();
    }
    return piece < cuts;
  }

  // Takes up a run, cut to the keys that are walked. Returns whether there are some.
  __device__ __forceinline__ bool EnterRun(const Run& next_run) {
    run = next_run;
    if (!IsPiece()) {
      run.begin = 0;
      run.end = INT_MAX;
      return true;
    }
    const int keys = TileExtent::KeysOf(params, run);
    const int skipped = min(keys_before, keys), taken = min(keys - skipped, keys_left);
    keys_before -= skipped;
    keys_left -= taken;
    run.begin = max(run.begin, 0) + skipped;
    run.end = run.begin + taken;
    run.full_end = min(run.full_end, run.end);
    return taken > 0;
  }

  __device__ void WalkRun() {
    run.ids_begin = min(max(run.ids_begin, 0), params.by_query.num_ids);
    run.ids_end = min(max(run.ids_end, 0), params.by_query.num_ids);
    num_chunks = (run.ids_end - run.ids_begin + 31) / 32;
    if (num_chunks <= 0) return;
    LoadSlices(0);
    for (int key = FirstVisible(0); key < params.k_len; key = FirstVisible(key + Traits::kBlockN)) {
      const bool first = !has_note;
      if (!first) HandOver(0);
      WriteNote(key, first);
    }
  }

  __device__ __forceinline__ Slice SliceOf(int index) const {
    Slice slice = params.slices[min(max(params.by_query.ids[index], 0), params.num_slices - 1)];
    slice.k_start = max(slice.k_start, run.begin);
    slice.k_end = min(slice.k_end, run.end);
    return slice;
  }

  __device__ __forceinline__ void LoadSlices(int chunk) {
    const int index = run.ids_begin + 32 * chunk + lane;
    mine.Clear();
    if (index >= run.ids_end) return;
    const int first = Traits::kPairs ? first_walked : tile.note.token;
    mine.Cut(SliceOf(index), first, LastBefore(first + params.item_tokens));
  }

  // First key at or after `key` that some row of the tile sees, or INT_MAX.
  __device__ __forceinline__ int FirstVisible(int key) {
    int first = INT_MAX;
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (num_chunks > 1) LoadSlices(chunk);
      const int candidate = max(mine.any_begin, key);
      if (candidate < mine.any_end) first = min(first, candidate);
    }
    return __reduce_min_sync(0xFFFFFFFF, first);
  }

  __device__ __forceinline__ void WaitForNote() {
    BarrierWait(&shared.note_empty[SlotOf<kNotes>(blocks)], ParityOf<kNotes>(blocks) ^ 1);
  }

  // Writes down what others need to know about the block at `key`. It is handed over later: whether
  // it is the tile's last shows only when the next is looked for.
  __device__ __forceinline__ void WriteNote(int key, bool first) {
    WaitForNote();
    BlockNote& note = shared.notes[SlotOf<kNotes>(blocks)];
    const int key_end = key + Traits::kBlockN;
    bool full = key >= run.full_begin && key_end <= run.full_end;
    bool is_long = false;  // some cell at or after kShortKeys is visible
    int count = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (num_chunks > 1) LoadSlices(chunk);
      const bool touches = max(mine.any_begin, key) < min(mine.any_end, key_end);
      const uint32_t touching = __ballot_sync(0xFFFFFFFF, touches);
      const int position = count + __popc(touching & ((1u << lane) - 1));
      if (touches && position < kNoteSlices)
        note.slices[position] = SliceOf(run.ids_begin + 32 * chunk + lane);
      is_long |= touches && mine.any_end > key + Traits::kShortKeys;
      full |= mine.all_begin <= key && key_end <= mine.all_end;
      count += __popc(touching);
    }
    full = __any_sync(0xFFFFFFFF, full);
    // A block with too many slices hands over the run's whole list.
    if (count > kNoteSlices) count = run.ids_begin - run.ids_end;
    const bool is_short = !full && !__any_sync(0xFFFFFFFF, is_long);
    const int flags =
        (first ? kFirstBlock : 0) | (full ? 0 : kMaskedBlock) | (is_short ? kShortBlock : 0);
    if (lane == 0) {
      note.header = {key, flags, count, run.ids_begin};
      note.tile = tile.note;
      note.kv_head = tile.kv_head;
    }
    has_note = true;
  }

  // A block of which nothing is visible, for a piece without keys: the others count on it.
  __device__ __forceinline__ void WriteHiddenBlock() {
    run.full_begin = run.full_end = num_chunks = 0;
    WriteNote(0, true);
  }

  __device__ __forceinline__ void HandOver(int flags) {
    const int slot = SlotOf<kNotes>(blocks);
    __syncwarp();
    if (lane == 0) shared.notes[slot].header.flags |= flags;
    BarrierArrive(&shared.note_full[slot]);
    ++blocks;
  }

  // What the tile will be merged with, to L2: by its end nobody should wait for memory.
  __device__ __forceinline__ void PrefetchEarlier() const {
    const uint32_t bytes = Traits::kVHeadDim * sizeof(float) << params.pack_log2;
    for (int row = tile.note.token + lane; row <= LastToken(); row += 32) {
      const int64_t index = static_cast<int64_t>(row) * params.num_heads + tile.note.Head();
      PrefetchBulk(static_cast<const float*>(params.out) + index * Traits::kVHeadDim, bytes);
    }
  }

  // Rows that see no key at all: out = 0 and lse = -inf, unless they hold what other calls gave.
  __device__ void WriteEmptyTile() {
    const int pack = 1 << params.pack_log2;
    const int words =
        Traits::kVHeadDim * (params.out_is_f32 ? 4 : 2) / 16 * pack;  // of 16 bytes, per token
    const int row_words = words / pack * params.num_heads;
    if (!params.accumulates) ClearTile(words, row_words);
    if (params.row_max != nullptr) FillRows(params.row_max);
  }

  // Stores that follow each other closely: other warps have nothing to do meanwhile.
  __device__ __forceinline__ void ClearTile(int words, int row_words) const {
    const int pack = 1 << params.pack_log2;
    const int count = LastToken() - tile.note.token + 1;
    auto* const out = static_cast<uint4*>(params.out) +
                      static_cast<int64_t>(tile.note.token) * row_words +
                      words / pack * tile.note.Head();
    for (int i = lane; i < words; i += 32) {
#pragma unroll 8
      for (int row = 0; row < count; ++row) {
        out[static_cast<int64_t>(row) * row_words + i] = make_uint4(0, 0, 0, 0);
      }
    }
    FillRows(params.lse);
  }

  // The tile's rows of `[T, N]`: -inf.
  __device__ __forceinline__ void FillRows(float* rows) const {
    const int pack = 1 << params.pack_log2;
    rows += static_cast<int64_t>(tile.note.token) * params.num_heads + tile.note.Head();
    for (int i = lane; i < (LastToken() - tile.note.token + 1) * pack; i += 32) {
      rows[static_cast<int64_t>(i >> params.pack_log2) * params.num_heads + (i & (pack - 1))] =
          -INFINITY;
    }
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_WALKER_H_
