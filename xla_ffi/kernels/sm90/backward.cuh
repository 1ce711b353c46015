// The backward kernel and its launch. Instantiated once per (type, head dim), each in a file of its
// own.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "xla_ffi/kernels/sm90/backward_carrier.h"
#include "xla_ffi/kernels/sm90/backward_documents.h"
#include "xla_ffi/kernels/sm90/backward_launch.h"
#include "xla_ffi/kernels/sm90/backward_long.h"
#include "xla_ffi/kernels/sm90/backward_mainloop.h"
#include "xla_ffi/kernels/sm90/backward_paired_keys.h"
#include "xla_ffi/kernels/sm90/backward_paired_values.h"
#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_producer.h"
#include "xla_ffi/kernels/sm90/backward_store.h"
#include "xla_ffi/kernels/sm90/tma.h"

namespace magi_jax::sm90 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    BackwardKernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap dout_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ CUtensorMap dq_map,
                   const __grid_constant__ CUtensorMap dk_map,
                   const __grid_constant__ CUtensorMap dv_map,
                   const __grid_constant__ BackwardKernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardStorage<Traits>*>(shared_bytes);

  if (threadIdx.x == 0) {
    BarrierInit(&shared.kv_full, 1);
    BarrierInit(&shared.kv_empty, Traits::kConsumerArrivals);
    for (int i = 0; i < Traits::kStages; ++i) {
      BarrierInit(&shared.q_full[i], Traits::kProducerArrivals);
      BarrierInit(&shared.q_empty[i], Traits::kConsumerArrivals + Traits::kSumArrivals);
    }
    for (int i = 0; i < Traits::kDoutStages; ++i) {
      BarrierInit(&shared.dout_full[i], 1);
      BarrierInit(&shared.dout_empty[i], Traits::kConsumerArrivals);
    }
    for (int i = 0; i < Traits::kAllGradientPlaces; ++i) {
      BarrierInit(&shared.dq_full[i], Traits::kGroupArrivals);
      BarrierInit(&shared.dq_empty[i],
                  Traits::kOrdered || Traits::kDocuments ? Traits::kProducerArrivals : 1);
      BarrierInit(&shared.sums_full[i], 1);
    }
    if constexpr (Traits::kPaired) {
      BarrierInit(&shared.pair.full, Traits::kGroupArrivals);
      BarrierInit(&shared.pair.empty, Traits::kGroupArrivals);
      BarrierInit(&shared.pair.vote, Traits::kConsumerArrivals);
    }
    BarrierInitFence();
    PrefetchTensorMap(&q_map);
    PrefetchTensorMap(&dout_map);
    PrefetchTensorMap(&k_map);
    PrefetchTensorMap(&v_map);
    PrefetchTensorMap(&dq_map);
  }
  __syncthreads();
  LetKernelAfterBegin();
  AwaitKernelBefore();

  if (threadIdx.x < 128) {
    LowerRegisters<Traits::kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      std::conditional_t<Traits::kDocuments, DocumentProducer<Traits>, QueryProducer<Traits>>(
          params, q_map, dout_map, k_map, v_map, shared)
          .Work();
    } else if (warp <= Traits::kConsumers) {
      if constexpr (Traits::kDocuments) {
        GradientTaker<Traits>(params, dq_map, shared, warp - 1).Work();
      } else {
        AddGradients<Traits>(params, dq_map, dk_map, dv_map, shared, warp - 1);
      }
    } else if constexpr (Traits::kDocuments) {
      BringSums<Traits>(params, shared);
    }
  } else {
    RaiseRegisters<Traits::kConsumerRegisters>();
    if constexpr (Traits::kLong) {
      LongConsumer<Traits>(params, shared).Work();
    } else if constexpr (!Traits::kPaired) {
      GradientConsumer<Traits>(params, shared).Work();
    } else if (threadIdx.x < 256) {
      ValueConsumer<Traits>(params, shared).Work();
    } else {
      KeyConsumer<Traits>(params, shared).Work();
    }
  }
}

