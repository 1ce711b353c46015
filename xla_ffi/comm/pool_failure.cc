// What to say of a member that has failed.

#include <mutex>
#include <string>
#include <utility>

#include "xla_ffi/comm/pool.h"

namespace magi_jax::comm {

const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kCast:
      return "group_cast";
    case Kind::kReduceSum:
      return "group_reduce";
    case Kind::kReduceLse:
      return "group_reduce with op=\"lse\"";
  }
  return "a call";
}

void Member::GiveUp(std::string reason) {
  const std::lock_guard<std::mutex> lock(unusable_mutex_);
  unusable_ = std::move(reason);
}

std::string Member::Failure() const {
  {
    const std::lock_guard<std::mutex> lock(unusable_mutex_);
    if (!unusable_.empty()) return unusable_;
  }
  const auto failure =
      static_cast<comm::Failure>(*static_cast<volatile uint32_t*>(&record_->failure));
  if (failure == comm::Failure::kNone) return "";
  const std::string peer = "rank " + std::to_string(record_->peer);
  const std::string seconds = std::to_string(config_.timeout_ns * 1e-9) + " s";
  std::string reason;
  switch (failure) {
    case comm::Failure::kNone:
      break;
    case comm::Failure::kNeverEntered:
      reason = peer + " did not come within " + seconds;
      break;
    case comm::Failure::kNeverLeft:
      reason = peer + " did not finish reading within " + seconds;
      break;
    case comm::Failure::kGaveUp:
      reason = peer + " had given up";
      break;
    case comm::Failure::kOtherCall:
      reason = peer + " makes another call, or one with arrays of other shapes";
      break;
    case comm::Failure::kOtherPlan:
      reason = peer + " has a plan that differs from this rank's";
      break;
    case comm::Failure::kOtherRun:
      reason = peer +
               " runs other steps at the same time: threads of this process that run programs"
               " over one symmetric memory must take turns";
      break;
    case comm::Failure::kOtherRank:
      reason =
          "the caller is " + peer + " of its mesh axis, the memory was set up for another mesh";
      break;
  }
  return "rank " + std::to_string(config_.rank) + " (device " + std::to_string(config_.device) +
         ") gave up in call " + std::to_string(record_->call) + " (" +
         KindName(static_cast<Kind>(record_->kind)) + ") of symmetric memory " +
         std::to_string(config_.pool) + ": " + reason;
}

std::string PoolFailure(int32_t pool) {
  for (const std::shared_ptr<Member>& member : Pools::Get().MembersOf(pool)) {
    std::string failure = member->Failure();
    if (!failure.empty()) return failure;
  }
  return "";
}

}  // namespace magi_jax::comm
