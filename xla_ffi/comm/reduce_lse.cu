// Merges results of attention at the owner of their rows, which reads the parts where its peers
// have them: each weighs as much as its log-sum-exp says.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "xla_ffi/comm/call.cuh"
#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/parts.cuh"

namespace magi_jax::comm {
namespace {

constexpr int kThreads = 384;
constexpr float kUnseen = -INFINITY;

__device__ float LogAddExp(float a, float b) {
  const float top = fmaxf(a, b);
  // Also where both are +inf or either is NaN, as in jax.numpy.
  if (a == b && !(top < INFINITY && top > -INFINITY)) return top;
  if (isnan(a) || isnan(b)) return a + b;
  return top + log1pf(expf(-fabsf(a - b)));
}

__device__ float Weight(float part, float total) {
  return part == kUnseen ? 0.0f : expf(part - total);
}

// One element of `out` per thread, and with the first of a head its lse.
template <class T>
__device__ void MergeRows(const Meeting& meeting, const Move& move, const Sources& outs,
                          const Sources& lses) {
  const Leaf &out = move.leaves[0], &lse = move.leaves[1];
  const int32_t words = SeenWords(meeting.extents.cp_size);
  const uint32_t head_dim = out.row_elements / lse.row_elements;
  ForEachChunk<1>(out.row_elements * move.map.rows, [&](const auto& index, const auto& valid) {
    if (!valid[0]) return;
    const uint32_t row = index[0] / out.row_elements, column = index[0] % out.row_elements;
    const uint32_t head = column / head_dim;
    float total = 0.0f, total_lse = kUnseen;
    PartWalk walk;
    walk.Start(move.map, meeting.rank, static_cast<int32_t>(row));
    for (int32_t peer; (peer = walk.Next(move.map, meeting.rank, words)) >= 0;) {
      const int32_t part_row = walk.RowAt(move.map, peer);
      const float part_lse = lses.Row<float>(peer, part_row, lse.row_bytes)[head];
      const float part = ToSum(outs.Row<T>(peer, part_row, out.row_bytes)[column]);
      const float merged = LogAddExp(total_lse, part_lse);
      total = total * Weight(total_lse, merged) + part * Weight(part_lse, merged);
      total_lse = merged;
    }
    static_cast<float*>(out.result)[index[0]] = total;
    if (column % head_dim == 0) {
      static_cast<float*>(lse.result)[int64_t{row} * lse.row_elements + head] = total_lse;
    }
  });
}

__device__ void MergeLeaves(const Meeting& meeting, const Move& move, Sources& outs,
                            Sources& lses) {
  outs.Fill(meeting, move.leaves[0].operand, 0);
  lses.Fill(meeting, move.leaves[1].operand, 1);
  switch (move.leaves[0].element) {
    case Element::kF32:
      MergeRows<float>(meeting, move, outs, lses);
      break;
    case Element::kF16:
      MergeRows<__half>(meeting, move, outs, lses);
      break;
    case Element::kBF16:
      MergeRows<__nv_bfloat16>(meeting, move, outs, lses);
      break;
    default:
      break;  // refused by the handler
  }
}

__global__ void __launch_bounds__(kThreads)
    ReduceLseKernel(const __grid_constant__ Meeting meeting, const __grid_constant__ Move move) {
  __shared__ CallShared shared;
  RunCall<LseMap>(meeting, move, shared,
                  [&] { MergeLeaves(meeting, move, shared.sources[0], shared.sources[1]); });
}

}  // namespace

cudaError_t ReduceLse(const Meeting& meeting, const Move& move, cudaStream_t stream) {
  return LaunchCall(ReduceLseKernel, {move.num_blocks, kThreads, 0}, meeting, move, stream);
}

cudaError_t LoadReduceLseKernel() { return LoadKernel(ReduceLseKernel, false); }

}  // namespace magi_jax::comm
