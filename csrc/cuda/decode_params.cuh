// The arguments of a decode launch, and the values that its warps and thread blocks pass to each other.
#pragma once

#include "cuda/attention.h"

namespace kvservice::decode {

// Where thread blocks wait until all of them have written their partial results.
struct Meeting {
  uint64_t counts;    // members that have come and that have given up, zero between launches; meetings so far
  uint32_t given_up;  // whether the thread block with the partial result of this index has given up
  uint32_t unused;
};

struct Params {
  const char* pool;  // of this layer
  int64_t block_bytes;
  int32_t head_bytes;   // K or V of one block and head
  int32_t value_bytes;  // from K to V
  int32_t block_shift;
  int32_t num_kv_heads;
  int32_t group;
  int32_t num_heads;
  int32_t num_seqs;
  int32_t max_blocks;
  int32_t min_query_len, max_query_len;
  int32_t columns;     // queries of a KV head in one pass
  int32_t num_passes;  // more than one if a KV head has more queries than columns
  int32_t tile_tokens, tile_shift;
  int32_t query_prefetch_bytes, table_prefetch_bytes;  // prefetched before they are known to be needed
  int32_t num_stages;
  int32_t stage_bytes;
  const void* query;
  int32_t query_bytes;  // of one head of one token
  const int32_t* query_lens;
  const int32_t* block_tables;
  const int32_t* context_lens;
  const float* alibi_slopes;
  const float* k_scale;
  const float* v_scale;
  BlockSparse sparse;
  float scale;
  float soft_cap;
  int32_t sliding_window;
  bool query_is_bfloat16;
  void* out;
  float* lse;
  Meeting* meetings;
  float* partials;
  bool batch_invariant;

  __host__ __device__ bool plain() const { return soft_cap == 0.0F && alibi_slopes == nullptr && !sparse.on(); }
};

// The KV tiles of one (sequence, KV head, pass) that one thread block processes.
struct WorkTile {
  int seq;  // -1: no more work
  int kv_head;
  int first_query;  // of the pass, within the queries of the KV head
  int query_start, query_len, context;
  int tile, end_tile;  // counted from position 0
};

// Where the result of a work tile goes. The thread blocks that share a (sequence, KV head, pass) are its members: each
// writes a partial result, and reduces a slice of the output when all have written theirs.
struct SplitKv {
  int partial;              // index of the partial result; -1: the output
  int members;              // partial results in all; 0: no reduction here
  int own;                  // of these, those of this thread block
  int slices, slice;        // slices of the output, and the one of this thread block, if less than slices
  int meeting;              // index of the meeting of the members
  int first, base, stride;  // indexes of the members' partial results

  __device__ int partial_of(int member) const { return member == 0 ? first : base + member * stride; }
};

// Returns the number of columns of a work tile that hold queries.
__device__ __forceinline__ int used_columns(const Params& p, const WorkTile& s) {
  return min(p.columns, s.query_len * p.group - s.first_query);
}

// Returns the output row of column `column` of a work tile.
__device__ __forceinline__ int64_t output_row(const Params& p, const WorkTile& s, int column) {
  const int index = s.first_query + column;
  const int64_t row = static_cast<int64_t>(s.query_start) * p.num_heads + s.kv_head * p.group + index;
  if (s.query_len == 1) return row;
  const int token = index / p.group;
  return row + static_cast<int64_t>(token) * (p.num_heads - p.group);
}

}  // namespace kvservice::decode
