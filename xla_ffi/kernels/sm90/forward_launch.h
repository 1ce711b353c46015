// One launch function per instantiation, each defined in the file of its name.
//
// A build may leave some of these files out (MAGI_JAX_CUDA_KERNELS=ci): what is declared weak and
// defined nowhere has the address null.

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

using LaunchForwardFunction = cudaError_t(const ForwardParams&, const KernelParams&, int grid,
                                          cudaStream_t);
#ifdef MAGI_JAX_SOME_KERNELS  // some may be left out
[[gnu::weak]]
#endif
LaunchForwardFunction LaunchForwardHdim64Bf16,
    LaunchForwardHdim64F16, LaunchForwardHdim96Bf16, LaunchForwardHdim96F16,
    LaunchForwardHdim128Bf16, LaunchForwardHdim128F16, LaunchForwardHdim192x128Bf16,
    LaunchForwardHdim192x128F16, LaunchForwardHdim256Bf16, LaunchForwardHdim256F16;

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_LAUNCH_H_
