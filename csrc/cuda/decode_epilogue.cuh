// The epilogue of a work tile in the decode kernel: combines the warps' results, then the results of the thread blocks
// that share a sequence (split-KV reduction).
#pragma once

#include "cuda/decode_block.cuh"

namespace kvservice::decode {

// Accumulators of a warp over its tokens. With g = lane / 4 and t = lane % 4, a lane has rows g and g + 8 of each 16
// dimensions, and columns 2t and 2t + 1 of each column tile.
template <typename K>
struct State {
  float maximum[K::kColumnTiles][2];
  float sum[K::kColumnTiles][2];
  float values[K::kSteps][K::kColumnTiles][4];
};

// Writes to the output, or to a partial result for the last of several thread blocks to reduce.
template <typename K>
class Epilogue {
  static constexpr int kHead = K::kHead;
  static constexpr int kColumns = K::kColumns;
  static constexpr int kSteps = K::kSteps;
  static constexpr int kColumnTiles = K::kColumnTiles;
  static constexpr int kConsumerThreads = K::kConsumerThreads;
  using State = decode::State<K>;
  using Partial = decode::Partial<kHead, kColumns>;

 public:
  __device__ Epilogue(const Block& block, typename K::Shared& shared) : block_(block), shared_(shared) {}

  __device__ void run(const WorkTile& s, int number, State& state) {
    ptx::mbarrier_wait(block_.split_ready + number % kMaxWorkTiles * 8, number / kMaxWorkTiles % 2);
    const SplitKv& split = block_.storage.splits[number % kMaxWorkTiles];
    combine_warps(s, state, Partial{split.partial < 0 ? nullptr : partial(split.partial)});
    if (split.groups != 0) reduce_splits(s, split);
    if (split.chunks != 0) reduce_chunks(s, split);
  }

 private:
  __device__ float* partial(int index) const { return block_.p.partials + int64_t{index} * Partial::kFloats; }

  // Writes to `part`, or to the output if `part` is null.
  __device__ void combine_warps(const WorkTile& s, State& state, Partial part) {
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
    ptx::named_barrier(1, kConsumerThreads);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = block_.first_column + n * 8 + 2 * t + j;
        const float maximum = combined_state(column).x;
        const float factor = state.maximum[n][j] == -INFINITY ? 0.0F : ptx::exp2_fast(state.maximum[n][j] - maximum);
        float* row = shared_.scratch[block_.token_warp][column];
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          row[d * 16 + g] = state.values[d][n][j] * factor;
          row[d * 16 + g + 8] = state.values[d][n][j + 2] * factor;
        }
      }
    }
    ptx::named_barrier(1, kConsumerThreads);
    write_columns(s, part);
    ptx::named_barrier(1, kConsumerThreads);
  }

  // Returns the maximum and the sum of a column over all warps.
  __device__ float2 combined_state(int column) const {
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

  __device__ void write_columns(const WorkTile& s, Partial part) {
    const Params& p = block_.p;
    constexpr int kVectors = kHead / 4;
    const float v_scale = p.v_scale != nullptr ? p.v_scale[s.kv_head] : 1.0F;
    const int places = used_columns(p, s) * kVectors;
    for (int i = threadIdx.x; i < places; i += kConsumerThreads) {
      const int column = i / kVectors, vector = i - column * kVectors;
      float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
      for (int w = 0; w < kTokenWarps; ++w) {
        const float4 one = *reinterpret_cast<const float4*>(&shared_.scratch[w][column][vector * 4]);
        sum = {sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w};
      }
      const float2 all = combined_state(column);
      if (part.data != nullptr) {
        if (vector == 0) __stcg(part.state(column), all);
        __stcg(part.values(column) + vector, sum);
      } else {
        write_output<kHead>(p, s, column, vector, sum, all, v_scale);
      }
    }
  }

  // Runs after the partial result of this work tile is written. The last thread block of a group reduces the group's
  // partial results; the last group to finish reduces the results of all groups.
  __device__ void reduce_splits(const WorkTile& s, const SplitKv& split) {
    const int second = 2 * gridDim.x;  // partial results of groups follow those of thread blocks
    if (!is_last(split.group_partial, 1, split.group_size)) return;
#pragma unroll 1
    for (int level = 0;; ++level) {
      const bool final = level == 1 || split.groups == 1;
      const int first = level == 0 ? split.group_partial : second + split.first_partial;
      const int block = level == 0 ? split.group_block : gridDim.x + split.first_block,
                stride = level == 0 ? 1 : kSplitsPerGroup;
      const auto source = [&](int k) { return partial(k == 0 ? first : 2 * (block + k * stride)); };
      reduce_partials<kHead, kColumns, kConsumerThreads>(
          block_.p, s, level == 0 ? split.group_size : split.groups, source,
          final ? nullptr : partial(second + split.group_partial), shared_.split_factors);
      if (final || !is_last(second + split.first_partial, 1, split.groups)) return;
    }
  }

  // Batch-invariant mode: runs after this thread block's last chunk of a sequence and head. The last thread block of
  // these reduces all chunks in order. A thread block that has all of them does not need the counter.
  __device__ void reduce_chunks(const WorkTile& s, const SplitKv& split) {
    if (split.own_chunks < split.chunks && !is_last(split.counter, split.own_chunks, split.chunks)) return;
    const auto source = [&](int k) { return partial(split.first_chunk + k); };
    reduce_partials<kHead, kColumns, kConsumerThreads>(block_.p, s, split.chunks, source, nullptr,
                                                       shared_.split_factors);
  }

  // Adds to a counter. Returns true in the thread block that brings it to `total`, which then sees everything that the
  // others wrote before, and resets the counter.
  __device__ bool is_last(int counter, int by, int total) {
    const Params& p = block_.p;
    ptx::named_barrier(1, kConsumerThreads);
    if (threadIdx.x == 0) {
      const bool last = ptx::add_acquire_release(p.counters + counter, by) + by == static_cast<uint32_t>(total);
      if (last) p.counters[counter] = 0;
      block_.storage.last = last ? 1 : 0;
    }
    ptx::named_barrier(1, kConsumerThreads);
    return block_.storage.last != 0;
  }

  const Block& block_;
  typename K::Shared& shared_;
};

}  // namespace kvservice::decode
