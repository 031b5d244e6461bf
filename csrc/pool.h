// The pool as kernels see it: plain pointers, sizes and strides.
//
//   pool[num_blocks][num_layers][K,V][num_kv_heads][...]
//     K of one (block, layer, head): [head_size/x][block_size][x]   x = 16 bytes / element size
//     V of one (block, layer, head): [head_size][block_size]
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVSERVICE_DEVICE __host__ __device__
#else
#define KVSERVICE_DEVICE
#endif

namespace kvservice {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8E4M3 = 3, kFloat8E5M2 = 4 };

// The first kNumDTypes types are those of queries and outputs, and those that the CPU kernels support.
constexpr int kNumDTypes = 3;

// K is divided along the head dimension into pieces of this many bytes.
constexpr int64_t kKeyPieceBytes = 16;

KVSERVICE_DEVICE constexpr bool is_float8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

KVSERVICE_DEVICE constexpr int64_t item_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : is_float8(dtype) ? 1 : 2;
}

struct PoolView {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t num_blocks = 0;
  int64_t num_layers = 0;
  int64_t num_kv_heads = 0;
  int64_t head_size = 0;
  int64_t block_size = 0;

  KVSERVICE_DEVICE int64_t head_bytes() const { return head_size * block_size * item_size(dtype); }
  KVSERVICE_DEVICE int64_t layer_bytes() const { return 2 * num_kv_heads * head_bytes(); }
  KVSERVICE_DEVICE int64_t block_bytes() const { return num_layers * layer_bytes(); }

  KVSERVICE_DEVICE char* key(int64_t block, int64_t layer, int64_t kv_head) const {
    return data + block * block_bytes() + layer * layer_bytes() + kv_head * head_bytes();
  }
  KVSERVICE_DEVICE char* value(int64_t block, int64_t layer, int64_t kv_head) const {
    return key(block, layer, kv_head) + num_kv_heads * head_bytes();
  }
};

}  // namespace kvservice
