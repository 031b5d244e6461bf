// Whole blocks between pools, of which at least one is a CUDA device's.
#pragma once

#include "../copy_blocks.h"
#include "cuda/runtime.h"

namespace kvservice {

// Ids are in host memory and checked (check_copy_blocks); they are not read after the call. Pools in host memory are
// page-locked. Blocks that follow each other in both pools travel as one copy.
void copy_blocks_cuda(const CopyBlocksParams& params, cudaStream_t stream);

}  // namespace kvservice
