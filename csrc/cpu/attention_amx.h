// Attention with AMX tiles, bfloat16: for few rows and for many.
//
// Everything is transposed, so that the queries are the columns: of a product with K rows are tokens, of the product
// with V rows are dimensions, and the softmax of sixteen query rows is that of the sixteen lanes of a vector, without
// any sum across lanes. V then needs no transposition (the pool holds it with tokens side by side), K only its 16-byte
// pieces put into rows.
//
//   keys     [128 tokens, size]          packed per tile of 128 tokens and KV head
//   values   [size, 128 tokens]
//   queries  [size / 2, 16 rows, 2]      per block of sixteen rows; size: head size rounded up to 32
//   scores   [128 tokens, 16 rows]
//   weights  [64 token pairs, 16 rows, 2]
//   acc      [size, 16 rows]
#pragma once

#include "cpu/attention_stream.h"

namespace kvservice {
namespace {

constexpr int kLanes = 16;
constexpr int kAmxRows = 128;
constexpr int kTileRowBytes = 64;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Eight tiles of 16 rows of 64 bytes, for as long as this lives.
class Tiles {
 public:
  Tiles() {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = kTileRowBytes;
      config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Sixteen rows: what each sees, and where its softmax stands.
struct alignas(64) RowBlock {
  int32_t query_pos[kLanes];
  int32_t begin[kLanes];
  int32_t end[kLanes];
  float slope[kLanes];
  float max[kLanes];
  float sum[kLanes];
  int32_t begin_max;  // every row sees [begin_max, end_min)
  int32_t end_min;
};

struct AmxScratch {
  static int64_t padded(int64_t head_size) { return (head_size + 31) / 32 * 32; }
  static int64_t blocks(int64_t rows) { return (rows + kLanes - 1) / kLanes; }

  // `rows` counts those of all heads; each head may leave a block nearly empty.
  static int64_t bytes(int64_t head_size, int64_t rows) {
    const int64_t size = padded(head_size);
    return 2 * size * kTile * 2 + 2 * kTile * kLanes * (4 + 2) + 2 * spares_bytes(head_size) +
           rows * (size * kLanes * (2 + 4) + static_cast<int64_t>(sizeof(RowBlock)));
  }
  static int64_t spares_bytes(int64_t head_size) { return kTileUnits * 2 * head_size * kUnit * 2; }

  AmxScratch(char* memory, int64_t head_size, int64_t num_blocks) : size(padded(head_size)) {
    const auto take = [&](int64_t bytes) {
      char* taken = memory;
      memory += bytes;
      return taken;
    };
    keys = reinterpret_cast<bf16*>(take(size * kTile * 2));
    values = reinterpret_cast<bf16*>(take(size * kTile * 2));
    scores = reinterpret_cast<float*>(take(2 * kTile * kLanes * 4));
    weights = reinterpret_cast<bf16*>(take(2 * kTile * kLanes * 2));
    rows = reinterpret_cast<RowBlock*>(take(num_blocks * static_cast<int64_t>(sizeof(RowBlock))));
    queries = reinterpret_cast<bf16*>(take(num_blocks * size * kLanes * 2));
    acc = reinterpret_cast<float*>(take(num_blocks * size * kLanes * 4));
    spare[0] = take(spares_bytes(head_size));
    spare[1] = take(spares_bytes(head_size));
  }

  int64_t size;
  bf16* keys;
  bf16* values;
  float* scores;
  bf16* weights;
  RowBlock* rows;
  bf16* queries;
  float* acc;
  char* spare[2];
};

inline void prepare_row_block(const AttentionPiece& piece, int64_t kv_head, int64_t first_row, bf16* queries,
                              RowBlock& block) {
  const AttentionParams& p = *piece.params;
  const int64_t size = p.pool.head_size;
  block.begin_max = 0;
  block.end_min = INT32_MAX;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t row = first_row + lane;
    const bool used = row < piece.row_end;
    const RowView view = used ? view_row(piece, kv_head, row) : RowView{0, 0, INT32_MAX, 0.0F};
    block.query_pos[lane] = static_cast<int32_t>(view.query_pos);
    block.begin[lane] = static_cast<int32_t>(view.begin);
    block.end[lane] = static_cast<int32_t>(view.end);
    block.slope[lane] = view.slope;
    block.max[lane] = -kInfinity;
    block.sum[lane] = 0.0F;
    if (block.begin[lane] > block.begin_max) block.begin_max = block.begin[lane];
    if (block.end[lane] < block.end_min) block.end_min = block.end[lane];
    if (!used) continue;
    const int64_t index = piece.query_row(row) + (kv_head - piece.head_begin) * p.group_size();
    const auto* pairs = reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(p.query) + index * size);
    auto* out = reinterpret_cast<uint32_t*>(queries) + lane;
    for (int64_t i = 0; i < size / 2; ++i) out[i * kLanes] = pairs[i];
  }
}

// Four pieces of four tokens each: in, a vector for each piece; out, for each token.
inline void transpose_pieces(__m512i (&v)[4]) {
  const __m512i a = _mm512_shuffle_i64x2(v[0], v[1], 0x44), b = _mm512_shuffle_i64x2(v[0], v[1], 0xEE);
  const __m512i c = _mm512_shuffle_i64x2(v[2], v[3], 0x44), d = _mm512_shuffle_i64x2(v[2], v[3], 0xEE);
  v[0] = _mm512_shuffle_i64x2(a, c, 0x88);
  v[1] = _mm512_shuffle_i64x2(a, c, 0xDD);
  v[2] = _mm512_shuffle_i64x2(b, d, 0x88);
  v[3] = _mm512_shuffle_i64x2(b, d, 0xDD);
}

// One unit's keys into rows. Meanwhile those of `next` come nearer.
inline void pack_keys(const Unit<bf16>& unit, const Unit<bf16>& next, int64_t head_size, int64_t size, bf16* out) {
  const int64_t pieces = head_size / 8;
  for (int64_t c = 0; c < pieces; c += 4) {
    for (int i = 0; i < 4; ++i) {
      __m512i v[4];
      for (int j = 0; j < 4; ++j) {
        const char* from = unit.k + (c + j) * unit.k_stride + i * 64;
        v[j] = c + j < pieces ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
        _mm_prefetch(next.k + (c + j) * next.k_stride + i * 64, _MM_HINT_T1);
      }
      transpose_pieces(v);
      for (int j = 0; j < 4; ++j) _mm512_storeu_si512(out + (i * 4 + j) * size + c * 8, v[j]);
    }
  }
}

inline void pack_values(const Unit<bf16>& unit, int64_t head_size, bf16* out) {
  for (int64_t d = 0; d < head_size; ++d) {
    const __m256i row = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit.v + d * unit.v_stride));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d * kTile), row);
  }
}

