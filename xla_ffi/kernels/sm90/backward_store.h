// How gradients leave: dQ through shared memory as additions by the copy engine, dK and dV from
// registers.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_STORE_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_STORE_H_

#include "xla_ffi/kernels/sm90/backward_order.h"
#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_ptx.h"
#include "xla_ffi/kernels/sm90/epilogue.h"

namespace magi_jax::sm90 {

// Row of a group of 8 queries that row `i` of dS and of dQ's accumulators stands for. Half a warp
// stores 4 rows of dQ at a time; the 128-byte swizzle spreads rows 0, 2, 4, 6 over all banks, but
// not 0, 1, 2, 3.
__device__ __forceinline__ int QueryOfRow(int i) { return (2 * i & 6) | i >> 2; }
__device__ __forceinline__ int RowOfQuery(int i) { return i >> 1 | (i & 1) << 2; }

// One warp of the producers' warpgroup for each consumer: has the copy engine add finished blocks
// of dQ, and sums of split tiles.
template <typename Traits>
__device__ void AddGradients(const BackwardKernelParams& params, const CUtensorMap& dq_map,
                             const CUtensorMap& dk_map, const CUtensorMap& dv_map,
                             BackwardStorage<Traits>& shared, int consumer) {
  const int lane = threadIdx.x % 32;
  if (!Traits::kOrdered && lane != 0) return;
  QueryTurn turn{params, consumer, 0};
  int awaited = -1;  // row of the block whose turn has come
  for (uint32_t parity = 0;; parity ^= 1) {
    BarrierWait(&shared.dq_full[consumer], parity);
    const GradientNote note = shared.gradient_notes[Traits::kNoteTurns > 1 ? parity : 0][consumer];
    // All lanes have read the note before the first gives its place back.
    if constexpr (Traits::kOrdered) __syncwarp();
    if (note.row < 0) break;
    const auto await = [&](int row) {
      turn.Await(note.head, note.rank, min(row + Traits::kBlockM, params.q_len));
    };
    if (Traits::kOrdered && note.row != awaited) await(note.row);
    const bool to_queries = !Traits::kCopiesSums || note.target == kToQueries;
    const int column = Traits::kPaired || !to_queries ? note.column
                       : Traits::kTall                ? 0
                                                      : consumer * Traits::kGradientColumns;
    const int row = note.row + (Traits::kTall && to_queries ? consumer * Traits::kGradientRows : 0);
    const int rows = to_queries ? Traits::kGradientRows : Traits::kSumRows;
    const CUtensorMap& map = to_queries ? dq_map : note.target == kToKeys ? dk_map : dv_map;
    if (lane == 0) {
      // In place of a fence of each consumer, whose way it would make longer.
      if constexpr (Traits::kLong) FenceAsyncProxy();
#pragma unroll
      for (int i = 0; i < Traits::kGradientColumns / Traits::kGradientBox; ++i) {
        const int offset = i * Traits::kGradientBox;
        if (Traits::kPaired && offset >= note.columns) break;
        AddBox(shared.dq[consumer] + i * rows * 128, &map, column + offset, note.head, row);
      }
      CommitBoxes();
      WaitBoxesRead();
      if (!Traits::kOrdered || !kEveryLaneArrives) BarrierArrive(&shared.dq_empty[consumer]);
    }
    if (Traits::kOrdered && kEveryLaneArrives) BarrierArrive(&shared.dq_empty[consumer]);
    if constexpr (Traits::kOrdered) {
      // The second part of a block ends the turn.
      if (Traits::kPaired && note.next_row < 0) {
        awaited = note.row;
        continue;
      }
      if (lane == 0) turn.Pass(note);
      awaited = note.next_row;
      if (awaited != kNoQuery) await(awaited);
    }
  }
  if (lane == 0) WaitBoxes();
}

// Writes a consumer's 64 rows of dK or dV.
template <typename Element, int kWidth>
struct KeyGradientStore {
  static constexpr int kCount = kWidth / 2;  // accumulators of a thread
  static constexpr int kKeys = TileKeys(kWidth);

  const BackwardKernelParams& params;
  const int kv_head;
  const int first_key;  // of this thread; its second row is 8 below
  const int end_key;
  const bool by_row;  // rows of split tiles are added, the others written

  __device__ __forceinline__ void Write(void* gradient, const float (&values)[kCount],
                                        float factor) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int key = first_key + 8 * row;
      const int64_t at = (static_cast<int64_t>(key) * params.num_kv_heads + kv_head) * kWidth;
      if (params.gradients_are_f32) {
        StoreFloats(static_cast<float*>(gradient) + at, IsWritten(key), row, values, factor);
      } else {
        StoreElements(static_cast<Element*>(gradient) + at, IsWritten(key), row, values, factor);
      }
    }
  }

  // Adds them to float32 sums.
  __device__ __forceinline__ void Add(float* sums, const float (&values)[kCount],
                                      float factor) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int key = first_key + 8 * row;
      if (key >= end_key || (by_row && !IsSplit(key))) continue;
      float* const out =
          sums + (static_cast<int64_t>(key) * params.num_kv_heads + kv_head) * kWidth;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const int i = 4 * j + 2 * row;
        AddPair(out + 8 * j + threadIdx.x % 4 * 2, values[i] * factor, values[i + 1] * factor);
      }
    }
  }

  __device__ __forceinline__ bool IsSplit(int key) const { return params.parts[key / kKeys] > 1; }
  __device__ __forceinline__ bool IsWritten(int key) const {
    return key < end_key && !(by_row && IsSplit(key));
  }

  static __device__ __forceinline__ void StoreElements(Element* out, bool inside, int row,
                                                       const float (&values)[kCount],
                                                       float factor) {
#pragma unroll
    for (int group = 0; group < kCount / 16; ++group) {  // 32 columns
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 16 * group + 4 * j + 2 * row;
        words[j] = Pack(values[i] * factor, values[i + 1] * factor, Element{});
      }
      QuadTranspose(words);
      uint4* destination = reinterpret_cast<uint4*>(out) + 4 * group + threadIdx.x % 4;
      if (inside) *destination = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  static __device__ __forceinline__ void StoreFloats(float* out, bool inside, int row,
                                                     const float (&values)[kCount], float factor) {
    float2* destination = reinterpret_cast<float2*>(out) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int i = 4 * j + 2 * row;
      if (inside) destination[4 * j] = make_float2(values[i] * factor, values[i + 1] * factor);
    }
  }
};

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_STORE_H_
