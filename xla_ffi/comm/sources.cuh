// Where the operands of all ranks are, and how the vectors of a result are dealt out to blocks.

#ifndef MAGI_JAX_XLA_FFI_COMM_SOURCES_CUH_
#define MAGI_JAX_XLA_FFI_COMM_SOURCES_CUH_

#include <cstdint>

#include "xla_ffi/comm/params.h"

namespace magi_jax::comm {

constexpr int kLeastRowBytes = 256;  // shorter rows are not worth a copy each

// Whether the rows of a leaf go through shared memory.
__device__ inline bool IsStreamed(const Move& move, const Leaf& leaf) {
  return move.stream && leaf.row_bytes % 16 == 0 && leaf.row_bytes >= kLeastRowBytes;
}

// One array of every rank; filled by all threads of a block together. `own` is this rank's.
struct Sources {
  const char* of_peer[kMaxRanks];

  __device__ void Fill(const Meeting& meeting, const void* own, int index) {
    __syncthreads();
    for (int peer = threadIdx.x; peer < meeting.extents.cp_size; peer += blockDim.x) {
      const volatile uint64_t& address = meeting.inbox[peer].addresses[index];
      of_peer[peer] = peer == meeting.rank
                          ? static_cast<const char*>(own)
                          : reinterpret_cast<const char*>(meeting.bases[peer] + address);
    }
    __syncthreads();
  }

  template <class T>
  __device__ const T* Row(int32_t peer, int32_t row, uint32_t row_bytes) const {
    return reinterpret_cast<const T*>(of_peer[peer] + int64_t{row} * row_bytes);
  }
};

// Calls `body(index, valid)` with kUnroll indices of vectors below `total`, a thread's indices
// blockDim.x apart, so that each access of a block is contiguous. Blocks take turns.
template <int kUnroll, class Body>
__device__ void ForEachChunk(uint32_t total, Body body) {
  const uint32_t chunk = kUnroll * blockDim.x;
  for (uint64_t begin = uint64_t{blockIdx.x} * chunk; begin < total;
       begin += uint64_t{gridDim.x} * chunk) {
    uint32_t index[kUnroll];
    bool valid[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint64_t i = begin + u * blockDim.x + threadIdx.x;
      valid[u] = i < total;
      index[u] = valid[u] ? static_cast<uint32_t>(i) : 0;
    }
    body(index, valid);
  }
}

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_SOURCES_CUH_
