// Copies whole blocks between pools, at least one of which is on a CUDA device.
#pragma once

#include "../copy_blocks.h"
#include "cuda/runtime.h"

namespace kvservice {

// The ids are in host memory and checked (check_copy_blocks); they are not read after the call. Host pools are pinned.
// Consecutive blocks in both pools form one copy.
void copy_blocks_cuda(const CopyBlocksParams& params, cudaStream_t stream);

}  // namespace kvservice