inline void clear_values(int64_t head_size, bf16* out) {
  for (int64_t d = 0; d < head_size; ++d) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d * kTile), _mm256_setzero_si256());
  }
}

// scores = keys . queries for `Blocks` row blocks side by side.
template <int Blocks>
inline void multiply_keys_amx(const AmxScratch& scratch, const bf16* queries, int count) {
  const int64_t stride = scratch.size * 2;
  for (int u = 0; u < count; u += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16* keys = scratch.keys + u * kUnit * scratch.size;
    for (int64_t d = 0; d < scratch.size; d += 32) {
      _tile_loadd(6, queries + d * kLanes, kTileRowBytes);
      _tile_loadd(4, keys + d, stride);
      _tile_loadd(5, keys + kUnit * scratch.size + d, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (Blocks == 2) {
        _tile_loadd(7, queries + (scratch.size + d) * kLanes, kTileRowBytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    float* out = scratch.scores + u * kUnit * kLanes;
    _tile_stored(0, out, kTileRowBytes);
    _tile_stored(1, out + kUnit * kLanes, kTileRowBytes);
    if constexpr (Blocks == 2) {
      _tile_stored(2, out + kTile * kLanes, kTileRowBytes);
      _tile_stored(3, out + (kTile + kUnit) * kLanes, kTileRowBytes);
    }
  }
}

// acc += values . weights for `Blocks` row blocks side by side.
template <int Blocks>
inline void multiply_values_amx(const AmxScratch& scratch, float* acc, int count) {
  float* second = acc + scratch.size * kLanes;
  for (int64_t d = 0; d < scratch.size; d += 32) {
    _tile_loadd(0, acc + d * kLanes, kTileRowBytes);
    _tile_loadd(1, acc + (d + 16) * kLanes, kTileRowBytes);
    if constexpr (Blocks == 2) {
      _tile_loadd(2, second + d * kLanes, kTileRowBytes);
      _tile_loadd(3, second + (d + 16) * kLanes, kTileRowBytes);
    }
    for (int u = 0; u < count; u += 2) {
      const bf16* values = scratch.values + d * kTile + u * kUnit;
      const bf16* weights = scratch.weights + u * kUnit * kLanes;
      _tile_loadd(6, weights, kTileRowBytes);
      _tile_loadd(4, values, kTile * 2);
      _tile_loadd(5, values + 16 * kTile, kTile * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (Blocks == 2) {
        _tile_loadd(7, weights + kTile * kLanes, kTileRowBytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, acc + d * kLanes, kTileRowBytes);
    _tile_stored(1, acc + (d + 16) * kLanes, kTileRowBytes);
    if constexpr (Blocks == 2) {
      _tile_stored(2, second + d * kLanes, kTileRowBytes);
      _tile_stored(3, second + (d + 16) * kLanes, kTileRowBytes);
    }
  }
}

// Products into logits, in place, with everything that the call asks for.
inline void make_logits_amx(const AttentionParams& p, const RowBlock& block, int64_t start, int width, float* s) {
  const __m512 scale = Simd::set1(p.scale), cap = Simd::set1(p.soft_cap);
  const __m512 slope = Simd::load(block.slope);
  const __m512i query_pos = _mm512_load_si512(block.query_pos);
  const __m512i begin = _mm512_load_si512(block.begin), end = _mm512_load_si512(block.end);
  for (int t = 0; t < width; ++t, s += kLanes) {
    __m512 x = Simd::mul(Simd::load(s), scale);
    const __m512i pos = _mm512_set1_epi32(static_cast<int32_t>(start + t));
    if (p.soft_cap > 0.0F) {
      const __m512 twice = Simd::min(Simd::set1(80.0F), Simd::div(Simd::add(x, x), cap));
      const __m512 rest = Simd::div(Simd::add(cap, cap), Simd::add(Simd::exp(twice), Simd::set1(1.0F)));
      x = Simd::sub(cap, rest);
    }
    x = Simd::fma(slope, _mm512_cvtepi32_ps(_mm512_sub_epi32(pos, query_pos)), x);
    const __mmask16 seen = _mm512_cmpge_epi32_mask(pos, begin) & _mm512_cmplt_epi32_mask(pos, end);
    Simd::store(s, _mm512_mask_mov_ps(Simd::set1(-kInfinity), seen, x));
  }
}

inline void fetch_values(const Unit<bf16>& unit, int64_t from, int64_t to) {
  for (int64_t d = from; d < to; ++d) _mm_prefetch(unit.v + d * unit.v_stride, _MM_HINT_T1);
}

// Scores of a row block into its weights, sixteen rows at a time; shrinks what it has accumulated where a maximum grew.
// Meanwhile the values of `next` come nearer.
inline void softmax_amx(const AttentionParams& p, int64_t start, int width, const Tile<bf16>& next, float* s,
                        RowBlock& block, bf16* weights, float* acc, int64_t size) {
  __m512 scale = Simd::set1(p.scale);
  const bool plain = p.soft_cap == 0.0F && p.alibi_slopes == nullptr;
  if (!plain || start < block.begin_max || start + width > block.end_min) {
    make_logits_amx(p, block, start, width, s);
    scale = Simd::set1(1.0F);
  }
  const __m512 old_max = Simd::load(block.max);
  __m512 tops[4] = {old_max, old_max, old_max, old_max};
  for (int t = 0; t < width; t += 4) {
    for (int i = 0; i < 4; ++i) tops[i] = Simd::max(tops[i], Simd::mul(Simd::load(s + (t + i) * kLanes), scale));
  }
  const __m512 top = Simd::max(Simd::max(tops[0], tops[1]), Simd::max(tops[2], tops[3]));
  // Where no key was visible yet, the maximum is -inf, and weights are exp(-inf - 0) = 0.
  const __mmask16 none = _mm512_cmpeq_ps_mask(top, Simd::set1(-kInfinity));
  const __m512 shift = _mm512_mask_mov_ps(top, none, Simd::zero());
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 sums[2] = {Simd::zero(), Simd::zero()};
  const int64_t fetch = p.pool.head_size / 8;
  for (int t = 0; t < width; t += 2) {
    const __m512 a = Simd::exp(_mm512_fmsub_ps(Simd::load(s + t * kLanes), scale, shift));
    const __m512 b = Simd::exp(_mm512_fmsub_ps(Simd::load(s + (t + 1) * kLanes), scale, shift));
    sums[0] = Simd::add(sums[0], a);
    sums[1] = Simd::add(sums[1], b);
    const __m512i pair = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
    _mm512_storeu_si512(weights + t * kLanes, _mm512_permutexvar_epi16(order, pair));
    const Unit<bf16>& ahead = next.units[t / kUnit];
    fetch_values(ahead, t % kUnit / 2 * fetch, (t % kUnit / 2 + 1) * fetch);
  }
  const __m512 factor = Simd::exp(Simd::sub(old_max, shift));
  Simd::store(block.max, top);
  Simd::store(block.sum, Simd::fma(Simd::load(block.sum), factor, Simd::add(sums[0], sums[1])));
  if (_mm512_cmpneq_ps_mask(old_max, top) == 0) return;
  for (int64_t d = 0; d < size; ++d) Simd::store(acc + d * kLanes, Simd::mul(factor, Simd::load(acc + d * kLanes)));
}

template <int Blocks>
void attend_row_blocks(const AttentionPiece& piece, const AmxScratch& scratch, const Tile<bf16>& tile,
                       const Tile<bf16>& next, int64_t first) {
  const int width = tile.count * kUnit;
  float* acc = scratch.acc + first * scratch.size * kLanes;
  multiply_keys_amx<Blocks>(scratch, scratch.queries + first * scratch.size * kLanes, tile.count);
  for (int i = 0; i < Blocks; ++i) {
    bf16* weights = scratch.weights + i * kTile * kLanes;
    softmax_amx(*piece.params, tile.start, width, next, scratch.scores + i * kTile * kLanes, scratch.rows[first + i],
                weights, acc + i * scratch.size * kLanes, scratch.size);
    if (tile.count % 2 != 0) __builtin_memset(weights + width * kLanes, 0, kUnit * kLanes * sizeof(bf16));
  }
  multiply_values_amx<Blocks>(scratch, acc, tile.count);
}

inline void attend_tile_amx(const AttentionPiece& piece, const AmxScratch& scratch, const Tile<bf16>& tile,
                            const Tile<bf16>& next) {
  const int64_t head_size = piece.params->pool.head_size;
  for (int u = 0; u < tile.count; ++u) {
    pack_keys(tile.units[u], next.units[u], head_size, scratch.size, scratch.keys + u * kUnit * scratch.size);
    pack_values(tile.units[u], head_size, scratch.values + u * kUnit);
  }
  if (tile.count % 2 != 0) clear_values(head_size, scratch.values + tile.count * kUnit);
  const int64_t blocks = AmxScratch::blocks(piece.rows()), first = (tile.kv_head - piece.head_begin) * blocks;
  int64_t block = 0;
  for (; block + 2 <= blocks; block += 2) attend_row_blocks<2>(piece, scratch, tile, next, first + block);
  if (block < blocks) attend_row_blocks<1>(piece, scratch, tile, next, first + block);
}

inline void prepare_amx(const AttentionPiece& piece, const AmxScratch& scratch) {
  const int64_t blocks = AmxScratch::blocks(piece.rows()), size = scratch.size;
  __builtin_memset(scratch.queries, 0, piece.heads() * blocks * size * kLanes * sizeof(bf16));
  __builtin_memset(scratch.acc, 0, piece.heads() * blocks * size * kLanes * sizeof(float));
  for (int64_t i = 0; i < piece.heads() * blocks; ++i) {
    prepare_row_block(piece, piece.head_begin + i / blocks, piece.row_begin + i % blocks * kLanes,
                      scratch.queries + i * size * kLanes, scratch.rows[i]);
  }
  // Dimensions past the head size: zeros, whatever lay here before.
  const int64_t head_size = piece.params->pool.head_size;
  __builtin_memset(scratch.values + head_size * kTile, 0, (size - head_size) * kTile * sizeof(bf16));
}

inline void finish_amx(const AttentionPiece& piece, const AmxScratch& scratch) {
  const int64_t rows = piece.rows(), blocks = AmxScratch::blocks(rows), size = piece.params->pool.head_size;
  for (int64_t i = 0; i < piece.heads() * rows; ++i) {
    const int64_t block = i / rows * blocks + i % rows / kLanes, lane = i % rows % kLanes;
    piece.max[i] = scratch.rows[block].max[lane];
    piece.sum[i] = scratch.rows[block].sum[lane];
    const float* acc = scratch.acc + block * scratch.size * kLanes + lane;
    for (int64_t d = 0; d < size; ++d) piece.acc[i * size + d] = acc[d * kLanes];
  }
}

inline void attend_amx(const AttentionPiece& piece, char* memory) {
  const Tiles tiles_on;
  const int64_t blocks = piece.heads() * AmxScratch::blocks(piece.rows());
  const AmxScratch scratch(memory, piece.params->pool.head_size, blocks);
  prepare_amx(piece, scratch);
  for_tiles<bf16>(piece, scratch.spare,
                  [&](const Tile<bf16>& tile, const Tile<bf16>& next) { attend_tile_amx(piece, scratch, tile, next); });
  finish_amx(piece, scratch);
}

constexpr AttentionKernel amx_kernel() { return {attend_amx, AmxScratch::bytes, kAmxRows}; }

}  // namespace
}  // namespace kvservice
