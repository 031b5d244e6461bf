// 16-bit floating-point storage types. Arithmetic is always in float.
#pragma once

#include <cstdint>

namespace kvservice {

struct fp16 {
  uint16_t bits;
};

struct bf16 {
  uint16_t bits;
};

}  // namespace kvservice
