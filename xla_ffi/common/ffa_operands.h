// Decoding and checking of what the attention targets are called with, shared by all platforms.
// Nothing here reads a buffer: on a GPU the tables are in device memory.

#ifndef MAGI_JAX_XLA_FFI_COMMON_FFA_OPERANDS_H_
#define MAGI_JAX_XLA_FFI_COMMON_FFA_OPERANDS_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/common/params.h"

namespace magi_jax {

namespace ffi = xla::ffi;

inline ffi::Error InvalidArgument(std::string message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message));
}

#define MAGI_JAX_RETURN_IF_ERROR(expression)             \
  do {                                                   \
    ::xla::ffi::Error magi_jax_error = (expression);     \
    if (magi_jax_error.failure()) return magi_jax_error; \
  } while (false)

// The four buffers of one walk, and how messages call it.
struct TileRunsOperands {
  const char* name;
  ffi::AnyBuffer ptr;    // [M + 1]
  ffi::AnyBuffer runs;   // [R, 6]
  ffi::AnyBuffer ids;    // [I]
  ffi::AnyBuffer order;  // [M]
};

struct Attributes {
  float scale;
  float logits_soft_cap;
  int32_t tile_size;
};

std::string DescribeShape(ffi::AnyBuffer buffer);

ffi::Error CheckShape(const char* name, ffi::AnyBuffer buffer,
                      std::initializer_list<int64_t> expected);
ffi::Error CheckF32(const char* name, ffi::AnyBuffer buffer);
ffi::Error DecodeDType(const char* name, ffi::AnyBuffer buffer, DType* dtype);

// Fills `problem` from the shapes and dtypes of q, k, v and the attributes.
ffi::Error DecodeProblem(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         const Attributes& attributes, Problem* problem);
ffi::Error DecodeSlices(ffi::AnyBuffer buffer, const Slice** slices);
// `length` is the number of rows that the tiles cut.
ffi::Error DecodeTileRuns(const TileRunsOperands& operands, int32_t length, int32_t tile_size,
                          TileRuns* runs);

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_COMMON_FFA_OPERANDS_H_
