// Rectangles that are one together: magi_jax/solver/work/join.py in C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_JOIN_H_
#define MAGI_JAX_XLA_FFI_SOLVER_JOIN_H_

#include <cstdint>
#include <vector>

#include "xla_ffi/solver/bands.h"

namespace magi_jax::solver {

// A slice of a group of slices, such as those of one rank in one stage.
struct GroupedSlice {
  BandSlice slice;
  int64_t group;
};

// Joins full rectangles that abut in keys for the same queries, then those that abut in queries for
// the same keys. Slices are tight and share no cell. Appends the rectangles, then all others, both
// by (k_start, k_end, q_start); `slices` are used up.
void AppendJoined(std::vector<BandSlice>* slices, int64_t group, std::vector<GroupedSlice>* out);

// The same for each of many groups, one after the other.
std::vector<GroupedSlice> JoinRectangles(const std::vector<GroupedSlice>& slices,
                                         int64_t num_groups);

// Joins neighbours of one diagonal, such as documents of one token, of tight slices; returns how
// many are left. `out` has room for these, or is null.
int64_t JoinDiagonals(const BandSlice* slices, int64_t num_slices, BandSlice* out);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_JOIN_H_
