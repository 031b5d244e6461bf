// Attention of a batch whose sequences share their first blocks (the prefix), which are read once instead of once per
// sequence (Hydragen, FlashInfer's cascade).
//
//   1. prepare: lengths without the prefix, and the queries as [num_kv_heads, num_tokens * group, head_size]
//   2. prefix: all queries of a KV head at once over the shared blocks. All queries come after these blocks and see all
//      of them, so the kernels treat them as one token with many heads
//   3. rest: every sequence over its own blocks
//   4. merge: both outputs, weighted by their sums of exponentials
//
// The outputs of 2 and 3 have the type of the output: two roundings more than without cascade, each of at most half a
// unit.
#include <algorithm>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/ptx.cuh"
#include "errors.h"

namespace kvservice {
namespace cascade {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // 16-bit numbers in 16 bytes
constexpr int64_t kAlignment = 256;
constexpr int64_t kItemBytes = 4;  // of lengths, ids and sums

// Cost model, measured on an H200 with 2 to 256 sequences after 256 to 16384 common positions. Rereading the prefix per
// sequence runs at 9 to 14 TB/s, because all sequences but one find it in L2. The three additional launches take 20 to
// 35 us, so that rereading is better for short prefixes. With these constants, cascade is chosen in no measured case in
// which it loses. Microseconds with and without cascade, for bfloat16, 32 heads over 8 KV heads, and sequences with
// 1024 positions of their own:
//
//   sequences  512 common     2048           8192
//   8          35 / 18        47 / 23        60 / 49
//   64         105 / 76       111 / 105      125 / 289
//   256        294 / 269      309 / 387      359 / 1109
constexpr double kSavedBytesPerUs = 14e6, kDecodeBytesPerUs = 3e6, kOperationsPerUs = 500e6, kLaunchesUs = 40;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct Sizes {
  int num_tokens;
  int num_seqs;
  int num_heads;
  int num_kv_heads;
  int group;
  int vectors;  // per head
  int num_blocks;
  int num_positions;  // in the shared blocks
  int max_blocks;

  __device__ int64_t num_vectors() const { return int64_t{num_tokens} * num_heads * vectors; }
};

Sizes sizes_of(const AttentionParams& p) {
  Sizes sizes;
  sizes.num_tokens = static_cast<int>(p.num_tokens);
  sizes.num_seqs = static_cast<int>(p.num_seqs);
  sizes.num_heads = static_cast<int>(p.num_heads);
  sizes.num_kv_heads = static_cast<int>(p.pool.num_kv_heads);
  sizes.group = static_cast<int>(p.group_size());
  sizes.vectors = static_cast<int>(p.pool.head_size / kVector);
  sizes.num_blocks = static_cast<int>(p.num_common_blocks);
  sizes.num_positions = static_cast<int>(p.num_common_blocks * p.pool.block_size);
  sizes.max_blocks = static_cast<int>(p.max_blocks);
  return sizes;
}

// Workspace of the cascade, behind the workspace of the attention kernels.
struct Scratch {
  uint4* query;  // [num_kv_heads, num_tokens, group, head_size]
  uint4* out;    // of the prefix, same shape
  float* lse;    // of the prefix
  float* rest_lse;
  int32_t* prefix_lens;   // query length and context length
  int32_t* prefix_table;  // [num_common_blocks]
  int32_t* rest_lens;     // [num_seqs], context lengths
  int64_t bytes;

