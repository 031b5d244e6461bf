// Keys and values by slot on a CUDA device: all pointers are the device's, slots outside the pool are skipped.
#pragma once

#include "../kv_slots.h"
#include "cuda/runtime.h"

namespace kvservice {

// Converts where the pool is an 8-bit one (value over scale, rounded to nearest even, saturating). A slot must not
// occur twice.
void write_kv_cuda(const KvSlotsParams& params, cudaStream_t stream);

// `key` and `value` get the stored value times scale.
void read_kv_cuda(const KvSlotsParams& params, cudaStream_t stream);

}  // namespace kvservice
