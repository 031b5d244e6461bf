// Elements of the pool (P) and of the tensors (T) of write_kv and read_kv. P equals T unless the pool is FP8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace kvservice::slots {

template <__nv_fp8_interpretation_t kind>
struct Float8 {
  static constexpr __nv_fp8_interpretation_t kKind = kind;
  __nv_fp8_storage_t bits;
};

using E4M3 = Float8<__NV_E4M3>;
using E5M2 = Float8<__NV_E5M2>;

// kCount elements that are loaded and stored as one.
template <class E, int kCount>
struct alignas(kCount * sizeof(E)) Pack {
  E at[kCount];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void from_float(float x, float& out) { out = x; }
__device__ __forceinline__ void from_float(float x, __half& out) { out = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

// Returns x / scale, saturated, rounded to nearest even. Elements of equal types are copied as bits.
template <class P, class T, int kCount>
__device__ __forceinline__ Pack<P, kCount> to_pool(const Pack<T, kCount>& x, float scale) {
  if constexpr (std::is_same_v<P, T>) {
    return x;
  } else {
    float numbers[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = to_float(x.at[i]);
    if (scale != 1.0F) {  // a division takes several instructions
#pragma unroll
      for (int i = 0; i < kCount; ++i) numbers[i] /= scale;
    }
    Pack<P, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const uint32_t pair = __nv_cvt_float2_to_fp8x2({numbers[i], numbers[i + 1]}, __NV_SATFINITE, P::kKind);
      out.at[i].bits = static_cast<__nv_fp8_storage_t>(pair & 0xFFU);
      out.at[i + 1].bits = static_cast<__nv_fp8_storage_t>(pair >> 8U);
    }
    return out;
  }
}

template <class P, class T>
__device__ __forceinline__ T to_tensor(P x, float scale) {
  if constexpr (std::is_same_v<P, T>) {
    return x;
  } else {
    T out;
    from_float(__half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, P::kKind))) * scale, out);
    return out;
  }
}

}  // namespace kvservice::slots
