// The arguments of a decode launch, and the distribution of its work over thread blocks.
//
// The KV tiles of all sequences, KV heads and passes form one list, which is divided into equal ranges. Each thread
// block computes its own range from the lengths on the device.
#pragma once

#include "cuda/attention.h"

namespace kvservice::decode {

// Chunks of batch-invariant mode. Each costs an epilogue and a partial result, so chunks are long, and sequences of up
// to kMaxWholeTokens have only one. The chunks of a single long sequence with 8 KV heads still occupy nearly every SM.
constexpr int kMaxChunks = 16;
constexpr int kMinChunkTokens = 512;
constexpr int kMaxWholeTokens = 1024;

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

constexpr int kSplitsPerGroup = 16;

// The queries and the epilogue of a work tile cost as much as this many KV tiles.
constexpr int kWorkTileCost = 2;

// The KV tiles of one (sequence, KV head, pass) that one thread block processes.
struct WorkTile {
  int seq;  // -1: no more work
  int kv_head;
  int first_query;  // of the pass, within the queries of the KV head
  int query_start, query_len, context;
  int tile, end_tile;  // counted from position 0
};

// Where the result of a work tile goes. The thread blocks that share a (sequence, KV head, pass) reduce their partial
// results in groups of kSplitsPerGroup neighbours. In batch-invariant mode, they reduce all chunks at once.
struct SplitKv {
  int partial;                     // index of the partial result; -1: the output
  int chunks, own_chunks;          // of all thread blocks, of this one; 0: no reduction here, or not batch-invariant
  int first_chunk, counter;        // index of the partial result of the first chunk; counter of finished chunks
  int groups;                      // 0: no reduction here
  int group_block, group_size;     // the group of this thread block
  int group_partial;               // of the group's first block; others use the first of their two
  int first_block, first_partial;  // over all groups
};

__device__ __forceinline__ int tile_count(const Params& p, int query_len, int context, int& first) {
  first = 0;
  if (query_len < p.min_query_len || query_len > p.max_query_len || context <= 0) return 0;
  const int seen = p.sliding_window > 0 ? max(0, context - query_len + 1 - p.sliding_window) : 0;
  first = seen >> p.tile_shift;
  return ((context - 1) >> p.tile_shift) - first + 1;
}

// Returns the tiles of a chunk, from the length of the sequence alone. The last chunk may be shorter.
__device__ __forceinline__ int chunk_tiles(const Params& p, int num_tiles) {
  if (num_tiles <= max(1, kMaxWholeTokens >> p.tile_shift)) return num_tiles;
  return max(max(1, kMinChunkTokens >> p.tile_shift), (num_tiles + kMaxChunks - 1) / kMaxChunks);
}

__device__ __forceinline__ int chunk_count(const Params& p, int num_tiles) {
  if (num_tiles == 0) return 0;
  const int chunk = chunk_tiles(p, num_tiles);
  return (num_tiles + chunk - 1) / chunk;
}

// Divides all work into equal ranges. begin() is the range of a thread block, owner() is the inverse.
class Ranges {
 public:
  Ranges() = default;
  __device__ Ranges(int total, int blocks)
      : blocks_(min(total, blocks)), each_(total / max(blocks_, 1)), longer_(total - each_ * blocks_) {}

  __device__ int blocks() const { return blocks_; }
  __device__ int begin(int index) const { return index * each_ + min(index, longer_); }
  __device__ int owner(int tile) const {
    const int split = longer_ * (each_ + 1);
    return tile < split ? tile / (each_ + 1) : longer_ + (tile - split) / each_;
  }

 private:
  int blocks_ = 0, each_ = 0, longer_ = 0;  // the first longer_ ranges have one more
};

// Iterates over the work tiles of a thread block. All threads of a warp construct it together.
//
// The work of a sequence and head is its KV tiles, and before them kWorkTileCost units for what a work tile costs: a
// thread block in whose range a sequence and head begins has one work tile more, and gets fewer KV tiles. With few
// sequences and heads, or few KV tiles for each thread block, only KV tiles count.
//
// In batch-invariant mode a work tile is a whole chunk, and belongs to the thread block in whose range it begins. There
// are no more ranges than chunks, so that few chunks are spread over as many SMs.
class WorkTileScheduler {
 public:
  __device__ WorkTileScheduler(const Params& p, int lane) : p_(p) {
    const Sums before = sum_lanes(lane);
    if (static_cast<int>(blockIdx.x) >= ranges_.blocks()) return;
    at_ = ranges_.begin(blockIdx.x);
    end_ = ranges_.begin(blockIdx.x + 1);
    find(before, lane);
  }

