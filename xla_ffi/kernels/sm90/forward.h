// Forward attention on Hopper (TMA, WGMMA, warp-specialised, persistent). Free of any framework
// type.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "xla_ffi/common/params.h"

namespace magi_jax::sm90 {

// Why this path cannot run the problem on a device of compute capability 9.0, and what it would
// accept; null when it can. The string is static.
const char* RefuseForward(const ForwardParams& params);

// Scratch that Forward() needs, 16-byte aligned, contents undefined before and after. Depends on
// sizes and the soft cap alone.
size_t ForwardScratchBytes(const Problem& problem);

// What runs for this problem, for example "sm90 hdim128 128x128 pack8". Writes at most `size`
// bytes.
void DescribeForward(const Problem& problem, char* text, size_t size);

// Enqueues the kernel on `stream` of the current device, and a memset or a small kernel before it
// at most: no host synchronisation, no allocation. The problem must not be refused. Returns the
// launch error, if any.
cudaError_t Forward(const ForwardParams& params, void* scratch, cudaStream_t stream);

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_H_
