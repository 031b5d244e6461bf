// Shared by the parts of the Hopper extend kernel: shapes, shared memory, barriers.
//
// The kernel follows FlashAttention-3: one producer warpgroup, two consumer warpgroups. Keys and values pass through
// shared memory in steps of kKeys tokens, with kStages pipeline stages each, and the queries of a tile with
// kQueryStages, so that those of the next tile are there when it begins. mbarriers signal which stages are full and
// which are empty.
//
// A tile has 128 rows, 64 per consumer warpgroup. If a tile has 64 rows or fewer, both warpgroups have all of its rows,
// each takes every second step, and their sums are combined through shared memory.
//
// Head sizes below kHead are padded: queries and keys with zeros, values with anything, because those columns are
// dropped.
#pragma once

#include "cuda/extend_load.cuh"
#include "cuda/wgmma.cuh"

namespace kvservice {
namespace extend {

constexpr int kStages = 2;
constexpr int kWarpgroupThreads = 128, kWarpgroupRows = 64, kConsumerWarps = 8;
constexpr int kWgmmaThreads = 3 * kWarpgroupThreads;
static_assert(kWarpgroupThreads == kLoadThreads, "the producer is one warpgroup");
static_assert(kWgmmaRows == 2 * kWarpgroupRows, "there are two consumer warpgroups");
static_assert(kStages % 2 == 0, "warpgroups that take every second step use separate stages");

// Registers per producer thread and per consumer thread. Together they fit into the register file of an SM. A producer
// that converts needs more, because loaded data waits in registers, and consumers of small heads need fewer.
template <int kHead, bool kFloat8>
constexpr int kProducerRegisters = kHead <= 64   ? 104
                                   : !kFloat8    ? 56
                                   : kHead > 128 ? 72
                                                 : 104;
template <int kHead, bool kFloat8>
constexpr int kConsumerRegisters = kHead <= 64   ? 200
                                   : !kFloat8    ? 224
                                   : kHead > 128 ? 216
                                                 : 200;

template <int kHead>
struct WgmmaShape {
  static constexpr int kKeys = kHead > 128 ? 64 : 128;
  static constexpr int kTileBytes = kHead * kKeys * 2;
  static constexpr int kQueryStages = kHead > 128 ? 1 : 2;
  static constexpr int kQueryBytes = kWgmmaRows * kHead * 2;
  static constexpr int kKeysOffset = kQueryStages * kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + kStages * kTileBytes;
  static constexpr int kSharedBytes = kValuesOffset + kStages * kTileBytes;
  // Columns of one product with the values, and the number of such products per head.
  static constexpr int kColumns = kHead > 128 ? 128 : kHead;
  static constexpr int kParts = kHead / kColumns;
};

template <int kHead>
struct SharedStorage {
  static constexpr int kQueryStages = WgmmaShape<kHead>::kQueryStages;
  uint64_t query_full[kQueryStages];
  uint64_t query_empty[kQueryStages];
  uint64_t keys_full[kStages];
  uint64_t keys_empty[kStages];
  uint64_t values_full[kStages];
  uint64_t values_empty[kStages];
  // A tile is published with its queries; one without steps comes after the last. The producer is ahead of the
  // consumers by the tiles with queries in memory, plus one that waits for them, and the consumers are finishing
  // another.
  static constexpr int kTiles = kQueryStages + 2;
  Tile tiles[kTiles];
  ScheduledSequences<1> sequences;
  bool last[2];                                // per consumer warpgroup, in a reduction
  float row_scales[kQueryStages][kWgmmaRows];  // FP8 pools: query = shared memory times this
  float4 states[kWarpgroupThreads];            // maxima and sums that one warpgroup passes to the other
};

enum NamedBarrier : int {
  kProducerBarrier = 1,
  kFirstSchedulerBarrier = 2,
  kFirstWarpgroupBarrier = 4,
  kConsumersBarrier = 6
};

#ifdef KVSERVICE_WGMMA

// The position in a pipeline: the next stage and the parity of its barriers.
template <int kCount>
struct PipelineState {
  uint32_t steps = 0;

  __device__ int stage() const { return static_cast<int>(steps % kCount); }
  __device__ uint32_t parity() const { return steps / kCount % 2; }
};

#endif

}  // namespace extend
}  // namespace kvservice
