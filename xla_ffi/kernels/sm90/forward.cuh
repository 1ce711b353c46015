// The forward kernel and its launch. Instantiated once per (type, head dim), each in a file of its
// own.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "xla_ffi/kernels/sm90/forward_launch.h"
#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/loader.h"
#include "xla_ffi/kernels/sm90/mainloop.h"
#include "xla_ffi/kernels/sm90/walker.h"

namespace magi_jax::sm90 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    ForwardKernel(const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map,
                  const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(shared_bytes);

  const int partners = Partners<Traits>(params);
  const int readers = partners * Traits::kConsumerWarps * kArrivals;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kAnswers; ++i) {
      BarrierInit(&shared.answer_full[i], 1);
      BarrierInit(&shared.answer_empty[i], 1);
    }
    for (int i = 0; i < kNotes; ++i) {
      BarrierInit(&shared.note_full[i], 32);
      BarrierInit(&shared.note_empty[i], kArrivals);
    }
    for (int i = 0; i < Traits::kQStages; ++i) {
      BarrierInit(&shared.q_full[i], 1);
      BarrierInit(&shared.q_empty[i], Traits::kConsumerWarps * kArrivals);
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      BarrierInit(&shared.k_full[i], 1);
      BarrierInit(&shared.k_empty[i], readers);
      BarrierInit(&shared.v_full[i], 1);
      BarrierInit(&shared.v_empty[i], readers);
    }
    BarrierInitFence();
    PrefetchTensorMap(&q_map);
    PrefetchTensorMap(&k_map);
    PrefetchTensorMap(&v_map);
  }
  if (partners == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }

  if (threadIdx.x < 128) {
    LowerRegisters<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) {
      Loader<Traits>(params, q_map, k_map, v_map, shared).Work();
    } else if (threadIdx.x < 64) {
      Walker<Traits>(params, shared).Work();
    }
  } else {
    RaiseRegisters<Traits::kConsumerRegisters>();
    Consumer<Traits>(params, shared).Work();
  }
  // A partner may still arrive at barriers here.
  if (partners > 1) {
    __syncwarp();
    ClusterSync();
  }
}

template <typename Traits>
cudaError_t LaunchKernel(const ForwardParams& forward, const KernelParams& params, int grid,
                         cudaStream_t stream) {
  constexpr CUtensorMapDataType kType = std::is_same_v<typename Traits::Element, __half>
                                            ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const Problem& problem = forward.problem;
  const int pack = 1 << params.pack_log2;
  // Without keys nothing is read, but a map must describe something.
  const bool no_keys = problem.k_len == 0;
  const void* k = no_keys ? forward.q : forward.k;
  const void* v = no_keys ? forward.q : forward.v;
  const int k_rows = std::max(problem.k_len, 1);
  CUtensorMap q_map, k_map, v_map;
  cudaError_t error = MakeTensorMap(&q_map, kType, forward.q, problem.q_len, problem.num_heads,
                                    Traits::kHeadDim, 64 / pack, pack);
  if (error != cudaSuccess) return error;
  error = MakeTensorMap(&k_map, kType, k, k_rows, problem.num_kv_heads, Traits::kHeadDim,
                        Traits::kBlockN / params.partners, 1);
  if (error != cudaSuccess) return error;
  error = MakeTensorMap(&v_map, kType, v, k_rows, problem.num_kv_heads, Traits::kVHeadDim,
                        Traits::kBlockN / params.partners, 1);
  if (error != cudaSuccess) return error;

  constexpr int kSharedBytes = sizeof(SharedStorage<Traits>);
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  error = cudaFuncSetAttribute(ForwardKernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(params.partners), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = params.partners > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, ForwardKernel<Traits>, q_map, k_map, v_map, params);
}

template <typename Traits>
cudaError_t LaunchForward(const ForwardParams& forward, const KernelParams& params, int grid,
                          cudaStream_t stream) {
  if constexpr (Traits::kSplits) {
    if (params.split.plan != nullptr) return LaunchKernel<Traits>(forward, params, grid, stream);
  }
  return params.transform ? LaunchKernel<Transforming<Whole<Traits>>>(forward, params, grid, stream)
                          : LaunchKernel<Whole<Traits>>(forward, params, grid, stream);
}

// Calls with few keys take kernel `Few`, whose blocks of keys fit common short lengths.
template <typename Traits, typename Few>
cudaError_t LaunchForward(const ForwardParams& forward, const KernelParams& params, int grid,
                          cudaStream_t stream) {
  return TakesFewKeys(forward.problem)
             ? LaunchKernel<Single<Whole<Few>>>(forward, params, grid, stream)
             : LaunchForward<Traits>(forward, params, grid, stream);
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_FORWARD_CUH_
