#include "copy_blocks.h"

#include <cstring>
#include <string>
#include <unordered_set>

#include "cpu/parallel.h"
#include "errors.h"

namespace kvservice {
namespace {

// Below this many bytes, waking another thread costs more than it saves.
constexpr int64_t kInlineBytes = 256 * 1024;

void check_ids(const int32_t* ids, int64_t count, int64_t num_blocks, const char* field) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_blocks) {
      throw ArgumentError(field, "block id " + std::to_string(ids[i]) + " at index " + std::to_string(i) +
                                     " is outside a pool of " + std::to_string(num_blocks) + " blocks");
    }
  }
}

}  // namespace

void check_copy_blocks(const CopyBlocksParams& p) {
  check_ids(p.src_ids, p.num_copies, p.num_src_blocks, "src_ids");
  check_ids(p.dst_ids, p.num_copies, p.num_dst_blocks, "dst_ids");
  std::unordered_set<int32_t> written;
  for (int64_t i = 0; i < p.num_copies; ++i) {
    if (!written.insert(p.dst_ids[i]).second) {
      throw ArgumentError("dst_ids", "block " + std::to_string(p.dst_ids[i]) + " is written twice");
    }
  }
  if (p.src != p.dst) return;
  for (int64_t i = 0; i < p.num_copies; ++i) {
    if (written.count(p.src_ids[i]) != 0) {
      throw ArgumentError("src_ids", "block " + std::to_string(p.src_ids[i]) + " is read and written in one call");
    }
  }
}

void copy_blocks_cpu(const CopyBlocksParams& p) {
  const auto copy = [&](int64_t i) {
    std::memcpy(p.dst + p.dst_ids[i] * p.block_bytes, p.src + p.src_ids[i] * p.block_bytes,
                static_cast<size_t>(p.block_bytes));
  };
  if (p.num_copies * p.block_bytes <= kInlineBytes) {
    for (int64_t i = 0; i < p.num_copies; ++i) copy(i);
  } else {
    parallel_for(p.num_copies, copy);
  }
}

}  // namespace kvservice
