#include "cuda/decode_variants.cuh"

namespace kvservice::decode {

const Variant* e4m3_variant(int head_size, int columns) { return find_variant<half, Cache::kE4M3>(head_size, columns); }

}  // namespace kvservice::decode
