// Tensor map of float32 gradients that the copy engine adds to (host).

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_TMA_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_TMA_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace magi_jax::sm90 {

// Describes a dense float32 [rows, heads, head_dim] tensor in boxes of box_rows x 1 x 32 elements,
// whose rows of 128 bytes lie in shared memory with the 128-byte swizzle.
inline cudaError_t MakeGradientMap(CUtensorMap* map, float* data, int rows, int heads, int head_dim,
                                   int box_rows) {
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
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(head_dim) * 4;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides_bytes[2] = {row_bytes, row_bytes * heads};
  const cuuint32_t box[3] = {32, 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, data, sizes, strides_bytes, box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_TMA_H_
