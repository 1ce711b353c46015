// What the CUDA kernels of the group collectives read out of a table of pieces, computed by the
// same code on the host: lets tests without a GPU check it, damaged tables included.

#include <algorithm>
#include <cstdint>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/comm/pieces.h"
#include "xla_ffi/common/ffa_operands.h"
#include "xla_ffi/common/registration.h"

namespace magi_jax {
namespace {

using Operand = ffi::AnyBuffer;

// Table [pieces, 5]; map as in comm::RowMap: [2, rows] for a cast, [cp + words, rows] for a reduce;
// digests [cp, 2], low words first.
ffi::Error GroupMap(Operand table, ffi::Result<Operand> map, ffi::Result<Operand> digests,
                    int32_t cp_size, int32_t src_rows, int32_t dst_rows, int32_t is_cast) {
  const comm::Extents extents = {cp_size, src_rows, dst_rows};
  const int32_t rows = is_cast != 0 ? dst_rows : src_rows;
  const int32_t slots = is_cast != 0 ? 2 : cp_size + comm::SeenWords(cp_size);
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("map", *map, {slots, rows}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("digests", *digests, {cp_size, 2}));
  const auto dims = table.dimensions();
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("table", table, {dims.size() == 2 ? dims[0] : 0, 5}));
  for (const Operand& buffer : {table, *map, *digests}) {
    if (buffer.element_type() != ffi::DataType::S32) {
      return InvalidArgument("tables and maps must be int32, got one of another type of shape " +
                             DescribeShape(buffer));
    }
  }
  auto* row_of = static_cast<int32_t*>(map->untyped_data());
  auto* seen = reinterpret_cast<uint32_t*>(row_of + int64_t{cp_size} * rows);
  const comm::RowMap row_map = {row_of, seen, rows};
  std::fill_n(row_of, map->element_count(), -1);
  if (is_cast == 0) std::fill_n(seen, int64_t{comm::SeenWords(cp_size)} * rows, 0u);
  auto* digest = static_cast<uint64_t*>(digests->untyped_data());
  std::fill_n(digest, cp_size, 0);
  const auto* pieces = static_cast<const comm::Piece*>(table.untyped_data());
  for (int64_t i = 0; i < dims[0]; ++i) {
    const comm::Piece& piece = pieces[i];
    if (piece.peer >= 0 && piece.peer < cp_size) digest[piece.peer] += comm::Digest(piece);
    const comm::Span span = comm::InsideSpan(piece, extents);
    for (int32_t offset = span.begin; offset < span.end; ++offset) {
      if (is_cast != 0) {
        comm::EnterCast(piece, offset, row_map);
      } else {
        seen[comm::SeenIndex(piece, offset, row_map)] |= comm::EnterReduce(piece, offset, row_map);
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kGroupMap, GroupMap,
                       ffi::Ffi::Bind()
                           .Arg<Operand>()  // table
                           .Ret<Operand>()  // map
                           .Ret<Operand>()  // digests
                           .Attr<int32_t>("cp_size")
                           .Attr<int32_t>("src_rows")
                           .Attr<int32_t>("dst_rows")
                           .Attr<int32_t>("is_cast"));

std::vector<Registration> GroupCpuRegistrations() {
  return {{"magi_jax_group_map", "cpu", kGroupMap}};
}

}  // namespace magi_jax
