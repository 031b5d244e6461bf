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
    return context_len - query_len + min(token_of_row(a, row), query_len - 1);
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

// The sequences that a scheduler has at hand: up to kPerLane adjacent ones for each lane of its warp. Arrays are
// indexed by number and lane. In shared memory, because registers are scarce.
template <int kPerLane>
struct ScheduledSequences {
  // The first three are sums over all sequences up to this one.
  int64_t tokens_end[kPerLane][32];
  int32_t units_end[kPerLane][32];  // chunks of tiles
  int32_t partials_end[kPerLane][32];
  int32_t query_len[kPerLane][32];
  int32_t context_len[kPerLane][32];
  int32_t row_tiles[kPerLane][32];  // per KV head
  int32_t steps[kPerLane][32];      // of the last row tile
  int32_t chunks[kPerLane][32];
  int32_t base;       // the first sequence
  int32_t per_lane;   // how many each lane has
  int32_t min_steps;  // per chunk
};

// Numbers the chunks of all tiles of a launch: by sequence, then by head, then longest tile first, so that the last
// tiles to run are short. The first chunk of a thread block is its own index; later ones are assigned in order of
// request. All lanes of one warp call `start` and `next`; other warps may have the object.
//
// kPerLane is how many sequences each lane has at hand: several if thread blocks go through many sequences of few
// tiles. Without kSplits a tile is not divided.
template <int kRows, int kKeys, int kPerLane = 1, bool kSplits = true>
class TileScheduler {
 public:
  using Sequences = ScheduledSequences<kPerLane>;

  __device__ TileScheduler(const Args& a, Sequences* sequences)
      : a_(a), sequences_(*sequences), next_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {}

  __device__ void start() {
    const int min_steps = kSplits && a_.max_partials > 0 ? plan() : INT_MAX;
    if (lane() == 0) sequences_.min_steps = min_steps;
    __syncwarp();
    load(0, {});
  }

  // Writes the next tile to shared memory, for the warp to see. Returns false, and a tile without steps, if there are
  // no more.
  __device__ bool next(Tile* tile) {
    do {
      const int index = static_cast<int>(gridDim.x) + __shfl_sync(~0U, next_, 0);
      if (index < 0) {
        if (lane() == 0) tile->num_steps = 0;
        return false;
      }
      uint32_t after;
      while ((after = __ballot_sync(~0U, index < sequences_.units_end[per_lane() - 1][lane()])) == 0) {
        const int last = per_lane() - 1, base = sequences_.base + 32 * per_lane();
        if (base >= a_.num_seqs) {
          if (lane() == 0) tile->num_steps = 0;
          return false;
        }
        load(base,
             {sequences_.units_end[last][31], sequences_.partials_end[last][31], sequences_.tokens_end[last][31]});
      }
      const int owner = __ffs(after) - 1;
      int number = 0;
      if (kPerLane > 1) {
        const bool later = lane() < per_lane() && index < sequences_.units_end[lane() % kPerLane][owner];
        number = __ffs(__ballot_sync(~0U, later)) - 1;
      }
      // Nothing waits for the answer before the next call.
      if (lane() == 0) {
        next_ = a_.single ? INT_MIN : ptx::increment_relaxed(a_.counters);
        make(owner, number, index, tile);
      }
      __syncwarp();
    } while (tile->num_steps <= 0);
    return true;
  }

 private:
  static __device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int per_lane() const { return kPerLane > 1 ? sequences_.per_lane : 1; }

  struct Sequence {
    int row_tiles = 0;  // per KV head
    int steps = 0;      // of the last row tile
    int chunks = 0;

    __device__ Sequence(const Args& a, int query_len, int context_len, int min_steps) {
      if (query_len <= 0 || query_len < a.min_query_len || query_len > a.max_query_len) return;
      row_tiles = (query_len * a.group + kRows - 1) / kRows;
      Tile last;
      last.query_len = query_len;
      last.context_len = context_len;
      const int begin = last.first_visible(a, last.position(a, (row_tiles - 1) * kRows));
      steps = (context_len - 1) / kKeys - begin / kKeys + 1;
      chunks = kSplits ? max(1, min(kMaxChunks, steps / min_steps)) : 1;
    }
    __device__ int units(const Args& a) const { return row_tiles * chunks * a.num_kv_heads; }
    __device__ int partials(const Args& a) const { return chunks > 1 ? units(a) : 0; }
  };

  struct Ends {
    int units;
    int partials;
    int64_t tokens;
  };

