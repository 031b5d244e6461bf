// Attention with AMX tiles for up to sixteen rows. Keys and values are read from the pool in place.
//
// The queries are columns, as in attention_amx.h. A piece of a unit's keys is a tile of sixteen rows of 16 bytes;
// sixteen dimensions of its values are a tile of sixteen rows of 32 bytes. Such a tile takes as long as a full one, but
// nothing is packed, and packing dominates the time if each key meets few queries.
#pragma once

#include "cpu/attention_amx.h"

namespace kvservice {
namespace {

// Tiles 0 to 3: products; 4 and 5: keys and queries; 6 and 7: values and weights.
inline TileConfig narrow_tiles() {
  TileConfig config = whole_tiles();
  config.row_bytes[4] = 16;
  config.rows[5] = 4;
  config.row_bytes[6] = 32;
  config.rows[7] = 8;
  return config;
}

inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(static_cast<const char*>(from) + i, _MM_HINT_T1);
}

// scores = keys . queries, four units at a time. Prefetches the keys of `next`.
inline void multiply_keys_few(const Tile<bf16>& tile, const Tile<bf16>& next, const bf16* queries, int64_t head_size,
                              float* scores) {
  for (int first = 0; first < tile.count; first += 4, scores += 4 * kUnit * kLanes) {
    // Past the last unit, the last unit is repeated; its products are not read.
    Unit<bf16> units[4];
    for (int i = 0; i < 4; ++i) units[i] = tile.units[first + i < tile.count ? first + i : tile.count - 1];
    const Unit<bf16>* ahead = next.units + first;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t piece = 0; piece < head_size / 8; ++piece) {
      _tile_loadd(5, queries + piece * 8 * kLanes, kTileRowBytes);
      _tile_loadd(4, units[0].k + piece * units[0].k_stride, 16);
      _tile_dpbf16ps(0, 4, 5);
      prefetch(ahead[0].k + piece * ahead[0].k_stride, 256);
      _tile_loadd(4, units[1].k + piece * units[1].k_stride, 16);
      _tile_dpbf16ps(1, 4, 5);
      prefetch(ahead[1].k + piece * ahead[1].k_stride, 256);
      _tile_loadd(4, units[2].k + piece * units[2].k_stride, 16);
      _tile_dpbf16ps(2, 4, 5);
      prefetch(ahead[2].k + piece * ahead[2].k_stride, 256);
      _tile_loadd(4, units[3].k + piece * units[3].k_stride, 16);
      _tile_dpbf16ps(3, 4, 5);
      prefetch(ahead[3].k + piece * ahead[3].k_stride, 256);
    }
    _tile_stored(0, scores, kTileRowBytes);
    _tile_stored(1, scores + kUnit * kLanes, kTileRowBytes);
    _tile_stored(2, scores + 2 * kUnit * kLanes, kTileRowBytes);
    _tile_stored(3, scores + 3 * kUnit * kLanes, kTileRowBytes);
  }
}

// Prefetches eight dimensions of a unit. One cache line holds two of them if the unit is packed or fills its block.
inline void prefetch_values(const Unit<bf16>& unit, int64_t d) {
  const bf16* row = unit.v + d * unit.v_stride;
  const int64_t step = unit.v_stride < 32 ? 2 : 1;
  for (int64_t i = 0; i < 8; i += step) _mm_prefetch(row + i * unit.v_stride, _MM_HINT_T1);
}

