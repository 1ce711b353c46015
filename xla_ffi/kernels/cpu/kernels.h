// Attention on the CPU. The kernels are compiled once per instruction set; `SelectKernels` picks
// the best one that this processor has. All sets give the same results up to rounding.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_KERNELS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_KERNELS_H_

#include <cstdint>

#include "xla_ffi/common/params.h"

namespace magi_jax::cpu {

constexpr int32_t kMaxTileSize = 1024;
constexpr int32_t kMaxHeadDim = 1 << 16;

// Each function does one independent unit of work in the calling thread, with `scratch` of as many
// floats as the matching *_scratch function says, aligned to 64 bytes.
struct Kernels {
  const char* name;

  int64_t (*forward_scratch)(const Problem& problem);
  // Output rows of one query tile and one query head.
  void (*forward)(const ForwardParams& params, int32_t tile, int32_t head, float* scratch);

  int64_t (*key_walk_scratch)(const Problem& problem);
  // dK and dV of one key tile and one kv head. With `add_dq` it also adds to dQ, whose rows the
  // caller has set to zero; then all tiles of a kv head must be walked by one thread at a time.
  void (*key_walk)(const BackwardParams& params, int32_t tile, int32_t kv_head, bool add_dq,
                   float* scratch);

  int64_t (*query_walk_scratch)(const Problem& problem);
  // dQ of one query tile and one query head.
  void (*query_walk)(const BackwardParams& params, int32_t tile, int32_t head, float* scratch);
};

const Kernels& SelectKernels();

}  // namespace magi_jax::cpu

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_KERNELS_H_