  // Loads the sequences from `base` on; `before` are the ends of the one before it.
  __device__ void load(int base, const Ends& before) {
    __syncwarp();
    const int per_lane = static_cast<int>(min(int64_t{kPerLane}, (a_.num_seqs - base + 31) / 32));
    const int64_t first = base + int64_t{per_lane} * lane();
    int units = 0, partials = 0;
    int64_t tokens = 0;
#pragma unroll(kPerLane > 1 ? 4 : 1)
    for (int i = 0; i < per_lane; ++i) {
      const bool exists = first + i < a_.num_seqs;
      const int query_len = exists ? a_.query_lens[first + i] : 0,
                context_len = exists ? a_.context_lens[first + i] : 0;
      sequences_.query_len[i][lane()] = query_len;
      sequences_.context_len[i][lane()] = context_len;
      const Sequence s(a_, query_len, context_len, sequences_.min_steps);
      sequences_.row_tiles[i][lane()] = s.row_tiles;
      sequences_.steps[i][lane()] = s.steps;
      sequences_.chunks[i][lane()] = s.chunks;
      sequences_.units_end[i][lane()] = units += s.units(a_);
      sequences_.partials_end[i][lane()] = partials += s.partials(a_);
      sequences_.tokens_end[i][lane()] = tokens += query_len;
    }
    // These become what all sequences before those of this lane have.
    units = before.units + sum_up_to(units) - units;
    partials = before.partials + (kSplits ? sum_up_to(partials) - partials : 0);
    tokens = before.tokens + sum_up_to(tokens) - tokens;
#pragma unroll(kPerLane > 1 ? 4 : 1)
    for (int i = 0; i < per_lane; ++i) {
      sequences_.units_end[i][lane()] += units;
      sequences_.partials_end[i][lane()] += partials;
      sequences_.tokens_end[i][lane()] += tokens;
    }
    if (lane() == 0) {
      sequences_.base = base;
      sequences_.per_lane = per_lane;
    }
    __syncwarp();
  }

  // A tile may have fewer chunks than others of its sequence: then some have no steps.
  __device__ void make(int owner, int number, int index, Tile* tile) const {
    const int query_len = sequences_.query_len[number][owner], context_len = sequences_.context_len[number][owner];
    const int row_tiles = sequences_.row_tiles[number][owner], chunks = kSplits ? sequences_.chunks[number][owner] : 1;
    const int units = row_tiles * chunks * a_.num_kv_heads;
    const int within = index - (sequences_.units_end[number][owner] - units);
    const int row_tile = chunks == 1 ? within : within / chunks;
    tile->seq = sequences_.base + owner * per_lane() + number;
    tile->kv_head = row_tile / row_tiles;
    tile->first_row = (row_tiles - 1 - (row_tile - tile->kv_head * row_tiles)) * kRows;
    tile->query_len = query_len;
    tile->context_len = context_len;
    tile->first_token = sequences_.tokens_end[number][owner] - query_len;
    tile->begin = a_.sliding_window > 0 ? tile->first_visible(a_, tile->position(a_, tile->first_row)) : 0;
    tile->end = tile->position(a_, tile->first_row + kRows - 1) + 1;
    const int steps = (tile->end - 1) / kKeys - tile->begin / kKeys + 1;
    int each = steps;
    tile->chunk = 0;
    tile->num_chunks = 1;
    if (kSplits && chunks > 1) {
      each = max((sequences_.steps[number][owner] + chunks - 1) / chunks, (steps + chunks - 1) / chunks);
      tile->chunk = within - row_tile * chunks;
      tile->num_chunks = (steps + each - 1) / each;
    }
    tile->first_key = (tile->begin / kKeys + tile->chunk * each) * kKeys;
    tile->num_steps = min(each, steps - tile->chunk * each);
    tile->partial = sequences_.partials_end[number][owner] - units + within - tile->chunk;  // if there are chunks
  }

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
      const Sequence s(a, a.query_lens[seq], a.context_lens[seq], min_steps);
      sum.units += s.units(a);
      sum.partials += s.partials(a);
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
  Sequences& sequences_;
  int next_;  // index of the next chunk past those of gridDim.x, in the first lane
};

// One thread of each block calls this after its last request. The last block resets the counters to zero.
__device__ inline void reset_counters(const Args& a) {
  if (a.single) return;
  __threadfence();
  if (atomicAdd(a.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    a.counters[0] = 0;
    a.counters[1] = 0;
  }
}

}  // namespace extend
}  // namespace kvservice
