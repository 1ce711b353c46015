// What the CUDA part of the library can run, for those who choose a kernel before a call is
// compiled.

#ifndef MAGI_JAX_XLA_FFI_HANDLERS_KERNELS_CUDA_H_
#define MAGI_JAX_XLA_FFI_HANDLERS_KERNELS_CUDA_H_

#include <string>

#include "xla_ffi/common/params.h"

namespace magi_jax {

struct KernelChoice {
  std::string description;   // kernel and tile; empty when refused
  std::string refusal;       // why not, and what would be accepted; empty when it runs
  size_t scratch_bytes = 0;  // of the further result that the call works in; 0 for none
};

// `path` is "sm80" or "sm90", backward also "sm90_ordered". Only dtypes, head counts, head dims,
// lengths, tile size and logits_soft_cap are looked at.
KernelChoice ChooseForward(const std::string& path, const Problem& problem, DType out_dtype,
                           bool row_max);
KernelChoice ChooseBackward(const std::string& path, const Problem& problem, DType dkv_dtype,
                            bool rounds_dq);

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_HANDLERS_KERNELS_CUDA_H_
