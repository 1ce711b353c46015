// Copies rows out of the memory of peers: bulk copies bring them into a ring in shared memory, and
// bulk copies take them out again, so that no thread touches a byte. Rows that lie together at both
// ends move together, up to 16 KiB at once: a few SMs then hold enough in flight to fill a link.
// Needs compute capability 9.0.

#ifndef MAGI_JAX_XLA_FFI_COMM_COPY_CUH_
#define MAGI_JAX_XLA_FFI_COMM_COPY_CUH_

#include <cstdint>

#include "xla_ffi/comm/params.h"
#include "xla_ffi/comm/ptx.cuh"

namespace magi_jax::comm {

constexpr int kCopyWarps = 3;  // of a block; one ring each
constexpr int kCopySlots = 4;
constexpr int kCopyDepth = 2;  // slots that are being filled; the others are being emptied
constexpr int kCopySlotBytes = 16384;
constexpr uint32_t kCopyAhead = 4;  // slots that are looked up together
constexpr int kCopyBytes = kCopyWarps * kCopySlots * (kCopySlotBytes + 8);

// Rows that share a slot: as many as fit, one for each lane at most. Longer rows take several
// slots.
struct CopyShape {
  uint32_t rows, row_bytes, group_rows, segments;

  __device__ CopyShape(uint32_t rows, uint32_t row_bytes) : rows(rows), row_bytes(row_bytes) {
    group_rows = row_bytes < kCopySlotBytes ? min(32u, kCopySlotBytes / row_bytes) : 1;
    segments = (row_bytes + kCopySlotBytes - 1) / kCopySlotBytes;
  }

  __device__ uint32_t NumSlots() const { return (rows + group_rows - 1) / group_rows * segments; }
};

// One warp's ring. All lanes call all functions together.
class CopyRing {
 public:
  // `memory` has kCopyBytes of the block, aligned to 128 bytes.
  __device__ explicit CopyRing(char* memory) {
    const int warp = threadIdx.x / 32;
    slots_ = memory + warp * kCopySlots * kCopySlotBytes;
    barriers_ = reinterpret_cast<uint64_t*>(memory + kCopyWarps * kCopySlots * kCopySlotBytes) +
                warp * kCopySlots;
  }

  __device__ void Initialize() {
    if (threadIdx.x / 32 >= kCopyWarps) return;
    if (threadIdx.x % 32 < kCopySlots) InitializeBarrier(&barriers_[threadIdx.x % 32]);
    __syncwarp();
  }

  // Fills `result`, rows of `shape`, from `first_row` on and then those before. `source(row)` gives
  // the peer of a row (less than 0: it is left alone) and its row there, `address(peer, row)` where
  // that is.
  template <class Source, class Address>
  __device__ void Copy(const CopyShape& shape, uint32_t first_row, char* result, Source source,
                       Address address) {
    if (threadIdx.x / 32 >= kCopyWarps) return;
    FenceAsyncProxy();  // what is read was written by ordinary stores
    const uint32_t first = blockIdx.x + threadIdx.x / 32 * gridDim.x;
    const uint32_t step = gridDim.x * kCopyWarps, total = shape.NumSlots();
    const uint32_t count = first < total ? (total - first + step - 1) / step : 0;
    const uint32_t turn =
        first_row < shape.rows ? first_row / shape.group_rows * shape.segments : 0;
    const auto slot_at = [&](uint32_t i) {
      const uint32_t slot = first + i * step + turn;
      return slot < total ? slot : slot - total;
    };
    Run runs[kCopyDepth] = {};  // of this lane, the oldest first; the last `pending` are in flight
    uint32_t pending = 0;
    for (uint32_t i = 0; i < count; i += kCopyAhead) {
      int2 from[kCopyAhead];  // looked up together: slots of which nothing is to be moved are many
#pragma unroll
      for (uint32_t u = 0; u < kCopyAhead; ++u) {
        from[u] = i + u < count ? Find(shape, slot_at(i + u), source) : kNothing;
      }
#pragma unroll
      for (uint32_t u = 0; u < kCopyAhead; ++u) {
        if (__all_sync(~0u, from[u].x < 0)) continue;
        const Run next = Fill(shape, slot_at(i + u), from[u], result, address);
        if (pending == kCopyDepth) Empty(runs[0]);
        pending = min(pending + 1, uint32_t{kCopyDepth});
#pragma unroll
        for (int k = 0; k + 1 < kCopyDepth; ++k) runs[k] = runs[k + 1];
        runs[kCopyDepth - 1] = next;
      }
    }
#pragma unroll
    for (uint32_t k = 0; k < kCopyDepth; ++k) {
      if (k + pending >= kCopyDepth) Empty(runs[k]);
    }
    AwaitBulkStores();
  }

 private:
  // Rows that one lane moves, those of its own row and of what follows it at both ends.
  struct Run {
    char* to;
    uint32_t offset, bytes;  // in the slot
  };

  static constexpr int2 kNothing = {kElsewhere, 0};

  // The row of a slot that this lane moves.
  __device__ static uint32_t RowOf(const CopyShape& shape, uint32_t slot_number) {
    return slot_number / shape.segments * shape.group_rows + threadIdx.x % 32;
  }

  // Where it comes from: peer and row there.
  template <class Source>
  __device__ static int2 Find(const CopyShape& shape, uint32_t slot_number, Source source) {
    const uint32_t row = RowOf(shape, slot_number);
    const bool valid = threadIdx.x % 32 < shape.group_rows && row < shape.rows;
    return valid ? source(row) : kNothing;
  }

  template <class Address>
  __device__ Run Fill(const CopyShape& shape, uint32_t slot_number, int2 from, char* result,
                      Address address) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = RowOf(shape, slot_number);
    const uint32_t begin = slot_number % shape.segments * kCopySlotBytes;
    const uint32_t bytes = min(shape.row_bytes - begin, uint32_t{kCopySlotBytes});
    const int32_t peer_before = __shfl_up_sync(~0u, from.x, 1);
    const int32_t row_before = __shfl_up_sync(~0u, from.y, 1);
    const bool starts =
        from.x >= 0 && (lane == 0 || peer_before != from.x || row_before + 1 != from.y);
    const uint32_t filled = __ballot_sync(~0u, from.x >= 0);
    const uint32_t ends = (__ballot_sync(~0u, starts) | ~filled) & ~((2u << lane) - 1);
    const uint32_t end = ends == 0 ? 32 : __ffs(static_cast<int>(ends)) - 1;

    const uint32_t slot = filled_ % kCopySlots;
    char* const to = result + int64_t{row} * shape.row_bytes + begin;
    Run run = {to, slot * kCopySlotBytes + lane * bytes, starts ? (end - lane) * bytes : 0};
    AwaitBulkReads<kCopySlots - kCopyDepth - 1>();  // of what was in the slot before
    __syncwarp();
    uint64_t* const barrier = &barriers_[slot];
    if (lane == 0) ArriveExpecting(barrier, __popc(filled) * bytes);
    __syncwarp();
    if (run.bytes > 0) {
      BulkLoad(slots_ + run.offset, address(from.x, from.y) + begin, run.bytes, barrier);
    }
    ++filled_;
    return run;
  }

  __device__ void Empty(const Run& run) {
    AwaitBarrier(&barriers_[emptied_ % kCopySlots], emptied_ / kCopySlots & 1);
    if (run.bytes > 0) BulkStore(run.to, slots_ + run.offset, run.bytes);
    CommitBulkStores();
    ++emptied_;
  }

  char* slots_;
  uint64_t* barriers_;
  uint32_t filled_ = 0, emptied_ = 0;
};

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_COPY_CUH_
