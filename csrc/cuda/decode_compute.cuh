// The warps of the decode kernel that compute: scores, their softmax, and the second product, weights times values.
#pragma once

#include "cuda/decode_finish.cuh"
#include "cuda/decode_score.cuh"

namespace kvservice::decode {

// A maximum is raised, and with it all that has been summed up is scaled, only where an exponent would pass this.
constexpr float kMaxExponent = 8.0F;

// Goes through the tiles in the ring, segment by segment, in the order in which they were brought there.
template <typename K>
class Computer {
  static constexpr bool kBytes = K::kBytes;
  static constexpr int kItem = K::kItem;
  static constexpr int kSteps = K::kSteps;
  static constexpr int kSubs = K::kSubs;
  static constexpr int kColumnTiles = K::kColumnTiles;
  using Scores = typename K::Scores;
  using Weights = typename K::Weights;
  using State = decode::State<K>;

 public:
  __device__ Computer(const Block& block, typename K::Shared& shared) : block_(block), shared_(shared) {}

  __device__ void run() {
    prepare();
    __syncthreads();
    compute();
  }

 private:
  __device__ void prepare() {
    const Params& p = block_.p;
    if (threadIdx.x < p.entries) {
      ptx::mbarrier_init(block_.full + threadIdx.x * 8, ptx::kHopper ? 1 : 32);
      ptx::mbarrier_init(block_.empty + threadIdx.x * 8, K::kWarps);
    }
    if (threadIdx.x < kSegments) {
      ptx::mbarrier_init(block_.described + threadIdx.x * 8, 1);
      ptx::mbarrier_init(block_.divided + threadIdx.x * 8, 1);
    }
    ptx::fence_mbarrier_init();
    // Where there is little to do, the way from lengths to block ids to queries and keys takes longest.
    const int at = threadIdx.x * 128;
    if (at < p.table_prefetch_bytes) ptx::prefetch(reinterpret_cast<const char*>(p.block_tables) + at);
    if (at < p.query_prefetch_bytes) ptx::prefetch(static_cast<const char*>(p.query) + at);
  }

  __device__ void compute() {
    const Params& p = block_.p;
    Score<K> score(block_, shared_);
    int entry = 0, parity = 0;
    for (int number = 0;; ++number) {
      ptx::mbarrier_wait(block_.described + number % kSegments * 8, number / kSegments % 2);
      const Segment& s = block_.signals.segments[number % kSegments];
      if (s.seq < 0) return;
      Columns<K> columns;
      Query<K>(block_, shared_).load(s, columns);
      State state;
      clear(state);
      const int end_tile = s.end_tile;
      for (int tile = s.tile; tile < end_tile; ++tile) {
        const int key_entry = entry, key_parity = parity;
        block_.advance(entry, parity);
        const int value_entry = entry, value_parity = parity;
        block_.advance(entry, parity);
        ptx::mbarrier_wait(block_.full + key_entry * 8, key_parity);
        const int rounds = p.tile_tokens / K::kRoundTokens;
        for (int round = 0; round < rounds; ++round) {
          Scores scores;
          const int offset = round * K::kRoundTokens;
          score.multiply_keys(columns, key_entry, offset, scores);
          if (round == rounds - 1) release(key_entry);
          score.mask(s, columns, tile * p.tile_tokens + offset, scores);
          Weights weights;
          weigh(scores, state, weights);
          if (round == 0) ptx::mbarrier_wait(block_.full + value_entry * 8, value_parity);
          add_values(s, value_entry, tile * p.tile_tokens, offset, weights, state);
        }
        release(value_entry);
      }
      Finisher<K>(block_, shared_).run(s, number, state);
    }
  }

  __device__ void release(int entry) {
    __syncwarp();
    if (block_.lane == 0) ptx::mbarrier_arrive(block_.empty + entry * 8);
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

  // Scores to weights, as the second product takes them.
  __device__ void weigh(Scores& scores, State& state, Weights& weights) {
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
        weights[sub][n][0] = ptx::transpose_8x8(ptx::pack<typename K::Element>(weight[0], weight[1]));
        weights[sub][n][1] = ptx::transpose_8x8(ptx::pack<typename K::Element>(weight[2], weight[3]));
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

  __device__ void add_values(const Segment& s, int entry, int position, int offset, const Weights& weights,
                             State& state) {
    const Params& p = block_.p;
    const int block_size = 1 << p.block_shift;
    const int g = block_.lane / 4, t = block_.lane % 4;
    const int seen = block_.first_seen(s);
    uint32_t row[kSubs], keep[kSubs][2];
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int token = offset + (sub * kTokenWarps + block_.token_warp) * 16 + 4 * t;
      row[sub] = block_.ring + entry * p.entry_bytes + (token >> p.block_shift) * p.head_bytes +
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
          ptx::mma<typename K::Element>(state.values[d][n], values, weights[sub][n][0], weights[sub][n][1]);
        }
      }
    }
  }

  // Four tokens of a dimension.
  __device__ static void load_values(uint32_t address, uint32_t& first, uint32_t& second) {
    if constexpr (kBytes) {
      uint32_t bytes;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bytes) : "r"(address) : "memory");
      widen<K::kCache>(bytes, first, second);
    } else {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address) : "memory");
    }
  }

  const Block& block_;
  typename K::Shared& shared_;
};

}  // namespace kvservice::decode
