// Keys and values by slot on a CUDA device. All pointers are device pointers; slots outside the pool are skipped.
#pragma once

#include "../kv_slots.h"
#include "cuda/runtime.h"

namespace kvservice {

// Converts if the pool is FP8 (value divided by scale, rounded to nearest even, saturating). A slot must not occur
// twice.
void write_kv_cuda(const KvSlotsParams& params, cudaStream_t stream);

// A copy that runs in thread blocks of its own within the same launch, from pinned host memory to the device. For small
// sizes, a separate launch or the copy engine takes longer to start than the copy itself. Both addresses and the number
// of bytes are multiples of 16.
struct FusedCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
};
constexpr int64_t kFusedCopyBytesMax = 1 << 20;

void write_kv_cuda(const KvSlotsParams& params, const FusedCopy& copy, cudaStream_t stream);

// `key` and `value` receive the stored value times scale.
void read_kv_cuda(const KvSlotsParams& params, cudaStream_t stream);

}  // namespace kvservice
