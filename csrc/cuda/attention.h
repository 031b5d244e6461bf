// Attention on a CUDA device: all pointers of AttentionParams are the device's, and nothing is read back to the host.
#pragma once

#include "../attention.h"
#include "cuda/runtime.h"

namespace kvservice {

enum class KernelChoice : int { kAuto = 0, kReference = 1, kDecode = 2, kExtend = 3, kCascade = 4 };

// Memory that a launch may scribble in, one for each stream. Its first kCounterBytes are zero before the first launch,
// and every launch leaves them zero.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

constexpr int64_t kCounterBytes = 1 << 16;

struct CudaLaunch {
  cudaStream_t stream = nullptr;
  Workspace workspace;
  // A sequence's output is bit by bit the same whatever else is in the batch.
  bool batch_invariant = false;
  KernelChoice kernel = KernelChoice::kAuto;
};

// Which sequences of a batch a launch attends to: those with query_len in [min, max].
struct QueryLens {
  int64_t min = 0;
  int64_t max = 0;
};

// Bytes of workspace that attention_cuda wants for params of this shape (pointers are not looked at).
int64_t attention_workspace_bytes(const AttentionParams& params, const CudaLaunch& launch);

// Whether the decode kernel does all of it, which writes outputs in whole rows; the others write them bit by bit.
bool attention_is_decode(const AttentionParams& params, const CudaLaunch& launch);

// Throws ArgumentError where no kernel takes the shape, or the one that is asked for does not, or the workspace is too
// small; CudaError where the launch fails.
void attention_cuda(const AttentionParams& params, const CudaLaunch& launch);

// Whether the block tables are so narrow that what a launch takes is mostly the way through it, not the tokens:
// measured from 1 to 256 sequences of one KV head on an H200.
inline bool has_few_tokens(const AttentionParams& p) {
  return p.num_seqs * p.max_blocks * p.pool.block_size * p.pool.num_kv_heads <= int64_t{1} << 17;
}

// The kernels behind it. `takes_...` says whether shape, types and options suit.
//
// decode: few queries a sequence, tensor cores, bound by memory. extend: many queries, tensor cores, bound by
// arithmetic. reference: all that the CPU kernels take, and 8-bit pools, without tensor cores.
bool decode_takes(const AttentionParams& params);
int64_t decode_max_query_len(const AttentionParams& params);  // the most queries a sequence can have for it to pay
int64_t decode_workspace_bytes(const AttentionParams& params, bool batch_invariant);
void decode_attention(const AttentionParams& params, const CudaLaunch& launch, QueryLens lens);

bool extend_takes(const AttentionParams& params);
int64_t extend_workspace_bytes(const AttentionParams& params);
void extend_attention(const AttentionParams& params, const CudaLaunch& launch, QueryLens lens);

// cascade: few queries a sequence, blocks that all sequences share are read once for all. It is made of the two above.
bool cascade_takes(const AttentionParams& params);
bool cascade_pays(const AttentionParams& params);
int64_t cascade_workspace_bytes(const AttentionParams& params);
void cascade_attention(const AttentionParams& params, const CudaLaunch& launch);

int64_t reference_workspace_bytes(const AttentionParams& params);
void reference_attention(const AttentionParams& params, const CudaLaunch& launch);

}  // namespace kvservice
