#include "xla_ffi/comm/pool.h"

#include <algorithm>
#include <cstring>

#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/pool_layout.h"

namespace magi_jax::comm {
namespace {

// With fewer, reading by large bulk copies is as fast.
constexpr int32_t kLeastPushBlocks = 12;

// Makes a device the current one of this thread for a while.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t device) {
    cudaGetDevice(&before_);
    error_ = cudaSetDevice(device);
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  cudaError_t error_;
};

}  // namespace

int64_t MemberBytes(int32_t cp_size, int64_t staging_bytes) {
  return Layout(cp_size).staging + Align(staging_bytes);
}

std::unique_ptr<Member> Member::Create(const MemberConfig& config, std::string* error) {
  const CurrentDevice current(config.device);
  std::unique_ptr<Member> member(new Member(config));
  member->memory_bytes_ = MemberBytes(config.cp_size, config.staging_bytes);
  member->memory_ = config.memory;
  cudaError_t status = current.error();
  const auto run = [&](cudaError_t result) {
    if (status == cudaSuccess) status = result;
    return status == cudaSuccess;
  };
  if ((config.memory != nullptr || run(cudaMalloc(&member->memory_, member->memory_bytes_))) &&
      run(cudaMemset(member->memory_, 0, Layout(config.cp_size).staging)) &&
      run(cudaHostAlloc(reinterpret_cast<void**>(&member->record_), sizeof(FailureRecord),
                        cudaHostAllocMapped | cudaHostAllocPortable)) &&
      run(CanStreamRows(config.device, &member->streams_rows_)) && run(member->CreateStreams()) &&
      run(LoadKernels(member->streams_rows())) && run(cudaDeviceSynchronize())) {
    std::memset(static_cast<void*>(member->record_), 0, sizeof(FailureRecord));
    member->outbox_.assign(config.cp_size, nullptr);
    member->bases_.assign(config.cp_size, 0);
    return member;
  }
  cudaGetLastError();  // the failure is reported here, not to the next caller
  *error = Explain(("no symmetric memory of " + std::to_string(member->memory_bytes_) +
                    " bytes on device " + std::to_string(config.device))
                       .c_str(),
                   status);
  return nullptr;
}

cudaError_t Member::CreateStreams() {
  // First in line for SMs that become free.
  int least = 0, greatest = 0;
  if (cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest)) return error;
  cudaError_t error = cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest);
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithPriority(&apart_, cudaStreamNonBlocking, greatest);
  }
  for (cudaEvent_t* event : {&fork_, &join_}) {
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  }
  return error;
}

Member::~Member() {
  const CurrentDevice current(config_.device);
  for (void* memory : opened_) cudaIpcCloseMemHandle(memory);
  for (const InFlight& call : in_flight_) cudaEventDestroy(call.done);
  for (cudaEvent_t event : idle_) cudaEventDestroy(event);
  for (cudaEvent_t event : {fork_, join_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (apart_ != nullptr) cudaStreamDestroy(apart_);
  if (side_ != nullptr) cudaStreamDestroy(side_);
  if (record_ != nullptr) cudaFreeHost(record_);
  if (config_.memory == nullptr && memory_ != nullptr) cudaFree(memory_);
}

std::string Member::Export(std::string* error) const {
  const CurrentDevice current(config_.device);
  cudaIpcMemHandle_t handle;
  const cudaError_t status = cudaIpcGetMemHandle(&handle, memory_);
  if (status != cudaSuccess) {
    cudaGetLastError();
    *error = Explain("this memory cannot be shared with another process", status);
    return "";
  }
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

Mailbox* Member::MailboxAt(void* peer_memory) const {
  return static_cast<Mailbox*>(peer_memory) + config_.rank;
}

std::string Member::ConnectLocal(int32_t peer_rank, int32_t peer_device, void* peer_memory) {
  const CurrentDevice current(config_.device);
  if (peer_device != config_.device) {
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer_device, 0);
    cudaGetLastError();
    if (status != cudaSuccess && status != cudaErrorPeerAccessAlreadyEnabled) {
      return Explain(("device " + std::to_string(config_.device) + " cannot reach the memory of " +
                      "device " + std::to_string(peer_device))
                         .c_str(),
                     status);
    }
    int atomics = 0;
    cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, config_.device,
                              peer_device);
    reaches_atomically_ &= atomics != 0;
  }
  outbox_[peer_rank] = MailboxAt(peer_memory);
  // Without staging, addresses are those of the process.
  const Layout layout(config_.cp_size);
  bases_[peer_rank] = config_.staging_bytes == 0
                          ? 0
                          : reinterpret_cast<uint64_t>(At<char>(peer_memory, layout.staging));
  return "";
}

std::string Member::ConnectExported(int32_t peer_rank, const std::string& exported) {
  const CurrentDevice current(config_.device);
  cudaIpcMemHandle_t handle;
  if (exported.size() != sizeof(handle)) return "a handle of the wrong size was exchanged";
  std::memcpy(&handle, exported.data(), sizeof(handle));
  void* memory = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return Explain(
        ("device " + std::to_string(config_.device) + " cannot reach the memory of rank " +
         std::to_string(peer_rank) + " in another process")
            .c_str(),
        status);
  }
  opened_.push_back(memory);
  ConnectMapped(peer_rank, memory);
  return "";
}

