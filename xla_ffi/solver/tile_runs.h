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

// Where walks of P parts of M tiles each are written, and memory for the pieces of one part.
struct TileWalks {
  int32_t* ptr;                   // [P, M + 1], from 0 in each part
  TileRun* runs;                  // [P, runs_room]
  int32_t* ids;                   // [P, ids_room] rows of the slices of the part
  int32_t* order;                 // [P, M] tiles by decreasing work
  int64_t runs_room, ids_room;    // at least as many as slices meet tiles
  std::vector<int64_t> num_runs;  // [P]
  std::vector<TilePiece> pieces;
};

// How often slices meet tiles, in each of the parts slices[begin[p]:begin[p + 1]]: as many ids does
// a part take, and as many runs at most.
std::vector<int64_t> CountMeetings(const BandSlice* slices, const std::vector<int64_t>& begin,
                                   int64_t tile_size);

// Walks for tight visible slices of the same parts; zeros behind the last entries.
void WalkTiles(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t length,
               int64_t tile_size, int64_t num_tiles, TileWalks* walks);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_TILE_RUNS_H_
