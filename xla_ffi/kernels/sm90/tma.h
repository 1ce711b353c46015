// Tensor maps (host) and the copies that use them (device).

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_TMA_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_TMA_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "xla_ffi/kernels/sm90/ptx.h"

namespace magi_jax::sm90 {

// Elements of a 128-byte row, the widest that the 128-byte swizzle allows. A tile of a wider head
// is kept in shared memory as chunks of this many columns, each with all rows of the tile.
constexpr int kChunk = 64;

// L2 hints of the copy engine: queries are read once, keys and values by every tile of their kv
// head.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Describes a dense [rows, heads, head_dim] tensor to the copy engine, read or written in boxes of
// box_rows x box_heads x box_columns elements, whose rows of 128 bytes lie in shared memory with
// the 128-byte swizzle. Parts of a box outside of the tensor read as zero.
inline cudaError_t EncodeTensorMap(CUtensorMap* map, CUtensorMapDataType type, int element_bytes,
                                   const void* data, int rows, int heads, int head_dim,
                                   int box_rows, int box_heads, int box_columns) {
  // The driver's symbol is looked up at run time, so that nothing links against libcuda.
  static const auto encode = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault,
                                     &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &symbol, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(symbol);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(head_dim) * element_bytes;
  const cuuint64_t strides_bytes[2] = {row_bytes, row_bytes * heads};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns),
                             static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result =
      encode(map, type, 3, const_cast<void*>(data), sizes, strides_bytes, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The map of a tensor of 2-byte elements, in boxes of kChunk columns.
inline cudaError_t MakeTensorMap(CUtensorMap* map, CUtensorMapDataType type, const void* data,
                                 int rows, int heads, int head_dim, int box_rows, int box_heads) {
  return EncodeTensorMap(map, type, 2, data, rows, heads, head_dim, box_rows, box_heads, kChunk);
}

// The map of float32 gradients that the copy engine adds to, in boxes of one head and 32 columns.
inline cudaError_t MakeGradientMap(CUtensorMap* map, float* data, int rows, int heads, int head_dim,
                                   int box_rows) {
  return EncodeTensorMap(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, data, rows, heads, head_dim,
                         box_rows, 1, 32);
}

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Brings memory to L2; address and bytes are multiples of 16.
__device__ __forceinline__ void PrefetchBulk(const void* memory, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(memory), "r"(bytes) : "memory");
}

// Copies one box to shared memory; its bytes count towards the current phase of `barrier`.
__device__ __forceinline__ void CopyBox(void* destination, const CUtensorMap* map,
                                        uint64_t* barrier, int column, int head, int row,
                                        uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(SharedAddress(destination)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(head), "r"(row), "l"(hint)
      : "memory");
}

// The same to both thread blocks of a pair, at the same place in each.
__device__ __forceinline__ void CopyBoxToPair(void* destination, const CUtensorMap* map,
                                              uint64_t* barrier, int column, int head, int row,
                                              uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %7, %6;" ::"r"(
          SharedAddress(destination)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(head), "r"(row), "l"(hint),
      "h"(static_cast<uint16_t>(3))
      : "memory");
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_TMA_H_
