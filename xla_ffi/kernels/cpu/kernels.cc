// Compiled once per instruction set, named by MAGI_JAX_ISA.

#include "xla_ffi/kernels/cpu/kernels.h"

#include "xla_ffi/kernels/cpu/forward.h"
#include "xla_ffi/kernels/cpu/key_walk.h"
#include "xla_ffi/kernels/cpu/query_walk.h"

#define MAGI_JAX_QUOTE(name) #name
#define MAGI_JAX_NAME_OF(macro) MAGI_JAX_QUOTE(macro)

namespace magi_jax::cpu::MAGI_JAX_ISA {

extern const Kernels kKernels;
const Kernels kKernels = {
    MAGI_JAX_NAME_OF(MAGI_JAX_ISA),
    &ForwardScratchFloats,
    &ForwardTile,
    &KeyWalkScratchFloats,
    &KeyWalkTile,
    &QueryWalkScratchFloats,
    &QueryWalkTile,
};

}  // namespace magi_jax::cpu::MAGI_JAX_ISA
