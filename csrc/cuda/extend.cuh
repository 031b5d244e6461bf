// What the two extend kernels share: arguments, the tiles they work on, and rows of queries and outputs.
//
// A row is one (query token, query head) pair of a KV head's group: row = token * group + head in group. A tile is some
// rows of one sequence and KV head; all of them see nearly the same keys, which are read once for all.
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
  const char* pool;  // of the layer
  int64_t block_bytes;
  int64_t head_bytes;
  int64_t value_offset;  // from a head's K to its V
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
  int head_size;
  int block_shift;  // log2 of the block size
  int sliding_window;
  float scale;
  float soft_cap;
  DType dtype;
  DType pool_dtype;
  int* counters;  // [0] tiles given out, [1] thread blocks that are done; zero between launches
};

// Takes tiles of `kRows` rows, or fewer at a sequence's end.
struct Tile {
  int32_t seq = 0;
  int32_t kv_head = 0;
  int32_t first_row = 0;
  int32_t query_len = 0;
  int32_t context_len = 0;
  int64_t first_token = 0;  // of the sequence, in query

  __device__ int num_rows(const Args& a) const { return query_len * a.group; }
  // Where the token of a row stands in its sequence. Rows past the last are as that one.
  __device__ int position(const Args& a, int row) const {
    return context_len - query_len + min(row / a.group, query_len - 1);
  }
  __device__ int first_visible(const Args& a, int position) const {
    return a.sliding_window > 0 ? max(0, position - a.sliding_window + 1) : 0;
  }
  // Index among the query's [num_tokens, num_heads].
  __device__ int64_t query_row(const Args& a, int row) const {
    return (first_token + row / a.group) * a.num_heads + kv_head * a.group + row % a.group;
  }
  __device__ const int32_t* table(const Args& a) const { return a.block_tables + seq * a.max_blocks; }
};

// Numbers the tiles of a launch: sequence by sequence, head by head, and of these the longest first, so that what runs
// last is short. All lanes of a warp call it; indexes must not decrease from call to call.
template <int kRows>
class TileFinder {
 public:
  __device__ bool find(const Args& a, int64_t index, Tile* tile) {
    const int lane = threadIdx.x % 32;
    for (; base_ < a.num_seqs; base_ += 32) {
      const int64_t seq = base_ + lane;
      const int len = seq < a.num_seqs ? a.query_lens[seq] : 0;
      const bool takes = len > 0 && len >= a.min_query_len && len <= a.max_query_len;
      const int row_tiles = takes ? (len * a.group + kRows - 1) / kRows : 0;
      const int64_t tiles_end = tiles_ + sum_up_to(static_cast<int64_t>(row_tiles) * a.num_kv_heads);
      const int64_t tokens_end = tokens_ + sum_up_to(static_cast<int64_t>(len));
      const uint32_t after = __ballot_sync(~0U, index < tiles_end);
      if (after != 0) {
        const int owner = __ffs(after) - 1;
        const int count = __shfl_sync(~0U, row_tiles, owner);
        const int64_t first = __shfl_sync(~0U, tiles_end, owner) - static_cast<int64_t>(count) * a.num_kv_heads;
        const int within = static_cast<int>(index - first);
        tile->seq = static_cast<int32_t>(base_) + owner;
        tile->kv_head = within / count;
        tile->first_row = (count - 1 - within % count) * kRows;
        tile->query_len = __shfl_sync(~0U, len, owner);
        tile->context_len = a.context_lens[tile->seq];
        tile->first_token = __shfl_sync(~0U, tokens_end, owner) - tile->query_len;
        return true;
      }
      tiles_ = __shfl_sync(~0U, tiles_end, 31);
      tokens_ = __shfl_sync(~0U, tokens_end, 31);
    }
    return false;
  }

 private:
  // Of this lane and those before it.
  static __device__ int64_t sum_up_to(int64_t value) {
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0U, value, step);
      if (threadIdx.x % 32 >= step) value += other;
    }
    return value;
  }

  int64_t base_ = 0;
  int64_t tiles_ = 0;
  int64_t tokens_ = 0;
};

// The first tile of a thread block is its own index, those after it come in the order of asking. One thread calls it.
__device__ inline int64_t next_tile(const Args& a) { return gridDim.x + atomicAdd(a.counters, 1); }

// One thread of each block, when it asks for no more: the last one leaves the counters as they were found.
__device__ inline void leave_counters(const Args& a) {
  __threadfence();
  if (atomicAdd(a.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    a.counters[0] = 0;
    a.counters[1] = 0;
  }
}

// Eight numbers of 16 bits, of either type, to floats and back.
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

// The options that change a logit beyond its scale. `x` is q.k; the result is in units of log2.
struct LogitOptions {
  float scale;  // of q.k
  float soft_cap;
  float slope;  // in units of log2

  __device__ float apply(float x, int key_distance) const {
    x *= scale;
    if (soft_cap > 0.0F) {
      // tanh(y) = 1 - 2 / (exp(2 y) + 1), which is right at both ends too.
      x = soft_cap * (1.0F - __fdividef(2.0F, ptx::exp2_fast(x * (2.0F * kLog2E / soft_cap)) + 1.0F));
    }
    return x * kLog2E + slope * static_cast<float>(key_distance);
  }
};

// Rows of a tile of each kernel.
constexpr int kMmaRows = 64, kWgmmaRows = 128;

// `tiles` is the most there can be.
void launch_mma(const Args& args, cudaStream_t stream, int64_t tiles);
// False, and nothing is launched, where the kernel does not take the pool's type or has no code for this device.
bool launch_wgmma(const Args& args, cudaStream_t stream, int64_t tiles);

}  // namespace extend
}  // namespace kvservice
