// Expands pieces into a map from rows of the result to their sources: a warp per piece.

#include <cuda_runtime.h>

#include "xla_ffi/comm/kernels.h"

namespace magi_jax::comm {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 8;
constexpr int kWarpSize = 32;

// Calls `enter(piece, offset)` for every row of every piece.
template <class Enter>
__device__ void ForEachRow(const PieceTable& table, const Extents& extents, Enter enter) {
  const int lane = threadIdx.x % kWarpSize;
  const int warps = gridDim.x * blockDim.x / kWarpSize;
  for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize; i < table.num_pieces;
       i += warps) {
    const Piece piece = table.pieces[i];
    const Span span = InsideSpan(piece, extents);
    for (int32_t offset = span.begin + lane; offset < span.end; offset += kWarpSize) {
      enter(piece, offset);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    MapCastKernel(PieceTable table, Extents extents, RowMap map) {
  ForEachRow(table, extents,
             [&](const Piece& piece, int32_t offset) { EnterCast(piece, offset, map); });
}

__global__ void __launch_bounds__(kThreads)
    MapReduceKernel(PieceTable table, Extents extents, RowMap map) {
  ForEachRow(table, extents, [&](const Piece& piece, int32_t offset) {
    const uint32_t bit = EnterReduce(piece, offset, map);
    atomicOr(&map.seen[SeenIndex(piece, offset, map)], bit);
  });
}

}  // namespace

cudaError_t MapCast(const PieceTable& recv, const Extents& extents, const RowMap& map,
                    cudaStream_t stream) {
  const size_t bytes = size_t(map.rows) * sizeof(int32_t);
  if (cudaError_t error = cudaMemsetAsync(map.row_of, 0xff, bytes, stream)) return error;
  MapCastKernel<<<kBlocks, kThreads, 0, stream>>>(recv, extents, map);
  return cudaGetLastError();
}

cudaError_t MapReduce(const PieceTable& send, const Extents& extents, const RowMap& map,
                      cudaStream_t stream) {
  const size_t words = size_t(SeenWords(extents.cp_size)) * map.rows;
  if (cudaError_t error = cudaMemsetAsync(map.seen, 0, words * sizeof(uint32_t), stream)) {
    return error;
  }
  MapReduceKernel<<<kBlocks, kThreads, 0, stream>>>(send, extents, map);
  return cudaGetLastError();
}

cudaError_t LoadKernels() {
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, MapCastKernel)) return error;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, MapReduceKernel)) return error;
  if (cudaError_t error = LoadMeetingKernels()) return error;
  if (cudaError_t error = LoadCastKernels()) return error;
  return LoadReduceKernels();
}

}  // namespace magi_jax::comm
