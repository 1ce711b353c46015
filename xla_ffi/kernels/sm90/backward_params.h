// What the backward kernel gets from the host, how its shared memory is laid out, and the shape of
// one instantiation.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PARAMS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PARAMS_H_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/tma.h"

namespace magi_jax::sm90 {

// One instantiation. A tile has kBlockN keys of one kv head; its gradients stay in registers while
// the tile walks the queries of all heads of the group, kBlockM at a time.
template <typename ElementT, int kHeadDimT, bool kSoftCapT, bool kOrderedT = false,
          int kStagesT = 3, int kDoutStagesT = 2>
struct BackwardTraits {
  using Element = ElementT;
  static constexpr int kHeadDim = kHeadDimT;        // of queries, keys and values
  static constexpr bool kSoftCap = kSoftCapT;       // logits are capped
  static constexpr bool kOrdered = kOrderedT;       // sums have a fixed order
  static constexpr int kStages = kStagesT;          // query blocks in shared memory
  static constexpr int kDoutStages = kDoutStagesT;  // blocks of output cotangents

  // dS is made with the scale in it, which spares a product for each element of dQ. float16 has not
  // the range for it: dS would lose bits where attention is spread over many keys.
  static constexpr bool kScaledDifference = std::is_same_v<Element, __nv_bfloat16>;

  static constexpr int kConsumers = 2;             // warpgroups
  static constexpr int kBlockM = 64;               // queries of a block
  static constexpr int kBlockN = 64 * kConsumers;  // keys of a tile
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  static constexpr int kChunks = (kHeadDim + kChunk - 1) / kChunk;
  static constexpr int kRowBytes = kChunk * 2;
  static constexpr int kQBytes = kBlockM * kRowBytes * kChunks;
  static constexpr int kKBytes = kBlockN * kRowBytes * kChunks;
  static constexpr int kStatBytes = kBlockM * 4;

  // Each warpgroup makes this many of the columns of a block's dQ: a chunk, or half of the only
  // one. Columns past the head dim are zero, and the copy engine leaves them out.
  static_assert(kBlockM == 64 && kChunks <= 2);
  static constexpr int kGradientColumns = kChunks == 1 ? kChunk / 2 : kChunk;
  static constexpr int kGradientBox = 32;  // columns of float32 that fill 128 bytes
  static constexpr int kGradientBytes = kBlockM * kGradientColumns * 4;
};

// Flags of a block besides those of BlockFlags.
constexpr int kEmptyTile = 16;     // no block: the gradients of the tile are zero
constexpr int kSplitTile = 64;     // other items add to the gradients of the tile
constexpr int kSuspectBlock = 32;  // has a mask, and queries or cotangents may not be finite

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
};

// Beside the queries of a block: which cells are visible. Slices are transposed, keys in the place
// of queries.
struct QueryBlockNote {
  QueryBlockHeader header;
  Slice slices[kMaxInlineSlices];
};

struct GradientNote {
  int32_t row, head;  // row < 0: no more gradients
  int32_t rank, next_row;
};

template <typename Traits>
struct BackwardStorage {
  alignas(1024) uint8_t k[Traits::kKBytes];                          // [chunk][kBlockN rows]
  alignas(1024) uint8_t v[Traits::kKBytes];                          // likewise
  alignas(1024) uint8_t q[Traits::kStages][Traits::kQBytes];         // [chunk][kBlockM rows]
  alignas(1024) uint8_t dout[Traits::kDoutStages][Traits::kQBytes];  // likewise
  alignas(1024)
      uint8_t ds[2][Traits::kConsumers][Traits::kBlockM * 128];  // a chunk of 64 keys per warpgroup
  alignas(1024)
      uint8_t dq[Traits::kConsumers][Traits::kGradientBytes];  // [box of 32 columns][kBlockM rows]
  alignas(128) float lse[Traits::kStages]
                        [Traits::kBlockM];  // times log2(e); +inf for rows without keys
  alignas(128) float delta[Traits::kDoutStages][Traits::kBlockM];
  uint8_t spoiled_keys[Traits::kBlockN];  // rows of k that held inf or NaN, see backward_poison.h
  QueryBlockNote notes[Traits::kStages];
  GradientNote gradient_notes[Traits::kConsumers];
  uint64_t kv_full, kv_empty;
  uint64_t q_full[Traits::kStages], q_empty[Traits::kStages];
  uint64_t dout_full[Traits::kDoutStages], dout_empty[Traits::kDoutStages];
  uint64_t dq_full[Traits::kConsumers], dq_empty[Traits::kConsumers];
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

// A tile of keys and some of the heads of its group.
struct WorkItem {
  int32_t tile;
  int16_t head, num_heads;  // the first, counted from the group's first
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
  int* parts;    // into which the heads of a group are split, of each tile of keys
  int* counter;  // zero at launch
  // Where sums have a fixed order, else null; see backward_order.h.
  Progress* progress;  // [kConsumers, N, tiles of keys]
  int* turns;          // [kConsumers, K, tiles of keys]
  int* tile_order;     // tiles of keys as they add
  int* first_queries;
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
  int section_items;  // at least so many are dealt out before the next kv heads begin
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PARAMS_H_
