// Copies blocks between their pieces in device memory and pinned host memory.
#pragma once

#include <cstdint>
#include <mutex>

#include "cuda/runtime.h"

namespace kvservice {

// Blocks whose bytes lie in pieces on the device: piece p of block b are the bytes from starts[p] + b * strides[p] on.
// In host memory a block is contiguous. Everything is a multiple of 16 bytes: addresses, strides and sizes. `addresses`
// and `block_ids` are in host memory and are not read after the call.
struct MoveBlocksParams {
  const int64_t* pieces = nullptr;  // on the device: starts, strides and, in bytes of a block, ends [3, num_pieces]
  int64_t num_pieces = 0;
  int64_t block_bytes = 0;  // the last end
  int64_t num_copies = 0;
  const uint64_t* addresses = nullptr;  // [num_copies], pinned memory of this process
  const int64_t* block_ids = nullptr;   // [num_copies], on the device. Distinct if blocks are written to the device
};

// Receives the checksums of saved blocks (store/checksum.h).
struct BlockChecksums {
  uint64_t* sums = nullptr;    // [num_copies, 16], scratch memory on the device
  uint64_t* values = nullptr;  // [num_copies], pinned
};

// Device memory through which blocks pass. All calls use the same `stream`, and have ended when it has reached what
// they have put there. Threads may share an object.
class BlockStage {
 public:
  // `num_bytes` is a multiple of 64 KiB. Throws CudaError.
  BlockStage(int device, int64_t num_bytes);
  ~BlockStage();
  BlockStage(const BlockStage&) = delete;
  BlockStage& operator=(const BlockStage&) = delete;

  // To the device. Host memory may be read before the stream has reached this: only the blocks wait for it.
  void load(const MoveBlocksParams& params, cudaStream_t stream);
  // To host memory. Waits until all but the last parts of the blocks have been copied.
  void save(const MoveBlocksParams& params, const BlockChecksums& checksums, cudaStream_t stream);
  // Waits for all copies over the link, also those of a call that has failed in the middle.
  void synchronize();

 private:
  struct Half {
    void* memory = nullptr;
    cudaEvent_t filled = nullptr;
    cudaEvent_t emptied = nullptr;
  };

  Half& next();
  void free();

  int device_;
  int64_t half_bytes_;
  cudaStream_t link_ = nullptr;
  Half halves_[2];
  int next_ = 0;
  std::mutex mutex_;
};

}  // namespace kvservice
