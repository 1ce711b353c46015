// The launchers, each instantiated in files of its own; see xla_ffi/cuda.cmake.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_LAUNCH_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "xla_ffi/common/params.h"

namespace magi_jax::sm80 {

template <typename T, int kHeadDim, int kVHeadDim>
cudaError_t LaunchForward(const ForwardParams& params, cudaStream_t stream);

template <typename T, int kHeadDim, int kVHeadDim>
cudaError_t LaunchQueryGrad(const BackwardParams& params, cudaStream_t stream);

template <typename T, int kHeadDim, int kVHeadDim>
cudaError_t LaunchKeyGrad(const BackwardParams& params, cudaStream_t stream);

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_LAUNCH_H_
