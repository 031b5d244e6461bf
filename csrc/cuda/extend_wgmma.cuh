// What the parts of the extend kernel for Hopper share: shapes, shared memory, barriers.
//
// The kernel follows FlashAttention-3: one group of four warps loads, two compute. Queries, keys and values come
// through shared memory, in steps of kKeys tokens, kStages steps of each in flight; barriers in shared memory say what
// is there (full) and what has been used (empty).
//
// A tile has 128 rows, 64 for each computing group. Of a tile of 64 rows or fewer the groups have all rows both, and
// every second step: what they sum is joined through shared memory.
//
// Head sizes under kHead are padded: with zeros in queries and keys, with anything in values, whose columns are
// dropped.
#pragma once

#include "cuda/extend_load.cuh"
#include "cuda/wgmma.cuh"

namespace kvservice {
namespace extend {

constexpr int kStages = 2;
constexpr int kGroupThreads = 128, kGroupRows = 64, kComputeWarps = 8;
constexpr int kWgmmaThreads = 3 * kGroupThreads;
static_assert(kGroupThreads == kLoadThreads, "the first group loads");
static_assert(kWgmmaRows == 2 * kGroupRows, "two groups compute");
static_assert(kStages % 2 == 0, "groups that have every second step have stages of their own");

// Registers of a thread that loads and of one that computes: together no more than a multiprocessor has. To convert
// takes more, since what is loaded waits in registers.
template <int kHead, bool kFloat8>
constexpr int kLoadRegisters = !kFloat8      ? 56
                               : kHead > 128 ? 72
                                             : 104;
template <int kHead, bool kFloat8>
constexpr int kComputeRegisters = !kFloat8      ? 224
                                  : kHead > 128 ? 216
                                                : 200;

template <int kHead>
struct WgmmaShape {
  static constexpr int kKeys = kHead > 128 ? 64 : 128;
  static constexpr int kTileBytes = kHead * kKeys * 2;
  static constexpr int kQueryBytes = kWgmmaRows * kHead * 2;
  static constexpr int kKeysOffset = kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + kStages * kTileBytes;
  static constexpr int kSharedBytes = kValuesOffset + kStages * kTileBytes;
  // Columns of one product with the values, and how many make up a head.
  static constexpr int kColumns = kHead > 128 ? 128 : kHead;
  static constexpr int kParts = kHead / kColumns;
};

template <int kKeys>
struct Signals {
  uint64_t query_full;
  uint64_t query_empty;
  uint64_t keys_full[kStages];
  uint64_t keys_empty[kStages];
  uint64_t values_full[kStages];
  uint64_t values_empty[kStages];
  TileFinder<kWgmmaRows, kKeys> finder;  // here between two tiles, because registers are few
  // What the loading group works on, in turns, and what the others do.
  Tile loading[2];
  bool loading_found[2];
  Tile computing;
  bool computing_found;
  bool last[2];                  // of each group, in a join
  float row_scale[kWgmmaRows];   // queries are what is in shared memory times this, for 8-bit pools
  float4 states[kGroupThreads];  // maxima and sums that one group hands to the other
};

enum NamedBarrier : int { kLoaders = 1, kFirstTurn = 2, kFirstGroup = 4, kComputers = 6 };

#ifdef KVSERVICE_WGMMA

// Counts steps through the stages: which is next, and the parity of its barriers.
struct Turn {
  uint32_t steps = 0;

  __device__ int stage() const { return static_cast<int>(steps % kStages); }
  __device__ uint32_t parity() const { return steps / kStages % 2; }
};

#endif

}  // namespace extend
}  // namespace kvservice
