// The producer warp of the backward: walks the slice table by key tiles and keeps shared memory
// full of queries and output cotangents with their statistics.
//
// As in the forward it decides everything about masks that is uniform over a tile, and notes it
// beside each block. A tile's blocks are those of all heads of its group, head by head, so that
// what the tiles in flight read at one time are neighbouring rows of few heads, which fit in L2.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PRODUCER_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PRODUCER_H_

#include <climits>

#include "xla_ffi/kernels/sm90/backward_order.h"
#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_ptx.h"

namespace magi_jax::sm90 {

constexpr uint64_t kEvictNormal = 0x1000000000000000;

__device__ __forceinline__ Slice Transposed(const Slice& slice) {
  return {slice.k_start, slice.k_end, slice.q_start, slice.q_end, -slice.d_max, -slice.d_min};
}

// One slice, cut to the keys of a tile: queries that see any of them, and queries that see all.
struct LaneKeySlice {
  int id;
  int any_begin, any_end, all_begin, all_end;

  __device__ __forceinline__ void Clear() { any_begin = any_end = all_begin = all_end = 0; }

  __device__ __forceinline__ void Cut(const Slice& slice, int first_key, int last_key) {
    const int low = max(slice.k_start, first_key), high = min(slice.k_end - 1, last_key);
    any_begin = max(slice.q_start, low - slice.d_max);
    any_end = low <= high ? min(slice.q_end, high - slice.d_min + 1) : any_begin;
    all_begin = max(slice.q_start, high - slice.d_max);
    all_end =
        low == first_key && high == last_key ? min(slice.q_end, low - slice.d_min + 1) : all_begin;
  }
};

template <typename Traits>
struct QueryProducer {
  const BackwardKernelParams& params;
  const CUtensorMap &q_map, &dout_map, &k_map, &v_map;
  BackwardStorage<Traits>& shared;
  const int lane = threadIdx.x % 32;

  StageRing<Traits::kStages> ring;
  StageRing<Traits::kDoutStages> dout_ring;
  uint32_t kv_parity = 0;

  int kv_head, key_start, last_key;
  int rank;                     // of the tile, where sums have a fixed order
  int tile_flags;               // of the notes of all blocks of the tile
  int first_query, end_query;   // of the item, where kCut
  bool partial;                 // the tile reaches past the last key
  int found_query, found_head;  // of the block whose note is written; negative: none of this tile
  int end_key;                  // of a document
  bool is_first;                // that block is the tile's first
  Run run;
  int num_chunks;  // groups of 32 slices of the run
  LaneKeySlice mine;

  __device__ void Work() {
    const int num_items = *params.num_items;
    const int num_work = num_items * params.num_kv_heads;
    // Where items wait for others, a block takes one only when it can begin it.
    int work = Traits::kOrdered ? Broadcast(TakeItem()) : blockIdx.x;
    while (work < num_work) {
      const int next = Traits::kOrdered ? 0 : TakeItem() + gridDim.x;
      WalkTile(work, num_items);
      work = Broadcast(Traits::kOrdered ? TakeItem() : next);
    }
    SendNote(kEndOfWork);
  }

 protected:
  // Only the first lane gets an item: nobody waits for the counter before the item is needed.
  __device__ __forceinline__ int TakeItem() { return lane == 0 ? atomicAdd(params.counter, 1) : 0; }

  static __device__ __forceinline__ int Broadcast(int value) {
    return __shfl_sync(0xFFFFFFFF, value, 0);
  }

  // Items in their order within a section of kv heads, the section's kv heads side by side.
  __device__ void WalkTile(int work, int num_items) {
    const int wanted_heads = (params.section_items + num_items - 1) / num_items;
    const int per_section = num_items * min(wanted_heads, params.num_kv_heads);
    const int section = work / per_section;
    const int section_begin = section * min(wanted_heads, params.num_kv_heads);
    const int section_heads = min(wanted_heads, params.num_kv_heads - section_begin);
    work -= section * per_section;
    kv_head = section_begin + work % section_heads;
    const WorkItem item = params.items[work / section_heads];
    const int group = params.num_heads / params.num_kv_heads;
    const int first_head = kv_head * group + item.head;
    const bool split = Traits::kCut ? params.parts[item.tile] > 1 : item.num_heads < group;
    tile_flags = split ? kSplitTile : 0;
    if constexpr (Traits::kOrdered) rank = work / section_heads % NumTiles(params);
    const int table_tile = item.tile / params.parts_per_tile;
    key_start = item.tile * Traits::kBlockN;
    if (key_start >= params.k_len) {
      FinishHeads(first_head, item.num_heads);
      return;
    }
    last_key = min(key_start + Traits::kBlockN, params.k_len) - 1;
    partial = last_key - key_start + 1 < Traits::kBlockN;
    found_query = -1;
    is_first = true;
    if constexpr (Traits::kCut) {
      first_query = item.first_query;
      end_query = item.end_query;
    }
    const int first_run = max(params.by_key.ptr[table_tile], 0);
    const int end_run = min(params.by_key.ptr[table_tile + 1], params.by_key.num_runs);
    for (int head = first_head; head < first_head + item.num_heads; ++head) {
      for (int r = first_run; r < end_run; ++r) WalkRun(params.by_key.runs[r], head);
      if (found_query < 0) break;
    }
    if (found_query >= 0) {
      SendBlock(kLastBlock, kNoQuery);
    } else {
      FinishHeads(first_head, item.num_heads);
      SendNote(kEmptyTile | tile_flags);
    }
  }

