#include "cuda/decode_variants.cuh"

namespace kvservice::decode {

const Variant* half_variant(int head_size, int columns) { return find_variant<half, Cache::kSame>(head_size, columns); }

}  // namespace kvservice::decode
