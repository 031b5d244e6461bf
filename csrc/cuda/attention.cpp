// Chooses the attention kernels of a call: checks the arguments and divides a batch between the decode and the extend
// kernel.
#include "cuda/attention.h"

#include <algorithm>
#include <limits>
#include <string>

#include "errors.h"

namespace kvservice {
namespace {

constexpr int64_t kHeadSizeMin = 32, kHeadSizeMax = 256, kBlockSizeMax = 256, kHeadsMax = 65535;
constexpr int64_t kCountMax = std::numeric_limits<int32_t>::max();  // lengths on the device and their sums are int32

bool is_count(int64_t number) { return number >= 0 && number <= kCountMax; }

void check_pool(const PoolView& pool) {
  require(pool.num_blocks > 0 && pool.num_layers > 0 && pool.num_kv_heads > 0, "pool", "has an empty dimension");
  require(pool.head_size >= kHeadSizeMin && pool.head_size <= kHeadSizeMax && pool.head_size % 8 == 0, "query",
          "head size is not a multiple of 8 between 32 and 256");
  require(pool.block_size > 0 && pool.block_size <= kBlockSizeMax && (pool.block_size & (pool.block_size - 1)) == 0,
          "pool", "block size is not a power of two up to 256");
  require(!is_float8(pool.dtype) || pool.head_size % kKeyPieceBytes == 0, "pool",
          "head size of an FP8 pool is not a multiple of 16");
  require(reinterpret_cast<uintptr_t>(pool.data) % kKeyPieceBytes == 0, "pool", "is not aligned to 16 bytes");
}

void check(const AttentionParams& p) {
  check_pool(p.pool);
  require(p.layer >= 0 && p.layer < p.pool.num_layers, "layer", "is outside the pool");
  require(!is_float8(p.dtype) && (p.dtype == p.pool.dtype || is_float8(p.pool.dtype)), "query",
          "does not have the pool's dtype");
  require(p.num_heads > 0 && p.num_heads <= kHeadsMax && p.num_heads % p.pool.num_kv_heads == 0, "query",
          "number of heads is not a multiple of the pool's");
  require(is_count(p.num_tokens) && is_count(p.num_seqs), "query", "has a size that is not in [0, 2^31)");
  require(is_count(p.max_blocks), "block_tables", "has a size that is not in [0, 2^31)");
  require(is_count(p.max_query_len), "max_query_len", "is not in [0, 2^31)");
  require(p.num_tokens <= p.num_seqs * p.max_query_len, "max_query_len", "is less than a query length");
  require(p.num_common_blocks >= 0 && p.num_common_blocks <= p.max_blocks, "num_common_blocks",
          "is negative or more than a block table has");
  require(p.k_scale == nullptr || is_float8(p.pool.dtype), "k_scale", "is only valid for FP8 pools");
  require(p.v_scale == nullptr || is_float8(p.pool.dtype), "v_scale", "is only valid for FP8 pools");
  check_options(p.options(), p.pool.block_size, "");
}

// The kernels of one call. If two run, the later one may overwrite outputs of the earlier one.
struct Choice {
  bool reference = false;
  QueryLens extend;  // empty if max is 0
  QueryLens decode;
  bool cascade = false;
};

Choice explicit_choice(const AttentionParams& p, KernelChoice kernel, bool batch_invariant) {
  const QueryLens all = {1, p.max_query_len};
  if (kernel == KernelChoice::kCascade) {
    require(cascade_supports(p) && !batch_invariant, "kernel", "cascade does not support this call");
    return {false, {}, {}, true};
  }
  if (kernel == KernelChoice::kDecode) {
    require(decode_supports(p) && p.max_query_len <= decode_max_query_len(p), "kernel",
            "decode does not support this call");
    return {false, {}, all};
  }
  if (kernel == KernelChoice::kExtend) {
    require(extend_supports(p), "kernel", "extend does not support this call");
    return {false, all, {}};
  }
  return {true, {}, {}};
}

// Returns the longest query length that the decode kernel takes. Above kDecodedRows rows the extend kernel does less
// work if it can split keys over thread blocks, but it takes longer to start: measured on an H200 with 64 x 8 queries
// over 4088 tokens (273 us against 365) and from 512 tokens on (20 us at least).
int64_t most_decoded_queries(const AttentionParams& p, bool batch_invariant) {
  constexpr int64_t kDecodedRows = 16;
  if (!decode_supports(p)) return 0;
  const int64_t most = decode_max_query_len(p);
  const bool splits = !batch_invariant && extend_supports(p) && extend_workspace_bytes(p) > kCounterBytes;
  return splits && !has_few_tokens(p) ? std::min(most, kDecodedRows / p.group_size()) : most;
}

// Sequences with few queries always use the decode kernel, so that their results need not depend on the rest of the
// batch.
Choice automatic_choice(const AttentionParams& p, bool batch_invariant) {
  // Whether blocks are shared depends on the other sequences.
  if (!batch_invariant && cascade_supports(p) && cascade_pays(p)) return {false, {}, {}, true};
  const int64_t few = std::min(most_decoded_queries(p, batch_invariant), p.max_query_len);
  if (few == p.max_query_len) return {false, {}, {1, few}};
  const bool all_equal = p.num_tokens == p.num_seqs * p.max_query_len;
  const QueryLens decode = all_equal || few == 0 ? QueryLens{} : QueryLens{1, few};
  if (extend_supports(p)) return {false, {few + 1, p.max_query_len}, decode};
  return {true, {}, batch_invariant ? decode : QueryLens{}};
}

Choice choose(const AttentionParams& p, const CudaLaunch& launch) {
  if (launch.kernel == KernelChoice::kAuto) return automatic_choice(p, launch.batch_invariant);
  return explicit_choice(p, launch.kernel, launch.batch_invariant);
}

int64_t workspace_bytes(const AttentionParams& p, const Choice& choice, bool batch_invariant) {
  int64_t bytes = kCounterBytes;
  if (choice.cascade) bytes = std::max(bytes, cascade_workspace_bytes(p));
  if (choice.reference) bytes = std::max(bytes, reference_workspace_bytes(p));
  if (choice.extend.max > 0) bytes = std::max(bytes, extend_workspace_bytes(p));
  if (choice.decode.max > 0) bytes = std::max(bytes, decode_workspace_bytes(p, batch_invariant));
  return bytes;
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionParams& params, const CudaLaunch& launch) {
  check(params);
  if (params.num_tokens == 0) return kCounterBytes;
  return workspace_bytes(params, choose(params, launch), launch.batch_invariant);
}

bool attention_is_decode(const AttentionParams& params, const CudaLaunch& launch) {
  check(params);
  const Choice choice = choose(params, launch);
  return choice.decode.max > 0 && choice.extend.max == 0 && !choice.reference && !choice.cascade;
}

void attention_cuda(const AttentionParams& params, const CudaLaunch& launch) {
  check(params);
  if (params.num_tokens == 0) return;
  const Choice choice = choose(params, launch);
  const int64_t wanted = workspace_bytes(params, choice, launch.batch_invariant);
  if (launch.workspace.bytes < wanted) {
    throw ArgumentError("workspace", "has " + std::to_string(launch.workspace.bytes) + " bytes, " +
                                         std::to_string(wanted) + " are required");
  }
  if (choice.cascade) cascade_attention(params, launch);
  AttentionParams whole = params;
  whole.num_common_blocks = 0;  // these kernels read whole block tables
  if (choice.reference) reference_attention(whole, launch);
  if (choice.extend.max > 0) extend_attention(whole, launch, choice.extend);
  if (choice.decode.max > 0) decode_attention(whole, launch, choice.decode);
}

}  // namespace kvservice
