#include "xla_ffi/kernels/sm90/forward.cuh"

namespace magi_jax::sm90 {

cudaError_t LaunchForwardHdim128Bf16(const ForwardParams& forward, const KernelParams& params,
                                     int grid, cudaStream_t stream) {
  using Traits = ForwardTraits<__nv_bfloat16, 128, 128, 144, 2, true>;
  using Few = ForwardTraits<__nv_bfloat16, 128, 128, 128, 2, true>;
  return LaunchForward<Traits, Few>(forward, params, grid, stream);
}

}  // namespace magi_jax::sm90
