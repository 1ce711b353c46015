// Reads parts of rows from the memory of peers through a ring in shared memory, one ring per warp:
// a read over NVLink takes some microseconds, and registers alone hold too little in flight to
// cover them with a few SMs. Bulk copies need compute capability 9.0.

#ifndef MAGI_JAX_XLA_FFI_COMM_STREAM_CUH_
#define MAGI_JAX_XLA_FFI_COMM_STREAM_CUH_

#include <cstdint>

#include "xla_ffi/comm/params.h"
#include "xla_ffi/comm/ptx.cuh"

namespace magi_jax::comm {

constexpr int kStreamWarps = 12;
constexpr int kSlots = 8;         // of a warp's ring
constexpr int kSlotBytes = 2048;  // most of a row that is moved at once
constexpr int kLaneVectors = kSlotBytes / 16 / 32;
constexpr int kStreamBytes = kStreamWarps * kSlots * (kSlotBytes + 8);

// A part of a row in flight, as all lanes of the warp know it.
struct SlotNote {
  uint32_t row, begin;  // of the result; byte in the row of the operand
  bool first, last;     // of the row's parts
};

// One warp's ring. All lanes call all functions together.
class Ring {
 public:
  // `memory` has kStreamBytes of the block, aligned to 128 bytes.
  __device__ explicit Ring(char* memory) {
    const int warp = threadIdx.x / 32;
    slots_ = memory + warp * kSlots * kSlotBytes;
    barriers_ =
        reinterpret_cast<uint64_t*>(memory + kStreamWarps * kSlots * kSlotBytes) + warp * kSlots;
  }

  __device__ void Initialize() {
    if (threadIdx.x % 32 < kSlots) InitializeBarrier(&barriers_[threadIdx.x % 32]);
    __syncwarp();
  }

  __device__ bool IsFull() const { return produced_ - consumed_ == kSlots; }
  __device__ bool IsEmpty() const { return produced_ == consumed_; }

  // Starts to read `bytes` from `source`, both multiples of 16.
  __device__ void Produce(const char* source, uint32_t bytes, const SlotNote& note) {
    const int slot = produced_++ % kSlots;
    // Each lane keeps the notes of one slot.
    if (static_cast<int>(threadIdx.x % 32) == slot) note_ = note;
    if (threadIdx.x % 32 != 0) return;
    ArriveExpecting(&barriers_[slot], bytes);
    BulkLoad(slots_ + slot * kSlotBytes, source, bytes, &barriers_[slot]);
  }

  // Waits for the oldest part; `body(slot memory, note)` uses it up.
  template <class Body>
  __device__ void Consume(Body body) {
    const int slot = consumed_ % kSlots;
    AwaitBarrier(&barriers_[slot], consumed_ / kSlots & 1);
    SlotNote note;
    note.row = __shfl_sync(~0u, note_.row, slot);
    note.begin = __shfl_sync(~0u, note_.begin, slot);
    note.first = __shfl_sync(~0u, static_cast<int>(note_.first), slot) != 0;
    note.last = __shfl_sync(~0u, static_cast<int>(note_.last), slot) != 0;
    body(slots_ + slot * kSlotBytes, note);
    __syncwarp();
    ++consumed_;
  }

 private:
  char* slots_;
  uint64_t* barriers_;
  uint32_t produced_ = 0, consumed_ = 0;
  SlotNote note_ = {};
};

// Walks over segments of the rows of a leaf, dealt out to the warps of the grid. A cursor
// `make_cursor(row, valid)` says which parts a row has: `peer` (-1 = no more), its `part_row`, and
// `Advance()`; each lane has one for a segment of its own. `address(peer, part_row)` is a part's.
// `announce(note, bytes)` is told of a segment when its first part is asked for, and
// `consume(memory, note, bytes)` gets the parts in order.
template <class MakeCursor, class Address, class Announce, class Consume>
__device__ void StreamRows(Ring& ring, uint32_t rows, uint32_t row_bytes, MakeCursor make_cursor,
                           Address address, Announce announce, Consume consume) {
  FenceAsyncProxy();  // parts were written by ordinary stores
  const uint32_t segments = (row_bytes + kSlotBytes - 1) / kSlotBytes;
  const uint32_t total = rows * segments;
  const uint32_t lane = threadIdx.x % 32;
  const auto bytes_at = [&](uint32_t begin) {
    return min(row_bytes - begin, uint32_t{kSlotBytes});
  };
  const auto consume_one = [&] {
    ring.Consume([&](const char* memory, const SlotNote& note) {
      consume(memory, note, bytes_at(note.begin));
    });
  };
  // Warps of different blocks take turns, 32 segments at a time.
  const uint32_t first = (blockIdx.x + threadIdx.x / 32 * gridDim.x) * 32;
  for (uint32_t base = first; base < total; base += gridDim.x * (blockDim.x / 32) * 32) {
    const uint32_t own = base + lane;
    const uint32_t own_row = own / segments, own_begin = own % segments * kSlotBytes;
    auto cursor = make_cursor(own_row, own < total);
    for (unsigned left = __ballot_sync(~0u, cursor.peer >= 0); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const uint32_t row = __shfl_sync(~0u, own_row, i);
      const uint32_t begin = __shfl_sync(~0u, own_begin, i);
      bool any = false;
      for (int32_t peer; (peer = __shfl_sync(~0u, cursor.peer, i)) >= 0; any = true) {
        const int32_t part_row = __shfl_sync(~0u, cursor.part_row, i);
        if (static_cast<int>(lane) == i) cursor.Advance();
        const bool last = __shfl_sync(~0u, cursor.peer, i) < 0;
        if (ring.IsFull()) consume_one();
        const SlotNote note = {row, begin, !any, last};
        if (note.first) announce(note, bytes_at(begin));
        ring.Produce(address(peer, part_row) + begin, bytes_at(begin), note);
      }
    }
  }
  while (!ring.IsEmpty()) consume_one();
}

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_STREAM_CUH_
