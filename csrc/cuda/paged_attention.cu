// Paged attention after vLLM (paged_attention v1 and v2), for all shapes, types and options. It takes what the fast
// kernels do not support and is their reference in tests. Tokens are processed in slices whose partial results fit a
// workspace of bounded size.
#include "cuda/paged_attention.cuh"

#include <algorithm>

#include "cuda/attention.h"
#include "errors.h"

namespace kvservice {
namespace {

using reference::Args;
using reference::kPartition;
using reference::kThreads;

constexpr int64_t kPartialBytesMax = int64_t{256} << 20;
constexpr int64_t kGridMax = 65535;  // of the y and z dimensions

int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Byte offsets in the workspace.
struct Plan {
  int64_t num_partitions, slice_tokens, starts, max_logits, exp_sums, tmp_out, end;

  explicit Plan(const AttentionParams& p) {
    num_partitions = std::max<int64_t>(1, (p.max_blocks * p.pool.block_size + kPartition - 1) / kPartition);
    const int64_t partials = num_partitions == 1 ? 0 : p.num_heads * num_partitions;  // per token
    const int64_t token_bytes = partials * (p.pool.head_size + 2) * static_cast<int64_t>(sizeof(float));
    const int64_t most = token_bytes == 0 ? kGridMax : std::min(kGridMax, kPartialBytesMax / token_bytes);
    slice_tokens = std::max<int64_t>(1, std::min(p.num_tokens, most));
    const int64_t floats = slice_tokens * partials * static_cast<int64_t>(sizeof(float));
    starts = kCounterBytes;
    max_logits = starts + round_up((p.num_seqs + 1) * static_cast<int64_t>(sizeof(int32_t)));
    exp_sums = max_logits + round_up(floats);
    tmp_out = exp_sums + round_up(floats);
    end = tmp_out + round_up(floats * p.pool.head_size);
  }
};

template <typename T>
void attend(const Args& args, dim3 grid, cudaStream_t stream) {
  reference::attend_partition<T><<<grid, kThreads, 0, stream>>>(args);
}

using Attend = void (*)(const Args&, dim3, cudaStream_t);

Attend attend_for(DType pool) {
  switch (pool) {
    case DType::kFloat32:
      return &attend<float>;
    case DType::kFloat16:
      return &attend<__half>;
    case DType::kBFloat16:
      return &attend<__nv_bfloat16>;
    case DType::kFloat8E4M3:
      return &attend<__nv_fp8_e4m3>;
    case DType::kFloat8E5M2:
      return &attend<__nv_fp8_e5m2>;
  }
  throw ArgumentError("pool", "unknown dtype");
}

}  // namespace

int64_t reference_workspace_bytes(const AttentionParams& params) { return Plan(params).end; }

void reference_attention(const AttentionParams& params, const CudaLaunch& launch) {
  const Plan plan(params);
  auto* workspace = static_cast<char*>(launch.workspace.data);
  auto* starts = reinterpret_cast<int32_t*>(workspace + plan.starts);
  reference::scan_query_lens<<<1, kThreads, 0, launch.stream>>>(params.query_lens, params.num_seqs, starts);
  check_launch("scan_query_lens");

  Args args;
  args.p = params;
  args.query_starts = starts;
  args.num_partitions = plan.num_partitions;
  args.group = static_cast<int>(params.group_size());
  args.max_logits = reinterpret_cast<float*>(workspace + plan.max_logits);
  args.exp_sums = reinterpret_cast<float*>(workspace + plan.exp_sums);
  args.tmp_out = reinterpret_cast<float*>(workspace + plan.tmp_out);
  const auto partitions = static_cast<unsigned>(plan.num_partitions), heads = static_cast<unsigned>(params.num_heads);
  const Attend attend = attend_for(params.pool.dtype);
  for (; args.first_token < params.num_tokens; args.first_token += plan.slice_tokens) {
    const auto tokens = static_cast<unsigned>(std::min(plan.slice_tokens, params.num_tokens - args.first_token));
    attend(args, dim3(partitions, heads, tokens), launch.stream);
    check_launch("attend_partition");
    if (plan.num_partitions == 1) continue;
    reference::reduce_partitions<<<dim3(heads, tokens), kThreads, 0, launch.stream>>>(args);
    check_launch("reduce_partitions");
  }
}

}  // namespace kvservice
