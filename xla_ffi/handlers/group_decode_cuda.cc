// Operands of the group collectives on NVIDIA GPUs, decoded and checked by their shapes.

#include "xla_ffi/handlers/group_decode_cuda.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace magi_jax {
namespace {

using comm::Kind;
using Operand = ffi::AnyBuffer;

constexpr int64_t kMaxCounted = std::numeric_limits<uint32_t>::max();

ffi::Error DecodeElement(Operand buffer, comm::Element* element) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      *element = comm::Element::kF32;
      return ffi::Error::Success();
    case ffi::DataType::F16:
      *element = comm::Element::kF16;
      return ffi::Error::Success();
    case ffi::DataType::BF16:
      *element = comm::Element::kBF16;
      return ffi::Error::Success();
    case ffi::DataType::S32:
    case ffi::DataType::U32:
      *element = comm::Element::kS32;
      return ffi::Error::Success();
    case ffi::DataType::PRED:
      *element = comm::Element::kPred;
      return ffi::Error::Success();
    default:
      return InvalidArgument(
          "sums are made of float32, float16, bfloat16, int32, uint32 and booleans, got XLA type " +
          std::to_string(static_cast<int>(buffer.element_type())));
  }
}

// How many things of an array the kernels count in 32 bits: vectors of 16 bytes where rows consist
// of whole ones, else words, bytes or elements.
int64_t Counted(Kind kind, int64_t result_rows, const comm::Leaf& leaf) {
  const int64_t bytes = leaf.row_bytes, elements = leaf.row_elements;
  if (kind == Kind::kCast) {
    return result_rows * (bytes % 16 == 0 ? bytes / 16 : bytes % 4 == 0 ? bytes / 4 : bytes);
  }
  const bool is_half = leaf.element == comm::Element::kF16 || leaf.element == comm::Element::kBF16;
  const int64_t in_vector = is_half ? 8 : 4;
  const bool in_vectors =
      kind == Kind::kReduceSum && leaf.element != comm::Element::kPred && elements % in_vector == 0;
  return result_rows * (in_vectors ? elements / in_vector : elements);
}

// Elements of a row; rows are the leading axis.
int64_t RowElements(Operand buffer) {
  int64_t elements = 1;
  const auto dims = buffer.dimensions();
  for (size_t i = 1; i < dims.size(); ++i) elements *= dims[i];
  return elements;
}

