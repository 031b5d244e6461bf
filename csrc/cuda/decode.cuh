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
// The warp that fills the ring describes the segments to the others. It can be ahead of them by as many as have a tile
// in the ring, one that it waits to put there, and one that they are at the end of.
constexpr int kSegments = kMaxEntries / 2 + 2;
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
    uint64_t described[kSegments];
    uint64_t divided[kSegments];
    Segment segments[kSegments];
    Share shares[kSegments];
    int last;
    alignas(16) float2 state[kTokenWarps][kColumns];
    union {
      alignas(16) float scratch[kTokenWarps][kColumns][kScratchRow];
      float2 joined[kColumns][kMaxJoined];
    };
    uint2 query[kColumnTiles > 1 ? kSteps * kColumns / 8 : 1][32];
  };

  static constexpr int kRingOffset = (static_cast<int>(sizeof(Shared)) + 127) / 128 * 128;

  __device__ Kernel(const Params& p, char* shared)
      : p_(p),
        shared_(*reinterpret_cast<Shared*>(shared)),
        ring_(ptx::shared_address(shared + kRingOffset)),
        full_(ptx::shared_address(shared_.full)),
        empty_(ptx::shared_address(shared_.empty)),
        described_(ptx::shared_address(shared_.described)),
        divided_(ptx::shared_address(shared_.divided)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        token_warp_(warp_ % kTokenWarps),
        first_column_(warp_ / kTokenWarps * kColumnTiles * 8) {}

  __device__ void run() {
    if (warp_ == kWarps) {
      Walker walker(p_, lane_);
      __syncthreads();
      fill_ring(walker);
    } else {
      prepare();
      __syncthreads();
      compute();
    }
  }

 private:
  __device__ void prepare() {
    if (threadIdx.x < p_.entries) {
      ptx::mbarrier_init(full_ + threadIdx.x * 8, ptx::kHopper ? 1 : 32);
      ptx::mbarrier_init(empty_ + threadIdx.x * 8, kWarps);
    }
    if (threadIdx.x < kSegments) {
      ptx::mbarrier_init(described_ + threadIdx.x * 8, 1);
      ptx::mbarrier_init(divided_ + threadIdx.x * 8, 1);
    }
    ptx::fence_mbarrier_init();
    // Where there is little to do, the way from lengths to block ids to queries and keys takes longest.
    const int at = threadIdx.x * 128;
    if (at < p_.table_prefetch_bytes) ptx::prefetch(reinterpret_cast<const char*>(p_.block_tables) + at);
    if (at < p_.query_prefetch_bytes) ptx::prefetch(static_cast<const char*>(p_.query) + at);
  }

  // ---- the warp that fills the ring

  struct Tile {
    Segment segment;
    int number;  // of the segment, among those of the thread block
    int index;
    int first_block, num_blocks;  // of the tile, those that any query sees
    int block;                    // this lane's block id
    // Block ids of the segment, 32 at a time, one for each lane; those after them are on their way.
    int first_id, ids, next_ids;
  };

  // Of the block `index` of a sequence: none where no query sees it.
  __device__ int load_id(const Segment& s, int index) const {
    const bool seen = index >= first_seen(s) >> p_.block_shift && index <= (s.context - 1) >> p_.block_shift;
    return seen ? __ldg(p_.block_tables + int64_t{s.seq} * p_.max_blocks + index) : 0;
  }

  // The first position that a query of the segment sees.
  __device__ int first_seen(const Segment& s) const {
    return p_.sliding_window > 0 ? max(0, s.context - s.query_len + 1 - p_.sliding_window) : 0;
  }

  __device__ bool next_tile(Walker& walker, Tile& tile) {
    const Segment& s = tile.segment;
    const int blocks = p_.tile_tokens >> p_.block_shift;
    if (++tile.index >= s.end_tile) {
      const bool more = walker.next(tile.segment);
      describe(s, ++tile.number);
      if (!more) return false;
      tile.index = s.tile;
      tile.first_id = tile.index * blocks;
      tile.ids = load_id(s, tile.first_id + lane_);
      tile.next_ids = load_id(s, tile.first_id + 32 + lane_);
    }
    const int begin = tile.index * blocks;
    if (begin - tile.first_id == 32) {
      tile.first_id = begin;
      tile.ids = tile.next_ids;
      tile.next_ids = load_id(s, begin + 32 + lane_);
    }
    tile.first_block = max(begin, first_seen(s) >> p_.block_shift) - begin;
    tile.num_blocks = min(blocks, ((s.context - 1) >> p_.block_shift) + 1 - begin) - tile.first_block;
    tile.block = __shfl_sync(~0U, tile.ids, begin - tile.first_id + tile.first_block + lane_);
    return true;
  }

  __device__ void describe(const Segment& segment, int number) {
    if (lane_ != 0) return;
    shared_.segments[number % kSegments] = segment;
    ptx::mbarrier_arrive(described_ + number % kSegments * 8);
  }

  __device__ void divide(const Walker& walker, const Tile& tile) {
    const Share share = walker.share(tile.segment);
    if (lane_ != 0) return;
    shared_.shares[tile.number % kSegments] = share;
    ptx::mbarrier_arrive(divided_ + tile.number % kSegments * 8);
  }

  __device__ void fill_ring(Walker& walker) {
    Tile next;
    next.number = -1;
    next.index = next.segment.end_tile = 0;
    bool more = next_tile(walker, next);
    int entry = 0, parity = 1;
    while (more) {
      const Tile tile = next;
      const char* key = p_.pool + int64_t{tile.block} * p_.block_bytes + int64_t{tile.segment.kv_head} * p_.head_bytes;
      for (int part = 0; part < 2; ++part) {
        ptx::mbarrier_wait(empty_ + entry * 8, parity);
        fill(tile, key + part * int64_t{p_.value_bytes}, entry);
        advance(entry, parity);
        if (part == 1) continue;
        if (tile.index == tile.segment.tile) divide(walker, tile);
        more = next_tile(walker, next);  // its block ids arrive while this tile waits for room
      }
    }
  }

  __device__ void fill(const Tile& tile, const char* source, int entry) {
    const uint32_t to = ring_ + entry * p_.entry_bytes + tile.first_block * p_.head_bytes;
    const uint32_t barrier = full_ + entry * 8;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (lane_ == 0) ptx::mbarrier_arrive_expect(barrier, tile.num_blocks * p_.head_bytes);
    __syncwarp();
    if (lane_ < tile.num_blocks)
      ptx::bulk_copy(to + lane_ * p_.head_bytes, source, p_.head_bytes, barrier, ptx::evict_first_policy());
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

  __device__ void compute() {
    int entry = 0, parity = 0;
    for (int number = 0;; ++number) {
      ptx::mbarrier_wait(described_ + number % kSegments * 8, number / kSegments % 2);
      const Segment& s = shared_.segments[number % kSegments];
      if (s.seq < 0) return;
      Columns columns;
      load_columns(s, columns);
      State state;
      clear(state);
      const int end_tile = s.end_tile;
      for (int tile = s.tile; tile < end_tile; ++tile) {
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
      finish(s, number, state);
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
    const float base = p_.scale * (p_.k_scale != nullptr ? p_.k_scale[s.kv_head] : 1.0F) *
                       (p_.soft_cap == 0.0F ? 1.4426950408889634F : 1.0F);
    const int first_limit = s.context - s.query_len + 1;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = first_column_ + n * 8 + g;
      const int64_t row = column < used_columns(p_, s) ? output_row(p_, s, column) : -1;
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
        const int index = s.first_query + first_column_ + n * 8 + 2 * t + j;
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
    return p_.plain() ? score : special_score(p_, s.kv_head, s.first_query + column, limit - 1 - token, token, score);
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
    const int seen = first_seen(s);
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

  __device__ void finish(const Segment& s, int number, State& state) {
    ptx::mbarrier_wait(divided_ + number % kSegments * 8, number / kSegments % 2);
    const Share& share = shared_.shares[number % kSegments];
    join_warps(s, state, Partial<kHead, kColumns>{share.partial < 0 ? nullptr : partial(share.partial)});
    if (share.groups != 0) join_blocks(s, share);
  }

  __device__ float* partial(int index) const { return p_.partials + int64_t{index} * kPartial; }

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
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = first_column_ + n * 8 + 2 * t + j;
        const float maximum = joined(column).x;
        const float factor = state.maximum[n][j] == -INFINITY ? 0.0F : ptx::exp2_fast(state.maximum[n][j] - maximum);
        float* row = shared_.scratch[token_warp_][column];
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          row[d * 16 + g] = state.values[d][n][j] * factor;
          row[d * 16 + g + 8] = state.values[d][n][j + 2] * factor;
        }
      }
    }
    ptx::named_barrier(1, kComputeThreads);
    write_columns(s, part);
    ptx::named_barrier(1, kComputeThreads);
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

  __device__ void write_columns(const Segment& s, Partial<kHead, kColumns> part) {
    constexpr int kVectors = kHead / 4;
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[s.kv_head] : 1.0F;
    const int places = used_columns(p_, s) * kVectors;
    for (int i = threadIdx.x; i < places; i += kComputeThreads) {
      const int column = i / kVectors, vector = i - column * kVectors;
      float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
      for (int w = 0; w < kTokenWarps; ++w) {
        const float4 one = *reinterpret_cast<const float4*>(&shared_.scratch[w][column][vector * 4]);
        sum = {sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w};
      }
      const float2 all = joined(column);
      if (part.data != nullptr) {
        if (vector == 0) __stcg(part.state(column), all);
        __stcg(part.values(column) + vector, sum);
      } else {
        write_output<kHead>(p_, s, column, vector, sum, all, v_scale);
      }
    }
  }

  // The segment's partial result is written; whoever is the last of its neighbours joins theirs, and whoever is the
  // last of these, theirs.
  __device__ void join_blocks(const Segment& s, const Share& share) {
    const int second = 2 * gridDim.x;  // behind the partial results of thread blocks, those of groups
    if (!is_last(share.group_partial, share.group_size)) return;
#pragma unroll 1
    for (int level = 0;; ++level) {
      const bool final = level == 1 || share.groups == 1;
      const int first = level == 0 ? share.group_partial : second + share.first_partial;
      const int block = level == 0 ? share.group_block : gridDim.x + share.first_block,
                stride = level == 0 ? 1 : kJoined;
      const auto source = [&](int k) { return partial(k == 0 ? first : 2 * (block + k * stride)); };
      join<kHead, kColumns, kComputeThreads>(p_, s, level == 0 ? share.group_size : share.groups, source,
                                             final ? nullptr : partial(second + share.group_partial), shared_.joined);
      if (final || !is_last(second + share.first_partial, share.groups)) return;
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
  const uint32_t ring_, full_, empty_, described_, divided_;
  const int warp_, lane_;
  const int token_warp_, first_column_;  // of a warp that computes
};

template <typename T, Cache kCache, int kHead, int kColumns>
__global__ void __launch_bounds__(block_threads(kColumns), blocks_per_multiprocessor(kCache, kHead, kColumns))
    decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  Kernel<T, kCache, kHead, kColumns>(p, shared).run();
}

// One thread block for each sequence, KV head and pass: joins its chunks, where it has several.
template <int kHead, int kColumns>
__global__ void __launch_bounds__(kJoinThreads) join_chunks_kernel(const __grid_constant__ Params p) {
  const int heads = p.num_kv_heads * p.column_tiles;
  const int item = blockIdx.x, seq = item / heads, head = item - seq * heads;
  Segment s;
  s.seq = seq;
  s.kv_head = head / p.column_tiles;
  s.first_query = (head - s.kv_head * p.column_tiles) * p.columns;
  s.query_len = p.query_lens[seq];
  s.context = p.context_lens[seq];
  int first = 0;
  const int tiles = tile_count(p, s.query_len, s.context, first), chunk = chunk_tiles(p, tiles);
  if (tiles <= chunk) return;
  __shared__ int query_start;
  if (threadIdx.x == 0) query_start = 0;
  __syncthreads();
  int before = 0;
  for (int other = threadIdx.x; other < seq; other += kJoinThreads) before += p.query_lens[other];
  atomicAdd(&query_start, before);
  __syncthreads();
  s.query_start = query_start;
  const auto chunks = [&](int k) {
    return p.partials + (int64_t{item} * kMaxChunks + k) * Partial<kHead, kColumns>::kFloats;
  };
  __shared__ float2 states[kColumns][kMaxJoined];
  join<kHead, kColumns, kJoinThreads>(p, s, (tiles + chunk - 1) / chunk, chunks, nullptr, states);
}

}  // namespace kvservice::decode