void Member::ConnectMapped(int32_t peer_rank, void* peer_memory) {
  outbox_[peer_rank] = MailboxAt(peer_memory);
  bases_[peer_rank] =
      reinterpret_cast<uint64_t>(At<char>(peer_memory, Layout(config_.cp_size).staging));
}

std::string Member::FinishConnecting() {
  const CurrentDevice current(config_.device);
  const Layout layout(config_.cp_size);
  const size_t bytes = size_t(config_.cp_size) * 8;
  cudaError_t status =
      cudaMemcpy(At<char>(memory_, layout.outbox), outbox_.data(), bytes, cudaMemcpyHostToDevice);
  if (status == cudaSuccess) {
    status =
        cudaMemcpy(At<char>(memory_, layout.bases), bases_.data(), bytes, cudaMemcpyHostToDevice);
  }
  return status == cudaSuccess ? "" : Explain("the table of peers was not written", status);
}

bool Member::pushes_rows(int32_t num_blocks) const {
  // Results are XLA's own; other processes cannot reach them.
  return streams_rows_ && reaches_atomically_ && config_.staging_bytes == 0 &&
         num_blocks >= kLeastPushBlocks;
}

void* Member::staging() const { return At<char>(memory_, Layout(config_.cp_size).staging); }

Pools& Pools::Get() {
  // Never destroyed: the driver may be gone when the process ends.
  static Pools* const pools = new Pools;
  return *pools;
}

int32_t Pools::NextNumber() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return next_number_++;
}

std::string Pools::Add(const MemberConfig& config) {
  std::string error;
  std::shared_ptr<Member> member = Member::Create(config, &error);
  if (member == nullptr) return error;
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.push_back(std::move(member));
  return "";
}

std::shared_ptr<Member> Pools::Find(int32_t pool, int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const std::shared_ptr<Member>& member : members_) {
    if (member->config().pool == pool && member->config().device == device) return member;
  }
  return nullptr;
}

std::vector<std::shared_ptr<Member>> Pools::MembersOf(int32_t pool) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Member>> found;
  for (const std::shared_ptr<Member>& member : members_) {
    if (member->config().pool == pool) found.push_back(member);
  }
  return found;
}

void Pools::AwaitCalls(int32_t device, cudaStream_t stream) {
  std::vector<std::shared_ptr<Member>> found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::shared_ptr<Member>& member : members_) {
      if (member->config().device == device) found.push_back(member);
    }
  }
  for (const std::shared_ptr<Member>& member : found) member->AwaitCalls(stream);
}

void Pools::Remove(int32_t pool) {
  for (const std::shared_ptr<Member>& member : MembersOf(pool)) {
    const CurrentDevice current(member->config().device);
    cudaDeviceSynchronize();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto of_pool = [pool](const auto& member) { return member->config().pool == pool; };
  members_.erase(std::remove_if(members_.begin(), members_.end(), of_pool), members_.end());
}

bool PoolPushes(int32_t pool, int32_t num_blocks) {
  const std::vector<std::shared_ptr<Member>> members = Pools::Get().MembersOf(pool);
  return std::all_of(members.begin(), members.end(),
                     [num_blocks](const auto& member) { return member->pushes_rows(num_blocks); });
}

}  // namespace magi_jax::comm
