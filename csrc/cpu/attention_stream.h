// Attention for few rows: every key and value is read once, from where it lies, for all rows of its group.
//
// Per tile of 128 tokens: products with K (registers hold kRows rows x four key vectors), softmax, products with V.
// The accumulators keep one partial sum for each lane and are summed up at the end.
#pragma once

#include "cpu/softmax.h"
#include "cpu/units.h"

namespace kvservice {
namespace {

constexpr int kTileUnits = 8;
constexpr int kTile = kTileUnits * kUnit;
constexpr int kStreamRows = 16;

template <class T>
struct StreamScratch {
  using Query = typename KeyOps<T>::Query;
  using Weight = typename ValueOps<T>::Weight;

  // Floats of one row's accumulators.
  static int64_t acc_size(int64_t head_size) { return head_size / ValueOps<T>::kDims * Simd::kWidth; }
  static int64_t query_bytes(int64_t head_size) { return (head_size * sizeof(Query) + 63) / 64 * 64; }

  static int64_t bytes(int64_t head_size, int64_t rows) {
    const int64_t row = query_bytes(head_size) + kTile * (sizeof(float) + sizeof(Weight)) + acc_size(head_size) * 4;
    return rows * row + kTileUnits * spare_bytes(head_size);
  }
  static int64_t spare_bytes(int64_t head_size) { return 2 * head_size * kUnit * sizeof(T); }

  StreamScratch(char* memory, int64_t head_size, int64_t rows) {
    query = reinterpret_cast<Query*>(memory);
    query_stride = query_bytes(head_size) / sizeof(Query);
    memory += rows * query_bytes(head_size);
    scores = reinterpret_cast<float*>(memory);
    memory += rows * kTile * sizeof(float);
    weights = ValueOps<T>::kPacked ? reinterpret_cast<Weight*>(memory) : reinterpret_cast<Weight*>(scores);
    memory += rows * kTile * sizeof(Weight);
    acc = reinterpret_cast<float*>(memory);
    acc_stride = acc_size(head_size);
    memory += rows * acc_stride * sizeof(float);
    spare = memory;
  }

  Query* query;
  int64_t query_stride;
  float* scores;  // [rows, kTile]
  Weight* weights;
  float* acc;
  int64_t acc_stride;
  char* spare;
};

// scores[r][t] = q[r] . k[t] for the sixteen tokens of a unit.
template <class T, int R>
inline void multiply_keys(const Unit<T>& unit, const typename KeyOps<T>::Query* query, int64_t query_stride,
                          int64_t head_size, float* scores) {
  using K = KeyOps<T>;
  constexpr int kVectorTokens = Simd::kWidth / 4;
  for (int first = 0; first < kUnit; first += 4 * kVectorTokens) {
    typename Simd::F acc[R][4];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) acc[r][i] = Simd::zero();
    }
    const char* k = unit.k + first * 16;
    const auto* q = query;
    for (int64_t d = 0; d < head_size; d += K::kPiece, k += unit.k_stride, q += K::kPiece) {
      typename K::Operand keys[4];
      for (int i = 0; i < 4; ++i) keys[i] = K::load(k + i * kVectorTokens * 16);
      for (int r = 0; r < R; ++r) {
        const auto row = K::load_query(q + r * query_stride);
        for (int i = 0; i < 4; ++i) acc[r][i] = K::dot(row, keys[i], acc[r][i]);
      }
    }
    for (int r = 0; r < R; ++r) Simd::store(scores + r * kTile + first, Simd::quad_sums(acc[r]));
  }
}

// acc[r] = acc[r] * factor[r] + weights[r] . V over the units of a tile.
template <class T, int R>
inline void multiply_values(const Unit<T>* units, int count, const typename ValueOps<T>::Weight* weights,
                            const float* factors, int64_t head_size, float* acc, int64_t acc_stride) {
  using V = ValueOps<T>;
  constexpr int kVectors = 4;
  for (int64_t d = 0; d < head_size; d += kVectors * V::kDims) {
    float* out = acc + d / V::kDims * Simd::kWidth;
    typename Simd::F sums[R][kVectors];
    for (int r = 0; r < R; ++r) {
      const auto factor = Simd::set1(factors[r]);
      for (int i = 0; i < kVectors; ++i) {
        sums[r][i] = Simd::mul(factor, Simd::load(out + r * acc_stride + i * Simd::kWidth));
      }
    }
    for (int u = 0; u < count; ++u) {
      const int64_t stride = units[u].v_stride;
      const T* v = units[u].v + d * stride;
      typename V::Operand values[kVectors];
      for (int i = 0; i < kVectors; ++i) values[i] = V::load(v + i * V::kDims * stride, stride);
      for (int r = 0; r < R; ++r) {
        const auto row = V::load_weights(weights + r * kTile + u * kUnit);
        for (int i = 0; i < kVectors; ++i) sums[r][i] = V::dot(row, values[i], sums[r][i]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < kVectors; ++i) Simd::store(out + r * acc_stride + i * Simd::kWidth, sums[r][i]);
    }
  }
}

// Calls body(integral_constant R, first row) for blocks of kRows rows and then for the rest.
template <class Body>
inline void for_row_blocks(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + Simd::kRows <= rows; row += Simd::kRows) body(std::integral_constant<int, Simd::kRows>(), row);
  switch (rows - row) {
    case 3:
      body(std::integral_constant<int, 3>(), row);
      break;
    case 2:
      body(std::integral_constant<int, 2>(), row);
      break;
    case 1:
      body(std::integral_constant<int, 1>(), row);
      break;
  }
}

