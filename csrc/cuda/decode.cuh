// Attention of few queries a sequence (decode, speculative verification), as fast as the memory gives the cache.
//
// The operands of both products are swapped: rows are tokens, columns are the queries of a KV head, of one or several
// query tokens, kColumnTiles * 8 at a time. One warp of a thread block has the copy engine bring tiles of K and V into
// a ring in shared memory; four warps take 16 tokens of each tile, every one with a maximum, a sum and an output of its
// own, which they join at the end of a segment.
//
// The tiles of all sequences and KV heads, one after the other, are cut into equal ranges, one for each thread block;
// so a range ends in the middle of a sequence, and unequal lengths cost nothing. The parts of a sequence are joined by
// the thread block that is the last to write one: first those of kJoined neighbours, then the results of these.
//
// Batch-invariant: a sequence is cut into at most kMaxChunks chunks, by its own length alone, and a second kernel joins
// them in their order.
#pragma once

#include "cuda/decode_join.cuh"
#include "cuda/decode_schedule.cuh"
#include "cuda/ptx.cuh"

namespace kvservice::decode {

constexpr int kMaxEntries = 16;
constexpr int kJoinThreads = 128;  // of a block that only joins chunks
// A maximum is raised, and with it all that has been summed up is scaled, only where an exponent would pass this.
constexpr float kMaxExponent = 8.0F;

enum class Cache { kSame, kE4M3, kE5M2 };

template <Cache kCache, typename T>
struct Operand {
  using Type = half;
};

template <typename T>
struct Operand<Cache::kSame, T> {
  using Type = T;
};

// A score, in powers of two, with what only some models have.
__device__ __forceinline__ float special_score(const Params& p, int kv_head, int index, int distance, int token,
                                               float score) {
  constexpr float kLog2e = 1.4426950408889634F;
  const int in_group = index % p.group, head = kv_head * p.group + in_group;
  if (p.soft_cap != 0.0F) score = p.soft_cap * tanhf(score / p.soft_cap) * kLog2e;
  if (p.alibi_slopes != nullptr) score -= p.alibi_slopes[head] * static_cast<float>(distance) * kLog2e;
  if (p.sparse.on()) {
    const BlockSparse& sparse = p.sparse;
    const int key_block = token / sparse.block_size, query_block = (token + distance) / sparse.block_size;
    const int shift = sparse.head_sliding_step >= 0
                          ? (sparse.tp_rank * p.num_heads + head) * sparse.head_sliding_step + 1
                          : (sparse.tp_rank * p.num_kv_heads + kv_head) * -sparse.head_sliding_step + 1;
    const bool seen = key_block > query_block - sparse.local_blocks || (key_block + shift) % sparse.vert_stride == 0;
    if (!seen) return -INFINITY;
  }
  return score;
}

// Four warps share the tokens of a tile; from 16 columns on a second four take the other half of the columns.
constexpr int kTokenWarps = 4;

constexpr int column_groups(int columns) { return columns > 8 ? 2 : 1; }

constexpr int block_threads(int columns) { return (kTokenWarps * column_groups(columns) + 1) * 32; }

// Thread blocks on a multiprocessor, for the compiler to count registers with.
constexpr int blocks_per_multiprocessor(int columns) { return columns > 8 ? 1 : 2; }

template <typename T, Cache kCache, int kHead, int kColumns>
class Kernel {
 public:
  using Element = typename Operand<kCache, T>::Type;
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
  static constexpr int kPartial = Partial<kHead, kColumns>::kFloats;
  static constexpr int kScratchRow = kHead + 4;  // no two lanes of a store meet in a bank

  struct Shared {
    uint64_t full[kMaxEntries];
    uint64_t empty[kMaxEntries];
    int last;
    alignas(16) float2 state[kTokenWarps][kColumns];
    alignas(16) float scratch[kWarps][8][kScratchRow];
    uint2 query[kColumnTiles > 1 ? kSteps * kColumns / 8 : 1][32];
  };

  static constexpr int kRingOffset = (static_cast<int>(sizeof(Shared)) + 127) / 128 * 128;

