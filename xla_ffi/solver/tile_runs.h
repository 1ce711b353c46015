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

// Entries of the walk of one part.
struct Rooms {
  int64_t runs, ids;
};

// Where walks of P parts of M tiles each are written.
struct TileWalks {
  int32_t* ptr;                   // [P, M + 1], from 0 in each part
  TileRun* runs;                  // [P, room.runs]
  int32_t* ids;                   // [P, room.ids] rows of the slices of the part
  int32_t* order;                 // [P, M] tiles by decreasing work
  Rooms room;                     // at least what CountEntries finds
  std::vector<int64_t> num_runs;  // [P]
};

// Ids of the part slices[begin[p]:begin[p + 1]] that has most, and a number of runs that none has
// more of: where keys of bands may abut, one for each slice that meets a tile.
Rooms CountEntries(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t tile_size,
                   int64_t num_tiles);

// Walks for tight visible slices of the same parts; zeros behind the last entries.
void WalkTiles(const BandSlice* slices, const std::vector<int64_t>& begin, int64_t length,
               int64_t tile_size, int64_t num_tiles, TileWalks* walks);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_TILE_RUNS_H_
