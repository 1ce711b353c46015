// What a handler needs to be registered with XLA. Every handler file lists its own targets;
// module.cc hands the lists to Python.

#ifndef MAGI_JAX_XLA_FFI_COMMON_REGISTRATION_H_
#define MAGI_JAX_XLA_FFI_COMMON_REGISTRATION_H_

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace magi_jax {

// Number of the contract between the custom calls and magi_jax/ops/ffi.py, which refuses any other:
// raise both when operands, results, attributes or the meaning of a table change.
constexpr int kInterface = 5;

struct Registration {
  const char* target;
  const char* platform;  // "cpu" or "CUDA"
  XLA_FFI_Handler* execute;
  // Further stages of the call; null when the target has none.
  XLA_FFI_Handler* instantiate = nullptr;
  XLA_FFI_Handler* prepare = nullptr;
  XLA_FFI_Handler* initialize = nullptr;
};

std::vector<Registration> CpuRegistrations();
std::vector<Registration> GroupCpuRegistrations();
// Defined when MAGI_JAX_WITH_CUDA is.
std::vector<Registration> CudaRegistrations();
std::vector<Registration> GroupRegistrations();

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_COMMON_REGISTRATION_H_
