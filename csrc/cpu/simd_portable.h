// Vectors of four floats with the compiler's vector extensions: run on every processor.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu/half.h"

namespace kvservice {
namespace {

struct Simd {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr int kRows = 2;

  static F set1(float x) { return F{x, x, x, x}; }
  static F zero() { return set1(0.0F); }
  static F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static F load(const bf16* p) {
    I bits;
    for (int i = 0; i < 4; ++i) bits[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i].bits) << 16);
    F v;
    std::memcpy(&v, &bits, sizeof(v));
    return v;
  }
  static F load(const fp16* p) {
    F v;
    for (int i = 0; i < 4; ++i) v[i] = widen(p[i].bits);
    return v;
  }
  // Loads four floats, repeated over the vector.
  static F load_quad(const float* p) { return load(p); }
  // Splits pieces of eight 16-bit numbers, one piece per token, into two vectors with four floats per token: even and
  // odd elements for bfloat16, the first and the last four for float16.
  static void split(const bf16* p, F& a, F& b) {
    I bits;
    std::memcpy(&bits, p, sizeof(bits));
    const I even = bits << 16, odd = bits & static_cast<int32_t>(0xFFFF0000);
    std::memcpy(&a, &even, sizeof(a));
    std::memcpy(&b, &odd, sizeof(b));
  }
  static void split(const fp16* p, F& a, F& b) {
    a = load(p);
    b = load(p + 4);
  }
  static void store(float* p, F v) { std::memcpy(p, &v, sizeof(v)); }
  static void store(bf16* p, F v) {
    for (int i = 0; i < 4; ++i) {
      uint32_t bits;
      const float x = v[i];
      std::memcpy(&bits, &x, 4);
      const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
      p[i].bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40U : rounded);
    }
  }
  static void store(fp16* p, F v) {
    for (int i = 0; i < 4; ++i) p[i].bits = narrow(v[i]);
  }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  // Returns the larger number; `b` if either is NaN.
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F if_less(F a, F b, F then, F otherwise) { return a < b ? then : otherwise; }
  static float sum(F v) { return (v[0] + v[1]) + (v[2] + v[3]); }
  static float max_lane(F v) {
    float m = v[0];
    for (int i = 1; i < 4; ++i) m = v[i] > m ? v[i] : m;
    return m;
  }
  static F exp(F x) {
    for (int i = 0; i < 4; ++i) x[i] = std::exp(x[i]);
    return x;
  }
  // Lane i of the result is the sum of the four lanes of acc[i].
  static F quad_sums(const F* acc) { return F{sum(acc[0]), sum(acc[1]), sum(acc[2]), sum(acc[3])}; }

 private:
  static float widen(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
    const uint32_t magnitude = half & 0x7FFFU;
    float value;
    if (magnitude >= 0x7C00U) {
      const uint32_t bits = 0x7F800000U | (magnitude << 13);
      std::memcpy(&value, &bits, 4);
    } else {
      // Read as a float, the bits of the half are too small by a factor of 2^112. The product is exact, also for
      // subnormals.
      const uint32_t bits = magnitude << 13;
      std::memcpy(&value, &bits, 4);
      value *= 0x1p112F;
    }
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  static uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
    bits &= 0x7FFFFFFFU;
    if (bits > 0x7F800000U) return sign | 0x7E00U;
    if (bits >= 0x477FF000U) return sign | 0x7C00U;  // rounds to 2^16 or more
    if (bits < 0x38800000U) {                        // subnormal: the addition rounds
      float magnitude;
      std::memcpy(&magnitude, &bits, 4);
      magnitude += 0.5F;
      std::memcpy(&bits, &magnitude, 4);
      return static_cast<uint16_t>(sign | (bits - 0x3F000000U));
    }
    return static_cast<uint16_t>(sign | ((bits - 0x38000000U + 0xFFFU + ((bits >> 13) & 1U)) >> 13));
  }
};

}  // namespace
}  // namespace kvservice
