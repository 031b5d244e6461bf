// Attention of many query tokens per sequence: the choice of kernel and its arguments.
#include <algorithm>
#include <limits>

#include "cuda/extend.cuh"
#include "errors.h"

namespace kvservice {
namespace extend {
namespace {

// The extend kernels use the second half of the counters; the decode kernel uses the first half.
constexpr int64_t kCountersOffset = kCounterBytes / 2;

constexpr int kPartialsPerBlock = 2;

bool is_16_bit(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

int log2_of(int64_t power) {
  int shift = 0;
  while ((int64_t{1} << shift) < power) ++shift;
  return shift;
}

// Returns 2^31 / group, rounded up: row * this >> 31 is row / group if row * group < 2^31. 0 if rows may be too many.
uint32_t reciprocal_of(int64_t group, int64_t max_query_len) {
  constexpr int64_t kOne = int64_t{1} << 31;
  return max_query_len < kOne / (group * group) ? static_cast<uint32_t>((kOne + group - 1) / group) : 0;
}

bool runs_wgmma() { return current_device_properties().major == 9; }

// Partial results of split-KV chunks that wait for their reduction.
struct Partials {
  int count = 0;
  int rows = 0;  // of each partial result
  int64_t bytes = 0;
};

Partials partials_of(const AttentionParams& p) {
  if (!runs_wgmma()) return {};
  Partials partials;
  partials.count = kPartialsPerBlock * current_device_properties().num_sms;
  partials.rows = p.max_query_len * p.group_size() > kWgmmaRows / 2 ? kWgmmaRows : kWgmmaRows / 2;
  const int64_t head = p.pool.head_size <= 64 ? 64 : p.pool.head_size <= 128 ? 128 : 256;
  partials.bytes = partials.count * partials.rows * (head + 2) * static_cast<int64_t>(sizeof(float));
  return partials;
}

Args make_args(const AttentionParams& p, const CudaLaunch& launch, QueryLens lens) {
  const PoolView& pool = p.pool;
  Args a{};
  a.pool = pool.data + p.layer * pool.layer_bytes();
  a.block_bytes = pool.block_bytes();
  a.head_bytes = pool.head_bytes();
  a.value_offset = pool.num_kv_heads * pool.head_bytes();
  a.query = p.query;
  a.out = p.out;
  a.lse = p.lse;
  a.query_lens = p.query_lens;
  a.block_tables = p.block_tables;
  a.context_lens = p.context_lens;
  a.alibi_slopes = p.alibi_slopes;
  a.k_scale = p.k_scale;
  a.v_scale = p.v_scale;
  a.num_seqs = p.num_seqs;
  a.max_blocks = p.max_blocks;
  a.min_query_len = static_cast<int>(lens.min);
  a.max_query_len = static_cast<int>(std::min<int64_t>(lens.max, std::numeric_limits<int>::max()));
  a.num_heads = static_cast<int>(p.num_heads);
  a.num_kv_heads = static_cast<int>(pool.num_kv_heads);
  a.group = static_cast<int>(p.group_size());
  a.group_reciprocal = reciprocal_of(p.group_size(), std::min(p.max_query_len, lens.max));
  a.head_size = static_cast<int>(pool.head_size);
  a.block_shift = log2_of(pool.block_size);
  a.sliding_window = static_cast<int>(std::min<int64_t>(p.sliding_window, std::numeric_limits<int>::max()));
  a.scale = p.scale;
  a.soft_cap = p.soft_cap;
  a.dtype = p.dtype;
  a.pool_dtype = pool.dtype;
  a.counters = reinterpret_cast<int*>(static_cast<char*>(launch.workspace.data) + kCountersOffset);
  if (!launch.batch_invariant) {
    const Partials partials = partials_of(p);
    a.partials = reinterpret_cast<float*>(static_cast<char*>(launch.workspace.data) + kCounterBytes);
    a.max_partials = partials.count;
    a.partial_rows = partials.rows;
  }
  return a;
}

// Returns the most tiles of `rows` rows that the query tokens can form.
int64_t max_tiles(const AttentionParams& p, int64_t rows) {
  return (p.num_tokens * p.group_size() / rows + std::min(p.num_seqs, p.num_tokens)) * p.pool.num_kv_heads;
}

void launch_mma(const Args& args, cudaStream_t stream, int64_t tiles) {
  if (is_float8(args.pool_dtype)) {
    launch_mma_float8(args, stream, tiles);
  } else if (args.pool_dtype == DType::kBFloat16) {
    launch_mma_bfloat16(args, stream, tiles);
  } else {
    launch_mma_half(args, stream, tiles);
  }
}

bool launch_wgmma(const Args& args, cudaStream_t stream, int64_t tiles) {
  if (!runs_wgmma()) return false;
  if (is_float8(args.pool_dtype)) return launch_wgmma_float8(args, stream, tiles);
  return args.pool_dtype == DType::kBFloat16 ? launch_wgmma_bfloat16(args, stream, tiles)
                                             : launch_wgmma_half(args, stream, tiles);
}

// Whether all contexts are short, by the room in the block tables, because the host does not know the lengths: measured
// on an H100. A batch-invariant launch does not choose by the batch.
bool is_short(const AttentionParams& p, const CudaLaunch& launch) {
  const int64_t head = p.pool.head_size, most = head > 64 && head <= 128 ? 256 : 512;
  return runs_wgmma() && !launch.batch_invariant && p.max_blocks * p.pool.block_size <= most;
}

bool launch_short(const Args& args, cudaStream_t stream, int64_t tiles) {
  if (is_float8(args.pool_dtype)) return launch_short_float8(args, stream, tiles);
  return args.pool_dtype == DType::kBFloat16 ? launch_short_bfloat16(args, stream, tiles)
                                             : launch_short_half(args, stream, tiles);
}

}  // namespace
}  // namespace extend

bool extend_supports(const AttentionParams& p) {
  const PoolView& pool = p.pool;
  const bool types = extend::is_16_bit(p.dtype) && (pool.dtype == p.dtype || is_float8(pool.dtype));
  const bool head = pool.head_size >= 16 && pool.head_size <= 256 && pool.head_size % 16 == 0;
  const bool block = pool.block_size >= 8 && pool.block_size <= 256 && (pool.block_size & (pool.block_size - 1)) == 0;
  // The error of a logit is about 2^-22 of the cap; see LogitOptions.
  const bool options = !p.sparse.on() && p.soft_cap <= 1024.0F;
  return types && head && block && options && current_device_properties().major >= 8;
}

int64_t extend_workspace_bytes(const AttentionParams& p) { return kCounterBytes + extend::partials_of(p).bytes; }

void extend_attention(const AttentionParams& p, const CudaLaunch& launch, QueryLens lens) {
  require(extend_supports(p), "kernel", "the extend kernel does not support these shapes, types or options");
  require(launch.workspace.bytes >= extend_workspace_bytes(p), "workspace", "too small for the extend kernel");
  require(reinterpret_cast<uintptr_t>(p.query) % 16 == 0, "query", "is not aligned to 16 bytes");
  if (p.num_tokens == 0 || p.num_seqs == 0) return;
  const extend::Args args = extend::make_args(p, launch, lens);
  if (extend::is_short(p, launch) &&
      extend::launch_short(args, launch.stream, extend::max_tiles(p, extend::kShortRows))) {
    return;
  }
  if (extend::launch_wgmma(args, launch.stream, extend::max_tiles(p, extend::kWgmmaRows))) return;
  extend::launch_mma(args, launch.stream, extend::max_tiles(p, extend::kMmaRows));
}

}  // namespace kvservice