ffi::Error DecodeLeaf(Kind kind, Operand operand, Operand result, int64_t operand_rows,
                      int64_t result_rows, comm::Leaf* leaf) {
  const auto from = operand.dimensions(), to = result.dimensions();
  const int64_t row_elements = RowElements(operand);
  if (from.size() == 0 || to.size() == 0 || from[0] != operand_rows || to[0] != result_rows ||
      RowElements(result) != row_elements) {
    return InvalidArgument("an array of " + std::to_string(operand_rows) +
                           " rows must become one of " + std::to_string(result_rows) +
                           ", got shapes " + DescribeShape(operand) + " and " +
                           DescribeShape(result));
  }
  if (kind != Kind::kCast) MAGI_JAX_RETURN_IF_ERROR(DecodeElement(operand, &leaf->element));
  if (kind == Kind::kCast) {
    const bool is_bool = operand.element_type() == ffi::DataType::PRED;
    leaf->element = is_bool ? comm::Element::kPred : comm::Element::kF32;
  }
  leaf->operand = operand.untyped_data();
  leaf->result = result.untyped_data();
  leaf->row_elements = static_cast<uint32_t>(row_elements);
  // A cast keeps the dtype, so that its result tells the size of a row even of an empty operand.
  const Operand& sized = kind == Kind::kCast ? result : operand;
  const int64_t sized_rows = kind == Kind::kCast ? result_rows : operand_rows;
  const int64_t row_bytes = sized_rows == 0 ? 0 : sized.size_bytes() / sized_rows;
  leaf->row_bytes = static_cast<uint32_t>(row_bytes);
  leaf->result_bytes = static_cast<int64_t>(result.size_bytes());
  if (std::max(row_elements, row_bytes) > kMaxCounted ||
      Counted(kind, result_rows, *leaf) > kMaxCounted) {
    return InvalidArgument(
        "an array of shape " + DescribeShape(operand) + " with " + std::to_string(result_rows) +
        " rows of results is too large: kernels count its vectors of 16 bytes, or"
        " what its rows consist of where those do not fit, in 32 bits");
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error DecodeTable(const char* name, Operand buffer, comm::PieceTable* table) {
  const auto dims = buffer.dimensions();
  if (buffer.element_type() != ffi::DataType::S32 || dims.size() != 2 || dims[1] != 5) {
    return InvalidArgument(std::string(name) + " must be int32 [pieces, 5], got shape " +
                           DescribeShape(buffer));
  }
  table->pieces = static_cast<const comm::Piece*>(buffer.untyped_data());
  table->num_pieces = static_cast<int32_t>(dims[0]);
  return ffi::Error::Success();
}

ffi::Error DecodeLeaves(ffi::RemainingArgs operands, ffi::RemainingRets results,
                        int64_t operand_rows, int64_t result_rows, GroupCall* call) {
  const size_t count = results.size();
  call->move.adds = call->kind == Kind::kReduceSum && operands.size() == 2 * count;
  if (count == 0 || count > comm::kMaxLeaves ||
      operands.size() != (call->move.adds ? 2 * count : count)) {
    return InvalidArgument("a call moves 1 to " + std::to_string(comm::kMaxLeaves) +
                           " arrays, got " + std::to_string(operands.size()) + " and " +
                           std::to_string(count) + " results");
  }
  for (size_t i = 0; i < count; ++i) {
    auto operand = operands.get<Operand>(i);
    auto result = results.get<Operand>(i);
    if (operand.has_error()) return operand.error();
    if (result.has_error()) return result.error();
    MAGI_JAX_RETURN_IF_ERROR(DecodeLeaf(call->kind, *operand, **result, operand_rows, result_rows,
                                        &call->move.leaves[i]));
  }
  for (size_t i = 0; call->move.adds && i < count; ++i) {
    auto before = operands.get<Operand>(count + i);
    if (before.has_error()) return before.error();
    if (before->untyped_data() != call->move.leaves[i].result) {
      return InvalidArgument("array " + std::to_string(i) + " that sums are added to was moved");
    }
  }
  call->move.num_leaves = static_cast<int32_t>(count);
  for (size_t i = 1; call->kind == Kind::kReduceSum && i < count; ++i) {
    if (call->move.leaves[i].element != call->move.leaves[0].element) {
      return InvalidArgument("the arrays that one call sums must have one dtype");
    }
  }
  if (call->kind != Kind::kReduceLse) return ffi::Error::Success();
  const comm::Leaf& out = call->move.leaves[0];
  const comm::Leaf& lse = call->move.leaves[1];
  const bool floating = out.element == comm::Element::kF32 || out.element == comm::Element::kF16 ||
                        out.element == comm::Element::kBF16;
  if (count != 2 || !floating || lse.element != comm::Element::kF32 || lse.row_elements == 0 ||
      out.row_elements % lse.row_elements != 0) {
    return InvalidArgument("a merge takes out [rows, N, Hv] and float32 lse [rows, N]");
  }
  return ffi::Error::Success();
}

// The map is scratch of XLA: [2, rows] for a cast, [cp + words, rows] for a reduce.
ffi::Error DecodeMap(Operand buffer, bool is_cast, int32_t cp_size, comm::RowMap* map) {
  const int64_t slots = is_cast ? 2 : cp_size + comm::SeenWords(cp_size);
  const auto dims = buffer.dimensions();
  if (buffer.element_type() != ffi::DataType::S32 || dims.size() != 2 || dims[0] != slots) {
    return InvalidArgument("the map must be int32 [" + std::to_string(slots) +
                           ", rows], got shape " + DescribeShape(buffer));
  }
  map->row_of = static_cast<int32_t*>(buffer.untyped_data());
  map->rows = static_cast<int32_t>(dims[1]);
  map->seen = reinterpret_cast<uint32_t*>(map->row_of + int64_t{cp_size} * map->rows);
  return ffi::Error::Success();
}

}  // namespace magi_jax
