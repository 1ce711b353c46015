// NumPy arrays as the solver's structs, and back.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_ARRAYS_H_
#define MAGI_JAX_XLA_FFI_SOLVER_ARRAYS_H_

#include <pybind11/numpy.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "xla_ffi/solver/lay_out.h"

namespace magi_jax::solver {

namespace py = pybind11;
template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;
using Ints = Array<int64_t>;

inline void Require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Rows of a table [N, width] as structs, and back.
template <typename Row>
const Row* RowsOf(const Ints& table) {
  Require(table.size() % (sizeof(Row) / sizeof(int64_t)) == 0, "a table has the wrong width");
  return reinterpret_cast<const Row*>(table.data());
}

template <typename Row>
Ints Table(const std::vector<Row>& rows) {
  constexpr int64_t width = sizeof(Row) / sizeof(int64_t);
  Ints out({static_cast<int64_t>(rows.size()), width});
  if (!rows.empty())
    std::copy(rows.begin(), rows.end(), reinterpret_cast<Row*>(out.mutable_data()));
  return out;
}

inline Ints Column(const std::vector<int64_t>& values) {
  return Ints(static_cast<py::ssize_t>(values.size()), values.data());
}

inline Layout LayoutOf(const Ints& edges, const Ints& owner, const Ints& offset,
                       int64_t num_ranks) {
  Require(edges.size() == owner.size() + 1 && offset.size() == owner.size(),
          "arrays of a layout do not fit together");
  for (py::ssize_t g = 0; g < owner.size(); ++g)
    Require(owner.data()[g] >= 0 && owner.data()[g] < num_ranks, "an owner is out of range");
  return {edges.data(), owner.data(), offset.data(), owner.size(), num_ranks};
}

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_ARRAYS_H_
