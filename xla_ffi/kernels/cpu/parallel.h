// Independent units of work over XLA's intra-op threads.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_PARALLEL_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace magi_jax::cpu {

// Scratch of a thread. It grows to the largest request (a few MiB at usual head dims) and lives as
// long as the thread.
class ThreadScratch {
 public:
  // Null when memory is short.
  static float* Get(int64_t floats) {
    static thread_local ThreadScratch scratch;
    if (floats > scratch.size_) {
      std::free(scratch.data_);
      const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
      scratch.data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      scratch.size_ = scratch.data_ == nullptr ? 0 : floats;
    }
    return scratch.data_;
  }
  ~ThreadScratch() { std::free(data_); }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Units are handed out by a counter to the calling thread and to as many helpers as the pool lends.
// The caller takes part until none is left and then waits only for units that run already, so the
// call ends even if no helper ever starts; a helper that starts too late finds nothing and touches
// nothing.
template <typename Unit>
struct SharedWork {
  SharedWork(int64_t count, Unit unit) : count(count), unit(std::move(unit)) {}

  void Help() {
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      if (!unit(i)) failed = true;
      if (done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
  }

  const int64_t count;
  const Unit unit;
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable all_done;
};

// Runs unit(0) .. unit(count - 1) in any order, and returns whether all of them returned true.
// `pool` has Schedule(function) and num_threads().
template <typename Pool, typename Unit>
bool ParallelFor(Pool& pool, int64_t count, Unit unit) {
  if (count == 0) return true;
  auto work = std::make_shared<SharedWork<Unit>>(count, std::move(unit));
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Help(); });
  work->Help();
  std::unique_lock<std::mutex> lock(work->mutex);
  work->all_done.wait(lock, [&] { return work->done == work->count; });
  return !work->failed;
}

}  // namespace magi_jax::cpu

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_PARALLEL_H_
