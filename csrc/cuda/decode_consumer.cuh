// The consumer warps of the decode kernel: scores, online softmax, and the product of weights and values.
#pragma once

#include "cuda/decode_epilogue.cuh"
#include "cuda/decode_score.cuh"

namespace kvservice::decode {

// The running maximum is raised, and the accumulators are rescaled, only if an exponent would exceed this value.
constexpr float kMaxExponent = 8.0F;

// Processes the KV tiles in the order in which the producer loads them, one work tile after another.
template <typename K>
class Consumer {
  static constexpr bool kFp8 = K::kFp8;
  static constexpr int kItem = K::kItem;
  static constexpr int kSteps = K::kSteps;
  static constexpr int kSubs = K::kSubs;
  static constexpr int kColumnTiles = K::kColumnTiles;
  using Scores = typename K::Scores;
  using Weights = typename K::Weights;
  using State = decode::State<K>;

 public:
  __device__ Consumer(const Block& block, typename K::Shared& shared) : block_(block), shared_(shared) {}

  __device__ void run() {
    prepare();
    ptx::wait_for_previous();
    __syncthreads();
    consume();
  }

 private:
  __device__ void prepare() {
    const Params& p = block_.p;
    if (threadIdx.x < p.num_stages) {
      ptx::mbarrier_init(block_.full + threadIdx.x * 8, ptx::kHopper ? 1 : 32);
      ptx::mbarrier_init(block_.empty + threadIdx.x * 8, K::kConsumerWarps);
    }
    if (threadIdx.x < kMaxWorkTiles) {
      ptx::mbarrier_init(block_.work_ready + threadIdx.x * 8, 33);  // the copies of 32 lanes, and the work tile
      ptx::mbarrier_init(block_.split_ready + threadIdx.x * 8, 1);
    }
    if (threadIdx.x < kQuerySlots) ptx::mbarrier_init(block_.query_empty + threadIdx.x * 8, K::kConsumerWarps);
    if (threadIdx.x == 0) ptx::mbarrier_init(block_.cluster_ready, 1);
    ptx::fence_mbarrier_init();
    __syncwarp();
    if (p.cluster > 1) ptx::cluster_arrive();
    // With little work, the chain of loads from lengths to block ids to queries and keys takes longest.
    const int at = threadIdx.x * 128;
    if (at < p.table_prefetch_bytes) ptx::prefetch(reinterpret_cast<const char*>(p.block_tables) + at);
    if (at < p.query_prefetch_bytes) ptx::prefetch(static_cast<const char*>(p.query) + at);
  }

  __device__ void consume() {
    const Params& p = block_.p;
    Score<K> score(block_, shared_);
    int stage = 0, parity = 0;
    for (int number = 0;; ++number) {
      ptx::mbarrier_wait(block_.work_ready + number % kMaxWorkTiles * 8, number / kMaxWorkTiles % 2);
      // The barriers of all members are ready.
      if (number == 0 && p.cluster > 1) ptx::cluster_wait();
      const WorkTile& s = block_.storage.work_tiles[number % kMaxWorkTiles];
      if (s.seq < 0) return;
      Columns<K> columns;
      Query<K>(block_, shared_).load(s, number % kQuerySlots, columns);
      State state;
      clear(state);
      const int end_tile = s.end_tile;
      for (int tile = s.tile; tile < end_tile; ++tile) {
        const int key_stage = stage, key_parity = parity;
        block_.advance(stage, parity);
        const int value_stage = stage, value_parity = parity;
        block_.advance(stage, parity);
        ptx::mbarrier_wait(block_.full + key_stage * 8, key_parity);
        const int rounds = p.tile_tokens / K::kRoundTokens;
        for (int round = 0; round < rounds; ++round) {
          Scores scores;
          const int offset = round * K::kRoundTokens;
          score.multiply_keys(columns, key_stage, offset, scores);
          if (round == rounds - 1) release(key_stage);
          score.mask(s, columns, tile * p.tile_tokens + offset, scores);
          Weights weights;
          softmax(scores, state, weights);
          if (round == 0) ptx::mbarrier_wait(block_.full + value_stage * 8, value_parity);
          add_values(s, value_stage, tile * p.tile_tokens, offset, weights, state);
        }
        release(value_stage);
      }
      Epilogue<K>(block_, shared_).run(s, number, state);
    }
  }

  __device__ void release(int stage) {
    __syncwarp();
    if (block_.lane == 0) ptx::mbarrier_arrive(block_.empty + stage * 8);
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

  // Converts scores to weights in the operand layout of the second product.
  __device__ void softmax(Scores& scores, State& state, Weights& weights) {
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

  __device__ void add_values(const WorkTile& s, int stage, int position, int offset, const Weights& weights,
                             State& state) {
    const Params& p = block_.p;
    const int block_size = 1 << p.block_shift;
    const int g = block_.lane / 4, t = block_.lane % 4;
    const int seen = block_.first_seen(s);
    uint32_t row[kSubs], keep[kSubs][2];
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int token = offset + (sub * kTokenWarps + block_.token_warp) * 16 + 4 * t;
      row[sub] = block_.stages + stage * p.stage_bytes + (token >> p.block_shift) * p.head_bytes +
                 (g * block_size + (token & (block_size - 1))) * kItem;
      // Slots that no query sees may hold any bits, and zero times NaN is NaN.
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

  // Loads four tokens of one dimension.
  __device__ static void load_values(uint32_t address, uint32_t& first, uint32_t& second) {
    if constexpr (kFp8) {
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
