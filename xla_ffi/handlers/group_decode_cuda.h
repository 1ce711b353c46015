// Operands of the group collectives on NVIDIA GPUs, decoded and checked by their shapes.

#ifndef MAGI_JAX_XLA_FFI_HANDLERS_GROUP_DECODE_CUDA_H_
#define MAGI_JAX_XLA_FFI_HANDLERS_GROUP_DECODE_CUDA_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/comm/params.h"
#include "xla_ffi/comm/pool.h"
#include "xla_ffi/common/ffa_operands.h"

namespace magi_jax {

// A call, decoded.
struct GroupCall {
  comm::Kind kind;
  comm::Meeting meeting;
  comm::Move move;
};

ffi::Error DecodeTable(const char* name, ffi::AnyBuffer buffer, comm::PieceTable* table);

// The arrays of a call, rows on their leading axis, and what becomes of them. Of a sum as many more
// operands may follow, which are the results: the sums are added to them.
ffi::Error DecodeLeaves(ffi::RemainingArgs operands, ffi::RemainingRets results,
                        int64_t operand_rows, int64_t result_rows, GroupCall* call);

// The map is scratch of XLA: [2, rows] for a cast, [cp + words, rows] for a reduce.
ffi::Error DecodeMap(ffi::AnyBuffer buffer, bool is_cast, int32_t cp_size, comm::RowMap* map);

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_HANDLERS_GROUP_DECODE_CUDA_H_
