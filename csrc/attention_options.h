// Options of paged attention, and the one check of their values in C++. `AttentionOptions.check` of
// kvservice/attention_options.py is the same check in Python: it raises errors with the same fields and texts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "errors.h"
#include "pool.h"

namespace kvservice {

// The keys that a head sees (vLLM's block-sparse attention), in sparse blocks of `block_size` tokens from position 0.
// `block_size` is a multiple of the pool's block size. A head sees the last `local_blocks` sparse blocks, the query's
// own included, and every block b with (b + offset) % vert_stride == 0. The offset depends on the head, counted from
// tensor-parallel rank 0: query head * head_sliding_step + 1, or, if that step is negative, KV head *
// -head_sliding_step + 1.
struct BlockSparse {
  int32_t vert_stride = 0;  // 0 or 1: off
  int32_t local_blocks = 0;
  int32_t block_size = 64;
  int32_t head_sliding_step = 0;
  int32_t tp_rank = 0;

  KVSERVICE_DEVICE bool on() const { return vert_stride > 1; }
};

struct AttentionOptions {
  float scale = 1.0F;
  float soft_cap = 0.0F;       // 0: off
  int64_t sliding_window = 0;  // 0: off
  BlockSparse sparse;
};

// Throws ArgumentError if an option is invalid for a pool with blocks of `block_size` tokens. The error's field is
// `prefix` and the option's name.
inline void check_options(const AttentionOptions& options, int64_t block_size, const std::string& prefix) {
  const auto check = [&](bool condition, const char* name, const char* message) {
    if (!condition) throw ArgumentError(prefix + name, message);
  };
  check(std::isfinite(options.scale), "scale", "is not finite");
  check(options.sliding_window >= 0, "sliding_window", "is negative");
  check(std::isfinite(options.soft_cap), "logits_soft_cap", "is not finite");
  check(options.soft_cap >= 0.0F, "logits_soft_cap", "is negative");
  const BlockSparse& sparse = options.sparse;
  check(sparse.vert_stride >= 0, "block_sparse.vert_stride", "is negative");
  if (!sparse.on()) return;
  check(sparse.local_blocks >= 1, "block_sparse.local_blocks", "is less than 1");
  check(sparse.block_size >= 1, "block_sparse.block_size", "is less than 1");
  check(sparse.block_size % block_size == 0, "block_sparse.block_size", "is not a multiple of the pool's block size");
  check(sparse.tp_rank >= 0, "block_sparse.tp_rank", "is negative");
}

// The same for ALiBi slopes `[num_heads]` in host memory.
inline void check_slopes(const float* slopes, int64_t num_heads, const std::string& prefix) {
  const bool finite = std::all_of(slopes, slopes + num_heads, [](float slope) { return std::isfinite(slope); });
  if (!finite) throw ArgumentError(prefix + "alibi_slopes", "are not all finite");
}

}  // namespace kvservice
