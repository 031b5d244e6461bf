// The epilogue of a work tile in the decode kernel: combines the warps' results, then, after a meeting, those of the
// thread blocks that share a sequence (split-KV reduction).
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

// Writes to the output, or to a partial result if the work tile is one of several.
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
    combine_warps(s, state, split);
    if (split.clustered) {
      reduce_cluster(s, split);
    } else if (split.members != 0) {
      reduce(s, split);
    }
  }

 private:
  __device__ float* partial(int index) const { return block_.p.partials + int64_t{index} * Partial::kFloats; }

  // Writes to the output, to a partial result, or to the members of a cluster.
  __device__ void combine_warps(const WorkTile& s, State& state, const SplitKv& split) {
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
    write_columns(s, split);
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

  __device__ void write_columns(const WorkTile& s, const SplitKv& split) {
    const Partial part{split.partial < 0 ? nullptr : partial(split.partial)};
    const Params& p = block_.p;
    constexpr int kVectors = kHead / 4;
    const float v_scale = p.v_scale != nullptr ? p.v_scale[s.kv_head] : 1.0F;
    const int places = used_columns(p, s) * kVectors;
    const int each = split.clustered ? slice_places(split, places) : 1;
    if (split.clustered) send_states(s, split);
    for (int i = threadIdx.x; i < places; i += kConsumerThreads) {
      const int column = i / kVectors, vector = i - column * kVectors;
      float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
      for (int w = 0; w < kTokenWarps; ++w) {
        const float4 one = *reinterpret_cast<const float4*>(&shared_.scratch[w][column][vector * 4]);
        sum = {sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w};
      }
      if (split.clustered) {
        const int member = divide(i, each);
        ptx::store_async(ptx::shared_address(&shared_.arrived[split.slice * each + i - member * each]),
                         block_.cluster_ready, member, sum);
        continue;
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

  // Returns the places of each member's slice, but perhaps the last.
  __device__ static int slice_places(const SplitKv& split, int places) { return divide_up(places, split.members); }

  __device__ void send_states(const WorkTile& s, const SplitKv& split) {
    const int columns = used_columns(block_.p, s);
    for (int i = threadIdx.x; i < columns * split.members; i += kConsumerThreads) {
      const int member = divide(i, columns), column = i - member * columns;
      ptx::store_async(ptx::shared_address(&shared_.arrived_states[split.slice][column]), block_.cluster_ready, member,
                       combined_state(column));
    }
  }

  // Waits for the partial results of all members, and writes a slice of the output.
  __device__ void reduce_cluster(const WorkTile& s, const SplitKv& split) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const Params& p = block_.p;
    constexpr int kVectors = kHead / 4;
    const int columns = used_columns(p, s), places = columns * kVectors, each = slice_places(split, places);
    const int begin = split.slice * each, end = min(begin + each, places);
    if (threadIdx.x == 0) {
      const int bytes =
          max(end - begin, 0) * static_cast<int>(sizeof(float4)) + columns * static_cast<int>(sizeof(float2));
      ptx::mbarrier_arrive_expect(block_.cluster_ready, split.members * bytes);
    }
    ptx::mbarrier_wait(block_.cluster_ready, 0);
    const float v_scale = p.v_scale != nullptr ? p.v_scale[s.kv_head] : 1.0F;
    for (int place = begin + static_cast<int>(threadIdx.x); place < end; place += kConsumerThreads) {
      const int column = place / kVectors, vector = place % kVectors;
      LaneSum all = {-INFINITY, 0.0F, {0.0F, 0.0F, 0.0F, 0.0F}};
#pragma unroll 4
      for (int member = 0; member < split.members; ++member) {
        all.maximum = fmaxf(all.maximum, shared_.arrived_states[member][column].x);
      }
#pragma unroll 4
      for (int member = 0; member < split.members; ++member) {
        all.add(shared_.arrived_states[member][column], shared_.arrived[member * each + place - begin]);
      }
      write_output<kHead>(p, s, column, vector, all.values, {all.maximum, all.sum}, v_scale);
    }
#endif
  }

  // Split-KV: meets the other members, after this one has written its partial results, and reduces its slice.
  __device__ void reduce(const WorkTile& s, const SplitKv& split) {
    const int places = used_columns(block_.p, s) * (kHead / 4);
    // With little to reduce, the last member to come is done before the others see that it has.
    const bool alone = split.members * places <= kLoadsAlone * kConsumerThreads;
    const int slices = alone ? 0 : min(split.slices, places / kLeastPlaces);
    if (threadIdx.x == 0) {
      // In batch-invariant mode, a thread block may have all chunks, and share the meeting's place with others.
      block_.storage.outcome = split.own == split.members ? Outcome::kSlice : meet(split, slices);
    }
    ptx::named_barrier(1, kConsumerThreads);
    const Outcome outcome = block_.storage.outcome;
    if (outcome == Outcome::kNothing) return;
    const int each = slices == 0 ? places : divide(places + slices - 1, slices);
    int slice = slices == 0 ? 0 : split.slice < slices ? split.slice : kNoSlice;
    while (true) {
      if (slice != kNoSlice) {
        reduce_places<kHead, kColumns, kConsumerThreads>(block_.p, s, split, slice * each,
                                                         min((slice + 1) * each, places), shared_.sums);
      }
      if (outcome != Outcome::kOthersGaveUp) return;
      if (threadIdx.x == 0) block_.storage.taken_over = take_over(split, slices);
      ptx::named_barrier(1, kConsumerThreads);
      slice = block_.storage.taken_over;
      ptx::named_barrier(1, kConsumerThreads);
      if (slice == kNoSlice) return;
    }
  }

  // Runs in one thread. A member with a slice of its own waits for the others, but not for ever: they may not be
  // running yet, and need its place. Then it gives up, and the last one to come takes over its slice. The last one to
  // come also makes the counts ready for the next meeting.
  __device__ Outcome meet(const SplitKv& split, int slices) const {
    uint64_t* counts = &block_.p.meetings[split.meeting].counts;
    const bool waits = split.slice < slices;
    const uint64_t own = split.own * kCame, members = split.members * kCame;
    const uint64_t before = ptx::add_acquire_release(counts, own);
    if (number_of(kCame, before + own) == split.members) {
      const uint64_t gave_up = number_of(kGaveUp, before) * kGaveUp;
      ptx::add_relaxed(counts, kMeeting - members - gave_up);
      if (gave_up > 0) return Outcome::kOthersGaveUp;
      return waits || slices == 0 ? Outcome::kSlice : Outcome::kNothing;
    }
    if (!waits) return Outcome::kNothing;
    const auto all_came = [&](uint64_t now) {
      return number_of(kCame, now) == split.members || now / kMeeting != before / kMeeting;
    };
#pragma unroll 1
    for (int poll = 0; poll < kPolls; ++poll) {
      if (all_came(ptx::load_acquire(counts))) return Outcome::kSlice;
    }
    uint32_t& given_up = block_.p.meetings[split.partial].given_up;
    given_up = 1;
    if (!all_came(ptx::add_acquire_release(counts, kGaveUp))) return Outcome::kNothing;
    ptx::add_relaxed(counts, -kGaveUp);
    given_up = 0;
    return Outcome::kSlice;
  }

  // Returns a slice whose owner gave up. An owner that finds, as it gives up, that all have come takes its slice back;
  // both may then write the same output.
  __device__ int take_over(const SplitKv& split, int slices) const {
    for (int slice = 0; slice < slices; ++slice) {
      uint32_t& given_up = block_.p.meetings[split.partial_of(slice)].given_up;
      if (slice == split.slice || __ldcg(&given_up) == 0) continue;
      given_up = 0;
      return slice;
    }
    return kNoSlice;
  }

  const Block& block_;
  typename K::Shared& shared_;
};

}  // namespace kvservice::decode
