// One launch function per instantiation, each defined in the file of its name.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_LAUNCH_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm90/kernel_params.h"

namespace magi_jax::sm90 {

// Calls with no more keys than this last some 10 to 200 microseconds, of which what precedes and
// follows the products is a good part.
constexpr int kFewKeys = 2048;

// Whether logits need more than a multiplication by a positive number.
inline bool NeedsTransform(const Problem& problem) {
  return problem.logits_soft_cap != 0.0f || !(problem.scale > 0.0f);
}

// Whether a call goes to the kernel for few keys, where there is one. At head dim 64 wide blocks
// win earlier.
inline bool TakesFewKeys(const Problem& problem) {
  const int few = problem.head_dim == 64 ? kFewKeys / 2 : kFewKeys;
  return problem.k_len <= few && !NeedsTransform(problem);
}

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