template <typename Traits>
cudaError_t LaunchInstantiation(const BackwardParams& backward, const BackwardKernelParams& params,
                                int blocks, cudaStream_t stream) {
  constexpr CUtensorMapDataType kType = std::is_same_v<typename Traits::Element, __half>
                                            ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  constexpr int kHeadDim = Traits::kHeadDim, kVHeadDim = Traits::kVHeadDim;
  const Problem& problem = backward.problem;
  CUtensorMap q_map, dout_map, k_map, v_map, dq_map, dk_map, dv_map;
  cudaError_t error = MakeTensorMap(&q_map, kType, backward.q, problem.q_len, problem.num_heads,
                                    kHeadDim, Traits::kBlockM, 1);
  if (error != cudaSuccess) return error;
  error = MakeTensorMap(&dout_map, kType, backward.dout, problem.q_len, problem.num_heads,
                        kVHeadDim, Traits::kBlockM, 1);
  if (error != cudaSuccess) return error;
  error = MakeTensorMap(&k_map, kType, backward.k, problem.k_len, problem.num_kv_heads, kHeadDim,
                        Traits::kBlockN, 1);
  if (error != cudaSuccess) return error;
  error = MakeTensorMap(&v_map, kType, backward.v, problem.k_len, problem.num_kv_heads, kVHeadDim,
                        Traits::kBlockN, 1);
  if (error != cudaSuccess) return error;
  error = Traits::kDocuments ? MakeTensorMap(&dq_map, kType, backward.dq_rounded, problem.q_len,
                                             problem.num_heads, kHeadDim, Traits::kRoundedRows, 1)
                             : MakeGradientMap(&dq_map, backward.dq, problem.q_len,
                                               problem.num_heads, kHeadDim, Traits::kGradientRows);
  if (error != cudaSuccess) return error;
  // Where nothing is split there are no sums, and nothing is added through these maps.
  dk_map = dv_map = dq_map;
  if (Traits::kCopiesSums && problem.num_heads > problem.num_kv_heads) {
    error = MakeGradientMap(&dk_map, params.dk_sum, problem.k_len, problem.num_kv_heads, kHeadDim,
                            Traits::kSumRows);
    if (error != cudaSuccess) return error;
    error = MakeGradientMap(&dv_map, params.dv_sum, problem.k_len, problem.num_kv_heads, kVHeadDim,
                            Traits::kSumRows);
    if (error != cudaSuccess) return error;
  }

  constexpr int kSharedBytes = sizeof(BackwardStorage<Traits>);
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  error = cudaFuncSetAttribute(BackwardKernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kSharedBytes);
  if (error != cudaSuccess) return error;
  return LaunchNext(BackwardKernel<Traits>, dim3(blocks), Traits::kThreads, kSharedBytes, stream,
                    q_map, dout_map, k_map, v_map, dq_map, dk_map, dv_map, params);
}

// An instantiation with a list of its own, which the device leaves empty where another one takes
// the work; nothing where there is no list.
template <typename Traits>
cudaError_t LaunchListed(const BackwardParams& backward, BackwardKernelParams params,
                         int* num_items, int* counter, int blocks, cudaStream_t stream) {
  if (num_items == nullptr) return cudaSuccess;
  params.num_items = num_items;
  params.counter = counter;
  return LaunchInstantiation<Traits>(backward, params, blocks, stream);
}

template <typename Element, int kHeadDim, int kVHeadDim, bool kSoftCap>
cudaError_t LaunchInOrder(const BackwardParams& backward, const BackwardKernelParams& params,
                          int blocks, cudaStream_t stream) {
  if (backward.fixed_order) {
    return LaunchInstantiation<BackwardTraits<Element, kHeadDim, kVHeadDim, kSoftCap, true>>(
        backward, params, blocks, stream);
  }
  if constexpr (TakesDocuments(kHeadDim, kSoftCap)) {
    const cudaError_t error =
        LaunchListed<BackwardTraits<Element, kHeadDim, kVHeadDim, kSoftCap, false, false, true>>(
            backward, params, params.num_document_items, params.document_counter, kDocumentBlocks,
            stream);
    if (error != cudaSuccess) return error;
  }
  if constexpr (TakesShortRuns(kHeadDim, kSoftCap)) {
    const cudaError_t error = LaunchListed<
        BackwardTraits<Element, kHeadDim, kVHeadDim, kSoftCap, false, false, false, true>>(
        backward, params, params.num_short_items, params.short_counter, blocks, stream);
    // No run is longer than the call.
    const bool all_are_short = params.num_short_items != nullptr && params.q_len < kLongRun;
    if (error != cudaSuccess || all_are_short) return error;
  }
  if constexpr (CutsWalks(kHeadDim, kSoftCap)) {
    const cudaError_t error =
        LaunchListed<BackwardTraits<Element, kHeadDim, kVHeadDim, kSoftCap, false, true>>(
            backward, params, params.num_cut_items, params.cut_counter, blocks, stream);
    if (error != cudaSuccess) return error;
  }
  return LaunchInstantiation<BackwardTraits<Element, kHeadDim, kVHeadDim, kSoftCap, false>>(
      backward, params, blocks, stream);
}

template <typename Element, int kHeadDim, int kVHeadDim = kHeadDim>
cudaError_t LaunchBackward(const BackwardParams& backward, const BackwardKernelParams& params,
                           int blocks, cudaStream_t stream) {
  if (backward.problem.logits_soft_cap != 0.0f) {
    return LaunchInOrder<Element, kHeadDim, kVHeadDim, true>(backward, params, blocks, stream);
  }
  return LaunchInOrder<Element, kHeadDim, kVHeadDim, false>(backward, params, blocks, stream);
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_CUH_
