// Split-KV: the partial results of thread blocks, and their reduction.
#pragma once

#include "cuda/decode_schedule.cuh"
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

// The most partial results that one reduction takes: neighbours, groups or chunks.
constexpr int kMaxSplits = 32;

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

// A reduction keeps here, in shared memory, what it has computed from the states of its partial results.
template <int kColumns>
struct SplitFactors {
  float2 total[kColumns];              // the state of all partial results together
  float factor[kColumns][kMaxSplits];  // of each partial result's values
};

// Computes the factors of `count` partial results. Each warp takes some columns, with a partial result in each lane.
template <int kHead, int kColumns, int kThreads, typename Source>
__device__ __forceinline__ void write_factors(int columns, int count, Source&& source,
                                              SplitFactors<kColumns>& factors) {
  static_assert(kMaxSplits == 32);
  constexpr int kWarps = kThreads / 32, kEach = (kColumns + kWarps - 1) / kWarps;
  const int lane = threadIdx.x % 32;
  float2 states[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int column = threadIdx.x / 32 + i * kWarps;
    states[i] = {-INFINITY, 0.0F};
    if (column < columns && lane < count) {
      states[i] = __ldcg(Partial<kHead, kColumns>{source(lane)}.state(column));
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int column = threadIdx.x / 32 + i * kWarps;
    float maximum = states[i].x;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0U, maximum, delta));
    const float factor = ptx::exp2_fast(states[i].x - (maximum == -INFINITY ? 0.0F : maximum));
    float sum = states[i].y * factor;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) sum += __shfl_xor_sync(~0U, sum, delta);
    if (column >= columns) continue;
    factors.factor[column][lane] = factor;
    if (lane == 0) factors.total[column] = {maximum, sum};
  }
}

// Loads in flight per thread.
constexpr int kInFlight = 16;

// Reduces `count` partial results in order, and writes the output or, if `to` is not null, another partial result. All
// kThreads threads take part, each with 16 bytes of kPlaces columns at a time. What it loads is in L2, so it waits for
// loads most of the time: the first values travel together with the states.
template <int kHead, int kColumns, int kThreads, typename Source>
__device__ __forceinline__ void reduce_partials(const Params& p, const WorkTile& s, int count, Source&& source,
                                                float* to, SplitFactors<kColumns>& factors) {
  using Part = Partial<kHead, kColumns>;
  constexpr int kVectors = kHead / 4;
  constexpr int kPlaces = (kColumns * kVectors + kThreads - 1) / kThreads;
  constexpr int kDepth = kInFlight / kPlaces;
  static_assert(kDepth > 0);
  const int columns = used_columns(p, s), places = columns * kVectors;
  if (columns <= 0) return;  // a pass without queries
  float4 values[kDepth][kPlaces];
  const auto load_values = [&](int first) {
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      // Past the end, the last partial result is loaded again, with factor 0.
      const float4* from = Part{source(min(first + j, count - 1))}.values(0);
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        values[j][i] = __ldcg(from + min(static_cast<int>(threadIdx.x) + i * kThreads, places - 1));
      }
    }
  };
  load_values(0);
  write_factors<kHead, kColumns, kThreads>(columns, count, source, factors);
  ptx::named_barrier(1, kThreads);
  float4 sum[kPlaces] = {};
#pragma unroll 1
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int column = min(static_cast<int>(threadIdx.x) + i * kThreads, places - 1) / kVectors;
#pragma unroll
      for (int j = 0; j < kDepth; ++j) {
        const float factor = first + j < count ? factors.factor[column][first + j] : 0.0F;
        sum[i].x += values[j][i].x * factor;
        sum[i].y += values[j][i].y * factor;
        sum[i].z += values[j][i].z * factor;
        sum[i].w += values[j][i].w * factor;
      }
    }
    first += kDepth;
    if (first >= count) break;
    load_values(first);
  }
  const float v_scale = p.v_scale != nullptr ? p.v_scale[s.kv_head] : 1.0F;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const int place = threadIdx.x + i * kThreads;
    if (place >= places) break;
    const int column = place / kVectors, vector = place - column * kVectors;
    const float2 total = factors.total[column];
    if (to != nullptr) {
      const Part part{to};
      if (vector == 0) __stcg(part.state(column), total);
      __stcg(part.values(column) + vector, sum[i]);
    } else {
      write_output<kHead>(p, s, column, vector, sum[i], total, v_scale);
    }
  }
}

}  // namespace kvservice::decode
