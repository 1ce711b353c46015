#include "xla_ffi/kernels/sm90/forward.cuh"

namespace magi_jax::sm90 {

cudaError_t LaunchForwardHdim192x128F16(const ForwardParams& forward, const KernelParams& params,
                                        int grid, cudaStream_t stream) {
  using Traits = ForwardTraits<__half, 192, 128, 96, 2, true>;
  return LaunchForward<Traits>(forward, params, grid, stream);
}

}  // namespace magi_jax::sm90
