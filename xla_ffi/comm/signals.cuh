// Words that ranks write into each other's memory, with the order that makes them signals.

#ifndef MAGI_JAX_XLA_FFI_COMM_SIGNALS_CUH_
#define MAGI_JAX_XLA_FFI_COMM_SIGNALS_CUH_

#include <cstdint>

namespace magi_jax::comm {

// All that this thread, and what it synchronised with, wrote before is visible to whoever reads the
// value with `LoadAcquire`, on any device.
__device__ inline void StoreRelease(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline uint64_t LoadAcquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Both of the above at once: what was there before.
__device__ inline uint64_t Exchange(uint64_t* word, uint64_t value) {
  uint64_t before;
  asm volatile("atom.acq_rel.sys.global.exch.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(word), "l"(value)
               : "memory");
  return before;
}

__device__ inline uint64_t Nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_SIGNALS_CUH_
