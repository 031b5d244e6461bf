// PTX instructions without a C++ name.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvservice::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barriers in shared memory.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes the initialization visible to the async proxy. Follows the initialization and precedes __syncthreads().
__device__ __forceinline__ void fence_mbarrier_init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// An L2 policy for data that is read once, so that it does not evict data that is read again.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies a contiguous range (a multiple of 16 bytes, both ends aligned to 16). Its completion counts towards the
// barrier's transaction bytes.
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

#endif

// Waits until the kernel before this one on the stream has ended, and all that it wrote can be seen.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the thread blocks of the next kernel on the stream start where there is room for them, when all thread blocks of
// this kernel have called it or ended. Follows wait_for_previous(): otherwise kernels far behind would take the room.
__device__ __forceinline__ void start_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Thread blocks of a cluster.

__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores into the shared memory of a thread block of the cluster, at the address that it has in this one. The store
// counts towards the transaction bytes of that thread block's barrier.
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, uint32_t rank, float4 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 to, done;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 done, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [done];\n"
      "}" ::"r"(address),
      "r"(barrier), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
#endif
}

__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, uint32_t rank, float2 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 to, done;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 done, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [done];\n"
      "}" ::"r"(address),
      "r"(barrier), "r"(rank), "f"(x.x), "f"(x.y)
      : "memory");
#endif
}

__device__ __forceinline__ void copy_16_async(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// The barrier receives an arrival, which its count includes, when this thread's copies so far are complete.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t dst, const uint4& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// Loads read-only memory without allocating in L1.
__device__ __forceinline__ uint4 load_once_16(const void* source) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(source));
  return words;
}

// Loads without allocating in L1. Unlike loads of read-only memory, which the compiler moves behind stores to save
// registers, this load is in flight before the stores that follow it.
__device__ __forceinline__ uint4 load_early_16(const void* source) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(source)
               : "memory");
  return words;
}

// Waits for `threads` threads of the block at the named barrier, 1 to 15.
__device__ __forceinline__ void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Adds one without an order, and returns the number before, below 2^31 - 1. ptxas combines additions of a warp, also of
// one thread, and then waits for the answer to distribute it. It does not combine increments that can wrap around.
__device__ __forceinline__ int increment_relaxed(int* counter) {
  int before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7FFFFFFF;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Adds without an order.
__device__ __forceinline__ uint64_t add_relaxed(uint64_t* counter, uint64_t by) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(by) : "memory");
  return before;
}

// Adds with acquire-release semantics: a thread that sees the sum also sees the earlier writes of all threads that
// added before.
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* counter, uint32_t by) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
  return before;
}

__device__ __forceinline__ uint64_t add_acquire_release(uint64_t* counter, uint64_t by) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(by) : "memory");
  return before;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* counter) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}

// Returns the same number, of which the compiler knows nothing. It would otherwise compute what depends on it once
// before a loop, and spill it.
__device__ __forceinline__ int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Matrix fragments.

__device__ __forceinline__ void ldmatrix_4(uint32_t (&matrices)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// acc[16x8] += a[16x16] b[16x8], of float16 or bfloat16.
template <typename T>
__device__ __forceinline__ void mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<half>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Packs two numbers into a register, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<half>(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Converts four FP8 numbers to float16 exactly: the first two, then the last two.
__device__ __forceinline__ void e4m3_to_half(uint32_t bytes, uint32_t& first, uint32_t& second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(first), "=r"(second)
      : "r"(bytes));
#else
  // Shifted into place, the exponent and mantissa are those of the number divided by 2^8.
  const uint32_t spread[2] = {__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};
  uint32_t* out[2] = {&first, &second};
  for (int i = 0; i < 2; ++i) {
    const uint32_t moved = (spread[i] & 0x80008000U) | ((spread[i] & 0x7F007F00U) >> 1);
    const half2 number = __hmul2(reinterpret_cast<const half2&>(moved), __float2half2_rn(256.0F));
    *out[i] = reinterpret_cast<const uint32_t&>(number);
  }
#endif
}

// An e5m2 number is the upper byte of a float16.
__device__ __forceinline__ void e5m2_to_half(uint32_t bytes, uint32_t& first, uint32_t& second) {
  first = __byte_perm(bytes, 0, 0x1404);
  second = __byte_perm(bytes, 0, 0x3424);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace kvservice::ptx
