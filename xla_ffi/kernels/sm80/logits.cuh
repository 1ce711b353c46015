// From products q.k to logits, with the tanh cap, in units of log2, and the cap's slope.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_LOGITS_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_LOGITS_CUH_

#include <cmath>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm80/ptx.cuh"

namespace magi_jax::sm80 {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct Logits {
  float log2_factor;  // logits as the forward keeps them, to log2 units
  float factor;       // q.k to log2 units, or to the exponent of tanh when capped
  float cap_log2;     // cap in log2 units; 0 = none

  __device__ __forceinline__ explicit Logits(const Problem& problem)
      : factor(problem.logits_soft_cap > 0.f
                   ? 2.f * kLog2E * problem.scale / problem.logits_soft_cap
                   : problem.scale * kLog2E),
        cap_log2(problem.logits_soft_cap * kLog2E) {
    log2_factor = transforms() ? 1.f : factor;
  }

  __device__ __forceinline__ bool capped() const { return cap_log2 > 0.f; }

  // Without a cap and with a positive scale the largest product is the largest logit, so products
  // need no pass of their own: the scale is part of the exponent.
  __device__ __forceinline__ bool transforms() const { return capped() || !(factor > 0.f); }

  __device__ __forceinline__ float Transform(float dot) const {
    return capped() ? cap_log2 * Tanh(dot) : dot * factor;
  }

  // tanh(z) = 1 - 2 / (exp(2 z) + 1): tanh.approx would cost a capped logit of 50 an error of 0.02.
  __device__ __forceinline__ float Tanh(float dot) const {
    return 1.f - __fdividef(2.f, Exp2(dot * factor) + 1.f);
  }
};

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_LOGITS_CUH_
