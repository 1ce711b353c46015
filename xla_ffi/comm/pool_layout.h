// Where the parts of a member's memory are.

#ifndef MAGI_JAX_XLA_FFI_COMM_POOL_LAYOUT_H_
#define MAGI_JAX_XLA_FFI_COMM_POOL_LAYOUT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "xla_ffi/comm/params.h"

namespace magi_jax::comm {

inline constexpr int64_t kAlignment = 256;

inline int64_t Align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Byte offsets of the parts of a member's memory.
struct Layout {
  int64_t outbox, bases, broken, arrived, apart, staging;

  explicit Layout(int64_t cp_size)
      : outbox(Align(cp_size * static_cast<int64_t>(sizeof(Mailbox)))),
        bases(outbox + Align(cp_size * 8)),
        broken(bases + Align(cp_size * 8)),
        arrived(broken + 8),
        apart(broken + 16),
        staging(broken + kAlignment) {}
};

template <class T>
T* At(void* memory, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(memory) + offset);
}

inline std::string Explain(const char* what, cudaError_t error) {
  return std::string(what) + ": " + cudaGetErrorString(error);
}

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_POOL_LAYOUT_H_
