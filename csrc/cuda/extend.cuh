// Shared by the two extend kernels: arguments, logits and 16-bit conversions.
//
// A row is one (query token, query head) pair of a KV head's group: row = token * group + head in group. A tile is a
// number of rows of one sequence and KV head. They see nearly the same keys, which are loaded once for all of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/attention.h"
#include "cuda/ptx.cuh"

namespace kvservice {
namespace extend {

constexpr float kLog2E = 1.4426950408889634F, kLn2 = 0.6931471805599453F;

struct Args {
  const char* pool;  // of this layer
  int64_t block_bytes;
  int64_t head_bytes;
  int64_t value_offset;  // from K to V of a head
  const void* query;
  void* out;
  float* lse;
  const int32_t* query_lens;
  const int32_t* block_tables;
  const int32_t* context_lens;
  const float* alibi_slopes;
  const float* k_scale;
  const float* v_scale;
  int64_t num_seqs;
  int64_t max_blocks;
  int min_query_len;
  int max_query_len;
  int num_heads;
  int num_kv_heads;
  int group;
  uint32_t group_reciprocal;  // 2^31 / group, rounded up, if that is exact for all rows; or 0
  int head_size;
  int block_shift;  // log2 of the block size
  int sliding_window;
  float scale;
  float soft_cap;
  DType dtype;
  DType pool_dtype;
  bool single;    // no thread block has more than one tile
  int* counters;  // [0] tiles assigned, [1] thread blocks done, then reductions; zero between launches
  float* partials;
  int max_partials;  // 0: no split-KV
  int partial_rows;  // of each, 64 or 128
};

// Returns the token of a row, relative to its sequence's first new one: row / group.
__device__ inline int token_of_row(const Args& a, int row) {
  if (a.group_reciprocal == 0) return row / a.group;
  return static_cast<int>(static_cast<uint64_t>(row) * a.group_reciprocal >> 31);
}

// Unpacks eight 16-bit numbers of either type to floats.
__device__ inline void unpack_8(const uint4& raw, DType dtype, float (&values)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair;
    if (dtype == DType::kBFloat16) {
      pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(words[i]));
    } else {
      pair = __half22float2(reinterpret_cast<const half2&>(words[i]));
    }
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ inline uint32_t pack_as(float low, float high, DType dtype) {
  return dtype == DType::kBFloat16 ? ptx::pack<__nv_bfloat16>(low, high) : ptx::pack<half>(low, high);
}

// Powers of two that scale numbers up to `largest` into the range of float16, and back. They are built from exponent
// bits.
struct PowerOfTwo {
  float down;
  float up;

  __device__ explicit PowerOfTwo(float largest) {
    const int exponent = min(126, max(-100, static_cast<int>(__float_as_uint(largest) >> 23) - 127));
    down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    up = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
  }
};

__device__ inline float largest_of_8(const uint4& numbers, DType dtype) {
  float values[8], largest = 0.0F;
  unpack_8(numbers, dtype, values);
#pragma unroll
  for (float value : values) largest = fmaxf(largest, fabsf(value));
  return largest;
}

__device__ inline uint4 scaled_halves(const uint4& numbers, DType dtype, float factor) {
  float values[8];
  unpack_8(numbers, dtype, values);
  return make_uint4(
      ptx::pack<half>(values[0] * factor, values[1] * factor), ptx::pack<half>(values[2] * factor, values[3] * factor),
      ptx::pack<half>(values[4] * factor, values[5] * factor), ptx::pack<half>(values[6] * factor, values[7] * factor));
}

// The options that change a logit beyond its scale. `x` is q.k; the result is in log2 units.
struct LogitOptions {
  float scale;  // of q.k
  float soft_cap;
  float slope;  // in log2 units

  __device__ float apply(float x, int key_distance) const {
    x *= scale;
    if (soft_cap > 0.0F) {
      // tanh(y) = 1 - 2 / (exp(2 y) + 1), which is also correct for large |y|. It loses the bits of small |y|, so
      // `extend_supports` limits the cap.
      x = soft_cap * (1.0F - __fdividef(2.0F, ptx::exp2_fast(x * (2.0F * kLog2E / soft_cap)) + 1.0F));
    }
    return x * kLog2E + slope * static_cast<float>(key_distance);
  }
};

// Rows per tile of each kernel.
constexpr int kMmaRows = 64, kShortRows = 64, kWgmmaRows = 128;

// `tiles` is an upper bound. Each launcher has its own file, so that they compile in parallel.
void launch_mma_half(const Args& args, cudaStream_t stream, int64_t tiles);
void launch_mma_bfloat16(const Args& args, cudaStream_t stream, int64_t tiles);
void launch_mma_float8(const Args& args, cudaStream_t stream, int64_t tiles);

// Returns false, without a launch, if there is no code for this device.
bool launch_wgmma_half(const Args& args, cudaStream_t stream, int64_t tiles);
bool launch_wgmma_bfloat16(const Args& args, cudaStream_t stream, int64_t tiles);
bool launch_wgmma_float8(const Args& args, cudaStream_t stream, int64_t tiles);
bool launch_short_half(const Args& args, cudaStream_t stream, int64_t tiles);
bool launch_short_bfloat16(const Args& args, cudaStream_t stream, int64_t tiles);
bool launch_short_float8(const Args& args, cudaStream_t stream, int64_t tiles);

}  // namespace extend
}  // namespace kvservice
