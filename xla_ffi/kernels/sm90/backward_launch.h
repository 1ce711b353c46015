// One launch function per instantiation of the backward, each defined in the file of its name.
//
// A build may leave some of these files out (MAGI_JAX_CUDA_KERNELS=ci): what is declared weak and
// defined nowhere has the address null.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LAUNCH_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LAUNCH_H_

#include <cuda_runtime.h>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm90/backward_params.h"

namespace magi_jax::sm90 {

using LaunchBackwardFunction = cudaError_t(const BackwardParams&, const BackwardKernelParams&,
                                           int blocks, cudaStream_t);
#ifdef MAGI_JAX_SOME_KERNELS  // some may be left out
[[gnu::weak]]
#endif
LaunchBackwardFunction LaunchBackwardHdim64Bf16,
    LaunchBackwardHdim64F16, LaunchBackwardHdim96Bf16, LaunchBackwardHdim96F16,
    LaunchBackwardHdim128Bf16, LaunchBackwardHdim128F16, LaunchBackwardHdim192x128Bf16,
    LaunchBackwardHdim192x128F16, LaunchBackwardHdim256Bf16, LaunchBackwardHdim256F16;

// Launches a kernel that begins when those before it in the stream are about to end, and calls
// AwaitKernelBefore before it touches memory.
template <typename... Values, typename... Given>
cudaError_t LaunchNext(void (*kernel)(Values...), dim3 grid, int threads, int shared_bytes,
                       cudaStream_t stream, const Given&... given) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Values>(given)...);
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LAUNCH_H_
