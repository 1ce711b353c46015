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
#include "xla_ffi/kernels/sm90/split_plan.h"
#include "xla_ffi/kernels/sm90/tma.h"

namespace magi_jax::sm90 {

// Whether all lanes of a warp arrive at an mbarrier, or one for its warp after __syncwarp, which
// orders the same. racecheck follows an mbarrier only from the lanes that arrive, so it is run on
// kernels in which all do; they are up to 5 % slower.
#ifdef MAGI_JAX_EVERY_LANE_ARRIVES
constexpr bool kEveryLaneArrives = true;
#else
constexpr bool kEveryLaneArrives = false;
#endif

constexpr int kArrivals = kEveryLaneArrives ? 32 : 1;  // of a warp

// What the two consumers take turns in: issuing products, or softmax, where exponentials take
// longer than products. Without turns both would come to want the same unit at the same time.
enum class Turns { kProducts, kSoftmax };

// One instantiation. A tile has kBlockM rows, each a (token, head) pair: up to 8 heads of a group
// are packed, so that a tile of a grouped model spans few tokens and loads keys once for all its
// heads.
template <typename ElementT, int kHeadDimT, int kVHeadDimT, int kBlockNT, int kQStagesT,
          bool kLazyT, int kStagesT = 2, Turns kTurnsT = Turns::kProducts>
struct ForwardTraits {
  using Element = ElementT;
  static constexpr int kHeadDim = kHeadDimT;
  static constexpr int kVHeadDim = kVHeadDimT;
  static constexpr int kBlockN = kBlockNT;  // keys of a block
  static constexpr int kStages = kStagesT;  // key and value blocks in shared memory
  static constexpr bool kLazy = kLazyT;     // keep the references of rows while sums stay in range
  // Of a block of which no more can be visible, no more is exponentiated and multiplied with
  // values.
  static constexpr int kShortKeys = (kBlockN / 2 + 15) / 16 * 16;
  // A thread's sum over its columns of a block up to which no probability is too large for PV.
  static constexpr float kMostLazySum = std::is_same_v<Element, __half> ? 0x1p15f : 0x1p60f;
  static constexpr bool kPairs = true;                  // thread blocks may share keys in pairs
  static constexpr bool kTellsApart = kHeadDim == 128;  // see ReleaseShared
  static constexpr bool kTransform = false;             // logits need TransformLogits
  static constexpr bool kSplits = kHeadDim >= kLeastSplitHeadDim;  // walks may be cut
  static constexpr Turns kTurns = kTurnsT;

  static constexpr int kConsumers = 2;             // warpgroups of 64 rows
  static constexpr int kBlockM = 64 * kConsumers;  // rows of a tile
  static constexpr int kQStages = kQStagesT;       // tiles of queries in shared memory
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  // Registers of a thread. What the consumers gain, the others give up: together they have what
  // the kernel was launched with, 168 for each warpgroup. Asking for more never returns.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168);

  static constexpr int kChunks = (kHeadDim + kChunk - 1) / kChunk;
  static constexpr int kVChunks = (kVHeadDim + kChunk - 1) / kChunk;
  static constexpr int kRowBytes = kChunk * 2;
  static constexpr int kQBytes = kBlockM * kRowBytes * kChunks;
  static constexpr int kKBytes = kBlockN * kRowBytes * kChunks;
  static constexpr int kVBytes = kBlockN * kRowBytes * kVChunks;

  static_assert(kBlockN % 16 == 0, "half of a block is swizzle atoms of 8 rows");
  static_assert(kHeadDim % 16 == 0 && kVHeadDim % 32 == 0 && kBlockN % 16 == 0);
};

// The same for logits that need TransformLogits.
template <typename Traits>
struct Transforming : Traits {
  static constexpr bool kTransform = true;
};

// The same for calls whose walks are never cut.
template <typename Traits>
struct Whole : Traits {
  static constexpr bool kSplits = false;
};

// The same for calls whose thread blocks never share keys.
template <typename Traits>
struct Single : Traits {
  static constexpr bool kPairs = false;
};

// What the walker tells about a block of keys.
enum BlockFlags : int32_t {
  kFirstBlock =
      1,  // of its tile: the outputs of the tile before are complete once earlier products are
  kLastBlock = 2,    // of its tile: the queries are free once QK is done
  kMaskedBlock = 4,  // some cell is hidden
  kShortBlock = 16,  // and no cell is visible from kShortKeys on
  kEndOfWork = 8,    // no block; the consumer is done
  // Set by consumers:
  kClosesTile = 32,       // first of a tile, and not of all tiles
  kKeepsReferences = 64,  // the next block may keep the references of rows
};

constexpr int kMaxInlineSlices = 16;  // of a note of the backward
constexpr int kNoteSlices = 8;        // of a note of the forward
constexpr int kNotes = 8;             // how many blocks the walker may be ahead of the consumers
constexpr int kAnswers = 4;  // how many tiles a pair's first walker may be ahead of the second's

struct alignas(16) BlockHeader {
  int32_t key_start, flags;
  int32_t num_slices, ids_begin;  // negative: more than fit, in `ids` from ids_begin on
};

// Rows of a tile, and which piece of their keys, in few registers.
struct TileNote {
  int32_t token;  // of row 0; past the last where nothing is to be written
  // Head of row 0 (16 bits), piece (3), number of pieces less one (3), place of the first (10).
  uint32_t packed;

