// The producer warp: walks the slice table and keeps shared memory full of queries, keys and
// values.
//
// It also decides everything about masks that is uniform over a tile. The runs of the table are
// those of a table tile; the warp cuts their slices to the tokens of its own, smaller tile, one
// slice per lane, visits only blocks in which some slice has a cell, and notes beside each block
// whether it needs a mask and which slices do.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_PRODUCER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_PRODUCER_H_

#include <climits>

#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/tile_scheduler.h"

namespace magi_jax::sm90 {

// One slice, cut to the rows of a tile: keys seen by any row, and keys seen by every row.
struct LaneSlice {
  int id;
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
struct Producer {
  const KernelParams& params;
  const CUtensorMap &q_map, &k_map, &v_map;
  SharedStorage<Traits>& shared;
  const int lane;

  uint32_t tiles = 0, blocks = 0;  // sent so far; the values of the last block may still be pending
  int pending_key = -1, pending_kv_head = 0;  // block whose values are still to be loaded

  WorkTile tile;
  int last_token;    // of the tile, inside the sequence
  int noted_key;     // of the block whose note is written; negative: none of this tile
  bool noted_first;  // it is the first of the tile
  Run run;
  int num_chunks;  // groups of 32 slices of the run
  LaneSlice mine;

  // Walks all tiles of this block of the grid.
  __device__ void Work() {
    TileScheduler scheduler;
    const int tokens_per_tile = Traits::kBlockM >> params.pack_log2;
    while (scheduler.HasWork(params)) {
      scheduler.Request(params);
      tile = DecodeWork(params, scheduler.work, tokens_per_tile);
      if (tile.token < params.q_len) {
        last_token = min(tile.token + tokens_per_tile, params.q_len) - 1;
        WalkTile();
      }
      scheduler.Advance();
    }
    LoadPendingValues();
    const int k_slot = SlotOf<Traits::kStages>(blocks);
    BarrierWait(&shared.k_empty[k_slot], ParityOf<Traits::kStages>(blocks) ^ 1);
    if (lane == 0) {
      shared.blocks[SlotOf<kBlockSlots>(blocks)].header = {0, kEndOfWork, 0, 0};
      BarrierArrive(&shared.k_full[k_slot]);
    }
  }

 private:
  __device__ void WalkTile() {
    noted_key = -1;
    const int first_run = max(params.by_query.ptr[tile.table_tile], 0);
    const int end_run = min(params.by_query.ptr[tile.table_tile + 1], params.by_query.num_runs);
    for (int r = first_run; r < end_run; ++r) WalkRun(params.by_query.runs[r]);
    if (noted_key >= 0) {
      SendBlock(kLastBlock);
    } else if (!params.accumulate) {
      WriteEmptyTile();
    }
  }

  __device__ void WalkRun(const Run& next_run) {
    run = next_run;
    run.ids_begin = min(max(run.ids_begin, 0), params.by_query.num_ids);
    run.ids_end = min(max(run.ids_end, 0), params.by_query.num_ids);
    num_chunks = (run.ids_end - run.ids_begin + 31) / 32;
    if (num_chunks <= 0) return;
    LoadSlices(0);
    for (int key = FirstVisible(0); key < params.k_len; key = FirstVisible(key + Traits::kBlockN)) {
      const bool first = noted_key < 0;
      if (!first) SendBlock(0);
      NoteBlock(key, first);
    }
  }

  __device__ __forceinline__ void LoadSlices(int chunk) {
    const int index = run.ids_begin + 32 * chunk + lane;
    mine.Clear();
    if (index >= run.ids_end) return;
    mine.id = min(max(params.by_query.ids[index], 0), params.num_slices - 1);
    const Slice slice = params.slices[mine.id];
    mine.Cut(slice, tile.token, last_token);
  }

  // First key at or after `key` that some row of the tile sees, or INT_MAX.
  __device__ __forceinline__ int FirstVisible(int key) {
    int first = INT_MAX;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (num_chunks > 1) LoadSlices(chunk);
      const int candidate = max(mine.any_begin, key);
      if (candidate < mine.any_end) first = min(first, candidate);
    }
    return __reduce_min_sync(0xFFFFFFFF, first);
  }

  // Starts the load of the tile's queries.
  __device__ __forceinline__ void OpenTile() {
    const int q_slot = SlotOf<Traits::kQStages>(tiles);
    BarrierWait(&shared.q_empty[q_slot], ParityOf<Traits::kQStages>(tiles) ^ 1);
    if (lane == 0) {
      shared.tiles[q_slot] = {tile.token, tile.head};
      uint64_t* barrier = &shared.q_full[q_slot];
      BarrierArriveExpect(barrier, Traits::kQBytes);
      uint8_t* destination = shared.q[q_slot];
#pragma unroll
      for (int i = 0; i < Traits::kConsumers * Traits::kChunks; ++i) {
        const int first_row = tile.token + (64 >> params.pack_log2) * (i / Traits::kChunks);
        CopyBox(destination + i * 64 * Traits::kRowBytes, &q_map, barrier,
                i % Traits::kChunks * kChunk, tile.head, first_row, kEvictFirst);
      }
    }
    ++tiles;
  }

