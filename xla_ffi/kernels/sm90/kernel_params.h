// What the kernel gets from the host, how its shared memory is laid out, and the shape of one
// instantiation.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_KERNEL_PARAMS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_KERNEL_PARAMS_H_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm90/tma.h"

namespace magi_jax::sm90 {

// One instantiation. A tile has kBlockM rows, each a (token, head) pair: up to 8 heads of a group
// are packed, so that a tile of a grouped model spans few tokens and loads keys once for all its
// heads.
template <typename ElementT, int kHeadDimT, int kVHeadDimT, int kBlockNT, int kQStagesT,
          bool kLazyT, int kStagesT = 2, bool kTurnsT = true>
struct ForwardTraits {
  using Element = ElementT;
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
  static constexpr int kHeadDim = kHeadDimT;
  static constexpr int kVHeadDim = kVHeadDimT;
  static constexpr int kBlockN = kBlockNT;  // keys of a block
  static constexpr int kStages = kStagesT;  // key and value blocks in shared memory
  static constexpr bool kLazy = kLazyT;     // keep the references of rows while sums stay in range
  static constexpr bool kTurns = kTurnsT;   // consumers take turns to issue products

  static constexpr int kConsumers = 2;             // warpgroups of 64 rows
  static constexpr int kBlockM = 64 * kConsumers;  // rows of a tile
  static constexpr int kQStages = kQStagesT;       // tiles of queries in shared memory
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kProducerRegisters = kVHeadDim > 128 ? 64 : 72;
  static constexpr int kConsumerRegisters = kVHeadDim > 128 ? 224 : 216;
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 512,
                "the register file, per thread of a warpgroup");

  static constexpr int kBadWords = (kBlockN + 31) / 32;
  static constexpr int kChunks = (kHeadDim + kChunk - 1) / kChunk;
  static constexpr int kVChunks = (kVHeadDim + kChunk - 1) / kChunk;
  static constexpr int kRowBytes = kChunk * 2;
  static constexpr int kQBytes = kBlockM * kRowBytes * kChunks;
  static constexpr int kKBytes = kBlockN * kRowBytes * kChunks;
  static constexpr int kVBytes = kBlockN * kRowBytes * kVChunks;

  static_assert(kBlockN % 8 == 0, "swizzle atoms have 8 rows");
  static_assert(kHeadDim % 16 == 0 && kVHeadDim % 32 == 0 && kBlockN % 16 == 0);
};

// What the producer tells consumers about a block of keys.
enum BlockFlags : int32_t {
  kFirstBlock =
      1,  // of its tile: the outputs of the tile before are complete once earlier products are
  kLastBlock = 2,    // of its tile: the queries are free once QK is done
  kMaskedBlock = 4,  // some cell is hidden
  kEndOfWork = 8,    // no block; the consumer is done
};

constexpr int kInspectors = 3;  // warps that look through values, beside the producer warp
constexpr int kMaxInlineSlices = 16;
constexpr int kBlockSlots =
    4;  // two more than the stages of any instantiation: see Producer::NoteBlock

struct BlockHeader {
  int32_t key_start, flags, num_slices,
      ids_begin;  // ids_begin for blocks with more slices than fit inline
};

struct BlockNote {
  BlockHeader header;
  Slice slices[kMaxInlineSlices];
};

struct TileNote {
  int32_t token, head;  // of row 0
};

template <typename Traits>
struct SharedStorage {
  alignas(1024) uint8_t q[Traits::kQStages][Traits::kQBytes];  // [warpgroup][chunk][64 rows]
  alignas(1024) uint8_t k[Traits::kStages][Traits::kKBytes];   // [chunk][kBlockN rows]
  alignas(1024) uint8_t v[Traits::kStages][Traits::kVBytes];   // [chunk][kBlockN rows]
  BlockNote blocks[kBlockSlots];
  TileNote tiles[Traits::kQStages];
  // Found by each inspector in masked blocks; the keys, by column, only where it found any.
  uint32_t bad_keys[Traits::kStages][kInspectors][Traits::kBadWords];
  bool has_bad_keys[Traits::kStages][kInspectors + 1];
  uint64_t q_full[Traits::kQStages], q_empty[Traits::kQStages];
  uint64_t k_full[Traits::kStages], k_empty[Traits::kStages];
  uint64_t v_full[Traits::kStages], v_empty[Traits::kStages];
  uint64_t v_clean[Traits::kStages];  // values of masked blocks are finite
};

struct KernelParams {
  const Slice* slices;
  TileRuns by_query;
  void* out;
  float* lse;
  int* counter;  // zero at launch; null: tiles are dealt out in turn
  int q_len, k_len, num_heads, num_slices;
  float scale;
  bool out_is_f32, accumulate;
  bool transform;  // logits need TransformLogits, with
  float transform_scale,
      cap_log2;  // 2 log2(e) scale / cap and cap log2(e); uncapped, log2(e) scale and 0

  // Work: (section of kv heads, rank of the table tile, kv head, part of the group, part of the
  // table tile).
  int pack_log2;        // heads of a tile, log2
  int parts_per_group;  // tiles that cover the heads of one group
  int parts_per_tile;   // work items that cover the tokens of one table tile
  int table_tile_size;
  int num_kv_heads, section_kv_heads;
  int num_work;
};

// Slot of the n-th use of a ring of kCount slots, and the parity of the phase that is then current
// there.
template <int kCount>
__device__ __forceinline__ int SlotOf(uint32_t n) {
  static_assert((kCount & (kCount - 1)) == 0);
  return n % kCount;
}

template <int kCount>
__device__ __forceinline__ uint32_t ParityOf(uint32_t n) {
  return n / kCount & 1;
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_KERNEL_PARAMS_H_
