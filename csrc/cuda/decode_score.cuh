// The first product of the decode kernel, keys times queries, and the mask.
#pragma once

#include "cuda/decode_query.cuh"

namespace kvservice::decode {

// Applies the options of a call to a score: soft cap, ALiBi and the block-sparse pattern. Scores are in log2 units.
__device__ __forceinline__ float special_score(const Params& p, int kv_head, int index, int distance, int token,
                                               float score) {
  constexpr float kLog2e = 1.4426950408889634F;
  const int in_group = index % p.group, head = kv_head * p.group + in_group;
  if (p.soft_cap != 0.0F) score = p.soft_cap * tanhf(score / p.soft_cap) * kLog2e;
  if (p.alibi_slopes != nullptr) score -= p.alibi_slopes[head] * static_cast<float>(distance) * kLog2e;
  if (p.sparse.on()) {
    const BlockSparse& sparse = p.sparse;
    const int key_block = token / sparse.block_size, query_block = (token + distance) / sparse.block_size;
    const int shift = sparse.head_sliding_step >= 0
                          ? (sparse.tp_rank * p.num_heads + head) * sparse.head_sliding_step + 1
                          : (sparse.tp_rank * p.num_kv_heads + kv_head) * -sparse.head_sliding_step + 1;
    const bool seen = key_block > query_block - sparse.local_blocks || (key_block + shift) % sparse.vert_stride == 0;
    if (!seen) return -INFINITY;
  }
  return score;
}

// Converts four bytes of an FP8 cache to float16.
template <Cache kCache>
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t& first, uint32_t& second) {
  if constexpr (kCache == Cache::kE4M3) {
    ptx::e4m3_to_half(bytes, first, second);
  } else {
    ptx::e5m2_to_half(bytes, first, second);
  }
}

// Computes the scores of the kSubs * 16 tokens that a warp takes of a round.
template <typename K>
class Score {
  static constexpr bool kFp8 = K::kFp8;
  static constexpr int kHead = K::kHead;
  static constexpr int kItem = K::kItem;
  static constexpr int kSubs = K::kSubs;
  static constexpr int kColumnTiles = K::kColumnTiles;
  using Scores = typename K::Scores;

 public:
  __device__ Score(const Block& block, typename K::Shared& shared) : block_(block), shared_(shared) {}

  __device__ void multiply_keys(const Columns<K>& columns, int stage, int offset, Scores& scores) {
    const Params& p = block_.p;
    const int block_size = 1 << p.block_shift;
    const int matrix = block_.lane / 8;
    uint32_t row[kSubs];
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int token = offset + (sub * kTokenWarps + block_.token_warp) * 16 + token_of(block_.lane % 8, matrix % 2);
      row[sub] = block_.stages + stage * p.stage_bytes + (token >> p.block_shift) * p.head_bytes +
                 (token & (block_size - 1)) * 16 + (matrix / 2) * block_size * 16;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[sub][n][i] = 0.0F;
      }
    }
    // Each step takes two 16-byte pieces of each token: 16 dimensions, or 32 in FP8.
    constexpr int kPairs = kHead * kItem / 32;
    constexpr bool kOddPiece = (kHead * kItem / 16) % 2 != 0;
#pragma unroll
    for (int pair = 0; pair < kPairs + (kOddPiece ? 1 : 0); ++pair) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        uint32_t keys[4];
        // The last piece has no partner: its upper matrices are loaded from the piece itself and not used.
        const bool odd = pair == kPairs;
        ptx::ldmatrix_4(keys, odd && matrix / 2 == 1 ? row[sub] - block_size * 16 : row[sub]);
        row[sub] += 2 * block_size * 16;
        if constexpr (!kFp8) {
          multiply_step(columns, pair, keys, scores[sub]);
        } else {
#pragma unroll
          for (int piece = 0; piece < 2; ++piece) {
            if (odd && piece == 1) continue;
            uint32_t step[4];
            widen<K::kCache>(keys[2 * piece], step[0], step[2]);
            widen<K::kCache>(keys[2 * piece + 1], step[1], step[3]);
            multiply_step(columns, 2 * pair + piece, step, scores[sub]);
          }
        }
      }
    }
  }

  // Scales the scores and masks the keys that a query does not see.
  __device__ void mask(const WorkTile& s, const Columns<K>& columns, int position, Scores& scores) {
    const Params& p = block_.p;
    const int first_limit = s.context - s.query_len + 1;
    const bool whole = position + K::kRoundTokens <= first_limit &&
                       (p.sliding_window == 0 || position >= s.context - p.sliding_window);
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[sub][n][i] *= columns.scale[n][i % 2];
      }
    }
    if (!p.plain()) apply_options(s, position, scores);
    if (whole) return;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = token_at(position, sub, i), limit = columns.limit[n][i % 2];
          const bool seen = token < limit && (p.sliding_window == 0 || token >= limit - p.sliding_window);
          if (!seen) scores[sub][n][i] = -INFINITY;
        }
      }
    }
  }

 private:
  // Returns the token (of 16) at row `row` of half `half` of the key tile. The order makes a lane with the weights of
  // rows 2t and 2t + 1 of both halves hold tokens 4t to 4t + 3.
  __device__ static int token_of(int row, int half) { return 4 * (row / 2) + 2 * half + row % 2; }

  __device__ void multiply_step(const Columns<K>& columns, int step, const uint32_t (&keys)[4],
                                float (&scores)[kColumnTiles][4]) {
    if constexpr (kColumnTiles == 1) {
      ptx::mma<typename K::Element>(scores[0], keys, columns.query[step][0], columns.query[step][1]);
    } else {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        const uint2 query = shared_.query[(block_.first_column / 8 + n) * K::kSteps + step][block_.lane];
        ptx::mma<typename K::Element>(scores[n], keys, query.x, query.y);
      }
    }
  }

  // Returns the position of the token that score i of a lane belongs to, in round `position`.
  __device__ int token_at(int position, int sub, int i) const {
    return position + (sub * kTokenWarps + block_.token_warp) * 16 + token_of(block_.lane / 4, 0) + i / 2 * 2;
  }

  // Applies the options of a call to all scores of a lane. One piece of code for all of them, with the scores in local
  // memory: unrolled, it would be most of the kernel, and calls without options would wait for its instructions.
  __device__ void apply_options(const WorkTile& s, int position, Scores& scores) const {
    constexpr int kScores = kSubs * kColumnTiles * 4;
    float local[kScores];
#pragma unroll
    for (int at = 0; at < kScores; ++at) local[at] = scores[at / (kColumnTiles * 4)][at / 4 % kColumnTiles][at % 4];
#pragma unroll 1
    for (int at = 0; at < kScores; ++at) {
      const int n = at / 4 % kColumnTiles, i = at % 4;
      const int index = s.first_query + block_.first_column + n * 8 + 2 * (block_.lane % 4) + i % 2;
      const int query = s.context - s.query_len + min(index / block_.p.group, s.query_len - 1);
      const int token = token_at(position, at / (kColumnTiles * 4), i);
      local[at] = special_score(block_.p, s.kv_head, index, query - token, token, local[at]);
    }
#pragma unroll
    for (int at = 0; at < kScores; ++at) scores[at / (kColumnTiles * 4)][at / 4 % kColumnTiles][at % 4] = local[at];
  }

  const Block& block_;
  typename K::Shared& shared_;
};

}  // namespace kvservice::decode
