// Writes keys and values into the pool by slot (block_id * block_size + offset), and reads them back.
//
//   slots       [num_tokens]
//   key, value  [num_tokens, num_kv_heads, head_size]
#pragma once

#include "pool.h"

namespace kvservice {

struct KvSlotsParams {
  PoolView pool;
  DType dtype = DType::kFloat32;   // of key and value; equals the pool's unless that is FP8
  const float* k_scale = nullptr;  // [num_kv_heads] of this layer or null: stored value = key / scale
  const float* v_scale = nullptr;
  int64_t layer = 0;
  int64_t num_tokens = 0;
  const int64_t* slots = nullptr;
  char* key = nullptr;
  char* value = nullptr;
};

// Throws ArgumentError naming `field` if a slot is outside the pool.
void check_slots(const KvSlotsParams& params, const char* field);

// If a slot occurs twice, the later token wins.
void write_kv_cpu(const KvSlotsParams& params);

void read_kv_cpu(const KvSlotsParams& params);

}  // namespace kvservice