  __device__ Kernel(const Params& p, char* shared)
      : p_(p),
        shared_(*reinterpret_cast<Shared*>(shared)),
        ring_(ptx::shared_address(shared + kRingOffset)),
        full_(ptx::shared_address(shared_.full)),
        empty_(ptx::shared_address(shared_.empty)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        token_warp_(warp_ % kTokenWarps),
        first_column_(warp_ / kTokenWarps * kColumnTiles * 8) {}

  __device__ void run() {
    if (threadIdx.x < p_.entries) {
      ptx::mbarrier_init(full_ + threadIdx.x * 8, ptx::kHopper ? 1 : 32);
      ptx::mbarrier_init(empty_ + threadIdx.x * 8, kWarps);
      ptx::fence_mbarrier_init();
    }
    prefetch();
    Walker walker(p_, lane_);
    if (static_cast<int>(blockIdx.x) >= walker.ranges().blocks()) return;
    __syncthreads();  // the ring's barriers are there
    if (warp_ == kWarps) {
      fill_ring(walker);
    } else {
      compute(walker);
    }
  }

 private:
  // Where there is little to do, the way from lengths to block ids to queries and keys takes longest.
  __device__ void prefetch() {
    const int at = threadIdx.x * 128;
    if (at < p_.table_prefetch_bytes) ptx::prefetch(reinterpret_cast<const char*>(p_.block_tables) + at);
    if (at < p_.query_prefetch_bytes) ptx::prefetch(static_cast<const char*>(p_.query) + at);
  }

  // ---- the warp that fills the ring

  struct Tile {
    Segment segment;
    int index;
    int first_block, num_blocks;  // of the tile, those that any query sees
    int64_t block;                // this lane's block
  };

  __device__ void locate(Tile& tile) {
    const Segment& s = tile.segment;
    const int blocks = p_.tile_tokens >> p_.block_shift;
    const int begin = tile.index * blocks;
    const int seen = p_.sliding_window > 0 ? max(0, s.context - s.query_len + 1 - p_.sliding_window) : 0;
    const int end = min(begin + blocks, ((s.context - 1) >> p_.block_shift) + 1);
    tile.first_block = max(begin, seen >> p_.block_shift) - begin;
    tile.num_blocks = end - begin - tile.first_block;
    if (lane_ < tile.num_blocks) {
      tile.block = __ldg(p_.block_tables + int64_t{s.seq} * p_.max_blocks + begin + tile.first_block + lane_);
    }
  }

  __device__ bool next_tile(Walker& walker, Tile& tile) {
    if (++tile.index >= tile.segment.end_tile) {
      if (!walker.next(tile.segment)) return false;
      tile.index = tile.segment.tile;
    }
    locate(tile);
    return true;
  }

  __device__ void fill_ring(Walker& walker) {
    Tile next;
    next.index = 0;
    next.segment.end_tile = 0;
    bool more = next_tile(walker, next);
    int entry = 0, parity = 1;
    while (more) {
      const Tile tile = next;
      const int kv_head = tile.segment.head / p_.column_tiles;
      const char* key = p_.pool + tile.block * p_.block_bytes + int64_t{kv_head} * p_.head_bytes;
      for (int part = 0; part < 2; ++part) {
        ptx::mbarrier_wait(empty_ + entry * 8, parity);
        fill(tile, key + part * int64_t{p_.value_bytes}, entry);
        if (part == 0) more = next_tile(walker, next);  // its block ids arrive while this tile waits for room
        if (++entry == p_.entries) {
          entry = 0;
          parity ^= 1;
        }
      }
    }
  }

  __device__ void fill(const Tile& tile, const char* source, int entry) {
    const uint32_t to = ring_ + entry * p_.entry_bytes + tile.first_block * p_.head_bytes;
    const uint32_t barrier = full_ + entry * 8;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (lane_ == 0) ptx::mbarrier_arrive_expect(barrier, tile.num_blocks * p_.head_bytes);
    __syncwarp();
    if (lane_ < tile.num_blocks) ptx::bulk_copy(to + lane_ * p_.head_bytes, source, p_.head_bytes, barrier);
#else
    for (int block = 0; block < tile.num_blocks; ++block) {
      const auto from = reinterpret_cast<const char*>(__shfl_sync(~0U, reinterpret_cast<uint64_t>(source), block));
      for (int byte = lane_ * 16; byte < p_.head_bytes; byte += 32 * 16) {
        ptx::copy_16_async(to + block * p_.head_bytes + byte, from + byte);
      }
    }
    ptx::mbarrier_arrive_after_copies(barrier);
#endif
  }

  // ---- the warps that compute

  // What a warp has summed up over its tokens. A lane has rows g and g + 8 of each 16 dimensions, and columns 2t and
  // 2t + 1 of each column tile, where g = lane / 4, t = lane % 4.
  struct State {
    float maximum[kColumnTiles][2];
    float sum[kColumnTiles][2];
    float values[kSteps][kColumnTiles][4];
  };

  // Of the columns of this lane.
  struct Columns {
    float scale[kColumnTiles][2];  // to logits in powers of two; before a soft cap, plain logits
    int limit[kColumnTiles][2];    // keys from here on are not seen
    uint32_t query[kColumnTiles == 1 ? kSteps : 1][2];
  };

  __device__ void compute(Walker& walker) {
    Segment s;
    int entry = 0, parity = 0;
    bool first = true;
    while (walker.next(s)) {
      Columns columns;
      load_columns(s, columns);
      State state;
      clear(state);
      for (int tile = s.tile; tile < s.end_tile; ++tile) {
        const int key_entry = entry, key_parity = parity;
        advance(entry, parity);
        const int value_entry = entry, value_parity = parity;
        advance(entry, parity);
        ptx::mbarrier_wait(full_ + key_entry * 8, key_parity);
        const int rounds = p_.tile_tokens / kRoundTokens;
        for (int round = 0; round < rounds; ++round) {
          float scores[kSubs][kColumnTiles][4];
          const int offset = round * kRoundTokens;
          multiply_keys(columns, key_entry, offset, scores);
          if (round == rounds - 1) release(key_entry);
          mask(s, columns, tile * p_.tile_tokens + offset, scores);
          uint32_t weights[kSubs][kColumnTiles][2];
          weigh(scores, state, weights);
          if (round == 0) ptx::mbarrier_wait(full_ + value_entry * 8, value_parity);
          add_values(s, value_entry, tile * p_.tile_tokens, offset, weights, state);
        }
        release(value_entry);
      }
      finish(s, state, walker.ranges(), first);
      first = false;
    }
  }

  __device__ void advance(int& entry, int& parity) const {
    if (++entry == p_.entries) {
      entry = 0;
      parity ^= 1;
    }
  }

  __device__ void release(int entry) {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(empty_ + entry * 8);
  }

  __device__ static void clear(State& state) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state.maximum[n][j] = -INFINITY;
        state.sum[n][j] = 0.0F;
      }
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.values[d][n][i] = 0.0F;
      }
    }
  }

  // Dimension of the first of two neighbours that a lane has in half `half` of step `step`, in the order in which the
  // keys' fragments come: four bytes of an 8-bit key are two halves of a step.
  __device__ static int dimension(int step, int half, int t) {
    return step * 16 + (kBytes ? 4 * t + 2 * half : 2 * t + 8 * half);
  }

  __device__ void load_columns(const Segment& s, Columns& columns) {
    const int g = lane_ / 4, t = lane_ % 4;
    const int kv_head = s.head / p_.column_tiles;
    const float base = p_.scale * (p_.k_scale != nullptr ? p_.k_scale[kv_head] : 1.0F) *
                       (p_.soft_cap == 0.0F ? 1.4426950408889634F : 1.0F);
    const int first_limit = s.context - s.query_len + 1;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = first_column_ + n * 8 + g;
      const int64_t row = column < used_columns(p_, s, kColumns) ? output_row(p_, s, kColumns, column) : -1;
      float factor = 1.0F;
      if constexpr (kBytes) factor = query_factor(row, t);
      if (kColumnTiles == 1 || n == token_warp_) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint32_t pair[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            pair[half] = row < 0 ? 0U : load_pair(row * kHead + dimension(step, half, t), factor);
          }
          if constexpr (kColumnTiles == 1) {
            columns.query[step][0] = pair[0];
            columns.query[step][1] = pair[1];
          } else {
            shared_.query[(first_column_ / 8 + n) * kSteps + step][lane_] = {pair[0], pair[1]};
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float others = __shfl_sync(~0U, factor, (2 * t + j) * 4);
        const int index = (s.head % p_.column_tiles) * kColumns + first_column_ + n * 8 + 2 * t + j;
        columns.scale[n][j] = base / others;
        columns.limit[n][j] = first_limit + min(index / p_.group, s.query_len - 1);
      }
    }
    if constexpr (kColumnTiles > 1) ptx::named_barrier(1, kComputeThreads);
  }

  __device__ uint32_t load_pair(int64_t index, float factor) const {
    if constexpr (!kBytes) {
      return *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p_.query) + index);
    } else {
      return ptx::pack<half>(load_query(p_, index) * factor, load_query(p_, index + 1) * factor);
    }
  }

  // The power of two that brings the largest of a query's numbers to at least 1 and below 2, so that as a half, too, it
  // keeps its precision and its range.
  __device__ float query_factor(int64_t row, int t) const {
    float largest = 0.0F;
    if (row >= 0) {
      for (int step = 0; step < kSteps; ++step) {
        for (int i = 0; i < 4; ++i) {
          largest = fmaxf(largest, fabsf(load_query(p_, row * kHead + step * 16 + 4 * t + i)));
        }
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    return exponent < 1 || exponent > 253 ? 1.0F : __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
  }

  // The token, of 16, that row `row` of half `half` of the keys' tile is: chosen so that a lane that holds weights of
  // rows 2t and 2t + 1 of both halves holds those of tokens 4t to 4t + 3.
  __device__ static int token_of(int row, int half) { return 4 * (row / 2) + 2 * half + row % 2; }

  __device__ void multiply_keys(const Columns& columns, int entry, int offset,
                                float (&scores)[kSubs][kColumnTiles][4]) {
    const int block_size = 1 << p_.block_shift;
    const int matrix = lane_ / 8;
    uint32_t row[kSubs];
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int token = offset + (sub * kTokenWarps + token_warp_) * 16 + token_of(lane_ % 8, matrix % 2);
      row[sub] = ring_ + entry * p_.entry_bytes + (token >> p_.block_shift) * p_.head_bytes +
                 (token & (block_size - 1)) * 16 + (matrix / 2) * block_size * 16;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[sub][n][i] = 0.0F;
      }
    }
    // Two pieces of 16 bytes of each token at a time: 16 dimensions, or 32 of 8 bits.
    constexpr int kPairs = kHead * kItem / 32;
    constexpr bool kOddPiece = (kHead * kItem / 16) % 2 != 0;
#pragma unroll
    for (int pair = 0; pair < kPairs + (kOddPiece ? 1 : 0); ++pair) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        uint32_t keys[4];
        // The last piece, alone: its upper matrices are read from the piece itself and not used.
        const bool odd = pair == kPairs;
        ptx::ldmatrix_4(keys, odd && matrix / 2 == 1 ? row[sub] - block_size * 16 : row[sub]);
        row[sub] += 2 * block_size * 16;
        if constexpr (!kBytes) {
          multiply_step(columns, pair, keys, scores[sub]);
        } else {
#pragma unroll
          for (int piece = 0; piece < 2; ++piece) {
            if (odd && piece == 1) continue;
            uint32_t step[4];
            widen(keys[2 * piece], step[0], step[2]);
            widen(keys[2 * piece + 1], step[1], step[3]);
            multiply_step(columns, 2 * pair + piece, step, scores[sub]);
          }
        }
      }
    }
  }

  __device__ static void widen(uint32_t bytes, uint32_t& first, uint32_t& second) {
    if constexpr (kCache == Cache::kE4M3) {
      ptx::e4m3_to_half(bytes, first, second);
    } else {
      ptx::e5m2_to_half(bytes, first, second);
    }
  }

  __device__ void multiply_step(const Columns& columns, int step, const uint32_t (&keys)[4],
                                float (&scores)[kColumnTiles][4]) {
    if constexpr (kColumnTiles == 1) {
      ptx::mma<Element>(scores[0], keys, columns.query[step][0], columns.query[step][1]);
    } else {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        const uint2 query = shared_.query[(first_column_ / 8 + n) * kSteps + step][lane_];
        ptx::mma<Element>(scores[n], keys, query.x, query.y);
      }
    }
  }

  // Scales the scores, and takes out those of keys that a query does not see.
  __device__ void mask(const Segment& s, const Columns& columns, int position,
                       float (&scores)[kSubs][kColumnTiles][4]) {
    const int first_limit = s.context - s.query_len + 1;
    const bool whole = position + kRoundTokens <= first_limit &&
                       (p_.sliding_window == 0 || position >= s.context - p_.sliding_window) && p_.plain();
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int token = position + (sub * kTokenWarps + token_warp_) * 16 + token_of(lane_ / 4, 0);
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[sub][n][i];
          score *= columns.scale[n][i % 2];
          if (!whole)
            score = masked(s, columns.limit[n][i % 2], first_column_ + n * 8 + 2 * (lane_ % 4) + i % 2,
                           token + i / 2 * 2, score);
        }
      }
    }
  }

  __device__ float masked(const Segment& s, int limit, int column, int token, float score) const {
    if (token >= limit || (p_.sliding_window != 0 && token < limit - p_.sliding_window)) return -INFINITY;
    return p_.plain() ? score
                      : special_score(p_, s.head / p_.column_tiles, s.head % p_.column_tiles * kColumns + column,
                                      limit - 1 - token, token, score);
  }

  // Scores to weights, as the second product takes them.
  __device__ void weigh(float (&scores)[kSubs][kColumnTiles][4], State& state,
                        uint32_t (&weights)[kSubs][kColumnTiles][2]) {
    float largest[kColumnTiles][2];
    bool raise = false;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        largest[n][j] = fmaxf(scores[0][n][j], scores[0][n][j + 2]);
#pragma unroll
        for (int sub = 1; sub < kSubs; ++sub) {
          largest[n][j] = fmaxf(largest[n][j], fmaxf(scores[sub][n][j], scores[sub][n][j + 2]));
        }
        raise = raise || largest[n][j] > state.maximum[n][j] + kMaxExponent;
      }
    }
    if (__any_sync(~0U, raise)) raise_maximum(largest, state);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float origin[2] = {state.maximum[n][0] == -INFINITY ? 0.0F : state.maximum[n][0],
                               state.maximum[n][1] == -INFINITY ? 0.0F : state.maximum[n][1]};
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[i] = ptx::exp2_fast(scores[sub][n][i] - origin[i % 2]);
          state.sum[n][i % 2] += weight[i];
        }
        weights[sub][n][0] = ptx::transpose_8x8(ptx::pack<Element>(weight[0], weight[1]));
        weights[sub][n][1] = ptx::transpose_8x8(ptx::pack<Element>(weight[2], weight[3]));
      }
    }
  }

  __device__ static void raise_maximum(float (&largest)[kColumnTiles][2], State& state) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float maximum = fmaxf(largest[n][j], state.maximum[n][j]);
