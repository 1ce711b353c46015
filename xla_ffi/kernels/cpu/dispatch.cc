#include "xla_ffi/kernels/cpu/kernels.h"

namespace magi_jax::cpu {

namespace portable {
extern const Kernels kKernels;
}
#ifdef MAGI_JAX_X86_KERNELS
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

const Kernels& SelectKernels() {
#ifdef MAGI_JAX_X86_KERNELS
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx512) return avx512::kKernels;
  if (has_avx2) return avx2::kKernels;
#endif
  return portable::kKernels;
}

}  // namespace magi_jax::cpu
