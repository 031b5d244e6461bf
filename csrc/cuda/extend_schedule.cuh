// The tile scheduler of the extend kernels: assigns the tiles of a launch to thread blocks, on the device, from the
// lengths.
//
// A tile is a number of rows of one sequence and KV head, which share their loads of K and V. It is processed in steps
// of kKeys keys. If there are fewer tiles than thread blocks, or if some tiles are much longer than others, the steps
// of a tile are divided into chunks, whose results are reduced (split-KV).
#pragma once

#include <climits>

#include "cuda/extend.cuh"

namespace kvservice {
namespace extend {

// The most chunks per tile, the fewest steps for which a chunk pays, and the cost of a reduction, in steps.
constexpr int kMaxChunks = 64, kMinChunkSteps = 4, kReduceSteps = 2;

// The number of counters that are not for reductions.
constexpr int kScheduleCounters = 2;

struct Tile {
  int32_t seq = 0;
  int32_t kv_head = 0;
  int32_t first_row = 0;
  int32_t query_len = 0;
  int32_t context_len = 0;
  int32_t chunk = 0;
  int32_t max_chunks = 1;   // of the tiles of this sequence
  int32_t chunk_steps = 0;  // steps per chunk
  int32_t partial = 0;      // index for the first chunk
  int64_t first_token = 0;  // of the sequence, in query

  __device__ int num_rows(const Args& a) const { return query_len * a.group; }
  // Returns the position of a row's token in its sequence. Rows past the last return the last position.
  __device__ int position(const Args& a, int row) const {
    return context_len - query_len + min(row / a.group, query_len - 1);
  }
  __device__ int first_visible(const Args& a, int position) const {
    return a.sliding_window > 0 ? max(0, position - a.sliding_window + 1) : 0;
  }
  // Returns the index of a row in the query's [num_tokens, num_heads].
  __device__ int64_t query_row(const Args& a, int row) const {
    return (first_token + row / a.group) * a.num_heads + kv_head * a.group + row % a.group;
  }
  __device__ const int32_t* table(const Args& a) const { return a.block_tables + seq * a.max_blocks; }
};

// The steps of one chunk of a tile. A tile ranges from the first key that its first row sees to the last key that its
// last row sees.
template <int kRows, int kKeys>
struct Steps {
  int begin;  // visible keys of the tile
  int end;
  int num_chunks;
  int first;  // key of the first step
  int count;  // not positive if the tile has fewer chunks than others of its sequence

  __device__ Steps(const Args& a, const Tile& tile)
      : begin(tile.first_visible(a, tile.position(a, tile.first_row))),
        end(tile.position(a, tile.first_row + kRows - 1) + 1) {
    const int all = (end - 1) / kKeys - begin / kKeys + 1;
    const int each = max(tile.chunk_steps, (all + tile.max_chunks - 1) / tile.max_chunks);
    num_chunks = (all + each - 1) / each;
    first = (begin / kKeys + tile.chunk * each) * kKeys;
    count = min(each, all - tile.chunk * each);
  }
};

// Numbers the chunks of all tiles of a launch: by sequence, then by head, then longest tile first, so that the last
// tiles to run are short. All lanes of a warp call it; indexes must not decrease from call to call.
template <int kRows, int kKeys>
class TileScheduler {
 public:
  __device__ void start(const Args& a) {
    min_steps_ = INT_MAX;
    partials_ = 0;
    base_ = units_ = tokens_ = 0;
    if (a.max_partials > 0) plan(a);
  }

  __device__ bool find(const Args& a, int64_t index, Tile* tile) {
    const int lane = threadIdx.x % 32;
    for (; base_ < a.num_seqs; base_ += 32) {
      const Sequence s(a, base_ + lane, min_steps_);
      const int64_t units = static_cast<int64_t>(s.row_tiles) * s.chunks * a.num_kv_heads;
      const int64_t units_end = units_ + sum_up_to(units);
      const int64_t tokens_end = tokens_ + sum_up_to(static_cast<int64_t>(s.query_len));
      const int partials_end = partials_ + sum_up_to(s.chunks > 1 ? static_cast<int>(units) : 0);
      const uint32_t after = __ballot_sync(~0U, index < units_end);
      if (after != 0) {
        const int owner = __ffs(after) - 1;
        const int row_tiles = __shfl_sync(~0U, s.row_tiles, owner), chunks = __shfl_sync(~0U, s.chunks, owner);
        const int within = static_cast<int>(index - __shfl_sync(~0U, units_end - units, owner));
        const int row_tile = within / chunks;
        tile->seq = static_cast<int32_t>(base_) + owner;
        tile->kv_head = row_tile / row_tiles;
        tile->first_row = (row_tiles - 1 - row_tile % row_tiles) * kRows;
        tile->query_len = __shfl_sync(~0U, s.query_len, owner);
        tile->context_len = __shfl_sync(~0U, s.context_len, owner);
        tile->chunk = within % chunks;
        tile->max_chunks = chunks;
        tile->chunk_steps = (__shfl_sync(~0U, s.steps, owner) + chunks - 1) / chunks;
        tile->partial = __shfl_sync(~0U, partials_end - static_cast<int>(units), owner) + within - tile->chunk;
        tile->first_token = __shfl_sync(~0U, tokens_end, owner) - tile->query_len;
        return true;
      }
      units_ = __shfl_sync(~0U, units_end, 31);
      tokens_ = __shfl_sync(~0U, tokens_end, 31);
      partials_ = __shfl_sync(~0U, partials_end, 31);
    }
    return false;
  }

