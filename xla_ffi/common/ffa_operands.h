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

struct ForwardResults {
  ffi::AnyBuffer out, lse;
  ffi::AnyBuffer row_max;  // without rows where it is not wanted
};

// The tensors of a forward call: checks all shapes and dtypes, fills the problem and the pointers.
ffi::Error DecodeForward(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         const Attributes& attributes, const ForwardResults& results,
                         ForwardParams* params);
// The results of other calls that a decoded forward call adds to. Where they have the dtype of
// `out` they are added to in `out`, into which the platform brings them, as it does lse.
ffi::Error DecodeEarlier(ffi::AnyBuffer out_in, ffi::AnyBuffer lse_in, ForwardParams* params);
// The operands of a backward call, and then its results.
ffi::Error DecodeBackward(ffi::AnyBuffer dout, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::AnyBuffer lse, ffi::AnyBuffer delta, const Attributes& attributes,
                          BackwardParams* params);
// Paths that round dq take it in float32 or in the dtype of q.
ffi::Error DecodeGradients(bool rounds_dq, ffi::AnyBuffer k, ffi::AnyBuffer dq, ffi::AnyBuffer dk,
                           ffi::AnyBuffer dv, BackwardParams* params);
// The gradient that dq is added to, or whose tiles it replaces where it has the dtype of q;
// likewise.
ffi::Error DecodeEarlier(ffi::AnyBuffer dq_in, BackwardParams* params);

ffi::Error DecodeSlices(ffi::AnyBuffer buffer, Problem* problem, const Slice** slices);
// `length` is the number of rows that the tiles cut.
ffi::Error DecodeTileRuns(const TileRunsOperands& operands, int32_t length, int32_t tile_size,
                          TileRuns* runs);

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_COMMON_FFA_OPERANDS_H_