#pragma unroll
        for (int delta = 4; delta < 32; delta *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0U, maximum, delta));
        const float factor = maximum == -INFINITY ? 1.0F : ptx::exp2_fast(state.maximum[n][j] - maximum);
        state.maximum[n][j] = maximum;
        state.sum[n][j] *= factor;
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          state.values[d][n][j] *= factor;
          state.values[d][n][j + 2] *= factor;
        }
      }
    }
  }

  __device__ void add_values(const Segment& s, int entry, int position, int offset,
                             const uint32_t (&weights)[kSubs][kColumnTiles][2], State& state) {
    const int block_size = 1 << p_.block_shift;
    const int g = lane_ / 4, t = lane_ % 4;
    const int seen = p_.sliding_window > 0 ? s.context - s.query_len + 1 - p_.sliding_window : 0;
    uint32_t row[kSubs], keep[kSubs][2];
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int token = offset + (sub * kTokenWarps + token_warp_) * 16 + 4 * t;
      row[sub] = ring_ + entry * p_.entry_bytes + (token >> p_.block_shift) * p_.head_bytes +
                 (g * block_size + (token & (block_size - 1))) * kItem;
      // What no query sees may be anything, and 0 times that not 0.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int low = position + token + 2 * i;
        keep[sub][i] = (low < s.context && low >= seen ? 0xFFFFU : 0U) |
                       (low + 1 < s.context && low + 1 >= seen ? 0xFFFF0000U : 0U);
      }
    }
    const uint32_t stride = 8 * block_size * kItem;
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        uint32_t values[4];
        load_values(row[sub], values[0], values[2]);
        load_values(row[sub] + stride, values[1], values[3]);
        row[sub] += 2 * stride;
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] &= keep[sub][i / 2];
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          ptx::mma<Element>(state.values[d][n], values, weights[sub][n][0], weights[sub][n][1]);
        }
      }
    }
  }

  // Four tokens of a dimension.
  __device__ static void load_values(uint32_t address, uint32_t& first, uint32_t& second) {
    if constexpr (kBytes) {
      uint32_t bytes;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bytes) : "r"(address) : "memory");
      widen(bytes, first, second);
    } else {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address) : "memory");
    }
  }

  // ---- the end of a segment

  __device__ void finish(const Segment& s, State& state, const Ranges& ranges, bool first) {
    Partial<kHead, kColumns> part{nullptr};
    int owner = 0, last = 0;
    if (p_.batch_invariant) {
      const int chunk = chunk_tiles(p_, s.num_tiles);
      if (s.num_tiles > chunk) part.data = chunk_partial(s, (s.tile - s.first_tile) / chunk);
    } else {
      owner = ranges.owner(s.start);
      last = ranges.owner(s.start + s.num_tiles - 1);
      if (owner != last) part.data = partial(blockIdx.x, first ? 0 : 1);
    }
    join_warps(s, state, part);
    if (owner != last) join_blocks(s, ranges, owner, last);
  }

  __device__ float* chunk_partial(const Segment& s, int chunk) const {
    const int64_t item = int64_t{s.seq} * p_.num_kv_heads * p_.column_tiles + s.head;
    return p_.partials + (item * kMaxChunks + chunk) * Partial<kHead, kColumns>::kFloats;
  }

  // A thread block has two: of the segment that it begins with, and of the one that it ends with.
  __device__ float* partial(int block, int which) const {
    return p_.partials + (int64_t{block} * 2 + which) * Partial<kHead, kColumns>::kFloats;
  }

  // To the output, or to `part`.
  __device__ void join_warps(const Segment& s, State& state, Partial<kHead, kColumns> part) {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int delta = 4; delta < 32; delta *= 2) state.sum[n][j] += __shfl_xor_sync(~0U, state.sum[n][j], delta);
        if (g == 0)
          shared_.state[token_warp_][first_column_ + n * 8 + 2 * t + j] = {state.maximum[n][j], state.sum[n][j]};
      }
    }
    ptx::named_barrier(1, kComputeThreads);
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[s.head / p_.column_tiles] : 1.0F;
    const int columns = used_columns(p_, s, kColumns);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      float factor[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float maximum = joined(first_column_ + n * 8 + 2 * t + j).x;
        factor[j] = state.maximum[n][j] == -INFINITY ? 0.0F : ptx::exp2_fast(state.maximum[n][j] - maximum);
      }
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          shared_.scratch[warp_][2 * t + i % 2][d * 16 + g + i / 2 * 8] = state.values[d][n][i] * factor[i % 2];
        }
      }
      ptx::named_barrier(1, kComputeThreads);
      write_columns(s, n, columns - first_column_ - n * 8, v_scale, part);
      ptx::named_barrier(1, kComputeThreads);
    }
  }

  // Maximum and sum of a column over all warps.
  __device__ float2 joined(int column) const {
    float2 all = {-INFINITY, 0.0F};
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) all.x = fmaxf(all.x, shared_.state[w][column].x);
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) {
      const float2 one = shared_.state[w][column];
      all.y += one.x == -INFINITY ? 0.0F : one.y * ptx::exp2_fast(one.x - all.x);
    }
    return all;
  }

  // Column tile n of each column group, of which the first `columns` columns are queries.
  __device__ void write_columns(const Segment& s, int n, int columns, float v_scale, Partial<kHead, kColumns> part) {
    constexpr int kVectors = kHead / 4;
    for (int i = token_warp_ * 32 + lane_; i < min(columns, 8) * kVectors; i += kTokenWarps * 32) {
      const int index = i / kVectors, vector = i - index * kVectors;
      const int column = first_column_ + n * 8 + index;
      float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
      for (int w = 0; w < kTokenWarps; ++w) {
        const float4 one =
            *reinterpret_cast<const float4*>(&shared_.scratch[warp_ - token_warp_ + w][index][vector * 4]);
        sum = {sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w};
      }
      const float2 all = joined(column);
      if (part.data != nullptr) {
        if (vector == 0) __stcg(part.state(column), all);
        __stcg(part.values(column) + vector, sum);
      } else {
        const int64_t row = output_row(p_, s, kColumns, column);
        const float factor = all.y == 0.0F ? 0.0F : v_scale / all.y;
        store_4(p_, row * kHead + vector * 4, {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor});
        if (vector == 0) write_lse(p_, row, all.x, all.y);
      }
    }
  }

  // The segment's partial result is written; whoever is the last of its neighbours joins theirs, and whoever is the
  // last of these, theirs.
  __device__ void join_blocks(const Segment& s, const Ranges& ranges, int owner, int last) {
    const int which = ranges.begin(owner) == s.start ? 0 : 1;  // of the owner; all others begin with it
    const int group = (static_cast<int>(blockIdx.x) - owner) / kJoined;
    const int groups = (last - owner) / kJoined + 1;
    const int group_begin = owner + group * kJoined, group_size = min(last - group_begin + 1, kJoined);
    // Of blocks, and, behind them, those of groups of them.
    const auto of = [&](int block, int level) {
      return partial(block, block == owner ? which : 0) + int64_t{level} * gridDim.x * 2 * kPartial;
    };
    if (!is_last(2 * group_begin + (group == 0 ? which : 0), group_size)) return;
#pragma unroll 1
    for (int level = 0;; ++level) {
      const bool final = level == 1 || groups == 1;
      const auto source = [&](int k) { return level == 0 ? of(group_begin + k, 0) : of(owner + k * kJoined, 1); };
      join<kHead, kColumns, kComputeThreads>(p_, s, level == 0 ? group_size : groups, source,
                                             final ? nullptr : of(group_begin, 1));
      if (final || !is_last(2 * gridDim.x + 2 * owner + which, groups)) return;
    }
  }

  // Of `count` thread blocks that come here, for the last one. What all of them wrote before is there for it to read.
  __device__ bool is_last(int counter, int count) {
    ptx::named_barrier(1, kComputeThreads);
    if (threadIdx.x == 0) {
      const bool last = ptx::add_acquire_release(p_.counters + counter, 1) == static_cast<uint32_t>(count - 1);
      if (last) p_.counters[counter] = 0;
      shared_.last = last ? 1 : 0;
    }
    ptx::named_barrier(1, kComputeThreads);
    return shared_.last != 0;
  }

  const Params& p_;
  Shared& shared_;
  const uint32_t ring_, full_, empty_;
  const int warp_, lane_;
  const int token_warp_, first_column_;  // of a warp that computes
};

