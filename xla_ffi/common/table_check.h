// Checks the values of a slice table, so that a damaged one is refused before any memory is
// touched. The cost is that of reading the table once; for tables in host memory only.

#ifndef MAGI_JAX_XLA_FFI_COMMON_TABLE_CHECK_H_
#define MAGI_JAX_XLA_FFI_COMMON_TABLE_CHECK_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/common/params.h"

namespace magi_jax {

// Every slice lies inside [0, q_len) x [0, k_len).
xla::ffi::Error CheckSliceValues(const Slice* slices, const Problem& problem);

// Every run lies inside [0, walk_len), runs of a tile are disjoint and rising, and `order` lists
// each tile once. `name` is the walk's name in messages.
xla::ffi::Error CheckTileRunValues(const char* name, const TileRuns& table, int32_t num_slices,
                                   int32_t walk_len);

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_COMMON_TABLE_CHECK_H_
