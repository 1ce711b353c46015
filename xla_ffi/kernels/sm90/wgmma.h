// WGMMA: D[64, n] (+)= A[64, 16] B[16, n] by one warpgroup, with D in registers as float, A in
// shared memory or registers, B in shared memory. Operands in shared memory are tiles of 128-byte
// rows with the 128-byte swizzle.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_WGMMA_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_WGMMA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "xla_ffi/kernels/sm90/ptx.h"

namespace magi_jax::sm90 {

// --- matrix descriptors: start, two strides, and the swizzle, in units of 16 bytes ---

constexpr int kSwizzleAtomBytes = 1024;  // 8 rows of 128 bytes

// The lower half of a descriptor, which holds the start; the upper half is the same for all
// operands here: 128-byte swizzle, and one atom from 8 rows to the next. Kept apart so that
// stepping along an operand is a 32-bit addition.
struct Operand {
  uint32_t low;

  __device__ __forceinline__ Operand Advance(int bytes) const { return {low + (bytes >> 4)}; }

  __device__ __forceinline__ uint64_t Descriptor() const {
    constexpr uint32_t kHigh = 1u << 30 | kSwizzleAtomBytes >> 4;
    return uint64_t{kHigh} << 32 | low;
  }
};

// Operand whose rows run along the summed axis (queries and keys in QK). A step of 16 along that
// axis adds 32 bytes.
__device__ __forceinline__ Operand OperandOfRows(uint32_t address) {
  return {1u << 16 | (address & 0x3FFFF) >> 4};
}

// Operand whose rows run along the free axis (values in PV): a step of 16 along the summed axis is
// two atoms; the next chunk of 64 columns follows at `chunk_bytes`.
__device__ __forceinline__ Operand OperandOfColumns(uint32_t address, int chunk_bytes) {
  return {uint32_t(chunk_bytes >> 4) << 16 | (address & 0x3FFFF) >> 4};
}

// --- ordering ---

// Orders earlier register writes of this warpgroup before the products that follow.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending committed groups are in flight. Waits of different kPlace are never
// merged.
template <int kPending, int kPlace = 0>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;  // place %1" ::"n"(kPending), "n"(kPlace)
               : "memory");
}

