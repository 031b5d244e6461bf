// Whole blocks from one pool to another or within one: a block is one contiguous run of bytes.
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

// Throws ArgumentError where an id lies outside its pool, a destination occurs twice, or, within one pool, a source
// is also a destination.
void check_copy_blocks(const CopyBlocksParams& params);

void copy_blocks_cpu(const CopyBlocksParams& params);

}  // namespace kvservice