  // Writes down what consumers need to know about the block at `key`, before its keys are asked
  // for: whether it is the tile's last shows only when the next is looked for. Consumers read the
  // note of a block until they release the keys of the next. When this note is written, the keys of
  // the block kStages + 1 before have been released, and so the note of the one before that is
  // free.
  __device__ __forceinline__ void NoteBlock(int key, bool first) {
    static_assert(Traits::kStages + 2 <= kBlockSlots);
    BlockNote& note = shared.blocks[SlotOf<kBlockSlots>(blocks)];
    const int key_end = key + Traits::kBlockN;
    bool full = key >= run.full_begin && key_end <= run.full_end;
    int count = 0;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (num_chunks > 1) LoadSlices(chunk);
      const bool touches = max(mine.any_begin, key) < min(mine.any_end, key_end);
      const uint32_t touching = __ballot_sync(0xFFFFFFFF, touches);
      const int position = count + __popc(touching & ((1u << lane) - 1));
      if (touches && position < kMaxInlineSlices) note.slices[position] = params.slices[mine.id];
      full |= mine.all_begin <= key && key_end <= mine.all_end;
      count += __popc(touching);
    }
    full = __any_sync(0xFFFFFFFF, full);
    // A block with too many slices hands over the run's whole list.
    if (count > kMaxInlineSlices) count = run.ids_begin - run.ids_end;
    const int flags = (first ? kFirstBlock : 0) | (full ? 0 : kMaskedBlock);
    if (lane == 0) note.header = {key, flags, count, run.ids_begin};
    __syncwarp();
    noted_key = key;
    noted_first = first;
  }

  // Asks for the noted block's keys, and for the values of the one before.
  __device__ __forceinline__ void SendBlock(int flags) {
    if (noted_first) OpenTile();
    const int k_slot = SlotOf<Traits::kStages>(blocks);
    BarrierWait(&shared.k_empty[k_slot], ParityOf<Traits::kStages>(blocks) ^ 1);
    if (lane == 0) {
      shared.blocks[SlotOf<kBlockSlots>(blocks)].header.flags |= flags;
      uint64_t* barrier = &shared.k_full[k_slot];
      BarrierArriveExpect(barrier, Traits::kKBytes);
      LoadRows<Traits::kChunks>(shared.k[k_slot], k_map, barrier, tile.kv_head, noted_key);
    }
    LoadPendingValues();
    ++blocks;
    pending_key = noted_key;
    pending_kv_head = tile.kv_head;
  }

  // Values are needed one block later than keys, so they are loaded behind the next block's keys.
  __device__ __forceinline__ void LoadPendingValues() {
    if (pending_key < 0) return;
    const int v_slot = SlotOf<Traits::kStages>(blocks - 1);
    BarrierWait(&shared.v_empty[v_slot], ParityOf<Traits::kStages>(blocks - 1) ^ 1);
    if (lane == 0) {
      uint64_t* barrier = &shared.v_full[v_slot];
      BarrierArriveExpect(barrier, Traits::kVBytes);
      LoadRows<Traits::kVChunks>(shared.v[v_slot], v_map, barrier, pending_kv_head, pending_key);
    }
    pending_key = -1;
  }

  template <int kChunks>
  __device__ __forceinline__ void LoadRows(uint8_t* destination, const CUtensorMap& map,
                                           uint64_t* barrier, int kv_head, int key) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      CopyBox(destination + chunk * Traits::kBlockN * Traits::kRowBytes, &map, barrier,
              chunk * kChunk, kv_head, key, kEvictLast);
    }
  }

  // Rows that see no key at all: out = 0, lse = -inf.
  __device__ void WriteEmptyTile() {
    const int pack = 1 << params.pack_log2;
    const int words =
        Traits::kVHeadDim * (params.out_is_f32 ? 4 : 2) / 16 * pack;  // of 16 bytes, per token
    const int row_words = words / pack * params.num_heads;
    for (int row = tile.token; row <= last_token; ++row) {
      uint4* out = static_cast<uint4*>(params.out) + static_cast<int64_t>(row) * row_words +
                   words / pack * tile.head;
      for (int i = lane; i < words; i += 32) out[i] = make_uint4(0, 0, 0, 0);
      float* lse = params.lse + static_cast<int64_t>(row) * params.num_heads + tile.head;
      for (int i = lane; i < pack; i += 32) lse[i] = -INFINITY;
    }
  }

 public:
  __device__ __forceinline__ Producer(const KernelParams& params, const CUtensorMap& q_map,
                                      const CUtensorMap& k_map, const CUtensorMap& v_map,
                                      SharedStorage<Traits>& shared)
      : params(params),
        q_map(q_map),
        k_map(k_map),
        v_map(v_map),
        shared(shared),
        lane(threadIdx.x % 32) {}
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_PRODUCER_H_
