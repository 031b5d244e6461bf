// The end of a segment in the decode kernel: its warps join what they have, and thread blocks what several have.
#pragma once

#include "cuda/decode_block.cuh"

namespace kvservice::decode {

// What a warp has summed up over its tokens. A lane has rows g and g + 8 of each 16 dimensions, and columns 2t and 2t +
// 1 of each column tile, where g = lane / 4, t = lane % 4.
template <typename K>
struct State {
  float maximum[K::kColumnTiles][2];
  float sum[K::kColumnTiles][2];
  float values[K::kSteps][K::kColumnTiles][4];
};

// To the output, or to where the last of several thread blocks finds it.
template <typename K>
class Finisher {
  static constexpr int kHead = K::kHead;
  static constexpr int kColumns = K::kColumns;
  static constexpr int kSteps = K::kSteps;
  static constexpr int kColumnTiles = K::kColumnTiles;
  static constexpr int kComputeThreads = K::kComputeThreads;
  using State = decode::State<K>;
  using Partial = decode::Partial<kHead, kColumns>;

 public:
  __device__ Finisher(const Block& block, typename K::Shared& shared) : block_(block), shared_(shared) {}

  __device__ void run(const Segment& s, int number, State& state) {
    ptx::mbarrier_wait(block_.divided + number % kSegments * 8, number / kSegments % 2);
    const Share& share = block_.signals.shares[number % kSegments];
    join_warps(s, state, Partial{share.partial < 0 ? nullptr : partial(share.partial)});
    if (share.groups != 0) join_blocks(s, share);
  }

 private:
  __device__ float* partial(int index) const { return block_.p.partials + int64_t{index} * Partial::kFloats; }

  // To the output, or to `part`.
  __device__ void join_warps(const Segment& s, State& state, Partial part) {
    const int g = block_.lane / 4, t = block_.lane % 4;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int delta = 4; delta < 32; delta *= 2) state.sum[n][j] += __shfl_xor_sync(~0U, state.sum[n][j], delta);
        if (g == 0)
          shared_.state[block_.token_warp][block_.first_column + n * 8 + 2 * t + j] = {state.maximum[n][j],
                                                                                       state.sum[n][j]};
      }
    }
    ptx::named_barrier(1, kComputeThreads);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = block_.first_column + n * 8 + 2 * t + j;
        const float maximum = joined(column).x;
        const float factor = state.maximum[n][j] == -INFINITY ? 0.0F : ptx::exp2_fast(state.maximum[n][j] - maximum);
        float* row = shared_.scratch[block_.token_warp][column];
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

  __device__ void write_columns(const Segment& s, Partial part) {
    const Params& p = block_.p;
    constexpr int kVectors = kHead / 4;
    const float v_scale = p.v_scale != nullptr ? p.v_scale[s.kv_head] : 1.0F;
    const int places = used_columns(p, s) * kVectors;
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
        write_output<kHead>(p, s, column, vector, sum, all, v_scale);
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
      join<kHead, kColumns, kComputeThreads>(block_.p, s, level == 0 ? share.group_size : share.groups, source,
                                             final ? nullptr : partial(second + share.group_partial), shared_.joined);
      if (final || !is_last(second + share.first_partial, share.groups)) return;
    }
  }

  // Of `count` thread blocks that come here, for the last one. What all of them wrote before is there for it to read.
  __device__ bool is_last(int counter, int count) {
    const Params& p = block_.p;
    ptx::named_barrier(1, kComputeThreads);
    if (threadIdx.x == 0) {
      const bool last = ptx::add_acquire_release(p.counters + counter, 1) == static_cast<uint32_t>(count - 1);
      if (last) p.counters[counter] = 0;
      block_.signals.last = last ? 1 : 0;
    }
    ptx::named_barrier(1, kComputeThreads);
    return block_.signals.last != 0;
  }

  const Block& block_;
  typename K::Shared& shared_;
};

}  // namespace kvservice::decode