  __device__ bool next(WorkTile& s) {
    const int heads = p_.num_kv_heads * p_.num_passes;
    while (at_ < end_) {
      const int offset = at_ - base_, work = work_of(tiles_);
      if (offset >= work * heads) {
        base_ += work * heads;
        query_start_ += query_len_;
        load(++seq_);
        continue;
      }
      const int head = offset / work, tile = offset - head * work - cost_;
      if (tile < 0) {
        at_ = min(at_ - tile, end_);
        continue;
      }
      int count = min(tiles_ - tile, end_ - at_);
      if (p_.batch_invariant) {
        const int chunk = chunk_tiles(p_, tiles_), into = tile % chunk;
        count = min(tiles_ - tile, chunk - into);
        if (into != 0) {  // belongs to another thread block
          at_ += count;
          continue;
        }
        own_chunks_ = start_ == at_ - tile ? own_chunks_ + 1 : 1;
      }
      s.seq = seq_;
      s.kv_head = head / p_.num_passes;
      s.first_query = (head - s.kv_head * p_.num_passes) * p_.columns;
      s.query_start = query_start_;
      s.query_len = query_len_;
      s.context = context_;
      s.tile = first_ + tile;
      s.end_tile = first_ + tile + count;
      start_ = at_ - tile;
      at_ += count;
      return true;
    }
    s.seq = -1;
    return false;
  }

  // Returns the split of the last work tile that next() returned. Separate from next(), because it is slow and is
  // needed late.
  __device__ SplitKv split_of(const WorkTile& s) const {
    SplitKv split;
    split.partial = -1;
    split.groups = split.chunks = 0;
    if (s.end_tile - s.tile == tiles_) return split;
    const int block = blockIdx.x;
    split.first_block = ranges_.owner(start_);
    const int first_begin = ranges_.begin(split.first_block);
    split.first_partial = 2 * split.first_block + (first_begin >= start_ - cost_ ? 0 : 1);
    if (p_.batch_invariant) {
      split_chunks(s, split);
      return split;
    }
    // A thread block has two partial results: one for the work tile at the beginning of its range, one for another at
    // its end.
    const int last_block = ranges_.owner(start_ + tiles_ - 1);
    split.partial = block == split.first_block ? split.first_partial : 2 * block;
    split.groups = (last_block - split.first_block) / kSplitsPerGroup + 1;
    split.group_block = block - (block - split.first_block) % kSplitsPerGroup;
    split.group_size = min(last_block - split.group_block + 1, kSplitsPerGroup);
    split.group_partial = split.group_block == split.first_block ? split.first_partial : 2 * split.group_block;
    return split;
  }

 private:
  // Every chunk has a partial result of its own. The thread blocks of a sequence and head count their chunks when they
  // have finished the last of them; at most one sequence and head that spans several thread blocks has first_partial.
  __device__ void split_chunks(const WorkTile& s, SplitKv& split) const {
    const int item = (seq_ * p_.num_kv_heads + s.kv_head) * p_.num_passes + s.first_query / p_.columns;
    split.first_chunk = item * kMaxChunks;
    split.partial = split.first_chunk + (s.tile - first_) / chunk_tiles(p_, tiles_);
    split.counter = split.first_partial;
    split.own_chunks = own_chunks_;
    const bool last_own = s.end_tile - first_ == tiles_ || at_ >= end_;
    split.chunks = last_own ? chunk_count(p_, tiles_) : 0;
  }

  __device__ void load(int seq) {
    query_len_ = seq < p_.num_seqs ? p_.query_lens[seq] : 0;
    context_ = seq < p_.num_seqs ? p_.context_lens[seq] : 0;
    tiles_ = tile_count(p_, query_len_, context_, first_);
  }

  // Work and query tokens of some sequences.
  struct Sums {
    int work, tokens;
  };

  // Returns the work of a sequence and head with so many tiles.
  __device__ int work_of(int tiles) const { return tiles == 0 ? 0 : tiles + cost_; }

  __device__ int seqs_per_lane() const { return (p_.num_seqs + 31) / 32; }

