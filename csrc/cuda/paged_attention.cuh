// The kernels of paged attention after vLLM, in float32: partitions and their reduction.
//
//   One thread block per query token t, head h and partition p (kPartition positions of the sequence):
//     1. one group of threads per key sums q.k over 16-byte pieces of K
//     2. qk_max and exp_sum of the partition; logits become weights, in shared memory of fixed size
//     3. each warp takes every n-th block of V, each group of lanes one row (one dimension of the head)
//   With one partition, the result is final. With more, reduce_partitions combines their results.
//
// Invisible keys and values are excluded by selection, not by a weight of zero: their slots may hold NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "attention.h"

namespace kvservice {
namespace reference {

constexpr int kPartition = 512, kThreads = 128, kWarps = kThreads / 32, kHeadSizeMax = 256;
static_assert(kThreads * 4 == kPartition, "each thread holds four logits");

// One launch: the arguments of the call and the slice of its query tokens.
struct Args {
  AttentionParams p;
  const int32_t* query_starts = nullptr;  // [num_seqs + 1], prefix sums of query_lens
  int64_t first_token = 0;
  int64_t num_partitions = 0;   // of the longest sequence that the block tables can hold
  int group = 1;                // query heads per KV head
  float* tmp_out = nullptr;     // [tokens of the slice, num_heads, num_partitions, head_size]
  float* max_logits = nullptr;  // [tokens of the slice, num_heads, num_partitions]
  float* exp_sums = nullptr;

  __device__ int64_t partial(int64_t token, int head, int64_t partition) const {
    return ((token - first_token) * p.num_heads + head) * num_partitions + partition;
  }
};

// A query token of the batch: its sequence and the positions that it sees, [first, end), before the sparse pattern.
struct Query {
  int64_t seq;
  int64_t first;
  int64_t end;
};

// Returns false for a token past the sum of the query lengths.
__device__ inline bool find_query(const Args& args, int64_t token, Query* query) {
  const AttentionParams& p = args.p;
  int64_t low = 0, high = p.num_seqs;  // finds the last sequence that does not start after the token
  if (token >= args.query_starts[high]) return false;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (args.query_starts[middle] <= token ? low : high) = middle;
  }
  const int64_t position = p.context_lens[low] - args.query_starts[low + 1] + token;
  query->seq = low;
  query->first = p.sliding_window > 0 && position >= p.sliding_window ? position - p.sliding_window + 1 : 0;
  query->end = min(position + 1, p.max_blocks * p.pool.block_size);
  return true;
}

// The sparse pattern of a head. A pool block is visible as a whole or not at all, except at the ends of [first, end).
struct Pattern {
  int64_t stride = 0;  // 0: everything is visible
  int64_t block_size = 1;
  int64_t offset = 0;
  int64_t first_local = 0;

  __device__ Pattern(const Args& args, int head, const Query& query) {
    const BlockSparse& sparse = args.p.sparse;
    if (!sparse.on()) return;
    const int64_t step = sparse.head_sliding_step;
    stride = sparse.vert_stride;
    block_size = sparse.block_size;
    offset = step >= 0 ? (sparse.tp_rank * args.p.num_heads + head) * step + 1
                       : (sparse.tp_rank * args.p.pool.num_kv_heads + head / args.group) * -step + 1;
    first_local = (query.end - 1) / block_size - sparse.local_blocks + 1;
  }

  __device__ bool sees(int64_t position) const {
    if (stride == 0) return true;
    const int64_t block = position / block_size;
    return block >= first_local || (block + offset) % stride == 0;
  }
};

template <typename T>
struct Piece {
  static constexpr int kCount = 16 / sizeof(T);
  uint4 bits;

  __device__ explicit Piece(const T* from) : bits(*reinterpret_cast<const uint4*>(from)) {}
  __device__ float operator[](int i) const { return static_cast<float>(reinterpret_cast<const T*>(&bits)[i]); }
};

__device__ inline float load(const void* from, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(from)[i];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(from)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
}

__device__ inline void store(void* to, DType dtype, int64_t i, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(to)[i] = value;
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(to)[i] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(value);
  }
}

