// Attention with AMX tiles, bfloat16: for few rows and for many.
//
// Everything is transposed, so that the queries are the columns: of a product with K rows are tokens, of the product
// with V rows are dimensions, and the softmax of sixteen query rows is that of the sixteen lanes of a vector, without
// any sum across lanes. V then needs no transposition (the pool holds it with tokens side by side), K only its 16-byte
// pieces put into rows.
//
//   keys     [size / 32, 128 tokens, 32]  packed for each tile of 128 tokens and KV head: 64 bytes are a tile's row
//   values   [4, size, 32 tokens]
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

// Eight tiles of 16 rows of 64 bytes.
inline TileConfig whole_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = kTileRowBytes;
    config.rows[i] = 16;
  }
  return config;
}

// The tile registers, configured for as long as this lives.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config) { _tile_loadconfig(&config); }
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

// Two units' values side by side; without a second one, zeros.
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

// Four tiles of products at a time, since one waits for the last product into it: two row blocks and two units, ...
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

// ... or four units with one row block. Of units past the last the products mean nothing and are not read.
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

// Adds values . weights to the accumulators: of two row blocks, 32 dimensions at a time, ...
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

// ... or of one row block, 64 dimensions at a time and perhaps 32 at the end.
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
  const bf16* row = unit.v + from * unit.v_stride;
  for (int64_t d = from; d < to; ++d, row += unit.v_stride) _mm_prefetch(row, _MM_HINT_T1);
}

// Scores of a row block into its weights, sixteen rows at a time; shrinks what it has accumulated where a maximum grew.
// Meanwhile so many dimensions of the values of `next` come nearer.
inline void softmax_amx(const AttentionParams& p, int64_t start, int width, const Tile<bf16>& next, int64_t dims,
                        float* s, RowBlock& block, bf16* weights, float* acc, int64_t size) {
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
  const int64_t fetch = dims / 8;
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
  for (int i = 0; i < kTile / 32; ++i) {
    __builtin_memset(scratch.values + (i * size + head_size) * 32, 0, (size - head_size) * 32 * sizeof(bf16));
  }
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

}  // namespace
}  // namespace kvservice
