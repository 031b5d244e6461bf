// What the warps of a thread block of the decode kernel share: sizes, shared memory, and how they wait for each other.
#pragma once

#include "cuda/decode_join.cuh"
#include "cuda/decode_schedule.cuh"
#include "cuda/ptx.cuh"

namespace kvservice::decode {

constexpr int kMaxEntries = 16;
// The warp that fills the ring describes the segments to the others. It can be ahead of them by as many as have a tile
// in the ring, one that it waits to put there, and one that they are at the end of.
constexpr int kSegments = kMaxEntries / 2 + 2;

enum class Cache { kSame, kE4M3, kE5M2 };

template <Cache kCache, typename T>
struct Operand {
  using Type = half;
};

template <typename T>
struct Operand<Cache::kSame, T> {
  using Type = T;
};

// Four warps share the tokens of a tile; with 32 columns a second four take the other half of the columns.
constexpr int kTokenWarps = 4;

constexpr int column_groups(int columns) { return columns > 16 ? 2 : 1; }

constexpr int block_threads(int columns) { return (kTokenWarps * column_groups(columns) + 1) * 32; }

// Thread blocks on a multiprocessor, for the compiler to count registers with. 8-bit caches are bound by what is
// computed for a byte: more warps hide more of it.
constexpr int blocks_per_multiprocessor(Cache cache, int head_size, int columns) {
  if (columns > 16 || head_size * columns > 2048) return 1;
  return cache != Cache::kSame && columns == 8 && head_size <= 128 ? 3 : 2;
}

// How the warp that fills the ring and those that compute wait for each other, and what it tells them of segments. Of
// the same form for all instantiations, so that the warp that fills the ring is written without their types.
struct Signals {
  uint64_t full[kMaxEntries];
  uint64_t empty[kMaxEntries];
  uint64_t described[kSegments];
  uint64_t divided[kSegments];
  Segment segments[kSegments];
  Share shares[kSegments];
  int last;
};

// One instantiation of the kernel: its types, its sizes, and the layout of its shared memory before the ring.
template <typename T, Cache cache, int head_size, int columns>
struct Kernel {
  using Element = typename Operand<cache, T>::Type;
  static constexpr Cache kCache = cache;
  static constexpr int kHead = head_size;
  static constexpr int kColumns = columns;
  static constexpr bool kBytes = kCache != Cache::kSame;  // an 8-bit cache
  static constexpr int kItem = kBytes ? 1 : 2;
  static constexpr int kColumnTiles = kColumns / 8 / column_groups(kColumns);  // of 8, of a warp
  static constexpr int kWarps = kTokenWarps * column_groups(kColumns);
  static constexpr int kThreads = block_threads(kColumns);
  static constexpr int kComputeThreads = kWarps * 32;
  static constexpr int kSteps = kHead / 16;
  // Tokens of a round: each warp takes kSubs times 16. A tile has several rounds where a block is larger.
  static constexpr int kSubs = kHead * kItem <= 128 ? 2 : 1;
  static constexpr int kRoundTokens = kTokenWarps * 16 * kSubs;
  static constexpr int kScratchRow = kHead + 4;  // no two lanes of a store meet in a bank

  struct Shared : Signals {
    alignas(16) float2 state[kTokenWarps][kColumns];
    union {
      alignas(16) float scratch[kTokenWarps][kColumns][kScratchRow];
      float2 joined[kColumns][kMaxJoined];
    };
    uint2 query[kColumnTiles > 1 ? kSteps * kColumns / 8 : 1][32];
  };

  static constexpr int kRingOffset = (static_cast<int>(sizeof(Shared)) + 127) / 128 * 128;

  // Of a warp in a round, in the products' fragments: rows are tokens, columns queries.
  using Scores = float[kSubs][kColumnTiles][4];
  using Weights = uint32_t[kSubs][kColumnTiles][2];
};

// A thread's place in its thread block, and the shared addresses: what every part of the kernel needs.
struct Block {
  __device__ Block(const Params& params, Signals& all_signals, uint32_t ring_address, int column_tiles)
      : p(params),
        signals(all_signals),
        ring(ring_address),
        full(ptx::shared_address(all_signals.full)),
        empty(ptx::shared_address(all_signals.empty)),
        described(ptx::shared_address(all_signals.described)),
        divided(ptx::shared_address(all_signals.divided)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        token_warp(warp % kTokenWarps),
        first_column(warp / kTokenWarps * column_tiles * 8) {}

  // The first position that a query of the segment sees.
  __device__ int first_seen(const Segment& s) const {
    return p.sliding_window > 0 ? max(0, s.context - s.query_len + 1 - p.sliding_window) : 0;
  }

  // To the next entry of the ring; the parity of its barriers changes where it starts over.
  __device__ void advance(int& entry, int& parity) const {
    if (++entry == p.entries) {
      entry = 0;
      parity ^= 1;
    }
  }

  const Params& p;
  Signals& signals;
  const uint32_t ring, full, empty, described, divided;  // shared addresses; but for the ring, of mbarriers
  const int warp, lane;
  const int token_warp, first_column;  // of a warp that computes
};

}  // namespace kvservice::decode
