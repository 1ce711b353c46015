#include "xla_ffi/kernels/sm90/forward.cuh"

namespace magi_jax::sm90 {

cudaError_t LaunchForwardHdim128F16(const ForwardParams& forward, const KernelParams& params, int clusters,
                                     cudaStream_t stream) {
  if (params.cluster == 1) {
    return LaunchForward<ForwardTraits<__half, 128, 128, 128, 2, 1>>(forward, params, clusters, stream);
  }
  return LaunchForward<ForwardTraits<__half, 128, 128, 128, 2, 2>>(forward, params, clusters, stream);
}

}  // namespace magi_jax::sm90
