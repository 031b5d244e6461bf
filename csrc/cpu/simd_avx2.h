// Vectors of eight floats: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "cpu/half.h"

namespace kvservice {
namespace {

struct Simd {
  using F = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kRows = 2;

  static F set1(float x) { return _mm256_set1_ps(x); }
  static F zero() { return _mm256_setzero_ps(); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static F load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  // Loads four floats, repeated over the vector.
  static F load_quad(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
  // Splits pieces of eight 16-bit numbers, one piece per token, into two vectors with four floats per token: even and
  // odd elements for bfloat16, the first and the last four for float16.
  static void split(const bf16* p, F& a, F& b) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  static void split(const fp16* p, F& a, F& b) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i sorted = _mm256_permute4x64_epi64(raw, 0xD8);
    a = _mm256_cvtph_ps(_mm256_castsi256_si128(sorted));
    b = _mm256_cvtph_ps(_mm256_extracti128_si256(sorted, 1));
  }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void store(bf16* p, F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void store(fp16* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // Returns the larger number; `b` if either is NaN.
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F if_less(F a, F b, F then, F otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static float sum(F v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float max_lane(F v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  // 2^n * 2^f with f in [-1/2, 1/2] and a polynomial for 2^f. Relative error below 2e-7; exactly 0 below e^-87.
  static F exp(F x) {
    const F low = set1(-87.0F);
    const F clamped = max(low, x);
    const F n = _mm256_round_ps(mul(clamped, set1(1.44269504F)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F f = fma(n, set1(-0.693145752F), clamped);
    f = fma(n, set1(-1.42860677e-6F), f);
    F p = set1(1.38888889e-3F);
    p = fma(p, f, set1(8.33333333e-3F));
    p = fma(p, f, set1(4.16666667e-2F));
    p = fma(p, f, set1(1.66666667e-1F));
    p = fma(p, f, set1(0.5F));
    p = fma(p, f, set1(1.0F));
    p = fma(p, f, set1(1.0F));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const F value = mul(p, _mm256_castsi256_ps(exponent));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), value);
  }
  // acc[i] holds four partial sums of two tokens each. Returns the eight sums in order.
  static F quad_sums(const F* acc) {
    const F a = add(_mm256_unpacklo_ps(acc[0], acc[1]), _mm256_unpackhi_ps(acc[0], acc[1]));
    const F b = add(_mm256_unpacklo_ps(acc[2], acc[3]), _mm256_unpackhi_ps(acc[2], acc[3]));
    const F sums = add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
    return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
};

}  // namespace
}  // namespace kvservice
