// Kernels of the group collectives. A call is: map, enter, one of the moves, leave; all on one
// stream.

#ifndef MAGI_JAX_XLA_FFI_COMM_KERNELS_H_
#define MAGI_JAX_XLA_FFI_COMM_KERNELS_H_

#include <cuda_runtime_api.h>

#include "xla_ffi/comm/params.h"

namespace magi_jax::comm {

// Fills `map` from the table of the side that holds the results.
cudaError_t MapCast(const PieceTable& recv, const Extents& extents, const RowMap& map,
                    cudaStream_t stream);
cudaError_t MapReduce(const PieceTable& send, const Extents& extents, const RowMap& map,
                      cudaStream_t stream);

// Tells the peers of this call and waits for them; checks that they make the same call with
// matching tables. `rank` is the caller's place on its mesh axis, in device memory.
cudaError_t Enter(const Meeting& meeting, const PieceTable& send, const PieceTable& recv,
                  const int32_t* rank, cudaStream_t stream);
// Waits until no peer reads this rank's operands; after a failure, overwrites all results.
cudaError_t Leave(const Meeting& meeting, const Move& move, cudaStream_t stream);

// Results from the operands of the peers. They do nothing after a failure.
cudaError_t Cast(const Meeting& meeting, const Move& move, cudaStream_t stream);
cudaError_t ReduceSum(const Meeting& meeting, const Move& move, cudaStream_t stream);
// Leaves: out [rows, heads, row_elements / heads], lse [rows, heads] float32.
cudaError_t ReduceLse(const Meeting& meeting, const Move& move, cudaStream_t stream);

// Loads the kernels on the current device. What is not loaded yet would be when first launched,
// which may wait for the device while its kernels wait for a peer.
cudaError_t LoadKernels();
cudaError_t LoadMeetingKernels();
cudaError_t LoadCastKernels();
cudaError_t LoadReduceKernels();

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_KERNELS_H_
