#include "xla_ffi/kernels/sm90/backward.cuh"

namespace magi_jax::sm90 {

cudaError_t LaunchBackwardHdim192x128F16(const BackwardParams& backward,
                                         const BackwardKernelParams& params, int blocks,
                                         cudaStream_t stream) {
  return LaunchBackward<__half, 192, 128>(backward, params, blocks, stream);
}

}  // namespace magi_jax::sm90
