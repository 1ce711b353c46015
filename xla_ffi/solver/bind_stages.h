// The part of magi_jax._planner that cuts stages and predicts their times.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_BIND_STAGES_H_
#define MAGI_JAX_XLA_FFI_SOLVER_BIND_STAGES_H_

#include <pybind11/pybind11.h>

namespace magi_jax::solver {

void BindStages(pybind11::module_& m);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_BIND_STAGES_H_
