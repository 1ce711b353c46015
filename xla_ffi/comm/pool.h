// Symmetric memory: what each rank's device holds for the group collectives, found by the number of
// the pool and the device. Everything is allocated at set-up; calls only look it up.

#ifndef MAGI_JAX_XLA_FFI_COMM_POOL_H_
#define MAGI_JAX_XLA_FFI_COMM_POOL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla_ffi/comm/params.h"

namespace magi_jax::comm {

enum class Kind : uint32_t { kCast, kReduceSum, kReduceLse };

const char* KindName(Kind kind);

struct MemberConfig {
  int32_t pool;
  int32_t device;  // ordinal
  int32_t rank, cp_size;
  // Room for the operands of a call, which peers then read there. 0: they read them where XLA has
  // them, which only ranks of one process can.
  int64_t staging_bytes;
  int64_t timeout_ns;
  int32_t num_blocks;  // of the kernels that move rows
  void* memory;        // MemberBytes() that somebody else allocated and frees; null: allocate it
};

// Device memory of a member.
int64_t MemberBytes(int32_t cp_size, int64_t staging_bytes);

// One rank's place in a pool. Made and connected at set-up by one thread; used by the thread that
// runs the device.
class Member {
 public:
  // Allocates on the device. On failure the message says why, and null is returned.
  static std::unique_ptr<Member> Create(const MemberConfig& config, std::string* error);
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  const MemberConfig& config() const { return config_; }
  // Whether rows can be streamed through shared memory.
  bool streams_rows() const { return streams_rows_; }
  // Whether casts could write to the peers instead of reading from them.
  bool pushes_rows(int32_t num_blocks) const;
  int64_t allocated_bytes() const { return memory_bytes_; }
  void* memory() const { return memory_; }
  // Bytes with which another process of the host opens the memory; empty with an error.
  std::string Export(std::string* error) const;

  // Tells where the memory of a peer is. Each returns an error or nothing.
  std::string ConnectLocal(int32_t peer_rank, int32_t peer_device, void* peer_memory);
  std::string ConnectExported(int32_t peer_rank, const std::string& exported);
  // The memory of a peer, where this device reaches it.
  void ConnectMapped(int32_t peer_rank, void* peer_memory);
  std::string FinishConnecting();

  // A call runs on a stream of the member's own: after what `stream` holds so far, beside what it
  // gets next. Begin, then enqueue on side(), then End; `buffers` are those that Finish will show.
  cudaError_t Begin(cudaStream_t stream, Kind kind, uint64_t signature, int32_t num_blocks,
                    Meeting* meeting);
  cudaError_t End(std::vector<const void*> buffers);
  // A second stream of a call, which begins where side() began: BeginApart before a kernel of
  // `blocks` is enqueued there, EndApart before End, which waits for it.
  cudaError_t BeginApart(int32_t blocks);
  cudaError_t EndApart();
  // Blocks of all those kernels.
  uint64_t apart_blocks() const { return apart_blocks_; }
  cudaStream_t apart() const { return apart_; }
  cudaStream_t side() const { return side_; }
  // Lets `stream` wait for the call with these buffers; an error or nothing.
  std::string Finish(cudaStream_t stream, const std::vector<const void*>& buffers);
  // Lets `stream` wait for all calls so far, finished or not.
  void AwaitCalls(cudaStream_t stream);
  // After a call that was enqueued by halves: none can follow.
  void GiveUp(std::string reason);
  void* staging() const;

  // What went wrong, once something has; empty before. Does not wait for the device.
  std::string Failure() const;

  std::mutex mutex;  // held by a call while it enqueues

 private:
  explicit Member(const MemberConfig& config) : config_(config) {}
  cudaError_t CreateStreams();
  Mailbox* MailboxAt(void* peer_memory) const;

  const MemberConfig config_;
  // [mailboxes: cp][outbox: cp][bases: cp][words] and the staging area, one allocation.
  void* memory_ = nullptr;
  int64_t memory_bytes_ = 0;
  FailureRecord* record_ = nullptr;  // pinned host memory
  cudaStream_t side_ = nullptr;
  cudaStream_t apart_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
  struct InFlight {
    cudaEvent_t done;
    std::vector<const void*> buffers;
  };
  std::vector<InFlight> in_flight_;  // calls that no Finish took, in their order
  std::vector<cudaEvent_t> idle_;    // events of calls that were finished
  uint64_t call_ = 0, arrived_ = 0, apart_blocks_ = 0;
  bool streams_rows_ = false;
  bool reaches_atomically_ = true;     // all peers
  mutable std::mutex unusable_mutex_;  // threads of other devices ask for failures too
  std::string unusable_;
  std::vector<Mailbox*> outbox_;
  std::vector<uint64_t> bases_;
  std::vector<void*> opened_;
};

// All pools of the process.
class Pools {
 public:
  static Pools& Get();

  int32_t NextNumber();
  std::string Add(const MemberConfig& config);  // an error or nothing
  std::shared_ptr<Member> Find(int32_t pool, int32_t device);
  std::vector<std::shared_ptr<Member>> MembersOf(int32_t pool);
  // Lets `stream` wait for the calls of all pools on a device.
  void AwaitCalls(int32_t device, cudaStream_t stream);
  // Frees the memory once the device has nothing left to do.
  void Remove(int32_t pool);

 private:
  std::mutex mutex_;
  int32_t next_number_ = 1;
  std::vector<std::shared_ptr<Member>> members_;
};

// Whether the casts of a pool write to the peers: where every member of it could. All ranks must do
// alike, and where results are reached by their addresses all members are here.
bool PoolPushes(int32_t pool, int32_t num_blocks);

// The first failure of any member of a pool in this process; empty if there is none.
std::string PoolFailure(int32_t pool);

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_POOL_H_
