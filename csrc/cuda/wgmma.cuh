// Hopper's warpgroup MMA: acc[64 x kColumns] += a[64 x 16] b[16 x kColumns], of float16 or bfloat16, with b in shared
// memory and a in shared memory or registers.
#pragma once

#include <type_traits>

#include "cuda/ptx.cuh"

// Defined in code for sm_90a only.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVSERVICE_WGMMA 1
#endif

namespace kvservice::ptx {

// Describes a matrix in shared memory that consists of 8x8 core matrices of 128 contiguous bytes, with the reduction
// along their rows. `reduction_bytes` and `row_bytes` are the distances between core matrices along the reduction and
// along the rows. Addition to the descriptor moves the address in units of 16 bytes.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t reduction_bytes, uint32_t row_bytes) {
  return static_cast<uint64_t>(row_bytes / 16) << 32 | (reduction_bytes / 16) << 16 | address / 16;
}

// The same for rows of 32 contiguous bytes, one MMA's, with the 32-byte swizzle: halves are swapped in every second
// four rows. The matrix begins at a multiple of 256 bytes.
__device__ __forceinline__ uint64_t swizzled_32_descriptor(uint32_t address) {
  return uint64_t{3} << 62 | uint64_t{256 / 16} << 32 | uint64_t{1} << 16 | address / 16;
}

#ifdef KVSERVICE_WGMMA

// Orders earlier register writes before the MMAs that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to these registers across this point (CUTLASS's warpgroup_fence_operand).
template <int kCount>
__device__ __forceinline__ void fence_operand(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value)::"memory");
}

// Orders this thread's earlier generic accesses to shared memory before later reads by wgmma (the async proxy).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kCount>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// clang-format off
#define KVSERVICE_REGISTERS_8(d, i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KVSERVICE_REGISTERS_32(d, i)                                                                    \
  KVSERVICE_REGISTERS_8(d, i), KVSERVICE_REGISTERS_8(d, i + 8), KVSERVICE_REGISTERS_8(d, i + 16),       \
      KVSERVICE_REGISTERS_8(d, i + 24)
#define KVSERVICE_REGISTERS_64(d, i) KVSERVICE_REGISTERS_32(d, i), KVSERVICE_REGISTERS_32(d, i + 32)
#define KVSERVICE_NAMES_32                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KVSERVICE_NAMES_64                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// If `add` is 0, acc is overwritten. The last operands mean: no negation, rows along the reduction.
#define KVSERVICE_WGMMA_SHARED(COUNT, COLUMNS, TYPE, A, B, ADD)                                         \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                   \
               "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {"               \
               KVSERVICE_NAMES_##COUNT "}, %" #A ", %" #B ", add, 1, 1, 0, 0;\n}"                       \
               : KVSERVICE_REGISTERS_##COUNT(acc, 0)                                                    \
               : "l"(a), "l"(b), "r"(add))
#define KVSERVICE_WGMMA_REGISTERS(COUNT, COLUMNS, TYPE, A0, A1, A2, A3, B)                              \
  asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                          \
               "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {"               \
               KVSERVICE_NAMES_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B              \
               ", add, 1, 1, 0;\n}"                                                                     \
               : KVSERVICE_REGISTERS_##COUNT(acc, 0)                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// clang-format on

// kColumns is twice the number of accumulators: acc[4 n + e] is element e of mma.m16n8k16's for columns 8 n and
// following.
template <typename T>
__device__ __forceinline__ void wgmma(float (&acc)[32], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, half>) {
    KVSERVICE_WGMMA_SHARED(32, 64, "f16", 32, 33, 34);
  } else {
    KVSERVICE_WGMMA_SHARED(32, 64, "bf16", 32, 33, 34);
  }
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&acc)[64], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, half>) {
    KVSERVICE_WGMMA_SHARED(64, 128, "f16", 64, 65, 66);
  } else {
    KVSERVICE_WGMMA_SHARED(64, 128, "bf16", 64, 65, 66);
  }
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&acc)[32], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, half>) {
    KVSERVICE_WGMMA_REGISTERS(32, 64, "f16", 32, 33, 34, 35, 36);
  } else {
    KVSERVICE_WGMMA_REGISTERS(32, 64, "bf16", 32, 33, 34, 35, 36);
  }
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&acc)[64], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, half>) {
    KVSERVICE_WGMMA_REGISTERS(64, 128, "f16", 64, 65, 66, 67, 68);
  } else {
    KVSERVICE_WGMMA_REGISTERS(64, 128, "bf16", 64, 65, 66, 67, 68);
  }
}

#endif

}  // namespace kvservice::ptx
