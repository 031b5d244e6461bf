// State shared by the warps of a decode thread block: sizes, shared memory and barriers.
#pragma once

#include "cuda/decode_schedule.cuh"
#include "cuda/decode_split_kv.cuh"
#include "cuda/ptx.cuh"

namespace kvservice::decode {

constexpr int kMaxStages = 16;

// The producer copies the queries of a work tile while the consumers are busy with the one before.
constexpr int kQuerySlots = 2;
constexpr int kQueryPadding = 16;  // bytes after a row, which avoid bank conflicts

// Work tiles that the producer has published and the consumers have not finished: the producer needs a slot for the
// queries, so it is ahead by kQuerySlots, and the consumers are finishing another.
constexpr int kMaxWorkTiles = 4;
static_assert(kMaxWorkTiles > kQuerySlots);

enum class Cache { kSame, kE4M3, kE5M2 };

template <Cache kCache, typename T>
struct Operand {
  using Type = half;
};

template <typename T>
struct Operand<Cache::kSame, T> {
  using Type = T;
};

// Four warps share the tokens of a tile. With 32 columns, a second four warps take the other half of the columns.
constexpr int kTokenWarps = 4;

constexpr int column_groups(int columns) { return columns > 16 ? 2 : 1; }

constexpr int block_threads(int columns) { return (kTokenWarps * column_groups(columns) + 1) * 32; }

// Thread blocks per SM, from which the compiler derives the register limit. FP8 caches are bound by the arithmetic per
// byte, and more warps hide more of it.
constexpr int blocks_per_sm(Cache cache, int head_size, int columns) {
  if (columns > 16 || head_size * columns > 2048) return 1;
  return cache != Cache::kSame && columns == 8 && head_size <= 128 ? 3 : 2;
}

// Barriers between the producer and the consumers, and the work tiles that the producer publishes. The type is the same
// in all instantiations, so that the producer does not depend on their template parameters.
struct PipelineStorage {
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  uint64_t work_ready[kMaxWorkTiles];
  uint64_t split_ready[kMaxWorkTiles];
  uint64_t query_empty[kQuerySlots];
  uint64_t cluster_ready;
  WorkTile work_tiles[kMaxWorkTiles];
  SplitKv splits[kMaxWorkTiles];
  Outcome outcome;
  int taken_over;
};

// One instantiation of the kernel: its types, its sizes, and the layout of shared memory before the pipeline stages.
template <typename T, Cache cache, int head_size, int columns>
struct Kernel {
  using Element = typename Operand<cache, T>::Type;
  static constexpr Cache kCache = cache;
  static constexpr int kHead = head_size;
  static constexpr int kColumns = columns;
  static constexpr bool kFp8 = kCache != Cache::kSame;  // an FP8 cache
  static constexpr int kItem = kFp8 ? 1 : 2;
  static constexpr int kColumnTiles = kColumns / 8 / column_groups(kColumns);  // tiles of 8 columns per warp
  static constexpr int kConsumerWarps = kTokenWarps * column_groups(kColumns);
  static constexpr int kThreads = block_threads(kColumns);
  static constexpr int kConsumerThreads = kConsumerWarps * 32;
  static constexpr int kSteps = kHead / 16;
  // Tokens of a round: each warp takes kSubs * 16. A tile has several rounds if a block of the pool has more tokens.
  static constexpr int kSubs = kHead * kItem <= 128 ? 2 : 1;
  static constexpr int kRoundTokens = kTokenWarps * 16 * kSubs;
  static constexpr int kScratchRow = kHead + 4;  // avoids bank conflicts between the lanes of a store

  struct Shared : PipelineStorage {
    alignas(16) float2 state[kTokenWarps][kColumns];
    union {
      alignas(16) float scratch[kTokenWarps][kColumns][kScratchRow];
      LaneSum sums[kConsumerThreads];
    };
    alignas(16) char rows[kQuerySlots][kColumns][kHead * 2 + kQueryPadding];  // queries as they are in memory
    // Partial results of the members of a cluster, for the slice of this one, and their states.
    alignas(16) float4 arrived[kColumns * kHead / 4 + kMaxCluster];
    float2 arrived_states[kMaxCluster][kColumns];
    float query_factors[kColumns];
    uint2 query[kColumnTiles > 1 ? kSteps * kColumns / 8 : 1][32];
  };

  static constexpr int kStagesOffset = (static_cast<int>(sizeof(Shared)) + 127) / 128 * 128;

  // Fragments of one warp in one round: rows are tokens, columns are queries.
  using Scores = float[kSubs][kColumnTiles][4];
  using Weights = uint32_t[kSubs][kColumnTiles][2];
};

// The position of a thread in its thread block, and shared-memory addresses.
struct Block {
  __device__ Block(const Params& params, PipelineStorage& pipeline_storage, uint32_t rows_address,
                   uint32_t stages_address, int column_tiles)
      : p(params),
        storage(pipeline_storage),
        rows(rows_address),
        stages(stages_address),
        full(ptx::shared_address(pipeline_storage.full)),
        empty(ptx::shared_address(pipeline_storage.empty)),
        work_ready(ptx::shared_address(pipeline_storage.work_ready)),
        split_ready(ptx::shared_address(pipeline_storage.split_ready)),
        query_empty(ptx::shared_address(pipeline_storage.query_empty)),
        cluster_ready(ptx::shared_address(&pipeline_storage.cluster_ready)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        token_warp(warp % kTokenWarps),
        first_column(warp / kTokenWarps * column_tiles * 8) {}

  // Returns the first position that a query of the work tile sees.
  __device__ int first_seen(const WorkTile& s) const {
    return p.sliding_window > 0 ? max(0, s.context - s.query_len + 1 - p.sliding_window) : 0;
  }

  // Moves to the next pipeline stage. The barrier parity flips when the stage index wraps around.
  __device__ void advance(int& stage, int& parity) const {
    if (++stage == p.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  const Params& p;
  PipelineStorage& storage;
  // Shared addresses: of queries and stages, then of mbarriers.
  const uint32_t rows, stages, full, empty, work_ready, split_ready, query_empty, cluster_ready;
  const int warp, lane;
  const int token_warp, first_column;  // of a consumer warp
};

}  // namespace kvservice::decode
