// What the backward kernel gets from the host, how its shared memory is laid out, and the shape of
// one instantiation.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PARAMS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PARAMS_H_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm90/backward.h"
#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/tma.h"

namespace magi_jax::sm90 {

// How the two consumer warpgroups share a tile of keys and a block of queries; dK, dV and logits of
// a warpgroup have to fit in its registers.
enum class Sharing {
  kTall,     // 64 keys each, blocks of 128 queries; each makes dQ of half of the queries
  kColumns,  // 64 keys each, blocks of 80 queries; each makes half of dQ's columns
  kPaired,   // one has dV of 64 keys, the other dK, see backward_paired.h
};

constexpr Sharing SharingOf(int head_dim) {
  return head_dim <= kChunk       ? Sharing::kTall
         : head_dim <= 2 * kChunk ? Sharing::kColumns
                                  : Sharing::kPaired;
}

// Queries of a block, by which work is dealt out, and keys of a tile.
constexpr int BlockQueries(int head_dim) {
  return SharingOf(head_dim) == Sharing::kTall ? 128 : 64;
}
constexpr int TileKeys(int head_dim) { return SharingOf(head_dim) == Sharing::kPaired ? 64 : 128; }

// What fits where dQ is made transposed: blocks of kColumns, but those of documents and short
// runs.
constexpr int kLongQueries = 80;

// Whether tiles' walks may be cut into segments of queries: what a walk of 65536 reads of a head
// does not fit in L2, but at narrow heads it does.
constexpr bool CutsWalks(int head_dim, bool soft_cap) {
  return SharingOf(head_dim) == Sharing::kColumns && !soft_cap;
}

// Whether masks of short documents have an instantiation of their own.
constexpr bool TakesDocuments(int head_dim, bool soft_cap) {
  return head_dim == 2 * kChunk && !soft_cap;
}

// Whether masks in which tiles see short runs of queries have an instantiation with shorter blocks,
// which reach less far past the ends of a run. It is the faster one where runs have fewer than
// kLongRun queries in the mean; longer calls, which have not been timed, keep long blocks.
constexpr int kLongRun = 1600, kMostShortQueries = 16384;  // of a run, and of a call
constexpr bool TakesShortRuns(int head_dim, bool soft_cap) {
  return TakesDocuments(head_dim, soft_cap);
}

// One instantiation. A tile has kBlockN keys of one kv head; its gradients stay in registers while
// the tile walks the queries of all heads of the group, kBlockM at a time.
template <typename ElementT, int kHeadDimT, int kVHeadDimT, bool kSoftCapT, bool kOrderedT,
          bool kCutT = false, bool kDocumentsT = false, bool kShortT = false>
struct BackwardTraits {
  using Element = ElementT;
  static constexpr int kHeadDim = kHeadDimT;       // of queries and keys
  static constexpr int kVHeadDim = kVHeadDimT;     // of values
  static constexpr bool kSoftCap = kSoftCapT;      // logits are capped
  static constexpr bool kOrdered = kOrderedT;      // sums have a fixed order
  static constexpr bool kCut = kCutT;              // items may have some of the queries
  static constexpr bool kDocuments = kDocumentsT;  // items are documents
  static constexpr bool kTall = SharingOf(kHeadDim) == Sharing::kTall;
  static constexpr bool kPaired = SharingOf(kHeadDim) == Sharing::kPaired;
  // Has an order of products of its own, see backward_long.h.
  static constexpr bool kLong = SharingOf(kHeadDim) == Sharing::kColumns && !kDocuments;
  // dQ is made transposed, which takes other numbers of queries than multiples of 64.
  static constexpr bool kTransposed = kLong && !kShortT;
  static_assert(kPaired || kVHeadDim == kHeadDim);

  // dS is made with the scale in it, which spares a product for each element of dQ. float16 has not
  // the range for it: dS would lose bits where attention is spread over many keys.
  static constexpr bool kScaledDifference = std::is_same_v<Element, __nv_bfloat16>;

  // Sums of split tiles go through the copy engine, as dQ does; where their order is fixed threads
  // add them, and know when they have.
  static constexpr bool kCopiesSums = !kPaired && !kOrdered && !kDocuments;

