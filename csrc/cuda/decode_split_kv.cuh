// Split-KV: the partial results of thread blocks, and their reduction.
#pragma once

#include "cuda/decode_params.cuh"
#include "cuda/ptx.cuh"

namespace kvservice::decode {

__device__ __forceinline__ void store_4(const Params& p, int64_t index, float4 x) {
  uint2 packed;
  if (p.query_is_bfloat16) {
    packed = {ptx::pack<__nv_bfloat16>(x.x, x.y), ptx::pack<__nv_bfloat16>(x.z, x.w)};
  } else {
    packed = {ptx::pack<half>(x.x, x.y), ptx::pack<half>(x.z, x.w)};
  }
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + index) = packed;
}

constexpr int kNoSlice = -1;

// A thread block that has met the other members has nothing to do, or its slice, or also the slices of those that gave
// up.
enum class Outcome { kNothing, kSlice, kOthersGaveUp };

// Units of a meeting's counts: members that have come, members that have given up, meetings so far.
constexpr uint64_t kCame = 1, kGaveUp = uint64_t{1} << 20, kMeeting = uint64_t{1} << 40;

// Returns how many members the counts have of a unit.
__device__ __forceinline__ int number_of(uint64_t unit, uint64_t counts) {
  return static_cast<int>(counts / unit % kGaveUp);
}

// The last member reduces everything if each of its threads loads so few values.
constexpr int kLoadsAlone = 4;

// Places of a slice, so that it loads whole cache lines of a partial result.
constexpr int kLeastPlaces = 8;

// So often a member looks whether all have come: for some 300 microseconds.
constexpr int kPolls = 512;

// An unnormalised sum of weighted values: the maximum (in log2 units) and the sum of each column, then the values.
template <int kHead, int kColumns>
struct Partial {
  static constexpr int kFloats = kColumns * (kHead + 2);
  float* data;

  __device__ float2* state(int column) const { return reinterpret_cast<float2*>(data) + column; }
  __device__ float4* values(int column) const {
    return reinterpret_cast<float4*>(data + 2 * kColumns + column * kHead);
  }
};

// Writes four normalised dimensions of a column and, with the first of them, its log-sum-exp.
template <int kHead>
__device__ __forceinline__ void write_output(const Params& p, const WorkTile& s, int column, int vector, float4 sum,
                                             float2 state, float v_scale) {
  constexpr float kLn2 = 0.6931471805599453F;
  const int64_t row = output_row(p, s, column);
  const float factor = state.y == 0.0F ? 0.0F : v_scale / state.y;
  store_4(p, row * kHead + vector * 4, {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor});
  if (vector == 0 && p.lse != nullptr) {
    p.lse[row] = state.y == 0.0F ? -INFINITY : (state.x + log2f(state.y)) * kLn2;
  }
}

// Sums of a few partial results in one lane: values relative to the maximum of their columns.
struct LaneSum {
  float maximum, sum;
  float4 values;

  // Makes the values relative to a larger maximum.
  __device__ void raise(float to) {
    const float factor = maximum == -INFINITY ? 0.0F : ptx::exp2_fast(maximum - to);
    maximum = to;
    sum *= factor;
    values = {values.x * factor, values.y * factor, values.z * factor, values.w * factor};
  }

  __device__ void add(float2 state, float4 more) {
    const float factor = state.x == -INFINITY ? 0.0F : ptx::exp2_fast(state.x - maximum);
    sum += state.y * factor;
    values.x += more.x * factor;
    values.y += more.y * factor;
    values.z += more.z * factor;
    values.w += more.w * factor;
  }

  __device__ void add(const LaneSum& other) {
    raise(fmaxf(maximum, other.maximum));
    add({other.maximum, other.sum}, other.values);
  }

  // Adds up the lanes whose numbers differ in the bits from `step` on.
  __device__ void add_lanes(int step) {
    float largest = maximum;
#pragma unroll 1
    for (int delta = step; delta < 32; delta *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, delta));
    raise(largest);
#pragma unroll 1
    for (int delta = step; delta < 32; delta *= 2) {
      sum += __shfl_xor_sync(~0U, sum, delta);
      values.x += __shfl_xor_sync(~0U, values.x, delta);
      values.y += __shfl_xor_sync(~0U, values.y, delta);
      values.z += __shfl_xor_sync(~0U, values.z, delta);
      values.w += __shfl_xor_sync(~0U, values.w, delta);
    }
  }
};

// Reduces the partial results of all members at places `begin` to `end`, of 16 bytes each, and writes the output. All
// kThreads threads take part. With few places, the members of a place are divided: first over warps, so that neighbours
// in a warp load neighbouring places, then over lanes. What is loaded is in L2, so the time is that of loads that wait
// for each other, and of the instructions, which run only once. `sums` is shared memory.
constexpr int kInFlight = 4;  // members per lane

template <int kHead, int kColumns, int kThreads>
__device__ __forceinline__ void reduce_places(const Params& p, const WorkTile& s, const SplitKv& split, int begin,
                                              int end, LaneSum* sums) {
  using Part = Partial<kHead, kColumns>;
  constexpr int kVectors = kHead / 4, kWarps = kThreads / 32, kWarpBits = kWarps == 4 ? 2 : 3;
  static_assert(kWarps == 1 << kWarpBits);
  if (begin >= end) return;
  int bits = 0;  // 1 << bits threads share a place
  while (1 << bits < split.members && (2 << bits) * (end - begin) <= kThreads) ++bits;
  const int warp_bits = min(bits, kWarpBits), place_bits = 5 - (bits - warp_bits);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, places = 1 << place_bits;
  const int member_warp = warp & ((1 << warp_bits) - 1);
  const float v_scale = p.v_scale != nullptr ? p.v_scale[s.kv_head] : 1.0F;
  int at = begin + (warp >> warp_bits) * places;
  do {
    const int place = at + (lane & (places - 1)), column = place / kVectors, vector = place % kVectors;
    LaneSum all = {-INFINITY, 0.0F, {0.0F, 0.0F, 0.0F, 0.0F}};
#pragma unroll 1
    for (int first = ((lane >> place_bits) << warp_bits) + member_warp; first < split.members;
         first += kInFlight << bits) {
      float2 states[kInFlight];
      float4 values[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int member = first + (i << bits);
        states[i] = {-INFINITY, 0.0F};
        values[i] = {0.0F, 0.0F, 0.0F, 0.0F};
        if (member >= split.members || place >= end) continue;
        const Part part{p.partials + int64_t{split.partial_of(member)} * Part::kFloats};
        states[i] = __ldcg(part.state(column));
        values[i] = __ldcg(part.values(column) + vector);
      }
      float largest = all.maximum;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) largest = fmaxf(largest, states[i].x);
      all.raise(largest);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) all.add(states[i], values[i]);
    }
    all.add_lanes(places);
    if (warp_bits > 0) {  // then this loop runs once
      if (lane < places) sums[warp * 32 + lane] = all;
      ptx::named_barrier(1, kThreads);
      if (member_warp != 0) return;
#pragma unroll 1
      for (int other = 1; other < 1 << warp_bits; ++other) all.add(sums[(warp + other) * 32 + (lane & (places - 1))]);
    }
    if (lane < places && place < end) {
      write_output<kHead>(p, s, column, vector, all.values, {all.maximum, all.sum}, v_scale);
    }
    at += (kWarps >> warp_bits) * places;
  } while (at < end);
}

}  // namespace kvservice::decode