  static __device__ __forceinline__ TileNote Of(int token, int head) {
    return {token, static_cast<uint32_t>(head)};
  }
  __device__ __forceinline__ void Cut(int piece, int cuts, int first_place) {
    packed = Head() | piece << 16 | (cuts - 1) << 19 | static_cast<uint32_t>(first_place) << 22;
  }
  __device__ __forceinline__ void MakeWhole() { packed &= 0xFFFF; }
  __device__ __forceinline__ int Head() const { return packed & 0xFFFF; }
  __device__ __forceinline__ bool IsPiece() const { return packed >> 16 != 0; }
  __device__ __forceinline__ int Piece() const { return packed >> 16 & 7; }
  __device__ __forceinline__ int Cuts() const { return (packed >> 19 & 7) + 1; }
  __device__ __forceinline__ int FirstPlace() const { return packed >> 22; }
};
static_assert(kMostCuts <= 8 && kMostPieces <= 1024);
constexpr int kMostHeads = 0xFFFF;

// What is known of a block of keys before it is loaded.
struct BlockNote {
  BlockHeader header;
  TileNote tile;
  int32_t kv_head;
  Slice slices[kNoteSlices];
};

template <typename Traits>
struct SharedStorage {
  alignas(1024) uint8_t q[Traits::kQStages][Traits::kQBytes];  // [warpgroup][chunk][64 rows]
  alignas(1024) uint8_t k[Traits::kStages][Traits::kKBytes];   // [chunk][kBlockN rows]
  alignas(1024) uint8_t v[Traits::kStages][Traits::kVBytes];   // [chunk][kBlockN rows]
  BlockNote notes[kNotes];
  uint64_t note_full[kNotes], note_empty[kNotes];
  int answers[kAnswers];  // what the first walker of a pair tells the second
  uint64_t answer_full[kAnswers], answer_empty[kAnswers];
  uint64_t q_full[Traits::kQStages], q_empty[Traits::kQStages];
  uint64_t k_full[Traits::kStages], k_empty[Traits::kStages];
  uint64_t v_full[Traits::kStages], v_empty[Traits::kStages];
};

struct KernelParams {
  const void *q, *k, *v;  // for rows that are done again
  const Slice* slices;
  TileRuns by_query;
  void* out;
  float* lse;
  float* row_max;  // null: not asked for
  int* counter;    // zero at launch; null: who works on which tile is fixed
  int q_len, k_len, num_heads, num_slices;
  float scale;
  float move_threshold;  // growth of a row's maximum that moves its reference, in powers of two
  bool out_is_f32;
  bool accumulates;  // `out` and `lse` hold what other calls gave, which tiles without keys keep
  bool merges;       // and others are merged with, in float32
  bool transform;    // logits need TransformLogits, with
  float transform_scale,
      cap_log2;  // 2 log2(e) scale / cap and cap log2(e); uncapped, log2(e) scale and 0

  // Work: (section of kv heads, rank of the table tile, kv head, part of the group, part of the
  // table tile).
  int pack_log2;        // heads of a tile, log2
  int parts_per_group;  // tiles that cover the heads of one group
  int parts_per_tile;   // work items that cover the tokens of one table tile
  int table_tile_size;
  // Thread blocks that take neighbouring tiles of one item and share its keys, 1 or 2. In a pair
  // each loads half of a block of keys, for both.
  int partners;
  int tile_tokens, item_tokens;  // of one of them, of all
  int num_kv_heads, section_kv_heads;
  int num_work;
  SplitScratch split;  // whose plan is null: no walk is cut, and the above says what is dealt out
};

// What `partners` is in kernels of one kind.
template <typename Traits>
__device__ __forceinline__ int Partners(const KernelParams& params) {
  return Traits::kPairs ? params.partners : 1;
}

// What the runs [first, end) of a tile cover together.
struct TileExtent {
  int keys = 0;
  bool has_short_lists = true;  // no run has more slices than a note

  __device__ __forceinline__ TileExtent(const KernelParams& params, int first, int end) {
#pragma unroll 1
    for (int r = first; r < end; ++r) {
      const Run& run = params.by_query.runs[r];
      // A sum of hostile runs stays where it can be added to.
      keys = min(keys + KeysOf(params, run), 1 << 30);
      has_short_lists &= run.ids_end - run.ids_begin <= kNoteSlices;
    }
  }

  static __device__ __forceinline__ int KeysOf(const KernelParams& params, const Run& run) {
    return max(min(run.end, params.k_len) - max(run.begin, 0), 0);
  }
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
