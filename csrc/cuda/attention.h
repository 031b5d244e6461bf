// Attention on a CUDA device. All pointers of AttentionParams are device pointers, and nothing is copied back to the
// host.
#pragma once

#include "../attention.h"
#include "cuda/runtime.h"

namespace kvservice {

enum class KernelChoice : int { kAuto = 0, kReference = 1, kDecode = 2, kExtend = 3, kCascade = 4 };

// Scratch memory of launches, one per stream. The first kCounterBytes are zero before the first launch, and only
// launches write them.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

constexpr int64_t kCounterBytes = 1 << 16;

struct CudaLaunch {
  cudaStream_t stream = nullptr;
  Workspace workspace;
  // The output of a sequence is bitwise identical in every batch.
  bool batch_invariant = false;
  KernelChoice kernel = KernelChoice::kAuto;
};

// Selects the sequences of a batch for a launch: those with query_len in [min, max].
struct QueryLens {
  int64_t min = 0;
  int64_t max = 0;
};

// Returns the bytes of workspace that attention_cuda needs for params of this shape. Does not read the pointers.
int64_t attention_workspace_bytes(const AttentionParams& params, const CudaLaunch& launch);

// Whether the decode kernel computes the whole call. It writes outputs in whole rows; the other kernels write a few
// bytes at a time.
bool attention_is_decode(const AttentionParams& params, const CudaLaunch& launch);

// Throws ArgumentError if no kernel supports the shape, if the requested kernel does not, or if the workspace is too
// small; CudaError if the launch fails.
void attention_cuda(const AttentionParams& params, const CudaLaunch& launch);

// Tokens for which the block tables have room, times KV heads: what the host knows of the work.
inline int64_t table_tokens(const AttentionParams& p) {
  return p.num_seqs * p.max_blocks * p.pool.block_size * p.pool.num_kv_heads;
}

// Whether the latency of a launch dominates its work: measured on an H200 with 1 to 256 sequences of one KV head.
inline bool has_few_tokens(const AttentionParams& p) { return table_tokens(p) <= int64_t{1} << 17; }

// The kernels. `*_supports` returns whether shape, types and options are supported.
//
// decode: few queries per sequence, tensor cores, bound by memory. extend: many queries, tensor cores, bound by
// arithmetic. reference: everything that the CPU kernels take, and FP8 pools, without tensor cores.
bool decode_supports(const AttentionParams& params);
int64_t decode_max_query_len(const AttentionParams& params);  // the longest query length for which decode pays
int64_t decode_workspace_bytes(const AttentionParams& params, bool batch_invariant);
void decode_attention(const AttentionParams& params, const CudaLaunch& launch, QueryLens lens);

bool extend_supports(const AttentionParams& params);
int64_t extend_workspace_bytes(const AttentionParams& params);
void extend_attention(const AttentionParams& params, const CudaLaunch& launch, QueryLens lens);

// cascade: few queries per sequence; blocks that all sequences share are read once. It uses decode and extend.
bool cascade_supports(const AttentionParams& params);
bool cascade_pays(const AttentionParams& params);
int64_t cascade_workspace_bytes(const AttentionParams& params);
void cascade_attention(const AttentionParams& params, const CudaLaunch& launch);

int64_t reference_workspace_bytes(const AttentionParams& params);
void reference_attention(const AttentionParams& params, const CudaLaunch& launch);

}  // namespace kvservice
