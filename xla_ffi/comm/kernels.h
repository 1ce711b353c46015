// Kernels of the group collectives: one per call. A second one would have to wait for an SM, and a
// persistent attention kernel that was launched in between gives none back before it ends.

#ifndef MAGI_JAX_XLA_FFI_COMM_KERNELS_H_
#define MAGI_JAX_XLA_FFI_COMM_KERNELS_H_

#include <cuda_runtime_api.h>

#include "xla_ffi/comm/params.h"

namespace magi_jax::comm {

cudaError_t Cast(const Meeting& meeting, const Move& move, cudaStream_t stream);
// The rows that stay on this rank, which Cast leaves out where `move.own_rows` is not 0, by so many
// blocks of a kernel.
int32_t OwnRowBlocks(const Move& move);
cudaError_t CopyOwnRows(const Meeting& meeting, const Move& move, cudaStream_t stream);
// Cast as above, by writing to the results of the peers. For rows of whole vectors of 16 bytes,
// where `move.stream`, and atomics reach all peers.
cudaError_t Push(const Meeting& meeting, const Move& move, cudaStream_t stream);
cudaError_t ReduceSum(const Meeting& meeting, const Move& move, cudaStream_t stream);
// Leaves: out [rows, heads, row_elements / heads], lse [rows, heads] float32.
cudaError_t ReduceLse(const Meeting& meeting, const Move& move, cudaStream_t stream);

// Holds `stream` until the kernels of `meeting` have their SMs, so that what is enqueued behind it
// cannot take them; but no longer than a launch takes, and behind a call that has ended than
// `copied_bytes` take that are copied before it. `apart_blocks` copy own rows or did in earlier
// calls.
cudaError_t AwaitStart(const Meeting& meeting, int32_t num_blocks, uint64_t apart_blocks,
                       int64_t copied_bytes, cudaStream_t stream);

// Whether rows can go through shared memory on the current device: whether its kernels were
// compiled with bulk copies, and it has room for their rings.
cudaError_t CanStreamRows(int device, bool* can);

// Loads the kernels on the current device. What is not loaded yet would be when first launched,
// which may wait for the device while its kernels wait for a peer.
cudaError_t LoadKernels(bool stream);
cudaError_t LoadOwnRowsKernel();
cudaError_t LoadPushKernel(bool stream);
cudaError_t LoadReduceSumKernels(bool stream);
cudaError_t LoadReduceLseKernel();

using CallKernel = void (*)(Meeting, Move);

cudaError_t LoadKernel(CallKernel kernel, bool stream);

struct LaunchShape {
  int32_t num_blocks, threads, shared_bytes;
};

// Launches a kernel of a call, where the device can (`move.stream`) with two blocks of a cluster on
// neighbouring SMs: attention beside it runs in such clusters too, and an SM whose neighbour is
// taken is lost to them.
cudaError_t LaunchCall(CallKernel kernel, const LaunchShape& shape, const Meeting& meeting,
                       const Move& move, cudaStream_t stream);

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_KERNELS_H_
