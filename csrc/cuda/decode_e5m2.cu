#include "cuda/decode_variants.cuh"

namespace kvservice::decode {

const Variant* e5m2_variant(int head_size, int columns) { return find_variant<half, Cache::kE5M2>(head_size, columns); }

}  // namespace kvservice::decode
