// The parts that ranks hold of a row, which are combined at its owner: first those of the other
// ranks, in the order of ranks, then its own.

#ifndef MAGI_JAX_XLA_FFI_COMM_PARTS_CUH_
#define MAGI_JAX_XLA_FFI_COMM_PARTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "xla_ffi/comm/params.h"

namespace magi_jax::comm {

// Elements as they are added up.
__device__ inline float ToSum(float x) { return x; }
__device__ inline float ToSum(__half x) { return __half2float(x); }
__device__ inline float ToSum(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline int32_t ToSum(int32_t x) { return x; }
__device__ inline bool ToSum(bool x) { return x; }

// Walks over the ranks that have a part of a row: the peers first, the own rank last.
struct PartWalk {
  int32_t row;
  int32_t word;   // of `seen`
  uint32_t bits;  // of the word, peers that are still to come
  bool own;

  __device__ void Start(const RowMap& map, int32_t rank, int32_t first_row) {
    row = first_row;
    own = false;
    word = -1;
    bits = 0;
    Read(map, rank);
  }

  __device__ void Read(const RowMap& map, int32_t rank) {
    bits = map.seen[int64_t{++word} * map.rows + row];
    if (rank / 32 != word) return;
    own = (bits >> (rank % 32)) & 1;
    bits &= ~(1u << (rank % 32));
  }

  // The next rank, or -1 at the end.
  __device__ int32_t Next(const RowMap& map, int32_t rank, int32_t words) {
    while (bits == 0 && word + 1 < words) Read(map, rank);
    if (bits != 0) {
      const int32_t peer = word * 32 + __ffs(static_cast<int>(bits)) - 1;
      bits &= bits - 1;
      return peer;
    }
    const int32_t last = own ? rank : -1;
    own = false;
    return last;
  }

  __device__ int32_t RowAt(const RowMap& map, int32_t peer) const {
    return map.row_of[int64_t{peer} * map.rows + row];
  }
};

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_PARTS_CUH_
