// Vectors of sixteen floats: AVX-512 F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

#include "cpu/half.h"

namespace kvservice {
namespace {

struct Simd {
  using F = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 4;

  static F set1(float x) { return _mm512_set1_ps(x); }
  static F zero() { return _mm512_setzero_ps(); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static F load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  // Loads four floats, repeated over the vector.
  static F load_quad(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
  // Splits pieces of eight 16-bit numbers, one piece per token, into two vectors with four floats per token: even and
  // odd elements for bfloat16, the first and the last four for float16.
  static void split(const bf16* p, F& a, F& b) {
    const __m512i raw = _mm512_loadu_si512(p);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  static void split(const fp16* p, F& a, F& b) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i sorted = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(p));
    a = _mm512_cvtph_ps(_mm512_castsi512_si256(sorted));
    b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(sorted, 1));
  }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store(bf16* p, F v) {
#ifdef __AVX512BF16__
    const __m256bh packed = _mm512_cvtneps_pbh(v);
    __builtin_memcpy(p, &packed, sizeof(packed));
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i chosen = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
#endif
  }
  static void store(fp16* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // Returns the larger number; `b` if either is NaN.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F if_less(F a, F b, F then, F otherwise) {
    return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), then);
  }
  static float sum(F v) { return _mm512_reduce_add_ps(v); }
  static float max_lane(F v) { return _mm512_reduce_max_ps(v); }
  // 2^n * 2^f with f in [-1/2, 1/2] and a polynomial for 2^f. Relative error below 2e-7; 0 for -inf.
  static F exp(F x) {
    const F clamped = max(set1(-105.0F), x);
    const F n = _mm512_roundscale_ps(mul(clamped, set1(1.44269504F)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F f = fma(n, set1(-0.693145752F), clamped);
    f = fma(n, set1(-1.42860677e-6F), f);
    F p = set1(1.38888889e-3F);
    p = fma(p, f, set1(8.33333333e-3F));
    p = fma(p, f, set1(4.16666667e-2F));
    p = fma(p, f, set1(1.66666667e-1F));
    p = fma(p, f, set1(0.5F));
    p = fma(p, f, set1(1.0F));
    p = fma(p, f, set1(1.0F));
    return _mm512_scalef_ps(p, n);
  }
  // acc[i] holds four partial sums of four tokens each. Returns the sixteen sums in order.
  static F quad_sums(const F* acc) {
    const F a = add(_mm512_unpacklo_ps(acc[0], acc[1]), _mm512_unpackhi_ps(acc[0], acc[1]));
    const F b = add(_mm512_unpacklo_ps(acc[2], acc[3]), _mm512_unpackhi_ps(acc[2], acc[3]));
    const F sums = add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, sums);
  }
};

}  // namespace
}  // namespace kvservice
