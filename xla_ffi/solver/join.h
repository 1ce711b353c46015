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

// Joins full rectangles of a group that abut in keys for the same queries, then those that abut in
// queries for the same keys. Slices are tight and share no cell. The result is sorted by group,
// full rectangles first, by (k_start, k_end, q_start).
std::vector<GroupedSlice> JoinRectangles(const std::vector<GroupedSlice>& slices,
                                         int64_t num_groups);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_JOIN_H_