  Scratch(const AttentionParams& p, void* data) {
    const int64_t rows = p.num_tokens * p.num_heads;
    const int64_t tensor_bytes = rows * p.pool.head_size * item_size(p.dtype);
    const auto begin = reinterpret_cast<uintptr_t>(data);
    uintptr_t at = begin;
    const auto take = [&at](auto*& pointer, int64_t size) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
      at += aligned(size);
    };
    take(query, tensor_bytes);
    take(out, tensor_bytes);
    take(lse, rows * kItemBytes);
    take(rest_lse, rows * kItemBytes);
    take(prefix_lens, 2 * kItemBytes);
    take(prefix_table, p.num_common_blocks * kItemBytes);
    take(rest_lens, p.num_seqs * kItemBytes);
    bytes = static_cast<int64_t>(at - begin);
  }
};

// Returns the index of a query head among the queries of its KV head.
__device__ int64_t prefix_row(const Sizes& sizes, int token, int head) {
  const int kv_head = head / sizes.group;
  return (int64_t{kv_head} * sizes.num_tokens + token) * sizes.group + (head - kv_head * sizes.group);
}

struct Lengths {
  const int32_t* query_lens;
  const int32_t* context_lens;
  const int32_t* block_tables;
};

// Runs on one thread block. Copies the table of a sequence with queries: others need not have the shared blocks.
__device__ void prepare_lengths(const Sizes& sizes, const Lengths& from, const Scratch& to) {
  __shared__ int with_queries;
  if (threadIdx.x == 0) with_queries = sizes.num_seqs - 1;
  __syncthreads();
  for (int seq = threadIdx.x; seq < sizes.num_seqs; seq += kThreads) {
    if (from.query_lens[seq] > 0) atomicMin(&with_queries, seq);
    to.rest_lens[seq] = max(0, from.context_lens[seq] - sizes.num_positions);
  }
  if (threadIdx.x == 0) to.prefix_lens[0] = 1;
  if (threadIdx.x == 1) to.prefix_lens[1] = sizes.num_positions;
  __syncthreads();
  const int32_t* table = from.block_tables + int64_t{with_queries} * sizes.max_blocks;
  for (int i = threadIdx.x; i < sizes.num_blocks; i += kThreads) to.prefix_table[i] = table[i];
}

// The first thread block prepares the lengths, the others the queries, 16 bytes per thread.
__global__ void __launch_bounds__(kThreads)
    prepare(const Sizes sizes, const Lengths lengths, const uint4* __restrict__ query, const Scratch scratch) {
  if (blockIdx.x == 0) {
    prepare_lengths(sizes, lengths, scratch);
    return;
  }
  const int64_t i = int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
  if (i >= sizes.num_vectors()) return;
  const auto row = static_cast<int>(i / sizes.vectors);
  const int vector = static_cast<int>(i - int64_t{row} * sizes.vectors), token = row / sizes.num_heads;
  scratch.query[prefix_row(sizes, token, row - token * sizes.num_heads) * sizes.vectors + vector] = query[i];
}

template <typename T>
__device__ float2 unpack(uint32_t pair);

template <>
__device__ float2 unpack<half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const half2&>(pair));
}

template <>
__device__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

template <typename T>
__device__ uint32_t weighted(uint32_t a, float weight_a, uint32_t b, float weight_b) {
  const float2 x = unpack<T>(a), y = unpack<T>(b);
  return ptx::pack<T>(weight_a * x.x + weight_b * y.x, weight_a * x.y + weight_b * y.y);
}

// `out` holds the outputs of the rest and receives the result, 16 bytes per thread.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    merge_states(const Sizes sizes, const Scratch scratch, uint4* out, float* lse) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= sizes.num_vectors()) return;
  const auto row = static_cast<int>(i / sizes.vectors);
  const int vector = static_cast<int>(i - int64_t{row} * sizes.vectors), token = row / sizes.num_heads;
  const int64_t other = prefix_row(sizes, token, row - token * sizes.num_heads);
  const float prefix_lse = scratch.lse[other], rest_lse = scratch.rest_lse[row];
  const uint4 x = scratch.out[other * sizes.vectors + vector], y = out[i];
  const float largest = fmaxf(prefix_lse, rest_lse);
  const float prefix_sum = expf(prefix_lse - largest), rest_sum = expf(rest_lse - largest);
  const float sum = prefix_sum + rest_sum;
  const float a = prefix_sum / sum, b = rest_sum / sum;
  out[i] = make_uint4(weighted<T>(x.x, a, y.x, b), weighted<T>(x.y, a, y.y, b), weighted<T>(x.z, a, y.z, b),
                      weighted<T>(x.w, a, y.w, b));
  if (lse != nullptr && vector == 0) lse[row] = largest + logf(sum);
}

// All queries of a KV head over the shared blocks. The query layout is [1, num_kv_heads * (num_tokens * group), ...].
AttentionParams prefix_params(const AttentionParams& p, const Scratch& scratch) {
  AttentionParams prefix = p;
  prefix.num_tokens = prefix.num_seqs = prefix.max_query_len = 1;
  prefix.num_heads = p.num_heads * p.num_tokens;
  prefix.max_blocks = p.num_common_blocks;
  prefix.num_common_blocks = 0;
  prefix.query = scratch.query;
  prefix.query_lens = scratch.prefix_lens;
  prefix.context_lens = scratch.prefix_lens + 1;
  prefix.block_tables = scratch.prefix_table;
  prefix.out = scratch.out;
  prefix.lse = scratch.lse;
  return prefix;
}

AttentionParams rest_params(const AttentionParams& p, const Scratch& scratch) {
  AttentionParams rest = p;
  rest.block_tables = p.block_tables + p.num_common_blocks;  // the row stride stays the same
  rest.context_lens = scratch.rest_lens;
  rest.lse = scratch.rest_lse;
  return rest;
}

int64_t columns_of(const AttentionParams& prefix) {
  AttentionParams single = prefix;
  single.num_heads = prefix.pool.num_kv_heads;
  return decode_max_query_len(single);
}

