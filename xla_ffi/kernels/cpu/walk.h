// What forward and backward share: tiles, their walk in blocks, logits, and carving up scratch.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_WALK_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_WALK_H_

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/cpu/convert.h"
#include "xla_ffi/kernels/cpu/kernels.h"
#include "xla_ffi/kernels/cpu/mask.h"
#include "xla_ffi/kernels/cpu/simd.h"

namespace magi_jax::cpu::MAGI_JAX_ISA {

// Rows of a block of the walk. Its copies should stay in the second-level cache beside the tile's
// panels.
constexpr int32_t kBlockRows = 96;

// Tiles have at most kMaxTileSize rows.
constexpr int32_t kMaxTilePanels = kMaxTileSize / kPanel;

// Rows that a tile owns.
struct Tile {
  Interval rows;
  int32_t panels;

  Interval Panel(int32_t panel) const {
    const int32_t begin = rows.begin + panel * kPanel;
    return {begin, MinInt(begin + kPanel, rows.end)};
  }
  int32_t size() const { return rows.end - rows.begin; }
};

MAGI_JAX_INLINE Tile TileOf(int32_t index, int32_t tile_size, int32_t length) {
  const int32_t begin = index * tile_size;
  const Interval rows = {begin, MaxInt(begin, MinInt(begin + tile_size, length))};
  return {rows, (rows.end - rows.begin + kPanel - 1) / kPanel};
}

MAGI_JAX_INLINE int32_t MaxPanels(const Problem& problem) {
  return (problem.tile_size + kPanel - 1) / kPanel;
}

// A block of a tile's walk: [walk.begin, walk.end), at most kBlockRows long.
struct Block {
  Interval walk;
  bool is_full;  // all rows of the tile see all of it; `mask` is not set
  BlockMask mask;
};

// Calls `function(block)` for the blocks of a tile in rising order.
template <Lanes kLanesAre, typename Function>
MAGI_JAX_INLINE void ForEachBlock(const Slice* slices, const TileRuns& table, int32_t tile_index,
                                  const Tile& tile, Function&& function) {
  for (int32_t r = table.ptr[tile_index]; r < table.ptr[tile_index + 1]; ++r) {
    const Run run = table.runs[r];
    int32_t first_id = run.ids_begin;
    for (int32_t begin = run.begin, end; begin < run.end; begin = end) {
      const bool is_full = begin >= run.full_begin && begin < run.full_end;
      const int32_t limit = is_full                  ? run.full_end
                            : begin < run.full_begin ? run.full_begin
                                                     : run.end;
      end = MinInt(begin + kBlockRows, limit);
      Block block = {{begin, end}, is_full, {}};
      if (!is_full) {
        block.mask = MaskOfBlock<kLanesAre>(slices, table.ids, tile.rows,
                                            {run.ids_begin, run.ids_end}, block.walk, &first_id);
      }
      function(block);
    }
  }
}

// Raw products q.k to logits in base 2.
struct Logits {
  float to_argument;  // scale * log2(e), or scale / cap
  float cap_log2;     // cap * log2(e); 0 = none

  explicit Logits(const Problem& problem)
      : to_argument(problem.logits_soft_cap > 0.0f ? problem.scale / problem.logits_soft_cap
                                                   : problem.scale * kLog2E),
        cap_log2(problem.logits_soft_cap * kLog2E) {}

  Vec operator()(Vec product) const {
    const Vec x = product * to_argument;
    return cap_log2 > 0.0f ? cap_log2 * Tanh(x) : x;
  }
};

// Hands out 64-byte aligned pieces of scratch, and counts them when there is none yet.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}
  float* Floats(int64_t count) {
    float* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count + 15) / 16 * 16;
    return piece;
  }
  int32_t* Ints(int64_t count) { return reinterpret_cast<int32_t*>(Floats(count)); }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_WALK_H_