 private:
  struct Sequence {
    int query_len = 0;
    int context_len = 0;
    int row_tiles = 0;  // per KV head
    int steps = 0;      // of the last row tile
    int chunks = 0;

    __device__ Sequence(const Args& a, int64_t seq, int min_steps) {
      if (seq >= a.num_seqs) return;
      query_len = a.query_lens[seq];
      context_len = a.context_lens[seq];
      if (query_len <= 0 || query_len < a.min_query_len || query_len > a.max_query_len) return;
      row_tiles = (query_len * a.group + kRows - 1) / kRows;
      Tile last;
      last.query_len = query_len;
      last.context_len = context_len;
      const int begin = last.first_visible(a, last.position(a, (row_tiles - 1) * kRows));
      steps = (context_len - 1) / kKeys - begin / kKeys + 1;
      chunks = max(1, min(kMaxChunks, steps / min_steps));
    }
  };

  // The totals of all sequences if each chunk has at least min_steps steps.
  struct Work {
    int units;
    int partials;
    int longest;  // steps of the longest chunk
    float steps;
  };

  // Chooses the minimal number of steps per chunk that lets the launch finish soonest.
  __device__ void plan(const Args& a) {
    const Work whole = work(a, INT_MAX);
    const float share = whole.steps / gridDim.x;
    if (whole.longest * 8 <= share) return;
    float best = end_of(whole, share);
#pragma unroll 1
    for (int parts = 1; parts <= 4; ++parts) {
      const int steps = max(kMinChunkSteps, static_cast<int>(ceilf(share / parts)));
      const Work cut = work(a, steps);
      const float end = end_of(cut, share) + kReduceSteps;
      if (cut.partials <= a.max_partials && end < best) {
        best = end;
        min_steps_ = steps;
      }
    }
  }

  static __device__ Work work(const Args& a, int min_steps) {
    Work sum{};
#pragma unroll 4
    for (int64_t seq = threadIdx.x % 32; seq < a.num_seqs; seq += 32) {
      const Sequence s(a, seq, min_steps);
      const int units = s.row_tiles * s.chunks * a.num_kv_heads;
      sum.units += units;
      sum.partials += s.chunks > 1 ? units : 0;
      sum.longest = max(sum.longest, s.chunks > 1 ? (s.steps + s.chunks - 1) / s.chunks : s.steps);
      sum.steps += static_cast<float>(s.row_tiles * a.num_kv_heads) * s.steps;
    }
    for (int step = 16; step > 0; step /= 2) sum.steps += __shfl_xor_sync(~0U, sum.steps, step);
    return {static_cast<int>(__reduce_add_sync(~0U, sum.units)), static_cast<int>(__reduce_add_sync(~0U, sum.partials)),
            static_cast<int>(__reduce_max_sync(~0U, sum.longest)), sum.steps};
  }

  // Returns an upper bound for the end of the last thread block, in steps.
  static __device__ float end_of(const Work& work, float share) {
    const int waves = (work.units + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    return fminf(static_cast<float>(waves) * work.longest, share + work.longest);
  }

  // Returns the inclusive prefix sum over the lanes of the warp.
  template <typename T>
  static __device__ T sum_up_to(T value) {
    for (int step = 1; step < 32; step *= 2) {
      const T other = __shfl_up_sync(~0U, value, step);
      if (threadIdx.x % 32 >= step) value += other;
    }
    return value;
  }

  int min_steps_;  // per chunk
  int partials_;
  int64_t base_;
  int64_t units_;
  int64_t tokens_;
};

// The first tile of a thread block is its own index; later tiles are assigned in order of request. One thread calls it.
__device__ inline int64_t next_tile(const Args& a) { return gridDim.x + atomicAdd(a.counters, 1); }

// One thread of each block calls this after its last request. The last block resets the counters to zero.
__device__ inline void reset_counters(const Args& a) {
  __threadfence();
  if (atomicAdd(a.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    a.counters[0] = 0;
    a.counters[1] = 0;
  }
}

}  // namespace extend
}  // namespace kvservice
