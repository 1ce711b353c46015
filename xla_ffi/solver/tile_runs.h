// The walk of query tiles along keys that attention kernels read: magi_jax/solver/slice_table.py in
// C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_TILE_RUNS_H_
#define MAGI_JAX_XLA_FFI_SOLVER_TILE_RUNS_H_

#include <cstdint>
#include <vector>

#include "xla_ffi/solver/bands.h"

namespace magi_jax::solver {

// The row of docs/architecture.md, "Slice table".
struct TileRun {
  int32_t begin, end, full_begin, full_end, ids_begin, ids_end;
};

// What one slice shows to the rows of one tile.
struct TilePiece {
  int32_t begin, end;  // visible keys
  // Keys that all rows of the tile see; empty when full_begin >= full_end.
  int32_t full_begin, full_end;
  int64_t area;
  int32_t id;
};

// Walks of P parts of M tiles each, one part after another, without padding. One may serve several
// calls: its memory is as good as new, and costs a second time nothing.
struct TileWalks {
  std::vector<TileRun> runs;         // of all parts
  std::vector<int64_t> runs_before;  // [P + 1] runs of the parts before
  std::vector<int32_t> ids;          // of all parts, rows of the slices of the part
  std::vector<int64_t> ids_before;   // [P + 1]
  std::vector<TilePiece> pieces;     // of one part
};

// Walks for tight visible slices, those of part p at slices[begin[p]:begin[p + 1]]. Writes
// ptr [P, M + 1], from 0 in each part, and order [P, M], tiles by decreasing work.
void WalkTiles(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t length,
               int64_t tile_size, int64_t num_tiles, int32_t* ptr, int32_t* order,
               TileWalks* walks);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_TILE_RUNS_H_
