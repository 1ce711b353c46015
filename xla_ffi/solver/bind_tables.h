// The part of magi_jax._planner that lays out tables.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_BIND_TABLES_H_
#define MAGI_JAX_XLA_FFI_SOLVER_BIND_TABLES_H_

#include <pybind11/pybind11.h>

namespace magi_jax::solver {

void BindTables(pybind11::module_& m);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_BIND_TABLES_H_
