// Keys and values by slot on a CUDA device: all pointers are the device's, slots outside the pool are skipped.
#pragma once

#include "../kv_slots.h"
#include "cuda/runtime.h"

namespace kvservice {

// Converts where the pool is an 8-bit one (value over scale, rounded to nearest even, saturating). A slot must not
// occur twice.
void write_kv_cuda(const KvSlotsParams& params, cudaStream_t stream);

// Bytes that a launch copies as well, by thread blocks of its own: from page-locked host memory to the device's, where
// a launch of its own, or the copy engine, would take longer to begin than the copy takes. Both addresses and the
// number of bytes are multiples of 16.
struct CopyBeside {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
};
constexpr int64_t kMostBytesBeside = 1 << 20;

void write_kv_cuda(const KvSlotsParams& params, const CopyBeside& copy, cudaStream_t stream);

// `key` and `value` get the stored value times scale.
void read_kv_cuda(const KvSlotsParams& params, cudaStream_t stream);

}  // namespace kvservice
