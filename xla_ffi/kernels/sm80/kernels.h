// Attention forward and backward on any NVIDIA GPU from compute capability 8.0 on. Free of any
// framework.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_KERNELS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_KERNELS_H_

#include <cuda_runtime_api.h>

#include <string>

#include "xla_ffi/common/params.h"

namespace magi_jax::sm80 {

// Why this path cannot run the problem, and what it would accept; empty when it can.
std::string Refuse(const Problem& problem);

// What runs for this problem: the kernel, its tile, and what it takes of a multiprocessor. Empty
// when refused.
std::string DescribeForward(const Problem& problem);
std::string DescribeBackward(const Problem& problem);

// Enqueue the kernels on `stream` of the current device; no allocation, no synchronisation, no
// scratch. The problem must not be refused. Return the launch error, if any.
cudaError_t Forward(const ForwardParams& params, cudaStream_t stream);
cudaError_t Backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_KERNELS_H_
