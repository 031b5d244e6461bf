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

// A tile with no more keys, as those of short prompts, has a step of this many keys.
constexpr int kFewKeys = 64;

// The number of counters that are not for reductions.
constexpr int kScheduleCounters = 2;

struct Tile {
  int32_t seq = 0;
  int32_t kv_head = 0;
  int32_t first_row = 0;
  int32_t query_len = 0;
  int32_t context_len = 0;
  int32_t begin = 0;  // keys from the first that the first row sees to the last that the last row sees
  int32_t end = 0;
  int32_t chunk = 0;
  int32_t num_chunks = 1;
  int32_t first_key = 0;  // of the chunk
  int32_t num_steps = 0;
  int32_t partial = 0;      // index for the first chunk
  int64_t first_token = 0;  // of the sequence, in query

  __device__ int num_rows(const Args& a) const { return query_len * a.group; }
  __device__ bool has_few_keys() const { return end - first_key <= kFewKeys; }
  // Returns the position of a row's token in its sequence. Rows past the last return the last position.
  __device__ int position(const Args& a, int row) const {
    return context_len - query_len + min(row / a.group, query_len - 1);
  }
  __device__ int first_visible(const Args& a, int position) const {
    return a.sliding_window > 0 ? max(0, position - a.sliding_window + 1) : 0;
  }
  // Returns the index of a row in the query's [num_tokens, num_heads].
  __device__ int64_t query_row(const Args& a, int row) const { return query_row(a, row, position(a, row)); }
  __device__ int64_t query_row(const Args& a, int row, int position) const {
    const int token = position - (context_len - query_len);
    return (first_token + token) * a.num_heads + kv_head * a.group + (row - token * a.group);
  }
  __device__ const int32_t* table(const Args& a) const { return a.block_tables + seq * a.max_blocks; }
};

// 32 sequences, which a scheduler has at hand. In shared memory, because registers are scarce.
struct ScheduledSequences {
  struct One {
    int64_t units_end;  // chunks of tiles of all sequences up to this one
    int64_t tokens_end;
    int32_t units;
    int32_t partials_end;
    int32_t query_len;
    int32_t context_len;
    int32_t row_tiles;  // per KV head
    int32_t steps;      // of the last row tile
    int32_t chunks;
  } at[32];
  int32_t base;       // the first sequence
  int32_t min_steps;  // per chunk
};

// Numbers the chunks of all tiles of a launch: by sequence, then by head, then longest tile first, so that the last
// tiles to run are short. The first chunk of a thread block is its own index; later ones are assigned in order of
// request. All lanes of one warp call `start` and `next`; other warps may have the object.
template <int kRows, int kKeys>
class TileScheduler {
 public:
  __device__ TileScheduler(const Args& a, ScheduledSequences* sequences)
      : a_(a), sequences_(*sequences), next_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {}

  __device__ void start() {
    const int min_steps = a_.max_partials > 0 ? plan() : INT_MAX;
    if (lane() == 0) sequences_.min_steps = min_steps;
    __syncwarp();
    load(0);
  }

  // Writes the next tile to shared memory, for the warp to see. Returns false, and a tile without steps, if there are
  // no more.
  __device__ bool next(Tile* tile) {
    do {
      const int index = static_cast<int>(gridDim.x) + __shfl_sync(~0U, next_, 0);
      uint32_t after;
      while ((after = __ballot_sync(~0U, index < sequences_.at[lane()].units_end)) == 0) {
        const int base = sequences_.base + 32;
        if (base >= a_.num_seqs) {
          if (lane() == 0) tile->num_steps = 0;
          return false;
        }
        load(base);
      }
      // Nothing waits for the answer before the next call.
      if (lane() == 0) {
        next_ = ptx::add_relaxed(a_.counters, 1);
        const int owner = __ffs(after) - 1;
        make(sequences_.base + owner, sequences_.at[owner], index, tile);
      }
      __syncwarp();
    } while (tile->num_steps <= 0);
    return true;
  }

 private:
  static __device__ int lane() { return static_cast<int>(threadIdx.x % 32); }

  using One = ScheduledSequences::One;

  // Loads 32 sequences from `base` on.
  __device__ void load(int base) {
    const One before = base == 0 ? One{} : sequences_.at[31];
    __syncwarp();
    const Sequence s(a_, int64_t{base} + lane(), sequences_.min_steps);
    const int units = s.row_tiles * s.chunks * a_.num_kv_heads;
    One& one = sequences_.at[lane()];
    one.units_end = before.units_end + sum_up_to(static_cast<int64_t>(units));
    one.tokens_end = before.tokens_end + sum_up_to(static_cast<int64_t>(s.query_len));
    one.partials_end = before.partials_end + sum_up_to(s.chunks > 1 ? units : 0);
    one.units = units;
    one.query_len = s.query_len;
    one.context_len = s.context_len;
    one.row_tiles = s.row_tiles;
    one.steps = s.steps;
    one.chunks = s.chunks;
    if (lane() == 0) sequences_.base = base;
    __syncwarp();
  }

  // A tile may have fewer chunks than others of its sequence: then some have no steps.
  __device__ void make(int seq, const One& one, int index, Tile* tile) const {
    const int within = static_cast<int>(index - (one.units_end - one.units)), chunks = one.chunks;
    const int row_tile = chunks == 1 ? within : within / chunks;
    tile->seq = seq;
    tile->kv_head = row_tile / one.row_tiles;
    tile->first_row = (one.row_tiles - 1 - (row_tile - tile->kv_head * one.row_tiles)) * kRows;
    tile->query_len = one.query_len;
    tile->context_len = one.context_len;
    tile->first_token = one.tokens_end - one.query_len;
    tile->begin = a_.sliding_window > 0 ? tile->first_visible(a_, tile->position(a_, tile->first_row)) : 0;
    tile->end = tile->position(a_, tile->first_row + kRows - 1) + 1;
    const int steps = (tile->end - 1) / kKeys - tile->begin / kKeys + 1;
    int each = steps;
    tile->chunk = 0;
    tile->num_chunks = 1;
    if (chunks > 1) {
      each = max((one.steps + chunks - 1) / chunks, (steps + chunks - 1) / chunks);
      tile->chunk = within - row_tile * chunks;
      tile->num_chunks = (steps + each - 1) / each;
    }
    tile->first_key = (tile->begin / kKeys + tile->chunk * each) * kKeys;
    tile->num_steps = min(each, steps - tile->chunk * each);
    tile->partial = one.partials_end - one.units + within - tile->chunk;
  }

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

  // Returns the minimal number of steps per chunk that lets the launch finish soonest.
  __device__ int plan() const {
    const Work whole = work(a_, INT_MAX);
    const float share = whole.steps / gridDim.x;
    int min_steps = INT_MAX;
    if (whole.longest * 8 <= share) return min_steps;
    float best = end_of(whole, share);
#pragma unroll 1
    for (int parts = 1; parts <= 4; ++parts) {
      const int steps = max(kMinChunkSteps, static_cast<int>(ceilf(share / parts)));
      const Work cut = work(a_, steps);
      const float end = end_of(cut, share) + kReduceSteps;
      if (cut.partials <= a_.max_partials && end < best) {
        best = end;
        min_steps = steps;
      }
    }
    return min_steps;
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

  const Args& a_;
  ScheduledSequences& sequences_;
  int next_;  // index of the next chunk past those of gridDim.x, in the first lane
};

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
