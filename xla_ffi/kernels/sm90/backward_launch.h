// One launch function per instantiation of the backward, each defined in the file of its name.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LAUNCH_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LAUNCH_H_

#include <cuda_runtime.h>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm90/backward_params.h"

namespace magi_jax::sm90 {

cudaError_t LaunchBackwardHdim64Bf16(const BackwardParams&, const BackwardKernelParams&, int blocks,
                                     cudaStream_t);
cudaError_t LaunchBackwardHdim64F16(const BackwardParams&, const BackwardKernelParams&, int blocks,
                                    cudaStream_t);
cudaError_t LaunchBackwardHdim96Bf16(const BackwardParams&, const BackwardKernelParams&, int blocks,
                                     cudaStream_t);
cudaError_t LaunchBackwardHdim96F16(const BackwardParams&, const BackwardKernelParams&, int blocks,
                                    cudaStream_t);
cudaError_t LaunchBackwardHdim128Bf16(const BackwardParams&, const BackwardKernelParams&,
                                      int blocks, cudaStream_t);
cudaError_t LaunchBackwardHdim128F16(const BackwardParams&, const BackwardKernelParams&, int blocks,
                                     cudaStream_t);

cudaError_t LaunchBackwardHdim192x128Bf16(const BackwardParams&, const BackwardKernelParams&,
                                          int blocks, cudaStream_t);
cudaError_t LaunchBackwardHdim192x128F16(const BackwardParams&, const BackwardKernelParams&,
                                         int blocks, cudaStream_t);
cudaError_t LaunchBackwardHdim256Bf16(const BackwardParams&, const BackwardKernelParams&,
                                      int blocks, cudaStream_t);
cudaError_t LaunchBackwardHdim256F16(const BackwardParams&, const BackwardKernelParams&, int blocks,
                                     cudaStream_t);

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
