#include "xla_ffi/kernels/sm90/backward.cuh"

namespace magi_jax::sm90 {

cudaError_t LaunchBackwardHdim256Bf16(const BackwardParams& backward,
                                      const BackwardKernelParams& params, int blocks,
                                      cudaStream_t stream) {
  return LaunchBackward<__nv_bfloat16, 256>(backward, params, blocks, stream);
}

}  // namespace magi_jax::sm90
