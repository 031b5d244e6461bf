// Split-KV: the partial results of thread blocks, and their reduction.
#pragma once

#include "cuda/decode_schedule.cuh"
#include "cuda/ptx.cuh"

namespace kvservice::decode {

__device__ __forceinline__ float load_query(const Params& p, int64_t index) {
  return p.query_is_bfloat16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.query)[index])
                             : __half2float(static_cast<const half*>(p.query)[index]);
}

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

// Loads in flight per thread.
constexpr int kInFlight = 8;

// Reduces `count` partial results in order, and writes the output or, if `to` is not null, another partial result. All
// kThreads threads take part, each with 16 bytes of a column at a time. `states` is in shared memory. The code is short
// on purpose: it runs once, and fetching its instructions dominates its time.
template <int kHead, int kColumns, int kThreads, typename Source>
__device__ __forceinline__ void reduce_partials(const Params& p, const WorkTile& s, int count, Source&& source,
                                                float* to, float2 (&states)[kColumns][kMaxSplits]) {
  using Part = Partial<kHead, kColumns>;
  constexpr int kVectors = kHead / 4;
  const int columns = used_columns(p, s);
#pragma unroll 1
  for (int i = threadIdx.x; i < columns * count; i += kThreads) {
    const int column = i / count, k = i - column * count;
    states[column][k] = __ldcg(Part{source(k)}.state(column));
  }
  ptx::named_barrier(1, kThreads);
#pragma unroll 1
  for (int i = threadIdx.x; i < columns * kVectors; i += kThreads) {
    const int column = i / kVectors, vector = i - column * kVectors;
    float maximum = -INFINITY, total = 0.0F;
#pragma unroll 4
    for (int k = 0; k < count; ++k) maximum = fmaxf(maximum, states[column][k].x);
    const float origin = maximum == -INFINITY ? 0.0F : maximum;
    float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 1
    for (int first = 0; first < count; first += kInFlight) {
      float4 values[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        // Past the end, the last partial result is loaded again with weight 0.
        values[j] = __ldcg(Part{source(min(first + j, count - 1))}.values(column) + vector);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const float2 state = states[column][min(first + j, count - 1)];
        const float factor = first + j < count ? ptx::exp2_fast(state.x - origin) : 0.0F;
        total += state.y * factor;
        sum.x += values[j].x * factor;
        sum.y += values[j].y * factor;
        sum.z += values[j].z * factor;
        sum.w += values[j].w * factor;
      }
    }
    if (to != nullptr) {
      const Part part{to};
      if (vector == 0) __stcg(part.state(column), {maximum, total});
      __stcg(part.values(column) + vector, sum);
    } else {
      const float v_scale = p.v_scale != nullptr ? p.v_scale[s.kv_head] : 1.0F;
      write_output<kHead>(p, s, column, vector, sum, {maximum, total}, v_scale);
    }
  }
}

}  // namespace kvservice::decode
