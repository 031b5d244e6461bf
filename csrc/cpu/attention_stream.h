// Attention for few rows: every key and value is read once, in place, for all rows of its group.
//
// Per tile of 128 tokens: products with K (registers hold kRows rows x four key vectors), softmax, products with V. The
// accumulators keep one partial sum per lane, which are added at the end.
#pragma once

#include "cpu/softmax.h"
#include "cpu/units.h"

namespace kvservice {
namespace {

constexpr int kTileUnits = 8;
constexpr int kTile = kTileUnits * kUnit;
constexpr int kStreamRows = 16;
constexpr int kPrefetchLevel = 2;  // L2: a tile of K and V does not fit into L1

template <class T>
struct StreamScratch {
  using Query = typename KeyOps<T>::Query;
  using Weight = typename ValueOps<T>::Weight;

  // Returns the floats of one row's accumulators.
  static int64_t acc_size(int64_t head_size) { return head_size / ValueOps<T>::kDims * Simd::kWidth; }
  static int64_t query_bytes(int64_t head_size) { return (head_size * sizeof(Query) + 63) / 64 * 64; }

  static int64_t bytes(int64_t head_size, int64_t rows) {
    const int64_t row = query_bytes(head_size) + acc_size(head_size) * sizeof(float);
    return rows * row + kStreamRows * kTile * (sizeof(float) + sizeof(Weight)) +
           2 * kTileUnits * spare_bytes(head_size);
  }
  static int64_t spare_bytes(int64_t head_size) { return 2 * head_size * kUnit * sizeof(T); }

  StreamScratch(char* memory, int64_t head_size, int64_t rows) {
    query = reinterpret_cast<Query*>(memory);
    query_stride = query_bytes(head_size) / sizeof(Query);
    memory += rows * query_bytes(head_size);
    scores = reinterpret_cast<float*>(memory);
    memory += kStreamRows * kTile * sizeof(float);
    weights = ValueOps<T>::kPacked ? reinterpret_cast<Weight*>(memory) : reinterpret_cast<Weight*>(scores);
    memory += kStreamRows * kTile * sizeof(Weight);
    acc = reinterpret_cast<float*>(memory);
    acc_stride = acc_size(head_size);
    memory += rows * acc_stride * sizeof(float);
    spare[0] = memory;
    spare[1] = memory + kTileUnits * spare_bytes(head_size);
  }

