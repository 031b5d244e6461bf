// Who does what: the arguments of a launch, and how its tiles are shared out over thread blocks.
//
// The tiles of all sequences, KV heads and passes, one after the other, are cut into equal ranges, one for each thread
// block. Every warp finds its range by itself, from the lengths on the device.
#pragma once

#include "cuda/attention.h"

namespace kvservice::decode {

constexpr int kMaxChunks = 16;
constexpr int kMinChunkTokens = 256;

struct Params {
  const char* pool;  // at the layer
  int64_t block_bytes;
  int32_t head_bytes;   // K or V of a block and head
  int32_t value_bytes;  // from K to V
  int32_t block_shift;
  int32_t num_kv_heads;
  int32_t group;
  int32_t num_heads;
  int32_t num_seqs;
  int32_t max_blocks;
  int32_t min_query_len, max_query_len;
  int32_t column_tiles;  // passes over a KV head whose queries are more than a kernel's columns
  int32_t tile_tokens, tile_shift;
  int32_t query_prefetch_bytes, table_prefetch_bytes;  // what is fetched before it is known to be needed
  int32_t entries;
  int32_t entry_bytes;
  const void* query;
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
  uint32_t* counters;
  float* partials;
  bool batch_invariant;

  __host__ __device__ bool plain() const { return soft_cap == 0.0F && alibi_slopes == nullptr && !sparse.on(); }
};

// A (sequence, KV head, pass) and the part of its tiles that a thread block takes.
struct Segment {
  int seq;
  int head;  // kv_head * column_tiles + pass
  int query_start, query_len, context;
  int first_tile;      // of the sequence: tiles before the window do not count
  int tile, end_tile;  // of this segment, counted from position 0
  int num_tiles;       // of the sequence
  int start;           // the place of first_tile among all tiles
};

__device__ __forceinline__ int tile_count(const Params& p, int query_len, int context, int& first) {
  first = 0;
  if (query_len < p.min_query_len || query_len > p.max_query_len || context <= 0) return 0;
  const int seen = p.sliding_window > 0 ? max(0, context - query_len + 1 - p.sliding_window) : 0;
  first = seen >> p.tile_shift;
  return ((context - 1) >> p.tile_shift) - first + 1;
}

__device__ __forceinline__ int chunk_tiles(const Params& p, int num_tiles) {
  return max(max(1, kMinChunkTokens >> p.tile_shift), (num_tiles + kMaxChunks - 1) / kMaxChunks);
}

// All tiles, cut into as many ranges: those of thread block `index`, and the inverse.
class Ranges {
 public:
  __device__ Ranges(int total, int blocks)
      : blocks_(min(total, blocks)), each_(total / max(blocks_, 1)), longer_(total - each_ * blocks_) {}

  __device__ int blocks() const { return blocks_; }
  __device__ int begin(int index) const { return index * each_ + min(index, longer_); }
  __device__ int owner(int tile) const {
    const int split = longer_ * (each_ + 1);
    return tile < split ? tile / (each_ + 1) : longer_ + (tile - split) / each_;
  }

 private:
  int blocks_, each_, longer_;  // the first ones have one more
};

// Goes through the segments of the range of a thread block. Every thread has the same one; all threads of a warp make
// it together.
class Walker {
 public:
  __device__ Walker(const Params& p, int lane) : p_(p), ranges_(count(lane), gridDim.x) {
    if (static_cast<int>(blockIdx.x) >= ranges_.blocks()) return;
    at_ = ranges_.begin(blockIdx.x);
    end_ = ranges_.begin(blockIdx.x + 1);
    find(lane);
  }

  __device__ const Ranges& ranges() const { return ranges_; }

  __device__ bool next(Segment& s) {
    const int heads = p_.num_kv_heads * p_.column_tiles;
    while (at_ < end_) {
      const int offset = at_ - base_;
      if (offset >= tiles_ * heads) {
        base_ += tiles_ * heads;
        query_start_ += query_len_;
        load(++seq_);
        continue;
      }
      const int head = offset / tiles_, tile = offset - head * tiles_;
      int count = min(tiles_ - tile, end_ - at_);
      if (p_.batch_invariant) {
        const int chunk = chunk_tiles(p_, tiles_);
        const int into = tile % chunk;
        count = min(tiles_ - tile, chunk - into);
        if (into != 0) {  // another thread block's
          at_ += count;
          continue;
        }
      }
      s = {seq_,   head,          query_start_,          query_len_, context_,
           first_, first_ + tile, first_ + tile + count, tiles_,     at_ - tile};
      at_ += count;
      return true;
    }
    return false;
  }

 private:
  __device__ void load(int seq) {
    query_len_ = seq < p_.num_seqs ? p_.query_lens[seq] : 0;
    context_ = seq < p_.num_seqs ? p_.context_lens[seq] : 0;
    tiles_ = tile_count(p_, query_len_, context_, first_);
  }

  // Tiles of all sequences.
  __device__ int count(int lane) {
    const int heads = p_.num_kv_heads * p_.column_tiles;
    int total = 0;
    for (int seq = lane; seq < p_.num_seqs; seq += 32) {
      load(seq);
      total += tiles_ * heads;
    }
    return __reduce_add_sync(~0U, total);
  }

  // The sequence that the range begins in, and what comes before it.
  __device__ void find(int lane) {
    const int heads = p_.num_kv_heads * p_.column_tiles;
    base_ = query_start_ = 0;
    for (int first_seq = 0;; first_seq += 32) {
      load(first_seq + lane);
      int tiles = tiles_ * heads, tokens = query_len_;
      for (int delta = 1; delta < 32; delta *= 2) {
        const int more_tiles = __shfl_up_sync(~0U, tiles, delta), more_tokens = __shfl_up_sync(~0U, tokens, delta);
        if (lane >= delta) {
          tiles += more_tiles;
          tokens += more_tokens;
        }
      }
      const unsigned later = __ballot_sync(~0U, at_ < base_ + tiles);
      if (later != 0) {
        const int here = __ffs(static_cast<int>(later)) - 1;
        seq_ = first_seq + here;
        base_ += __shfl_sync(~0U, tiles - tiles_ * heads, here);
        query_start_ += __shfl_sync(~0U, tokens - query_len_, here);
        query_len_ = __shfl_sync(~0U, query_len_, here);
        context_ = __shfl_sync(~0U, context_, here);
        tiles_ = tile_count(p_, query_len_, context_, first_);
        return;
      }
      base_ += __shfl_sync(~0U, tiles, 31);
      query_start_ += __shfl_sync(~0U, tokens, 31);
    }
  }

  const Params& p_;
  int seq_ = 0, query_start_ = 0, query_len_ = 0, context_ = 0, tiles_ = 0, first_ = 0;
  int base_ = 0;  // tiles of all sequences before seq_
  Ranges ranges_;
  int at_ = 0, end_ = 0;
};

// Columns of a segment that are queries.
__device__ __forceinline__ int used_columns(const Params& p, const Segment& s, int columns) {
  return min(columns, s.query_len * p.group - s.head % p.column_tiles * columns);
}

// The row of the output that column `column` of a segment is.
__device__ __forceinline__ int64_t output_row(const Params& p, const Segment& s, int columns, int column) {
  const int index = s.head % p.column_tiles * columns + column;
  const int token = s.query_len == 1 ? 0 : index / p.group;
  const int head = s.head / p.column_tiles * p.group + (index - token * p.group);
  return static_cast<int64_t>(s.query_start + token) * p.num_heads + head;
}

}  // namespace kvservice::decode
