// Gradients of attention on Hopper (TMA, WGMMA, warp-specialised, persistent). Free of any
// framework type.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "xla_ffi/common/params.h"

namespace magi_jax::sm90 {

// Words at the start of scratch after a call: items that were listed, and taken, by each kernel;
// those of a kernel that the table is not for are 0. `CudaImplementation.backward_items` reads
// them.
enum Counter {
  kItemsTaken,
  kItems,
  kDocumentItems,
  kDocumentItemsTaken,
  kCutItems,
  kCutItemsTaken,
  kShortItems,
  kShortItemsTaken,
  kCounters
};

// Why this path cannot run the problem on a device of compute capability 9.0, and what it would
// accept; null when it can. The string is static.
const char* RefuseBackward(const BackwardParams& params);

// Bytes of BackwardParams::scratch, which is 128-byte aligned and has undefined contents before
// and, but for its counters, after.
size_t BackwardScratchBytes(const Problem& problem, DType dkv_dtype, bool fixed_order = false,
                            bool rounds_dq = false);

// What runs for this problem. Writes at most `size` bytes.
void DescribeBackward(const Problem& problem, bool fixed_order, char* text, size_t size);

// Enqueues at most one memset node and five kernels on `stream` of the current device; no host
// synchronisation, no allocation. The problem must not be refused. Returns the launch error, if
// any.
//
// dq, and dk and dv of keys that many queries see, are sums of float32 terms in the order in which
// thread blocks arrive, so that their last bits vary from run to run; with
// BackwardParams::fixed_order thread blocks take turns, and the bits are the same.
cudaError_t Backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_H_
