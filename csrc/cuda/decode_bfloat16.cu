#include "cuda/decode_variants.cuh"

namespace kvservice::decode {

const Variant* bfloat16_variant(int head_size, int columns) {
  return find_variant<__nv_bfloat16, Cache::kSame>(head_size, columns);
}

}  // namespace kvservice::decode