  static constexpr int kConsumers = 2;  // warpgroups
  // Places of a consumer's dQ. Documents have two, so that what earlier tiles gave to a block is
  // brought while the block before is still computed.
  static constexpr int kGradientPlaces = kDocuments ? 2 : 1;
  static constexpr int kAllGradientPlaces = kConsumers * kGradientPlaces;
  static constexpr int kBlockM = kTransposed ? kLongQueries : BlockQueries(kHeadDim);
  static constexpr int kBlockN = TileKeys(kHeadDim);
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerThreads = 128 * kConsumers;
  // Arrivals by which the producer warp gives, a warpgroup gives, and all consumers give back.
  static constexpr int kProducerArrivals = kEveryLaneArrives ? 32 : 1;
  static constexpr int kGroupArrivals = kEveryLaneArrives ? 128 : 4;
  static constexpr int kConsumerArrivals = kGroupArrivals * kConsumers;
  // By which the warps that bring and take dQ of documents give notes back.
  static constexpr int kSumArrivals = kDocuments ? (kConsumers + 1) * kProducerArrivals : 0;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  static constexpr int kChunks = (kHeadDim + kChunk - 1) / kChunk;
  static constexpr int kVChunks = (kVHeadDim + kChunk - 1) / kChunk;
  static constexpr int kRowBytes = kChunk * 2;
  static constexpr int kQBytes = kBlockM * kRowBytes * kChunks;
  static constexpr int kDoutBytes = kBlockM * kRowBytes * kVChunks;
  static constexpr int kKBytes = kBlockN * kRowBytes * kChunks;
  static constexpr int kVBytes = kBlockN * kRowBytes * kVChunks;
  static constexpr int kStatBytes = kBlockM * 4;

  // Blocks in shared memory, of queries and of output cotangents: what fits.
  static constexpr int kStages = kPaired || kTransposed ? 2 : 3;
  static constexpr int kDoutStages = kChunks > 3 ? 1 : 2;

