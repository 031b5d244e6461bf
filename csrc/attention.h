// Attention of ragged queries over the paged pool: decode, extend and prefill share one contract.
//
//   query        [num_tokens, num_heads, head_size]   new tokens of all sequences, one sequence after another
//   query_lens   [num_seqs]                           new tokens per sequence; may be 0
//   block_tables [num_seqs, max_blocks]               entries past a sequence's context are not read
//   context_lens [num_seqs]                           tokens in the pool, the new ones included
//   out          [num_tokens, num_heads, head_size]
//   lse          [num_tokens, num_heads] or null      natural logarithm of the sum of exponentials
//
// Query token j of a sequence is at position context_len - query_len + j. It sees the positions up to its own; with a
// sliding window, only the last `sliding_window` of them. A logit is
//   soft_cap * tanh(scale * q.k / soft_cap) + slope * (key position - query position),
// where soft cap and slope apply only if they are set.
#pragma once

#include "attention_options.h"
#include "pool.h"

namespace kvservice {

struct AttentionParams {
  PoolView pool;
  DType dtype = DType::kFloat32;  // of query and out; equals the pool's unless that is FP8
  int64_t layer = 0;
  int64_t num_tokens = 0;
  int64_t num_seqs = 0;
  int64_t num_heads = 0;
  int64_t max_blocks = 0;
  int64_t max_query_len = 0;  // CUDA only (lengths are on the device): upper bound of query_lens
  // CUDA only: the number of leading blocks that are equal in the tables of all sequences with queries. All queries
  // come after these blocks, which may be read once for all sequences.
  int64_t num_common_blocks = 0;
  const void* query = nullptr;
  const int32_t* query_lens = nullptr;
  const int32_t* block_tables = nullptr;
  const int32_t* context_lens = nullptr;
  const float* alibi_slopes = nullptr;  // [num_heads] or null
  const float* k_scale = nullptr;       // [num_kv_heads] of this layer or null: key = stored value * scale
  const float* v_scale = nullptr;
  BlockSparse sparse;
  float scale = 1.0F;
  float soft_cap = 0.0F;       // 0: off
  int64_t sliding_window = 0;  // 0: off
  void* out = nullptr;
  float* lse = nullptr;

  KVSERVICE_DEVICE int64_t group_size() const { return num_heads / pool.num_kv_heads; }
  AttentionOptions options() const { return {scale, soft_cap, sliding_window, sparse}; }
};

// Throws ArgumentError if lengths, tables or block ids are inconsistent. Reads the arrays, so they must be in host
// memory.
void check_attention(const AttentionParams& params);

void attention_cpu(const AttentionParams& params);

}  // namespace kvservice