struct Max {
  __device__ static float identity() { return -INFINITY; }
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Sum {
  __device__ static float identity() { return 0.0F; }
  __device__ float operator()(float a, float b) const { return a + b; }
};

// Reduces over all threads of the block, always in the same order. `scratch` holds kWarps floats and is free again
// after the call.
template <typename Op>
__device__ float reduce_block(float value, float* scratch, Op op) {
  for (int mask = 16; mask > 0; mask /= 2) value = op(value, __shfl_xor_sync(0xffffffffU, value, mask));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float all = Op::identity();
  for (int warp = 0; warp < kWarps; ++warp) all = op(all, scratch[warp]);
  __syncthreads();
  return all;
}

struct Shared {
  float query[kHeadSizeMax];
  float weights[kPartition];  // logits before step 2
  int32_t block_ids[kPartition];
  float partial[kWarps][kHeadSizeMax];
  float scratch[kWarps];
};

// The work of a thread block: positions [start + low, start + high) of a sequence for one query and head.
template <typename T>
struct Tile {
  const T* keys;  // of block 0, for this layer and KV head
  const T* values;
  int64_t block_items;  // from one block to the next
  int64_t start;
  int low;
  int high;
  int head_size;
  int block_size;

  __device__ Tile(const Args& args, int head, const Query& query, int64_t partition) {
    const PoolView& pool = args.p.pool;
    const int64_t head_items = pool.head_size * pool.block_size, side = pool.num_kv_heads * head_items;
    block_items = pool.num_layers * 2 * side;
    keys = reinterpret_cast<const T*>(pool.data) + args.p.layer * 2 * side + head / args.group * head_items;
    values = keys + side;
    start = partition * kPartition;
    low = static_cast<int>(min(max(query.first - start, int64_t{0}), int64_t{kPartition}));
    high = static_cast<int>(min(max(query.end - start, int64_t{0}), int64_t{kPartition}));
    head_size = static_cast<int>(pool.head_size);
    block_size = static_cast<int>(pool.block_size);
  }
};

// Step 1: the logits of the partition, -infinity for keys that the query does not see. Every thread returns its
// largest.
template <typename T>
__device__ float key_products(const Args& args, const Tile<T>& tile, const Pattern& pattern, const Query& query,
                              int head, Shared& shared) {
  const AttentionParams& p = args.p;
  const int group = tile.block_size >= 32 ? 1 : tile.block_size >= 16 ? 2 : 4;  // threads per key
  const int member = threadIdx.x % group;
  const int pieces = tile.head_size / Piece<T>::kCount;
  const float scale = p.k_scale == nullptr ? p.scale : p.scale * p.k_scale[head / args.group];
  const float slope = p.alibi_slopes == nullptr ? 0.0F : p.alibi_slopes[head];
  float largest = -INFINITY;
  for (int i = threadIdx.x / group; i < kPartition; i += kThreads / group) {
    const bool seen = i >= tile.low && i < tile.high && pattern.sees(tile.start + i);
    float product = 0.0F;
    if (seen) {
      const T* key =
          tile.keys + shared.block_ids[i / tile.block_size] * tile.block_items + i % tile.block_size * Piece<T>::kCount;
      for (int piece = member; piece < pieces; piece += group) {
        const Piece<T> k(key + int64_t{piece} * tile.block_size * Piece<T>::kCount);
        for (int j = 0; j < Piece<T>::kCount; ++j) product += shared.query[piece * Piece<T>::kCount + j] * k[j];
      }
    }
    for (int mask = group / 2; mask > 0; mask /= 2) product += __shfl_xor_sync(0xffffffffU, product, mask);
    float logit = product * scale;
    if (p.soft_cap > 0.0F) logit = p.soft_cap * tanhf(logit / p.soft_cap);
    logit += slope * static_cast<float>(tile.start + i - (query.end - 1));
    if (!seen) logit = -INFINITY;
    if (member == 0) shared.weights[i] = logit;
    largest = fmaxf(largest, logit);
  }
  return largest;
}

// Step 3, one warp: the weighted sum of one row of V over this warp's blocks.
template <typename T>
__device__ float value_product(const Tile<T>& tile, const Pattern& pattern, const Shared& shared, int row, int member,
                               int group) {
  const int width = min(Piece<T>::kCount, tile.block_size);
  const int end = (tile.high + tile.block_size - 1) / tile.block_size;
  float sum = 0.0F;
  for (int block = tile.low / tile.block_size + threadIdx.x / 32; block < end; block += kWarps) {
    if (!pattern.sees(tile.start + block * tile.block_size)) continue;
    const T* values = tile.values + shared.block_ids[block] * tile.block_items + int64_t{row} * tile.block_size;
    const float* weights = shared.weights + block * tile.block_size;
    for (int i = member * width; i < tile.block_size; i += group * width) {
      if (width < Piece<T>::kCount) {
        for (int j = i; j < i + width; ++j) {
          if (weights[j] != 0.0F) sum += weights[j] * static_cast<float>(values[j]);
        }
      } else {
        const Piece<T> v(values + i);
        for (int j = 0; j < Piece<T>::kCount; ++j) sum += weights[i + j] == 0.0F ? 0.0F : weights[i + j] * v[j];
      }
    }
  }
  return sum;
}

// Step 3: the partition's weighted sum of V per warp, into shared.partial.
template <typename T>
__device__ void value_products(const Tile<T>& tile, const Pattern& pattern, Shared& shared) {
  const int width = min(Piece<T>::kCount, tile.block_size);
  const int group = min(tile.block_size / width, 4);  // lanes per row
  const int lane = threadIdx.x % 32, member = lane % group, rows = 32 / group;
  for (int base = 0; base < tile.head_size; base += rows) {
    const int row = base + lane / group;
    float sum = row < tile.head_size ? value_product(tile, pattern, shared, row, member, group) : 0.0F;
    for (int mask = group / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, mask);
    if (member == 0 && row < tile.head_size) shared.partial[threadIdx.x / 32][row] = sum;
  }
}

// Writes the result of a query and head. `sum(dimension)` returns the sum of weighted values; exp_sum is the sum of the
// weights.
template <typename Values>
__device__ void finish(const Args& args, int64_t token, int head, float qk_max, float exp_sum, Values sum) {
  const AttentionParams& p = args.p;
  const float scale = p.v_scale == nullptr ? 1.0F : p.v_scale[head / args.group];
  const int64_t row = token * p.num_heads + head;
  for (int64_t d = threadIdx.x; d < p.pool.head_size; d += kThreads) {
    store(p.out, p.dtype, row * p.pool.head_size + d, sum(d) / exp_sum * scale);
  }
  if (p.lse != nullptr && threadIdx.x == 0) p.lse[row] = qk_max + logf(exp_sum);
}

// Grid (partitions, heads, tokens of the slice).
template <typename T>
__global__ void __launch_bounds__(kThreads) attend_partition(const __grid_constant__ Args args) {
  __shared__ Shared shared;
  const AttentionParams& p = args.p;
  const int64_t partition = blockIdx.x, token = args.first_token + blockIdx.z;
  const int head = static_cast<int>(blockIdx.y);
  Query query;
  if (!find_query(args, token, &query)) return;
  const Tile<T> tile(args, head, query, partition);
  if (tile.low >= tile.high) return;
  const Pattern pattern(args, head, query);

  const int32_t* table = p.block_tables + query.seq * p.max_blocks + tile.start / tile.block_size;
  const int end_block = (tile.high + tile.block_size - 1) / tile.block_size;
  for (int i = tile.low / tile.block_size + threadIdx.x; i < end_block; i += kThreads) shared.block_ids[i] = table[i];
  for (int d = threadIdx.x; d < tile.head_size; d += kThreads) {
    shared.query[d] = load(p.query, p.dtype, (token * p.num_heads + head) * tile.head_size + d);
  }
  __syncthreads();
  const float qk_max = reduce_block(key_products(args, tile, pattern, query, head, shared), shared.scratch, Max());
  float own = 0.0F;
  for (int i = threadIdx.x; i < kPartition; i += kThreads) {
    const float logit = shared.weights[i];
    shared.weights[i] = logit == -INFINITY ? 0.0F : expf(logit - qk_max);  // a NaN stays NaN
    own += shared.weights[i];
  }
  const float exp_sum = reduce_block(own, shared.scratch, Sum());
  value_products(tile, pattern, shared);
  __syncthreads();

  const auto sum = [&](int64_t d) {
    float all = 0.0F;
    for (int warp = 0; warp < kWarps; ++warp) all += shared.partial[warp][d];
    return all;
  };
  if (args.num_partitions == 1) {
    finish(args, token, head, qk_max, exp_sum, sum);
    return;
  }
  const int64_t index = args.partial(token, head, partition);
  for (int d = threadIdx.x; d < tile.head_size; d += kThreads) args.tmp_out[index * tile.head_size + d] = sum(d);
  if (threadIdx.x == 0) {
    args.max_logits[index] = qk_max;
    args.exp_sums[index] = exp_sum;
  }
}

// Grid (heads, tokens of the slice). Partitions that the query does not reach have no partial results.
__global__ void __launch_bounds__(kThreads) reduce_partitions(const __grid_constant__ Args args) {
  __shared__ float scratch[kWarps];
  const int64_t token = args.first_token + blockIdx.y;
  const int head = static_cast<int>(blockIdx.x);
  Query query;
  if (!find_query(args, token, &query)) return;
  const int64_t first = query.first / kPartition, end = (query.end + kPartition - 1) / kPartition;
  const float* maxima = args.max_logits + args.partial(token, head, 0);
  const float* sums = args.exp_sums + args.partial(token, head, 0);
  const float* parts = args.tmp_out + args.partial(token, head, 0) * args.p.pool.head_size;
  float largest = -INFINITY;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) largest = fmaxf(largest, maxima[i]);
  const float qk_max = reduce_block(largest, scratch, Max());
  float own = 0.0F;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    own += sums[i] == 0.0F ? 0.0F : sums[i] * expf(maxima[i] - qk_max);
  }
  const float exp_sum = reduce_block(own, scratch, Sum());
  finish(args, token, head, qk_max, exp_sum, [&](int64_t d) {
    float all = 0.0F;
    for (int64_t i = first; i < end; ++i) {
      if (sums[i] != 0.0F) all += parts[i * args.p.pool.head_size + d] * expf(maxima[i] - qk_max);
    }
    return all;
  });
}

// One thread block. query_starts[i] is the sum of the lengths before sequence i; the last entry is the total.
__global__ void __launch_bounds__(kThreads)
    scan_query_lens(const int32_t* query_lens, int64_t num_seqs, int32_t* query_starts) {
  __shared__ int32_t sums[kThreads];
  int32_t before = 0;
  for (int64_t base = 0; base < num_seqs; base += kThreads) {
    const int64_t seq = base + threadIdx.x;
    const int32_t length = seq < num_seqs ? query_lens[seq] : 0;
    sums[threadIdx.x] = length;
    __syncthreads();
    for (int by = 1; by < kThreads; by *= 2) {
      const int32_t more = static_cast<int>(threadIdx.x) >= by ? sums[threadIdx.x - by] : 0;
      __syncthreads();
      sums[threadIdx.x] += more;
      __syncthreads();
    }
    if (seq < num_seqs) query_starts[seq] = before + sums[threadIdx.x] - length;
    before += sums[kThreads - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) query_starts[num_seqs] = before;
}

}  // namespace reference
}  // namespace kvservice
