// Products of a key vector with a query, and of a value vector with a weight. Include one of the simd_*.h first.
//
// A key vector holds 16-byte pieces as they are in the pool, one for each of kWidth / 4 tokens, and adds to four
// partial sums of each token. A value vector holds 16 tokens of one dimension (of two, if the product takes pairs).
#pragma once

#include <type_traits>

#include "cpu/half.h"

namespace kvservice {
namespace {

constexpr int kUnit = 16;  // tokens per step of the kernels

template <class T>
struct KeyOps {
  static constexpr int kPiece = 16 / sizeof(T);  // dimensions
  static constexpr bool kSplit = sizeof(T) == 2;
  static constexpr bool kEvenOdd = std::is_same_v<T, bf16>;
  using Query = float;  // prepared queries: floats, in the order of the dimensions that Simd::split returns

  struct Operand {
    typename Simd::F a, b;
  };

  static Operand load(const char* p) {
    Operand k;
    if constexpr (kSplit) {
      Simd::split(reinterpret_cast<const T*>(p), k.a, k.b);
    } else {
      k.a = Simd::load(reinterpret_cast<const float*>(p));
    }
    return k;
  }
  static Operand load_query(const Query* q) {
    Operand v;
    v.a = Simd::load_quad(q);
    if constexpr (kSplit) v.b = Simd::load_quad(q + 4);
    return v;
  }
  static typename Simd::F dot(const Operand& q, const Operand& k, typename Simd::F acc) {
    acc = Simd::fma(q.a, k.a, acc);
    if constexpr (kSplit) acc = Simd::fma(q.b, k.b, acc);
    return acc;
  }
  static void prepare(const T* query, Query* out, int64_t head_size) {
    for (int64_t d = 0; d < head_size; d += kPiece) {
      constexpr int kPadded = Simd::kWidth > kPiece ? Simd::kWidth : kPiece;
      T raw[kPadded] = {};
      float piece[kPadded];
      __builtin_memcpy(raw, query + d, 16);
      for (int i = 0; i < kPadded; i += Simd::kWidth) Simd::store(piece + i, Simd::load(raw + i));
      for (int i = 0; i < kPiece; ++i) out[d + (kEvenOdd ? i / 2 + i % 2 * 4 : i)] = piece[i];
    }
  }
};

template <class T>
struct ValueOps {
  static constexpr int kDims = 1;
  static constexpr int kVectors = kUnit / Simd::kWidth;
  static constexpr bool kPacked = false;  // weights are the unconverted probabilities
  using Weight = float;

  struct Operand {
    typename Simd::F v[kVectors];
  };

  static Operand load(const T* row, int64_t /*stride*/) {
    Operand value;
    for (int i = 0; i < kVectors; ++i) value.v[i] = Simd::load(row + i * Simd::kWidth);
    return value;
  }
  static Operand load_weights(const Weight* p) {
    Operand weights;
    for (int i = 0; i < kVectors; ++i) weights.v[i] = Simd::load(p + i * Simd::kWidth);
    return weights;
  }
  static typename Simd::F dot(const Operand& weights, const Operand& value, typename Simd::F acc) {
    for (int i = 0; i < kVectors; ++i) acc = Simd::fma(weights.v[i], value.v[i], acc);
    return acc;
  }
};

// Processors with AMX take two cycles for a product of pairs. On them, floats are faster for few rows, tiles for many.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
template <>
struct KeyOps<bf16> {
  static constexpr int kPiece = 8;
  using Query = bf16;
  using Operand = __m512bh;

  static Operand load(const char* p) {
    Operand k;
    __builtin_memcpy(&k, p, sizeof(k));
    return k;
  }
  static Operand load_query(const Query* q) {
    const __m512i repeated = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    return reinterpret_cast<Operand>(repeated);
  }
  static Simd::F dot(Operand q, Operand k, Simd::F acc) { return _mm512_dpbf16_ps(acc, q, k); }
  static void prepare(const bf16* query, Query* out, int64_t head_size) {
    __builtin_memcpy(out, query, head_size * sizeof(bf16));
  }
};

template <>
struct ValueOps<bf16> {
  static constexpr int kDims = 2;
  static constexpr bool kPacked = true;
  using Weight = bf16;
  using Operand = __m512bh;

  static Operand load(const bf16* row, int64_t stride) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + stride));
    return reinterpret_cast<Operand>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  static Operand load_weights(const Weight* p) {
    const __m512i repeated = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return reinterpret_cast<Operand>(repeated);
  }
  static Simd::F dot(Operand weights, Operand value, Simd::F acc) { return _mm512_dpbf16_ps(acc, weights, value); }
};
#endif

}  // namespace
}  // namespace kvservice
