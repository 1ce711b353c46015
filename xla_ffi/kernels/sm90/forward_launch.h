// One launch function per instantiation, each defined in the file of its name.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_LAUNCH_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm90/kernel_params.h"

namespace magi_jax::sm90 {

cudaError_t LaunchForwardHdim64Bf16(const ForwardParams&, const KernelParams&, int grid,
                                    cudaStream_t);
cudaError_t LaunchForwardHdim64F16(const ForwardParams&, const KernelParams&, int grid,
                                   cudaStream_t);
cudaError_t LaunchForwardHdim96Bf16(const ForwardParams&, const KernelParams&, int grid,
                                    cudaStream_t);
cudaError_t LaunchForwardHdim96F16(const ForwardParams&, const KernelParams&, int grid,
                                   cudaStream_t);
cudaError_t LaunchForwardHdim128Bf16(const ForwardParams&, const KernelParams&, int grid,
                                     cudaStream_t);
cudaError_t LaunchForwardHdim128F16(const ForwardParams&, const KernelParams&, int grid,
                                    cudaStream_t);
cudaError_t LaunchForwardHdim192x128Bf16(const ForwardParams&, const KernelParams&, int grid,
                                         cudaStream_t);
cudaError_t LaunchForwardHdim192x128F16(const ForwardParams&, const KernelParams&, int grid,
                                        cudaStream_t);
cudaError_t LaunchForwardHdim256Bf16(const ForwardParams&, const KernelParams&, int grid,
                                     cudaStream_t);
cudaError_t LaunchForwardHdim256F16(const ForwardParams&, const KernelParams&, int grid,
                                    cudaStream_t);

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_LAUNCH_H_