  // What a warpgroup hands to the copy engine of a block's dQ at a time: all of its own, but where
  // it has more than a chunk of columns, and makes these in two parts. Columns past the head dim
  // are zero, and the copy engine leaves them out.
  static constexpr int kGradientRows = kTransposed ? kBlockM : 64;
  static constexpr int kSumRows = 64;  // of dK and dV
  static constexpr int kGradientColumns = kChunk;
  static constexpr int kRestColumns = kPaired ? kHeadDim / 2 - kChunk : 0;  // of the second part
  // Notes to each warp that adds, in turns: with two, a block's is written before its place is
  // free.
  static constexpr int kNoteTurns = kLong ? 2 : 1;
  static constexpr int kGradientBox = 32;  // columns of float32 that fill 128 bytes
  static constexpr int kRoundedRows = 8;   // of documents, that the copy engine writes at a time
  // Documents hand over rounded rows, or sums in as many bytes, see backward_sums.h.
  static constexpr int kGradientBytes =
      kGradientRows * (kDocuments ? kGradientColumns * 2 + 16 : kGradientColumns * 4);
};

// Flags of a block besides those of BlockFlags.
constexpr int kEmptyTile = 16;     // no block: the gradients of the tile are zero
constexpr int kSplitTile = 64;     // other items add to the gradients of the tile
constexpr int kSuspectBlock = 32;  // has a mask, and queries or cotangents may not be finite

// Of a document's block: tiles walked before this one gave to its dQ, others will.
constexpr int kBeganBefore = 128, kEndsLater = 256;

constexpr int kStatTile = 32;  // queries that share a word of BackwardKernelParams::suspects
constexpr int kQueryAlignment =
    4;  // blocks of queries start at a multiple of it, as copies of statistics need

constexpr int kNoQuery = 0x7FFFFFFF;

struct QueryBlockHeader {
  int32_t query_start, head;   // of the first row
  int32_t key_start, kv_head;  // of the tile
  int32_t flags, num_slices, ids_begin;
  // Where sums have a fixed order: the tile's place in it, and where the head's next block starts,
  // kNoQuery after its last.
  int32_t rank, next_query;
  // Of documents: rows of the block that are the document's, the end of its keys, where dQ is kept
  // between tiles, and for what its flag there stands before this tile and after it.
  int32_t first_row, end_row, end_key, sum_slot, flag_before, flag_after;
};

// Beside the queries of a block: which cells are visible. Slices are transposed, keys in the place
// of queries.
template <typename Traits>
struct QueryBlockNote {
  QueryBlockHeader header;
  Slice slices[Traits::kDocuments ? 1 : kMaxInlineSlices];
};

// What a note's part is added to.
enum GradientTarget : int32_t { kToQueries, kToKeys, kToValues };

struct GradientNote {
  int32_t row, head;  // row < 0: no more gradients
  int32_t rank, next_row;
  int32_t column, columns;  // of a part of the consumer's columns, where it makes them in two
  GradientTarget target;
};

// What two consumers that share a tile of wide heads tell each other, besides.
template <typename Traits>
struct PairExchange {
  float4 probabilities[Traits::kBlockM / 8][128];  // [group of 4][thread]
  GradientNote pending_notes[Traits::kConsumers][2];
  uint8_t spoiled_queries[Traits::kBlockM];  // rows of dout that held inf or NaN
  uint64_t full, empty;                      // of probabilities
  uint64_t vote;
};

struct NoExchange {};

template <typename Traits>
struct BackwardStorage {
  alignas(1024) uint8_t k[Traits::kKBytes];                             // [chunk][kBlockN rows]
  alignas(1024) uint8_t v[Traits::kVBytes];                             // likewise
  alignas(1024) uint8_t q[Traits::kStages][Traits::kQBytes];            // [chunk][kBlockM rows]
  alignas(1024) uint8_t dout[Traits::kDoutStages][Traits::kDoutBytes];  // likewise
  // Two slots, with a chunk for each 64 keys.
  alignas(1024) uint8_t ds[2][Traits::kBlockN / 64][Traits::kBlockM * 128];
  // [box of 32 columns][kBlockM rows] in each place.
  alignas(1024) uint8_t dq[Traits::kConsumers][Traits::kGradientPlaces * Traits::kGradientBytes];
  alignas(128) float lse[Traits::kStages]
                        [Traits::kBlockM];  // times log2(e); +inf for rows without keys
  alignas(128) float delta[Traits::kDoutStages][Traits::kBlockM];
  alignas(16) std::conditional_t<Traits::kPaired, PairExchange<Traits>, NoExchange> pair;
  uint8_t spoiled_keys[Traits::kBlockN];  // of kSpoiledKeys, kSpoiledValues, see backward_poison.h
  QueryBlockNote<Traits> notes[Traits::kStages];
  GradientNote gradient_notes[Traits::kNoteTurns][Traits::kConsumers];
  uint64_t kv_full, kv_empty;
  uint64_t q_full[Traits::kStages], q_empty[Traits::kStages];
  uint64_t dout_full[Traits::kDoutStages], dout_empty[Traits::kDoutStages];
  // Of place p and consumer c at p * kConsumers + c.
  uint64_t dq_full[Traits::kAllGradientPlaces], dq_empty[Traits::kAllGradientPlaces];
  uint64_t sums_full[Traits::kAllGradientPlaces];  // of documents
};

// Position in a ring of kCount slots, with the parity of the phase that is current there.
template <int kCount>
struct StageRing {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++slot == kCount) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Below which query a tile has nothing more to add to a head's dQ, and below which neither it nor
// any tile before it has, as far as it knows.
struct alignas(8) Progress {
  int32_t own, all;
};

// A tile of keys, some of the heads of its group, and some of the queries.
struct WorkItem {
  int32_t tile;                    // or the document
  int16_t head, num_heads;         // the first, counted from the group's first
  int32_t first_query, end_query;  // or the document's tile, and where its first block's dQ is kept
};

struct BackwardKernelParams {
  const Slice* slices;
  TileRuns by_key;
  const float* lse;          // [N, stat_rows], times log2(e)
  const float* delta;        // [N, stat_rows], times scale where Traits::kScaledDifference
  const uint32_t* suspects;  // [N, stat_rows / kStatTile], see backward_poison.h
  int stat_rows;
  WorkItem* items;  // of each kv head
  int* num_items;
  int* parts;    // items of a tile of keys and kv head, of each tile
  int* counter;  // zero at launch
  // Where sums have a fixed order, else null; see backward_order.h.
  Progress* progress;  // [kConsumers, N, tiles of keys]
  int* turns;          // [kConsumers, K, tiles of keys]
  int* tile_order;     // tiles of keys as they add
  int* first_queries;
  int *num_cut_items, *cut_counter;      // in their place where walks are cut, or null
  int *num_short_items, *short_counter;  // and where runs are short, or null
  // Documents, else null.
  int *num_document_items, *document_counter;
  uint8_t* query_sums;                 // [sum_slots, N, kConsumers, kGradientBytes]
  int* sum_flags;                      // [sum_slots, N, kConsumers], zero where documents use them
  int sum_slots, most_document_items;  // that there is room for
  void* dq_rounded;                    // [T, N, H] in the type of the operands, or null
  // Where tiles of queries in which none sees a key keep what dq_rounded has, the walk of these
  // tiles, else null.
  const int* query_ptr;
  int query_tile_size;
  void* dk;
  void* dv;
  float* dk_sum;  // of split tiles; zero at launch there
  float* dv_sum;
  bool gradients_are_f32;
  float scale;
  float transform_scale, cap_log2;  // 2 log2(e) scale / cap and cap log2(e), where kSoftCap
  int q_len, k_len, num_heads, num_kv_heads, num_slices;
  int parts_per_tile;                  // tiles of keys that cover one table tile
  int least_item_blocks, item_blocks;  // that an item may walk, and should not walk more of
  int section_items;    // at least so many are dealt out before the next kv heads begin
  int segment_queries;  // a tile's walk may be cut at multiples of it
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PARAMS_H_
