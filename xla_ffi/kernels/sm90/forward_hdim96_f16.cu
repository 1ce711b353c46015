#include "xla_ffi/kernels/sm90/forward.cuh"

namespace magi_jax::sm90 {

cudaError_t LaunchForwardHdim96F16(const ForwardParams& forward, const KernelParams& params,
                                   int grid, cudaStream_t stream) {
  using Traits = ForwardTraits<__half, 96, 96, 128, 2, true>;
  return LaunchForward<Traits>(forward, params, grid, stream);
}

}  // namespace magi_jax::sm90
