// Group collectives on NVIDIA GPUs: enqueue on the stream of the call. Nothing is allocated and
// nothing waits on the host. Calls are numbered as they are enqueued, so they cannot be recorded
// into command buffers. Tables lie in device memory: their shapes are checked here, their values
// are clamped by the kernels.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/pool.h"
#include "xla_ffi/common/ffa_operands.h"
#include "xla_ffi/common/registration.h"
#include "xla_ffi/handlers/group_decode_cuda.h"

namespace magi_jax {
namespace {

using comm::Kind;
using Operand = ffi::AnyBuffer;

constexpr int64_t kStagingAlignment = 256;
// What a call runs beside: nothing; attention, which must leave it SMs; or short computation that
// it outlasts, so that attention waits for it.
constexpr int32_t kAlone = 0, kExposed = 2;
constexpr int32_t kExposedBlocks = 16;

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

// Tells calls apart that ranks must not mistake for one another.
uint64_t Signature(const GroupCall& call) {
  uint64_t hash = 0xcbf29ce484222325ull;
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3ull; };
  mix(static_cast<uint64_t>(call.kind));
  mix(call.meeting.pushes);
  mix(call.meeting.extents.src_rows);
  mix(call.meeting.extents.dst_rows);
  for (int i = 0; i < call.move.num_leaves; ++i) {
    mix(call.move.leaves[i].row_bytes);
    mix(static_cast<uint64_t>(call.move.leaves[i].element));
  }
  return hash;
}

// Says where peers find the operands: in XLA's buffers, or in a copy. Where they write, it says
// where they find the results.
ffi::Error PlaceOperands(const comm::Member& member, const GroupCall& call, int64_t operand_rows,
                         cudaStream_t stream, comm::Meeting* meeting) {
  meeting->num_leaves = call.move.num_leaves;
  const int64_t capacity = member.config().staging_bytes;
  int64_t offset = 0;
  for (int i = 0; i < call.move.num_leaves; ++i) {
    const comm::Leaf& leaf = call.move.leaves[i];
    if (capacity == 0) {
      const void* array = meeting->pushes ? leaf.result : leaf.operand;
      meeting->addresses[i] = reinterpret_cast<uint64_t>(array);
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

// Bytes that are copied into this memory before a call.
int64_t CopiedBytes(const comm::Member& member, const GroupCall& call, int64_t operand_rows) {
  int64_t bytes = 0;
  for (int i = 0; i < call.move.num_leaves && member.config().staging_bytes > 0; ++i)
    bytes += operand_rows * call.move.leaves[i].row_bytes;
  return bytes;
}

// Whether all rows consist of vectors of 16 bytes.
bool HasWholeVectors(const comm::Move& move) {
  return std::all_of(move.leaves, move.leaves + move.num_leaves,
                     [](const comm::Leaf& leaf) { return leaf.row_bytes % 16 == 0; });
}

cudaError_t Launch(const GroupCall& call, cudaStream_t stream) {
  switch (call.kind) {
    case Kind::kCast:
      return call.meeting.pushes ? comm::Push(call.meeting, call.move, stream)
                                 : comm::Cast(call.meeting, call.move, stream);
    case Kind::kReduceSum:
      return comm::ReduceSum(call.meeting, call.move, stream);
    case Kind::kReduceLse:
      return comm::ReduceLse(call.meeting, call.move, stream);
  }
  return cudaErrorInvalidValue;
}

ffi::Error Enqueue(comm::Member& member, GroupCall& call, int64_t operand_rows, int32_t beside,
                   cudaStream_t stream) {
  call.move.num_blocks = member.config().num_blocks;
  if (beside == kExposed) call.move.num_blocks = std::max(call.move.num_blocks, kExposedBlocks);
  call.move.stream = member.streams_rows();
  call.meeting.pushes = call.kind == Kind::kCast && HasWholeVectors(call.move) &&
                        comm::PoolPushes(member.config().pool, call.move.num_blocks);
  MAGI_JAX_RETURN_IF_CUDA_ERROR(
      member.Begin(stream, call.kind, Signature(call), call.move.num_blocks, &call.meeting));
  MAGI_JAX_RETURN_IF_ERROR(PlaceOperands(member, call, operand_rows, member.side(), &call.meeting));
  MAGI_JAX_RETURN_IF_CUDA_ERROR(Launch(call, member.side()));
  if (call.move.own_rows > 0) {
    MAGI_JAX_RETURN_IF_CUDA_ERROR(member.BeginApart(comm::OwnRowBlocks(call.move)));
    MAGI_JAX_RETURN_IF_CUDA_ERROR(comm::CopyOwnRows(call.meeting, call.move, member.apart()));
    MAGI_JAX_RETURN_IF_CUDA_ERROR(member.EndApart());
  }
  std::vector<const void*> buffers = {call.move.map.row_of};
  for (int i = 0; i < call.move.num_leaves; ++i) buffers.push_back(call.move.leaves[i].result);
  MAGI_JAX_RETURN_IF_CUDA_ERROR(member.End(std::move(buffers)));
  if (beside == kAlone) return ffi::Error::Success();
  MAGI_JAX_RETURN_IF_CUDA_ERROR(comm::AwaitStart(call.meeting, call.move.num_blocks,
                                                 member.apart_blocks(),
                                                 CopiedBytes(member, call, operand_rows), stream));
  return ffi::Error::Success();
}

// Where a handler fails its program ends with an error, and what is enqueued on `stream` next may
// be another's, with the buffers of this one: it waits for the calls that are still under way.
class Failing {
 public:
  Failing(int32_t device, cudaStream_t stream) : device_(device), stream_(stream) {}
  ~Failing() {
    if (fails_) comm::Pools::Get().AwaitCalls(device_, stream_);
  }
  Failing(const Failing&) = delete;
  Failing& operator=(const Failing&) = delete;

  // What the handler returns at last.
  ffi::Error Unless(ffi::Error error) {
    fails_ = error.failure();
    return error;
  }

 private:
  const int32_t device_;
  const cudaStream_t stream_;
  bool fails_ = true;
};

ffi::Error FindMember(int32_t pool, int32_t device, std::shared_ptr<comm::Member>* member) {
  const std::string failure = comm::PoolFailure(pool);
  if (!failure.empty()) return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure);
  *member = comm::Pools::Get().Find(pool, device);
  if (*member != nullptr) return ffi::Error::Success();
  return InvalidArgument("symmetric memory " + std::to_string(pool) + " has no part on device " +
                         std::to_string(device) +
                         ": it was closed, or set up for another mesh or axis");
}

// Starts a call beside the stream. Results may be read, and operands and map overwritten, once
// Finish was enqueued.
template <Kind kKind>
ffi::Error Start(cudaStream_t stream, int32_t device, ffi::RunId run, Operand send, Operand recv,
                 Operand caller, ffi::RemainingArgs operands, ffi::Result<Operand> map,
                 ffi::RemainingRets results, int32_t pool, int32_t cp_size, int32_t src_rows,
                 int32_t dst_rows, int32_t self_rows, int32_t beside) {
  Failing failing(device, stream);
  std::shared_ptr<comm::Member> member;
  MAGI_JAX_RETURN_IF_ERROR(FindMember(pool, device, &member));
  if (member->config().cp_size != cp_size) {
    return InvalidArgument("symmetric memory " + std::to_string(pool) + " was set up for " +
                           std::to_string(member->config().cp_size) + " ranks, the call has " +
                           std::to_string(cp_size));
  }
  if (caller.element_type() != ffi::DataType::S32 || caller.element_count() != 1) {
    return InvalidArgument("caller must be one int32, got shape " + DescribeShape(caller));
  }
  constexpr bool kIsCast = kKind == Kind::kCast;
  GroupCall call = {};
  call.kind = kKind;
  call.move.own_rows = kIsCast ? self_rows : 0;
  // Ranks of one process share the number of an execution; where operands are staged they may be of
  // several, whose numbers say nothing to each other.
  call.meeting.run = member->config().staging_bytes == 0 ? static_cast<uint64_t>(run.run_id) : 0;
  call.meeting.caller = static_cast<const int32_t*>(caller.untyped_data());
  call.meeting.extents = {cp_size, src_rows, dst_rows};
  const int64_t operand_rows = kIsCast ? src_rows : dst_rows;
  const int64_t result_rows = kIsCast ? dst_rows : src_rows;
  MAGI_JAX_RETURN_IF_ERROR(DecodeTable("send", send, &call.meeting.send));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTable("recv", recv, &call.meeting.recv));
  MAGI_JAX_RETURN_IF_ERROR(DecodeMap(*map, kIsCast, cp_size, &call.move.map));
  MAGI_JAX_RETURN_IF_ERROR(DecodeLeaves(operands, results, operand_rows, result_rows, &call));
  if (call.move.map.rows != result_rows) {
    return InvalidArgument("the map has " + std::to_string(call.move.map.rows) + " rows, " +
                           std::to_string(result_rows) + " are needed");
  }
  const std::lock_guard<std::mutex> lock(member->mutex);
  ffi::Error error = Enqueue(*member, call, operand_rows, beside, stream);
  // Ranks count calls and blocks; one that was begun and not launched leaves them out of step.
  if (error.failure()) member->GiveUp(error.message());
  return failing.Unless(std::move(error));
}

// Operands: map and results of the call, and whatever must live until it is done. Results: those
// of the call, in the same buffers.
ffi::Error Finish(cudaStream_t stream, int32_t device, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, int32_t pool) {
  Failing failing(device, stream);
  std::shared_ptr<comm::Member> member;
  MAGI_JAX_RETURN_IF_ERROR(FindMember(pool, device, &member));
  if (operands.size() < results.size() + 1) {
    return InvalidArgument("the map and results of a call are needed, got " +
                           std::to_string(operands.size()) + " operands");
  }
  std::vector<const void*> buffers;
  for (size_t i = 0; i <= results.size(); ++i) {
    auto operand = operands.get<Operand>(i);
    if (operand.has_error()) return operand.error();
    buffers.push_back(operand->untyped_data());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<Operand>(i);
    if (result.has_error()) return result.error();
    if ((*result)->untyped_data() != buffers[i + 1]) {
      return InvalidArgument("result " + std::to_string(i) + " of a call in flight was moved");
    }
  }
  const std::lock_guard<std::mutex> lock(member->mutex);
  const std::string error = member->Finish(stream, buffers);
  return failing.Unless(error.empty() ? ffi::Error::Success() : InvalidArgument(error));
}

// Gives its operands back. XLA drops what nobody reads and would drop a Finish alone, since other
// operations wait for its start: this call reads all.
ffi::Error Keep(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (operands.size() != results.size()) {
    return InvalidArgument("as many results as operands are needed, got " +
                           std::to_string(results.size()) + " and " +
                           std::to_string(operands.size()));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto operand = operands.get<Operand>(i);
    if (operand.has_error()) return operand.error();
    auto result = results.get<Operand>(i);
    if (result.has_error()) return result.error();
    if ((*result)->untyped_data() != operand->untyped_data()) {
      return InvalidArgument("operand " + std::to_string(i) + " was moved");
    }
  }
  return ffi::Error::Success();
}

auto BindStart() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::RunId>()
      .Arg<Operand>()  // send
      .Arg<Operand>()  // recv
      .Arg<Operand>()  // caller
      .RemainingArgs()
      .Ret<Operand>()  // map
      .RemainingRets()
      .Attr<int32_t>("pool")
      .Attr<int32_t>("cp_size")
      .Attr<int32_t>("src_rows")
      .Attr<int32_t>("dst_rows")
      .Attr<int32_t>("self_rows")
      .Attr<int32_t>("beside");
}

auto BindFinish() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int32_t>("pool");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kGroupCast, Start<Kind::kCast>, BindStart());
XLA_FFI_DEFINE_HANDLER(kGroupReduceSum, Start<Kind::kReduceSum>, BindStart());
XLA_FFI_DEFINE_HANDLER(kGroupReduceLse, Start<Kind::kReduceLse>, BindStart());
XLA_FFI_DEFINE_HANDLER(kGroupFinish, Finish, BindFinish());
XLA_FFI_DEFINE_HANDLER(kGroupKeep, Keep, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

std::vector<Registration> GroupRegistrations() {
  return {
      {"magi_jax_group_cast", "CUDA", kGroupCast},
      {"magi_jax_group_reduce_sum", "CUDA", kGroupReduceSum},
      {"magi_jax_group_reduce_lse", "CUDA", kGroupReduceLse},
      {"magi_jax_group_finish", "CUDA", kGroupFinish},
      {"magi_jax_group_keep", "CUDA", kGroupKeep},
  };
}

}  // namespace magi_jax
