// Calls of a member: when they start, when they are over, and which buffers are theirs.

#include <utility>

#include "xla_ffi/comm/pool.h"
#include "xla_ffi/comm/pool_layout.h"

namespace magi_jax::comm {
namespace {

constexpr size_t kMostInFlight = 4096;  // more were never finished

}  // namespace

cudaError_t Member::Begin(cudaStream_t stream, Kind kind, uint64_t signature, int32_t num_blocks,
                          Meeting* meeting) {
  if (cudaError_t error = cudaEventRecord(fork_, stream)) return error;
  if (cudaError_t error = cudaStreamWaitEvent(side_, fork_, 0)) return error;
  const Layout layout(config_.cp_size);
  meeting->inbox = static_cast<Mailbox*>(memory_);
  meeting->outbox = At<Mailbox*>(memory_, layout.outbox);
  meeting->bases = At<uint64_t>(memory_, layout.bases);
  meeting->broken = At<uint32_t>(memory_, layout.broken);
  meeting->arrived = At<uint64_t>(memory_, layout.arrived);
  meeting->apart = At<uint64_t>(memory_, layout.apart);
  meeting->record = record_;
  meeting->call = ++call_;
  meeting->arrived_before = arrived_;
  arrived_ += uint64_t{kBarriers} * num_blocks;
  meeting->signature = signature;
  meeting->timeout_ns = static_cast<uint64_t>(config_.timeout_ns);
  meeting->rank = config_.rank;
  meeting->kind = static_cast<uint32_t>(kind);
  return cudaSuccess;
}

cudaError_t Member::BeginApart(int32_t blocks) {
  apart_blocks_ += blocks;
  return cudaStreamWaitEvent(apart_, fork_, 0);
}

cudaError_t Member::EndApart() {
  if (cudaError_t error = cudaEventRecord(join_, apart_)) return error;
  return cudaStreamWaitEvent(side_, join_, 0);
}

cudaError_t Member::End(std::vector<const void*> buffers) {
  if (in_flight_.size() == kMostInFlight) {
    idle_.push_back(in_flight_.front().done);
    in_flight_.erase(in_flight_.begin());
  }
  cudaEvent_t done = nullptr;
  if (idle_.empty()) {
    if (cudaError_t error = cudaEventCreateWithFlags(&done, cudaEventDisableTiming)) return error;
  } else {
    done = idle_.back();
    idle_.pop_back();
  }
  in_flight_.push_back({done, std::move(buffers)});
  return cudaEventRecord(done, side_);
}

std::string Member::Finish(cudaStream_t stream, const std::vector<const void*>& buffers) {
  // The latest call comes first: XLA gives buffers out again.
  for (size_t i = in_flight_.size(); i-- > 0;) {
    if (in_flight_[i].buffers != buffers) continue;
    const cudaEvent_t done = in_flight_[i].done;
    in_flight_.erase(in_flight_.begin() + static_cast<ptrdiff_t>(i));
    idle_.push_back(done);
    const cudaError_t status = cudaStreamWaitEvent(stream, done, 0);
    return status == cudaSuccess ? "" : Explain("a call was not waited for", status);
  }
  return "no call in flight has these buffers: it was finished already, as where two calls with "
         "equal"
         " operands became one, is not among the last " +
         std::to_string(kMostInFlight) + ", or its results were copied before it was done";
}

void Member::AwaitCalls(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (cudaEventRecord(join_, side_) == cudaSuccess) cudaStreamWaitEvent(stream, join_, 0);
  cudaGetLastError();  // as where `stream` is recorded: not the next caller's
}

}  // namespace magi_jax::comm