  Query* query;
  int64_t query_stride;
  float* scores;  // [kStreamRows, kTile], of the current head
  Weight* weights;
  float* acc;
  int64_t acc_stride;
  char* spare[2];
};

// scores[r][t] = q[r] . k[t] for the sixteen tokens of a unit. Prefetches the keys of `next`.
template <class T, int R>
inline void multiply_keys(const Unit<T>& unit, const Unit<T>& next, const typename KeyOps<T>::Query* query,
                          int64_t query_stride, int64_t head_size, float* scores) {
  using K = KeyOps<T>;
  constexpr int kVectorTokens = Simd::kWidth / 4;
  for (int first = 0; first < kUnit; first += 4 * kVectorTokens) {
    typename Simd::F acc[R][4];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) acc[r][i] = Simd::zero();
    }
    const char* k = unit.k + first * 16;
    const char* ahead = next.k + first * 16;
    const auto* q = query;
    for (int64_t d = 0; d < head_size; d += K::kPiece, k += unit.k_stride, ahead += next.k_stride, q += K::kPiece) {
      for (int i = 0; i < 4 * kVectorTokens * 16; i += 64) __builtin_prefetch(ahead + i, 0, kPrefetchLevel);
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

// acc[r] = acc[r] * factor[r] + weights[r] . V over the units of a tile. Prefetches the values of `next`.
template <class T, int R>
inline void multiply_values(const Unit<T>* units, const Unit<T>* next, int count,
                            const typename ValueOps<T>::Weight* weights, const float* factors, int64_t head_size,
                            float* acc, int64_t acc_stride) {
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
      const T* ahead = next[u].v + d * next[u].v_stride;
      for (int i = 0; i < kVectors * V::kDims; ++i) __builtin_prefetch(ahead + i * next[u].v_stride, 0, kPrefetchLevel);
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

// Calls body(integral_constant R, first row) for blocks of kRows rows, then for the rest.
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

// Adds the lanes of the accumulators.
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
struct Tile {
  int64_t kv_head;
  int64_t start;
  int count;  // 0 past the end
  Unit<T> units[kTileUnits];
};

// Units past the last are null: prefetching null has no effect.
template <class T>
void find_tile(const AttentionPiece& piece, int64_t kv_head, int64_t start, char* spare, Tile<T>& tile) {
  const int64_t stride = StreamScratch<T>::spare_bytes(piece.params->pool.head_size);
  tile.kv_head = kv_head;
  tile.start = start;
  tile.count = 0;
  for (int64_t pos = start; tile.count < kTileUnits && pos < piece.key_end; pos += kUnit, ++tile.count) {
    tile.units[tile.count] = find_unit<T>(piece, kv_head, pos, spare + tile.count * stride);
  }
  for (int u = tile.count; u < kTileUnits; ++u) tile.units[u] = {};
}

// Converts the queries of all rows to the operand format of the products and initializes the softmax.
template <class T>
void prepare_queries(const AttentionPiece& piece, typename KeyOps<T>::Query* queries, int64_t stride) {
  const AttentionParams& p = *piece.params;
  const int64_t size = p.pool.head_size, rows = piece.rows();
  for (int64_t i = 0; i < piece.heads() * rows; ++i) {
    const int64_t row = piece.query_row(piece.row_begin + i % rows) + i / rows * p.group_size();
    KeyOps<T>::prepare(static_cast<const T*>(p.query) + row * size, queries + i * stride, size);
    piece.max[i] = -kInfinity;
    piece.sum[i] = 0.0F;
  }
}

template <class T>
void attend_tile(const AttentionPiece& piece, const StreamScratch<T>& scratch, const Tile<T>& tile,
                 const Tile<T>& next) {
  const AttentionParams& p = *piece.params;
  const int64_t size = p.pool.head_size, rows = piece.rows(), first = (tile.kv_head - piece.head_begin) * rows;
  const auto* query = scratch.query + first * scratch.query_stride;
  float* acc = scratch.acc + first * scratch.acc_stride;
  for_row_blocks(rows, [&](auto block, int64_t row) {
    for (int u = 0; u < tile.count; ++u) {
      multiply_keys<T, block>(tile.units[u], next.units[u], query + row * scratch.query_stride, scratch.query_stride,
                              size, scratch.scores + row * kTile + u * kUnit);
    }
  });
  float factors[kStreamRows];
  const int width = tile.count * kUnit;
  for (int64_t r = 0; r < rows; ++r) {
    const RowView view = view_row(piece, tile.kv_head, piece.row_begin + r);
    float* s = scratch.scores + r * kTile;
    factors[r] = softmax_tile(p, view, tile.start, width, s, piece.max + first + r, piece.sum + first + r);
    if constexpr (ValueOps<T>::kPacked) pack_weights<T>(s, width, scratch.weights + r * kTile);
  }
  for_row_blocks(rows, [&](auto block, int64_t row) {
    multiply_values<T, block>(tile.units, next.units, tile.count, scratch.weights + row * kTile, factors + row, size,
                              acc + row * scratch.acc_stride, scratch.acc_stride);
  });
}

// Calls body(tile, next) for each tile of keys and, within it, for each KV head: the heads of a block are adjacent, and
// memory is faster in long contiguous ranges. The body prefetches `next`, which is empty at the end.
template <class T, class Body>
inline void for_tiles(const AttentionPiece& piece, char* const (&spare)[2], const Body& body) {
  Tile<T> tiles[2];
  find_tile(piece, piece.head_begin, piece.key_begin / kUnit * kUnit, spare[0], tiles[0]);
  for (int turn = 0; tiles[turn].count > 0; turn ^= 1) {
    const Tile<T>& tile = tiles[turn];
    Tile<T>& next = tiles[turn ^ 1];
    const bool last_head = tile.kv_head + 1 == piece.head_end;
    find_tile(piece, last_head ? piece.head_begin : tile.kv_head + 1, last_head ? tile.start + kTile : tile.start,
              spare[turn ^ 1], next);
    body(tile, next);
  }
}

template <class T>
void attend_stream(const AttentionPiece& piece, char* memory) {
  const int64_t size = piece.params->pool.head_size, count = piece.heads() * piece.rows();
  const StreamScratch<T> scratch(memory, size, count);
  prepare_queries<T>(piece, scratch.query, scratch.query_stride);
  __builtin_memset(scratch.acc, 0, count * scratch.acc_stride * sizeof(float));
  for_tiles<T>(piece, scratch.spare,
               [&](const Tile<T>& tile, const Tile<T>& next) { attend_tile(piece, scratch, tile, next); });
  for (int64_t i = 0; i < count; ++i) {
    finish_row<T>(scratch.acc + i * scratch.acc_stride, size, piece.acc + i * size);
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

}  // namespace
}  // namespace kvservice
