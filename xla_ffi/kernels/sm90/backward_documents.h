// Masks of short documents: each slice shares neither queries nor keys with another. So a block of
// queries is walked by the few tiles of keys of its document, from the last to the first, and
// nothing is added in global memory: what the block has of dQ goes from tile to tile through L2,
// and is written once, in the type of the queries. Tiles are dealt out in this order and walked
// beside each other, by thread blocks that wait for each other's flags: so what they read of
// queries comes from memory once. Nothing waits for a tile that is dealt out later, so the first
// unfinished tile always proceeds.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENTS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENTS_H_

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_producer.h"
#include "xla_ffi/kernels/sm90/backward_ptx.h"

namespace magi_jax::sm90 {

// Thread blocks that walk documents, and warpgroups of one that make dQ.
constexpr int kDocumentBlocks = 132, kDocumentConsumers = 2;

// A slice, and the rows up to the next one, which see nothing and are seen by nobody.
struct Document {
  static constexpr int kRows = BlockQueries(2 * kChunk), kKeys = TileKeys(2 * kChunk);

  Slice slice;
  int first_query, end_query, first_key, end_key;

  struct Blocks {
    int begin, end;
  };

  // Blocks of queries have one grid, which all tiles share.
  __device__ __forceinline__ int Grid() const { return first_query & ~(kQueryAlignment - 1); }
  __device__ __forceinline__ int NumBlocks() const {
    return (end_query - Grid() + kRows - 1) / kRows;
  }
  __device__ __forceinline__ int NumTiles() const {
    return (end_key - first_key + kKeys - 1) / kKeys;
  }

  // Blocks that a tile walks: those that see it, and all of them in the first tile, which is where
  // their dQ ends.
  __device__ __forceinline__ Blocks BlocksOfTile(int tile) const {
    const int start = first_key + tile * kKeys;
    LaneKeySlice seen;
    seen.Cut(slice, start, min(start + kKeys, end_key) - 1);
    const int begin = tile == 0 ? first_query : max(seen.any_begin, first_query);
    const int end = tile == 0 ? end_query : min(seen.any_end, end_query);
    if (begin >= end) return {0, 0};
    return {(begin - Grid()) / kRows, (end - 1 - Grid()) / kRows + 1};
  }

  __device__ __forceinline__ int BlocksOfHead() const {
    int blocks = 0;
    for (int tile = 0; tile < NumTiles(); ++tile) {
      const Blocks walked = BlocksOfTile(tile);
      blocks += walked.end - walked.begin;
    }
    return blocks;
  }
};

__device__ __forceinline__ bool IsEmpty(const Slice& slice) {
  return slice.q_start >= slice.q_end || slice.k_start >= slice.k_end;
}

__device__ __forceinline__ Document DocumentOf(const BackwardKernelParams& params, int index) {
  Slice slice = params.slices[index];
  // Whatever they are, all who ask find that the same tiles walk a block: no sum overflows.
  constexpr int kFarthest = 1 << 30;
  slice.d_min = min(max(slice.d_min, -kFarthest), kFarthest);
  slice.d_max = min(max(slice.d_max, -kFarthest), kFarthest);
  const bool last = index + 1 >= params.num_slices || IsEmpty(params.slices[index + 1]);
  const Slice next = last ? Slice{params.q_len, 0, params.k_len} : params.slices[index + 1];
  const bool first = index == 0;
  Document document = {slice, first ? 0 : slice.q_start, min(next.q_start, params.q_len),
                       first ? 0 : slice.k_start, min(next.k_start, params.k_len)};
  if (params.query_ptr != nullptr) {
    // Tiles of queries without a slice belong to nobody.
    const int size = params.query_tile_size;
    const int end_before = first ? 0 : params.slices[index - 1].q_end;
    document.first_query =
        min(slice.q_start, max(slice.q_start / size, (end_before + size - 1) / size) * size);
    document.end_query = min(document.end_query, (slice.q_end + size - 1) / size * size);
  }
  return document;
}

// The producer warp: the tiles of a document, and the blocks of some heads in each.
template <typename Traits>
struct DocumentProducer : QueryProducer<Traits> {
  using Base = QueryProducer<Traits>;
  using Base::Base;
  using Base::found_head;
  using Base::found_query;
  using Base::key_start;
  using Base::kv_head;
  using Base::lane;
  using Base::last_key;
  using Base::mine;
  using Base::params;
  using Base::partial;
  using Base::ring;
  using Base::shared;
  using Base::tile_flags;

