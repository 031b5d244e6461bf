// Attention with AMX tiles, bfloat16, for many rows.
//
// All products are transposed, so that queries are columns: the rows are tokens in the product with K, and dimensions
// in the product with V. The softmax of sixteen query rows then runs in the sixteen lanes of a vector, without sums
// across lanes. V needs no transposition, because the pool stores the tokens of a dimension side by side. K needs its
// 16-byte pieces arranged in rows.
//
//   keys     [size / 32, 128 tokens, 32]  packed per tile of 128 tokens and KV head: 64 bytes are a row of an AMX tile
//   values   [4, size, 32 tokens]
//   queries  [size / 2, 16 rows, 2]       per block of sixteen rows; size: head size rounded up to 32
//   scores   [128 tokens, 16 rows]
//   weights  [64 token pairs, 16 rows, 2]
//   acc      [size, 16 rows]
#pragma once

#include "cpu/amx_rows.h"

namespace kvservice {
namespace {

// Transposes four pieces of four tokens each. Input: one vector per piece; output: one vector per token.
inline void transpose_pieces(__m512i (&v)[4]) {
  const __m512i a = _mm512_shuffle_i64x2(v[0], v[1], 0x44), b = _mm512_shuffle_i64x2(v[0], v[1], 0xEE);
  const __m512i c = _mm512_shuffle_i64x2(v[2], v[3], 0x44), d = _mm512_shuffle_i64x2(v[2], v[3], 0xEE);
  v[0] = _mm512_shuffle_i64x2(a, c, 0x88);
  v[1] = _mm512_shuffle_i64x2(a, c, 0xDD);
  v[2] = _mm512_shuffle_i64x2(b, d, 0x88);
  v[3] = _mm512_shuffle_i64x2(b, d, 0xDD);
}

// Packs the keys of one unit into rows and prefetches those of `next`.
inline void pack_keys(const Unit<bf16>& unit, const Unit<bf16>& next, int64_t head_size, bf16* out) {
  const char* from = unit.k;
  const char* ahead = next.k;
  const int64_t stride = unit.k_stride, next_stride = next.k_stride;
  for (int64_t left = head_size / 8; left > 0; left -= 4, out += kTile * 32) {
    const int pieces = left < 4 ? static_cast<int>(left) : 4;
    for (int i = 0; i < 4; ++i) {
      __m512i v[4];
      for (int j = 0; j < 4; ++j) {
        v[j] = j < pieces ? _mm512_loadu_si512(from + j * stride + i * 64) : _mm512_setzero_si512();
        _mm_prefetch(ahead + j * next_stride + i * 64, _MM_HINT_T1);
      }
      transpose_pieces(v);
      for (int j = 0; j < 4; ++j) _mm512_store_si512(out + (i * 4 + j) * 32, v[j]);
    }
    from += 4 * stride;
    ahead += 4 * next_stride;
  }
}

// Packs the values of two units side by side; zeros if there is no second unit.
inline void pack_values(const Unit<bf16>& first, const Unit<bf16>* second, int64_t head_size, bf16* out) {
  const bf16 zeros[kUnit] = {};
  const bf16* low = first.v;
  const bf16* high = second != nullptr ? second->v : zeros;
  const int64_t low_stride = first.v_stride, high_stride = second != nullptr ? second->v_stride : 0;
  for (int64_t d = 0; d < head_size; ++d, low += low_stride, high += high_stride, out += 32) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
    _mm512_store_si512(out, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
  }
}

// Computes four tiles of products at a time, since each product waits for the previous one into the same tile: two row
// blocks and two units.
inline void multiply_keys_pair(const AmxScratch& scratch, const bf16* queries, int count) {
  for (int u = 0; u < count; u += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16* keys = scratch.keys + u * kUnit * 32;
    for (int64_t d = 0; d < scratch.size; d += 32) {
      _tile_loadd(6, queries + d * kLanes, kTileRowBytes);
      _tile_loadd(4, keys + d * kTile, kTileRowBytes);
      _tile_loadd(5, keys + d * kTile + kUnit * 32, kTileRowBytes);
      _tile_loadd(7, queries + (scratch.size + d) * kLanes, kTileRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* out = scratch.scores + u * kUnit * kLanes;
    _tile_stored(0, out, kTileRowBytes);
    _tile_stored(1, out + kUnit * kLanes, kTileRowBytes);
    _tile_stored(2, out + kTile * kLanes, kTileRowBytes);
    _tile_stored(3, out + (kTile + kUnit) * kLanes, kTileRowBytes);
  }
}

// The same with four units and one row block. Products of units past the last are not read.
inline void multiply_keys_single(const AmxScratch& scratch, const bf16* queries, int count) {
  for (int u = 0; u < count; u += 4) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16* keys = scratch.keys + u * kUnit * 32;
    for (int64_t d = 0; d < scratch.size; d += 32) {
      const bf16* unit = keys + d * kTile;
      _tile_loadd(6, queries + d * kLanes, kTileRowBytes);
      _tile_loadd(4, unit, kTileRowBytes);
      _tile_loadd(5, unit + kUnit * 32, kTileRowBytes);
      _tile_loadd(7, unit + 2 * kUnit * 32, kTileRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(2, 7, 6);
      _tile_loadd(4, unit + 3 * kUnit * 32, kTileRowBytes);
      _tile_dpbf16ps(3, 4, 6);
    }
    float* out = scratch.scores + u * kUnit * kLanes;
    _tile_stored(0, out, kTileRowBytes);
    _tile_stored(1, out + kUnit * kLanes, kTileRowBytes);
    _tile_stored(2, out + 2 * kUnit * kLanes, kTileRowBytes);
    _tile_stored(3, out + 3 * kUnit * kLanes, kTileRowBytes);
  }
}

// Adds values . weights to the accumulators of two row blocks, 32 dimensions at a time.
inline void multiply_values_pair(const AmxScratch& scratch, float* acc, int count) {
  float* second = acc + scratch.size * kLanes;
  for (int64_t d = 0; d < scratch.size; d += 32) {
    _tile_loadd(0, acc + d * kLanes, kTileRowBytes);
    _tile_loadd(1, acc + (d + 16) * kLanes, kTileRowBytes);
    _tile_loadd(2, second + d * kLanes, kTileRowBytes);
    _tile_loadd(3, second + (d + 16) * kLanes, kTileRowBytes);
    for (int u = 0; u < count; u += 2) {
      const bf16* values = scratch.values + u / 2 * scratch.size * 32 + d * 32;
      const bf16* weights = scratch.weights + u * kUnit * kLanes;
      _tile_loadd(6, weights, kTileRowBytes);
      _tile_loadd(4, values, kTileRowBytes);
      _tile_loadd(5, values + 16 * 32, kTileRowBytes);
      _tile_loadd(7, weights + kTile * kLanes, kTileRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, acc + d * kLanes, kTileRowBytes);
    _tile_stored(1, acc + (d + 16) * kLanes, kTileRowBytes);
    _tile_stored(2, second + d * kLanes, kTileRowBytes);
    _tile_stored(3, second + (d + 16) * kLanes, kTileRowBytes);
  }
}

// The same for one row block, 64 dimensions at a time, with 32 at the end if necessary.
inline void multiply_values_single(const AmxScratch& scratch, float* acc, int count) {
  int64_t d = 0;
  for (; d + 64 <= scratch.size; d += 64) {
    float* out = acc + d * kLanes;
    _tile_loadd(0, out, kTileRowBytes);
    _tile_loadd(1, out + 16 * kLanes, kTileRowBytes);
    _tile_loadd(2, out + 32 * kLanes, kTileRowBytes);
    _tile_loadd(3, out + 48 * kLanes, kTileRowBytes);
    for (int u = 0; u < count; u += 2) {
      const bf16* values = scratch.values + u / 2 * scratch.size * 32 + d * 32;
      _tile_loadd(6, scratch.weights + u * kUnit * kLanes, kTileRowBytes);
      _tile_loadd(4, values, kTileRowBytes);
      _tile_loadd(5, values + 16 * 32, kTileRowBytes);
      _tile_loadd(7, values + 32 * 32, kTileRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(2, 7, 6);
      _tile_loadd(4, values + 48 * 32, kTileRowBytes);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, out, kTileRowBytes);
    _tile_stored(1, out + 16 * kLanes, kTileRowBytes);
    _tile_stored(2, out + 32 * kLanes, kTileRowBytes);
    _tile_stored(3, out + 48 * kLanes, kTileRowBytes);
  }
  if (d == scratch.size) return;
  float* out = acc + d * kLanes;
  _tile_loadd(0, out, kTileRowBytes);
  _tile_loadd(1, out + 16 * kLanes, kTileRowBytes);
  for (int u = 0; u < count; u += 2) {
    const bf16* values = scratch.values + u / 2 * scratch.size * 32 + d * 32;
    _tile_loadd(6, scratch.weights + u * kUnit * kLanes, kTileRowBytes);
    _tile_loadd(4, values, kTileRowBytes);
    _tile_loadd(5, values + 16 * 32, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, out, kTileRowBytes);
  _tile_stored(1, out + 16 * kLanes, kTileRowBytes);
}

template <int Blocks>
void attend_row_blocks(const AttentionPiece& piece, const AmxScratch& scratch, const Tile<bf16>& tile,
                       const Tile<bf16>& next, int64_t first) {
  const int width = tile.count * kUnit;
  float* acc = scratch.acc + first * scratch.size * kLanes;
  const bf16* queries = scratch.queries + first * scratch.size * kLanes;
  if constexpr (Blocks == 2) {
    multiply_keys_pair(scratch, queries, tile.count);
  } else {
    multiply_keys_single(scratch, queries, tile.count);
  }
  for (int i = 0; i < Blocks; ++i) {
    bf16* weights = scratch.weights + i * kTile * kLanes;
    softmax_amx(*piece.params, tile.start, width, next, piece.params->pool.head_size,
                scratch.scores + i * kTile * kLanes, scratch.rows[first + i], weights, acc + i * scratch.size * kLanes,
                scratch.size);
    if (tile.count % 2 != 0) __builtin_memset(weights + width * kLanes, 0, kUnit * kLanes * sizeof(bf16));
  }
  if constexpr (Blocks == 2) {
    multiply_values_pair(scratch, acc, tile.count);
  } else {
    multiply_values_single(scratch, acc, tile.count);
  }
}

inline void attend_tile_amx(const AttentionPiece& piece, const AmxScratch& scratch, const Tile<bf16>& tile,
                            const Tile<bf16>& next) {
  const int64_t head_size = piece.params->pool.head_size;
  for (int u = 0; u < tile.count; ++u) {
    pack_keys(tile.units[u], next.units[u], head_size, scratch.keys + u * kUnit * 32);
  }
  for (int u = 0; u < tile.count; u += 2) {
    pack_values(tile.units[u], u + 1 < tile.count ? &tile.units[u + 1] : nullptr, head_size,
                scratch.values + u / 2 * scratch.size * 32);
  }
  const int64_t blocks = AmxScratch::blocks(piece.rows()), first = (tile.kv_head - piece.head_begin) * blocks;
  int64_t block = 0;
  for (; block + 2 <= blocks; block += 2) attend_row_blocks<2>(piece, scratch, tile, next, first + block);
  if (block < blocks) attend_row_blocks<1>(piece, scratch, tile, next, first + block);
}

}  // namespace
}  // namespace kvservice
