// One launch function per instantiation of the backward, each defined in the file of its name.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LAUNCH_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LAUNCH_H_

#include <cuda_runtime_api.h>

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

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_LAUNCH_H_