// acc += values . weights, up to 64 dimensions at a time. Prefetches the second half of the values of `next`.
inline void multiply_values_few(const Tile<bf16>& tile, const Tile<bf16>& next, const bf16* weights, int64_t head_size,
                                float* acc) {
  constexpr int kStep = 16 * kLanes;
  for (int64_t d = 0; d < head_size; d += 64, acc += 4 * kStep) {
    const int64_t tiles = (head_size - d) / 16, ahead = (head_size + d) / 2;
    _tile_loadd(0, acc, kTileRowBytes);
    if (tiles > 1) _tile_loadd(1, acc + kStep, kTileRowBytes);
    if (tiles > 2) _tile_loadd(2, acc + 2 * kStep, kTileRowBytes);
    if (tiles > 3) _tile_loadd(3, acc + 3 * kStep, kTileRowBytes);
    for (int u = 0; u < tile.count; ++u) {
      const int64_t stride = tile.units[u].v_stride;
      const bf16* v = tile.units[u].v + d * stride;
      _tile_loadd(7, weights + u * kUnit * kLanes, kTileRowBytes);
      _tile_loadd(6, v, stride * 2);
      _tile_dpbf16ps(0, 6, 7);
      prefetch_values(next.units[u], ahead);
      if (tiles == 1) continue;
      _tile_loadd(6, v + 16 * stride, stride * 2);
      _tile_dpbf16ps(1, 6, 7);
      prefetch_values(next.units[u], ahead + 8);
      if (tiles == 2) continue;
      _tile_loadd(6, v + 32 * stride, stride * 2);
      _tile_dpbf16ps(2, 6, 7);
      prefetch_values(next.units[u], ahead + 16);
      if (tiles == 3) continue;
      _tile_loadd(6, v + 48 * stride, stride * 2);
      _tile_dpbf16ps(3, 6, 7);
      prefetch_values(next.units[u], ahead + 24);
    }
    _tile_stored(0, acc, kTileRowBytes);
    if (tiles > 1) _tile_stored(1, acc + kStep, kTileRowBytes);
    if (tiles > 2) _tile_stored(2, acc + 2 * kStep, kTileRowBytes);
    if (tiles > 3) _tile_stored(3, acc + 3 * kStep, kTileRowBytes);
  }
}

inline void attend_tile_few(const AttentionPiece& piece, const AmxScratch& scratch, const Tile<bf16>& tile,
                            const Tile<bf16>& next) {
  const int64_t head_size = piece.params->pool.head_size, head = tile.kv_head - piece.head_begin;
  float* acc = scratch.acc + head * scratch.size * kLanes;
  multiply_keys_few(tile, next, scratch.queries + head * scratch.size * kLanes, head_size, scratch.scores);
  softmax_amx(*piece.params, tile.start, tile.count * kUnit, next, head_size / 2, scratch.scores, scratch.rows[head],
              scratch.weights, acc, scratch.size);
  multiply_values_few(tile, next, scratch.weights, head_size, acc);
}

// Up to this many rows, vectors are faster than tiles, most of whose columns would be empty.
constexpr int kVectorRows = 4;

inline void attend_amx(const AttentionPiece& piece, char* memory) {
  const int64_t head_size = piece.params->pool.head_size;
  const bool few = piece.rows() <= kLanes;
  if (few && (piece.rows() <= kVectorRows || head_size % 16 != 0)) return attend_stream<bf16>(piece, memory);
  const Tiles tiles_on(few ? narrow_tiles() : whole_tiles());
  const AmxScratch scratch(memory, head_size, piece.heads() * AmxScratch::blocks(piece.rows()));
  prepare_amx(piece, scratch);
  for_tiles<bf16>(piece, scratch.spare, [&](const Tile<bf16>& tile, const Tile<bf16>& next) {
    if (few) {
      attend_tile_few(piece, scratch, tile, next);
    } else {
      attend_tile_amx(piece, scratch, tile, next);
    }
  });
  finish_amx(piece, scratch);
}

inline int64_t amx_scratch_bytes(int64_t head_size, int64_t rows) {
  const int64_t tiles = AmxScratch::bytes(head_size, rows), vectors = StreamScratch<bf16>::bytes(head_size, rows);
  return tiles > vectors ? tiles : vectors;
}

constexpr AttentionKernel amx_kernel() { return {attend_amx, amx_scratch_bytes, kAmxRows}; }

}  // namespace
}  // namespace kvservice
