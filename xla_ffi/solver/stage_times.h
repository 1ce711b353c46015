// What stages are predicted to take: magi_jax/solver/cost/timeline.py and schedule.py in C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_STAGE_TIMES_H_
#define MAGI_JAX_XLA_FFI_SOLVER_STAGE_TIMES_H_

#include <cstdint>
#include <vector>

#include "xla_ffi/solver/lay_out.h"
#include "xla_ffi/solver/node_stages.h"

namespace magi_jax::solver {

// Rates of one direction of a layer on a machine.
struct Rates {
  const double* log_keys;  // [P] rising
  const double* tflops;    // [P]
  int64_t num_points;      // P
  double us_per_cell;      // at 1 TFLOP/s
  double cast_bytes;       // of a row of keys and values
  double reduce_bytes;     // of a row of their gradients; 0 in the forward direction
  double link_gbps, node_link_gbps, latency_us;
  double launch_us, merge_us_per_row;  // of a further stage
  bool own_keys_last;
};

// Times of travelling queries, [R] each; null where none travel.
struct TravelTimes {
  const double *out_us, *kernel_us, *return_us, *merge_us;
};

// Kernel times of each group of slices in both directions, microseconds [num_groups] each.
struct KernelTimes {
  explicit KernelTimes(size_t num_groups)
      : forward_us(num_groups, 0.0), backward_us(num_groups, 0.0) {}

  std::vector<double> forward_us, backward_us;
  // Of the last slice: short documents are often alike.
  struct {
    double area, rows, forward_us, backward_us;
  } last = {};
};

// Adds a slice of a group. Rectangles that could be joined take the same time together as apart.
void AddKernelTime(const BandSlice& slice, int64_t group, const Rates& forward,
                   const Rates& backward, KernelTimes* times);

// Steps that rows take: one, or two, of which stages that are `near` take that inside nodes alone.
struct Steps {
  bool two;
  std::vector<bool> near;  // [S], or empty where none is
};

// Query rows of each of `num_groups` groups in tiles of kMergeTile in which any sees a key; pieces
// are sorted by group.
constexpr int64_t kMergeTile = 16;
std::vector<int64_t> TouchedRows(const std::vector<GroupedSlice>& pieces, int64_t num_groups);

// When the last rank is done with one direction, in which remote stages merge `merged_rows` [S, R].
double PredictUs(const std::vector<double>& kernel_us, const std::vector<int64_t>& merged_rows,
                 const LinkRows& rows, int64_t num_ranks, int64_t num_stages, const Steps& steps,
                 const Rates& rates, const TravelTimes& travel);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_STAGE_TIMES_H_
