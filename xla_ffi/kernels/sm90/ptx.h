// Thin names for the Hopper instructions that the kernels use: one function per instruction.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_PTX_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_PTX_H_

#include <cstdint>

namespace magi_jax::sm90 {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier: one 8-byte word in shared memory that counts arrivals and bytes of one phase at a
// time ---

__device__ __forceinline__ void BarrierInit(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// The same in one lane of a warp whose lanes are all here; no register says which.
__device__ __forceinline__ void BarrierArriveByOne(uint64_t* barrier) {
  asm volatile(
      "{\n.reg .pred elected;\nelect.sync _|elected, 0xFFFFFFFF;\n"
      "@elected mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(SharedAddress(barrier))
      : "memory");
}

__device__ __forceinline__ void BarrierArriveExpect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase of the given parity is complete. A fresh barrier counts parity 1 as
// complete.
__device__ __forceinline__ void BarrierWait(uint64_t* barrier, uint32_t parity) {
  const uint32_t address = SharedAddress(barrier);
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}\n"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
}

// Makes this thread's ordinary writes to shared memory visible to the tensor cores.
__device__ __forceinline__ void ProxyFence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- pairs: clusters of two thread blocks, which reach each other's shared memory ---

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where `pointer`, to shared memory, leads in thread block `rank` of the cluster. A thread block
// that was launched without a cluster is rank 0 of its own.
__device__ __forceinline__ uint32_t ClusterAddress(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(SharedAddress(pointer)), "r"(rank));
  return address;
}

// Arrives at the barrier at the same place in thread block `rank`. Not as .release.cluster, which
// is compiled to a fence of all memory: what is given back here was read by products that have been
// waited for.
__device__ __forceinline__ void ClusterArrive(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(ClusterAddress(barrier, rank))
               : "memory");
}

// The same in one lane of a warp whose lanes are all here, if `on` is the same in all.
__device__ __forceinline__ void ClusterArriveByOne(uint64_t* barrier, uint32_t rank, bool on) {
  asm volatile(
      "{\n.reg .pred elected, on;\nelect.sync _|elected, 0xFFFFFFFF;\n"
      "setp.ne.and.b32 on, %1, 0, elected;\n"
      "@on mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(ClusterAddress(barrier, rank)),
      "r"(static_cast<int>(on))
      : "memory");
}

// Stores a word in thread block `rank`; its 4 bytes count towards the phase of `barrier` there.
__device__ __forceinline__ void ClusterStore(int* place, uint64_t* barrier, uint32_t rank,
                                             int value) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          ClusterAddress(place, rank)),
      "r"(value), "r"(ClusterAddress(barrier, rank))
      : "memory");
}

// All threads of the cluster.
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// --- named barriers, for turns between the consumer warpgroups ---

__device__ __forceinline__ void NamedBarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- registers of a warpgroup ---

template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- arithmetic ---

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// `width` ones from bit `first` up; both are clamped to the word.
__device__ __forceinline__ uint32_t BitField(uint32_t first, uint32_t width) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(width));
  return bits;
}

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_PTX_H_
