// Attention for many rows without AMX: keys and values are read once for up to 64 rows.
//
// Products with K are those of attention_stream.h; a unit of keys stays in L1 for all rows. The values of a tile are
// transposed to rows of floats once, so that a row's accumulators are its head_size sums:
//
//   values [128 tokens, size]   size: head size rounded up to whole vectors
//   acc    [rows, size]
#pragma once

#include "cpu/attention_stream.h"

namespace kvservice {
namespace {

constexpr int kManyRows = 64;

template <class T>
struct RowsScratch {
  using Query = typename KeyOps<T>::Query;

  static int64_t padded(int64_t head_size) { return (head_size + Simd::kWidth - 1) / Simd::kWidth * Simd::kWidth; }
  static int64_t query_bytes(int64_t head_size) { return StreamScratch<T>::query_bytes(head_size); }

  static int64_t bytes(int64_t head_size, int64_t rows) {
    const int64_t row = query_bytes(head_size) + (kTile + padded(head_size)) * sizeof(float);
    return rows * row + kTile * padded(head_size) * sizeof(float) +
           2 * kTileUnits * StreamScratch<T>::spare_bytes(head_size);
  }

  RowsScratch(char* memory, int64_t head_size, int64_t rows) : size(padded(head_size)) {
    query = reinterpret_cast<Query*>(memory);
    query_stride = query_bytes(head_size) / sizeof(Query);
    scores = reinterpret_cast<float*>(memory + rows * query_bytes(head_size));
    values = scores + rows * kTile;
    acc = values + kTile * size;
    spare[0] = reinterpret_cast<char*>(acc + rows * size);
    spare[1] = spare[0] + kTileUnits * StreamScratch<T>::spare_bytes(head_size);
  }

  int64_t size;
  Query* query;
  int64_t query_stride;
  float* scores;  // [rows, kTile]
  float* values;
  float* acc;
  char* spare[2];
};

// Transposes four dimensions of sixteen tokens at a time, so that each store has 16 bytes.
template <class T>
void unroll_values(const Unit<T>& unit, int64_t head_size, int64_t size, float* out) {
  for (int64_t d = 0; d < head_size; d += 4) {
    float rows[4][kUnit];
    for (int i = 0; i < 4; ++i) {
      const T* row = unit.v + (d + i) * unit.v_stride;
      for (int t = 0; t < kUnit; t += Simd::kWidth) Simd::store(rows[i] + t, Simd::load(row + t));
    }
    for (int t = 0; t < kUnit; ++t) {
      for (int i = 0; i < 4; ++i) out[t * size + d + i] = rows[i][t];
    }
  }
}

// acc[r] = acc[r] * factor[r] + weights[r] . values, for `Vectors` vectors of dimensions of R rows.
template <int R, int Vectors>
inline void multiply_value_rows(const float* weights, const float* values, int width, const float* factors,
                                int64_t size, float* acc) {
  typename Simd::F sums[R][Vectors];
  for (int r = 0; r < R; ++r) {
    const auto factor = Simd::set1(factors[r]);
    for (int i = 0; i < Vectors; ++i) {
      sums[r][i] = Simd::mul(factor, Simd::load(acc + r * size + i * Simd::kWidth));
    }
  }
  for (int t = 0; t < width; ++t, values += size) {
    typename Simd::F v[Vectors];
    for (int i = 0; i < Vectors; ++i) v[i] = Simd::load(values + i * Simd::kWidth);
    for (int r = 0; r < R; ++r) {
      const auto weight = Simd::set1(weights[r * kTile + t]);
      for (int i = 0; i < Vectors; ++i) sums[r][i] = Simd::fma(weight, v[i], sums[r][i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < Vectors; ++i) Simd::store(acc + r * size + i * Simd::kWidth, sums[r][i]);
  }
}

template <class T>
void attend_tile_rows(const AttentionPiece& piece, const RowsScratch<T>& scratch, const Tile<T>& tile,
                      const Tile<T>& next) {
  const int64_t head_size = piece.params->pool.head_size, size = scratch.size, rows = piece.rows();
  for (int u = 0; u < tile.count; ++u) {
    for_row_blocks(rows, [&](auto block, int64_t row) {
      multiply_keys<T, block>(tile.units[u], next.units[u], scratch.query + row * scratch.query_stride,
                              scratch.query_stride, head_size, scratch.scores + row * kTile + u * kUnit);
    });
    unroll_values(tile.units[u], head_size, size, scratch.values + u * kUnit * size);
  }
  float factors[kManyRows];
  const int width = tile.count * kUnit;
  for (int64_t r = 0; r < rows; ++r) {
    const RowView view = view_row(piece, tile.kv_head, piece.row_begin + r);
    factors[r] =
        softmax_tile(*piece.params, view, tile.start, width, scratch.scores + r * kTile, piece.max + r, piece.sum + r);
  }
  for (int64_t d = 0, step; d < size; d += step) {
    constexpr int64_t kFour = 4 * Simd::kWidth;
    step = d + kFour <= size ? kFour : Simd::kWidth;
    for_row_blocks(rows, [&](auto block, int64_t row) {
      const float* weights = scratch.scores + row * kTile;
      float* acc = scratch.acc + row * size + d;
      if (step == kFour) {
        multiply_value_rows<block, 4>(weights, scratch.values + d, width, factors + row, size, acc);
      } else {
        multiply_value_rows<block, 1>(weights, scratch.values + d, width, factors + row, size, acc);
      }
    });
  }
}

template <class T>
void attend_rows(const AttentionPiece& piece, char* memory) {
  const int64_t head_size = piece.params->pool.head_size, rows = piece.rows();
  const RowsScratch<T> scratch(memory, head_size, rows);
  prepare_queries<T>(piece, scratch.query, scratch.query_stride);
  __builtin_memset(scratch.values, 0, (kTile + rows) * scratch.size * sizeof(float));  // and acc, which follows
  for_tiles<T>(piece, scratch.spare,
               [&](const Tile<T>& tile, const Tile<T>& next) { attend_tile_rows(piece, scratch, tile, next); });
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(piece.acc + r * head_size, scratch.acc + r * scratch.size, head_size * sizeof(float));
  }
}

// More rows than the streaming kernel takes always belong to one KV head.
template <class T>
void attend_vectors(const AttentionPiece& piece, char* memory) {
  if (piece.rows() > kStreamRows) {
    attend_rows<T>(piece, memory);
  } else {
    attend_stream<T>(piece, memory);
  }
}

template <class T>
int64_t vectors_scratch_bytes(int64_t head_size, int64_t rows) {
  const int64_t few = StreamScratch<T>::bytes(head_size, rows), many = RowsScratch<T>::bytes(head_size, rows);
  return few > many ? few : many;
}

template <class T>
constexpr AttentionKernel vector_kernel() {
  return {attend_vectors<T>, vectors_scratch_bytes<T>, kManyRows};
}

}  // namespace
}  // namespace kvservice
