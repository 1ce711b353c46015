// The part of magi_jax._planner that weighs chunks and documents, and deals them to ranks.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_BIND_DOCUMENTS_H_
#define MAGI_JAX_XLA_FFI_SOLVER_BIND_DOCUMENTS_H_

#include <pybind11/pybind11.h>

namespace magi_jax::solver {

void BindDocuments(pybind11::module_& m);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_BIND_DOCUMENTS_H_