// The decode kernel rereads the keys for every `columns_of` queries. The extend kernel takes any number of queries, but
// without split-KV it leaves most of the device idle.
bool decodes(const AttentionParams& prefix) {
  const bool splits = extend_supports(prefix) && extend_workspace_bytes(prefix) > kCounterBytes;
  return prefix.group_size() <= columns_of(prefix) || !splits;
}

// Returns the microseconds that one read of the shared blocks takes, without the launch.
double prefix_us(const AttentionParams& prefix) {
  const int64_t blocks = prefix.max_blocks, rows = prefix.group_size(), columns = columns_of(prefix);
  if (decodes(prefix)) {
    const int64_t passes = (rows + columns - 1) / columns;
    return static_cast<double>(passes * blocks * prefix.pool.layer_bytes()) / kDecodeBytesPerUs;
  }
  const int64_t keys = blocks * prefix.pool.block_size;
  return 4.0 * static_cast<double>(prefix.num_heads * prefix.pool.head_size) * static_cast<double>(keys) /
         kOperationsPerUs;
}

int64_t kernels_bytes(const AttentionParams& p) {
  const AttentionParams prefix = prefix_params(p, Scratch(p, nullptr));
  const int64_t bytes = decodes(prefix) ? decode_workspace_bytes(prefix, false) : extend_workspace_bytes(prefix);
  return aligned(std::max(bytes, decode_workspace_bytes(p, false)));
}

unsigned blocks_for(const AttentionParams& p) {
  return static_cast<unsigned>((p.num_tokens * p.num_heads * (p.pool.head_size / kVector) + kThreads - 1) / kThreads);
}

void launch_prepare(const AttentionParams& p, const Scratch& scratch, cudaStream_t stream) {
  prepare<<<blocks_for(p) + 1, kThreads, 0, stream>>>(sizes_of(p), {p.query_lens, p.context_lens, p.block_tables},
                                                      static_cast<const uint4*>(p.query), scratch);
  check_launch("cascade attention, preparing");
}

void launch_merge(const AttentionParams& p, const Scratch& scratch, cudaStream_t stream) {
  const auto kernel = p.dtype == DType::kBFloat16 ? merge_states<__nv_bfloat16> : merge_states<half>;
  kernel<<<blocks_for(p), kThreads, 0, stream>>>(sizes_of(p), scratch, static_cast<uint4*>(p.out), p.lse);
  check_launch("cascade attention, merging");
}

}  // namespace
}  // namespace cascade

bool cascade_supports(const AttentionParams& p) {
  const bool options = p.sliding_window == 0 && p.alibi_slopes == nullptr && !p.sparse.on();
  if (!options || p.num_common_blocks == 0 || p.num_tokens == 0) return false;
  if (!decode_supports(p) || p.max_query_len > decode_max_query_len(p)) return false;
  if (p.num_common_blocks * p.pool.block_size > INT32_MAX || p.num_tokens * p.num_heads > INT32_MAX) return false;
  const AttentionParams prefix = cascade::prefix_params(p, cascade::Scratch(p, nullptr));
  return cascade::decodes(prefix) ? decode_supports(prefix) : extend_supports(prefix);
}

bool cascade_pays(const AttentionParams& p) {
  const AttentionParams prefix = cascade::prefix_params(p, cascade::Scratch(p, nullptr));
  const auto saved_bytes = static_cast<double>((p.num_seqs - 1) * p.num_common_blocks * p.pool.layer_bytes());
  return saved_bytes / cascade::kSavedBytesPerUs > cascade::kLaunchesUs + cascade::prefix_us(prefix);
}

int64_t cascade_workspace_bytes(const AttentionParams& p) {
  return cascade::kernels_bytes(p) + cascade::Scratch(p, nullptr).bytes;
}

void cascade_attention(const AttentionParams& p, const CudaLaunch& launch) {
  require(cascade_supports(p), "kernel", "cascade does not support this call");
  require(launch.workspace.bytes >= cascade_workspace_bytes(p), "workspace", "is too small");
  const cascade::Scratch scratch(p, static_cast<char*>(launch.workspace.data) + cascade::kernels_bytes(p));
  cascade::launch_prepare(p, scratch, launch.stream);
  const AttentionParams prefix = cascade::prefix_params(p, scratch);
  if (cascade::decodes(prefix)) {
    decode_attention(prefix, launch, {1, 1});
  } else {
    extend_attention(prefix, launch, {1, 1});
  }
  decode_attention(cascade::rest_params(p, scratch), launch, {1, p.max_query_len});
  cascade::launch_merge(p, scratch, launch.stream);
}

}  // namespace kvservice
