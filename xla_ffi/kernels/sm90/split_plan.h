// Which walks are cut along keys, so that a launch does not end with a few multiprocessors at work.
//
// The items of a launch are dealt out one after the other; the last ones decide when it ends. From
// a certain item on, tiles are cut in 2, then 4, then 8 pieces of their keys, so that what is dealt
// out is never longer than what all multiprocessors have left to do. Pieces leave partial results
// in scratch memory; the last one to come joins them, in the order of their keys, so that the bits
// do not depend on who comes last.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_SPLIT_PLAN_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_SPLIT_PLAN_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "xla_ffi/common/params.h"

namespace magi_jax::sm90 {

constexpr int kSplitRows = 128, kSplitWarps = 8;  // of a tile; a warp has 16 rows
constexpr int kMostPieces = 528;  // places for partial results: 4 for each of 132 multiprocessors
constexpr int kMostCuts = 8;      // pieces of a tile
constexpr int kCutClasses = 3;    // 2, 4 and 8 pieces
constexpr int kLeastBlocks = 16;  // of a piece, about; each costs some 3 microseconds
// Consumers of head dim 64 have no registers left for it.
constexpr int kLeastSplitHeadDim = 96;
// Calls of fewer keys or more items end evenly enough, unless they have more keys than queries, as
// calls of a few rows of long walks have, whose number only the table knows.
constexpr int kLeastSplitKeys = 4096, kMostSplitItems = 64 * 132;
constexpr int kMostSplitTiles = 1024;  // of a table, as many as a block has threads

// What is dealt out: items in their order, pieces of an item next to each other, and then tiles
// without runs. In scratch memory, made on the device for each launch.
struct SplitPlan {
  int32_t active_tiles;  // of the table, those with runs, which stand before the others
  int32_t num_work;      // numbers that are dealt out
  int32_t num_dense;     // those below belong to tiles with runs
  // Items from begin[c] to begin[c + 1] are cut in 2^(c + 1) pieces; others stay whole.
  int32_t begin[kCutClasses + 1];
};

// Places in scratch memory.
struct SplitScratch {
  int32_t* counter;  // of the numbers dealt out
  SplitPlan* plan;
  int32_t* arrivals;  // [kMostPieces, kSplitWarps], counts at the first piece of each tile
  float2* lse;        // [kMostPieces, kSplitWarps, 32], of the two rows of a thread, powers of two
  float4* out;        // [kMostPieces, kSplitWarps, Hv / 8, 32], as they lie in registers
};

constexpr size_t kPlanOffset = 128;  // behind the counter, in a line of its own
constexpr size_t kArrivalsOffset = 256;
constexpr size_t kLseOffset = kArrivalsOffset + sizeof(int32_t) * kMostPieces * kSplitWarps;
constexpr size_t kPieceLseBytes = sizeof(float2) * kSplitWarps * 32;

// Work items of a call.
inline int64_t NumItems(const Problem& problem) {
  const int64_t num_tiles = (int64_t{problem.q_len} + problem.tile_size - 1) / problem.tile_size;
  return num_tiles * problem.tile_size * problem.num_heads / kSplitRows;
}

// Whether walks of a call may be cut.
inline bool MaySplit(const Problem& problem) {
  if (problem.head_dim < kLeastSplitHeadDim || problem.logits_soft_cap != 0.0f) return false;
  if (problem.tile_size <= 0 || problem.q_len <= 0) return false;
  const bool is_short = NumItems(problem) <= kMostSplitItems || problem.k_len > problem.q_len;
  return is_short && problem.k_len > kLeastSplitKeys &&
         problem.q_len <= int64_t{kMostSplitTiles} * problem.tile_size;
}

inline size_t PieceBytes(int v_head_dim) {
  return kPieceLseBytes + sizeof(float) * kSplitRows * v_head_dim;
}

// Pieces of one launch of `num_items` items.
inline int MostPieces(int64_t num_items) {
  return static_cast<int>(std::min<int64_t>(kMostPieces, num_items * kMostCuts));
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_SPLIT_PLAN_H_
