// The tables of a decode step at fixed addresses, moved on by a kernel that a CUDA graph can contain.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace kvservice {

// One row for each sequence. All arrays are on the device.
struct DecodeTables {
  int64_t* positions = nullptr;           // [num_rows], of the last token; then of the next one
  const int64_t* growth = nullptr;        // [num_rows], added to positions
  const int64_t* shift = nullptr;         // [num_rows], added to slots
  const int32_t* block_tables = nullptr;  // [num_rows, max_blocks]
  int32_t* context_lens = nullptr;        // [num_rows], written: positions + 1
  int64_t* slot_mapping = nullptr;        // [num_rows], written; -1 for positions outside the block tables
  int64_t num_rows = 0;
  int64_t max_blocks = 0;
  int64_t block_size = 0;
};

void advance_tables_cuda(const DecodeTables& tables, cudaStream_t stream);

}  // namespace kvservice
