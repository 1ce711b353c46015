// Set-up of symmetric memory from Python.

#ifndef MAGI_JAX_XLA_FFI_HANDLERS_GROUP_BINDING_CUDA_H_
#define MAGI_JAX_XLA_FFI_HANDLERS_GROUP_BINDING_CUDA_H_

#include <pybind11/pybind11.h>

namespace magi_jax {

void BindGroup(pybind11::module_& m);

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_HANDLERS_GROUP_BINDING_CUDA_H_
