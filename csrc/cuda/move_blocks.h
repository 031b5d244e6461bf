// Copies blocks between their pieces in device memory and pinned host memory.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace kvservice {

// Blocks whose bytes lie in pieces on the device: piece p of block b are the bytes from starts[p] + b * strides[p] on.
// In host memory a block is contiguous. Everything is a multiple of 16 bytes: addresses, strides and sizes.
struct MoveBlocksParams {
  const int64_t* pieces = nullptr;  // on the device: starts, strides and, in bytes of a block, ends [3, num_pieces]
  int64_t num_pieces = 0;
  int64_t block_bytes = 0;  // the last end
  int64_t num_copies = 0;
  const int64_t* host_pieces = nullptr;  // the same table in host memory; nullptr: a kernel copies, in any case
  const uint64_t* addresses = nullptr;   // [num_copies], pinned memory of this process
  const int64_t* block_ids = nullptr;    // [num_copies], on the device. Distinct if blocks are written to the device
};

// Receives the checksums of saved blocks (store/checksum.h).
struct BlockChecksums {
  uint64_t* sums = nullptr;    // [num_copies, 16], scratch memory on the device
  uint64_t* values = nullptr;  // [num_copies], pinned
};

// `addresses`, `block_ids` and `host_pieces` are in host memory and are not read after the call. Large pieces are
// copied by the copy engines, which take nothing from kernels of other streams, if `host_pieces` are given; all else is
// copied by few thread blocks.
void load_blocks_cuda(const MoveBlocksParams& params, cudaStream_t stream);  // to the device
void save_blocks_cuda(const MoveBlocksParams& params, const BlockChecksums& checksums,
                      cudaStream_t stream);  // to host memory

}  // namespace kvservice