  // All lanes take equally many neighbouring sequences. Computes the ranges, and returns the sums of the lanes before
  // this one.
  __device__ Sums sum_lanes(int lane) {
    constexpr int kInFlight = 8;
    const int heads = p_.num_kv_heads * p_.num_passes, each = seqs_per_lane();
    int tiles = 0, tokens = 0, items = 0, chunks = 0;
    for (int first = 0; first < each; first += kInFlight) {
      int query_lens[kInFlight], contexts[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int seq = lane * each + first + i;
        const bool has = first + i < each && seq < p_.num_seqs;
        query_lens[i] = has ? p_.query_lens[seq] : 0;
        contexts[i] = has ? p_.context_lens[seq] : 0;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        int skipped;
        const int count = tile_count(p_, query_lens[i], contexts[i], skipped);
        tiles += count * heads;
        tokens += query_lens[i];
        items += count > 0 ? heads : 0;
        if (p_.batch_invariant) chunks += chunk_count(p_, count) * heads;
      }
    }
    const int blocks = gridDim.x;
    const bool many = __reduce_add_sync(~0U, items) >= blocks / 8 && __reduce_add_sync(~0U, tiles) >= 2 * blocks;
    cost_ = many && !p_.batch_invariant ? kWorkTileCost : 0;
    const Sums own = {tiles + items * cost_, tokens}, all = sum_to(own, lane);
    ranges_ = {__shfl_sync(~0U, all.work, 31),
               p_.batch_invariant ? min(blocks, __reduce_add_sync(~0U, chunks)) : blocks};
    return {all.work - own.work, all.tokens - own.tokens};
  }

  // Returns the sums up to and with this lane.
  __device__ static Sums sum_to(Sums sums, int lane) {
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const int work = __shfl_up_sync(~0U, sums.work, delta), tokens = __shfl_up_sync(~0U, sums.tokens, delta);
      if (lane >= delta) {
        sums.work += work;
        sums.tokens += tokens;
      }
    }
    return sums;
  }

  // Finds the sequence in which the range begins, and the sums before it: the last lane that begins there or before,
  // and then the sequence among that lane's.
  __device__ void find(Sums before, int lane) {
    const int heads = p_.num_kv_heads * p_.num_passes, each = seqs_per_lane();
    const int owner = last_lane(before.work <= at_);
    seq_ = owner * each;
    base_ = __shfl_sync(~0U, before.work, owner);
    query_start_ = __shfl_sync(~0U, before.tokens, owner);
    for (int left = each; left > 1;) {
      load(seq_ + lane);
      const Sums own = {work_of(tiles_) * heads, query_len_}, all = sum_to(own, lane);
      const bool here = at_ < base_ + __shfl_sync(~0U, all.work, 31);
      const int last = here ? last_lane(base_ + all.work - own.work <= at_) : 31;
      base_ += __shfl_sync(~0U, here ? all.work - own.work : all.work, last);
      query_start_ += __shfl_sync(~0U, here ? all.tokens - own.tokens : all.tokens, last);
      seq_ += here ? last : 32;
      left = here ? 0 : left - 32;
    }
    load(seq_);
  }

  __device__ static int last_lane(bool condition) {
    return 31 - __clz(static_cast<int>(__ballot_sync(~0U, condition)));
  }

  const Params& p_;
  int seq_ = 0, query_start_ = 0, query_len_ = 0, context_ = 0, tiles_ = 0, first_ = 0;
  int cost_ = 0;  // of a work tile
  int base_ = 0;  // work of all sequences before seq_
  Ranges ranges_;
  int at_ = 0, end_ = 0;
  int start_ = -1;      // index of the first tile of the current sequence and head
  int own_chunks_ = 0;  // chunks of the current sequence and head that next() has returned
};

// Returns the number of columns of a work tile that hold queries.
__device__ __forceinline__ int used_columns(const Params& p, const WorkTile& s) {
  return min(p.columns, s.query_len * p.group - s.first_query);
}

// Returns the output row of column `column` of a work tile.
__device__ __forceinline__ int64_t output_row(const Params& p, const WorkTile& s, int column) {
  const int index = s.first_query + column;
  const int token = s.query_len == 1 ? 0 : index / p.group;
  const int head = s.kv_head * p.group + (index - token * p.group);
  return static_cast<int64_t>(s.query_start + token) * p.num_heads + head;
}

}  // namespace kvservice::decode