  // Says that a tile without blocks adds nothing.
  __device__ __forceinline__ void FinishHeads(int first_head, int num_heads) {
    if constexpr (Traits::kOrdered) {
      for (int i = lane; i < Traits::kConsumers * num_heads; i += 32) {
        Progress* const progress =
            ProgressOfHead(params, i / num_heads, first_head + i % num_heads) + rank;
        SetProgress(progress, {kNoQuery, progress->all});
      }
    }
  }

  // A block has only cells of its own run's slices: so blocks of two runs may share rows.
  __device__ void WalkRun(const Run& next_run, int head) {
    constexpr int kAlign = ~(kQueryAlignment - 1);
    run = next_run;
    run.ids_begin = min(max(run.ids_begin, 0), params.by_key.num_ids);
    run.ids_end = min(max(run.ids_end, 0), params.by_key.num_ids);
    num_chunks = (run.ids_end - run.ids_begin + 31) / 32;
    if (num_chunks <= 0) return;
    LoadSlices(0);
    const int end = Traits::kCut ? end_query : params.q_len;
    for (int query = FirstVisible(Traits::kCut ? first_query : 0) & kAlign; query < end;
         query = FirstVisible(query + Traits::kBlockM) & kAlign) {
      FindBlock(query, head);
    }
  }

  __device__ __forceinline__ void LoadSlices(int chunk) {
    const int index = run.ids_begin + 32 * chunk + lane;
    mine.Clear();
    if (index >= run.ids_end) return;
    mine.id = min(max(params.by_key.ids[index], 0), params.num_slices - 1);
    mine.Cut(params.slices[mine.id], key_start, last_key);
  }

  // First query at or after `query` that sees some key of the tile, or INT_MAX.
  __device__ __forceinline__ int FirstVisible(int query) {
    int first = INT_MAX;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (num_chunks > 1) LoadSlices(chunk);
      const int candidate = max(max(mine.any_begin, query), 0);
      if (candidate < mine.any_end) first = min(first, candidate);
    }
    return __reduce_min_sync(0xFFFFFFFF, first);
  }

  // Writes the note of a block and sends the one before: whether that is the tile's last shows only
  // now.
  __device__ __forceinline__ void FindBlock(int query, int head) {
    if (found_query >= 0) SendBlock(0, head == found_head ? query : kNoQuery);
    BarrierWait(&shared.q_empty[ring.slot], ring.parity ^ 1);
    NoteBlock(query, head);
    found_query = query;
    found_head = head;
  }

  __device__ __forceinline__ void SendBlock(int flags, int next_query) {
    if (lane == 0) {
      if constexpr (Traits::kOrdered) shared.notes[ring.slot].header.next_query = next_query;
      shared.notes[ring.slot].header.flags |= flags;
      const int64_t at = static_cast<int64_t>(found_head) * params.stat_rows + found_query;
      uint64_t* barrier = &shared.q_full[ring.slot];
      BarrierArriveExpect(barrier, Traits::kQBytes + Traits::kStatBytes);
      LoadRows<Traits::kBlockM, Traits::kChunks>(shared.q[ring.slot], q_map, barrier, found_head,
                                                 found_query, kEvictNormal);
      CopyBytes(shared.lse[ring.slot], params.lse + at, Traits::kStatBytes, barrier);
    } else if (kEveryLaneArrives) {
      BarrierArrive(&shared.q_full[ring.slot]);
    }
    if (is_first) OpenTile();
    BarrierWait(&shared.dout_empty[dout_ring.slot], dout_ring.parity ^ 1);
    if (lane == 0) {
      const int64_t at = static_cast<int64_t>(found_head) * params.stat_rows + found_query;
      uint64_t* barrier = &shared.dout_full[dout_ring.slot];
      BarrierArriveExpect(barrier, Traits::kDoutBytes + Traits::kStatBytes);
      LoadRows<Traits::kBlockM, Traits::kVChunks>(shared.dout[dout_ring.slot], dout_map, barrier,
                                                  found_head, found_query, kEvictNormal);
      CopyBytes(shared.delta[dout_ring.slot], params.delta + at, Traits::kStatBytes, barrier);
    }
    is_first = false;
    ring.Advance();
    dout_ring.Advance();
  }

