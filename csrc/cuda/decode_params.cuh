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

constexpr int kMaxCluster = 16;

// How a launch gives each (sequence, KV head, pass) to a cluster of thread blocks, see DirectScheduler.
struct DirectWork {
  int32_t cluster_shift;  // log2 of the thread blocks of a cluster
  bool surely;            // whatever the lengths are
  bool starts_next;       // see ptx::start_next()
  // Work is direct if at most most_lost is lost. The others say by what it is lost, see direct_launch().
  float most_lost, busy_blocks, lost_by_longer, lost_by_tile;
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
  int32_t max_blocks;    // from one block table to the next
  int32_t table_blocks;  // of each table
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
  int32_t cluster;  // thread blocks of each cluster if work is direct, otherwise 0
  DirectWork direct;

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
  bool clustered;           // the members are a cluster
  int slices, slice;        // slices of the output, and the one of this thread block, if less than slices
  int meeting;              // index of the meeting of the members
  int first, base, stride;  // indexes of the members' partial results

  __device__ int partial_of(int member) const { return member == 0 ? first : base + member * stride; }
};

// Returns the KV tiles of a sequence that any query sees, and the first of them.
__device__ __forceinline__ int tile_count(const Params& p, int query_len, int context, int& first) {
  first = 0;
  if (query_len < p.min_query_len || query_len > p.max_query_len || context <= 0) return 0;
  const int seen = p.sliding_window > 0 ? max(0, context - query_len + 1 - p.sliding_window) : 0;
  first = seen >> p.tile_shift;
  return ((context - 1) >> p.tile_shift) - first + 1;
}

// Divides numbers that are not negative, in fewer instructions than a division takes: exact up to quotients of 2^22.
__device__ __forceinline__ int divide(int number, int by) {
  const int near = static_cast<int>(__fdividef(static_cast<float>(number), static_cast<float>(by)));
  const int rest = number - near * by;
  return near + (rest >= by ? 1 : 0) - (rest < 0 ? 1 : 0);
}

// Returns the number of columns of a work tile that hold queries: none in the last passes of a sequence with fewer
// queries than others.
__device__ __forceinline__ int used_columns(const Params& p, const WorkTile& s) {
  return max(min(p.columns, s.query_len * p.group - s.first_query), 0);
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