template <typename T, Cache kCache, int kHead, int kColumns>
__global__ void __launch_bounds__(block_threads(kColumns), blocks_per_multiprocessor(kColumns))
    decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  Kernel<T, kCache, kHead, kColumns>(p, shared).run();
}

// One thread block for each sequence, KV head and pass: joins its chunks, where it has several.
template <int kHead, int kColumns>
__global__ void __launch_bounds__(kJoinThreads) join_chunks_kernel(const __grid_constant__ Params p) {
  const int heads = p.num_kv_heads * p.column_tiles;
  const int seq = blockIdx.x / heads;
  int first = 0, query_start = 0;
  const int query_len = p.query_lens[seq], context = p.context_lens[seq];
  const int tiles = tile_count(p, query_len, context, first);
  const int chunk = chunk_tiles(p, tiles);
  if (tiles <= chunk) return;
  for (int other = threadIdx.x; other < seq; other += kJoinThreads) query_start += p.query_lens[other];
  __shared__ int start;
  if (threadIdx.x == 0) start = 0;
  __syncthreads();
  atomicAdd(&start, query_start);
  __syncthreads();
  const Segment s{seq, static_cast<int>(blockIdx.x) % heads, start, query_len, context, first, 0, 0, tiles, 0};
  const auto chunks = [&](int k) {
    return p.partials + (int64_t{blockIdx.x} * kMaxChunks + k) * Partial<kHead, kColumns>::kFloats;
  };
  join<kHead, kColumns, kJoinThreads>(p, s, (tiles + chunk - 1) / chunk, chunks, nullptr);
}

}  // namespace kvservice::decode
