#include "xla_ffi/kernels/sm90/forward.cuh"

namespace magi_jax::sm90 {

cudaError_t LaunchForwardHdim64Bf16(const ForwardParams& forward, const KernelParams& params,
                                    int grid, cudaStream_t stream) {
  using Traits = ForwardTraits<__nv_bfloat16, 64, 64, 192, 2, true, 4, Turns::kSoftmax>;
  using Few = ForwardTraits<__nv_bfloat16, 64, 64, 128, 2, true, 4, Turns::kSoftmax>;
  return LaunchForward<Traits, Few>(forward, params, grid, stream);
}

}  // namespace magi_jax::sm90
