// What units of a sequence compute and which keys they need: magi_jax/solver/dispatch/units.py in
// C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_UNITS_H_
#define MAGI_JAX_XLA_FFI_SOLVER_UNITS_H_

#include <cstdint>
#include <vector>

#include "xla_ffi/solver/bands.h"

namespace magi_jax::solver {

struct SpanInterval {
  int64_t begin, end;
};

// Letters as in problem.h.
struct UnitNeeds {
  std::vector<int64_t> area;        // [U] visible cells
  std::vector<int64_t> rows;        // [V] key rows of each span
  std::vector<int64_t> span_ptr;    // [U + 1]
  std::vector<int64_t> reader;      // [I] unit of each of `spans`, rising
  std::vector<SpanInterval> spans;  // [I] disjoint and rising within a unit
  std::vector<int64_t> total_rows;  // [U] distinct key rows that the unit sees
};

// Units are [edges[u], edges[u + 1]); slices are tight and visible.
UnitNeeds FindNeeds(const BandSlice* slices, int64_t num_slices, const int64_t* edges,
                    int64_t num_units);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_UNITS_H_