// Keeps the compiler from moving uses of registers that products in flight own across this point.
template <int kCount>
__device__ __forceinline__ void PinRegisters(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void PinRegisters(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// --- products ---

template <int kN>
struct Wgmma;

// clang-format off
#define MAGI_ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MAGI_ACC16(i) MAGI_ACC4(i), MAGI_ACC4(i + 4), MAGI_ACC4(i + 8), MAGI_ACC4(i + 12)
#define MAGI_ACC32(i) MAGI_ACC16(i), MAGI_ACC16(i + 16)
#define MAGI_REGS0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MAGI_REGS16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MAGI_REGS32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MAGI_REGS48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MAGI_REGS64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MAGI_REGS80 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MAGI_REGS96 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define MAGI_REGS112 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on

// One pair of functions per (shape, type). `n0`.. are the numbers of the operands after the
// accumulators.
#define MAGI_WGMMA_TYPE(n, type, regs, n0, n1, n2, n3, n4, n5, ...)                             \
  template <bool kBColumns, bool kAColumns = false, int kCount>                                 \
  static __device__ __forceinline__ void SharedShared(float (&d)[kCount], Operand a, Operand b, \
                                                      bool add, type) {                         \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #n2                                   \
                 ", 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." MAGI_NAME_##type             \
                 "." MAGI_NAME_##type " {" regs "}, %" #n0 ", %" #n1 ", add, 1, 1, %" #n4       \
                                      ", %" #n3 ";\n}\n"                                        \
                 : __VA_ARGS__                                                                  \
                 : "l"(a.Descriptor()), "l"(b.Descriptor()), "r"(int32_t{add}),                 \
                   "n"(int32_t{kBColumns}), "n"(int32_t{kAColumns}));                           \
  }                                                                                             \
  template <int kCount>                                                                         \
  static __device__ __forceinline__ void RegistersShared(float (&d)[kCount], const uint32_t* a, \
                                                         Operand b, bool add, type) {           \
    asm volatile(                                                                               \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %" #n5                                            \
        ", 0;\n"                                                                                \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." MAGI_NAME_##type "." MAGI_NAME_##type \
        " {" regs "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", add, 1, 1, 1;\n}\n"   \
        : __VA_ARGS__                                                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.Descriptor()), "r"(int32_t{add}));  \
  }

#define MAGI_NAME___nv_bfloat16 "bf16"
#define MAGI_NAME___half "f16"

#define MAGI_WGMMA(n, regs, n0, n1, n2, n3, n4, n5, ...)                         \
  template <>                                                                    \
  struct Wgmma<n> {                                                              \
    MAGI_WGMMA_TYPE(n, __nv_bfloat16, regs, n0, n1, n2, n3, n4, n5, __VA_ARGS__) \
    MAGI_WGMMA_TYPE(n, __half, regs, n0, n1, n2, n3, n4, n5, __VA_ARGS__)        \
  };

MAGI_WGMMA(32, MAGI_REGS0, 16, 17, 18, 19, 20, 21, MAGI_ACC16(0))
MAGI_WGMMA(64, MAGI_REGS0 ", " MAGI_REGS16, 32, 33, 34, 35, 36, 37, MAGI_ACC32(0))
MAGI_WGMMA(80,
           MAGI_REGS0 ", " MAGI_REGS16
                      ", "
                      "%32, %33, %34, %35, %36, %37, %38, %39",
           40, 41, 42, 43, 44, 45, MAGI_ACC32(0), MAGI_ACC4(32), MAGI_ACC4(36))
MAGI_WGMMA(96, MAGI_REGS0 ", " MAGI_REGS16 ", " MAGI_REGS32, 48, 49, 50, 51, 52, 53, MAGI_ACC32(0),
           MAGI_ACC16(32))
MAGI_WGMMA(112,
           MAGI_REGS0 ", " MAGI_REGS16 ", " MAGI_REGS32
                      ", "
                      "%48, %49, %50, %51, %52, %53, %54, %55",
           56, 57, 58, 59, 60, 61, MAGI_ACC32(0), MAGI_ACC16(32), MAGI_ACC4(48), MAGI_ACC4(52))
MAGI_WGMMA(128, MAGI_REGS0 ", " MAGI_REGS16 ", " MAGI_REGS32 ", " MAGI_REGS48, 64, 65, 66, 67, 68,
           69, MAGI_ACC32(0), MAGI_ACC32(32))
MAGI_WGMMA(144,
           MAGI_REGS0 ", " MAGI_REGS16 ", " MAGI_REGS32 ", " MAGI_REGS48
                      ", "
                      "%64, %65, %66, %67, %68, %69, %70, %71",
           72, 73, 74, 75, 76, 77, MAGI_ACC32(0), MAGI_ACC32(32), MAGI_ACC4(64), MAGI_ACC4(68))
MAGI_WGMMA(160, MAGI_REGS0 ", " MAGI_REGS16 ", " MAGI_REGS32 ", " MAGI_REGS48 ", " MAGI_REGS64, 80,
           81, 82, 83, 84, 85, MAGI_ACC32(0), MAGI_ACC32(32), MAGI_ACC16(64))
MAGI_WGMMA(176,
           MAGI_REGS0 ", " MAGI_REGS16 ", " MAGI_REGS32 ", " MAGI_REGS48 ", " MAGI_REGS64
                      ", "
                      "%80, %81, %82, %83, %84, %85, %86, %87",
           88, 89, 90, 91, 92, 93, MAGI_ACC32(0), MAGI_ACC32(32), MAGI_ACC16(64), MAGI_ACC4(80),
           MAGI_ACC4(84))
MAGI_WGMMA(192,
           MAGI_REGS0 ", " MAGI_REGS16 ", " MAGI_REGS32 ", " MAGI_REGS48 ", " MAGI_REGS64
                      ", " MAGI_REGS80,
           96, 97, 98, 99, 100, 101, MAGI_ACC32(0), MAGI_ACC32(32), MAGI_ACC32(64))
MAGI_WGMMA(256,
           MAGI_REGS0 ", " MAGI_REGS16 ", " MAGI_REGS32 ", " MAGI_REGS48 ", " MAGI_REGS64
                      ", " MAGI_REGS80 ", " MAGI_REGS96 ", " MAGI_REGS112,
           128, 129, 130, 131, 132, 133, MAGI_ACC32(0), MAGI_ACC32(32), MAGI_ACC32(64),
           MAGI_ACC32(96))

#undef MAGI_WGMMA
#undef MAGI_WGMMA_TYPE
#undef MAGI_NAME___half
#undef MAGI_NAME___nv_bfloat16
#undef MAGI_ACC4
#undef MAGI_ACC16
#undef MAGI_ACC32
#undef MAGI_REGS0
#undef MAGI_REGS16
#undef MAGI_REGS32
#undef MAGI_REGS48
#undef MAGI_REGS64
#undef MAGI_REGS80
#undef MAGI_REGS96
#undef MAGI_REGS112

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_WGMMA_H_