  // Loads the tile's keys and values.
  __device__ __forceinline__ void OpenTile() {
    BarrierWait(&shared.kv_empty, kv_parity ^ 1);
    kv_parity ^= 1;
    if (lane == 0) {
      BarrierArriveExpect(&shared.kv_full, Traits::kKBytes + Traits::kVBytes);
      LoadRows<Traits::kBlockN, Traits::kChunks>(shared.k, k_map, &shared.kv_full, kv_head,
                                                 key_start, kEvictFirst);
      LoadRows<Traits::kBlockN, Traits::kVChunks>(shared.v, v_map, &shared.kv_full, kv_head,
                                                  key_start, kEvictFirst);
    }
  }

  template <int kRows, int kChunks>
  __device__ __forceinline__ void LoadRows(uint8_t* destination, const CUtensorMap& map,
                                           uint64_t* barrier, int head, int row, uint64_t hint) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      CopyBox(destination + chunk * kRows * Traits::kRowBytes, &map, barrier, chunk * kChunk, head,
              row, hint);
    }
  }

  // Consumers free a note with the queries beside it.
  __device__ __forceinline__ void NoteBlock(int query, int head) {
    QueryBlockNote<Traits>& note = shared.notes[ring.slot];
    const int block_end = query + Traits::kBlockM;
    const int query_end = Traits::kCut ? min(block_end, end_query) : block_end;
    bool full = query >= run.full_begin && query_end <= run.full_end;
    int count = 0;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (num_chunks > 1) LoadSlices(chunk);
      const bool touches = max(mine.any_begin, query) < min(mine.any_end, query_end);
      const uint32_t touching = __ballot_sync(0xFFFFFFFF, touches);
      const int position = count + __popc(touching & ((1u << lane) - 1));
      if (touches && position < kMaxInlineSlices) {
        Slice slice = Transposed(params.slices[mine.id]);
        if (Traits::kCut) slice.k_end = min(slice.k_end, end_query);
        note.slices[position] = slice;
      }
      full |= mine.all_begin <= query && query_end <= mine.all_end;
      count += __popc(touching);
    }
    full = __any_sync(0xFFFFFFFF, full) && !partial && query_end == block_end;
    // A block with too many slices hands over the run's whole list.
    if (count > kMaxInlineSlices) count = run.ids_begin - run.ids_end;
    int flags = tile_flags | (full ? 0 : kMaskedBlock);
    if (!full && AnySuspect(query, head)) flags |= kSuspectBlock;
    if (lane == 0) {
      note.header = {query, head, key_start, kv_head, flags, count, run.ids_begin};
      if constexpr (Traits::kOrdered) note.header.rank = rank;
    }
    __syncwarp();
  }

  // Whether some query of the block, or its cotangent, may not be finite.
  __device__ __forceinline__ bool AnySuspect(int query, int head) {
    constexpr int kTiles = (Traits::kBlockM + kStatTile - 1) / kStatTile;
    const int tile = query / kStatTile + lane;
    const bool inside = lane <= kTiles && tile * kStatTile < params.stat_rows;
    const int at = head * (params.stat_rows / kStatTile) + tile;
    return __any_sync(0xFFFFFFFF, inside && params.suspects[at] != 0);
  }

  // Tells consumers something that comes without queries.
  __device__ __forceinline__ void SendNote(int flags) {
    BarrierWait(&shared.q_empty[ring.slot], ring.parity ^ 1);
    if (lane == 0) {
      shared.notes[ring.slot].header = {0, 0, key_start, kv_head, flags, 0, 0};
      if constexpr (Traits::kDocuments) shared.notes[ring.slot].header.end_key = end_key;
    }
    if (kEveryLaneArrives || lane == 0) BarrierArrive(&shared.q_full[ring.slot]);
    ring.Advance();
  }

 public:
  __device__ __forceinline__ QueryProducer(const BackwardKernelParams& params,
                                           const CUtensorMap& q_map, const CUtensorMap& dout_map,
                                           const CUtensorMap& k_map, const CUtensorMap& v_map,
                                           BackwardStorage<Traits>& shared)
      : params(params),
        q_map(q_map),
        dout_map(dout_map),
        k_map(k_map),
        v_map(v_map),
        shared(shared) {}
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PRODUCER_H_
