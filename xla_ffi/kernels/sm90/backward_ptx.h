// Hopper instructions that only the backward uses: one function per instruction.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PTX_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PTX_H_

#include <cuda.h>

#include <cstdint>

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/ptx.h"
#include "xla_ffi/kernels/sm90/wgmma.h"

namespace magi_jax::sm90 {

// Makes this thread's ordinary writes to shared memory visible to tensor cores and the copy engine.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders this thread's accesses to global memory and those of the copy engine, in both directions.
// Enough where a word tells of what the copy engine did there: who tells has waited until it is
// complete, who is told acquires the word, and shared memory is handed over by mbarriers. For all
// of memory the fence would first wait for everything that the thread has under way.
__device__ __forceinline__ void FenceAsyncProxyGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The kernels of a call begin while the one before still runs (see LaunchNext): until this returns,
// nothing that it writes may be read, and nothing that it reads written. Each kernel waits, so that
// all before it are done too.
__device__ __forceinline__ void AwaitKernelBefore() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Once all thread blocks are here, those of the next kernel take the places that become free.
__device__ __forceinline__ void LetKernelAfterBegin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Words that thread blocks tell each other of their progress with.
__device__ __forceinline__ int GetWord(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void SetWord(int* address, int value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Reads see all that was added before the progress they read was told.
__device__ __forceinline__ Progress GetProgress(const Progress* address) {
  uint64_t word;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  return {static_cast<int32_t>(word), static_cast<int32_t>(word >> 32)};
}

__device__ __forceinline__ void SetProgress(Progress* address, Progress progress) {
  const uint64_t word =
      uint64_t{static_cast<uint32_t>(progress.all)} << 32 | static_cast<uint32_t>(progress.own);
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

// threadIdx.x, in a register: reading it again at each use takes as long as a load. The assembler
// does not see through the exchange.
__device__ __forceinline__ int ThreadIndex() {
  return __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x), threadIdx.x % 32);
}

// The same operand, in one register from here on. The compiler would keep the address of each step
// of a loop in a register of its own, 16 for keys alone, rather than add to one.
__device__ __forceinline__ Operand Opaque(Operand operand) {
  asm volatile("" : "+r"(operand.low));
  return operand;
}

// Stores four 8 x 8 matrices of 2-byte elements, transposed: lane 8m + i gives the address of what
// is column i of matrix m in the registers.
__device__ __forceinline__ void StoreMatricesTransposed(uint32_t address, const uint32_t* m) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
      : "memory");
}

// The larger of two, or NaN where one is.
__device__ __forceinline__ float LargerOrNan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

__device__ __forceinline__ void StoreWord(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void StoreFloat(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void StorePair(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Brings a box to L2.
__device__ __forceinline__ void PrefetchBox(const CUtensorMap* map, int column, int head, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
               "r"(column), "r"(head), "r"(row)
               : "memory");
}

// A word that tells of memory which other threads may read once they have acquired it.
__device__ __forceinline__ void ReleaseWord(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ int AcquireWord(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Copies contiguous bytes, a multiple of 16, to shared memory; they count towards the current phase
// of `barrier`.
__device__ __forceinline__ void CopyBytes(void* destination, const void* source, int bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(destination)),
      "l"(source), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// Copies contiguous bytes, a multiple of 16, from shared memory.
__device__ __forceinline__ void TakeBytes(void* destination, const void* source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(SharedAddress(source)), "r"(bytes)
               : "memory");
}

// Writes a box from shared memory; parts of it outside of the tensor are left out.
__device__ __forceinline__ void TakeBox(const CUtensorMap* map, const void* source, int column,
                                        int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(SharedAddress(source)), "r"(column), "r"(head), "r"(row)
      : "memory");
}

// Adds a box in shared memory to the tensor; parts of the box outside of the tensor are left out.
__device__ __forceinline__ void AddBox(const void* source, const CUtensorMap* map, int column,
                                       int head, int row) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(map),
      "r"(SharedAddress(source)), "r"(column), "r"(head), "r"(row)
      : "memory");
}

// Adds two floats to global memory.
__device__ __forceinline__ void AddPair(float* address, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void CommitBoxes() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until shared memory of all committed boxes has been read.
__device__ __forceinline__ void WaitBoxesRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until all committed boxes have been added.
__device__ __forceinline__ void WaitBoxes() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_PTX_H_