  __device__ void Work() {
    const int num_work = *params.num_items * params.num_kv_heads;
    const int group = params.num_heads / params.num_kv_heads;
    // Tiles wait for others that are dealt out before them, so a thread block takes one only when
    // it can begin it.
    for (int work = TakeWork(); work < num_work; work = TakeWork()) {
      kv_head = work % params.num_kv_heads;
      const WorkItem item = params.items[work / params.num_kv_heads];
      Walk(DocumentOf(params, item.tile), item.first_query, item.end_query,
           kv_head * group + item.head, item.num_heads);
    }
    Base::SendNote(kEndOfWork);
  }

 private:
  Document::Blocks lane_blocks;  // of the tiles that are walked before, the next in lane 0

  __device__ __forceinline__ int TakeWork() { return Base::Broadcast(Base::TakeItem()); }

  __device__ __forceinline__ Document::Blocks BlocksOfLane(const Document& document, int tile) {
    if (tile + lane >= document.NumTiles()) return {0, 0};
    return document.BlocksOfTile(tile + lane);
  }

  // The tile that has walked a block before, or the number of tiles.
  __device__ __forceinline__ int TileBefore(const Document& document, int tile, int block) {
    Document::Blocks blocks = lane_blocks;
    for (int first = tile + 1; first < document.NumTiles(); first += 32) {
      if (first > tile + 1) blocks = BlocksOfLane(document, first);
      const uint32_t walked =
          __ballot_sync(0xFFFFFFFF, blocks.begin <= block && block < blocks.end);
      if (walked != 0) return first + __ffs(walked) - 1;
    }
    return document.NumTiles();
  }

  __device__ void Walk(const Document& document, int tile, int first_slot, int first_head,
                       int num_heads) {
    Base::end_key = document.end_key;
    key_start = document.first_key + tile * Traits::kBlockN;
    last_key = min(key_start + Traits::kBlockN, document.end_key) - 1;
    if (lane == 0) {
#pragma unroll
      for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
        PrefetchBox(&this->k_map, chunk * kChunk, kv_head, key_start);
        PrefetchBox(&this->v_map, chunk * kChunk, kv_head, key_start);
      }
    }
    partial = last_key - key_start + 1 < Traits::kBlockN;
    mine.Cut(document.slice, key_start, last_key);
    const bool adds = params.parts[key_start / Traits::kBlockN] > 1 ||
                      params.parts[last_key / Traits::kBlockN] > 1;
    tile_flags = adds ? kSplitTile : 0;
    found_query = -1;
    Base::is_first = true;
    const Document::Blocks blocks = document.BlocksOfTile(tile);
    lane_blocks = BlocksOfLane(document, tile + 1);
    for (int i = 0; i < num_heads; ++i) {
      for (int block = blocks.begin; block < blocks.end; ++block)
        FindBlock(document, tile, first_head + i, block, first_slot + block);
    }
    if (found_query >= 0) {
      Base::SendBlock(kLastBlock, kNoQuery);
    } else {
      Base::SendNote(kEmptyTile | tile_flags);
    }
  }

  __device__ __forceinline__ void FindBlock(const Document& document, int tile, int head, int block,
                                            int slot) {
    if (found_query >= 0) Base::SendBlock(0, kNoQuery);
    BarrierWait(&shared.q_empty[ring.slot], ring.parity ^ 1);
    const int query = document.Grid() + block * Traits::kBlockM, end = query + Traits::kBlockM;
    const bool full = !partial && mine.all_begin <= query && end <= mine.all_end;
    const bool touches = max(mine.any_begin, query) < min(mine.any_end, end);
    int flags = tile_flags | (full ? 0 : kMaskedBlock);
    const int before = TileBefore(document, tile, block);
    if (before < document.NumTiles()) flags |= kBeganBefore;
    if (tile > 0) flags |= kEndsLater;
    if (!full && Base::AnySuspect(query, head)) flags |= kSuspectBlock;
    if (lane == 0) {
      QueryBlockNote<Traits>& note = shared.notes[ring.slot];
      note.slices[0] = Transposed(document.slice);
      note.header = {query, head, key_start, kv_head, flags, touches, 0};
      note.header.first_row = max(query, document.first_query);
      note.header.end_row = min(end, document.end_query);
      note.header.end_key = document.end_key;
      note.header.sum_slot = slot;
      note.header.flag_before = document.NumTiles() - before;
      note.header.flag_after = document.NumTiles() - tile;
    }
    __syncwarp();
    found_query = query;
    found_head = head;
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_DOCUMENTS_H_
