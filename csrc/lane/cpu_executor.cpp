#include "lane/cpu_executor.h"

#include <algorithm>
#include <mutex>

#include "kv_slots.h"

namespace kvservice {
namespace {

size_t size_class(const AttentionParams& p, int64_t row_bytes) {
  int64_t scores = 0;
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) scores += int64_t{p.query_lens[seq]} * p.context_lens[seq];
  const auto* found = std::lower_bound(kSizeClasses.begin(), kSizeClasses.end(), scores * row_bytes);
  return static_cast<size_t>(found - kSizeClasses.begin());
}

}  // namespace

CpuLaneExecutor::CpuLaneExecutor(const PoolView& pool, bool batch_invariant)
    : pool_(pool),
      shape_{pool.num_layers, pool.num_kv_heads, pool.head_size, pool.block_size, item_size(pool.dtype), false},
      batch_invariant_(batch_invariant) {}

void CpuLaneExecutor::attend(const LaneCall& call) {
  const LaneTables& tables = call.step->host;
  const KvSlotsParams slots = kv_slots_params(call, pool_, pool_.dtype, tables);
  const AttentionParams attention = attention_params(call, pool_, pool_.dtype, tables);
  const int64_t row_bytes = call.num_heads * pool_.head_size * item_size(pool_.dtype);
  const std::lock_guard<FairMutex> lock(turns_[size_class(attention, row_bytes)]);
  check_slots(slots, "slot_mapping");
  check_attention(attention);
  write_kv_cpu(slots);
  if (batch_invariant_) {
    attend_one_by_one(attention);
  } else {
    attention_cpu(attention);
  }
}

void CpuLaneExecutor::attend_one_by_one(const AttentionParams& whole) const {
  const int64_t row_bytes = whole.num_heads * pool_.head_size * item_size(pool_.dtype);
  AttentionParams one = whole;
  one.num_seqs = 1;
  int64_t first_token = 0;
  for (int64_t seq = 0; seq < whole.num_seqs; ++seq) {
    one.num_tokens = whole.query_lens[seq];
    one.query = static_cast<const char*>(whole.query) + first_token * row_bytes;
    one.out = static_cast<char*>(whole.out) + first_token * row_bytes;
    if (whole.lse != nullptr) one.lse = whole.lse + first_token * whole.num_heads;
    one.query_lens = whole.query_lens + seq;
    one.context_lens = whole.context_lens + seq;
    one.block_tables = whole.block_tables + seq * whole.max_blocks;
    attention_cpu(one);
    first_token += one.num_tokens;
  }
}

}  // namespace kvservice
