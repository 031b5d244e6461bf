// Shared by the AMX kernels with packed keys and values (attention_amx.h) and without packing (attention_amx_few.h):
// the tile registers, the scratch memory, and the softmax of sixteen query rows in the lanes of a vector.
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

// Configures eight tiles of 16 rows of 64 bytes.
inline TileConfig whole_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = kTileRowBytes;
    config.rows[i] = 16;
  }
  return config;
}

// Configures the tile registers for the lifetime of the object.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config) { _tile_loadconfig(&config); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Sixteen rows: the positions that each sees, and the state of its softmax.
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

  // `rows` is the total over all heads. Each head may leave a row block nearly empty.
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

// Converts products to logits, in place, with all options of the call.
inline void make_logits_amx(const AttentionParams& p, const RowBlock& block, int64_t start, int width, float* s) {
  const __m512 scale = Simd::set1(p.scale), cap = Simd::set1(p.soft_cap);
  const __m512 slope = Simd::load(block.slope);
  const __m512i query_pos = _mm512_load_si512(block.query_pos);
  const __m512i begin = _mm512_load_si512(block.begin), end = _mm512_load_si512(block.end);
  for (int t = 0; t < width; ++t, s += kLanes) {
    __m512 x = Simd::mul(Simd::load(s), scale);
    const __m512i pos = _mm512_set1_epi32(static_cast<int32_t>(start + t));
    if (p.soft_cap > 0.0F) x = soft_capped(x, cap);
    x = Simd::fma(slope, _mm512_cvtepi32_ps(_mm512_sub_epi32(pos, query_pos)), x);
    const __mmask16 seen = _mm512_cmpge_epi32_mask(pos, begin) & _mm512_cmplt_epi32_mask(pos, end);
    Simd::store(s, _mm512_mask_mov_ps(Simd::set1(-kInfinity), seen, x));
  }
}

inline void fetch_values(const Unit<bf16>& unit, int64_t from, int64_t to) {
  const bf16* row = unit.v + from * unit.v_stride;
  for (int64_t d = from; d < to; ++d, row += unit.v_stride) _mm_prefetch(row, _MM_HINT_T1);
}

// Converts the scores of a row block to weights, sixteen rows at a time, and rescales its accumulators if a maximum
// grew. Meanwhile it prefetches `dims` dimensions of the values of `next`.
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
  // If no key was visible yet, the maximum is -inf and the weights are exp(-inf - 0) = 0.
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

inline void prepare_amx(const AttentionPiece& piece, const AmxScratch& scratch) {
  const int64_t blocks = AmxScratch::blocks(piece.rows()), size = scratch.size;
  __builtin_memset(scratch.queries, 0, piece.heads() * blocks * size * kLanes * sizeof(bf16));
  __builtin_memset(scratch.acc, 0, piece.heads() * blocks * size * kLanes * sizeof(float));
  for (int64_t i = 0; i < piece.heads() * blocks; ++i) {
    prepare_row_block(piece, piece.head_begin + i / blocks, piece.row_begin + i % blocks * kLanes,
                      scratch.queries + i * size * kLanes, scratch.rows[i]);
  }
  // Zeroes the dimensions past the head size, because scratch memory is reused.
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
