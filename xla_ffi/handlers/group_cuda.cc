// Group collectives on NVIDIA GPUs: decode, validate, enqueue on the stream of the call. Nothing is
// allocated and nothing waits on the host. Calls are numbered as they are enqueued, so they cannot
// be recorded into command buffers. Tables lie in device memory: their shapes are checked here,
// their values are clamped by the kernels.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/pool.h"
#include "xla_ffi/common/ffa_operands.h"
#include "xla_ffi/common/registration.h"

namespace magi_jax {
namespace {

using comm::Kind;
using Operand = ffi::AnyBuffer;

constexpr int64_t kStagingAlignment = 256;
constexpr int64_t kMaxVectors = std::numeric_limits<uint32_t>::max();

ffi::Error CudaFailed(const char* what, cudaError_t error) {
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(what) + ": " + cudaGetErrorName(error) +
                                                   ", " + cudaGetErrorString(error));
}

#define MAGI_JAX_RETURN_IF_CUDA_ERROR(expression)                               \
  do {                                                                          \
    const cudaError_t magi_jax_error = (expression);                            \
    if (magi_jax_error != cudaSuccess)                                          \
      return CudaFailed("a group collective was not enqueued", magi_jax_error); \
  } while (false)

// A call, decoded.
struct GroupCall {
  Kind kind;
  comm::PieceTable send, recv;
  const int32_t* rank;
  comm::Extents extents;
  comm::Move move;
};

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
  if (row_elements * std::max(operand_rows, result_rows) > kMaxVectors) {
    return InvalidArgument("an array of shape " + DescribeShape(operand) +
                           " has more than 2^32 - 1 elements");
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
  leaf->row_bytes = static_cast<uint32_t>(sized_rows == 0 ? 0 : sized.size_bytes() / sized_rows);
  leaf->result_bytes = static_cast<int64_t>(result.size_bytes());
  return ffi::Error::Success();
}

ffi::Error DecodeLeaves(ffi::RemainingArgs operands, ffi::RemainingRets results,
                        int64_t operand_rows, int64_t result_rows, GroupCall* call) {
  const size_t count = operands.size();
  if (count == 0 || count > comm::kMaxLeaves || results.size() != count) {
    return InvalidArgument("a call moves 1 to " + std::to_string(comm::kMaxLeaves) +
                           " arrays, got " + std::to_string(count) + " and " +
                           std::to_string(results.size()) + " results");
  }
  for (size_t i = 0; i < count; ++i) {
    auto operand = operands.get<Operand>(i);
    auto result = results.get<Operand>(i);
    if (operand.has_error()) return operand.error();
    if (result.has_error()) return result.error();
    MAGI_JAX_RETURN_IF_ERROR(DecodeLeaf(call->kind, *operand, **result, operand_rows, result_rows,
                                        &call->move.leaves[i]));
  }
  call->move.num_leaves = static_cast<int32_t>(count);
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

// Tells calls apart that ranks must not mistake for one another.
uint64_t Signature(const GroupCall& call) {
  uint64_t hash = 0xcbf29ce484222325ull;
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3ull; };
  mix(static_cast<uint64_t>(call.kind));
  mix(call.extents.src_rows);
  mix(call.extents.dst_rows);
  for (int i = 0; i < call.move.num_leaves; ++i) {
    mix(call.move.leaves[i].row_bytes);
    mix(static_cast<uint64_t>(call.move.leaves[i].element));
  }
  return hash;
}

// Says where peers find the operands: in XLA's buffers, or in a copy.
ffi::Error PlaceOperands(const comm::Member& member, const GroupCall& call, int64_t operand_rows,
                         cudaStream_t stream, comm::Meeting* meeting) {
  meeting->num_leaves = call.move.num_leaves;
  const int64_t capacity = member.config().staging_bytes;
  int64_t offset = 0;
  for (int i = 0; i < call.move.num_leaves; ++i) {
    const comm::Leaf& leaf = call.move.leaves[i];
    if (capacity == 0) {
      meeting->addresses[i] = reinterpret_cast<uint64_t>(leaf.operand);
      continue;
    }
    const int64_t bytes = operand_rows * leaf.row_bytes;
    if (offset + bytes > capacity) {
      return InvalidArgument("symmetric memory " + std::to_string(member.config().pool) +
                             " has room for " + std::to_string(capacity) + " bytes, a " +
                             comm::KindName(call.kind) + " of " +
                             std::to_string(call.move.num_leaves) + " arrays needs at least " +
                             std::to_string(offset + bytes));
    }
    meeting->addresses[i] = static_cast<uint64_t>(offset);
    MAGI_JAX_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(static_cast<char*>(member.staging()) + offset,
                                                  leaf.operand, bytes, cudaMemcpyDeviceToDevice,
                                                  stream));
    offset += (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
  }
  return ffi::Error::Success();
}

cudaError_t MoveRows(const comm::Meeting& meeting, const GroupCall& call, cudaStream_t stream) {
  switch (call.kind) {
    case Kind::kCast:
      return comm::Cast(meeting, call.move, stream);
    case Kind::kReduceSum:
      return comm::ReduceSum(meeting, call.move, stream);
    case Kind::kReduceLse:
      return comm::ReduceLse(meeting, call.move, stream);
  }
  return cudaErrorInvalidValue;
}

ffi::Error Enqueue(comm::Member& member, GroupCall& call, int64_t operand_rows,
                   cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(member.mutex);
  call.move.num_blocks = member.config().num_blocks;
  comm::Meeting meeting = {};
  MAGI_JAX_RETURN_IF_CUDA_ERROR(member.Begin(stream, call.kind, Signature(call), &meeting));
  MAGI_JAX_RETURN_IF_ERROR(PlaceOperands(member, call, operand_rows, stream, &meeting));
  MAGI_JAX_RETURN_IF_CUDA_ERROR(
      call.kind == Kind::kCast ? comm::MapCast(call.recv, call.extents, call.move.map, stream)
                               : comm::MapReduce(call.send, call.extents, call.move.map, stream));
  MAGI_JAX_RETURN_IF_CUDA_ERROR(comm::Enter(meeting, call.send, call.recv, call.rank, stream));
  MAGI_JAX_RETURN_IF_CUDA_ERROR(MoveRows(meeting, call, stream));
  MAGI_JAX_RETURN_IF_CUDA_ERROR(comm::Leave(meeting, call.move, stream));
  MAGI_JAX_RETURN_IF_CUDA_ERROR(member.End(stream));
  return ffi::Error::Success();
}

template <Kind kKind>
ffi::Error RunGroup(cudaStream_t stream, int32_t device, Operand send, Operand recv, Operand rank,
                    ffi::RemainingArgs operands, ffi::Result<Operand> map,
                    ffi::RemainingRets results, int32_t pool, int32_t cp_size, int32_t src_rows,
                    int32_t dst_rows) {
  const std::string failure = comm::PoolFailure(pool);
  if (!failure.empty()) return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure);
  const auto member = comm::Pools::Get().Find(pool, device);
  if (member == nullptr || member->config().cp_size != cp_size) {
    return InvalidArgument("symmetric memory " + std::to_string(pool) + " of " +
                           std::to_string(cp_size) + " ranks has no part on device " +
                           std::to_string(device) +
                           ": it was closed, or set up for another mesh or axis");
  }
  if (rank.element_type() != ffi::DataType::S32 || rank.element_count() != 1) {
    return InvalidArgument("rank must be one int32, got shape " + DescribeShape(rank));
  }
  constexpr bool kIsCast = kKind == Kind::kCast;
  GroupCall call = {};
  call.kind = kKind;
  call.rank = static_cast<const int32_t*>(rank.untyped_data());
  call.extents = {cp_size, src_rows, dst_rows};
  const int64_t operand_rows = kIsCast ? src_rows : dst_rows;
  const int64_t result_rows = kIsCast ? dst_rows : src_rows;
  MAGI_JAX_RETURN_IF_ERROR(DecodeTable("send", send, &call.send));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTable("recv", recv, &call.recv));
  MAGI_JAX_RETURN_IF_ERROR(DecodeMap(*map, kIsCast, cp_size, &call.move.map));
  MAGI_JAX_RETURN_IF_ERROR(DecodeLeaves(operands, results, operand_rows, result_rows, &call));
  if (call.move.map.rows != result_rows) {
    return InvalidArgument("the map has " + std::to_string(call.move.map.rows) + " rows, " +
                           std::to_string(result_rows) + " are needed");
  }
  return Enqueue(*member, call, operand_rows, stream);
}

auto BindGroup() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Operand>()  // send
      .Arg<Operand>()  // recv
      .Arg<Operand>()  // rank
      .RemainingArgs()
      .Ret<Operand>()  // map
      .RemainingRets()
      .Attr<int32_t>("pool")
      .Attr<int32_t>("cp_size")
      .Attr<int32_t>("src_rows")
      .Attr<int32_t>("dst_rows");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kGroupCast, RunGroup<Kind::kCast>, BindGroup());
XLA_FFI_DEFINE_HANDLER(kGroupReduceSum, RunGroup<Kind::kReduceSum>, BindGroup());
XLA_FFI_DEFINE_HANDLER(kGroupReduceLse, RunGroup<Kind::kReduceLse>, BindGroup());

std::vector<Registration> GroupRegistrations() {
  return {
      {"magi_jax_group_cast", "CUDA", kGroupCast},
      {"magi_jax_group_reduce_sum", "CUDA", kGroupReduceSum},
      {"magi_jax_group_reduce_lse", "CUDA", kGroupReduceLse},
  };
}

}  // namespace magi_jax
