// Copies whole blocks between two pools or within one. A block is one contiguous range of bytes.
#pragma once

#include <cstdint>

namespace kvservice {

struct CopyBlocksParams {
  const char* src = nullptr;
  char* dst = nullptr;
  int64_t num_src_blocks = 0;
  int64_t num_dst_blocks = 0;
  int64_t block_bytes = 0;
  int64_t num_copies = 0;
  const int32_t* src_ids = nullptr;
  const int32_t* dst_ids = nullptr;
};

// Throws ArgumentError if an id is outside its pool, if a destination occurs twice, or if, within one pool, a source is
// also a destination.
void check_copy_blocks(const CopyBlocksParams& params);

void copy_blocks_cpu(const CopyBlocksParams& params);

}  // namespace kvservice