template <class T>
void pack_weights(const float* scores, int count, typename ValueOps<T>::Weight* out) {
  for (int i = 0; i < count; i += Simd::kWidth) Simd::store(out + i, Simd::load(scores + i));
}

// Sums up the lanes of the accumulators.
template <class T>
void finish_row(const float* acc, int64_t head_size, float* out) {
  constexpr int kDims = ValueOps<T>::kDims, kLanes = Simd::kWidth / kDims;
  for (int64_t d = 0; d < head_size; ++d) {
    const float* lanes = acc + d * kLanes;
    float sum = 0.0F;
    for (int i = 0; i < kLanes; ++i) sum += lanes[i];
    out[d] = sum;
  }
}

template <class T>
void attend_stream(const AttentionPiece& piece, char* memory) {
  const AttentionParams& p = *piece.params;
  const int64_t size = p.pool.head_size, rows = piece.row_end - piece.row_begin, group = p.group_size();
  StreamScratch<T> scratch(memory, size, rows);
  RowView views[kStreamRows];
  float factors[kStreamRows];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = piece.row_begin + r;
    const int64_t query = (piece.first_token + row / group) * p.num_heads + piece.kv_head * group + row % group;
    KeyOps<T>::prepare(static_cast<const T*>(p.query) + query * size, scratch.query + r * scratch.query_stride, size);
    views[r] = view_row(piece, row);
    piece.max[r] = -kInfinity;
    piece.sum[r] = 0.0F;
  }
  __builtin_memset(scratch.acc, 0, rows * scratch.acc_stride * sizeof(float));

  for (int64_t start = piece.key_begin / kUnit * kUnit; start < piece.key_end; start += kTile) {
    Unit<T> units[kTileUnits];
    int count = 0;
    for (int64_t pos = start; count < kTileUnits && pos < piece.key_end; pos += kUnit, ++count) {
      units[count] = find_unit<T>(piece, pos, scratch.spare + count * StreamScratch<T>::spare_bytes(size));
      for_row_blocks(rows, [&](auto block, int64_t row) {
        multiply_keys<T, block>(units[count], scratch.query + row * scratch.query_stride, scratch.query_stride, size,
                                scratch.scores + row * kTile + count * kUnit);
      });
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* s = scratch.scores + r * kTile;
      factors[r] = softmax_tile(p, views[r], start, count * kUnit, s, piece.max + r, piece.sum + r);
      if constexpr (ValueOps<T>::kPacked) pack_weights<T>(s, count * kUnit, scratch.weights + r * kTile);
    }
    for_row_blocks(rows, [&](auto block, int64_t row) {
      multiply_values<T, block>(units, count, scratch.weights + row * kTile, factors + row, size,
                                scratch.acc + row * scratch.acc_stride, scratch.acc_stride);
    });
  }
  for (int64_t r = 0; r < rows; ++r) {
    finish_row<T>(scratch.acc + r * scratch.acc_stride, size, piece.acc + r * size);
  }
}

template <class T>
void store_row(void* out, const float* acc, float factor, int64_t count) {
  T* row = static_cast<T*>(out);
  const auto by = Simd::set1(factor);
  int64_t i = 0;
  for (; i + Simd::kWidth <= count; i += Simd::kWidth) Simd::store(row + i, Simd::mul(by, Simd::load(acc + i)));
  if (i == count) return;
  float rest[Simd::kWidth] = {};
  T rounded[Simd::kWidth];
  __builtin_memcpy(rest, acc + i, (count - i) * sizeof(float));
  Simd::store(rounded, Simd::mul(by, Simd::load(rest)));
  __builtin_memcpy(row + i, rounded, (count - i) * sizeof(T));
}

template <class T>
constexpr AttentionKernel stream_kernel() {
  return {attend_stream<T>, StreamScratch<T>::bytes, kStreamRows};
}

}  // namespace
}  // namespace kvservice
