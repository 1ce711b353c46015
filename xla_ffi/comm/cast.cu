// Moves rows: the receiver reads them where the sender has them and writes its own result. A rank
// writes no buffer of another, so that one that is late, or whose table is damaged, spoils nothing.

#include <cuda_runtime.h>

#include "xla_ffi/comm/call.cuh"
#include "xla_ffi/comm/copy.cuh"
#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/stream.cuh"

namespace magi_jax::comm {
namespace {

constexpr int kThreads = 384;
static_assert(kCopyWarps <= kThreads / 32 && kCopyBytes <= kStreamBytes);
constexpr int kUnroll = 8;  // vectors in flight per thread

template <class Vector>
__device__ void CastLeaf(const Leaf& leaf, const Sources& sources, const RowMap& map) {
  const uint32_t per_row = leaf.row_bytes / sizeof(Vector);
  auto* result = static_cast<Vector*>(leaf.result);
  ForEachChunk<kUnroll>(per_row * map.rows, [&](const auto& index, const auto& valid) {
    const Vector* from[kUnroll];
    Vector values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t row = index[u] / per_row, column = index[u] - row * per_row;
      const int32_t peer = valid[u] ? map.row_of[row] : kElsewhere;
      const int32_t source = map.row_of[int64_t{map.rows} + row];
      from[u] = peer < 0 ? nullptr : sources.Row<Vector>(peer, source, leaf.row_bytes) + column;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (from[u] != nullptr) values[u] = *from[u];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (from[u] != nullptr) result[index[u]] = values[u];
    }
  });
}

__device__ void CopyLeaf(const Leaf& leaf, const Sources& sources, const RowMap& map,
                         uint32_t first_row, CopyRing& ring) {
  ring.Copy(
      CopyShape(map.rows, leaf.row_bytes), first_row, static_cast<char*>(leaf.result),
      [&](uint32_t row) { return int2{map.row_of[row], map.row_of[int64_t{map.rows} + row]}; },
      [&](int32_t peer, int32_t row) { return sources.Row<char>(peer, row, leaf.row_bytes); });
}

__device__ void CastLeaves(const Meeting& meeting, const Move& move, Sources& sources,
                           CopyRing& ring) {
  const int first = FirstPiece(meeting, meeting.recv);
  const uint32_t first_row = first > 0 ? meeting.recv.pieces[first].dst_row : 0;
  for (int i = 0; i < move.num_leaves; ++i) {
    const Leaf& leaf = move.leaves[i];
    sources.Fill(meeting, leaf.operand, i);
    if (IsStreamed(move, leaf)) {
      CopyLeaf(leaf, sources, move.map, first_row, ring);
    } else if (leaf.row_bytes % 16 == 0) {
      CastLeaf<uint4>(leaf, sources, move.map);
    } else if (leaf.row_bytes % 4 == 0) {
      CastLeaf<uint32_t>(leaf, sources, move.map);
    } else {
      CastLeaf<uint8_t>(leaf, sources, move.map);
    }
  }
}

extern __shared__ __align__(128) char ring_memory[];

__global__ void __launch_bounds__(kThreads)
    CastKernel(const __grid_constant__ Meeting meeting, const __grid_constant__ Move move) {
  __shared__ CallShared shared;
  CopyRing ring(ring_memory);
  if (move.stream) ring.Initialize();
  RunCall<CastMap>(meeting, move, shared,
                   [&] { CastLeaves(meeting, move, shared.sources[0], ring); });
}

struct Awaited {
  const uint64_t* count;
  uint64_t target;

  __device__ bool Came() const { return LoadAcquire(count) >= target; }
};

// Behind a call that has not ended, which keeps its SMs for the next one, it waits for a launch
// alone.
__global__ void AwaitStartKernel(Awaited arrived, Awaited before, Awaited apart, uint64_t launch_ns,
                                 uint64_t copy_ns) {
  const uint64_t start = Nanoseconds();
  while (!(arrived.Came() && apart.Came())) {
    const uint64_t waited = Nanoseconds() - start;
    if (waited > launch_ns + copy_ns || (waited > launch_ns && !before.Came())) return;
  }
}

}  // namespace

cudaError_t Cast(const Meeting& meeting, const Move& move, cudaStream_t stream) {
  const LaunchShape shape = {move.num_blocks, kThreads, move.stream ? kCopyBytes : 0};
  return LaunchCall(CastKernel, shape, meeting, move, stream);
}

cudaError_t LaunchCall(CallKernel kernel, const LaunchShape& shape, const Meeting& meeting,
                       const Move& move, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.num_blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute neighbours = {};
  neighbours.id = cudaLaunchAttributeClusterDimension;
  neighbours.val.clusterDim = {2, 1, 1};
  config.attrs = &neighbours;
  config.numAttrs = move.stream && shape.num_blocks % 2 == 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, meeting, move);
}

cudaError_t AwaitStart(const Meeting& meeting, int32_t num_blocks, uint64_t apart_blocks,
                       int64_t copied_bytes, cudaStream_t stream) {
  constexpr uint64_t kLaunchNs = 30000, kCopiedBytesPerNs = 1000;
  const uint64_t target = meeting.arrived_before + num_blocks;
  AwaitStartKernel<<<1, 1, 0, stream>>>(
      {meeting.arrived, target}, {meeting.arrived, meeting.arrived_before},
      {meeting.apart, apart_blocks}, kLaunchNs, copied_bytes / kCopiedBytesPerNs);
  return cudaGetLastError();
}

cudaError_t CanStreamRows(int device, bool* can) {
  cudaFuncAttributes attributes;
  const auto* symbol = reinterpret_cast<const void*>(CastKernel);
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, symbol)) return error;
  int shared_bytes = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int most_bytes = kStreamBytes + static_cast<int>(attributes.sharedSizeBytes);
  *can = attributes.ptxVersion >= 90 && shared_bytes >= most_bytes;
  return error;
}

cudaError_t LoadKernels(bool stream) {
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, AwaitStartKernel)) return error;
  if (cudaError_t error = LoadKernel(CastKernel, stream)) return error;
  if (cudaError_t error = LoadOwnRowsKernel()) return error;
  if (cudaError_t error = LoadPushKernel(stream)) return error;
  if (cudaError_t error = LoadReduceSumKernels(stream)) return error;
  return LoadReduceLseKernel();
}

cudaError_t LoadKernel(CallKernel kernel, bool stream) {
  const auto* symbol = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, symbol)) return error;
  if (!stream) return cudaSuccess;
  return cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamBytes);
}

}  // namespace magi_jax::comm
